"""Split models: the zoo, and any nn.Module as one (`polyfed.models.adapt.split`)."""

from polyfed.models.split import SplitModel, Staged, cuts, with_projection
from polyfed.models.zoo import build, describe

__all__ = ["SplitModel", "Staged", "build", "cuts", "describe", "with_projection"]
