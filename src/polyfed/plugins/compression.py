"""Uploads in fewer bytes: ``[compression] top_k_fraction`` and ``dtype``.

1. ``top_k_fraction``: of every tensor of a change the entries of largest magnitude; the rest is kept for next time.
2. ``dtype``: float32 numbers in 16 or 8 bits.

Of groups that the method declares as `delta_entries`, trained weights, this is done to their difference to what was
sent down under the same names, which the server adds again. Other floats are taken as they are, not thinned out.
Whole numbers, booleans, single numbers (a count, a learning rate) and running statistics go up unaltered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, State, get_group, members
from polyfed.core.method import Method
from polyfed.engine.executors.jobs import TrainJob
from polyfed.engine.plugin import Plugin, Setup
from polyfed.engine.round_state import Round
from polyfed.engine.uploads import base_tensors, batchnorm_buffers, has_upload, iter_tensors, sent_nbytes
from polyfed.errors import ConfigError, RunError
from polyfed.functional.compression import (
    Precision,
    densify,
    dequantize,
    index_nbytes,
    quantize,
    quantized_nbytes,
    top_k_count,
    top_k_sparsify,
)
from polyfed.plugins.settings import Compression

_CHANGE = " change"
_SCALE = " scale"
_PLACES = " places"  # after an entry's name: of what stands beside it, or for it
_UNSENT = "unsent "  # before it: in the client's state, what is still to be sent


class UploadCompression(Plugin):
    """Compresses at the client and restores at the server."""

    name = "compression"
    settings_class = Compression

    def validate(self, setup: Setup) -> None:
        """A share of changes needs changes."""
        method = setup.method
        if self.settings.top_k_fraction == 1 or not has_upload(method):
            return
        messages = setup.first_messages.values() if method.card.delta_entries else ()
        if not any(entry in sent for sent in messages for entry in method.card.delta_entries):
            name = method.name
            raise ConfigError(
                f"compression.top_k_fraction: expected a method that sends changes of weights that were sent down, got "
                f"{name}"
            )

    def encode(self, upload: Message, client: Client, method: Method, received: Message) -> Message:
        """The upload, compressed; what is still to be sent stays in the client's state."""
        settings = self.settings
        if not settings.enabled:
            return upload
        statistics = batchnorm_buffers(client.model)
        found = _empty_groups(upload)
        bases = {name: base_tensors(method, name, value, received) for name, value in upload.items()}
        for name, key, tensor in iter_tensors(upload):
            if name.endswith((_CHANGE, _SCALE, _PLACES)):
                raise RunError(
                    f"expected names that do not end in '{_CHANGE}', '{_SCALE}' or '{_PLACES}', got '{name}'"
                )
            if tensor.dtype != torch.float32 or not tensor.dim() or key in statistics:
                _put(found, name, key, tensor)
            elif key is not None and key in bases[name]:
                _put_change(settings, found, name, key, tensor - bases[name][key].to(tensor), client)
            else:
                _put_numbers(found, name, key, tensor, settings.dtype)
        return found

    def decode(self, upload: Message, job: TrainJob, method: Method) -> Message:
        """The upload again, up to rounding and what was thinned out."""
        return restore_upload(self.settings, upload, job.message)

    def after_jobs(self, round: Round, jobs: Any, sent: Any, read: Any) -> None:
        """Count what would have gone up."""
        if not self.settings.enabled:
            return
        heard = [outcome for outcome in read if outcome.client_id not in round.silenced]
        sent_now = sum(sent_nbytes(round.method, outcome.message) for outcome in heard)
        round.notes[self.name] = round.notes.get(self.name, 0) + sent_now

    def record(self, round: Round) -> dict[str, Any]:
        """Bytes that would have gone up without compression."""
        return {"bytes_up_uncompressed": round.notes.get(self.name, 0)} if self.settings.enabled else {}


def restore_upload(settings: Compression, message: Message, received: Message) -> Message:
    """What the server reads of a compressed upload. received: what the client was sent."""
    if not settings.enabled:
        return message
    found = _empty_groups(message)
    for entry, key, values in iter_tensors(message):
        if entry.endswith((_SCALE, _PLACES)):
            continue
        try:
            name, tensor = _opened(message, entry, key, values, received)
        except (ValueError, KeyError, RunError) as error:
            place = entry if key is None else f"{entry}/{key}"
            raise RunError(f"the upload cannot be read ('{place}'): {error}") from None
        _put(found, name, key, tensor)
    return found


def _put_change(settings: Compression, found: State, name: str, key: str, change: Tensor, client: Client) -> None:
    """The change of one tensor; what is still to be sent of it stays in the client's state."""
    place = f"{name}{_CHANGE}"
    state = f"{_UNSENT}{name}"
    if not _pays(change.numel(), settings):
        _put_numbers(found, place, key, change, settings.dtype)
        return
    unsent = members(client.state, state)
    if key in unsent and unsent[key].shape == change.shape:
        change = change + unsent[key]
    values, places = top_k_sparsify(change, settings.top_k_fraction)
    sent = _put_numbers(found, place, key, values, settings.dtype)
    _put(found, f"{place}{_PLACES}", key, places)
    if settings.error_feedback:
        client.state[state] = {**unsent, key: change - densify(sent, places, tuple(change.shape))}


def _put_numbers(found: State, name: str, key: str | None, tensor: Tensor, precision: Precision) -> Tensor:
    """A tensor in the precision asked for, where that takes fewer bytes; returns it as it arrives."""
    if quantized_nbytes(tuple(tensor.shape), precision) >= tensor.nbytes:
        _put(found, name, key, tensor)
        return tensor
    values, scale = quantize(tensor, precision)
    _put(found, name, key, values)
    _put(found, f"{name}{_SCALE}", key, scale)
    return dequantize(values, scale)


def _pays(numel: int, settings: Compression) -> bool:
    """Whether a share of so many numbers takes fewer bytes than all."""
    count = top_k_count(numel, settings.top_k_fraction)
    few, all_ = (quantized_nbytes((n,), settings.dtype) for n in (count, numel))
    return settings.top_k_fraction < 1 and few + index_nbytes(numel, count) < all_


def _opened(message: Message, entry: str, key: str | None, values: Tensor, received: Message) -> tuple[str, Tensor]:
    """The name and the value of what an entry of a compressed message stands for."""
    scale, places = (_beside(message, entry, key, suffix) for suffix in (_SCALE, _PLACES))
    tensor = values if scale is None else dequantize(values, scale)
    name = entry.removesuffix(_CHANGE)
    if name == entry:
        return name, tensor
    base = get_group(received, name)[key or ""].cpu()
    change = tensor if places is None else densify(tensor, places, tuple(base.shape))
    if change.shape != base.shape:
        raise ValueError(f"expected a change of shape {tuple(base.shape)}, got {tuple(change.shape)}")
    return name, (base + change).to(base.dtype)


def _empty_groups(message: Message) -> State:
    return {name: {} for name, value in message.items() if not isinstance(value, Tensor) and not value}


def _put(message: State, name: str, key: str | None, tensor: Tensor) -> None:
    if key is None:
        message[name] = tensor
        return
    members = message.setdefault(name, {})
    if isinstance(members, Tensor):
        raise RunError(f"expected '{name}' to be a tensor or a group, got both")
    members[key] = tensor


def _beside(message: Message, name: str, key: str | None, suffix: str) -> Tensor | None:
    """What stands beside an entry; None where nothing does."""
    value = message.get(f"{name}{suffix}")
    found = value if key is None or value is None or isinstance(value, Tensor) else value.get(key)
    return found if isinstance(found, Tensor) else None
