"""Three small networks for tables: hidden layers (Linear, ReLU) and a linear head, for inputs of any shape, flattened.

Cuts: extractor = the first hidden layer, intermediate = the others, head = the last Linear; D = 32. A layer has the
same name in two networks only where it has the same shape, so that layers can be averaged by name:

    name          hidden            parameters with 30 features, 2 classes
    mlp-16-32     16, 32            1 106
    mlp-64-32     64, 32            4 130
    mlp-64-64-32  64, 64 (more), 32 8 290

Columns of a table that hold categories come as whole numbers, 0 for a value that is missing or not known; each column
has an embedding of its own, of half as many numbers as it has values, 8 at most.

Shapes: N rows, F features.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyfed.errors import ConfigError
from polyfed.models.networks import Home, register
from polyfed.models.split import SequentialSplit

_FIRST, _LAST = 64, 32  # units of the first hidden layer, where it is not narrower, and of the last
_WIDEST = 8  # numbers of a category's vector


class CategoryVectors(nn.Module):
    """Rows (N, F) with vectors in place of their categories' numbers, behind the columns that hold numbers.

    Args:
        categories: per feature, how many categories there are, 0 for a number.

    Attributes:
        width: how many numbers a row becomes.

    >>> CategoryVectors((0, 3))(torch.tensor([[0.5, 2.0]])).shape
    torch.Size([1, 3])
    """

    def __init__(self, categories: Sequence[int]) -> None:
        super().__init__()
        self.numbers = [place for place, count in enumerate(categories) if not count]
        self.places = [place for place, count in enumerate(categories) if count]
        widths = [min(_WIDEST, (categories[place] + 1) // 2) for place in self.places]
        self.width = len(self.numbers) + sum(widths)
        self.vectors = nn.ModuleList(
            nn.Embedding(categories[place], width) for place, width in zip(self.places, widths, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, self.numbers]]
        for place, vectors in zip(self.places, self.vectors, strict=True):
            parts.append(vectors(x[:, place].long()))
        return torch.cat(parts, dim=1)


def _mlp(
    name: str,
    in_shape: tuple[int, ...],
    classes: int,
    categories: Sequence[int] = (),
    first: int = _FIRST,
    more: bool = False,
) -> SequentialSplit:
    """A network of a first hidden layer, another one where there are `more`, and a last one.

    categories: see `CategoryVectors`; none: all features are numbers.
    """
    features = math.prod(in_shape)
    if not in_shape or features < 1 or classes < 1:
        raise ConfigError(f"{name} needs inputs with features and at least one class, got {in_shape} and {classes}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    if any(categories):
        vectors = CategoryVectors(categories)
        layers["categories"] = vectors
        features = vectors.width
    narrow = "" if first == _FIRST else "narrow_"
    layers |= {f"{narrow}fc": nn.Linear(features, first), "relu": nn.ReLU()}
    rest: OrderedDict[str, nn.Module] = OrderedDict()
    if more:
        rest |= {"more": nn.Linear(first, first), "more_relu": nn.ReLU()}
    rest |= {f"{narrow}last": nn.Linear(first, _LAST), "last_relu": nn.ReLU()}
    return SequentialSplit(nn.Sequential(layers), nn.Sequential(rest), nn.Linear(_LAST, classes), architecture=name)


_TABLE = Home((30,), 2, "polyfed; for tables, here of 30 features")
register("mlp-16-32", _mlp, _TABLE, "Hidden layers of 16 and 32.", first=16)
register("mlp-64-32", _mlp, _TABLE, "Hidden layers of 64 and 32.")
register("mlp-64-64-32", _mlp, _TABLE, "Hidden layers of 64, 64 and 32.", more=True)
