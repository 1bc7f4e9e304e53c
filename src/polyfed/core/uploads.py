"""Uploads on their way: bounded, hidden in noise and compressed by the client, whole again at the server.

What a method uploads goes through these steps, in this order, each only where it is asked for:

1. `[privacy] clip`: every entry of the message (a group, or a tensor that stands alone) is shortened to this L2 norm.
2. `[privacy] noise`: plus N(0, (noise * clip)^2) on every number of it, from the client's own stream, or by its secret.
3. `[compression] share`: of every tensor of a change the entries of largest magnitude; the rest is kept for next time.
4. `[compression] precision`: float32 numbers in 16 or 8 bits.

Of groups that the method declares as `changes`, trained weights, all this is done to their difference to what came down
under the same names, which the server adds again. Other floats are taken as they are, and are not thinned out. Whole
numbers, booleans and single numbers (a count, a learning rate) go up unaltered; so do, without `[privacy]`, running
statistics.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, group, to_bytes
from polyfed.core.method import Method
from polyfed.core.modules import static_statistics
from polyfed.core.server import Server
from polyfed.core.settings import Compression, Privacy
from polyfed.errors import RequestError, RunError
from polyfed.functional.drift import Normals, released
from polyfed.functional.quantization import Precision
from polyfed.functional.secure_noise import KeyedNormals
from polyfed.functional.sparsification import (
    kept,
    places_nbytes,
    quantised,
    quantised_nbytes,
    restored,
    spread,
    thinned,
)

_CHANGE, _SCALE, _PLACES = " change", " scale", " places"  # after an entry's name: of what stands beside it, or for it
_UNSENT = "unsent "  # before it: in the client's state, what is still to be sent


def sends(method: Method) -> bool:
    """Whether anything goes up."""
    return getattr(method.upload, "__func__", None) is not Method.upload


def check_uploads(
    method: Method, privacy: Privacy, compression: Compression, server: Server, networks: Mapping[int, nn.Module]
) -> None:
    """Whether what the method uploads can be treated so.

    Args:
        server: before round 1; stays as it is. networks: client number -> what it trains, one client for each network;
            looked at only where the method has `changes`.

    Raises:
        RequestError: it cannot; says what the method sends.
    """
    if not sends(method):
        return
    name = method.name or type(method).__name__
    rigid = [f"'{entry}': {reason}" for entry, reason in method.rigid.items()]
    if privacy.clip and rigid:
        raise RequestError(f"privacy: expected uploads that can be clipped, came {name}, which sends {rigid[0]}")
    no_changes = f"compression.share: expected a method that sends changes of weights that came down, came {name}"
    if compression.share < 1 and not method.changes:
        raise RequestError(no_changes)
    if not method.changes or not (privacy.clip or compression.share < 1):
        return
    first = _first_messages(method, server, networks)
    if compression.share < 1 and not any(entry in sent for sent in first.values() for entry in method.changes):
        raise RequestError(no_changes)
    for number, network in networks.items():
        for entry in method.changes if privacy.clip else ():
            sent = sorted(running_statistics(network) & _members(first[number], entry).keys())
            if found := [*sent, *static_statistics(network)]:  # the latter are taken and sent after training
                raise RequestError(_no_statistics(name, found[0]))


def _no_statistics(name: str, statistic: str) -> str:
    return (
        f"privacy: expected networks without BatchNorm, or a method that leaves its statistics with the clients, as "
        f"noise on a variance may leave none; {name} sends '{statistic}'"
    )


def _first_messages(method: Method, server: Server, numbers: Iterable[int]) -> dict[int, Message]:
    """What these clients will be sent in round 1."""
    trial = copy.copy(server)
    trial.state, trial.log, trial.memory = {}, {}, {}
    method.start(trial)
    trial.round = 1
    method.plan(trial, list(trial.clients))
    return {number: method.broadcast(trial, number) for number in numbers}


def outgoing(client: Client, method: Method, message: Message, received: Message) -> Message:
    """What leaves the client in place of `message`; the very same where nothing is asked for.

    Args:
        client: at work. message: what the method uploads, on the CPU, finite. received: what the client was sent.

    Raises:
        RequestError: something in it cannot be clipped. RunError: a name is one that compression gives.
    """
    if client.privacy.clip:
        message = _released(client, method, message, received)
    return _compressed(client, method, message, received) if client.compression.on else message


def arrived(compression: Compression, message: Message, received: Message) -> Message:
    """The upload again, from what left the client: up to rounding and what was thinned out.

    Args:
        received: what the client was sent.

    Raises:
        RunError: `message` is not what `outgoing` makes.
    """
    if not compression.on:
        return message
    found = _empty_groups(message)
    for entry, key, values in every_tensor(message):
        if entry.endswith((_SCALE, _PLACES)):
            continue
        try:
            name, tensor = _opened(message, entry, key, values, received)
        except (ValueError, KeyError, RunError) as error:
            place = entry if key is None else f"{entry}/{key}"
            raise RunError(f"the upload cannot be read ('{place}'): {error}") from None
        _put(found, name, key, tensor)
    return found


# bounded and hidden -----------------------------------------------------------------------------------------------


def bounded(message: Message) -> list[str]:
    """The entries of an upload that are clipped and noised: groups with floats, tensors of floats that stand alone."""

    def of_floats(value: Tensor | Group) -> bool:
        if isinstance(value, Tensor):
            return value.dim() > 0 and value.is_floating_point()
        return any(tensor.is_floating_point() for tensor in value.values())

    return [name for name, value in message.items() if of_floats(value)]


def _released(client: Client, method: Method, message: Message, received: Message) -> Message:
    draws, entries = _draws(client, message, received), bounded(message)
    hidden = functools.partial(_hidden, client.privacy, client.privacy.hidden(len(entries)))
    found: State = {}
    for name, value in message.items():
        if isinstance(value, Tensor):
            found[name] = hidden({name: value}, {}, draws)[name] if name in entries else value
            continue
        floats = {key: tensor for key, tensor in value.items() if tensor.is_floating_point()}
        base = counterparts(method, name, value, received)
        _check_bounded(client, method, name, floats, base)
        found[name] = {**value, **hidden(floats, base, draws)}
    return found


def _draws(client: Client, message: Message, received: Message) -> torch.Generator | Normals:
    """What the noise of an upload comes from: the run's seed, or the client's secret and all that the upload is.

    The same upload once more has the same noise, so that nothing is gained by asking again; any other has noise of its
    own, also in the same round: of two with one noise the difference would be bare.
    """
    if client.secret is None or not client.privacy.noise:
        return client.generator("privacy")
    place = json.dumps([client.id, client.exchange, client.round]).encode()
    said = [hashlib.sha256(part).digest() for part in (place, to_bytes(message), to_bytes(received))]
    return KeyedNormals(hmac.digest(client.secret, b"".join(said), "sha256"))


def _hidden(
    settings: Privacy, noise: float, tensors: Group, base: Group, draws: torch.Generator | Normals
) -> dict[str, Tensor]:
    """The tensors with what they have changed since `base` clipped and noised, in their own types."""
    start = {name: base[name].to(t).float() if name in base else torch.zeros(()) for name, t in tensors.items()}
    update = {name: t.float() - start[name] for name, t in tensors.items()}
    new = released(update, settings.clip, noise * settings.clip, draws)
    return {name: (start[name] + t).to(tensors[name].dtype) for name, t in new.items()}


def _check_bounded(client: Client, method: Method, name: str, floats: Group, base: Group) -> None:
    """Tensors of the client's network go up as changes, and are parameters; others may be anything.

    Raises:
        RequestError: they do not.
    """
    statistics = running_statistics(client.model)
    weights = _endings(name for name, _ in client.model.named_parameters())
    who = method.name or type(method).__name__
    for key in floats:
        if key in statistics:
            raise RequestError(_no_statistics(who, key))
        if key in weights and key not in base:
            raise RequestError(
                f"privacy: expected changes of weights that came down, or figures of the data, from {who}, came whole "
                f"weights, '{name}/{key}' (see Method.changes)"
            )


# compressed -------------------------------------------------------------------------------------------------------


def _compressed(client: Client, method: Method, message: Message, received: Message) -> Message:
    statistics, found = running_statistics(client.model), _empty_groups(message)
    bases = {name: counterparts(method, name, value, received) for name, value in message.items()}
    for name, key, tensor in every_tensor(message):
        if name.endswith((_CHANGE, _SCALE, _PLACES)):
            raise RunError(f"expected names that do not end in '{_CHANGE}', '{_SCALE}' or '{_PLACES}', came '{name}'")
        if tensor.dtype != torch.float32 or not tensor.dim() or key in statistics:
            _put(found, name, key, tensor)
        elif key is not None and key in bases[name]:
            _put_change(found, name, key, tensor - bases[name][key].to(tensor), client)
        else:
            _put_numbers(found, name, key, tensor, client.compression.precision)
    return found


def _put_change(found: State, name: str, key: str, change: Tensor, client: Client) -> None:
    """The change of one tensor; what is still to be sent of it stays in the client's state."""
    settings, place, state = client.compression, f"{name}{_CHANGE}", f"{_UNSENT}{name}"
    if not _pays(change.numel(), settings):
        _put_numbers(found, place, key, change, settings.precision)
        return
    unsent = _members(client.state, state)
    if key in unsent and unsent[key].shape == change.shape:
        change = change + unsent[key]
    values, places = thinned(change, settings.share)
    sent = _put_numbers(found, place, key, values, settings.precision)
    _put(found, f"{place}{_PLACES}", key, places)
    if settings.feedback:
        client.state[state] = {**unsent, key: change - spread(sent, places, tuple(change.shape))}


def _put_numbers(found: State, name: str, key: str | None, tensor: Tensor, precision: Precision) -> Tensor:
    """A tensor in the precision asked for, where that takes fewer bytes; returns it as it arrives."""
    if quantised_nbytes(tuple(tensor.shape), precision) >= tensor.nbytes:
        _put(found, name, key, tensor)
        return tensor
    values, scale = quantised(tensor, precision)
    _put(found, name, key, values)
    _put(found, f"{name}{_SCALE}", key, scale)
    return restored(values, scale)


def _pays(numel: int, settings: Compression) -> bool:
    """Whether a share of so many numbers takes fewer bytes than all."""
    count = kept(numel, settings.share)
    few, all_ = (quantised_nbytes((n,), settings.precision) for n in (count, numel))
    return settings.share < 1 and few + places_nbytes(numel, count) < all_


def _opened(message: Message, entry: str, key: str | None, values: Tensor, received: Message) -> tuple[str, Tensor]:
    """The name and the value of what an entry of a compressed message stands for."""
    scale, places = (_beside(message, entry, key, suffix) for suffix in (_SCALE, _PLACES))
    tensor = values if scale is None else restored(values, scale)
    name = entry.removesuffix(_CHANGE)
    if name == entry:
        return name, tensor
    base = group(received, name)[key or ""].cpu()
    change = tensor if places is None else spread(tensor, places, tuple(base.shape))
    if change.shape != base.shape:
        raise ValueError(f"expected a change of shape {tuple(base.shape)}, came {tuple(change.shape)}")
    return name, (base + change).to(base.dtype)


# messages ---------------------------------------------------------------------------------------------------------


def counterparts(method: Method, name: str, value: Tensor | Group, received: Message) -> Group:
    """What came down of those tensors of a group that go up as changes."""
    if isinstance(value, Tensor) or name not in method.changes:
        return {}
    down = _members(received, name)
    return {key: t for key, t in down.items() if key in value and value[key].shape == t.shape and t.is_floating_point()}


def running_statistics(network: nn.Module) -> frozenset[str]:
    """Names of what BatchNorm and its like keep of the data, also within a part of the network."""
    layers = [layer for layer in network.modules() if isinstance(layer, _NormBase)]
    kept_here = {id(buffer) for layer in layers for buffer in layer.buffers()}
    return _endings(name for name, buffer in network.named_buffers() if id(buffer) in kept_here)


def _endings(names: Iterable[str]) -> frozenset[str]:
    """The names, and what a part of the network calls them: "own.norm.weight" is also "norm.weight" and "weight"."""
    parts = (name.split(".") for name in names)
    return frozenset(".".join(one[begin:]) for one in parts for begin in range(len(one)))


def every_tensor(message: Message) -> Iterator[tuple[str, str | None, Tensor]]:
    """Name, name within the group (None: it stands alone), tensor."""
    for name, value in message.items():
        if isinstance(value, Tensor):
            yield name, None, value
        else:
            yield from ((name, key, tensor) for key, tensor in value.items())


def _members(message: Message, name: str) -> Group:
    """Those of the group of this name; none where there is no such group."""
    value = message.get(name, {})
    return {} if isinstance(value, Tensor) else value


def _empty_groups(message: Message) -> State:
    return {name: {} for name, value in message.items() if not isinstance(value, Tensor) and not value}


def _put(message: State, name: str, key: str | None, tensor: Tensor) -> None:
    if key is None:
        message[name] = tensor
        return
    members = message.setdefault(name, {})
    if isinstance(members, Tensor):
        raise RunError(f"expected '{name}' to be a tensor or a group, came both")
    members[key] = tensor


def _beside(message: Message, name: str, key: str | None, suffix: str) -> Tensor | None:
    """What stands beside an entry; None where nothing does."""
    value = message.get(f"{name}{suffix}")
    found = value if key is None or value is None or isinstance(value, Tensor) else value.get(key)
    return found if isinstance(found, Tensor) else None
