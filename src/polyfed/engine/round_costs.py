"""What a network's pass computes, and what a piece of work holds in memory: both as PyTorch's dispatcher sees them."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyfed.functional.modes import eval_mode

__all__ = ["AllocationTracker", "flops"]


def flops(module: nn.Module, x: Tensor) -> int:
    """Floating-point operations of a forward pass, a multiplication and an addition being two of them.

    Counted by ``torch.utils.flop_counter``: matrix products, convolutions, attention. All else (norms, activations,
    pooling) is left out, as is usual. A training step takes about three times as many per sample.

    Args:
        module: is run in eval mode, without gradients, and gets its training flags back. x: a batch.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # switching oneDNN off speaks of TF32
        switched = torch.backends.mkldnn.flags(enabled=False)  # its LSTM is one operation, which nobody can count
        counter = FlopCounterMode(display=False)
        with switched, _layer_by_layer(), eval_mode(module), torch.no_grad(), counter:
            module(x)
    return int(counter.get_total_flops())


@contextlib.contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Within the block, a transformer's layer and its attention are made of their parts, of which each is counted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of tensors that are made within the block: activations, gradients, the optimizer's state.

    Not those that were there before (weights, data), nor what kernels need for themselves.

    Attributes:
        held: bytes of what was made and still is there. peak: the most that was there at a time.

    >>> with AllocationTracker() as made:
    ...     kept = torch.zeros(256) + 1
    >>> made.held, made.peak
    (1024, 2048)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._known: dict[int, tuple[Any, int]] = {}  # identity of a storage -> its reference, its bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; what it takes and nobody has seen was there before, what it gives is new."""
        for tensor in tree_leaves((args, kwargs)):
            self._meet(tensor, before=True)
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            self._meet(tensor)
        self.peak = max(self.peak, self.held)
        return made

    def _meet(self, leaf: Any, before: bool = False) -> None:
        """Take note of what an operation takes or gives; only a strided tensor has a storage to look at."""
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return
        storage = leaf.untyped_storage()
        key = id(storage)
        size = 0 if before else storage.nbytes()
        if key not in self._known:
            self._known[key] = (weakref.ref(storage, functools.partial(self._forget, key)), size)
            self.held += size

    def _forget(self, key: int, _: Any) -> None:
        self.held -= self._known.pop(key)[1]
