"""What is put into a shared buffer comes out bit for bit, in another process as in this one."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from polyfed.errors import RunError

if sys.platform != "linux":
    pytest.skip("worker processes need Linux", allow_module_level=True)

from polyfed.engine.executors.shared_buffer import SharedBuffer

TYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "uint8", "int8", "bool", "complex64"]


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal in all that a computation could tell."""
    same = a.shape == b.shape and a.dtype == b.dtype and (a.stride() == b.stride() or not a.numel())
    return same and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


def there(box: SharedBuffer, tree: dict[str, object]) -> dict[str, object]:
    """Put in, described in JSON, taken out."""
    return box.read(json.loads(json.dumps(box.write(tree))))


@settings(max_examples=40, deadline=None)
@given(some.sampled_from(TYPES), some.lists(some.integers(0, 4), max_size=4), some.booleans())
def test_all_types_and_shapes_come_out(kind: str, shape: list[int], reversed_: bool) -> None:
    box = SharedBuffer()
    tensor = (100 * torch.randn(shape)).to(getattr(torch, kind))
    tensor = tensor.permute(*reversed(range(len(shape)))) if reversed_ and shape else tensor
    sent = {"first": torch.ones(3), "group": {"t": tensor}, "none": None, "empty": {}}
    found = there(box, sent)
    assert alike(found["group"]["t"], tensor)  # type: ignore[index]
    assert found["none"] is None
    assert found["empty"] == {}
    assert list(found) == list(sent)
    box.close()


def test_strides_are_those_of_a_clone() -> None:
    box, base = SharedBuffer(), torch.randn(4, 3, 5, 5)
    for tensor in (base.to(memory_format=torch.channels_last), base[:, :, ::2], base[1], torch.ones(1).expand(3, 2)):
        assert alike(there(box, {"t": tensor})["t"], tensor.clone())  # type: ignore[arg-type]


def test_nan_infinity_and_signs_are_kept() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    assert alike(there(SharedBuffer(), {"t": tensor})["t"], tensor)  # type: ignore[arg-type]


def test_it_grows_and_what_was_taken_stays_what_it_was() -> None:
    box = SharedBuffer()
    small = there(box, {"t": torch.arange(5)})["t"]
    looked = box.view(box.write({"t": torch.arange(3)}))["t"]
    for size in (10, 10_000, 1_000_000, 7):
        large = torch.randn(size)
        assert alike(there(box, {"t": large})["t"], large)  # type: ignore[arg-type]
    assert torch.equal(small, torch.arange(5))  # type: ignore[arg-type]
    assert looked.shape == (3,)  # of the memory from before, which lives as long as somebody looks at it


def test_another_process_reads_and_answers() -> None:
    there_, back = SharedBuffer(), SharedBuffer()
    ask, answer = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            x = there_.view(json.loads(os.read(ask[0], 10_000)))["x"]
            os.write(answer[1], json.dumps(back.write({"x": x + 1})).encode())
        finally:
            os._exit(0)
    x = torch.arange(300_000, dtype=torch.float32)  # larger than all that was there when the process was made
    os.write(ask[1], json.dumps(there_.write({"x": x})).encode())
    assert torch.equal(back.read(json.loads(os.read(answer[0], 10_000)))["x"], x + 1)
    os.waitpid(child, 0)
    for end in (*ask, *answer):
        os.close(end)


def test_only_tensors_travel() -> None:
    with pytest.raises(RunError, match="expected tensors in messages and states, got float"):
        SharedBuffer().write({"state": {"a": 0.5}})
