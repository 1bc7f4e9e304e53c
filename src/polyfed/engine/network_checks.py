"""What a network may hold: all its state in ``state_dict()``, where clients own and save it, and no tensor half shared.

State elsewhere (plain attributes, counters) is found by a trial: before and after a forward on other rows in training
mode, with equal tensors and equal draws, a network has to give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.modules import load_state
from polyfed.core.randomness import seeded_global_rng
from polyfed.engine.executors.stack_parts import are_near
from polyfed.errors import ConfigError
from polyfed.functional.tied_tensors import first_names
from polyfed.models.adapt import Adapted
from polyfed.models.split import SplitModel
from polyfed.models.traced_forward import logits_of

_ROWS = 2  # of a forward: as few as BatchNorm takes
_CLOSE = {"cpu": 1e-6}  # of the largest entry: what rounding may change, by type of device
_ELSEWHERE = 1e-4  # where sums may be taken in any order
_STATELESS = ("torch.nn.", "polyfed.")  # whose layers have all their state in state_dict()


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
    """Check that what a network gives depends on earlier batches by its ``state_dict()`` alone.

    A forward that fails is another trial's business.

    Args:
        template: what the client trains. build: makes the client's own network, every time the same.

    Raises:
        ConfigError: it depends on something else.
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
            _forward(network, start, other, training=True)
    except Exception:  # in the forward of a new network
        return
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
    close = _CLOSE.get(x.device.type, _ELSEWHERE)
    pairs = zip(found, expected, strict=True)
    return all(are_near({n: one[n]}, {n: t}, close, 0.0) for one, other in pairs for n, t in other.items())
