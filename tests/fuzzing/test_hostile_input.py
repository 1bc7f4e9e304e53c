"""Damaged and hostile input: each reader answers with a result or with one clear line, and does nothing else.

    pytest tests/fuzzing --hypothesis-profile=long      thousands of inputs of each kind, others each time

Inputs are valid files with faults. Checksums and seals are made right again, so that what they guard is reached.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.core.message import from_bytes, to_bytes
from polyfed.data.datasets import load_dataset
from polyfed.deploy.protocol import read_message
from polyfed.engine.privacy_ledger import from_record
from polyfed.engine.wire import encode
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.prediction import load, predict
from polyfed.experiments.run import run
from polyfed.records.read import seal
from polyfed.report.run_records import load_runs
from tests.fuzzing.guard import harmless_folder
from tests.fuzzing.strategies import PICKLES, altered, altered_head, archive, array_files, damaged

RECIPES = [path.read_bytes() for path in sorted((Path(__file__).parents[2] / "recipes").rglob("*.toml"))]
SMALL = {
    "data": {"dataset": "digits", "num_clients": 2, "max_train_per_client": 4, "partition": "iid"},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedgh", "header_epochs": 1},
    "training": {"rounds": 2, "batch_size": 4, "lr": 0.1},
    "privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 2.0},
    "run": {"checkpoint_every": 1, "executor": "serial"},
}
CSV = b"height,width,kind,label\n1.5,2,a,yes\n-1e3,0.25,b,no\n0,7,c,yes\n2,3,d,no\n"
TEXTS = b"text,label\nso good,1\nso bad,0\ngood .,1\nbad,0\n"
VECTORS = b"so 0.1 -0.2 0.3\ngood 1 2 3\nbad -1 -2 -3\n. 0 0 1\n"


class Files(dict[str, bytes]):
    """Contents by name; an example that fails need not print them all."""

    def __repr__(self) -> str:
        return f"Files({sorted(self)})"


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


# recipes --------------------------------------------------------------------------------------------------------------


@given(st.sampled_from(RECIPES).flatmap(damaged))
def test_text_of_a_recipe(text: bytes) -> None:
    with harmless_folder() as folder:
        (folder / "recipe.toml").write_bytes(text)
        reads_back(Recipe.load(folder / "recipe.toml"))


@given(st.sampled_from(RECIPES).flatmap(lambda text: altered(tomllib.loads(text.decode()))))
def test_values_of_a_recipe(settings: Any) -> None:
    if isinstance(settings, dict):
        with harmless_folder():
            reads_back(Recipe.from_dict(settings))


@given(altered(SMALL))
def test_an_experiment_of_odd_values(settings: Any) -> None:
    if isinstance(settings, dict):
        with harmless_folder():
            build_federation(Recipe.from_dict(settings))


def reads_back(recipe: Recipe) -> None:
    assert Recipe.from_dict(tomllib.loads(recipe.dumps())).dumps() == recipe.dumps()


# run folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a finished run."""
    folder = tmp_path_factory.mktemp("run")
    build_federation(Recipe.from_dict(SMALL), out=folder / "run").run()
    paths = [path for path in sorted((folder / "run").rglob("*")) if path.is_file()]
    return Files({path.relative_to(folder / "run").as_posix(): path.read_bytes() for path in paths})


@st.composite
def spoiled(draw: st.DrawFn, name: str, data: bytes) -> bytes:
    """A file of a run folder with faults; the seals of what is altered are right."""
    if draw(st.booleans()):
        return draw(damaged(data))
    if name.endswith(".jsonl"):
        lines = [json.loads(line) for line in data.splitlines()]
        number = draw(st.integers(0, len(lines) - 1))
        return b"".join(
            (draw(resealed(line)) if place == number else seal_again(line)) + b"\n" for place, line in enumerate(lines)
        )
    if name.endswith(".json"):
        return draw(resealed(json.loads(data)))
    if name.endswith(".safetensors"):
        return draw(altered_head(data))
    return draw(damaged(data))


@st.composite
def resealed(draw: st.DrawFn, value: dict[str, Any]) -> bytes:
    sealed = "seal" in value
    changed = draw(altered({key: entry for key, entry in value.items() if key != "seal"}))
    return seal(changed) if sealed and isinstance(changed, dict) and changed else as_json(changed)


def seal_again(line: dict[str, Any]) -> bytes:
    return seal({key: entry for key, entry in line.items() if key != "seal"})


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def read_results(folder: Path) -> None:
    pf.results(folder)


def read_model(folder: Path) -> None:
    model = load(folder, 0)
    predict(folder, 0, np.zeros((2, *model.form.shape), dtype=str(model.form.dtype).removeprefix("torch.")))


def go_on(folder: Path) -> None:
    (folder / "result.json").unlink(missing_ok=True)
    run(Recipe.from_dict(SMALL), out=folder, resume=True)


@pytest.mark.parametrize("use", [read_results, read_model, go_on])
@given(data=st.data())
def test_files_of_a_run(use: Callable[[Path], None], finished: Files, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(finished)))
    files = Files({**finished, name: data.draw(spoiled(name, finished[name]))})
    if name.startswith("models/"):  # its checksums are right, too
        index = json.loads(finished["models/index.json"])
        for entry in index.values():
            entry["sha256"] = {file: hashlib.sha256(files[f"models/{file}"]).hexdigest() for file in entry["sha256"]}
        if name != "models/index.json":
            files["models/index.json"] = as_json(index)
        files["models/index.json.sha256"] = hashlib.sha256(files["models/index.json"]).hexdigest().encode()
    with harmless_folder() as folder:
        write(folder / "run", files)
        use(folder / "run")


# data -----------------------------------------------------------------------------------------------------------------


def image(mode: str, form: str) -> bytes:
    out = io.BytesIO()
    Image.new(mode, (6, 6), 100).save(out, form)
    return out.getvalue()


IMAGES = [image("L", "PNG"), image("RGB", "PNG"), image("RGB", "JPEG"), image("L", "GIF")]


@given(table=damaged(CSV, 6), texts=damaged(TEXTS, 6), vectors=damaged(VECTORS, 6))
def test_tables_and_texts(table: bytes, texts: bytes, vectors: bytes) -> None:
    for read in (
        lambda folder: load_dataset(f"csv:{folder / 'table.csv'}"),
        lambda folder: load_dataset(f"csv:{folder / 'texts.csv'}", text_column="text"),
        lambda folder: load_dataset(f"csv:{folder / 'good.csv'}", text_column="text", word_vectors=folder / "v.txt"),
    ):
        with harmless_folder() as folder:
            write(folder, {"table.csv": table, "texts.csv": texts, "good.csv": TEXTS, "v.txt": vectors})
            read(folder)


@st.composite
def client_arrays(draw: st.DrawFn) -> bytes:
    """An .npz file of a client with a fault: outside, in a member, or in what a member claims to be."""
    out = io.BytesIO()
    np.savez(out, x=np.zeros((5, 1, 4, 4), np.float32), y=np.array([0, 1, 2, 0, 1]))
    if draw(st.booleans()):
        return draw(damaged(out.getvalue()))
    members = {name: draw(array_files) for name in ("x.npy", "y.npy")}
    return archive({**members, draw(st.sampled_from(["y.npy", "../outside.npy", "/z.npy"])): draw(array_files)})


@given(client_arrays(), altered({"num_clients": 1, "num_classes": 3}))
def test_arrays_of_clients(arrays: bytes, config: Any) -> None:
    with harmless_folder() as folder:
        write(folder, {"train/0.npz": arrays, "config.json": as_json(config)})
        load_dataset(f"npz:{folder}")


@given(st.sampled_from(IMAGES).flatmap(damaged) | st.sampled_from(PICKLES))
def test_a_folder_of_images(broken: bytes) -> None:
    with harmless_folder() as folder:
        write(folder, {"a/0.png": IMAGES[1], "b/0.png": broken})
        load_dataset(f"images:{folder}", image_size=6)


@given(data=st.data())
def test_parquet(data: st.DataObject) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    cells = [*IMAGES[:1], data.draw(st.sampled_from([None, b"", *IMAGES, *PICKLES])), IMAGES[0]]
    labels = data.draw(st.sampled_from([[0, 1, 2], [0, None, 2**62], ["a", "b", "-1"], [0.5, float("nan"), 1.0]]))
    known = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "b", "c"]}}
    features = as_json({"info": {"features": data.draw(altered(known))}})
    table = pa.table({"image": cells, "label": labels})
    pq.write_table(table.replace_schema_metadata({b"huggingface": features}), out)
    content = data.draw(st.just(out.getvalue()) | damaged(out.getvalue()))
    with harmless_folder() as folder:
        write(folder, {"set/train.parquet": content})
        load_dataset("parquet:set", folder)


# messages -------------------------------------------------------------------------------------------------------------

MESSAGE = to_bytes({"header": {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}, "count": torch.tensor(5)})
ENVELOPE = encode({"x": torch.ones(2), "g": {"y": torch.zeros(1)}, "none": {}})


@given(damaged(MESSAGE) | altered_head(MESSAGE))
def test_a_message(data: bytes) -> None:
    with harmless_folder():
        to_bytes(from_bytes(data))


@given(damaged(ENVELOPE) | altered_head(ENVELOPE))
def test_an_envelope(data: bytes) -> None:
    with harmless_folder():
        encode(read_message(data))


# faults found before --------------------------------------------------------------------------------------------------


def test_a_tensor_of_an_impossible_shape() -> None:
    head = b'{"x":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}'
    with pytest.raises(ConfigError, match="safetensors"):
        from_bytes(len(head).to_bytes(8, "little") + head)


def test_a_recipe_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_bytes(b"[data]\nname = " + b"[" * 100000)
    with pytest.raises(ConfigError, match=r"deep\.toml"):
        Recipe.load(tmp_path / "deep.toml")


RELEASE = {"what": "upload", "unit": "client", "noise": 2.0, "drawn": 0, "held": 0, "poisson": False, "times": 1}
RELEASE |= {"clients": [0, 1], "once": False}


def test_an_account_of_noise_that_is_wrong(finished: Files, tmp_path: Path) -> None:
    write(tmp_path, finished)
    entries = {"releases": [{**RELEASE, "noise": 0}]}
    lines = [{**json.loads(line), **entries} for line in finished["rounds.jsonl"].splitlines()]
    write(tmp_path, {"rounds.jsonl": b"".join(seal_again(line) + b"\n" for line in lines)})
    with pytest.raises(ConfigError, match=r"releases\[0\].noise"):
        load_runs(tmp_path)


def test_an_account_of_rows_of_which_none_is_drawn() -> None:
    with pytest.raises(ConfigError, match="releases about one row"):
        from_record([{**RELEASE, "unit": "sample", "held": 5}])


# the guard ------------------------------------------------------------------------------------------------------------


class Poison:
    """Unpickled, it would call a function."""

    def __reduce__(self) -> Any:
        return os.getpid, ()


@pytest.mark.parametrize(
    ("deed", "event"),
    [
        (lambda folder, other: pickle.loads(pickle.dumps(Poison())), "pickle.find_class"),
        (lambda folder, other: (other / "outside.txt").touch(), "open"),
        (lambda folder, other: os.mkdir(folder / ".." / ".." / other / "outside"), "os.mkdir"),
        (lambda folder, other: os.system("true"), "os.system"),
    ],
)
def test_the_guard_sees(deed: Callable[[Path, Path], object], event: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=event), harmless_folder() as folder:
        deed(folder, tmp_path)
