"""What vmap computes in fewer kernels is what it computes without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyfed.engine.executors.stacked_loss import FewerKernels
from polyfed.functional.losses import cross_entropy

K, B, D, C = 3, 5, 4, 6
DRAWS = torch.Generator().manual_seed(0)
X, WEIGHT, BIAS = (torch.randn(*shape, generator=DRAWS) for shape in ((K, B, D), (K, C, D), (K, C)))
TOKENS = torch.randn(K, B, 2, D, generator=DRAWS)
IMAGES, FILTERS = (torch.randn(K, *shape, generator=DRAWS) for shape in ((B, 2, 4, 4), (C, 2, 3, 3)))
LOGITS = torch.randn(K, B, C, generator=DRAWS)
LABELS = torch.arange(K * B).view(K, B) % C
ROWS = (torch.arange(B) < torch.tensor([[B], [2], [0]])).float()  # all rows count, some, none


class Operations(TorchDispatchMode):
    """Counts what is computed within the block, views apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += not operation.is_view
        return operation(*arguments, **(named or {}))


def computed(function: Callable[..., Tensor], given: tuple[Tensor, ...], block: Any) -> tuple[list[Tensor], int]:
    """What vmap makes of it and the gradients of what is trained, and in how many operations."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
    with Operations() as done:
        with block:
            value = torch.func.vmap(function)(*leaves)
        trained = [t for t in leaves if t.requires_grad]
        gradients = torch.autograd.grad(value.square().sum(), trained, allow_unused=True)
    return [value, *(g for g in gradients if g is not None)], done.count


@pytest.mark.parametrize(
    ("function", "given", "fewer"),
    [
        (F.linear, (X, WEIGHT, BIAS), True),
        (F.linear, (X, WEIGHT), False),
        (F.linear, (TOKENS, WEIGHT, BIAS), False),
        (lambda x, w, b: F.linear(x, w, bias=b), (X, WEIGHT, BIAS), True),
        (cross_entropy, (LOGITS, LABELS, ROWS), True),
    ],
)
def test_the_same_in_fewer_operations(function: Callable[..., Tensor], given: tuple[Tensor, ...], fewer: bool) -> None:
    plain, before = computed(function, given, nullcontext())
    found, after = computed(function, given, FewerKernels())
    torch.testing.assert_close(found, plain)
    assert (after < before) is fewer
