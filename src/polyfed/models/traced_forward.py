"""A module's forward, recorded with torch.fx and divided where its extractor ends; or run as it is up to its head."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from polyfed.errors import ConfigError, PolyfedError, described, first_line
from polyfed.functional.fx_graph import GraphSegment

ROOT = "original"  # the name under which a wrapper holds the module, and so the prefix of its state-dict keys


class CutForward:
    """A recorded forward, divided: nodes `before` the end of the extractor, and `after` it, up to the head's input."""

    def __init__(self, graph: fx.Graph, head: str, extractor: str | None, architecture: str) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self._name = architecture
        self.input = next(node for node in self.nodes if node.op == "placeholder")
        head_node = self._call(head, "head")
        self.z = self._head_input(head_node, head)
        at_head = self.nodes.index(head_node)
        if extractor is None:
            self.s_in = self.z
            self.before = self.nodes[:at_head]
            self.after: list[fx.Node] = []
            return
        self.s_in = self._call(extractor, "extractor")
        at_cut = self.nodes.index(self.s_in) + 1
        if at_cut > at_head:
            raise ConfigError(f"{architecture}: the extractor's end '{extractor}' is called after the head '{head}'")
        early = self.nodes[:at_cut]
        after = self.nodes[at_cut:at_head]
        # a parameter or buffer is read once, and belongs to where it is used: after the cut, before it, or both
        reads = [node for node in early if node.op == "get_attr"]
        late = [node for node in reads if not set(after).isdisjoint(node.users)]
        self.before = [node for node in early if node not in late or not set(early).isdisjoint(node.users)]
        self.after = [*late, *after]
        self._check_only_link(early, late, [*after, head_node], extractor)
        self._check_one_tensor(extractor)

    def _head_input(self, head_node: fx.Node, head: str) -> fx.Node:
        """What the head is called with; refuses a head that is not the end of the forward."""
        following = self.nodes[self.nodes.index(head_node) + 1 : -1]
        returned = self.nodes[-1].args[0]
        if following:
            raise ConfigError(head_not_last(self._name, head, f"'{spell_call(following[0])}' is called"))
        if returned is not head_node:
            raise ConfigError(head_not_last(self._name, head, f"the forward returns {describe_returned(returned)}"))
        inputs = [*head_node.args, *head_node.kwargs.values()]
        if len(inputs) != 1 or not isinstance(inputs[0], fx.Node):
            raise ConfigError(f"{self._name}: the head '{head}' must be called with one tensor, got {len(inputs)}")
        return inputs[0]

    def _check_only_link(
        self, early: Sequence[fx.Node], late: Sequence[fx.Node], after: Sequence[fx.Node], extractor: str
    ) -> None:
        """Refuse a cut past which anything goes but the extractor's output."""
        for node in after:
            for needed in node.all_input_nodes:
                if needed in early and needed is not self.s_in and needed not in late:
                    raise ConfigError(
                        f"{self._name} cannot be cut after '{extractor}': '{spell_call(node)}', after the cut, also "
                        f"needs {_origin(needed)}; end the extractor where a single tensor passes, or pass "
                        "extractor=None"
                    )

    def _check_one_tensor(self, extractor: str) -> None:
        """Refuse an extractor that returns several values, of which some are taken."""
        for node in self.after:
            if node.target is operator.getitem and node.args[0] is self.s_in and isinstance(node.args[1], int):
                raise ConfigError(
                    f"{self._name}: '{extractor}' returns several values; end the extractor at a submodule that "
                    "returns one tensor, or pass extractor=None"
                )

    def _call(self, name: str, role: str) -> fx.Node:
        calls = [n for n in self.nodes if n.op == "call_module" and n.target == f"{ROOT}.{name}"]
        if len(calls) != 1:
            often = f"called {len(calls)} times" if calls else "never called"
            raise ConfigError(f"{self._name}: its {role} '{name}' is {often} in the forward; expected exactly once")
        return calls[0]

    def halves(self) -> tuple[GraphSegment, GraphSegment]:
        """From x to s_in, and from s_in to z."""
        before = [node for node in self.before if node is not self.input]
        return GraphSegment(before, self.input, self.s_in), GraphSegment(self.after, self.s_in, self.z)


class _Tracer(fx.Tracer):
    """Enters only the modules in `entered`; records reads of buffers, so that nothing is frozen into the record."""

    proxy_buffer_attributes = True

    def __init__(self, entered: Sequence[str]) -> None:
        super().__init__()
        self._entered = {f"{ROOT}.{name}" if name else ROOT for name in entered}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is called as a whole."""
        return module_qualified_name not in self._entered


class _Entry(nn.Module):
    """Calls the module with one input, so that its further arguments take their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original = module

    def forward(self, x: Tensor) -> Any:
        return logits_of(self.original(x))


def logits_of(returned: Any) -> Any:
    """What a module returned, or the logits in it; a recorded value has every attribute, and is the tensor itself."""
    return returned if isinstance(returned, Tensor | fx.Proxy) else getattr(returned, "logits", returned)


class UnrecordedForward(Exception):
    """A forward cannot be recorded; says why, and what to do about it."""


def trace_forward(module: nn.Module, entered: Sequence[str]) -> tuple[fx.Graph, nn.Module]:
    """Records the forward in the mode the module is in, on a copy that shares its tensors."""
    root = _Entry(_twin(module))
    layers = dict(root.original.named_modules())
    held = {name: _attributes(layer) for name, layer in layers.items()}
    before = torch.get_rng_state()
    try:
        graph = _Tracer(entered).trace(root)
    except Exception as error:  # user code under a tracer can fail in any way
        reason = first_line(error)
        remedy = (
            "write x.shape[0] for len(x)" if "'len'" in reason else "move branches on tensor values into submodules"
        )
        raise UnrecordedForward(f"its forward cannot be recorded ({reason}); {remedy}") from error
    finally:
        drawn = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
    for name, layer in layers.items():
        _refuse_assigned(name, layer, held[name])
    if drawn:
        raise UnrecordedForward(
            "its forward draws random numbers without looking at the input, and a record would repeat one draw for "
            "ever; move them into a submodule"
        )
    return graph, root


def _twin(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and buffers, and whatever cannot be copied."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for layer in reversed([*module.modules()]):  # inner layers first
        twin = memo[id(layer)] = object.__new__(type(layer))
        vars(twin).update({key: _copied(value, memo) for key, value in vars(layer).items()})
    copied: nn.Module = memo[id(module)]
    return copied


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a lock, the result of an earlier call
        return value


def _attributes(layer: nn.Module) -> dict[str, Any]:
    return {**vars(layer), **layer._parameters, **layer._buffers}


def _refuse_assigned(place: str, layer: nn.Module, held: dict[str, Any]) -> None:
    """Refuse a forward that has assigned an attribute: a record runs its calls, and would not do so."""
    for key, value in _attributes(layer).items():
        if key not in held or held[key] is not value:
            name = ".".join(["self", *([place] if place else []), key])
            remedy = f"write {name}.copy_(...)" if key in layer._buffers else "keep that out of the forward"
            raise UnrecordedForward(f"its forward assigns {name}, which a record would not do; {remedy}")


def head_not_last(architecture: str, head: str, what: str) -> str:
    """The message about a head whose output is not what the forward returns."""
    return (
        f"{architecture}: {what} after the head '{head}', whose output must be what the forward returns: "
        "name as head the submodule that ends the network, or take that step out (losses expect plain logits)"
    )


def spell_call(node: fx.Node) -> str:
    """A recorded call in the user's words."""
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", node.target))
    return str(node.target).removeprefix(f"{ROOT}.")


def _origin(node: fx.Node) -> str:
    return "the input x" if node.op == "placeholder" else f"the output of '{spell_call(node)}'"


def describe_returned(returned: object) -> str:
    if isinstance(returned, fx.Node | Tensor):
        return "another tensor"
    return next(
        (f"a {kind.__name__}" for kind in (tuple, list, dict) if isinstance(returned, kind)), described(returned)
    )


# a forward that cannot be recorded -----------------------------------------------------------------------------------


class CapturedHead:
    """The input of a module's head where its forward cannot be recorded: the module runs as it is.

    Only its head takes note of what it is called with. In place of logits it gives a `_Placeholder`; the module has to
    return that as it is, or something follows the head. Holds names and no tensors, as `GraphSegment` does.
    """

    def __init__(self, head: str, architecture: str) -> None:
        self._head = head
        self._name = architecture

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        """The input to the representation."""
        original = model.get_submodule(ROOT)
        calls: list[Tensor] = []
        placeholder = _Placeholder()

        def note(*args: Any, **kwargs: Any) -> _Placeholder:
            given = [*args, *kwargs.values()]
            if len(given) != 1 or not isinstance(given[0], Tensor):
                raise self._refusal("must be called with one tensor")
            if calls:
                raise self._refusal("is called more than once in the forward; expected exactly once")
            calls.append(given[0])
            return placeholder

        try:
            with _replaced_forward(original.get_submodule(self._head), note):
                returned = logits_of(original(x))
        except PolyfedError:
            raise
        except Exception as error:  # the module is the user's
            if not calls:
                raise
            problem = head_not_last(self._name, self._head, f"the forward goes on ({type(error).__name__})")
            raise ConfigError(problem) from error
        if not calls:
            raise self._refusal("is never called in the forward; expected exactly once")
        if returned is not placeholder:
            raise ConfigError(
                head_not_last(self._name, self._head, f"the forward returns {describe_returned(returned)}")
            )
        return calls[0]

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(f"{self._name}: its head '{self._head}' {what}")


class _Placeholder:
    """Stands for logits that are not computed; every operation on it fails."""


@contextlib.contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the block a call of the module is one of `forward`, and its own hooks wait for its own forward."""
    names = ("forward", "_forward_pre_hooks", "_forward_hooks")
    held = vars(module)
    before = {name: held[name] for name in names if name in held}
    held.update(forward=forward, _forward_pre_hooks=OrderedDict(), _forward_hooks=OrderedDict())
    try:
        yield
    finally:
        del held["forward"]
        held.update(before)
