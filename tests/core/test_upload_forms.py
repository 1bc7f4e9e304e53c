"""What is not of a method's form is named in a line; what is, passes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from polyfed.core.message import clone
from polyfed.core.upload_forms import UploadContext
from polyfed.engine.uploads import find_mismatch
from polyfed.methods import FedAvg, FedGH
from polyfed.registry import METHODS
from polyfed.testing import ConformanceKit
from polyfed.testing.observation import AggregationScene


@functools.cache
def first_aggregation(method: Any) -> AggregationScene:
    return ConformanceKit(method=method).scenes[0]


def fault(method: Any, change: Any) -> str | None:
    """What is wrong with client 0's first upload after a change."""
    scene = first_aggregation(method)
    message: dict[str, Any] = clone(scene.uploads[0])
    change(message)
    known = UploadContext(method, scene.server, 0, method.broadcast(scene.server, 0))
    return find_mismatch(method.upload_form, message, known)


def put(name: str, value: torch.Tensor) -> Any:
    return lambda message: message.update({name: value})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("more", torch.ones(1)), "expected 'labels', 'lars', got 'more'"),
        (put("labels", torch.tensor([0, 10**9], dtype=torch.int32)), "expected at most 2 in 'labels', got 1e+09"),
        (put("labels", torch.tensor([1, 1])), "expected every number once in 'labels', got some again"),
        (put("labels", torch.tensor([0.0, 1.0])), "expected int32 or int64 as 'labels', got float32"),
        (put("labels", torch.arange(4)), "expected at most 3 rows in 'labels', got the shape (4,)"),
        (put("lars", torch.ones(3, 6)), "expected 2 rows in 'lars', got the shape (3, 6)"),
        (put("lars", torch.ones(2, 7)), "expected a size of 6 in 'lars', got the shape (2, 7)"),
        (put("lars", torch.ones(2)), "expected 2 dimensions of 'lars', got the shape (2,)"),
        (lambda m: m.update(lars={"x": torch.ones(1)}), "expected a tensor as 'lars', got the other"),
    ],
)
def test_what_is_otherwise_is_named(change: Any, expected: str) -> None:
    assert fault(FedGH(), change) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (put("n", torch.tensor(25)), "expected at most 24 in 'n', got 25"),
        (put("model", torch.ones(1)), "expected a group as 'model', got the other"),
        (lambda m: m["model"].pop("head.bias"), "expected 'head.bias' in 'model', which is missing"),
        (lambda m: m["model"].update({"a.b": torch.ones(1)}), "tensors of known names in 'model', got 'a.b'"),
        (lambda m: m["model"].update({"head.bias": torch.ones(4)}), "expected a size of 3 in 'model/head.bias'"),
    ],
)
def test_what_is_otherwise_in_weights_is_named(change: Any, expected: str) -> None:
    assert expected in (fault(FedAvg(), change) or "")


def test_every_method_says_what_form_its_uploads_have() -> None:
    """Else a node's upload of any names, shapes and types would reach `aggregate`."""
    for name in METHODS:
        form = METHODS[name].upload_form
        assert form is not None, f"{name}: expected upload_form at the end of its class"
        assert bool(form) == (name != "local"), name
