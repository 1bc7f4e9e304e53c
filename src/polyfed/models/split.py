"""Networks in three parts: extractor -> intermediate -> head, the one shape of model that every method works with.

FedHeNN (Makhija et al., ICML 2022) and FedGH (doi:10.1145/3581783.3611781) use `represent` and `head`, FedIN
(arXiv 2304.00759) all three parts.

Shapes: N samples, C classes, D feature width (`feature_dim`), c x h x w what leaves the extractor.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from polyfed.errors import ConfigError
from polyfed.functional.modes import eval_mode

Part = Literal["extractor", "intermediate", "head"]
PARTS: tuple[Part, ...] = get_args(Part)
_AROUND = {  # class of PyTorch -> what it has made of a network
    "OptimizedModule": "in torch.compile",
    "DataParallel": "in DataParallel",
    "DistributedDataParallel": "in DistributedDataParallel",
    "AveragedModel": "in AveragedModel",
    "FullyShardedDataParallel": "that FSDP has sharded",
    "FSDPModule": "that FSDP has sharded",
    "ScriptModule": "that is a program of TorchScript",
}


class SplitModel(nn.Module):
    """A network cut twice: ``forward(x) == head(transform(extract(x)))``, bit for bit.

    Subclasses define `extract`, `transform` and a submodule or property `head`; where their state-dict keys do not
    begin with the part's name, they override `part_of` too.

    Attributes:
        architecture: the registered name, set by the builder.
        feature_dim: D, the width of z, what the head takes in.
    """

    architecture: str
    feature_dim: int

    if TYPE_CHECKING:  # at run time an ordinary submodule, or a property of the subclass

        @property
        def head(self) -> nn.Module:
            """The last layer: z, N x D -> logits, N x C."""

    def __init__(self, architecture: str, feature_dim: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.feature_dim = feature_dim

    def extract(self, x: Tensor) -> Tensor:
        """The input, N x ..., to what enters the intermediate part, s_in (N x c x h x w)."""
        raise NotImplementedError(f"{type(self).__name__} defines no extract")

    def transform(self, s_in: Tensor) -> Tensor:
        """What left the extractor to the representation z (N x D). Never changes `s_in` in place."""
        raise NotImplementedError(f"{type(self).__name__} defines no transform")

    def represent(self, x: Tensor) -> Tensor:
        """The input to the representation z (N x D), which is what enters the head."""
        return self.transform(self.extract(x))

    def forward(self, x: Tensor) -> Tensor:
        """The input to logits (N x C); nothing is applied to them."""
        logits: Tensor = self.head(self.represent(x))
        return logits

    def part_of(self, name: str) -> Part:
        """Which part a state-dict key, parameter name or buffer name belongs to."""
        first = name.partition(".")[0]
        for part in PARTS:
            if first == part:
                return part
        raise ConfigError(f"{self.architecture} has no tensor '{name}'; its names begin with {', '.join(PARTS)}")

    def names(self, part: Part) -> tuple[str, ...]:
        """The state-dict keys of one part, in order; an intermediate part without weights gives none."""
        if part not in PARTS:
            raise ConfigError(f"unknown part '{part}'; a model has the parts {', '.join(PARTS)}")
        return tuple(name for name in self.state_dict() if self.part_of(name) == part)

    def export(self) -> dict[str, Tensor]:
        """The state dict under the keys of the module as it was before polyfed wrapped it (here: unchanged)."""
        return dict(self.state_dict())

    def with_layers(self, layers: Mapping[str, nn.Module]) -> SplitModel:
        """The model with other layers in the places of these names, in place; what is returned is to be used."""
        for name, layer in layers.items():
            self.set_submodule(name, layer)
        return self

    def projected(self, feature_dim: int, average: bool = False) -> SplitModel:
        """See `with_projection`, which also checks the request."""
        raise ConfigError(
            f"{type(self).__name__} cannot take another width, {feature_dim} features; "
            "build it as polyfed.models.SequentialSplit, or leave models.feature_dim out"
        )


class SequentialSplit(SplitModel):
    """A network made of three modules; its keys are ``extractor.*``, ``intermediate.*`` and ``head.*``.

    Args:
        extractor: x (N x ...) -> s_in.
        intermediate: s_in -> z (N x D). Must not change its input in place.
        head: z -> logits (N x C); an ``nn.Linear`` in the zoo.
        architecture: registered name.
        feature_dim: D; by default ``head.in_features``.

    Raises:
        ConfigError: the feature width is neither given nor known from the head.

    >>> body = nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.ReLU())
    >>> model = SequentialSplit(nn.Conv2d(1, 2, 3), body, nn.Linear(5, 3))
    >>> model(torch.zeros(4, 1, 4, 4)).shape, model.feature_dim, model.names("head")
    (torch.Size([4, 3]), 5, ('head.weight', 'head.bias'))
    """

    if TYPE_CHECKING:
        extractor: nn.Module
        intermediate: nn.Module
        head: nn.Module

    def __init__(
        self,
        extractor: nn.Module,
        intermediate: nn.Module,
        head: nn.Module,
        architecture: str = "staged",
        feature_dim: int | None = None,
    ) -> None:
        super().__init__(architecture, in_features(head) if feature_dim is None else feature_dim)
        self.extractor = extractor
        self.intermediate = intermediate
        self.head = head

    def extract(self, x: Tensor) -> Tensor:
        """The input to s_in."""
        s_in: Tensor = self.extractor(x)
        return s_in

    def transform(self, s_in: Tensor) -> Tensor:
        """s_in to z (N x D)."""
        z: Tensor = self.intermediate(s_in)
        return z

    def projected(self, feature_dim: int, average: bool = False) -> SplitModel:
        """A copy whose intermediate part ends with the layers of `projection_and_head`, and with a new head."""
        model = copy.deepcopy(self)
        layers, head = projection_and_head(model.head, feature_dim, average)
        if not isinstance(model.intermediate, nn.Sequential):
            model.intermediate = nn.Sequential(OrderedDict(body=model.intermediate))
        for name, layer in layers.items():
            model.intermediate.add_module(name, layer)
        model.head, model.feature_dim = head, feature_dim
        return model


def with_projection(model: SplitModel, feature_dim: int, average: bool = False) -> SplitModel:
    """The recipe key ``models.feature_dim``: one feature width for networks that differ in theirs (FedGH, section 5).

    Adds Linear(D, feature_dim) and ReLU at the end of the intermediate part, and a fresh head of that width. A model
    that already has this width is returned as it is; otherwise `model` is left alone and a copy is returned. The
    architecture's name stays.

    Args:
        model: its head must be an ``nn.Linear``.
        feature_dim: the new D, at least 1.
        average: adaptive average pooling to this width in place of the projection, as HtFLlib has it (KDD 2025), which
            trains nothing; ``models.feature_pool``.

    Raises:
        ConfigError: the width is not a positive whole number, or the head is no ``nn.Linear``.
    """
    if not isinstance(feature_dim, int) or isinstance(feature_dim, bool) or feature_dim < 1:
        raise ConfigError(f"models.feature_dim must be a whole number of at least 1, got {feature_dim!r}")
    return model if feature_dim == model.feature_dim else model.projected(feature_dim, average)


def projection_and_head(head: nn.Module, feature_dim: int, average: bool) -> tuple[dict[str, nn.Module], nn.Linear]:
    """Fresh layers D -> feature_dim by name, and feature_dim -> C, for `head`, on its device and in its dtype."""
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"models.feature_dim needs a head that is an nn.Linear; this one is a {type(head).__name__}")
    device, dtype = head.weight.device, head.weight.dtype
    layers: dict[str, nn.Module] = {"average": nn.AdaptiveAvgPool1d(feature_dim)}
    if not average:
        projection = nn.Linear(head.in_features, feature_dim, device=device, dtype=dtype)
        layers = {"projection": projection, "projection_relu": nn.ReLU()}
    return layers, nn.Linear(feature_dim, head.out_features, head.bias is not None, device=device, dtype=dtype)


class HiddenHead(nn.Sequential):
    """A head of hidden layers, each with a ReLU behind it, in the place of a linear one."""

    def __init__(self, linear: nn.Linear, hidden: Sequence[int]) -> None:
        widths = [linear.in_features, *hidden]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(widths[-1], linear.out_features, linear.bias is not None))
        self.in_features = linear.in_features


def channels_last(model: SplitModel) -> SplitModel:
    """The model with its convolutions' weights stored channels last, which makes what they compute lie so, too.

    Faster for some networks and slower for others. Names, shapes and values stay; results change by rounding.
    """
    laid_out: SplitModel = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return laid_out


def in_features(head: nn.Module) -> int:
    """``head.in_features``."""
    width = getattr(head, "in_features", None)
    if not isinstance(width, int):
        raise ConfigError(
            f"the head, a {type(head).__name__}, has no in_features to read the feature width from; "
            "pass feature_dim (SequentialSplit) or example (split)"
        )
    return width


def check_plain(network: nn.Module, who: str = "") -> None:
    """Check that a network and all its layers are plain modules, whose tensors have their own names.

    Raises:
        ConfigError: one is not. who: begins the message.
    """
    kinds = {kind.__name__ for layer in network.modules() for kind in type(layer).__mro__}
    for kind, found in _AROUND.items():
        if kind in kinds:
            raise ConfigError(
                f"{who}expected a plain network in Python, got one {found}; give the network itself, as it was before"
            )


def cut_shapes(model: SplitModel, x: Tensor) -> tuple[torch.Size, torch.Size]:
    """Shapes of one sample at the two cuts, s_in and s_out = z; leaves the model as it was.

    Args:
        model: any split model; runs in eval mode, without gradients, and gets its training flags back.
        x: a batch of at least one sample (N x ...), on the model's device.
    """
    with eval_mode(model), torch.no_grad():
        s_in = model.extract(x)
        s_out = model.transform(s_in)
    return s_in.shape[1:], s_out.shape[1:]
