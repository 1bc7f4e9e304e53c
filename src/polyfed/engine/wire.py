"""What leaves a process, or lies on a disk: values as JSON has them, and tensors in them, as one safetensors file.

Worker processes, the nodes of a deployment and checkpoints share it. Nothing is unpickled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from polyfed.errors import RunError

_TENSOR = "$"  # the only key of what stands for a tensor, whose name it gives
_VALUE = "value"  # the only entry of the file's metadata
_LENGTH = 8  # bytes of the header's length, with which every safetensors file begins
_ALIGNED = 64  # bytes; as PyTorch aligns its own tensors, on which the last bits of a product may depend
_REASON = 300  # characters of an error's reason


def encode(value: Any) -> bytes:
    """A value as bytes: what JSON has, mappings, and tensors, of which one that is there twice travels once.

    Tensors arrive in main memory, their entries in the plain order.

    Raises:
        RunError: there is something else in it.
    """
    return safetensors.torch.save(*split(value))


def split(value: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a value, and the metadata that say where they stand, for a file that `decode` reads."""
    names: dict[Hashable, str] = {}
    tensors: dict[str, Tensor] = {}
    memory = set[int]()  # of these tensors; safetensors takes none that share some

    def place(part: Any) -> dict[str, Any]:
        if isinstance(part, Mapping):
            return dict(part)
        if not isinstance(part, Tensor):
            raise RunError(f"expected tensors in messages and states, got {type(part).__name__}")
        name = names.setdefault((part.data_ptr(), part.dtype, part.shape, part.stride()), str(len(names)))
        if name not in tensors:
            plain = part.detach().cpu().contiguous()
            begin = plain.untyped_storage().data_ptr()
            tensors[name] = plain.clone() if begin in memory else plain
            memory.add(begin)
        return {_TENSOR: name}

    text = json.dumps(value, default=place)
    return tensors, {_VALUE: text}


def decode(data: bytes, most_header: int | None = None, most_tensors: int | None = None) -> Any:
    """The inverse of `encode`. most_header, most_tensors: bytes and entries that a server takes of a node, at most.

    Raises:
        RunError: `encode` makes no such bytes, or they are more.
    """
    try:
        end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        if most_header is not None and end - _LENGTH > most_header:
            raise ValueError(f"expected a header of at most {most_header} bytes, got {end - _LENGTH}")
        header = json.loads(data[_LENGTH:end])
        if most_tensors is not None and len(header) > most_tensors:
            raise ValueError(f"expected at most {most_tensors} tensors, got {len(header)}")
        tensors = safetensors.torch.load(data)
        for name, tensor in tensors.items():
            if tensor.dtype != torch.uint8 and tensor.data_ptr() % _ALIGNED:
                tensors[name] = tensor.clone()

        return _placed(header["__metadata__"][_VALUE], tensors.__getitem__)
    except Exception as error:  # the bytes may be another party's
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:_REASON]
        raise RunError(f"expected a message as bytes, got {len(data)} that are none: {reason}") from None


def read(path: Path) -> Any:
    """What `split` made of a value, from a file of it. A tensor is a look into the file: who keeps it copies it."""
    with safetensors.safe_open(path, "pt") as file:
        return _placed(file.metadata()[_VALUE], functools.cache(file.get_tensor))


def _placed(text: str, tensor_of: Callable[[str], Tensor]) -> Any:
    """The value, with its tensors, by their names, where they stand in it."""

    def taken(part: dict[str, Any]) -> Any:
        return tensor_of(part[_TENSOR]) if part.keys() == {_TENSOR} else part

    return json.loads(text, object_hook=taken)
