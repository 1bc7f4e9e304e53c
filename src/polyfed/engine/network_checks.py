"""What a network may hold: all its state in ``state_dict()``, where clients own and save it, and no tensor half shared.

State elsewhere (plain attributes, counters) is found by a trial: after the same batch a network has to hold the same,
whether other batches came before or not, and to give the same, with equal tensors and equal draws.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.modules import load_state
from polyfed.core.randomness import seeded_global_rng
from polyfed.engine.executors.stack_parts import are_near
from polyfed.engine.held_attributes import GENERATORS, held, owner_of, same
from polyfed.errors import ConfigError
from polyfed.functional.tied_tensors import first_names
from polyfed.models.adapt import Adapted
from polyfed.models.split import SplitModel
from polyfed.models.traced_forward import logits_of

_ROWS = 2  # of a forward: as few as BatchNorm takes
_CLOSE = {"cpu": 1e-6}  # of the largest entry: what rounding may change, by type of device
_ELSEWHERE = 1e-4  # where sums may be taken in any order
_STATELESS = ("torch.nn.", "polyfed.")  # whose layers have all their state in state_dict()
_LATER = [10**power for power in range(1, 7)]  # what a counter may come to


def check_memory(client: Client, network: nn.Module) -> None:
    """Check that parameters share their memory as one parameter or not at all: copies of others would part.

    Raises:
        ConfigError: two do not.
    """
    ends: dict[int, tuple[int, str]] = {}
    found = [(p.data_ptr(), name, p) for name, p in network.named_parameters() if p.numel()]
    for begin, name, parameter in sorted(found, key=lambda one: one[:2]):
        memory = parameter.untyped_storage().data_ptr()
        end, other = ends.get(memory, (0, ""))
        if begin and begin < end:
            raise ConfigError(
                f"{client.title_with_network}: the parameters '{other}' and '{name}' of its network share memory "
                f"without being one, and would part when it is copied; tie them as one, layer.weight = other.weight"
            )
        size = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)) + 1
        ends[memory] = (begin + size * parameter.element_size(), name)


def check_parts(client: Client, model: SplitModel) -> None:
    """Check that no tensor belongs to two parts.

    Raises:
        ConfigError: one does.
    """
    for name, first in first_names(model).items():
        if name != first and model.part_of(name) != model.part_of(first):
            raise ConfigError(
                f"{client.title_with_network}: '{first}' and '{name}' are one tensor, of the "
                f"{model.part_of(first)} and the {model.part_of(name)}; give each part tensors of its own"
            )


def check_state(client: Client, template: nn.Module, build: Callable[[], nn.Module]) -> None:
    """Check that what a network keeps of earlier batches is in its ``state_dict()``.

    Numbers that change and that nothing seems to depend on, whatever they are, are only warned of. A forward that fails
    is another trial's business.

    Args:
        template: what the client trains. build: makes the client's own network, every time the same.

    Raises:
        ConfigError: it keeps something elsewhere, or what it gives depends on earlier batches in another way.
    """
    if all(_is_stateless(layer) for layer in template.modules()):
        return
    device = next(template.parameters()).device
    places = torch.arange(_ROWS) % client.n
    x, other = (client.prepare(client.data.train.x[rows]).to(device) for rows in (places, client.n - 1 - places))
    try:
        network = _new(build, device)
        start = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        expected = _outputs(network, start, x)
        for _ in range(2):
            _outputs(network, start, other)
        after_all = held(network)
        fresh = _new(build, device)
        at_first = held(fresh)
        _outputs(fresh, start, other)
        after_one = held(fresh)
    except Exception:  # in the forward of a new network
        return
    close = _closeness(device)
    changed = [name for name in after_one if not same(after_one[name], at_first.get(name), close)]
    for name in (name for name in changed if not same(after_one[name], after_all.get(name), close)):
        if not _is_idle(network, name, lambda: _gives(network, start, x, expected)):
            raise ConfigError(
                f"{client.title_with_network}: its network keeps '{name}' from batch to batch outside of "
                f"state_dict(), where no client would own or save it; {_instead(network, name)}"
            )
        warnings.warn(
            f"{client.title_with_network}: '{name}' of its network changes from batch to batch outside of "
            "state_dict(), so that no client owns or saves it; what the network gives seems not to depend on it",
            stacklevel=2,
        )
    if not _gives(network, start, x, expected):
        raise ConfigError(
            f"{client.title_with_network}: what its network gives depends on earlier batches by more than "
            "state_dict(), which no client would own or save; make what its forward keeps a buffer: "
            "self.register_buffer('mean', torch.zeros(...))"
        )


def _is_stateless(layer: nn.Module) -> bool:
    kinds = [kind for kind in type(layer).__mro__ if issubclass(kind, nn.Module)]
    known = all(kind.__module__.startswith(_STATELESS) for kind in kinds)
    return known and not layer._forward_hooks and not layer._forward_pre_hooks


def _new(build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """A new network with its own forward."""
    with seeded_global_rng(0):
        network = build()
        own = network.original if isinstance(network, Adapted) else network
        return own.to(device)


def _forward(network: nn.Module, start: Mapping[str, Tensor], x: Tensor, training: bool) -> dict[str, Tensor]:
    """Outputs of a network that holds the tensors `start`, and its buffers among these afterwards."""
    load_state(network, start)
    with seeded_global_rng(0):
        outputs = logits_of(network.train(training)(x)).detach()
    buffers = {name: buffer.detach().clone() for name, buffer in network.named_buffers() if name in start}
    return {"": outputs, **buffers}


def _outputs(network: nn.Module, start: Mapping[str, Tensor], x: Tensor) -> list[dict[str, Tensor]]:
    """In eval mode and, after that, in training mode; the network then holds `start` again, as it may not be new."""
    found = [_forward(network, start, x, training) for training in (False, True)]
    load_state(network, start)
    return found


def _gives(network: nn.Module, start: Mapping[str, Tensor], x: Tensor, expected: list[dict[str, Tensor]]) -> bool:
    """Whether the network gives what is expected."""
    try:
        found = _outputs(network, start, x)
    except Exception:  # what an earlier batch left does not fit
        return False
    close = _closeness(x.device)
    pairs = zip(found, expected, strict=True)
    return all(are_near({n: one[n]}, {n: t}, close, 0.0) for one, other in pairs for n, t in other.items())


def _instead(network: nn.Module, name: str) -> str:
    """What to write in the place of an attribute that changes."""
    owner, key = owner_of(network, name)
    if isinstance(getattr(owner, key), GENERATORS):
        return "draw from PyTorch's own generator, as torch.rand(...) does, which polyfed seeds for each client"
    return f"make it a buffer that forward writes into: self.register_buffer('{key}', torch.zeros(...))"


def _is_idle(network: nn.Module, name: str, gives: Callable[[], bool]) -> bool:
    """Whether an attribute is a number, and the network `gives` what is expected however large it becomes."""
    owner, key = owner_of(network, name)
    value = getattr(owner, key)
    if type(value) not in (int, float):
        return False
    try:
        for later in _LATER:
            setattr(owner, key, type(value)(later))
            if not gives():
                return False
    finally:
        setattr(owner, key, value)
    return True


def _closeness(device: torch.device) -> float:
    return _CLOSE.get(device.type, _ELSEWHERE)
