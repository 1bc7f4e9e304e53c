"""Checkpoints: the whole state of a federation after a round, verified by checksum when it is read.

`checkpoint/round-000010/` holds `server.safetensors`, `clients.safetensors`, `late.safetensors` if uploads are under
way, and `index.json`. It appears by one rename. The last two are kept: if the newest is damaged, the one before it is
used, and said so.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.core.message import State, flatten, from_bytes, group, read_only, tensor, to_bytes, unflatten
from polyfed.engine.attendance import LateUpload
from polyfed.engine.folder import sync_folder
from polyfed.errors import PolyfedError, RequestError

KEPT = 2
_CLIENT = "client"
_ALWAYS, _LATE = ("server.safetensors", "clients.safetensors"), "late.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """A federation between two rounds. weights: None for a client that has none of its own yet. late: under way."""

    round: int
    server: State
    weights: Mapping[int, dict[str, Tensor] | None]
    states: Mapping[int, State]
    late: Sequence[LateUpload] = ()


def write(folder: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint, then drop all but the last `KEPT`."""
    final = folder / f"round-{snapshot.round:06d}"
    if final.exists() and _is_whole(final):
        return
    temporary = folder / f".round-{snapshot.round:06d}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    clients: State = {}
    for number, weights in snapshot.weights.items():
        if weights is not None:
            clients[f"{_CLIENT} {number} weights"] = weights
        if snapshot.states[number]:
            clients[f"{_CLIENT} {number} state"] = dict(flatten(snapshot.states[number]))
    files = dict(zip(_ALWAYS, (to_bytes(snapshot.server), to_bytes(clients)), strict=True))
    if snapshot.late:
        files[_LATE] = to_bytes(_packed(snapshot.late))
    index = {
        "round": snapshot.round,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    for name, data in {**files, "index.json": json.dumps(index).encode()}.items():
        with (temporary / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(temporary)
    shutil.rmtree(final, ignore_errors=True)  # a damaged one
    temporary.rename(final)
    sync_folder(folder)
    for old in _all(folder)[:-KEPT]:
        shutil.rmtree(old)


def latest(folder: Path, clients: int) -> Snapshot | None:
    """The newest checkpoint that is whole, or None where there is none.

    Args:
        folder: `checkpoint/` of a run folder.
        clients: how many clients the federation has.

    Raises:
        RequestError: there are checkpoints and none of them is whole.
    """
    found = _all(folder)
    for path in reversed(found):
        try:
            return _read(path, clients)
        except (OSError, ValueError, KeyError, TypeError, PolyfedError) as error:
            warnings.warn(f"the checkpoint {path} is damaged ({error}); trying the one before it", stacklevel=2)
    if found:
        raise RequestError(
            f"expected a whole checkpoint in {folder}, all {len(found)} are damaged; start again with --force"
        )
    return None


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-[0-9]*")) if folder.is_dir() else []


def _is_whole(path: Path) -> bool:
    try:
        _verified(path)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _verified(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The index and the files' contents; ValueError where a checksum does not fit."""
    index = json.loads((path / "index.json").read_bytes())
    files = {
        name: (path / name).read_bytes() for name in (*_ALWAYS, _LATE) if name in _ALWAYS or name in index["sha256"]
    }
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != index["sha256"][name]:
            raise ValueError(f"{name} does not match its checksum")
    return index, files


def _read(path: Path, clients: int) -> Snapshot:
    index, files = _verified(path)
    contents = {name: from_bytes(data) for name, data in files.items()}
    stored = contents["clients.safetensors"]
    weights: dict[int, dict[str, Tensor] | None] = {}
    states: dict[int, State] = {}
    for number in range(clients):
        own = stored.get(f"{_CLIENT} {number} weights")
        weights[number] = None if own is None or isinstance(own, Tensor) else own
        state = stored.get(f"{_CLIENT} {number} state", {})
        states[number] = {} if isinstance(state, Tensor) else unflatten(state)
    late = _unpacked(contents[_LATE]) if _LATE in contents else []
    return Snapshot(int(index["round"]), contents["server.safetensors"], weights, states, late)


def _packed(late: Sequence[LateUpload]) -> State:
    """Uploads as tensors: who sent them when in which exchange, as JSON in bytes; and a group for each message."""
    facts = json.dumps([[u.client_id, u.round, u.exchange] for u in late])
    messages: State = {str(place): dict(flatten(u.message)) for place, u in enumerate(late)}
    return {"facts": torch.tensor(list(facts.encode()), dtype=torch.uint8), **messages}


def _unpacked(stored: State) -> list[LateUpload]:
    facts = json.loads(bytes(tensor(stored, "facts").tolist()))
    messages = [unflatten(group(stored, str(place)) if str(place) in stored else {}) for place in range(len(facts))]
    return [LateUpload(i, sent, name, read_only(m)) for (i, sent, name), m in zip(facts, messages, strict=True)]
