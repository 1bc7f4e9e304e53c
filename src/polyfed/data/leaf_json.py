"""LEAF's JSON files (Caldas et al., arXiv 1812.01097), ``train/*.json`` and ``test/*.json``, with several users each.

A file is an object of ``users`` (names), ``num_samples`` (a count per user), ``user_data`` (name -> lists ``x`` and
``y``) and sometimes ``hierarchies``, which is not read. Inputs are one of:

    numbers      lists of one shape, however deep (FEMNIST: 784 each); flat images of n x n numbers stay flat
    texts        strings, or lists of strings of which the last is the text (Sentiment140); read by words
    characters   strings of one length whose labels are single characters, what comes next (Shakespeare)

Texts of different lengths are read by words, unless `TextConfig.tokens` says otherwise. Labels are whole numbers or
strings. A user's rows may lie in several files.

Shapes: N samples, L characters of a text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.data.classes import encode_labels
from polyfed.data.column_schema import Columns
from polyfed.data.dataset import DatasetSource
from polyfed.data.files import check_file
from polyfed.data.labeled_texts import RawTexts, encode_texts
from polyfed.data.samples import ONE_LABEL, LabeledSamples
from polyfed.data.text import TextConfig
from polyfed.errors import ConfigError, first_line
from polyfed.results.read import parse_json

COLUMN = "user"  # the further column that says whose a row is
_NAME_OF_IMAGE = re.compile(r"\S+\.(jpe?g|png|bmp|gif|tiff?|webp|p[bgnp]m)", re.IGNORECASE)


@dataclass
class _Side:
    """The rows of one side, in the order of the files."""

    x: list[Any] = field(default_factory=list)
    y: list[Any] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    files: list[tuple[object, range]] = field(default_factory=list)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        return {COLUMN: np.array(self.users, dtype=np.str_)}


def read(name: str, place: Path, how: TextConfig) -> DatasetSource:
    """Read a folder with train/*.json and, if there is one, test/*.json; of characters `how` says tokens alone."""
    every = {side: _read_side(place / side) for side in ("train", "test")}
    if not every["train"].y:
        raise ConfigError(f"expected LEAF's files train/*.json with at least one sample in {place}, got none")
    sides = {side: rows for side, rows in every.items() if rows.y}
    labels = {side: _labels(rows, place / side) for side, rows in sides.items()}
    first = every["train"].x[0]
    if isinstance(first, str) or _is_texts(first):
        texts = {side: _texts(rows, place / side) for side, rows in sides.items()}
        if how.tokens is None and _NAME_OF_IMAGE.fullmatch(texts["train"][0]):
            raise ConfigError(
                f"expected numbers or texts, got '{texts['train'][0][:40]}', the name of an image, in {place}; "
                "LEAF's files hold no images: put these into folders, dataset 'clients:PATH', or set tokens"
            )
        if how.tokens not in (None, "characters") or not _are_characters(texts, labels):
            raw = {side: RawTexts(texts[side], labels[side], rows.columns, rows.files) for side, rows in sides.items()}
            return encode_texts(name, raw, Columns("x", "y"), how)
        how = dataclasses.replace(how, tokens=None)
        # 0 is padding, which does not occur, 1 a character that the training side lacks; then they follow by their code
        known = sorted(set("".join(texts["train"])))
        ids = {character: 2 + number for number, character in enumerate(known)}
        inputs = {
            side: torch.tensor([[ids.get(character, 1) for character in text] for text in side_texts])
            for side, side_texts in texts.items()
        }
        words = 2 + len(known)
    else:
        inputs = {side: _numbers(rows, place / side) for side, rows in sides.items()}
        words = None
    if given := next(iter(how.given), None):
        raise ConfigError(f"expected {given} with texts that are read by words, got dataset '{name}'")
    numbers, names = encode_labels(labels, "y", None, {side: rows.files for side, rows in sides.items()})
    samples = {side: LabeledSamples(x, torch.from_numpy(numbers[side])) for side, x in inputs.items()}
    return DatasetSource.of(name, samples, names, {side: rows.columns for side, rows in sides.items()}, words=words)


def _read_side(folder: Path) -> _Side:
    side = _Side()
    for path in sorted(folder.glob("*.json")):
        if path.name.startswith("."):
            continue
        rows = len(side.y)
        _read_file(path, side)
        side.files.append((path, range(len(side.y) - rows)))
    return side


def _read_file(path: Path, side: _Side) -> None:
    check_file(path)
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"expected LEAF's JSON in {path}, got something else: {first_line(error)}") from error
    keys = ("users", "num_samples", "user_data")
    if not isinstance(content, dict) or any(key not in content for key in keys):
        got = ", ".join(map(str, content))[:60] if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"expected an object of users, num_samples and user_data in {path}, got {got or 'none'}")
    users, counts, data = (content[key] for key in keys)
    if not isinstance(users, list) or not isinstance(counts, list) or not isinstance(data, dict):
        raise ConfigError(f"expected lists of users and num_samples and an object user_data in {path}, got others")
    if len(users) != len(counts) or len({*map(str, users)}) < len(users):
        raise ConfigError(
            f"expected every user once, and as many num_samples, in {path}, got {len(users)} users and {len(counts)} "
            "counts"
        )
    for user, count in zip(users, counts, strict=True):
        x, y = _rows_of(user, data, path)
        if len(x) != count or len(y) != count:
            raise ConfigError(
                f"expected {count} samples of user '{user}' in {path}, as num_samples says, got {len(x)} inputs and "
                f"{len(y)} labels"
            )
        side.x += x
        side.y += y
        side.users += [str(user)] * len(y)


def _rows_of(user: Any, data: Mapping[str, Any], path: Path) -> tuple[list[Any], list[Any]]:
    rows = data.get(user) if isinstance(user, str) else None
    if not isinstance(rows, dict) or not isinstance(rows.get("x"), list) or not isinstance(rows.get("y"), list):
        raise ConfigError(f"expected lists x and y in user_data of user '{str(user)[:40]}' in {path}, got others")
    return rows["x"], rows["y"]


def _labels(rows: _Side, where: Path) -> NDArray[Any]:
    """(N,) int64 or strings."""
    for number, label in enumerate(rows.y):
        if isinstance(label, list | dict):
            raise ConfigError(
                f"expected one label for every sample, got several in row {number} of {where}: {str(label)[:40]}"
                f"{ONE_LABEL}"
            )
        if not isinstance(label, str) and (isinstance(label, bool) or not isinstance(label, int)):
            raise ConfigError(
                f"expected whole numbers or strings as labels, got {label!r:.40} in row {number} of {where}"
            )
    if len({type(label) for label in rows.y}) > 1:
        raise ConfigError(f"expected labels of one kind in {where}, got numbers and strings")
    try:
        return np.array(rows.y, dtype=np.str_ if isinstance(rows.y[0], str) else np.int64)
    except OverflowError:
        raise ConfigError(f"expected labels below 2^63 in {where}, got a larger one") from None


def _is_texts(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(isinstance(part, str) for part in x)


def _texts(rows: _Side, where: Path) -> list[str]:
    """The text of every row."""
    found = []
    for number, x in enumerate(rows.x):
        if not isinstance(x, str) and not _is_texts(x):
            raise ConfigError(f"expected texts as in the first row, got {str(x)[:40]} in row {number} of {where}")
        found.append(x if isinstance(x, str) else x[-1])
    return found


def _are_characters(texts: Mapping[str, Sequence[str]], labels: Mapping[str, NDArray[Any]]) -> bool:
    """Whether texts are of one length, and labels single characters, what comes next."""
    lengths = {len(text) for rows in texts.values() for text in rows}
    marks = [label for values in labels.values() if values.dtype.kind == "U" for label in values]
    return len(lengths) == 1 and len(marks) == sum(map(len, texts.values())) and set(map(len, marks)) == {1}


def _numbers(rows: _Side, where: Path) -> Tensor:
    try:
        x = torch.from_numpy(np.array(rows.x, dtype=np.float32))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"expected inputs of numbers, all of one shape, in {where}, got others") from error
    if x.dim() < 2 or not bool(torch.isfinite(x).all()):
        raise ConfigError(f"expected inputs of several finite numbers in {where}, got {tuple(x.shape)} or NaN")
    return x
