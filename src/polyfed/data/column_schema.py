"""Which columns hold images, texts and labels, by what is known of them; and the values of further columns."""

from __future__ import annotations

import contextlib
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data.samples import LABEL_NAMES, ONE_LABEL
from polyfed.errors import ConfigError
from polyfed.registry import suggest
from polyfed.results.read import parse_json

_IMAGE_NAMES = ("img", "image", "images", "picture", "pixels")


@dataclass(frozen=True)
class Columns:
    """Which columns to read. `class_names` is None when the files do not name the classes."""

    image: str
    label: str
    class_names: tuple[str, ...] | None


def pick_columns(
    schema: Any, features: dict[str, dict[str, Any]], image_column: str | None, label_column: str | None, where: object
) -> Columns:
    """The image and the label column of one Arrow schema; `features` is what `datasets` knows about the columns.

    Raises:
        ConfigError: none, several, one that is named but absent, or a type that cannot hold them.
    """
    found = image_columns(schema, features)
    texts = ", or a column of texts with text_column"
    image = pick_column("image", image_column, found, schema.names, where, "" if found else texts)
    label = pick_column("label", label_column, label_columns(schema, features), schema.names, where)
    _check_types(schema, image, label, where)
    names = features.get(label, {}).get("names") if features.get(label, {}).get("_type") == "ClassLabel" else None
    return Columns(image, label, tuple(str(name) for name in names) if isinstance(names, list) else None)


def stored_features(metadata: dict[bytes, bytes] | None) -> dict[str, dict[str, Any]]:
    """What `datasets` wrote about the columns; empty for a file from elsewhere."""
    try:
        features = parse_json((metadata or {})[b"huggingface"])["info"]["features"]
        return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def image_columns(schema: Any, features: dict[str, dict[str, Any]]) -> list[str]:
    """Columns of feature type Image, else those with a usual name that can hold encoded images."""
    said = [name for name in schema.names if features.get(name, {}).get("_type") == "Image"]
    return said or [name for name in schema.names if name in _IMAGE_NAMES and holds_bytes(schema.field(name).type)]


def label_columns(schema: Any, features: dict[str, dict[str, Any]]) -> list[str]:
    """Columns of feature type ClassLabel, else those with a usual name that can hold labels."""
    said = [name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"]
    return said or [name for name in schema.names if name in LABEL_NAMES and holds_labels(schema.field(name).type)]


def holds_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(field.name == "bytes" and holds_bytes(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def several_labels(kind: Any) -> str:
    """A hint where a column holds lists; else ""."""
    import pyarrow.types as types

    return ONE_LABEL if types.is_nested(kind) else ""


def holds_labels(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(
        types.is_integer(kind) or types.is_boolean(kind) or types.is_string(kind) or types.is_large_string(kind)
    )


def pick_column(
    what: str, named: str | None, candidates: list[str], names: list[str], where: object, others: str = ""
) -> str:
    """The named column, else the only candidate; `others` ends the message that there is none or several."""
    if named is not None:
        check_column(what, named, names, where)
        return named
    if len(candidates) == 1:
        return candidates[0]
    came = f"several: {', '.join(candidates)}" if candidates else f"none among: {', '.join(names)}"
    raise ConfigError(f"expected one {what} column in {where}, got {came}; name it with {what}_column{others}")


def check_column(what: str, named: str, names: list[str], where: object) -> None:
    if named not in names:
        raise ConfigError(f"expected the {what} column '{named}' in {where}, got no such{suggest(named, names)}")


def column_values(values: Any, where: str) -> NDArray[Any]:
    """Values of a further column as (N,) int64 or strings.

    Args:
        values: array-like of whole numbers, booleans or strings.
        where: what they are, for the message.

    Raises:
        ConfigError: other values, missing ones, or numbers and strings mixed.
    """
    given = values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else list(values)
    if all(isinstance(value, str) for value in given):
        return np.array(given, dtype=np.str_)
    if all(isinstance(value, numbers.Integral | np.bool_) for value in given):
        with contextlib.suppress(OverflowError):
            return np.array(given, dtype=np.int64)
    wrong = next((v for v in given if not isinstance(v, type(given[0]))), given[0])
    raise ConfigError(
        f"expected whole numbers or strings, all of one kind and none missing, in {where}, got {str(wrong)[:40]!r}"
    )


def _check_types(schema: Any, image: str, label: str, where: object) -> None:
    """Refuse columns that cannot hold what they should."""
    for name in (image, label):
        if schema.names.count(name) > 1:
            raise ConfigError(f"expected one column '{name}' in {where}, got {schema.names.count(name)}")
    if not holds_bytes(schema.field(image).type):
        raise ConfigError(
            f"expected encoded images (bytes) in column '{image}' of {where}, got type {schema.field(image).type}"
        )
    if not holds_labels(schema.field(label).type):
        raise ConfigError(
            f"expected whole numbers or strings in label column '{label}' of {where}, "
            f"got type {schema.field(label).type}{several_labels(schema.field(label).type)}"
        )
