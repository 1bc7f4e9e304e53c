"""Labeled images or texts from the Hugging Face Hub, by ``owner/name``.

Downloading and reading are left to the package `datasets` (the extra "hub"), from version 4.0 on, which runs no code of
a data set. What it downloads it keeps in a cache of its own; images are decoded here, once per process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import bounds, parquet_images, text_files
from polyfed.data.column_schema import column_values, pick_columns
from polyfed.data.label_encoding import Files, encode_labels
from polyfed.data.options import SourceOptions
from polyfed.data.samples import LabeledSamples
from polyfed.data.split_files import choose_splits
from polyfed.data.text import LabeledTexts, RawTexts, encode_dataset
from polyfed.errors import ConfigError, first_line
from polyfed.registry import suggest

_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def read(repository: str, options: SourceOptions) -> parquet_images.LabeledImages:
    """Download a data set, or take what was downloaded before, and decode it.

    Sides, columns and labels are found as in a folder of Parquet files (`polyfed.data.parquet_images.read_folder`). A
    folder ``owner/name`` below the present one goes before the Hub, as always with `datasets`.

    Args:
        repository: ``owner/name``, or a name alone.
        options: of it subset (needed where there are several and none is the default), revision, image_column,
            label_column, train_splits and columns, of which one that the test side lacks is left out there.

    Raises:
        ConfigError: `datasets` is missing or too old, no network, a data set that is unknown or gated, or of several
            configurations; no training split, columns missing or ambiguous, images that do not decode.
    """
    where, chosen = _sides(repository, options)
    features = chosen["train"][0].features
    found = pick_columns(features.arrow_schema, features.to_dict(), options.image_column, options.label_column, where)
    pixels: dict[str, NDArray[np.uint8]] = {}
    raw: dict[str, NDArray[Any]] = {}
    shape: tuple[int, ...] | None = None
    turned = 0
    for side, parts in chosen.items():
        pixels[side], of_side = _pixels(parts, found.image, shape, where)
        turned += of_side
        shape = pixels[side].shape[1:]
        raw[side] = _labels(parts, found.label, where)
    files = {side: _files(parts, where) for side, parts in chosen.items()}
    labels, class_names = encode_labels(raw, found, files)
    sides = {side: LabeledSamples(torch.from_numpy(pixels[side]), torch.from_numpy(labels[side])) for side in chosen}
    more = {side: _further(parts, options.columns, side == "train", where) for side, parts in chosen.items()}
    return parquet_images.LabeledImages(
        sides["train"], sides.get("test"), class_names, more["train"], more.get("test", {}), found.label, turned
    )


def read_texts(repository: str, options: SourceOptions) -> LabeledTexts:
    """The same of a data set of texts; `options.words` names their column, the vocabulary and the length.

    Raises:
        ConfigError: as for images; a text that is missing or no string; a file of vectors that is wrong.
    """
    where, chosen = _sides(repository, options)
    features = chosen["train"][0].features
    found = text_files.pick_columns(
        features.arrow_schema, features.to_dict(), options.words.column, options.label_column, where
    )
    sides = {
        side: RawTexts(
            _texts(parts, found.image, where),
            _labels(parts, found.label, where),
            _further(parts, options.columns, side == "train", where),
            _files(parts, where),
        )
        for side, parts in chosen.items()
    }
    return encode_dataset(sides, found, options.words)


def _sides(repository: str, options: SourceOptions) -> tuple[str, dict[str, list[Any]]]:
    """What the data set is called in messages, and the splits of each side."""
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(f"expected a data set of the Hub as 'hub:owner/name', got 'hub:{repository}'")
    splits = load_from_hub(repository, options.subset, options.revision)
    where = f"hub:{repository}"
    chosen = choose_splits(list(splits), options.train_splits, where)
    return where, {side: [splits[word] for word in words] for side, words in chosen.items()}


def load_from_hub(repository: str, subset: str | None, revision: str | None) -> Any:
    """The splits by name, a ``datasets.DatasetDict``."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"dataset 'hub:{repository}' needs the package 'datasets'; install it with: pip install 'polyfed[hub]'"
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ConfigError(
            f"dataset 'hub:{repository}' needs datasets 4.0 or newer, which runs no code from the Hub, got "
            f"{datasets.__version__}; install it with: pip install 'polyfed[hub]'"
        )
    with _plain_errors(repository, revision):
        known = datasets.get_dataset_config_names(repository, revision=revision)
        default = datasets.get_dataset_default_config_name(repository, revision=revision)
    if subset is None and default is None and len(known) > 1:
        raise ConfigError(
            f"expected data.config to name one of the configurations of 'hub:{repository}' "
            f"({', '.join(known[:8])}{', ...' if len(known) > 8 else ''}), got none"
        )
    if subset is not None and subset not in known:
        raise ConfigError(f"'hub:{repository}' has no configuration '{subset}'{suggest(subset, known)}")
    with _plain_errors(repository, revision):
        return datasets.load_dataset(repository, subset, revision=revision)


@contextlib.contextmanager
def _plain_errors(repository: str, revision: str | None) -> Iterator[None]:
    """What `datasets` and the network raise, as one line that says what to do; notes on retries are held back."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:  # from `datasets`, huggingface_hub, the HTTP client, the readers of a dozen formats
        said = first_line(error)
        kinds = {kind.__name__ for kind in type(error).__mro__}
        at = f" at revision '{revision}'" if revision is not None else ""
        if "gated" in said or "GatedRepoError" in kinds:
            hint = "it is gated: ask for access on its page and log in with `hf auth login`"
        elif kinds & {"ConnectionError", "OfflineModeIsEnabled", "TransportError", "TimeoutError"}:
            hint = "the Hub cannot be reached, and no copy was downloaded before"
        elif kinds & {"DatasetNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError"}:
            hint = "there is none of that name, or it is private"
        elif "scripts are no longer supported" in said:
            hint = "it comes as code, which is never run"
        else:
            hint = "it cannot be read"
        raise ConfigError(f"cannot load 'hub:{repository}'{at}: {hint} ({said})") from error
    finally:
        logger.setLevel(level)


def _pixels(
    parts: Sequence[Any], column: str, shape: tuple[int, ...] | None, where: str
) -> tuple[NDArray[np.uint8], int]:
    """(N, C, H, W) uint8 of some splits, and how many images were turned here (`datasets` itself turns others).

    `shape` (C, H, W) is what they must have, None for that of the first.
    """
    total = sum(len(part) for part in parts)
    if total == 0:
        raise ConfigError(f"expected at least one row in {where}, got an empty split")
    pixels: NDArray[np.uint8] | None = None
    row = 0
    turned = 0
    for part in parts:
        only = part.select_columns([column])
        for number in range(len(only)):
            image, is_turned = parquet_images.to_pixels(functools.partial(_opened, only, number, column), number, where)
            turned += is_turned
            shape = shape or image.shape
            if pixels is None:
                pixels = np.empty((total, *shape), dtype=np.uint8)
            parquet_images.check_shape(image.shape, shape, number, where)
            pixels[row] = image
            row += 1
    assert pixels is not None  # total > 0
    return pixels, turned


def _opened(part: Any, row: int, column: str) -> Any:
    """A Pillow image from a cell: one already, or encoded bytes in a column that is not declared as images."""
    cell = part[row][column]
    encoded = cell.get("bytes") if isinstance(cell, dict) else cell
    if encoded is None:
        raise ValueError("it is empty")
    return bounds.open_image(encoded) if isinstance(encoded, bytes) else encoded


def _texts(parts: Sequence[Any], column: str, where: str) -> list[str]:
    cells = [cell for part in parts for cell in _cells(part, column)]
    if not cells:
        raise ConfigError(f"expected at least one row in {where}, got an empty split")
    if None in cells:
        row = cells.index(None)
        raise ConfigError(f"expected '{column}' in every row, got an empty one in row {row} of {where}")
    return cells


def _labels(parts: Sequence[Any], column: str, where: str) -> NDArray[Any]:
    values = [value for part in parts for value in _cells(part, column)]
    if any(value is None for value in values):
        raise ConfigError(f"expected a label in every row, got an empty one in '{column}' of {where}")
    try:
        return np.array(values, dtype=np.str_ if isinstance(values[0], str) else np.int64)
    except OverflowError:
        raise ConfigError(f"expected labels below 2^63 in '{column}' of {where}, got larger ones") from None


def _files(parts: Sequence[Any], where: str) -> Files:
    """The splits of a side and the numbers of their rows."""
    return [(f"split '{part.split}' of {where}", range(len(part))) for part in parts]


def _further(parts: Sequence[Any], names: Sequence[str], needed: bool, where: str) -> dict[str, NDArray[Any]]:
    """Further columns of one side; one that it lacks is left out, unless each is needed."""
    found = {}
    for name in dict.fromkeys(names):
        if not needed and name not in parts[0].column_names:
            continue
        values = []
        for part in parts:
            if name not in part.column_names:
                raise ConfigError(
                    f"expected the further column '{name}' in {where}, got no such{suggest(name, part.column_names)}"
                )
            values.append(column_values(_cells(part, name), f"column '{name}' of {where}"))
        found[name] = np.concatenate(values)
    return found


def _cells(part: Any, column: str) -> list[Any]:
    """A column's values, without decoding the others."""
    cells: list[Any] = part.select_columns([column])[:][column]
    return cells
