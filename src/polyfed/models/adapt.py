"""Any nn.Module (timm, torchvision, your own) becomes a SplitModel by naming its head and the end of its extractor.

The module's own forward is recorded with torch.fx and the record is cut at the outputs of the two named submodules, so
skip connections and functional calls stay where they are, and the parts put together compute exactly what the module
computes, in eval and in train mode. Recording only enters the modules that contain a named one; everything else is
called as it is and may be written in any way.

A forward that cannot be recorded (branches on values or on its mode, loops over a length) can still be cut before its
head: it is run as it is, and what it calls the head with is the representation (`CapturedHead`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from polyfed.errors import ConfigError, described, suggest
from polyfed.functional.modes import eval_mode
from polyfed.models.split import Part, SplitModel, check_plain, in_features, projection_and_head
from polyfed.models.traced_forward import ROOT, CapturedHead, CutForward, UnrecordedForward, logits_of, trace_forward

Half = Callable[[nn.Module, Tensor], Any]  # runs a part of the forward of what a wrapper holds


def split(
    module: nn.Module,
    head: str = "fc",
    extractor: str | None = "layer1",
    *,
    example: Tensor | None = None,
    architecture: str | None = None,
) -> Adapted:
    """Cuts a module into extractor, intermediate part and head, without changing it; the parameters stay shared.

    Args:
        module: takes one tensor (further arguments keep their defaults), returns the logits, a tensor, or what has
            them as its attribute ``logits``, as networks of Hugging Face do.
        head: dotted name of the submodule that turns the representation into logits. It is called last.
        extractor: dotted name of the last submodule of the extractor, which ends at its output; for FedIN the first
            block. None: everything before the head, and an empty intermediate part (enough for FedGH and FedHeNN); the
            forward then need not be one that torch.fx can record.
        example: a batch (N x ...). Tells the feature width where the head has no ``in_features``, and is run through
            both the module and the parts, in eval mode, to check that they agree.
        architecture: name for messages and exports; by default the module's class.

    Returns:
        A model whose `original` is `module`, whose keys are the module's under the prefix ``original.``, and whose
        `export` gives the module's own keys back.

    Raises:
        ConfigError: there is no such submodule; it is not called exactly once; the forward cannot be recorded, and an
            extractor is named; something computed before the cut is used after it; something follows the head; parts
            share a parameter; the feature width is unknown; the example disagrees. Where the forward is not recorded,
            how often the head is called and what follows it is seen when the network runs: with `example` at once.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    >>> model = split(net, head="4", extractor="1")
    >>> model.feature_dim, model.names("intermediate"), list(model.export())[:2]
    (5, ('original.2.weight', 'original.2.bias'), ['0.weight', '0.bias'])
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"split expects an nn.Module, got {described(module)}")
    if isinstance(module, SplitModel):
        raise ConfigError(f"{module.architecture} is a SplitModel already; use it as it is")
    check_plain(module)
    model = Adapted(module, head, extractor, architecture or type(module).__name__)
    if example is None:
        model.feature_dim = in_features(model.head)
        return model
    if not isinstance(example, Tensor):
        raise ConfigError(f"example: expected a batch as a tensor, got {described(example)}")
    with eval_mode(model), torch.no_grad():
        z = model.represent(example)
        agrees = torch.equal(model.head(z), logits_of(module(example)))
    if not isinstance(z, Tensor) or z.dim() != 2:
        shape = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
        raise ConfigError(f"the input of head '{head}' should be N x D, got {shape}: name a later submodule as head")
    if not agrees:
        raise ConfigError(
            f"the parts of {model.architecture} do not repeat its own forward on the example (does it draw random "
            "numbers or keep state in eval mode?); build it as polyfed.models.SequentialSplit(extractor, "
            "intermediate, head)"
        )
    model.feature_dim = z.shape[1]
    return model


class Adapted(SplitModel):
    """What `split` returns: holds the module as `original` and runs the two halves of its forward.

    Attributes:
        original: the module.
    """

    original: nn.Module
    _halves: tuple[Half, Half]  # x to s_in, s_in to z

    def __init__(self, module: nn.Module, head: str, extractor: str | None, architecture: str) -> None:
        super().__init__(architecture, feature_dim=0)  # split sets the width
        self.original = module
        self._head = _canonical(module, head, "head")
        self.extractor_name = None if extractor is None else _canonical(module, extractor, "extractor")
        self.training = module.training
        self._record()

    @property
    def head(self) -> nn.Module:
        """The submodule of `original` that was named as its head."""
        return self.original.get_submodule(self._head)

    def extract(self, x: Tensor) -> Tensor:
        """The input to what leaves the named end of the extractor."""
        s_in: Tensor = self._halves[0](self, x)
        return s_in

    def transform(self, s_in: Tensor) -> Tensor:
        """What left the extractor to what enters the head (N x D).

        Works on a copy, because layers such as ``ReLU(inplace=True)`` would overwrite the caller's `s_in`.
        """
        return s_in if self.extractor_name is None else self._halves[1](self, s_in.clone())

    def part_of(self, name: str) -> Part:
        """Which part a name of this wrapper (``original.*``) belongs to."""
        if name not in self._parts:
            raise ConfigError(f"{self.architecture} has no tensor '{name}'{suggest(name, self._parts)}")
        return self._parts[name]

    def export(self) -> dict[str, Tensor]:
        """The state dict under the original module's own keys."""
        return {name.removeprefix(f"{ROOT}."): tensor for name, tensor in self.state_dict().items()}

    def with_layers(self, layers: Mapping[str, nn.Module]) -> SplitModel:
        """See `SplitModel.with_layers`; the forward is recorded anew, for the new layers' tensors."""
        super().with_layers(layers)
        return split(self.original, self._head, self.extractor_name, architecture=self.architecture)

    def projected(self, feature_dim: int, average: bool = False) -> SplitModel:
        """A copy with the layers of `projection_and_head` and a new ``<head>.head`` in the head's place."""
        layers, head = projection_and_head(self.head, feature_dim, average)
        module = copy.deepcopy(self.original)
        module.set_submodule(self._head, nn.Sequential(OrderedDict([*layers.items(), ("head", head)])))
        return split(module, f"{self._head}.head", self.extractor_name, architecture=self.architecture)

    def _record(self) -> None:
        """Cuts the forward; sets `_halves` and `_parts`."""
        try:
            cut = self._traced()
        except UnrecordedForward as reason:
            if self.extractor_name is not None:
                raise ConfigError(
                    f"{self.architecture} cannot be cut after '{self.extractor_name}': {reason}; or pass "
                    "extractor=None, which does without a record and is enough for most methods, or build it as "
                    "polyfed.models.SequentialSplit(extractor, intermediate, head)"
                ) from reason
            caught = CapturedHead(self._head, self.architecture)
            self._parts = self._assign([])
            self._halves = caught, caught
            return
        self._parts = self._assign([("extractor", cut.before), ("intermediate", cut.after)])
        self._halves = cut.halves()

    def _traced(self) -> CutForward:
        """The recorded forward, divided; it is recorded in both modes, as a record cannot ask for its mode."""
        named = [self._head] if self.extractor_name is None else [self._head, self.extractor_name]
        dotted = [name.split(".") for name in named]
        entered = sorted({".".join(steps[:i]) for steps in dotted for i in range(len(steps))})
        flags = [(m, m.training) for m in map(self.original.get_submodule, entered)]
        sources = []
        try:
            for mode in (True, False):
                for m, _ in flags:
                    m.training = mode
                graph, root = trace_forward(self.original, entered)
                sources.append([str(node.format_node()) for node in graph.nodes])
        finally:
            for m, flag in flags:
                m.training = flag
        if sources[0] != sources[1]:
            raise UnrecordedForward("its forward asks for its mode (functional dropout?); call a layer, as nn.Dropout")
        cut = CutForward(graph, self._head, self.extractor_name, self.architecture)
        self._adopt_constants(graph, root)
        return cut

    def _adopt_constants(self, graph: fx.Graph, root: nn.Module) -> None:
        """Tensors that the forward makes out of nothing were left on `root`: keep them here, as buffers not saved."""
        for node in graph.nodes:
            if node.op == "get_attr" and not node.target.startswith(f"{ROOT}."):
                name = f"_own{node.target}"
                self.register_buffer(name, getattr(root, node.target), persistent=False)
                node.target = name

    def _assign(self, sides: Sequence[tuple[Part, Sequence[fx.Node]]]) -> dict[str, Part]:
        """The part of every state-dict key, parameter and buffer, from which side of the cut uses it."""
        used: dict[str, Part] = {f"{ROOT}.{self._head}": "head"}
        for part, nodes in sides:
            for node in (one for one in nodes if one.op in ("call_module", "get_attr")):
                name = str(node.target)
                if used.setdefault(name, part) != part and self._trainable(node):
                    self._shared(name, used[name], part)
        unused: Part = "extractor" if self.extractor_name is None else "intermediate"
        names = dict.fromkeys(self.state_dict())
        names |= dict.fromkeys(name for name, _ in self.named_buffers())
        parameters = dict(self.named_parameters(remove_duplicate=False))
        parts: dict[str, Part] = {}
        for name in names | dict.fromkeys(parameters):
            steps = name.split(".")
            owners = (".".join(steps[:i]) for i in range(len(steps), 0, -1))
            parts[name] = next((used[owner] for owner in owners if owner in used), unused)
        first: dict[int, str] = {}
        for name, parameter in parameters.items():
            other = first.setdefault(id(parameter), name)
            if parts[other] != parts[name]:
                self._shared(name, parts[other], parts[name])
        return parts

    def _trainable(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return any(True for _ in self.get_submodule(str(node.target)).parameters())
        return str(node.target) in dict(self.named_parameters(remove_duplicate=False))

    def _shared(self, name: str, part: str, other: str) -> NoReturn:
        remedy = "name another end of the extractor, or pass extractor=None"
        if "head" in (part, other):
            remedy = "give the head tensors of its own"
        raise ConfigError(
            f"{self.architecture}: '{name.removeprefix(ROOT + '.')}' is used both in the {part} and in the {other}, "
            f"so it cannot belong to one part; {remedy}"
        )

    # A record cannot be pickled (it is made anew) and need not be copied (it holds names, no tensors) ---------------
    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_halves"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._record()

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapted:
        twin = type(self).__new__(type(self))
        memo[id(self)], memo[id(self._halves)] = twin, self._halves
        nn.Module.__setstate__(twin, copy.deepcopy(self.__dict__, memo))
        return twin


def _canonical(module: nn.Module, name: str, role: str) -> str:
    """The name under which torch.fx knows the submodule: the first, where it is registered under several."""
    names = {found: m for found, m in module.named_modules(remove_duplicate=False) if found}
    if not isinstance(name, str):
        raise ConfigError(f"{role}: expected the dotted name of a submodule, got {described(name)}")
    if name not in names:
        hint = suggest(name, names) if name else "; pass its dotted name"
        other = "; or pass extractor=None" if role == "extractor" else ""
        raise ConfigError(f"{type(module).__name__} has no submodule '{name}' to be its {role}{hint}{other}")
    return str(next(found for found, m in names.items() if m is names[name]))
