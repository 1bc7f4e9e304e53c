"""Reading and writing the text files of a run folder: JSON, TOML, sealed lines; links are not followed.

A run folder may come from anywhere, and a disk may lose a bit. What is nested without end, no JSON, or of another shape
is a `ValueError` of one line, which the reader turns into an error that names the file. The shapes are in
`polyfed.records.schema` and `polyfed.records.stored_files`.

A seal is the checksum of a JSON object, its last entry: ``{"round": 1, ..., "seal": "<sha256 of the rest>"}``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError
from polyfed.places import check_name

LIVE = ("tensorboard", "mlflow", "wandb")  # folders of loggers
PARTS = ("result.json", "checkpoint", "rounds.jsonl", "models", *LIVE, "recipe.toml")  # in order of removal
ANALYSIS = "analysis"  # folder of the figures that `polyfed.plot` draws of a run
ATTACK = "attack"  # folder of what attacks on a run have found
COMMAND = "command.txt"  # how a comparison was made
FORGOTTEN = "forgotten.json"  # clients whose rows must not count; stays when a run is replaced
EVENT_LOG = "nodes.jsonl"  # what happened to the nodes of a deployment
SUM_FILE = "index.json.sha256"  # beside models/index.json: its checksum, as `sha256sum --check` reads it

_SEAL = re.compile(rb',\s+"seal": "([0-9a-f]{64})"(\s*\})\s*\Z')
_SEAL_LENGTH = 100  # bytes that it has at most


def parse_json(data: bytes) -> Any:
    """`json.loads` of UTF-8.

    Raises:
        ValueError: no JSON, nested too deep, or half a character.
    """
    try:
        value = json.loads(data)
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError:
        raise ValueError("half a character") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_toml(data: bytes) -> dict[str, Any]:
    """`tomllib.loads` of UTF-8.

    Raises:
        ValueError: no TOML, or nested too deep.
    """
    try:
        return tomllib.loads(data.decode())
    except RecursionError:
        raise ValueError("nested too deep") from None


def seal(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A JSON object, sealed. value: not empty. indent: of its lines; None: it is one line.

    >>> unseal(seal({"round": 1}))
    {'round': 1}
    """
    checksum = hashlib.sha256(json.dumps(value, indent=indent).encode()).hexdigest()
    return json.dumps({**value, "seal": checksum}, indent=indent).encode()


def unseal(data: bytes, needed: bool = True) -> dict[str, Any]:
    """The object without its seal.

    Args:
        data: as `seal` gives it. needed: whether one without a seal, written otherwise, is refused.

    Raises:
        ValueError: a seal that is missing or does not fit, or no JSON object.
    """
    start = max(0, len(data) - _SEAL_LENGTH)
    found = _SEAL.search(data, start)
    if found is None:
        if needed:
            raise ValueError("its seal is missing")
        text = data
    else:
        text = data[: found.start()] + found[2]
        if hashlib.sha256(text).hexdigest().encode() != found[1]:
            raise ValueError("it does not match its seal")
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    return value


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that it is either the old one or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def make_folder(folder: str | Path) -> Path:
    """The folder, made if it is missing.

    Raises:
        ConfigError: something else stands there, or it cannot be made.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {path}: {error.strerror or error}") from error
    return path


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file so that a reader sees the old one or the new one, never half of one.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        atomic_write(path, content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, where the system lets one."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_links(folder: Path) -> None:
    """Whether all that belongs to a run lies in its folder. To be asked before anything in it is read or written.

    folder: of a run or a comparison; itself it may be a link, as the user has named it.

    Raises:
        ConfigError: a part of it is a link, or neither a file nor a folder; or there can be no such folder.
    """
    check_name(folder)
    waiting = [folder / name for name in (*PARTS, ANALYSIS, ATTACK, COMMAND, EVENT_LOG, FORGOTTEN)]
    while waiting:
        place = waiting.pop()
        try:
            mode = place.lstat().st_mode
            is_foreign = place.parent == folder / "wandb" and "run-" in place.name  # written by it alone, with links
            if stat.S_ISDIR(mode) and not is_foreign:
                waiting += place.iterdir()
        except OSError:  # not there, or not to be read, which the reader finds out
            continue
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            kind = "a link" if stat.S_ISLNK(mode) else "something else"
            raise ConfigError(
                f"expected files and folders in {folder}, got {kind}: {place}, which is not followed; put a copy of "
                "what you mean in its place"
            )


def flat_table(table: Mapping[str, Any], between: str = ".") -> dict[str, Any]:
    """Dotted key -> value, of a table and of those in it. between: what stands in the dot's place."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= {f"{key}{between}{inner}": own for inner, own in flat_table(value, between).items()}
        else:
            found[key] = value
    return found
