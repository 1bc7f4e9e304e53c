"""Uploads in fewer bytes: ``[compression] dtype``, float32 numbers in 16 or 8 bits.

Of groups that the method declares as `delta_entries`, trained weights, this is done to their difference to what was
sent down under the same names, which the server adds again. Other floats are taken as they are. Whole numbers,
booleans, single numbers (a count, a learning rate) and running statistics go up unaltered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, State, get_group
from polyfed.core.method import Method
from polyfed.engine.executors.jobs import TrainJob
from polyfed.engine.plugin import Plugin
from polyfed.engine.uploads import base_tensors, batchnorm_buffers, iter_tensors
from polyfed.errors import RunError
from polyfed.functional.compression import Precision, dequantize, quantize, quantized_nbytes
from polyfed.plugins.settings import Compression

_CHANGE = " change"
_SCALE = " scale"  # after an entry's name: of what stands for it, and beside it


class UploadCompression(Plugin):
    """Compresses at the client and restores at the server."""

    name = "compression"
    settings_class = Compression

    def encode(self, upload: Message, client: Client, method: Method, received: Message) -> Message:
        """The upload, compressed."""
        settings = self.settings
        if not settings.enabled:
            return upload
        statistics = batchnorm_buffers(client.model)
        found = _empty_groups(upload)
        bases = {name: base_tensors(method, name, value, received) for name, value in upload.items()}
        for name, key, tensor in iter_tensors(upload):
            if name.endswith((_CHANGE, _SCALE)):
                raise RunError(f"expected names that do not end in '{_CHANGE}' or '{_SCALE}', got '{name}'")
            if tensor.dtype != torch.float32 or not tensor.dim() or key in statistics:
                _put(found, name, key, tensor)
            elif key is not None and key in bases[name]:
                _put_numbers(found, f"{name}{_CHANGE}", key, tensor - bases[name][key].to(tensor), settings.dtype)
            else:
                _put_numbers(found, name, key, tensor, settings.dtype)
        return found

    def decode(self, upload: Message, job: TrainJob, method: Method) -> Message:
        """The upload again, up to rounding."""
        return restore_upload(self.settings, upload, job.message)


def restore_upload(settings: Compression, message: Message, received: Message) -> Message:
    """What the server reads of a compressed upload. received: what the client was sent."""
    if not settings.enabled:
        return message
    found = _empty_groups(message)
    for entry, key, values in iter_tensors(message):
        if entry.endswith(_SCALE):
            continue
        try:
            name, tensor = _opened(message, entry, key, values, received)
        except (ValueError, KeyError, RunError) as error:
            place = entry if key is None else f"{entry}/{key}"
            raise RunError(f"the upload cannot be read ('{place}'): {error}") from None
        _put(found, name, key, tensor)
    return found


def _put_numbers(found: State, name: str, key: str | None, tensor: Tensor, precision: Precision) -> None:
    """A tensor in the precision asked for, where that takes fewer bytes."""
    if quantized_nbytes(tuple(tensor.shape), precision) >= tensor.nbytes:
        _put(found, name, key, tensor)
        return
    values, scale = quantize(tensor, precision)
    _put(found, name, key, values)
    _put(found, f"{name}{_SCALE}", key, scale)


def _opened(message: Message, entry: str, key: str | None, values: Tensor, received: Message) -> tuple[str, Tensor]:
    """The name and the value of what an entry of a compressed message stands for."""
    beside = message.get(f"{entry}{_SCALE}")
    scale = beside if key is None or beside is None or isinstance(beside, Tensor) else beside.get(key)
    tensor = dequantize(values, scale) if isinstance(scale, Tensor) else values
    name = entry.removesuffix(_CHANGE)
    if name == entry:
        return name, tensor
    base = get_group(received, name)[key or ""].cpu()
    if tensor.shape != base.shape:
        raise ValueError(f"expected a change of shape {tuple(base.shape)}, got {tuple(tensor.shape)}")
    return name, (base + tensor).to(base.dtype)


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
