"""Vision Transformers: counts, cuts and names, what a block computes, images that do not fit, small federations."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.errors import ConfigError
from polyfed.functional.cross_layer import blocks
from polyfed.models import SplitModel, build, cut_shapes
from polyfed.models.vit import DEPTHS, Attention, Block, vision_transformer

LARGE, SMALL, TINY = (3, 224, 224), (3, 32, 32), (1, 8, 8)
NAMES = [f"vit-s{depth}" for depth in DEPTHS]
HALVES = [f"{name}-half" for name in NAMES]
CLASSES = 4


def on_meta(name: str, in_shape: tuple[int, int, int] = SMALL, classes: int = 10, **more: Any) -> SplitModel:
    """The network without its memory, for counting."""
    with torch.device("meta"):
        return build(name, in_shape, classes, **more)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# counts, cuts, names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "in_shape", "counts"),
    [
        (NAMES, LARGE, [14_571_658, 16_346_122, 18_120_586, 19_895_050, 21_669_514]),
        (NAMES, SMALL, [14_244_490, 16_018_954, 17_793_418, 19_567_882, 21_342_346]),
        (HALVES, LARGE, [3_746_890, 4_191_754, 4_636_618, 5_081_482, 5_526_346]),
        (HALVES, SMALL, [3_583_306, 4_028_170, 4_473_034, 4_917_898, 5_362_762]),
    ],
)
def test_counts(names: list[str], in_shape: tuple[int, int, int], counts: list[int]) -> None:
    assert [count(on_meta(name, in_shape)) for name in names] == counts
    assert {later - former for former, later in itertools.pairwise(counts)} == {
        1_774_464 if names == NAMES else 444_864
    }
    assert statistics.mean(counts) == counts[2]


@pytest.mark.parametrize(
    ("in_shape", "s_in"),
    [(LARGE, (197, 384)), (SMALL, (65, 384)), ((1, 28, 28), (50, 384)), ((3, 128, 160), (81, 384)), (TINY, (5, 384))],
)
def test_cuts(in_shape: tuple[int, int, int], s_in: tuple[int, int]) -> None:
    shallow = vision_transformer(in_shape, 10, depth=1)
    assert cut_shapes(shallow, torch.zeros(1, *in_shape)) == (s_in, (384,))
    assert shallow.feature_dim == 384
    registered = on_meta("vit-s8", in_shape).get_parameter("extractor.tokens.patches.weight")
    assert registered.shape[2:] == ((16, 16) if min(in_shape[1:]) >= 128 else (4, 4))


@pytest.mark.parametrize("names", [NAMES, HALVES])
def test_they_are_nested_by_name_and_shape(names: list[str]) -> None:
    shapes = [{key: tensor.shape for key, tensor in on_meta(name).state_dict().items()} for name in names]
    for smaller, larger in itertools.pairwise(shapes):
        assert smaller.items() < larger.items()
    found = blocks(shapes[-1])
    assert list(found["intermediate.block"]) == list(range(2, 13))
    assert found["intermediate.block"][2].keys() == found["extractor.block"][1].keys()


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


# what does not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_shape", "says"),
    [
        ((3, 30, 30), r"at least 8 x 8 whose sides are multiples of 4, got 30 x 30: .*image_size = (28|32)\)$"),
        ((3, 32, 34), r"multiples of 4, got 32 x 34: .*image_size = 32\)$"),
        ((3, 225, 225), r"at least 32 x 32 whose sides are multiples of 16, got 225 x 225: .*image_size = 224\)$"),
        ((1, 4, 4), r"at least 8 x 8 .*, got 4 x 4: .*image_size = 8\)$"),
        ((32, 32), r"\(channels, height, width\), got the shape \(32, 32\)"),
    ],
)
def test_images_that_do_not_fit_are_one_line(in_shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^vit-s9 needs images .*{says}") as caught:
        build("vit-s9", in_shape, 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"patch": 0}, {"heads": 5}, {"heads": 0}, {"width": 0}])
def test_sizes_that_make_no_network_are_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^vit needs depth, patch, width and heads of at least 1") as caught:
        vision_transformer(TINY, CLASSES, **{"depth": 2, "width": 12, "heads": 3, **wrong})
    assert "\n" not in str(caught.value)
    assert f"{next(iter(wrong))} {next(iter(wrong.values()))}" in str(caught.value)


# federations -------------------------------------------------------------------------------------------------------


def test_tokens_that_are_not_there_change_nothing():
    torch.manual_seed(0)
    block = Block(12, 3)
    tokens = torch.randn(2, 5, 12)
    there = torch.tensor([[True, True, True, False, False], [True] * 5])
    seen = block(tokens, there)
    assert torch.allclose(seen[:1, :3], block(tokens[:1, :3]), atol=1e-6)
    assert torch.allclose(seen[1:], block(tokens[1:]), atol=1e-6)
    assert not torch.allclose(seen[:1, :3], block(tokens)[:1, :3], atol=1e-3)
