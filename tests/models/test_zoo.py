"""The registered networks: the counts, cuts and names of the papers, and images of other sizes; split models."""

from __future__ import annotations

import itertools
import re
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyfed
from polyfed.errors import ConfigError
from polyfed.functional.network_blocks import blocks
from polyfed.models import SequentialSplit, SplitModel, build, cut_shapes, with_projection
from polyfed.models.networks.vit import DEPTHS, Attention, Block, vision_transformer
from polyfed.models.zoo import page, without_memory
from polyfed.registry import MODELS
from tests.helpers.quick import others_slow
from tests.helpers.refusals import refusal

RGB32, DIGIT, LARGE = (3, 32, 32), (1, 8, 8), (3, 224, 224)
RESNETS = [f"resnet{depth}" for depth in (10, 14, 18, 22, 26)]
SMALL_RESNETS = [f"resnet{depth}-gn" for depth in (8, 10, 12, 14)]
NAMES = [f"vit-s{depth}" for depth in DEPTHS]
HALVES = [f"{name}-half" for name in NAMES]
FEDGH = [f"fedgh-cnn{i}" for i in range(1, 6)]
FEDHENN = ["fedhenn-cifar10", "fedhenn-cifar100", *(f"fedhenn-h{i}" for i in range(1, 6))]
OF_SERIES = ["cnn1d-16", "cnn1d-32", "cnn1d-64", "series-transformer"]
LSTMS = ["fedhenn-lstm1", "fedhenn-lstm2"]
DIGITS = [f"digits-cnn{i}" for i in range(1, 6)]


def on_meta(name: str, in_shape: tuple[int, ...] = RGB32, classes: int = 10) -> SplitModel:
    """The network without its memory, for counting."""
    with torch.device("meta"):
        return build(name, in_shape, classes)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("names", "in_shape", "classes", "counts"),
    [
        (FEDGH, RGB32, 10, [2_621_558, 1_815_142, 1_320_558, 1_060_358, 670_058]),
        (FEDGH, RGB32, 100, [2_666_648, 1_860_232, 1_365_648, 1_105_448, 715_148]),
        (FEDHENN, RGB32, 10, [307_842, 1_063_434, 65_162, 404_554, 300_658, 307_842, 781_962]),
        (FEDHENN, RGB32, 100, [313_692, 1_075_044, 629_732, 410_404, 1_054_948, 1_075_044, 793_572]),
        (RESNETS, RGB32, 10, [4_910_922, 10_812_234, 11_181_642, 17_082_954, 17_452_362]),  # a mean of 12 288 023
        (RESNETS, (1, 32, 32), 10, [4_904_650, 10_805_962, 11_175_370, 17_076_682, 17_446_090]),
        (SMALL_RESNETS, RGB32, 10, [78_042, 152_026, 170_586, 175_258]),
        (DIGITS, DIGIT, 10, [17_258, 41_962, 13_706, 22_954, 40_394]),
        (NAMES, LARGE, 10, [14_571_658, 16_346_122, 18_120_586, 19_895_050, 21_669_514]),
        (NAMES, RGB32, 10, [14_244_490, 16_018_954, 17_793_418, 19_567_882, 21_342_346]),
        (HALVES, LARGE, 10, [3_746_890, 4_191_754, 4_636_618, 5_081_482, 5_526_346]),
        (HALVES, RGB32, 10, [3_583_306, 4_028_170, 4_473_034, 4_917_898, 5_362_762]),
        (OF_SERIES, (6, 100), 7, [5_655, 15_911, 51_783, 63_735]),
        (LSTMS, (6,), 2, [221_472 + 5002 * 300, 353_568 + 5002 * 300]),  # and vectors for 5002 ids
        (["text-transformer"], (25,), 2, [101_826 + 5002 * 64]),
    ],
)
def test_counts(names: list[str], in_shape: tuple[int, ...], classes: int, counts: list[int]) -> None:
    assert [count(on_meta(name, in_shape, classes)) for name in names] == counts


@pytest.mark.parametrize(
    ("names", "stage", "numbers"),
    [
        (RESNETS, "stage4.", range(3)),
        ([f"{name}-cifar" for name in RESNETS], "stage1.", range(3)),
        (SMALL_RESNETS, "stage1.", range(2)),
        (NAMES, "block", range(2, 13)),
        (HALVES, "block", range(2, 13)),
    ],
)
def test_networks_are_nested_by_name_and_shape(names: list[str], stage: str, numbers: range) -> None:
    shapes = [{key: tensor.shape for key, tensor in on_meta(name).state_dict().items()} for name in names]
    for smaller, larger in itertools.pairwise(shapes):
        assert smaller.items() < larger.items()
    assert list(blocks(shapes[-1])[f"intermediate.{stage}"]) == list(numbers)


@pytest.mark.parametrize(
    ("names", "in_shape", "s_in", "s_out"),
    [
        (RESNETS[:1] + RESNETS[-1:], RGB32, (64, 8, 8), (512,)),
        (SMALL_RESNETS, RGB32, (16, 32, 32), (64,)),
        (FEDGH, RGB32, (16, 14, 14), (500,)),
        (["fedhenn-h1"], RGB32, (32, 14, 14), (6272,)),
        (["fedhenn-h5"], RGB32, (64, 16, 16), (128,)),
        (DIGITS, DIGIT, (16, 4, 4), (64,)),
    ],
)
def test_cut_shapes(names: list[str], in_shape: tuple[int, ...], s_in: tuple[int, ...], s_out: tuple[int, ...]) -> None:
    for name in names:
        model = build(name, in_shape, 10)
        assert cut_shapes(model, torch.rand(1, *in_shape)) == (s_in, s_out)
        assert model.feature_dim == s_out[0]


@pytest.mark.parametrize("name", others_slow(["digits-cnn1", "resnet10-cifar", "vit-s8-half"], quick=["vit-s8-half"]))
def test_without_memory_there_are_shapes_and_no_values(name: str) -> None:
    shape = (1, 8, 8) if name == "digits-cnn1" else (3, 32, 32) if name == "resnet10-cifar" else (3, 224, 224)
    with without_memory():
        weightless = build(name, shape, 10).state_dict()
    weighty = build(name, shape, 10).state_dict()
    assert {key: tensor.shape for key, tensor in weightless.items()} == {k: t.shape for k, t in weighty.items()}
    assert {tensor.device.type for tensor in weightless.values()} == {"meta"}
    drawn = [tensor for key, tensor in weighty.items() if key.endswith("weight") and tensor.dim() > 1]
    assert all(len(tensor.unique()) > 1 for tensor in drawn), "afterwards weights are drawn again"


def test_home_data_are_described_truthfully() -> None:
    rows = {name: page(name) for name in MODELS}
    for name, row in rows.items():
        model = on_meta(name, row["in_shape"], row["classes"])
        assert (row["parameters"], row["feature_dim"]) == (count(model), model.feature_dim)
        assert model.architecture == name
        assert row["paper"]
    assert rows["fedhenn-cifar100"]["classes"] == 100
    assert rows["digits-cnn1"]["in_shape"] == DIGIT


SERIES = ("cnn1d", "series", "harcnn")
TEXTS = ("fedhenn-lstm", "text-", "fasttext")
LIGHT = [name for name in MODELS if not name.startswith(("resnet", "vit", *TEXTS, *SERIES))]
PARTS: list[tuple[str, tuple[int, ...], int | None]] = [
    *((name, DIGIT if name.startswith("digits") else (1, 28, 28), None) for name in LIGHT),
    *((name, DIGIT, None) for name in ("resnet10", "resnet18", "resnet10-cifar", "resnet8-gn")),
    *((name, (6, 100), None) for name in OF_SERIES),
    *((name, (40,), 30) for name in (*LSTMS, "text-transformer")),
]


@pytest.mark.parametrize(("name", "shape", "words"), PARTS)
def test_parts_make_the_whole(name: str, shape: tuple[int, ...], words: int | None) -> None:
    model = build(name, shape, 7, words=words).eval()
    x = torch.rand(3, *shape) if words is None else torch.randint(0, words, (3, *shape))
    with torch.no_grad():
        logits = model(x)
        assert torch.equal(logits, model.head(model.transform(model.extract(x))))
    assert logits.shape == (3, 7)
    assert model.head.get_parameter("weight").shape == (7, model.feature_dim)
    assert name not in OF_SERIES or model.feature_dim == 64  # so that methods can mix them
    parts = [model.names("extractor"), model.names("intermediate"), model.names("head")]
    assert sum(parts, ()) == tuple(model.state_dict())
    assert parts[2] == ("head.weight", "head.bias")
    assert all(model.part_of(key) == "extractor" for key in parts[0])
    assert model.export().keys() == model.state_dict().keys()


# build: names, builders of one's own, errors ------------------------------------------------------------------------


def broken(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    raise ValueError("out of paint\nsecond line")


OWN = SimpleNamespace(broken=broken, no_split=lambda in_shape, classes: nn.Linear(in_shape[0], classes), three=3)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.nets:net", "cannot import model 'nowhere.nets:net': ModuleNotFoundError"),
        ("my_nets:missing", "has no attribute 'missing'"),
        ("my_nets:three", "should be a function"),
        ("my_nets:no_split", "should return a SplitModel, or a module with an nn.Linear of 3 outputs"),
        ("my_nets:broken", "failed: ValueError: out of paint"),
        ("resnet11", "did you mean 'resnet1"),
    ],
)
def test_build_errors_are_one_line(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_nets", OWN)
    assert says in refusal(lambda: build(name, DIGIT, 3))


@pytest.mark.parametrize(
    ("name", "in_shape", "classes", "says"),
    [
        ("fedgh-cnn1", DIGIT, 10, "at least 16 x 16, got 8 x 8"),
        ("resnet18", (3, 7, 32), 10, "at least 8 x 8, got 7 x 32"),
        ("digits-cnn1", (8, 8), 10, r"\(channels, height, width\), got the shape \(8, 8\)"),
        ("resnet10", (0, 8, 8), 10, "got"),
        ("resnet10", (1, 8, 8), 0, "at least one class, got 0"),
        ("vit-s9", (3, 30, 30), 10, r"at least 8 x 8 .* multiples of 4, got 30 x 30: .*image_size = (28|32)\)$"),
        ("vit-s9", (3, 225, 225), 10, r"least 32 x 32 .* of 16, got 225 x 225: .*image_size = 224\)$"),
        ("cnn1d-16", (3, 8, 8), 7, "series"),
        ("cnn1d-16", (6, 3), 7, "at least 4 steps"),
        ("series-transformer", (6, 25), 7, "multiple of 10"),
    ],
)
def test_data_that_do_not_fit(name: str, in_shape: tuple[int, ...], classes: int, says: str) -> None:
    assert re.search(f"^{name} needs.*{says}", refusal(lambda: build(name, in_shape, classes)))


def test_unknown_names_and_parts() -> None:
    model = build("digits-cnn1", DIGIT, 10)
    with pytest.raises(ConfigError, match=r"digits-cnn1 has no tensor 'body\.weight'"):
        model.part_of("body.weight")
    with pytest.raises(ConfigError, match="unknown part 'body'"):
        model.names("body")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["digits-cnn2", "resnet10"])
def test_projection(name: str) -> None:
    model, x = build(name, DIGIT, 7).eval(), torch.rand(3, *DIGIT)
    wide = with_projection(model, 33).eval()
    assert (wide.feature_dim, wide.architecture) == (33, name)
    assert wide(x).shape == (3, 7)
    z = wide.represent(x)
    assert z.shape == (3, 33)
    assert z.min() == 0  # after the ReLU
    added = set(wide.state_dict()) - set(model.state_dict())
    assert added == {"intermediate.projection.weight", "intermediate.projection.bias"}
    assert all(wide.part_of(key) == "intermediate" for key in added)
    assert torch.equal(wide.extract(x), model.extract(x))
    assert model(x).shape == (3, 7)  # left alone
    assert not {p.data_ptr() for p in wide.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_projection_needs_a_width_and_a_linear_head() -> None:
    with pytest.raises(ConfigError, match="feature_dim must be a whole number of at least 1, got 0"):
        with_projection(build("digits-cnn1", DIGIT, 10), 0)
    head = nn.Sequential(OrderedDict(fc=nn.Linear(6, 3)))
    with pytest.raises(ConfigError, match="has no in_features"):
        SequentialSplit(nn.Flatten(), nn.Linear(64, 6), head)
    model = SequentialSplit(nn.Flatten(), nn.Linear(64, 6), head, feature_dim=6)
    with pytest.raises(ConfigError, match=r"needs a head that is an nn\.Linear; this one is a Sequential"):
        with_projection(model, 4)


# transformers for images --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_shape", "s_in"),
    [(LARGE, (197, 384)), (RGB32, (65, 384)), ((1, 28, 28), (50, 384)), ((3, 128, 160), (81, 384)), (DIGIT, (5, 384))],
)
def test_cuts(in_shape: tuple[int, int, int], s_in: tuple[int, int]) -> None:
    shallow = vision_transformer(in_shape, 10, depth=1)
    assert cut_shapes(shallow, torch.zeros(1, *in_shape)) == (s_in, (384,))
    assert shallow.feature_dim == 384
    registered = on_meta("vit-s8", in_shape).get_parameter("extractor.tokens.patches.weight")
    assert registered.shape[2:] == ((16, 16) if min(in_shape[1:]) >= 128 else (4, 4))


# what is computed --------------------------------------------------------------------------------------------------


def test_attention_is_torchs() -> None:
    torch.manual_seed(1)
    attention, x = Attention(12, 3), torch.randn(4, 5, 12)
    oracle = nn.MultiheadAttention(12, 3, batch_first=True)
    oracle.load_state_dict(
        {
            "in_proj_weight": attention.qkv.weight,
            "in_proj_bias": attention.qkv.bias,
            "out_proj.weight": attention.out.weight,
            "out_proj.bias": attention.out.bias,
        }
    )
    assert torch.allclose(attention(x), oracle(x, x, x)[0], atol=1e-6)


def test_a_block_is_torchs_layer_with_norms_first() -> None:
    torch.manual_seed(2)
    block, x = Block(12, 3), torch.randn(4, 5, 12)
    oracle = nn.TransformerEncoderLayer(12, 3, 48, 0.0, F.gelu, 1e-6, batch_first=True, norm_first=True)
    oracle.load_state_dict(dict(zip(oracle.state_dict(), _in_torchs_order(block), strict=True)))
    assert torch.allclose(block(x), oracle(x), atol=1e-6)


def _in_torchs_order(block: Block) -> list[Tensor]:
    attention, mlp = block.attention, block.mlp
    layers = [attention.qkv, attention.out, mlp.fc1, mlp.fc2, block.norm1, block.norm2]
    return [tensor.detach() for layer in layers for tensor in layer.parameters()]


def test_sizes_that_make_no_network() -> None:
    assert "heads 5" in refusal(lambda: vision_transformer(DIGIT, 4, depth=2, width=12, heads=5))


# networks for tables -------------------------------------------------------------------------------------------------


def test_networks_of_tables_have_common_cuts_and_names() -> None:
    models = [build(name, (5,), 3) for name in ("mlp-64-32", "mlp-64-64-32")]
    x = torch.rand(4, 5)
    assert {(tuple(m.extract(x).shape), tuple(m.represent(x).shape)) for m in models} == {((4, 64), (4, 32))}
    shapes = [{key: tensor.shape for key, tensor in model.state_dict().items()} for model in models]
    assert shapes[0].items() < shapes[1].items()


def test_categories_have_vectors_of_their_own() -> None:
    """A row's category decides by its vector alone: another vector, other logits; another code, its own vector."""
    torch.manual_seed(0)
    model = build("mlp-64-32", (3,), 2, categories=(0, 4, 0))
    x = torch.tensor([[0.5, 1.0, -1.0], [0.5, 2.0, -1.0]])
    before = model(x)
    assert not torch.equal(before[0], before[1])
    (vectors,) = [tensor for name, tensor in model.named_parameters() if "vectors" in name]
    assert vectors.shape == (4, 2)
    with torch.no_grad():
        vectors[2] += 1
    after = model(x)
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_a_network_without_vectors_refuses_categories() -> None:
    """Numbers of categories mean nothing by themselves."""
    with pytest.raises(ConfigError, match="'digits-cnn1' cannot embed the categories of a table; expected a network"):
        build("digits-cnn1", (3,), 2, categories=(0, 4, 0))


# networks for texts --------------------------------------------------------------------------------------------------


def made(name: str, words: int | Tensor = 12) -> SplitModel:
    torch.manual_seed(0)
    return build(name, (6,), 2, words=words).eval()


def test_the_lstm_is_torchs_on_packed_sequences() -> None:
    model = made("fedhenn-lstm2")
    x, lengths = torch.tensor([[3, 5, 4, 0], [7, 1, 2, 9], [2, 0, 0, 0]]), torch.tensor([3, 4, 1])
    part = model.extractor
    packed = nn.utils.rnn.pack_padded_sequence(part.embedding(x), lengths, batch_first=True, enforce_sorted=False)
    _, (state, _) = part.lstm(packed)
    torch.testing.assert_close(model.extract(x), state[-1], rtol=0, atol=1e-6)


def test_given_vectors_are_looked_up_and_stay() -> None:
    vectors = torch.randn(9, 5)
    model, x = made("fedhenn-lstm1", vectors), torch.tensor([[3, 5]])
    out, _ = model.extractor.lstm(vectors[x])
    torch.testing.assert_close(model.extract(x), out[:, -1])
    model(x).sum().backward()
    assert not model.extractor.vectors.requires_grad
    torch.testing.assert_close(model.extractor.vectors, vectors)
    assert sum(t.numel() for t in model.state_dict().values()) == count(model)  # vectors are not sent


# runs ----------------------------------------------------------------------------------------------------------------


def test_executors_agree_on_texts_bit_for_bit(tmp_path: Path) -> None:
    """The vectorized one trains one client after the other, as nn.LSTM cannot be stacked."""
    rows = [f"{'good fine' if row % 2 else 'bad'} day number {row % 5},{row % 2}" for row in range(40)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    texts = {"dataset": f"csv:{tmp_path / 'texts.csv'}", "text_column": "text", "vocab_size": 8, "max_length": 4}
    recipe = {
        "data": {**texts, "num_clients": 2, "holdout": 4},
        "models": {"architectures": LSTMS},
        "method": {"name": "fedhenn", "eta0": 1.0, "alignment_data": {"size": 4, "batch": 4}},
        "training": {"rounds": 2, "batch_size": 8},
    }
    serial, *others = (
        polyfed.run(polyfed.Recipe.from_dict({**recipe, "run": {"executor": executor, "workers": workers}})).models
        for executor, workers in (("serial", 1), ("processes", 2), ("vectorized", 2))
    )
    for models in others:
        for client, network in serial.items():
            state = models[client].state_dict()
            assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
