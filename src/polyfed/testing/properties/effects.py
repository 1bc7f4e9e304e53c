"""What the hyperparameters do, and that the method learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError, PolyfedError, suggest
from polyfed.testing import fixtures as worlds
from polyfed.testing.fixtures import CLASSES, SHORT, SIZES, TinyFederation, received
from polyfed.testing.kit import ChangedValue, ConformanceError, ConformanceKit, is_fixed, others, replaced
from polyfed.testing.spy import Spy
from polyfed.validation.hyperparameters import flat_settings

_LONGER = SHORT.model_copy(
    update={"rounds": 4, "local_epochs": 2, "client_fraction": 0.5}
)  # for hyperparameters slow to act


def hyperparameters_matter(kit: ConformanceKit) -> None:
    """Another value of any hyperparameter changes weights, messages or scores; a hyperparameter that changes nothing is
    an error.
    """
    for name in (*kit.changed_values, *kit.no_effect):
        if name not in kit.hyperparameters:
            kit.fail(f"it has no hyperparameter '{name}'{suggest(name, kit.hyperparameters)}")
    for hyperparameter in kit.hyperparameters:
        if is_fixed(kit.method, hyperparameter):
            continue
        given = kit.changed_values.get(hyperparameter)
        bite = given if isinstance(given, ChangedValue) else None
        base = replaced(kit.method, **(bite.given if bite else {}))
        if base is None:
            kit.fail(f"the hyperparameters {bite.given if bite else {}} given for '{hyperparameter}' are refused")
        if hyperparameter in kit.changed_values:
            values = [bite.value if bite else given]
            each = True
        else:
            values, each = others(base, hyperparameter)
        tried: dict[Any, bool] = {}
        for value in values:
            change = _changes(kit, base, hyperparameter, value)
            if change is not None:
                tried[value] = change
            if change and not each:
                break
        _judge_hyperparameter(kit, base, hyperparameter, tried, each)


def _judge_hyperparameter(
    kit: ConformanceKit, base: Method, hyperparameter: str, tried: Mapping[Any, bool], each: bool
) -> None:
    """Fail unless the hyperparameter changes something.

    Args:
        tried: value -> whether it changed anything. each: whether all values must.
    """
    if hyperparameter in kit.no_effect:
        if any(tried.values()):
            kit.fail(
                f"the hyperparameter '{hyperparameter}' is said to have no effect ({kit.no_effect[hyperparameter]}), "
                "but changes something"
            )
    elif not tried:
        kit.fail(
            f"no other value of the hyperparameter '{hyperparameter}' could be tried; give one in "
            f"changed_values={{'{hyperparameter}': ...}}"
        )
    elif not any(tried.values()) or (each and not all(tried.values())):
        still = [value for value, change in tried.items() if not change]
        kit.fail(
            f"the hyperparameter '{hyperparameter}' changes nothing (from {flat_settings(base)[hyperparameter]!r} to "
            f"{still[0]!r})"
        )


def _changes(kit: ConformanceKit, base: Method, hyperparameter: str, value: Any) -> bool | None:
    """Whether the hyperparameter's value changes anything; None where it cannot be tried."""
    method = replaced(base, **{hyperparameter: value})
    if method is None or _refuses_less(method, base):
        return None
    among = kit.world(base, method)
    try:
        after = among.run(method)
    except ConfigError:
        return None
    except PolyfedError as error:
        raise ConformanceError(f"{kit.name} with {hyperparameter}={value!r}: {error}") from error
    trainings = [SHORT] if hyperparameter in kit.no_effect else [SHORT, _LONGER]
    for training in trainings:
        alike = base == kit.method and len(among.public or ()) == len(kit.usual.public or ())
        usual = alike and training is SHORT and _networks(among) == _networks(kit.usual)
        before = kit.base if usual else kit.runs(among, base, training)
        if training is _LONGER:
            after = kit.runs(among, method, training)
        rounding = 1e-5 if hyperparameter in kit.no_effect else 0.0
        if worlds.difference(worlds.effect(before), worlds.effect(after), rounding) is not None:
            return True
    return False


def _refuses_less(method: Method, base: Method) -> bool:
    """Whether it differs from `base` in that it also averages a head alone, which no common network has need of."""
    return (
        base.requirements.more_than_head
        and not method.requirements.more_than_head
        and method.requirements.shared_shapes
    )


def _networks(among: TinyFederation) -> list[str]:
    return [repr(build()) for build in among.builders.values()]


def reductions(kit: ConformanceKit) -> None:
    """With a hyperparameter switched off it is the simpler method bit for bit."""
    three = SHORT.model_copy(update={"rounds": 3, "client_fraction": 0.7})
    for one in kit.reductions:
        sizes = (16,) * 6 if one.equal_sizes else SIZES
        method = one.method if isinstance(one.method, Method) else replaced(kit.method, **one.method)
        if method is None:
            kit.fail(f"it does not take the hyperparameters {one.method} of a reduction")
        among = ConformanceKit(method=method, models=kit.models, device=kit.device).world(
            one.to, one=one.same_architecture, sizes=sizes
        )
        a = kit.runs(among, method, three)
        b = kit.runs(among, one.to, three)
        if one.stage == "received":
            pairs = [(received(a, client.id), received(b, client.id)) for client in a.clients]
        else:
            pairs = [(dict(x.weights or {}), dict(y.weights or {})) for x, y in zip(a.clients, b.clients, strict=True)]
        for number, (mine, other) in enumerate(pairs):
            if one.part:
                mine = {name[len(one.part) :]: t for name, t in mine.items() if name.startswith(one.part)}
            kit.same(mine, other, f"{method} is not {one.to} for client {number}")


def learns(kit: ConformanceKit) -> None:
    """Loss falls, accuracy rises, every trainable tensor moves, and what the server sends does not stay the same."""
    training = Training(rounds=6, local_epochs=2, batch_size=8, lr=0.1)
    start = kit.usual.federation(kit.method, training)
    start.method.init_server(start.server)
    initial = {client.id: start.server.client_weights(client.id) for client in start.clients}
    messages: dict[str, list[Tensor]] = {}

    def broadcast(call: Callable[..., Message], server: Server, number: int) -> Message:
        message = call(server, number)
        for name, tensor in flatten(message).items():
            if number == 0 and tensor.is_floating_point() and tensor.dim():
                messages.setdefault(name, []).append(tensor.clone())
        return message

    federation = kit.runs(kit.usual, Spy(kit.method, broadcast=broadcast), training)
    first = federation.history[0]
    last = federation.history[-1]
    if not last["train_loss"] < first["train_loss"]:
        kit.fail(f"the training loss goes from {first['train_loss']:.4f} to {last['train_loss']:.4f}")
    mean = last["accuracy"][federation.stages[0]]["mean"]
    if mean < 1 / CLASSES + 0.2:
        kit.fail(f"on separable data its accuracy is {mean:.3f} ({federation.stages[0]}), little above chance")
    names = {name for c in federation.clients for name, _ in _parameters(federation, c)}
    for name in sorted(names):
        moved = [
            not torch.equal(client.weights[name], initial[client.id][name])
            for client in federation.clients
            if client.weights is not None and name in client.weights and name in initial[client.id]
        ]
        if moved and not any(moved):
            kit.fail(f"the trainable tensor '{name}' never moves")
    for name, values in messages.items():
        same = len(values) > 2 and all(torch.equal(values[0], later) for later in values[1:])
        if same and not _counts_or_masks(values[0]):
            kit.fail(f"the server sends the same '{name}' in every round: nothing trains it")


def _counts_or_masks(tensor: Tensor) -> bool:
    """Whether a tensor holds whole numbers, not all of them zero, which may rightly be the same in every round."""
    return bool(tensor.any()) and torch.equal(tensor, tensor.round())


def _parameters(federation: Federation, client: Client) -> list[tuple[str, nn.Parameter]]:
    variant = federation.method.variant(federation.server, client.id)
    module = federation.model_factory.module(client.architecture, variant)
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]
