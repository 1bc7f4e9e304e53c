"""Copies in few: values, shapes and how many. "cpu:0" stands for another device: PyTorch tells it from "cpu"."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.functional.device_copies import copy_once, move_group, move_together

HERE, THERE = torch.device("cpu"), torch.device("cpu:0")


class Copies(TorchDispatchMode):
    """Counts the tensors that are joined for a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cat.default:
            self.joined.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_what_goes_the_same_way_crosses_together_for_each_type() -> None:
    tensors = [
        torch.arange(6.0, requires_grad=True).reshape(2, 3),
        torch.arange(4),
        torch.tensor(7.5),
        torch.arange(12.0).reshape(3, 4).T,
        torch.zeros(0, 2),
        torch.arange(3.0),
    ]
    with Copies() as copies:
        found = move_together(tensors, [THERE, THERE, THERE, THERE, THERE, HERE])
    assert sorted(copies.joined) == [1, 4]
    for moved, tensor in zip(found, tensors, strict=True):
        assert torch.equal(moved, tensor)
        assert (moved.dtype, moved.shape, moved.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert found[5].data_ptr() == tensors[5].data_ptr()  # it is there already
    assert found[0].data_ptr() != tensors[0].data_ptr()


def test_within_the_block_a_tensor_crosses_once_until_it_changes() -> None:
    tensor, other = torch.arange(3.0), torch.arange(4.0)
    with Copies() as copies:
        with copy_once():
            (first,) = move_together([tensor], [THERE])
            same, new = move_together([tensor.detach(), other], [THERE, THERE])  # other objects, one memory
            assert copies.joined == [1, 1]
            assert same.data_ptr() == first.data_ptr()
            assert torch.equal(new, other)
            part, turned = move_together([tensor[:2], tensor.flip(0)], [THERE, THERE])
            assert torch.equal(part, tensor[:2])
            assert torch.equal(turned, tensor.flip(0))
            tensor.add_(1)
            (changed,) = move_together([tensor], [THERE])
            assert torch.equal(changed, tensor)
            assert not torch.equal(first, tensor)
            assert copies.joined == [1, 1, 2, 1]
        move_together([tensor], [THERE])
        assert copies.joined == [1, 1, 2, 1, 1]


def test_tensors_that_tell_of_no_change_always_cross() -> None:
    with torch.inference_mode():
        tensor = torch.arange(3.0)
    with copy_once():
        move_together([tensor], [THERE])
        with torch.inference_mode():
            tensor.add_(1)
        (found,) = move_together([tensor], [THERE])
    assert torch.equal(found, tensor)


def test_a_group_crosses_together_under_its_names() -> None:
    tensors = {"b": torch.arange(3.0, requires_grad=True), "a": torch.ones(2, 2)}
    with Copies() as copies:
        found = move_group(tensors, THERE)
    assert copies.joined == [2]
    assert list(found) == ["b", "a"]
    assert all(torch.equal(found[name], t) for name, t in tensors.items())
    assert move_group({}, THERE) == {}
