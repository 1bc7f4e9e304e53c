"""The channel plan of a network, read off its own forward, and the network cut to some of its channels.

The forward is recorded with torch.fx. Convolutions and linear layers end one group of channels and begin another;
BatchNorm, activations and pooling keep the group; what is added together becomes one group, so that a residual stream
has one; flattening gives every channel as many neighbors as it has pixels. What enters the network and what leaves it
is never cut. A step that is none of these makes the network one that cannot be cut, which is an error before round 1.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from polyfed.errors import ConfigError, first_line
from polyfed.functional.channel_slices import OUTPUT, WHOLE, Axis, ChannelPlan, Channels, slice_channels
from polyfed.functional.modes import eval_mode
from polyfed.models.split import SplitModel

_SPATIAL = tuple(
    getattr(nn, f"{kind}{d}d")
    for kind in ("MaxPool", "AvgPool", "AdaptiveMaxPool", "AdaptiveAvgPool", "Dropout")
    for d in (1, 2, 3)
)
_PLAIN = (
    *(nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign),
)
_POOLS = {getattr(F, f"{kind}_pool{d}d") for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for d in (1, 2, 3)}
_ACTIVATIONS = {
    *(torch.relu, torch.tanh, torch.sigmoid, "relu", "relu_", "tanh", "sigmoid", "contiguous", "clone"),
    *(F.dropout, F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.softplus, F.tanh, F.sigmoid),
}
_ADDITIONS = {operator.add, operator.iadd, torch.add, operator.sub, operator.isub, torch.sub, "add", "add_", "sub"}
_SCALINGS = {operator.mul, operator.imul, torch.mul, operator.truediv, torch.div, "mul", "div"}


Layout = Literal["image", "pixels", "dense"]  # N x C x ...; that, flattened: a channel is a run of neighbors; N x C


@dataclass(frozen=True)
class _Value:
    """What flows between two steps: the group of its channels, and how they lie."""

    group: int
    layout: Layout = "image"

    def flattened(self) -> _Value:
        """The same as N x numbers."""
        return _Value(self.group, "pixels") if self.layout == "image" else self


_plans: weakref.WeakKeyDictionary[nn.Module, ChannelPlan] = weakref.WeakKeyDictionary()


def channel_plan(module: nn.Module) -> ChannelPlan:
    """The channel plan of a network; found once per network.

    Raises:
        ConfigError: the network cannot be cut to narrower ones; says at which step.

    >>> plan = channel_plan(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)))
    >>> plan.sizes, plan.axes["2.weight"]
    ({2: 4}, (Axis(group=1, repeat=1), Axis(group=2, repeat=4)))
    """
    if module not in _plans:
        _plans[module] = _ChannelTracer(module).plan()
    return _plans[module]


def trace_layouts(module: nn.Module) -> dict[fx.Node, Layout]:
    """The steps of a network's forward that hand channels on, in order, and how these lie; all are of one record.

    Raises:
        ConfigError: the network cannot be cut to narrower ones, or one record is not enough: its forward takes other
            steps in training than in scoring, or one whose result is not used (it may work in place).
    """
    reader = _ChannelTracer(module)
    values = reader.values()
    reader.check_record(values)
    return {node: value.layout for node, value in values.items() if value is not None}


def narrow_model(module: nn.Module, channels: Channels) -> nn.Module:
    """The network itself, cut in place to these channels.

    Raises:
        ConfigError: it cannot be cut.
    """
    plan = channel_plan(module)
    for prefix, layer in module.named_modules():
        own = {
            name: tensor
            for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
            if any(axis.group in channels for axis in plan.axes[_join(prefix, name)])
        }
        for name, tensor in own.items():
            value = slice_channels(plan, {_join(prefix, name): tensor.detach()}, channels)[_join(prefix, name)]
            if tensor.dim() == 4 and tensor.stride() == _channels_last(tensor).stride():
                value = _channels_last(value).copy_(value)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(layer, name, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)
        if own:
            _note_sizes(layer)
    if isinstance(module, SplitModel) and isinstance(module.head, nn.Linear):
        module.feature_dim = module.head.in_features
    _plans.pop(module, None)  # it is another network now
    return module


def _channels_last(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.channels_last)


def _note_sizes(layer: nn.Module) -> None:
    if isinstance(layer, _ConvNd):
        layer.out_channels, layer.in_channels = layer.weight.shape[:2]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, _BatchNorm):
        layer.num_features = len(layer.weight if layer.weight is not None else layer.running_mean)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


class _ChannelTracer:
    """Follows a recorded forward step by step and finds out which channels belong together."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._name = getattr(module, "architecture", "") or type(module).__name__
        self._parents = [WHOLE, OUTPUT]  # union-find: the smallest number of a group is its root
        self._sizes: dict[int, int] = {}
        self._axes: dict[str, tuple[Axis, ...]] = {}

    def plan(self) -> ChannelPlan:
        """The plan; groups are numbered in the order in which they come up."""
        self.values()
        roots = sorted({self._root(group) for group in self._sizes} - {WHOLE, OUTPUT})
        number = {WHOLE: WHOLE, OUTPUT: OUTPUT, **{root: place for place, root in enumerate(roots, 2)}}
        axes = {
            name: tuple(Axis(number[self._root(axis.group)], axis.repeat) for axis in self._axes[name])
            if name in self._axes
            else (Axis(WHOLE),) * tensor.dim()
            for name, tensor in [*self._module.named_parameters(), *self._module.named_buffers()]
        }
        return ChannelPlan(axes, {number[root]: self._sizes[root] for root in roots})

    def values(self) -> dict[fx.Node, _Value | None]:
        """Every step and what it hands on; None for numbers and sizes."""
        names = [name for name, _ in self._module.named_parameters(remove_duplicate=False)]
        if len(names) != len(list(self._module.parameters())):
            self._refuse("two of its layers share a parameter")
        for name, layer in self._module.named_modules():
            if is_parametrized(layer) or "weight" in vars(layer):  # by torch.nn.utils.weight_norm and its like
                self._refuse(f"the layer '{name}' has a parametrization, as weight_norm and spectral_norm make one")
        values: dict[fx.Node, _Value | None] = {}
        for node in self._record().nodes:
            if node.op == "output":
                self._leave(node.args[0], values)
            else:
                values[node] = self._step(node, values)
        return values

    def check_record(self, values: Mapping[fx.Node, _Value | None]) -> None:
        """Whether the record stands for the forward in both modes, and parts of it for parts of the network."""
        for node, value in values.items():
            if value is not None and not node.users:
                self._refuse(f"the result of '{node.name}' is not used")
        if str(next(iter(values)).graph) != str(self._record(training=True)):
            self._refuse("its forward takes other steps in training than in scoring (layers, as nn.Dropout, may)")

    def _record(self, training: bool = False) -> fx.Graph:
        try:
            with eval_mode(self._module):
                return fx.Tracer().trace(self._module.train(training))
        except Exception as error:
            self._refuse(f"its forward cannot be recorded ({first_line(error)})")

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(
            f"{self._name} cannot be cut to narrower networks: {why}; expected convolutions, linear layers, BatchNorm, "
            "activations, pooling, flattening and sums of equal channels"
        )

    # steps -------------------------------------------------------------------------------------------------------
    def _step(self, node: fx.Node, values: Mapping[fx.Node, _Value | None]) -> _Value | None:
        if node.op == "placeholder":
            return _Value(WHOLE)
        inputs = [values[one] for one in node.all_input_nodes]
        if not any(inputs):
            if node.op == "get_attr":
                self._refuse(f"'{node.target}' is used outside a layer")
            return None  # numbers and sizes, not channels
        value = next(one for one in inputs if one is not None)
        if node.op == "call_module":
            if len(inputs) != 1:
                self._refuse(f"'{node.target}' takes {len(inputs)} tensors")
            return self._through(str(node.target), value)
        return self._function(node, [one for one in inputs if one is not None], value)

    def _through(self, name: str, value: _Value) -> _Value:
        layer = self._module.get_submodule(name)
        if isinstance(layer, _ConvNd | nn.Linear):
            return self._mixes(name, layer, value)
        if isinstance(layer, _BatchNorm):
            axis = self._axis(name, value, layer.num_features)
            for own, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
                self._note(_join(name, own), (axis,) * tensor.dim())
            return value
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
            return value.flattened()
        if isinstance(layer, _PLAIN) or (isinstance(layer, _SPATIAL) and value.layout == "image"):
            return value
        self._refuse(f"'{name}' is a {type(layer).__name__}{'' if value.layout == 'image' else ' of flat channels'}")

    def _mixes(self, name: str, layer: nn.Module, value: _Value) -> _Value:
        """A layer every output of which sees all inputs."""
        if isinstance(layer, _ConvNd):
            if layer.groups != 1 or layer.transposed:
                self._refuse(f"'{name}' is a convolution in groups, or transposed")
            if value.layout != "image":
                self._refuse(f"'{name}' is a convolution of flat channels")
            width = layer.in_channels
        else:
            assert isinstance(layer, nn.Linear)
            if value.layout == "image" and self._root(value.group) != WHOLE:
                self._refuse(f"'{name}' is a linear layer on channels that are not flattened")
            width = layer.in_features
        weight = layer.weight
        assert isinstance(weight, Tensor)
        out = Axis(self._new(len(weight)))
        self._note(_join(name, "weight"), (out, self._axis(name, value, width), *[Axis(WHOLE)] * (weight.dim() - 2)))
        if layer.bias is not None:
            self._note(_join(name, "bias"), (out,))
        return _Value(out.group, "image" if isinstance(layer, _ConvNd) else "dense")

    def _function(self, node: fx.Node, inputs: list[_Value], value: _Value) -> _Value | None:
        target: Any = node.target
        if target in _ADDITIONS or target in _SCALINGS:
            if len(inputs) == 1:
                return value  # and a number
            if target in _ADDITIONS and inputs[0].layout == inputs[1].layout:
                self._unite(inputs[0].group, inputs[1].group, node)
                return value
        elif len(inputs) == 1:
            if target in _ACTIVATIONS or (target in _POOLS and value.layout == "image"):
                return value
            if _flattens(node):
                return value.flattened()
            if value.layout == "image" and _averages_pixels(node):
                return _Value(value.group, "dense")
            if target == "size" or (target is getattr and node.args[1] == "shape"):
                return None
        self._refuse(f"it is not known what '{getattr(target, '__name__', target)}' does to channels")

    def _leave(self, returned: Any, values: Mapping[fx.Node, _Value | None]) -> None:
        several = returned if isinstance(returned, tuple | list) else (returned,)
        for one in several:
            value = values.get(one) if isinstance(one, fx.Node) else None
            if value is None:
                self._refuse("it returns something else than a tensor or several")
            group = self._root(value.group)
            if group != WHOLE:
                self._parents[group] = OUTPUT

    # groups ------------------------------------------------------------------------------------------------------
    def _new(self, size: int) -> int:
        group = len(self._parents)
        self._parents.append(group)
        self._sizes[group] = size
        return group

    def _root(self, group: int) -> int:
        while self._parents[group] != group:
            group = self._parents[group]
        return group

    def _unite(self, one: int, other: int, node: fx.Node) -> None:
        one, other = sorted((self._root(one), self._root(other)))
        if one != WHOLE and self._sizes[one] != self._sizes[other]:
            self._refuse(f"'{node.name}' adds {self._sizes[one]} channels to {self._sizes[other]}")
        self._parents[other] = one

    def _axis(self, name: str, value: _Value, width: int) -> Axis:
        """The dimension along which a layer of this width takes the value."""
        group = self._root(value.group)
        if group == WHOLE:
            return Axis(WHOLE)
        repeat, rest = divmod(width, self._sizes[group])
        if rest or (repeat != 1 and value.layout != "pixels"):
            self._refuse(f"'{name}' takes {width} channels where {self._sizes[group]} come")
        return Axis(group, repeat)

    def _note(self, name: str, axes: tuple[Axis, ...]) -> None:
        if name in self._axes:
            self._refuse(f"'{name}' is used twice")
        self._axes[name] = axes


def _flattens(node: fx.Node) -> bool:
    """Whether a step makes N x C x ... an N x (C ...)."""
    target = node.target
    rest = node.args[1:]
    if target in (torch.flatten, "flatten"):
        return bool(rest in ((1,), (1, -1)) or (not rest and node.kwargs == {"start_dim": 1}))
    if target in (torch.reshape, "reshape", "view"):
        sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
        return len(sizes) == 2 and bool(sizes[1] == -1)
    return False


def _averages_pixels(node: fx.Node) -> bool:
    """Whether a step is a mean over all that stands behind the channels, which leaves N x C."""
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    keeps = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    over_pixels = isinstance(dims, tuple | list) and sorted(dims, key=str) in ([2, 3], [-1, -2])
    return node.target in (torch.mean, "mean") and over_pixels and not keeps
