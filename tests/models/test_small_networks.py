"""The networks for tables and series: sizes, cuts, and what they cannot read."""

from __future__ import annotations

import pytest
import torch

from polyfed.errors import ConfigError
from polyfed.models import build, describe

MLPS = ("mlp-64-32", "mlp-64-64-32")


def test_cuts_and_names_are_common() -> None:
    models = [build(name, (5,), 3) for name in MLPS]
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


def test_a_narrow_network_shares_no_name_of_another_shape() -> None:
    """Layers are averaged by name."""
    narrow, wide = (build(name, (5,), 3).state_dict() for name in ("mlp-16-32", "mlp-64-64-32"))
    assert {name for name in narrow if name in wide} == {"head.weight", "head.bias"}


def test_a_network_without_vectors_refuses_categories() -> None:
    """Numbers of categories mean nothing by themselves."""
    with pytest.raises(ConfigError, match="'digits-cnn1' cannot embed the categories of a table; expected a network"):
        build("digits-cnn1", (3,), 2, categories=(0, 4, 0))


NAMES = ["cnn1d-16", "cnn1d-32", "cnn1d-64", "gru-32", "gru-64", "tcn-32", "tcn-64", "series-transformer"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("shape", "words"), [((6, 100), None), ((40,), 30)])
def test_parts_make_the_whole(name: str, shape: tuple[int, ...], words: int | None) -> None:
    """All end in the same 64 features, whatever they read, so that methods that compare them can mix them."""
    model = build(name, shape, 7, words=words).eval()
    x = torch.rand(3, *shape) if words is None else torch.randint(0, words, (3, *shape))
    logits = model(x)
    assert torch.equal(logits, model.head(model.transform(model.extract(x))))
    assert logits.shape == (3, 7)
    assert model.feature_dim == 64
    assert all(part in {"extractor", "intermediate", "head"} for part in map(model.part_of, model.state_dict()))


def test_parameters_on_windows_of_six_channels() -> None:
    counted = {row["name"]: row["parameters"] for row in describe() if row["name"] in NAMES}
    assert counted == {
        **{"cnn1d-16": 5_655, "cnn1d-32": 15_911, "cnn1d-64": 51_783, "gru-32": 6_407, "gru-64": 18_439},
        **{"tcn-32": 21_799, "tcn-64": 79_943, "series-transformer": 63_735},
    }


@pytest.mark.parametrize("name", ["tcn-32", "gru-32"])
def test_every_step_may_count(name: str) -> None:
    """The last step sees the steps before it: the TCN's reach is 1 + 2 + 2 * 2 * (2 + 4 + 8) = 59 steps."""
    torch.manual_seed(0)
    model = build(name, (2, 70), 3)
    x = torch.randn(1, 2, 70, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    used = x.grad.abs().sum(dim=(0, 1)).nonzero().flatten()
    first = 70 - 59 if name == "tcn-32" else 0
    assert int(used.min()) == first
    assert int(used.max()) == 69


@pytest.mark.parametrize(
    ("name", "shape", "words", "problem"),
    [
        ("cnn1d-16", (3, 8, 8), None, "series"),
        ("series-transformer", (6, 25), None, "multiple of 10"),
        ("gru-32", (6, 100), torch.zeros(3, 4), "leave out data.word_vectors"),
        ("cnn1d-16", (6, 3), None, "at least 4 steps"),
    ],
)
def test_what_they_cannot_read_is_refused(
    name: str, shape: tuple[int, ...], words: torch.Tensor | None, problem: str
) -> None:
    """In one line."""
    with pytest.raises(ConfigError, match=problem):
        build(name, shape, 7, words=words)
