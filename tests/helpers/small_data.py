"""Helpers of these tests: generators by purpose, small files of every kind, and what is said where one is refused."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.data.datasets import DatasetSource, load_dataset
from polyfed.data.federated_dataset import FederatedDataset, build_federated_dataset
from polyfed.data.options import PartitionSettings
from polyfed.data.samples import LabeledSamples
from tests.helpers.refusals import refusal


def purposes(seed: int) -> Callable[[str], np.random.Generator]:
    """Generators by purpose, as the engine hands them out."""
    return lambda purpose: np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def federate(
    source: DatasetSource, *, rng: Callable[[str], np.random.Generator], private: bool = False, **settings: Any
) -> FederatedDataset:
    """Deal a source with these settings."""
    return build_federated_dataset(source, PartitionSettings(**settings), rng, private)


def ids(samples: LabeledSamples) -> list[int]:
    """The numbers of rows, of samples whose first input they are."""
    return samples.x[:, 0].int().tolist()


def reading(kind: str) -> tuple[Callable[..., DatasetSource], Callable[..., str]]:
    """Of one kind of data ("images", "csv", ...): what reads a place, and what gives the one line of its refusal."""

    def read(place: Path, **options: Any) -> DatasetSource:
        return load_dataset(f"{kind}:{place}", **options)

    def refused(place: Path, **options: Any) -> str:
        return refusal(lambda: read(place, **options))

    return read, refused


def put(place: Path, content: str | bytes) -> Path:
    """A file, in folders that are made."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content.encode() if isinstance(content, str) else content)
    return place


def encode(pixels: np.ndarray, form: str = "PNG") -> bytes:
    """An (H, W) or (H, W, 3) uint8 array as an image file."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def write_parquet(
    path: Path,
    images: Sequence[np.ndarray | bytes | None] | None,
    labels: dict[str, Sequence[Any]],
    *,
    image_name: str = "img",
    names: dict[str, list[str]] | None = None,
    features: bool = True,
) -> Path:
    """A Parquet file as `datasets` writes it; `features=False` leaves out what it notes in the schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {}
    notes: dict[str, Any] = {}
    if images is not None:
        cells = [encode(i) if isinstance(i, np.ndarray) else i for i in images]
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        columns[image_name] = pa.array([{"bytes": c, "path": None} for c in cells], type=kind)
        notes[image_name] = {"_type": "Image"}
    for name, values in labels.items():
        columns[name] = values if isinstance(values, pa.Array) else pa.array(list(values))
        named = (names or {}).get(name)
        notes[name] = {"names": named, "_type": "ClassLabel"} if named else {"dtype": "int64", "_type": "Value"}
    table = pa.table(columns)
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": notes}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def some_images(count: int, shape: tuple[int, ...] = (6, 5, 3), seed: int = 0) -> list[np.ndarray]:
    """Random uint8 images."""
    return list(np.random.default_rng(seed).integers(0, 256, size=(count, *shape), dtype=np.uint8))
