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
from pydantic import StrictInt, StrictStr, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from polyfed.data.classes import encode_labels
from polyfed.data.column_schema import Columns
from polyfed.data.dataset import DatasetSource
from polyfed.data.files import check_file
from polyfed.data.labeled_texts import RawTexts, encode_texts
from polyfed.data.samples import ONE_LABEL, LabeledSamples
from polyfed.data.text import TextConfig
from polyfed.errors import ConfigError, first_line
from polyfed.escaping import one_line
from polyfed.results.read import parse_json

COLUMN = "user"  # the further column that says whose a row is
_NAME_OF_IMAGE = re.compile(r"\S+\.(jpe?g|png|bmp|gif|tiff?|webp|p[bgnp]m)", re.IGNORECASE)


class _Rows(TypedDict):
    """Of a user."""

    x: list[Any]
    y: list[StrictInt | StrictStr]


class _File(TypedDict):
    users: list[StrictStr]
    num_samples: list[int]
    user_data: dict[str, _Rows]


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
        content = TypeAdapter(_File).validate_python(parse_json(path.read_bytes()))
    except ValidationError as error:
        first = error.errors()[0]
        place = one_line(".".join(map(str, first["loc"])))[:80]
        hint = ONE_LABEL if isinstance(first["input"], list) and place.count(".y.") else ""
        raise ConfigError(f"expected LEAF's JSON in {path}, got at '{place}': {first['msg']}{hint}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"expected LEAF's JSON in {path}, got something else: {first_line(error)}") from error
    users = content["users"]
    if len(users) != len(content["num_samples"]) or len(set(users)) < len(users):
        raise ConfigError(f"expected every user once, and as many num_samples, in {path}, got {len(users)} users")
    for user, count in zip(users, content["num_samples"], strict=True):
        rows = content["user_data"].get(user, _Rows(x=[], y=[]))
        if len(rows["x"]) != count or len(rows["y"]) != count:
            raise ConfigError(
                f"expected {count} samples of user '{user}' in {path}, as num_samples says, got {len(rows['x'])} "
                f"inputs and {len(rows['y'])} labels"
            )
        side.x += rows["x"]
        side.y += rows["y"]
        side.users += [user] * count


def _labels(rows: _Side, where: Path) -> NDArray[Any]:
    if len({type(label) for label in rows.y}) > 1:
        raise ConfigError(f"expected labels of one kind in {where}, got numbers and strings")
    try:
        return np.array(rows.y, dtype=np.str_ if isinstance(rows.y[0], str) else np.int64)
    except OverflowError:
        raise ConfigError(f"expected labels below 2^63 in {where}, got a larger one") from None


def _is_texts(x: Any) -> bool:
    return isinstance(x, list) and bool(x) and all(isinstance(part, str) for part in x)


def _texts(rows: _Side, where: Path) -> list[str]:
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
