"""Two small networks for tables: hidden layers (Linear, ReLU) and a linear head, for inputs of any shape, flattened.

Cuts: extractor = the first hidden layer (s_in: 64), intermediate = the others, head = the last Linear; D = 32. A layer
has the same name in both only where it has the same shape, so that layers can be averaged by name:

    name          hidden            parameters with 30 features, 2 classes
    mlp-64-32     64, 32            4 130
    mlp-64-64-32  64, 64 (more), 32 8 290
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from polyfed.errors import ConfigError
from polyfed.models.split import SequentialSplit

_FIRST, _LAST = 64, 32  # units


def mlp_64_32(in_shape: tuple[int, ...], classes: int) -> SequentialSplit:
    """Hidden layers of 64 and 32."""
    return _mlp("mlp-64-32", in_shape, classes, more=False)


def mlp_64_64_32(in_shape: tuple[int, ...], classes: int) -> SequentialSplit:
    """Hidden layers of 64, 64 and 32."""
    return _mlp("mlp-64-64-32", in_shape, classes, more=True)


def _mlp(name: str, in_shape: tuple[int, ...], classes: int, more: bool) -> SequentialSplit:
    features = math.prod(in_shape)
    if not in_shape or features < 1 or classes < 1:
        raise ConfigError(f"{name} needs inputs with features and at least one class, got {in_shape} and {classes}")
    first: OrderedDict[str, nn.Module] = OrderedDict(
        flatten=nn.Flatten(), fc=nn.Linear(features, _FIRST), relu=nn.ReLU()
    )
    rest: OrderedDict[str, nn.Module] = OrderedDict()
    if more:
        rest |= {"more": nn.Linear(_FIRST, _FIRST), "more_relu": nn.ReLU()}
    rest |= {"last": nn.Linear(_FIRST, _LAST), "last_relu": nn.ReLU()}
    return SequentialSplit(nn.Sequential(first), nn.Sequential(rest), nn.Linear(_LAST, classes), architecture=name)
