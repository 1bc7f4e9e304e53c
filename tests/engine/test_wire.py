"""Values with tensors cross as bytes and arrive bit for bit; other bytes are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from polyfed.core.message import freeze
from polyfed.engine.wire import decode, encode
from polyfed.errors import RunError

TYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "int8", "bool", "complex64"]


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal types, shapes and bits."""
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(some.sampled_from(TYPES), some.lists(some.integers(0, 4), max_size=4), some.booleans())
def test_all_types_and_shapes_arrive(kind: str, shape: list[int], is_reversed: bool) -> None:
    tensor = (100 * torch.randn(shape)).to(getattr(torch, kind))
    tensor = tensor.permute(*reversed(range(len(shape)))) if is_reversed and shape else tensor
    odd = torch.tensor([float("nan"), -0.0, 1e-45])
    sent = {"z": odd, "message": freeze({"t": tensor, "group": {"u": odd}}), "none": None, "empty": {}, "loss": 1e400}
    found = decode(encode(sent))
    assert alike(found["message"]["t"], tensor)
    assert found["message"]["t"].is_contiguous()
    assert alike(found["z"], odd)
    assert alike(found["message"]["group"]["u"], odd)
    assert (found["none"], found["empty"], found["loss"], list(found)) == (None, {}, float("inf"), list(sent))


def test_what_is_there_twice_travels_once() -> None:
    sent, other = torch.randn(1000), torch.randn(1000)
    once, twice = encode({"0": sent, "1": other}), encode({"0": sent, "1": other, "2": sent.view(1000)})
    assert len(twice) < len(once) + 1000
    assert torch.equal(decode(twice)["2"], sent)
    parts = decode(encode({"whole": sent, "other": sent.view(2, 500), "half": sent[500:]}))
    assert torch.equal(parts["other"], sent.view(2, 500))
    assert torch.equal(parts["half"], sent[500:])


def test_only_tensors_and_json_travel() -> None:
    with pytest.raises(RunError, match="expected tensors in messages and states, got set"):
        encode({"state": {"a": {1}}})


def forged(value: Any, tensors: int = 1) -> bytes:
    return safetensors.torch.save({str(i): torch.ones(2) for i in range(tensors)}, {"value": json.dumps(value)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 100,
        encode({"a": torch.ones(3)})[:-1],
        safetensors.torch.save({"a": torch.ones(3)}),  # without a value
        forged({"a": {"$": "7"}}),  # a tensor that is not there
        forged({"a": {"$": ["0"]}}),
        b"\x02" + b"\x00" * 7 + b"[]",
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RunError, match="expected a message as bytes"):
        decode(data)


def test_bounds_hold_before_anything_is_made() -> None:
    assert decode(forged({}, 3), 1000, 4) == {}
    with pytest.raises(RunError, match="at most 3 tensors"):
        decode(forged({}, 3), most_tensors=3)
    with pytest.raises(RunError, match="a header of at most 100 bytes"):
        decode(forged({}, 3), most_header=100)
    deep = b'{"__metadata__":{"value":"' + b"[" * 100_000 + b'"}}'
    with pytest.raises(RunError, match="expected a message as bytes"):
        decode(len(deep).to_bytes(8, "little") + deep)
