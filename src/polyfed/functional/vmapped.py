"""Operations of which `torch.func.vmap` makes more kernels than they need, written so that it makes few.

The numbers are the same up to rounding, and a GPU has them sooner, as it waits for kernels to be launched. And what
autocast has computed in bfloat16 is computed so: alone, vmap takes linear layers and convolutions apart before autocast
sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyfed.functional.losses import mean_cross_entropy, weighted_mean


class RowShares(NamedTuple):
    """What each row of a batch counts: its weight, its share in the sum of all weights, and minus that, (B,) each."""

    w: Tensor
    share: Tensor
    negated: Tensor


class FewerKernels(TorchFunctionMode):
    """Within the block vmap computes linear layers and means of losses in fewer kernels, and as autocast says.

    Args:
        rows: of a batch; a mean over its rows, with the very tensor `w`, then need not add the weights up.
    """

    def __init__(self, rows: RowShares | None = None) -> None:
        super().__init__()
        self._rows = rows

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        named = named or {}
        if function is mean_cross_entropy:
            return self._mean_cross_entropy(*arguments)
        if function is weighted_mean:
            return self._weighted_mean(*arguments)
        if function in _NARROWED:
            arguments = [_narrowed(value) for value in arguments]
            named = {name: _narrowed(value) for name, value in named.items()}
        if function is F.linear:
            return _linear(*arguments, **named)
        return function(*arguments, **named)

    def _mean_cross_entropy(self, logits_NC: Tensor, y_N: Tensor, w_N: Tensor) -> Tensor:
        """`losses.mean_cross_entropy`, of which vmap also looks for rows to ignore, of which there are none."""
        likelihood_N = torch.log_softmax(logits_NC, dim=1).gather(1, y_N.unsqueeze(1)).squeeze(1)
        rows = self._rows_of(likelihood_N, w_N)
        return weighted_mean(-likelihood_N, w_N) if rows is None else _dot(likelihood_N, rows.negated)

    def _weighted_mean(self, values_N: Tensor, w_N: Tensor) -> Tensor:
        """`losses.weighted_mean`."""
        rows = self._rows_of(values_N, w_N)
        return weighted_mean(values_N, w_N) if rows is None else _dot(values_N, rows.share)

    def _rows_of(self, values_N: Tensor, w_N: Tensor) -> RowShares | None:
        """What is known of the weights of a mean."""
        rows = self._rows
        if rows is None or w_N is not rows.w or values_N.shape != w_N.shape or values_N.dtype != w_N.dtype:
            return None
        return rows


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


def _dot(a_N: Tensor, b_N: Tensor) -> Tensor:
    """sum_n a_n b_n; in one product, but where autocast would take that in bfloat16."""
    if torch.is_autocast_enabled(a_N.device.type):
        return (a_N * b_N).sum()
    return torch.dot(a_N, b_N)


_NARROWED = {F.linear, F.conv1d, F.conv2d, F.conv3d}
