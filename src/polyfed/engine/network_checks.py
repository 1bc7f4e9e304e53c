"""What a network may hold: all its state in ``state_dict()``, where clients own and save it, and no tensor half shared.

Tried, not read off: with equal tensors and equal draws a network has to give the same, whatever batches came before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.modules import copy_network, load_state
from polyfed.core.randomness import seeded_global_rng
from polyfed.errors import ConfigError
from polyfed.functional.tied_tensors import first_names
from polyfed.models.adapt import Adapted
from polyfed.models.split import SplitModel
from polyfed.models.traced_forward import logits_of

_ROWS = 2  # rows of a trial batch: as few as BatchNorm takes
_BATCHES = 8  # batches before the compared one: more than short windows and warm-ups last
_CLOSE = 1e-6  # rounding on the CPU, as a share of the largest entry
_STATELESS = ("torch.nn.", "polyfed.")  # whose layers have all their state in state_dict()

Outputs = list[dict[str, Tensor]]  # in eval and in training mode: "" the scores, buffers by name


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
    """Check that what a network gives depends on its inputs and its ``state_dict()`` alone, not on earlier batches.

    A forward that fails is another trial's business.

    Args:
        template: what the client trains. build: makes the client's own network, every time the same, on the CPU.

    Raises:
        ConfigError: it depends on more.
    """
    if all(_is_stateless(layer) for layer in template.modules()):
        return
    rows = torch.arange(_ROWS) % client.n
    x, other = (client.prepare(client.data.train.x[which]).cpu() for which in (rows, client.n - 1 - rows))
    with seeded_global_rng(0):
        network = build()
        network = network.original if isinstance(network, Adapted) else network
    start = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    try:
        expected = _outputs(network, start, x)
        for _ in range(_BATCHES):
            _outputs(network, start, other)
    except Exception:  # in the forward of a new network
        return
    if not _gives(network, start, x, expected):
        raise ConfigError(
            f"{client.title_with_network}: what its network gives depends on earlier batches by more than "
            "state_dict(), which no client would own or save; make what its forward keeps a buffer, "
            "self.register_buffer('mean', torch.zeros(...)), and draw from PyTorch's own generator, as torch.rand(...) "
            "does"
        )


def compute_alike(one: nn.Module, other: nn.Module, client: Client, who: str) -> bool:
    """Whether two networks with tensors of the same names and shapes give the same once these are equal.

    Args:
        client: with rows that both are tried on; where a forward fails they count as alike.
        who: whose `other` is, for messages.
    """
    first, second = copy_network(one, who).cpu(), copy_network(other, who).cpu()
    start = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    try:
        x = client.prepare(client.data.train.x[torch.arange(_ROWS) % client.n])
        return _gives(second, start, x, _outputs(first, start, x))
    except Exception:  # another trial says so
        return True


def _is_stateless(layer: nn.Module) -> bool:
    kinds = [kind for kind in type(layer).__mro__ if issubclass(kind, nn.Module)]
    known = all(kind.__module__.startswith(_STATELESS) for kind in kinds)
    return known and not layer._forward_hooks and not layer._forward_pre_hooks


def _outputs(network: nn.Module, start: Mapping[str, Tensor], x: Tensor) -> Outputs:
    """What the network gives where it holds `start`, which it does again afterwards."""
    found = []
    for training in (False, True):
        load_state(network, start)
        with seeded_global_rng(0):
            scores = logits_of(network.train(training)(x)).detach()
        buffers = {name: buffer.detach().clone() for name, buffer in network.named_buffers() if name in start}
        found.append({"": scores, **buffers})
    load_state(network, start)
    return found


def _gives(network: nn.Module, start: Mapping[str, Tensor], x: Tensor, expected: Outputs) -> bool:
    """Whether the network gives what is expected."""
    try:
        found = _outputs(network, start, x)
    except Exception:  # what an earlier batch left does not fit
        return False
    pairs = [(one[name], other[name]) for one, other in zip(found, expected, strict=True) for name in other]
    return all(_are_near(one, other) for one, other in pairs)


def _are_near(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    most = _CLOSE * float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=0.0, atol=most, equal_nan=True)
