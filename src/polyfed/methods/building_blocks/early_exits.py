"""Early exits: small classifiers inside a network, found places for them, and the network up to one of them.

A *block* ends where everything that follows depends on a single tensor, with a convolution or a linear layer since the
last such place: in a ResNet the stem and every residual block, in a plain network every layer. What only reworks a
block's output (BatchNorm behind its convolution, activation, pooling) belongs to it. The head is none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from polyfed.errors import ConfigError
from polyfed.functional.channel_slices import width
from polyfed.functional.fx_graph import GraphSegment
from polyfed.functional.modes import has_batchnorm
from polyfed.methods.building_blocks.channel_groups import Layout, trace_layouts

_NAME = "early_exits"  # prefix of the exits' tensors
_Layer = _ConvNd | nn.Linear  # mixes channels
_PLACES = (
    "two or more convolutions, residual blocks or hidden layers, one after the other, as all of the zoo but fedhenn-h1 "
    "have them (heterofl, which cuts by width alone, needs none)"
)


class _Block(NamedTuple):
    """end: the step that gives its output. layer: its last convolution or linear layer."""

    end: fx.Node
    layer: _Layer


class MultiExitModel(nn.Module):
    """A network up to one of its exits, and the exits before it: (N, ...) to the logits of each, N x C, in order.

    Its tensors keep the names that they have in the network; those of early exits are ``early_exits.block<k>.*``, k the
    number of blocks before the exit.

    Args:
        architecture: the network's name.
        layers: of the network and its exits, by name; they are shared, not copied, and only those that are needed.
        outputs: the steps of the recorded forward that give the logits.
        blocks: of each exit, how many blocks there are before it. of: how many the whole network has.
        single: the module gives the logits of its one exit instead of a tuple.
    """

    def __init__(
        self,
        architecture: str,
        layers: Mapping[str, nn.Module],
        outputs: Sequence[fx.Node],
        blocks: Sequence[int],
        of: int,
        single: bool = False,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.blocks = tuple(blocks)
        self.of = of
        self.single = single
        self._recorded = _Recorded(outputs)
        for name in self._recorded.layers:
            _put(self, name, layers[name])

    def forward(self, x: Tensor) -> Any:
        """The logits of all exits, or of its single one."""
        logits = self._recorded.steps(self, x)
        return logits[0] if self.single else logits

    def truncated(self, depth: float) -> MultiExitModel:
        """The network up to the exit that lies at this depth, with all exits on the way."""
        return self._only(slice(sum(before <= width(self.of, depth) for before in self.blocks)))

    def final_exit(self) -> MultiExitModel:
        """The network up to its last exit, without the others."""
        return self._only(slice(-1, None), single=True)

    def _only(self, exits: slice, single: bool = False) -> MultiExitModel:
        outputs = self._recorded.outputs
        layers = dict(self.named_modules())
        return MultiExitModel(self.architecture, layers, outputs[exits], self.blocks[exits], self.of, single)


class _Recorded:
    """What a forward was recorded to do: names and no tensors, so that copies of a network share it."""

    def __init__(self, outputs: Sequence[fx.Node]) -> None:
        self.outputs = tuple(outputs)
        needed = set(outputs)
        graph = self.outputs[0].graph
        for node in reversed(graph.nodes):
            needed.update(node.all_input_nodes if node in needed else ())
        start, *nodes = (node for node in graph.nodes if node in needed)
        self.layers = [str(node.target) for node in nodes if node.op == "call_module"]
        self.steps = GraphSegment(nodes, start, self.outputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorded:
        return self


def add_early_exits(network: nn.Module, depths: Collection[float]) -> MultiExitModel:
    """The network with an exit behind its first ceil(depth * blocks) blocks, for every depth; equal ones are one exit.

    The exit behind all blocks is the network's own head. The others are a linear layer on the means over pixels; where
    a block ends with a sum and the network has BatchNorm, behind BatchNorm and ReLU.

    Args:
        network: what `channel_plan` understands; its layers are shared. depths: in (0, 1], 1 among them.

    Raises:
        ConfigError: the network cannot be recorded and cut, or has no place for an early exit.
    """
    *blocks, head = _blocks(network)
    wanted = sorted({width(len(blocks), depth) for depth in depths})
    if wanted[0] >= len(blocks) and min(depths) < 1:
        count = "1 block" if len(blocks) == 1 else f"{len(blocks)} blocks"
        _refuse(
            network, f"no place for an early exit at depth {min(depths):g}: it has {count} before its head", _PLACES
        )
    if hasattr(network, _NAME):
        _refuse(network, f"a part named '{_NAME}' of its own", "a network without")
    record = head.end.graph
    layers = dict(network.named_modules())
    (own,) = record.output_node().args
    if not isinstance(own, fx.Node):
        _refuse(network, "several outputs of its own", "one tensor of logits")
    outputs = []
    for before in wanted[:-1]:
        block = blocks[before - 1]
        name = f"{_NAME}.block{before}"
        layers[name] = _exit(block, head.layer, has_batchnorm(network))
        with record.inserting_after(block.end):
            outputs.append(record.call_module(name, (block.end,)))
    return MultiExitModel(_named(network), layers, [*outputs, own], wanted, len(blocks))


def _refuse(network: nn.Module, what: str, expected: str) -> NoReturn:
    raise ConfigError(f"{_named(network)} has {what}; expected {expected}")


def _named(network: nn.Module) -> str:
    return getattr(network, "architecture", "") or type(network).__name__


def _exit(block: _Block, head: _Layer, normalized: bool) -> nn.Module:
    """A classifier for a block's output, as fresh as PyTorch makes it."""
    channels = len(block.layer.weight)
    pixels = block.layer.weight.dim() - 2
    place: dict[str, Any] = {"device": head.weight.device, "dtype": head.weight.dtype}
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if normalized and _adds(block.end):
        layers["norm"] = getattr(nn, f"BatchNorm{max(pixels, 1)}d")(channels, **place)
        layers["relu"] = nn.ReLU()
    if pixels:
        layers["pool"] = getattr(nn, f"AdaptiveAvgPool{pixels}d")(1)
        layers["flatten"] = nn.Flatten()
    layers["linear"] = nn.Linear(channels, len(head.weight), **place)
    return nn.Sequential(layers)


def _blocks(network: nn.Module) -> list[_Block]:
    """The network's blocks in order, and its head as the last.

    Raises:
        ConfigError: the network cannot be recorded and cut, or nothing in it mixes channels.
    """
    steps = trace_layouts(network)
    place = {node: i for i, node in enumerate(steps)}
    blocks: list[_Block] = []
    mixed: _Layer | None = None  # the last such layer since a block has ended
    used = 0  # the last step that uses something from before
    for node, i in place.items():
        layer = network.get_submodule(str(node.target)) if node.op == "call_module" else None
        mixed = layer if isinstance(layer, _Layer) else mixed
        if used <= i and mixed is not None:
            blocks.append(_Block(node, mixed))
            mixed = None
        elif used <= i and blocks and _reworks(node, layer, blocks[-1].end, steps):
            blocks[-1] = blocks[-1]._replace(end=node)
        used = max([used, *(place[user] for user in node.users if user in place)])
    if not blocks:
        _refuse(network, "no layer to train", _PLACES)
    return blocks


def _reworks(node: fx.Node, layer: nn.Module | None, end: fx.Node, steps: Mapping[fx.Node, Layout]) -> bool:
    """Whether a step still belongs to the block that has ended with `end`; BatchNorm behind a sum begins the next."""
    return (
        end in node.all_input_nodes and steps[node] == steps[end] and not (isinstance(layer, _BatchNorm) and _adds(end))
    )


def _adds(node: fx.Node) -> bool:
    return len(node.all_input_nodes) > 1


def _put(module: nn.Module, name: str, part: nn.Module) -> None:
    """Let a part have a dotted name in a module."""
    *path, last = name.split(".")
    for step in path:
        if step not in dict(module.named_children()):
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    module.add_module(last, part)
