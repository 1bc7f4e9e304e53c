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
from polyfed.records.read import parse_json
from polyfed.registry import suggest

TEXT_NAMES = ("text", "sentence", "tweet", "content", "review")  # the usual ones
_IMAGE_NAMES = ("img", "image", "images", "picture", "pixels")


@dataclass(frozen=True)
class Columns:
    """Which columns to read. content: images or texts. class_names: None when the files do not name the classes."""

    content: str
    label: str
    class_names: tuple[str, ...] | None = None


def pick_columns(
    kind: str,
    schema: Any,
    features: dict[str, dict[str, Any]],
    named: str | None,
    label_column: str | None,
    where: object,
) -> Columns:
    """The column with images, or with texts, and the one with labels of an Arrow schema.

    Args:
        kind: "image" or "text". features: what `datasets` knows about the columns.
        named, label_column: the columns, where they are not to be found by their name or type. where: for messages.
    """
    import pyarrow.types as types

    content = _pick_content(kind, schema, features, named, where)
    label = pick_column("label", label_column, _label_columns(schema, features), schema.names, where)
    held = schema.field(label).type
    if not _holds_labels(held):
        raise ConfigError(
            f"expected whole numbers or words in label column '{label}' of {where}, got type {held}"
            f"{ONE_LABEL if types.is_nested(held) else ''}"
        )
    names = features.get(label, {}).get("names")
    return Columns(content, label, tuple(map(str, names)) if isinstance(names, list) else None)


def _pick_content(kind: str, schema: Any, features: dict[str, dict[str, Any]], named: str | None, where: object) -> str:
    """The column with images, or with texts: the named one, else the only one of a usual name or type."""
    advice = None
    if kind == "image":
        holds, what = _holds_bytes, "encoded images (bytes)"
        usual = [name for name in schema.names if features.get(name, {}).get("_type") == "Image"]
        usual = usual or [name for name in schema.names if name in _IMAGE_NAMES and holds(schema.field(name).type)]
    else:
        holds, what = _holds_text, "texts"
        usual = [name for name in schema.names if name in TEXT_NAMES and holds(schema.field(name).type)]
    if not usual and kind == "image":
        advice = "name it with image_column, or a column of texts with text_column"
    content = pick_column(kind, named, usual, schema.names, where, advice)
    if schema.names.count(content) > 1:
        raise ConfigError(f"expected one column '{content}' in {where}, got {schema.names.count(content)}")
    if not holds(schema.field(content).type):
        raise ConfigError(f"expected {what} in column '{content}' of {where}, got type {schema.field(content).type}")
    return content


def stored_features(metadata: dict[bytes, bytes] | None) -> dict[str, dict[str, Any]]:
    """What `datasets` wrote about the columns; empty for a file from elsewhere."""
    try:
        features = parse_json((metadata or {})[b"huggingface"])["info"]["features"]
        return {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _label_columns(schema: Any, features: dict[str, dict[str, Any]]) -> list[str]:
    """Columns of feature type ClassLabel, else those with a usual name: that can hold labels, or, without any, all."""
    declared = [name for name in schema.names if features.get(name, {}).get("_type") == "ClassLabel"]
    usual = [name for name in schema.names if name in LABEL_NAMES]
    return declared or [name for name in usual if _holds_labels(schema.field(name).type)] or usual


def _holds_bytes(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _holds_text(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):  # categories
        return _holds_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _holds_labels(kind: Any) -> bool:
    """Whether a column may hold labels: words, whole numbers, also spelt 3.0, or categories of such."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return _holds_labels(kind.value_type)
    is_number = types.is_integer(kind) or types.is_boolean(kind) or types.is_floating(kind) or types.is_decimal(kind)
    return bool(is_number) or _holds_text(kind)


def pick_column(
    what: str, named: str | None, candidates: list[str], names: list[str], where: object, advice: str | None = None
) -> str:
    """The named column, else the only candidate; `advice` ends the message that there is none or several."""
    if named is not None:
        check_column(what, named, names, where)
        return named
    if len(candidates) == 1:
        return candidates[0]
    got = f"several: {', '.join(candidates)}" if candidates else f"none among: {', '.join(names)}"
    raise ConfigError(f"expected one {what} column in {where}, got {got}; {advice or f'name it with {what}_column'}")


def check_column(what: str, named: str, names: list[str], where: object) -> None:
    if named not in names:
        raise ConfigError(f"expected the {what} column '{named}' in {where}, got no such{suggest(named, names)}")


def column_values(values: Any, where: str) -> NDArray[Any]:
    """Values of a further column as (N,) int64 or strings.

    Args:
        values: array-like of whole numbers, booleans or strings.
        where: what they are, for the message.
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
