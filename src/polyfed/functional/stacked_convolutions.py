"""Convolutions of clients, each with its own filters, under `torch.func.vmap`, in the fastest of three forms.

vmap makes one grouped convolution of them, whose backward passes take a GPU long where channels are few. Which form is
the fastest depends on the GPU, its library and the shapes, so it is timed; the numbers are the same up to rounding.

Shapes: K clients, B rows, C channels, H x W images, G groups, P entries of a filter.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FORMS = ("grouped", "unfolded", "in_turn")
FORM: str | None = None  # of all convolutions; None: on a GPU the fastest for each kind, elsewhere grouped
_WARM, _REPEATS = 2, 2
_AHEAD = 30_000_000  # cycles for which the GPU waits, 15 to 25 ms, while the host launches what is timed
_SHARE = 64  # what one convolution unfolds takes this part of a GPU's memory at most, as a network has many of them
_known: dict[Hashable, str] = {}  # kind of convolution -> form


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d` of one client, under vmap."""
    if x.dim() != 4 or (FORM is None and not is_timed(x.device)):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    padding = padding if isinstance(padding, str) else _pair(padding)
    apply: Any = _OfAll.apply
    found: Tensor = apply(x, weight, bias, _Convolution(_pair(stride), padding, _pair(dilation), groups))
    return found


def is_timed(device: torch.device) -> bool:
    """Whether the fastest form is looked for."""
    return device.type == "cuda" and torch.backends.cuda.is_built()


def _pair(size: Any) -> tuple[int, int]:
    first, *last = (size,) if isinstance(size, int) else size
    return first, last[0] if last else first


@dataclass(frozen=True)
class _Convolution:
    """How filters move; as `F.conv2d` says."""

    stride: tuple[int, int]
    padding: tuple[int, int] | str
    dilation: tuple[int, int]
    groups: int

    def alone(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Of one client."""
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def grouped(self, *tensors: Tensor) -> Tensor:
        """Of all as one, which vmap makes of it."""
        found: Tensor = torch.func.vmap(self.alone)(*tensors)
        return found

    def in_turn(self, *tensors: Tensor) -> Tensor:
        """Of one after the other."""
        return torch.stack([self.alone(*one) for one in zip(*(t.unbind() for t in tensors), strict=True)])

    def unfolded(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Products of filters and what they are laid upon, which one kernel copies, as of one image."""
        x, padding = self._padded(x, weight.shape[3:])
        K, B, C, H, W = x.shape
        below = F.unfold(x.reshape(1, K * B * C, H, W), weight.shape[3:], self.dilation, padding, self.stride)
        G = self.groups
        P = weight[0, 0].numel()
        y = weight.reshape(K, 1, G, -1, P) @ below.view(K, B, G, P, -1)
        height = (H + 2 * padding[0] - self.dilation[0] * (weight.shape[3] - 1) - 1) // self.stride[0] + 1
        y = y.reshape(K, B, weight.shape[1], height, -1)
        return y if bias is None else y + bias[:, None, :, None, None]

    def _padded(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
        """The images, and how far they are still to be padded on each side."""
        if self.padding == "valid":
            return x, (0, 0)
        if not isinstance(self.padding, str):
            return x, self.padding
        high, wide = (step * (size - 1) for step, size in zip(self.dilation, sizes, strict=True))
        if high % 2 or wide % 2:
            x = F.pad(x, (0, wide % 2, 0, high % 2))
        return x, (high // 2, wide // 2)

    def unfolded_nbytes(self, x: Tensor, weight: Tensor) -> int:
        """About as many bytes as `unfolded` holds at a time: of images, or of gradients of filters row by row."""
        K, B, C, H, W = x.shape
        images = C * math.prod(weight.shape[3:]) * (H // self.stride[0]) * (W // self.stride[1])
        return K * B * max(images, weight[0].numel()) * x.itemsize


class _OfAll(torch.autograd.Function):
    """The convolution of one client, of which vmap asks for that of all at once."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, conv: _Convolution) -> Tensor:
        return conv.alone(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.conv = inputs[-1]
        ctx.save_for_backward(*inputs[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Where something within vmap takes gradients of its own."""
        tensors = [t for t in ctx.saved_tensors if t is not None]
        pulled_back: Any = torch.func.vjp(ctx.conv.alone, *tensors)[1]
        return (*pulled_back(gradient), *[None] * (4 - len(tensors)))

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], *given: Any) -> tuple[Tensor, int]:
        *tensors, conv = given
        axes = [axis for t, axis in zip(tensors, in_dims, strict=False) if t is not None]
        tensors = [t for t in tensors if t is not None]
        if axes[1] is None:  # filters that all share
            return torch.func.vmap(conv.alone, in_dims=tuple(axes))(*tensors), 0
        K = info.batch_size
        stacked = [
            t.expand(K, *t.shape) if axis is None else t.movedim(axis, 0) for t, axis in zip(tensors, axes, strict=True)
        ]
        return getattr(conv, FORM or _fastest(conv, *stacked))(*stacked), 0


# the fastest ----------------------------------------------------------------------------------------------------------


def _fastest(conv: _Convolution, x: Tensor, weight: Tensor, *bias: Tensor) -> str:
    """The form for this kind: that of the first of about so many clients and rows."""
    tensors = (x, weight, *bias)
    size = [length.bit_length() for length in x.shape[:2]]
    trained = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    kind = (conv, x.device, x.dtype, *size, x.shape[2:], weight.shape[1:], *trained)
    if kind not in _known:
        if torch.cuda.is_current_stream_capturing():
            return "grouped"
        most = torch.cuda.mem_get_info(x.device)[1] // _SHARE
        forms = [form for form in FORMS if form != "unfolded" or conv.unfolded_nbytes(x, weight) <= most]
        with torch.cuda.device(x.device):
            _known[kind] = min(forms, key=lambda form: milliseconds(conv, form, tensors))
    return _known[kind]


def milliseconds(conv: _Convolution, form: str, tensors: Sequence[Tensor]) -> float:
    """What the GPU takes for the passes of a convolution, forward and backward; without end where it cannot."""
    given = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    trained = [t for t in given if t.requires_grad]

    def repeat(times: int) -> None:
        for _ in range(times):
            y = getattr(conv, form)(*given)
            if y.requires_grad:
                torch.autograd.grad(y, trained, y.detach())

    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    try:
        repeat(_WARM)
        torch.cuda._sleep(_AHEAD)
        begun.record()
        repeat(_REPEATS)
        ended.record()
        ended.synchronize()
    except RuntimeError:  # its memory ran out, as a rule
        return math.inf
    return float(begun.elapsed_time(ended))
