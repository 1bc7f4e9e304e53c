"""Split models: the zoo, and any nn.Module as one (`polyfed.models.adapt.split`)."""

from polyfed.models.split import SequentialSplit, SplitModel, cut_shapes, with_projection
from polyfed.models.zoo import build

__all__ = ["SequentialSplit", "SplitModel", "build", "cut_shapes", "with_projection"]
