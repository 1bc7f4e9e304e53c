"""The input of a module's head, where its forward cannot be recorded: the module runs as it is."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from polyfed.errors import ConfigError, PolyfedError
from polyfed.models.traced_forward import ROOT, describe_returned, head_not_last, logits_of

__all__ = ["CapturedHead"]


class CapturedHead:
    """What a module calls its head with: the module runs as it is, but for its head, which only takes note.

    In place of logits the head gives a `_Placeholder`; the module has to return it as it is, or something follows the
    head. Holds names and no tensors, as `GraphSegment` does.
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
    """Stands for logits that nobody computes; whatever is done with it fails."""


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
