"""Labelled images from the Hugging Face Hub, by ``owner/name``.

Downloading and reading are left to the package `datasets` (the extra "hub"), from version 4.0 on, which runs no code of
a data set. What it downloads it keeps in a cache of its own; images are decoded here, once per process.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyfed.data import images
from polyfed.data.samples import Samples
from polyfed.errors import RequestError
from polyfed.registry import nearest

_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def read(
    repository: str,
    subset: str | None = None,
    revision: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    train_splits: Sequence[str] = ("train",),
    columns: Sequence[str] = (),
) -> images.LabelledImages:
    """Download a data set, or take what was downloaded before, and decode it.

    Sides, columns and labels are found as in a folder of Parquet files (`polyfed.data.images.read_folder`). A folder
    ``owner/name`` below the present one goes before the Hub, as always with `datasets`.

    Args:
        repository: ``owner/name``, or a name alone.
        subset: which configuration; needed where there are several and none is the default.
        revision: branch, tag or commit; None for the newest.
        image_column: the column with images; None to find it.
        label_column: the column with labels; None to find it.
        train_splits: the splits that make the training side.
        columns: further columns of whole numbers or strings; one that the test side lacks is left out there.

    Raises:
        RequestError: `datasets` is missing or too old, no network, a data set that is unknown or gated, or of several
            configurations; no training split, columns missing or ambiguous, images that do not decode.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise RequestError(f"expected a data set of the Hub as 'hub:owner/name', came 'hub:{repository}'")
    splits = _load(repository, subset, revision)
    where = f"hub:{repository}"
    chosen = images.choose_sides(list(splits), train_splits, where)
    first = splits[chosen["train"][0]]
    found = images.pick_columns(
        first.features.arrow_schema, first.features.to_dict(), image_column, label_column, where
    )
    pixels: dict[str, NDArray[np.uint8]] = {}
    raw: dict[str, NDArray[Any]] = {}
    more: dict[str, dict[str, NDArray[Any]]] = {"train": {}, "test": {}}
    shape: tuple[int, ...] | None = None
    for side, words in chosen.items():
        parts = [splits[word] for word in words]
        pixels[side] = _pixels(parts, found.image, shape, where)
        shape = pixels[side].shape[1:]
        raw[side] = np.concatenate([_labels(part, found.label, where) for part in parts])
        for name in dict.fromkeys(columns):
            if side == "test" and name not in parts[0].column_names:
                continue
            more[side][name] = np.concatenate([_further(part, name, where) for part in parts])
    labels, class_names = images.number_labels(raw, found)
    sides = {side: Samples(torch.from_numpy(pixels[side]), torch.from_numpy(labels[side])) for side in chosen}
    return images.LabelledImages(sides["train"], sides.get("test"), class_names, more["train"], more["test"])


def _load(repository: str, subset: str | None, revision: str | None) -> Any:
    """The splits by name, a ``datasets.DatasetDict``."""
    try:
        import datasets
    except ImportError:
        raise RequestError(
            f"dataset 'hub:{repository}' needs the package 'datasets'; install it with: pip install 'polyfed[hub]'"
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise RequestError(
            f"dataset 'hub:{repository}' needs datasets 4.0 or newer, which runs no code from the Hub, came "
            f"{datasets.__version__}; install it with: pip install 'polyfed[hub]'"
        )
    with _plain_errors(repository, revision):
        known = datasets.get_dataset_config_names(repository, revision=revision)
        default = datasets.get_dataset_default_config_name(repository, revision=revision)
    if subset is None and default is None and len(known) > 1:
        raise RequestError(
            f"expected data.subset to name one of the configurations of 'hub:{repository}' "
            f"({', '.join(known[:8])}{', ...' if len(known) > 8 else ''}), came none"
        )
    if subset is not None and subset not in known:
        raise RequestError(f"'hub:{repository}' has no configuration '{subset}'{nearest(subset, known)}")
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
        said = images.first_line(error)
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
        raise RequestError(f"cannot load 'hub:{repository}'{at}: {hint} ({said})") from error
    finally:
        logger.setLevel(level)


def _pixels(parts: Sequence[Any], column: str, shape: tuple[int, ...] | None, where: str) -> NDArray[np.uint8]:
    """(N, C, H, W) uint8 of some splits; `shape` (C, H, W) is what they must have, None for that of the first."""
    total = sum(len(part) for part in parts)
    if total == 0:
        raise RequestError(f"expected at least one row in {where}, came an empty split")
    pixels: NDArray[np.uint8] | None = None
    row = 0
    for part in parts:
        only = part.select_columns([column])
        for number in range(len(only)):
            image = images.to_pixels(functools.partial(_opened, only, number, column), number, where)
            shape = shape or image.shape
            if pixels is None:
                pixels = np.empty((total, *shape), dtype=np.uint8)
            images.check_shape(image.shape, shape, number, where)
            pixels[row] = image
            row += 1
    assert pixels is not None  # total > 0
    return pixels


def _opened(part: Any, row: int, column: str) -> Any:
    """A Pillow image from a cell: one already, or encoded bytes in a column that is not declared as images."""
    from PIL import Image

    cell = part[row][column]
    encoded = cell.get("bytes") if isinstance(cell, dict) else cell
    if encoded is None:
        raise ValueError("it is empty")
    return Image.open(io.BytesIO(encoded)) if isinstance(encoded, bytes) else encoded


def _labels(part: Any, column: str, where: str) -> NDArray[Any]:
    values = _cells(part, column)
    if any(value is None for value in values):
        raise RequestError(f"expected a label in every row, came an empty one in '{column}' of {where}")
    return np.array(values, dtype=np.str_ if isinstance(values[0], str) else np.int64)


def _further(part: Any, column: str, where: str) -> NDArray[Any]:
    if column not in part.column_names:
        raise RequestError(
            f"expected the further column '{column}' in {where}, came no such{nearest(column, part.column_names)}"
        )
    return images.column_values(_cells(part, column), f"column '{column}' of {where}")


def _cells(part: Any, column: str) -> list[Any]:
    """A column's values, without decoding the others."""
    cells: list[Any] = part.select_columns([column])[:][column]
    return cells
