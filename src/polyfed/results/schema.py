"""What a run folder's files of text must be to be read: JSON and TOML of the expected shape; lines that carry a seal.

A run folder may come from anywhere, and a disk may lose a bit. What is nested without end, no JSON, or of another shape
is a `ValueError` of one line, which the reader turns into an error that names the file.

A seal is the checksum of a JSON object, its last entry: ``{"round": 1, ..., "seal": "<sha256 of the text before>"}``.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyfed.errors import RequestError
from polyfed.places import check_name

PARTS = ("result.json", "checkpoint", "rounds.jsonl", "models", "tensorboard", "recipe.toml")  # in order of removal
ANALYSIS, ATTACK = "analysis", "attack"  # folders of what later commands make of a run
COMMAND, SWEEP, DIARY = "compare.json", "sweep.json", "nodes.jsonl"  # of a comparison, a sweep, a deployment
SUM_FILE = "index.json.sha256"  # beside models/index.json: its checksum, as `sha256sum --check` reads it

_SEAL = re.compile(rb', "seal": "([0-9a-f]{64})"\}\Z')
_LENGTH = 77  # bytes of it


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


def seal(value: Mapping[str, Any]) -> bytes:
    """A JSON object on one line, sealed. value: not empty.

    >>> unseal(seal({"round": 1}))
    {'round': 1}
    """
    text = json.dumps(value).encode()
    return text[:-1] + f', "seal": "{hashlib.sha256(text).hexdigest()}"}}'.encode()


def unseal(data: bytes, needed: bool = True) -> dict[str, Any]:
    """The object without its seal.

    Args:
        data: as `seal` gives it. needed: whether one without a seal, written otherwise, is refused.

    Raises:
        ValueError: a seal that is missing or does not fit, or no JSON object.
    """
    found = _SEAL.search(data[-_LENGTH:])
    text = data if found is None else data[:-_LENGTH] + b"}"
    if found is None and needed:
        raise ValueError("its seal is missing")
    if found is not None and hashlib.sha256(text).hexdigest().encode() != found[1]:
        raise ValueError("it does not match its seal")
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, came {type(value).__name__}")
    return value


# links ------------------------------------------------------------------------------------------------------------


def check_links(folder: Path) -> None:
    """Whether all that belongs to a run lies in its folder. To be asked before anything in it is read or written.

    folder: of a run, a comparison or a sweep; itself it may be a link, as the user has named it.

    Raises:
        RequestError: a part of it is a link, or neither a file nor a folder; or there can be no such folder.
    """
    check_name(folder)
    waiting = [folder / name for name in (*PARTS, ANALYSIS, ATTACK, COMMAND, SWEEP, DIARY)]
    while waiting:
        place = waiting.pop()
        try:
            mode = place.lstat().st_mode
            if stat.S_ISDIR(mode):
                waiting += place.iterdir()
        except OSError:  # not there, or not to be read, which is told when it is
            continue
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            came = "a link" if stat.S_ISLNK(mode) else "something else"
            raise RequestError(
                f"expected files and folders in {folder}, came {came}: {place}, which is not followed; put a copy of "
                "what you mean in its place"
            )


# shapes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Maybe:
    """The shape, or nothing."""

    shape: Any


@dataclass(frozen=True)
class _Each:
    """An object with any keys, or any of `keys`, and values of this shape."""

    shape: Any
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Whole:
    """An object that has at least these keys; `more` are of this shape where they are there."""

    shape: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _OneOf:
    """One of these texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class _Within:
    """A number, whole if both bounds are, from `low` to `high`."""

    low: float
    high: float


_NUMBER = "a number"  # no larger than tables can show
_SETTING = "a text, a number, true or false, or a list of these"
_LOSS = "a loss"  # a number of any size, as training may diverge
_EPSILON = _Each(_LOSS, ("client", "sample"))  # by the unit that it is about
_SCORES: dict[str, Any] = {
    "accuracy_by_predictor": _Maybe(_Each(_Each(_Each(_NUMBER)))),
    "accuracy_per_client": _Maybe([_Maybe(_NUMBER)]),
    "accuracy_per_architecture": _Maybe(_Each(_Each(_NUMBER))),
    "metrics": _Maybe(_Each(_Each(_Each(_NUMBER)))),
    "confusion": _Maybe([[int]]),
    "validation": _Maybe(_NUMBER),
    "bytes_up": int,
    "bytes_down": int,
    "bytes_up_uncompressed": int,
    "bytes_up_as_in_paper": int,
    "bytes_down_as_in_paper": int,
    "samples": int,
    "seconds": _NUMBER,
    "timings": _Each(_NUMBER),
}
RECORD: dict[str, Any] = {
    **_SCORES,
    "round": int,
    "closing": bool,
    "clients": [int],
    "lr": _NUMBER,
    "dropped": [int],
    "late": [int],
    "arrived": [_Whole({"client": int, "from": int})],
    "discarded": [_Whole({"client": int, "from": int})],
    "bytes_by_client": _Each(_Whole({"up": int, "down": int})),
    "train_loss": _Maybe(_LOSS),
    "refused": [_Whole({"client": int, "reason": str})],
    "sums": dict,
    "server": dict,
    "evaluated": bool,
    "accuracy": _Each(_Each(_NUMBER)),
    "epsilon": _EPSILON,
    "releases": [
        _Whole(
            {
                "what": _OneOf(("upload", "features", "training")),
                "unit": _OneOf(("client", "sample")),
                "noise": _Within(1e-9, 1e18),
                "drawn": _Within(0, 2**40),
                "held": _Within(0, 2**40),
                "poisson": bool,
                "times": _Within(1, 2**40),
                "clients": [_Within(0, 2**40)],
            }
        )
    ],
}
_COUNTED = ("bytes_up", "bytes_down", "bytes_up_as_in_paper", "bytes_down_as_in_paper", "bytes_by_client", "samples")
_TOLD = ("round", "seconds", "closing", "clients", "lr", "train_loss", "refused", "evaluated", "validation")
CONTINUED: Any = _Whole(  # a record that a run goes on from: this version's, with all that its result is made of
    {**{key: RECORD[key] for key in (*_TOLD, *_COUNTED)}, "accuracy": _Each(_Whole({"mean": _NUMBER}))}, RECORD
)
RECORD_SHOWN: Any = _Whole(  # a record as far as the progress of a run shows it
    {key: RECORD[key] for key in ("round", "seconds", "bytes_up", "bytes_down")}, RECORD
)
EVENT: dict[str, Any] = {"event": str, "round": int, "reason": str}  # a line of what happened to nodes
RESULT: dict[str, Any] = {
    **_SCORES,
    "method": str,
    "knobs": dict,
    "label": _Maybe(str),
    "dataset": str,
    "class_names": [str],
    "clients": int,
    "rounds": int,
    "seed": int,
    "workers": int,
    "precision": str,
    "evaluation": {"stage": str, "mean": str, "test": str, "every": int, "stages": [str], "patience": int},
    "availability": dict,
    "privacy": dict,
    "compression": dict,
    "accuracy": _Maybe(_NUMBER),
    "accuracy_std": _Maybe(_NUMBER),
    "accuracy_worst_tenth": _Maybe(_NUMBER),
    "accuracy_before_closing": _Maybe(_NUMBER),
    "accuracy_best_by_validation": _Maybe(_NUMBER),
    "accuracy_by_stage": _Maybe(_Each(_Each(_NUMBER))),
    "clients_table": [
        _Whole(
            {"id": int, "architecture": str, "samples": int},
            {
                "accuracy": _Maybe(_NUMBER),
                "parameters": int,
                "labels": _Each(int),
                "bytes_up": int,
                "bytes_down": int,
            },
        )
    ],
    "stopped_after": _Maybe(int),
    "models_of_round": int,
    "closed": bool,
    "refused": int,
    "nothing_learnt": _Maybe(str),
    "samples_per_second": _Maybe(_NUMBER),
    "versions": _Each(str),
    "epsilon": _EPSILON,
    "delta": _Within(1e-300, 1.0),
}
MODEL: dict[str, Any] = {
    "architecture": str,
    "companion": _Maybe(str),
    "method": str,
    "knobs": dict,
    "variant": str,
    "zoo": bool,
    "classes": int,
    "class_names": [str],
    "feature_names": [str],
    "feature_dim": _Maybe(int),
    "label_column": _Maybe(str),
    "vocabulary": _Maybe(int),
    "texts": _Maybe(_Whole({"column": _Maybe(str), "sha256": str})),
    "input": _Whole({"shape": [int], "type": str}),
    "modules": [str],
    "sha256": _Each(str),
}
ENTRY: Any = _Whole(  # what a node is told of a model that it writes itself
    {
        **{key: MODEL[key] for key in ("architecture", "companion", "method", "knobs", "variant", "zoo", "classes")},
        **{key: MODEL[key] for key in ("class_names", "feature_names", "feature_dim", "vocabulary", "texts", "input")},
        "vectors": _Maybe(str),
        "samples": int,
        "round": int,
    },
    {"modules": MODEL["modules"]},
)
PREPARE: Any = _Whole({"mean": [_NUMBER], "std": [_NUMBER]}, {"table": bool})  # of a model's entry, where it is no text
RECIPE: dict[str, Any] = {
    **dict.fromkeys(("data", "evaluation", "availability", "privacy", "compression"), dict),
    "models": {"architectures": [str]},
    "method": {"name": str},
    "training": {"rounds": int},
    "run": {"published": [str], "changed": [str], "profile": str, "profile_note": str, "label": str},
}
SWEPT: Any = _Whole(
    {
        "keys": [str],
        "caption": str,
        "notes": [str],
        "rows": [
            {
                "settings": _Each(_SETTING),
                "method": str,
                "stage": str,
                "seeds": [int],
                "validation": _Maybe(_NUMBER),
                "validation_std": _Maybe(_NUMBER),
                "accuracy": _Maybe(_NUMBER),
                "accuracy_std": _Maybe(_NUMBER),
                "best": _Maybe(_NUMBER),
                "local": _Maybe(_NUMBER),
                "difference": _Maybe(_NUMBER),
                "difference_std": _Maybe(_NUMBER),
                "bytes_up": _Maybe(_NUMBER),
                "bytes_down": _Maybe(_NUMBER),
                "seconds": _Maybe(_NUMBER),
                "refused": int,
                "words": [str],
                "runs": [_Whole({"accuracy": _Maybe(_NUMBER)})],
                "chosen": bool,
                "nothing_learnt": int,
            }
        ],
    }
)


def check_shape(value: Any, shape: Any, place: str = "") -> None:
    """Whether a value is of a shape; keys that the shape does not name may hold anything.

    Raises:
        ValueError: says where it is not, and what is there.
    """
    if isinstance(shape, _Maybe):
        if value is not None:
            check_shape(value, shape.shape, place)
    elif isinstance(shape, _OneOf):
        _expect(isinstance(value, str) and value in shape.texts, f"one of {', '.join(shape.texts)}", value, place)
    elif isinstance(shape, _Within):
        check_shape(value, int if isinstance(shape.low, int) and isinstance(shape.high, int) else _NUMBER, place)
        _expect(shape.low <= value <= shape.high, f"from {shape.low:g} to {shape.high:g}", value, place)
    elif shape == _SETTING:
        if isinstance(value, list):
            check_shape(value, [_SETTING], place)
        elif not isinstance(value, str | bool):
            check_shape(value, _NUMBER, place)
    elif shape in (_NUMBER, _LOSS):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        small = number and (not abs(value) >= 2**63 or (shape == _LOSS and isinstance(value, float)))
        _expect(small, _NUMBER, value, place)  # NaN passes, as older runs have some
    elif isinstance(shape, type):
        odd = isinstance(value, bool) is not (shape is bool) or (isinstance(value, int) and abs(value) >= 2**63)
        _expect(isinstance(value, shape) and not odd, _NAMES[shape], value, place)
    elif isinstance(shape, list):
        _expect(isinstance(value, list), "a list", value, place)
        for index, entry in enumerate(value):
            check_shape(entry, shape[0], f"{place}[{index}]")
    else:
        _check_object(value, shape, place)


def _check_object(value: Any, shape: Any, place: str) -> None:
    _expect(isinstance(value, dict), "an object", value, place)
    if isinstance(shape, _Whole):
        if missing := [key for key in shape.shape if key not in value]:
            raise ValueError(f"{place or 'it'} has no '{missing[0]}'")
        shapes = {**shape.shape, **shape.more}
    elif isinstance(shape, _Each) and shape.keys and (odd := sorted({*value} - {*shape.keys})):
        raise ValueError(f"'{place}' should be by {' or '.join(shape.keys)}, has {odd[0]!r:.40}")
    else:
        shapes = dict.fromkeys(value, shape.shape) if isinstance(shape, _Each) else shape
    for key in [key for key in shapes if key in value]:
        check_shape(value[key], shapes[key], f"{place}.{key}" if place else key)


_NAMES = {int: "a whole number", bool: "true or false", str: "a text", dict: "an object"}


def _expect(fits: bool, what: str, value: Any, place: str) -> None:
    if not fits:
        raise ValueError(f"'{place}' should be {what}, is {value!r:.40}")
