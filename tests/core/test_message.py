"""Messages: names, copies, bytes and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from polyfed.core import message as messages
from polyfed.errors import ConfigError, RunError


def example() -> dict[str, Any]:
    return {
        "header": {"weight": torch.tensor([[1.5, -2.0]]), "steps": torch.tensor(3, dtype=torch.int32)},
        "n": torch.tensor(7),
        "nothing": {},
    }


def nested_list(state: Any) -> list[Any]:
    """A message by its names and values, in order."""
    return [
        (name, value.tolist() if isinstance(value, torch.Tensor) else nested_list(value))
        for name, value in state.items()
    ]


def test_names_are_joined_and_parted_again() -> None:
    flat = messages.flatten(example())
    assert list(flat) == ["header/weight", "header/steps", "n"]
    back = messages.unflatten(flat)
    assert nested_list(back) == nested_list({k: v for k, v in example().items() if k != "nothing"})
    deep = messages.unflatten({"a/b/c": torch.ones(1), "a/d": torch.zeros(1)})  # one level of groups, no more
    assert nested_list(deep) == [("a", [("b/c", [1.0]), ("d", [0.0])])]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"a/b": torch.ones(1)}, "without '/', got 'a/b'"),
        ({"n": 3}, r"got int as 'n'; write torch.tensor\(3\)"),
        ({"n": 0.5}, r"got float as 'n'; write torch.tensor\(0.5\)"),
        ({"n": "three"}, "got str as 'n'$"),
        ({"g": {"a": torch.ones(1), "b": [1]}}, "got list as 'g/b'$"),
    ],
)
def test_what_is_no_message(message: Any, text: str) -> None:
    with pytest.raises(RunError, match=text):
        messages.flatten(message)


@pytest.mark.parametrize("names", [["a", "a/b"], ["a/b", "a"]])
def test_a_name_is_a_tensor_or_a_group(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="'a' to be a tensor or a group, got both"):
        messages.unflatten({name: torch.ones(1) for name in names})


def test_bytes_and_back() -> None:
    shared = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    message: dict[str, Any] = {"a": shared, "b": {"same": shared, "turned": shared.T}, **example()}
    assert messages.nbytes(message) == 3 * 24 + 8 + 4 + 8
    back = messages.from_bytes(messages.to_bytes(message))
    expected = {name: value for name, value in message.items() if name != "nothing"}
    assert messages.flatten(back).keys() == messages.flatten(expected).keys()
    for name, value in messages.flatten(expected).items():
        found = messages.flatten(back)[name]
        assert torch.equal(found, value)
        assert (found.dtype, found.requires_grad) == (value.dtype, False)


@pytest.mark.parametrize("cut", [0, 3, 20, -1])
def test_bytes_that_are_no_message(cut: int) -> None:
    with pytest.raises(ConfigError, match="as safetensors, got"):
        messages.from_bytes(messages.to_bytes(example())[:cut])


def test_a_frozen_message_cannot_be_changed() -> None:
    message = example()
    frozen: Any = messages.freeze(message)
    assert nested_list(frozen) == nested_list(message)
    for part in (frozen, frozen["header"]):
        with pytest.raises(TypeError):
            part["n"] = torch.ones(1)
    message["header"]["late"] = torch.ones(1)
    message["late"] = torch.ones(1)
    assert nested_list(frozen) == nested_list(example())


def test_a_clone_has_tensors_of_its_own_in_the_plain_order() -> None:
    message = example()
    message["image"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    copy = messages.clone(message)
    assert nested_list(copy) == nested_list(message)
    for name, value in messages.flatten(copy).items():
        source = messages.flatten(message)[name]
        assert value.data_ptr() != source.data_ptr()
        assert value.is_contiguous()
        assert not value.requires_grad


def test_groups_and_tensors_by_name() -> None:
    message = example()
    assert messages.get_group(message, "header") is message["header"]
    assert messages.get_group(message, "nothing") == {}
    assert messages.get_tensor(message, "n") is message["n"]
    for get, wrong in ((messages.get_group, "n"), (messages.get_tensor, "header")):
        for name in (wrong, "absent"):
            with pytest.raises(RunError, match=rf"'{name}' in the message, got \['header', 'n', 'nothing'\]"):
                get(message, name)
        with pytest.raises(RunError, match="got an empty message"):
            get({}, "n")


def test_the_first_number_that_is_none() -> None:
    large = torch.full((2,), torch.finfo(torch.float32).max)  # its sum is infinite, its entries are not
    fine = {"large": large, "count": torch.tensor([1, 2]), "flag": torch.tensor(True), "empty": torch.empty(0)}
    assert messages.first_nonfinite(fine) is None
    for value in (math.nan, math.inf, -math.inf):
        bad = torch.tensor([0.0, value])
        assert messages.first_nonfinite({**fine, "g": {"a": large, "b": bad}, "z": bad}) == "g/b"
    both = torch.tensor([math.inf, -math.inf])
    assert messages.first_nonfinite({**fine, "z": both}) == "z"
