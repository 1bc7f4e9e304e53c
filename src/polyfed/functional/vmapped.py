"""Operations of which `torch.func.vmap` makes more kernels than they need, written so that it makes few.

The numbers are the same up to rounding, and a GPU has them sooner, as it waits for kernels to be launched. And what
autocast has computed in bfloat16 is computed so: alone, vmap takes linear layers and convolutions apart before autocast
sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyfed.functional.losses import mean_cross_entropy, weighted_mean


class FewerKernels(TorchFunctionMode):
    """Within the block vmap computes linear layers and cross entropy in fewer kernels, and as autocast says."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is mean_cross_entropy:
            return _mean_cross_entropy(*arguments)
        if function in _NARROWED:
            arguments = [_narrowed(value) for value in arguments]
            named = {name: _narrowed(value) for name, value in named.items()}
        if function is F.linear:
            return _linear(*arguments, **named)
        return function(*arguments, **named)


def _mean_cross_entropy(logits_NC: Tensor, y_N: Tensor, w_N: Tensor) -> Tensor:
    """`losses.mean_cross_entropy`, of which vmap also looks for rows to ignore, of which there are none."""
    likelihood_N = torch.log_softmax(logits_NC, dim=1).gather(1, y_N.unsqueeze(1)).squeeze(1)
    return weighted_mean(-likelihood_N, w_N)


def _narrowed(value: Any) -> Any:
    """A tensor in the type that autocast has for products; anything else, and all where it is off, as it is."""
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return value
    kind = value.device.type
    return value.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else value


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`, whose product of rows with a bias vmap also multiplies by 1, forward and backward."""
    if x.dim() != 2 or bias is None:
        return F.linear(x, weight, bias)
    return x @ weight.t() + bias


_NARROWED = {F.linear, F.conv1d, F.conv2d, F.conv3d}
