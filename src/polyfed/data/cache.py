"""Decoded data sets kept on disk, so that images are decoded once per machine. Safetensors only, never pickle.

A cache is a convenience: a file that is missing, cut short or altered is rebuilt, and a folder that cannot be written
is passed over. Neither is an error, and nothing is ever written beside the user's data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor


def cache_dir() -> Path | None:
    """``$POLYFED_CACHE``, else ``~/.cache/polyfed``; None when there is no home folder either."""
    chosen = os.environ.get("POLYFED_CACHE")
    try:
        return (Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "polyfed") / "datasets"
    except RuntimeError:
        return None


def cache_key(parts: Iterable[str]) -> str:
    """One sha256 (hex) of a sequence of strings; their boundaries count."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()


def file_marks(paths: Iterable[Path]) -> list[str]:
    """What tells each file from another one, and from itself once it is written anew: its path, size and time."""
    found = [(path.resolve(), path.stat()) for path in paths]
    return [f"{path} {status.st_size} {status.st_mtime_ns}" for path, status in found]


def load_entry(key: str) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """The tensors and the facts stored under `key`, or None when there is no whole and unaltered file."""
    from safetensors import SafetensorError, safe_open

    place = cache_dir()
    if place is None:
        return None
    try:
        with safe_open(str(place / f"{key}.safetensors"), framework="pt") as stored:
            facts = dict(stored.metadata() or {})
            # copies: what safetensors gives is mapped from the file, and would follow later changes to it
            tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118  not a dict
        whole = facts.get("checksum") == compute_checksum(tensors, facts)
    except (OSError, SafetensorError, ValueError, TypeError, LookupError, RuntimeError):
        # TypeError: NumPy lacks a type
        return None
    return (tensors, facts) if whole else None


def save_entry(key: str, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Keep tensors and string facts under `key`, whole or not at all; gives up quietly when the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    place = cache_dir()
    if place is None:
        return
    kept = dict(tensors)
    metadata = {**facts, "checksum": compute_checksum(kept, facts)}
    with contextlib.suppress(OSError, SafetensorError):
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=".", ignore_cleanup_errors=True) as folder:
            save_file(kept, Path(folder) / "entry", metadata=metadata)
            os.replace(Path(folder) / "entry", place / f"{key}.safetensors")


def compute_checksum(tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> str:
    """The sha256 of every tensor's name, type, shape and bytes, and of the facts."""
    hasher = hashlib.sha256(json.dumps(sorted((k, v) for k, v in facts.items() if k != "checksum")).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.numpy().data.cast("B") if tensor.numel() else b"")
    return hasher.hexdigest()
