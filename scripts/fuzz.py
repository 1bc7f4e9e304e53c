"""Broken and hostile input for everything that polyfed reads: it must answer with a result or with one clear line.

    python scripts/fuzz.py                                         1 000 inputs for each target
    python scripts/fuzz.py --targets recipe,checkpoint --count 20000 --seed 3
    python scripts/fuzz.py --seconds 60                            so long for each target
    python scripts/fuzz.py --targets message --only 417            one input again, its files kept and named
    python scripts/fuzz.py --targets envelope --engine hypothesis    shrinks what fails
    python scripts/fuzz.py --targets envelope --engine atheris       led by coverage, where `atheris` is installed

An input is a small tree of files, made from a valid one by flipped bits, cut ends, copied pieces and odd values, or of
well-formed files with odd content: keys gone, doubled, called otherwise, swapped, values of other kinds at every depth.
Checksums and seals are made right again, so that what they guard is reached. An input is a function of the target, the
seed and its number. Of each is required:

- a result, or a `PolyfedError` whose text is one line; no other exception;
- an end within --limit seconds;
- nothing is unpickled, started, connected to or imported by name (Python's audit events), also where an input holds a
  pickle that would do so;
- no file outside the input's own folder is written, renamed or removed (audit events, and a tree beside it that is
  compared); the folder of decoded copies (POLYFED_CACHE) is one of the fuzzer's own.

Inputs are tried in a child process, so that one that kills the interpreter is counted and the next is tried. Exit
status: 0 nothing failed, 1 something did.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import functools
import hashlib
import io
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
MEMORY = 8 * 2**30  # bytes of addresses that a child may use: a demand for more is an error, not a full machine

Files = dict[str, bytes]
Random = random.Random


@dataclass(frozen=True)
class Target:
    """What is read. make: an input's files. use: what polyfed does with them, one thing after the other."""

    about: str
    make: Callable[[Random], Files]
    use: Sequence[Callable[[Path], object]]


class Failure(Exception):
    """An input that breaks a promise; says which."""


# odd things -------------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "x",
        "0",
        "-1",
        "nan",
        "local",
        "é\u2028",
        "a\x00b",
        "a/b",
        "../outside",
        "/",
        "\ud83d\ude00",
        "9" * 5000,
        "n" * 300,
        "n/" * 3000,
        "\x1b[31m",
        "csv:/dev/zero",
        "npz:" + "n" * 300,
        "\x01deep",
        "$\\frac{",
    ),
    *(
        [],
        {},
        [0],
        [None],
        [[1, 2]],
        ["x"],
        {"x": 1},
        {"": {}},
        [1.5, "x", None, {}],
        [0.5] * 1000,
        [[]],
        [[0], [1, 2]],
    ),
    *({"n" * 300: 1}, {"0": 0, "1": [1]}, {str(i): i for i in range(300)}),
)
DEEP = b"[" * 20000 + b"]" * 20000  # where "\x01deep" stands in JSON
TOKENS = (
    *(b"\x00", b"\xff", b"\n", b"\r\n", b'"', b"'", b",", b"{", b"}", b"[", b"]", b"=", b"-", b"#", b"\\", b"\\u0000"),
    *(b"1e999", b"NaN", b"null", b"true", b"99999999999999999999", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[" * 20000),
    *(b'{"a":' * 20000, b"../", b"\x00" * 64, b"\xff" * 8, b"PAR1", b"PK\x03\x04", b"\x93NUMPY", b"\x80\x04."),
)


def pickles() -> list[bytes]:
    """Streams that would touch a file if they were unpickled."""
    call = b"cposix\nsystem\n(S'touch EXECUTED'\ntR."
    wrapped = b"\x80\x04\x95\x26\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x0etouch EXECUTED\x85R."
    return [call, wrapped, b'cbuiltins\neval\n(S\'open("EXECUTED","w")\'\ntR.']


def damaged(r: Random, data: bytes, times: int = 4) -> bytes:
    """The bytes with one to `times` faults: flips, cuts, copies, odd pieces."""
    out = bytearray(data)
    for _ in range(r.randint(1, times)):
        place = r.randrange(len(out) + 1)
        kind = r.randrange(8)
        if not out or kind == 0:
            out[place:place] = r.choice(TOKENS)
        elif kind == 1:
            out[place % len(out)] ^= 1 << r.randrange(8)
        elif kind == 2:
            out[place % len(out)] = r.randrange(256)
        elif kind == 3:
            del out[place:]
        elif kind == 4:
            del out[place : place + r.randint(1, 32)]
        elif kind == 5:
            other = r.randrange(len(out))
            out[place:place] = out[other : other + r.randint(1, 64)]
        elif kind == 6:
            out[place : place + 4] = r.randrange(2**32).to_bytes(4, "little")
        else:
            piece = r.choice(TOKENS)
            out[place : place + len(piece)] = piece
    return bytes(out)


def odd(r: Random, like: Any = None) -> Any:
    """An odd value, or one near `like`."""
    if isinstance(like, bool) or r.random() < 0.6:
        return copy.deepcopy(r.choice(ODD))
    if isinstance(like, int):
        return r.choice([like + 1, like - 1, -like, like * 1000, like << 40, like / 2 if abs(like) < 1e9 else 0.5])
    if isinstance(like, float):
        return r.choice([-like, like * 1e30, like * 1e-30, int(like) if abs(like) < 1e300 else 0, str(like)])
    if isinstance(like, str):
        return r.choice([like[:-1], like + "x", like.upper(), like * 3, [like]])
    if isinstance(like, list):
        return r.choice([like[:-1], like * 2, [like], like[::-1], {str(i): v for i, v in enumerate(like)}])
    return copy.deepcopy(r.choice(ODD))


def nested(value: Any, depth: int) -> Any:
    """The value in so many lists and objects."""
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def altered(r: Random, value: Any, times: int = 3) -> Any:
    """A structure with one to `times` changes, at any depth, to its keys, its values, or both."""
    root = {"": copy.deepcopy(value)}
    for _ in range(r.randint(1, times)):
        here, key = _spot(r, root)
        kind = r.randrange(14)
        if kind < 4 or here is root:
            here[key] = odd(r, here[key])
        elif kind == 4:
            del here[key]
        elif kind == 5:
            other, place = _spot(r, root)
            if other is not root:  # swapped with a value that lies anywhere, both as they were
                here[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(here[key])
        elif kind == 6:
            here[key] = nested(here[key], r.choice([1, 1, 2, 150]))
        elif kind == 7 and isinstance(here[key], list) and here[key]:
            here[key] = r.choice([here[key] * 2, here[key][:1], [*here[key], here[key][0]], here[key] * 100])
        elif kind == 8 and isinstance(here[key], dict) and here[key]:
            here[key] = r.choice(
                [list(here[key]), list(here[key].values()), {k: odd(r, v) for k, v in here[key].items()}]
            )
        elif isinstance(here, dict):
            name = r.choice([f"{key}x", key.upper(), "", "name", "é", "a.b", "n" * 300, "0", "-1", f"\x01twice{key}"])
            here[name] = here.pop(key) if kind < 12 else odd(r, here[key])
        else:
            here.insert(r.randrange(len(here) + 1), odd(r, here[key]))
    return root[""]


def _spot(r: Random, root: dict[str, Any]) -> tuple[Any, Any]:
    """Where a value lies: as often any of all, of which most lie deep, as one on a way down from the top."""
    if r.random() < 0.5:
        here, key = root, ""
        while isinstance(here[key], dict | list) and here[key] and r.random() < 0.75:
            here = here[key]
            key = r.choice(list(here)) if isinstance(here, dict) else r.randrange(len(here))
        return here, key
    spots: list[tuple[Any, Any]] = []
    pending: list[Any] = [root]
    while pending:
        here = pending.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here))
        spots += [(here, key) for key in keys]
        pending += [here[key] for key in keys if isinstance(here[key], dict | list)]
    return r.choice(spots)


def as_json(value: Any) -> bytes:
    """JSON, with what JSON should not have: numbers without end, keys twice, lists in lists in lists."""
    with contextlib.suppress(ValueError, RecursionError):
        return marked(json.dumps(value).encode())
    return b"1" + b"0" * 5000  # a number that json does not write


def marked(data: bytes) -> bytes:
    """JSON with its marks become what a structure cannot hold."""
    return data.replace(b'"\\u0001deep"', DEEP).replace(b"\\u0001twice", b"")


def resealed(value: Any) -> bytes:
    """A sealed line; without a seal, where it is no object."""
    data = as_json(value)
    if not data.startswith(b"{") or data == b"{}":
        return data
    return data[:-1] + b', "seal": "' + hashlib.sha256(data).hexdigest().encode() + b'"}'


# examples ---------------------------------------------------------------------------------------------------------


@functools.cache
def _own() -> Path:
    """A folder of this process's own, removed at its end."""
    memory = Path("/dev/shm")  # a disk would take most of the time
    folder = Path(tempfile.mkdtemp(prefix="polyfed-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    owner = os.getpid()
    import atexit

    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _mine() -> Path:
    """A folder in it for what this process makes and remembers: a child's is not known to the process behind it."""
    folder = _own() / str(os.getpid())
    folder.mkdir(exist_ok=True)
    return folder


def tree(folder: Path) -> Files:
    """The files below a folder by their relative paths."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def settings_of(kind: str) -> dict[str, Any]:
    """The smallest useful runs, by kind: two clients, two rounds, a checkpoint after each."""
    rows = {"num_clients": 2, "max_train_per_client": 4, "max_test_per_client": 2, "partition": "iid"}
    training = {"rounds": 2, "batch_size": 4, "lr": 0.1}
    more: dict[str, Any] = {"run": {"checkpoint_every": 1, "executor": "serial", "keep": "last"}}
    if kind == "noise":  # releases, deltas, a budget; confusion and AUC; compressed uploads
        more |= {"privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 2.0, "max_epsilon": 500.0}}
        more |= {"evaluation": {"metrics": ["confusion", "auc"]}}
        more |= {"models": {"architectures": ["digits-cnn1"]}, "method": {"name": "fedavg"}}
        return {"data": {**rows, "dataset": "digits"}, "training": training, **more}
    if kind == "samples":  # releases of drawn rows
        more |= {"privacy": {"max_grad_norm": 1.0, "noise_multiplier": 3.0}}
        more |= {"models": {"architectures": ["digits-cnn1"]}, "method": {"name": "local"}}
        return {"data": {**rows, "dataset": "digits"}, "training": {**training, "batch_size": 2}, **more}
    if kind == "table":
        more |= {"models": {"architectures": ["mlp-64-32"]}, "method": {"name": "local"}}
        return {"data": {**rows, "dataset": f"csv:{_sheets() / 'table.csv'}"}, "training": training, **more}
    if kind == "texts":
        more |= {"models": {"architectures": ["fedhenn-lstm1"]}, "method": {"name": "local"}}
        own = {"dataset": f"csv:{_sheets() / 'texts.csv'}", "text_column": "text", "max_length": 4}
        return {"data": {**rows, **own}, "training": training, **more}
    more |= {"models": {"architectures": ["digits-cnn1", "digits-cnn2"]}}
    more |= {"method": {"name": "fedgh", "header_epochs": 1}, "evaluation": {"extra_stages": ["received"]}}
    return {"data": {**rows, "dataset": "digits"}, "training": training, **more}


KINDS = ("plain", "noise", "samples", "table", "texts")


@functools.cache
def _sheets() -> Path:
    """A folder with a table and with texts, of two classes."""
    place = _mine() / "sheets"
    place.mkdir()
    numbers = "".join(f"{i % 7},{i % 5}.5,{'yes' if i % 2 else 'no'}\n" for i in range(40))
    (place / "table.csv").write_text("height,width,label\n" + numbers)
    texts = "".join(f"{'so good' if i % 2 else 'a bad one'} {i % 3},{i % 2}\n" for i in range(40))
    (place / "texts.csv").write_text("text,label\n" + texts)
    return place


def federation(folder: Path, kind: str = "plain") -> Any:
    """A run of this kind."""
    from polyfed.config.recipe import Recipe
    from polyfed.experiments.build import build_federation
    from polyfed.experiments.data_cache import DataCache

    global _data
    _data = globals().get("_data") or DataCache()
    return build_federation(Recipe.from_dict(settings_of(kind)), out=folder, data=_data)


@functools.cache
def run_folder(kind: str = "plain") -> Files:
    """A finished run, with what later commands leave in its folder."""
    place = _mine() / f"run-{kind}"
    shutil.rmtree(place, ignore_errors=True)  # a run whose input took too long was left in the middle
    federation(place, kind).run()
    matrix = [[0.5, 1.0], [None, 2]]
    shown = {"labels": {"name": "x", "seed": 0, "matrix": matrix, "about": "counts", "rows": ["a", "b"]}}
    later = {
        "analysis/labels.json": as_json([shown, {"row_axis": "client", **shown["labels"]}]),
        "compare.json": as_json({"command": "polyfed compare mine.toml", "date": "2026-01-01"}),
        "attack/attack.json": as_json({"client": 0, "targets": [{"psnr": 20.5}]}),
    }
    return {**tree(place), **later}


@functools.cache
def sweep_folder() -> Files:
    """What a sweep leaves: a folder for each value, and its table."""
    import tomli_w

    from polyfed.experiments.sweep import sweep

    place = _mine() / "sweep"
    recipe = _mine() / "swept.toml"
    settings = settings_of("plain")
    settings["data"] |= {"split": "2:1:1"}
    recipe.write_text(tomli_w.dumps(settings))
    sweep(recipe, {"training.lr": [0.1, 0.2], "training.momentum": [0.0, 0.5]}, out=place)
    return {"sweep.json": tree(place)["sweep.json"]}


@functools.cache
def images() -> tuple[bytes, ...]:
    """Encoded images: gray PNG, RGB PNG, JPEG, GIF."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    found = []
    for array, form in ((pixels[..., 0], "PNG"), (pixels, "PNG"), (pixels, "JPEG"), (pixels[..., 0], "GIF")):
        out = io.BytesIO()
        Image.fromarray(array).save(out, form)
        found.append(out.getvalue())
    return tuple(found)


def parquet(columns: Mapping[str, Sequence[Any]], features: Any = None) -> bytes:
    """A Parquet file; `features` is what `datasets` would say of the columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({name: list(values) for name, values in columns.items()})
    if features is not None:
        table = table.replace_schema_metadata({b"huggingface": as_json({"info": {"features": features}})})
    out = pa.BufferOutputStream()
    pq.write_table(table, out)
    return bytes(out.getvalue())


@functools.cache
def parquets() -> tuple[bytes, ...]:
    """Images with labels, images in structs with named classes, texts."""
    cells = [images()[0]] * 6
    said = {"img": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "b"]}}
    return (
        parquet({"img": cells, "label": [0, 1, 2, 0, 1, 2]}),
        parquet({"img": [{"bytes": cell, "path": None} for cell in cells], "label": [0, 1] * 3}, said),
        parquet({"text": ["so good", "so bad", "good", "bad", "a", "b"], "label": [0, 1] * 3}),
    )


CSV = b"height,width,kind,label\n1.5,2,a,yes\n-1e3,0.25,b,no\n0,7,c,yes\n2,3,d,no\n"
VECTORS = b"so 0.1 -0.2 0.3\ngood 1 2 3\nbad -1 -2 -3\n. 0 0 1\n"
TEXTS = b"text,label\nso good,1\nso bad,0\ngood .,1\nbad,0\n"


def npy(array: Any) -> bytes:
    """An array as NumPy saves it; an array of objects is pickled by NumPy."""
    import numpy as np

    out = io.BytesIO()
    np.lib.format.write_array(out, np.asanyarray(array), allow_pickle=True)
    return out.getvalue()


def archive(members: Mapping[str, bytes], deflated: bool = False) -> bytes:
    """A zip file with right checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return out.getvalue()


@functools.cache
def arrays() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """A client's members: plain arrays; one pickled dictionary."""
    import numpy as np

    x, y = np.random.default_rng(0).random((5, 1, 4, 4), dtype=np.float32), np.array([0, 1, 2, 0, 1])
    return {"x.npy": npy(x), "y.npy": npy(y)}, {"data.npy": npy(np.array({"x": x, "y": y}, dtype=object))}


@functools.cache
def messages() -> tuple[bytes, ...]:
    """Messages as safetensors."""
    import torch

    from polyfed.core.message import to_bytes

    one = {"header": {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}, "count": torch.tensor(5)}
    return to_bytes(one), to_bytes({}), to_bytes({"x": torch.ones(2, dtype=torch.bfloat16), "y": torch.ones(0, 3)})


# targets ----------------------------------------------------------------------------------------------------------


def recipe_text(r: Random) -> Files:
    """A recipe's text, damaged."""
    return {"recipe.toml": damaged(r, r.choice(_texts()), 6)}


@functools.cache
def _texts() -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(RECIPES.rglob("*.toml")))


@functools.cache
def _settings() -> tuple[dict[str, Any], ...]:
    return tuple(tomllib.loads(text.decode()) for text in _texts())


def recipe_values(r: Random) -> Files:
    """A recipe's structure with odd keys and values, as JSON."""
    return {"recipe.json": as_json(altered(r, r.choice(_settings()), 4))}


def use_recipe(place: Path) -> None:
    """Read it; what is accepted must say itself again."""
    from polyfed.config.recipe import Recipe

    _repeats(Recipe.load(place / "recipe.toml"))


def _told(path: Path) -> Any:
    """What is in a file of JSON, for what takes no JSON itself; nothing, where it is nested without end."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        return None


def use_values(place: Path) -> None:
    """The same from a structure."""
    from polyfed.config.recipe import Recipe

    given = _told(place / "recipe.json")
    if isinstance(given, dict):
        _repeats(Recipe.from_dict(given))


def _repeats(recipe: Any) -> None:
    from polyfed.config.recipe import Recipe

    again = Recipe.from_dict(tomllib.loads(recipe.dumps()))
    if again.dumps() != recipe.dumps():
        raise Failure("the resolved recipe does not say itself again")


SMALL: dict[str, Any] = {
    "data": {
        "dataset": "digits",
        "num_clients": 3,
        "partition": "iid",
        "max_train_per_client": 4,
        "limit_train": 200,
        "split": "6:1:3",
    },
    "models": {"architectures": ["digits-cnn1"], "assignment": "round_robin"},
    "method": {"name": "fedgh", "header_lr": 0.1},
    "training": {
        "rounds": 2,
        "local_epochs": 1,
        "batch_size": 8,
        "lr": 0.1,
        "client_fraction": 1.0,
        "optimizer": "sgd",
    },
    "evaluation": {"weighting": "clients", "every_n_rounds": 1},
    "run": {"seed": 0, "executor": "serial", "checkpoint_every": 1},
}


def experiment(r: Random) -> Files:
    """A small experiment with odd values."""
    settings = copy.deepcopy(SMALL)
    for _ in range(r.randint(1, 3)):
        section = r.choice(list(settings))
        if isinstance(settings[section], dict) and settings[section]:
            key = r.choice([*settings[section], *_MORE.get(section, ())])
            settings[section][key] = odd(r, settings[section].get(key, 1))
    return {"recipe.json": as_json(settings)}


_MORE = {
    "data": [
        "dirichlet_alpha",
        "min_samples",
        "classes_per_client",
        "holdout",
        "max_test_per_client",
        "halved_client_fraction",
        "feature_shift",
        "root",
    ],
    "models": ["feature_dim"],
    "training": ["momentum", "weight_decay", "augmentation", "schedule", "clip"],
    "evaluation": ["extra_stages", "patience", "metrics", "min_delta"],
    "run": ["workers", "device", "precision", "label", "loggers", "paper_tables", "out"],
}


def use_experiment(place: Path) -> None:
    """Put data, networks and method together, as `polyfed check` does first."""
    from polyfed.config.recipe import Recipe
    from polyfed.experiments.build import build_federation

    given = _told(place / "recipe.json")
    if isinstance(given, dict):
        build_federation(Recipe.from_dict(given))


def folder(r: Random) -> Files:
    """A finished run with one or two of its files damaged, altered, or gone; seals and checksums fit, or not."""
    kind = r.choice(KINDS[:3])
    files = dict(run_folder(kind))
    for _ in range(r.randint(1, 2)):
        name = r.choice(["rounds.jsonl", "result.json", "recipe.toml", r.choice(sorted(files))])
        spoil(r, files, name)
    return files


def spoil(r: Random, files: Files, name: str) -> None:
    """Take a file away, damage its bytes, or alter what it says."""
    data, kind = files.get(name, b""), r.randrange(10)
    with contextlib.suppress(ValueError, RecursionError):  # it is broken already
        if kind == 0:
            files.pop(name, None)
        elif kind < 3:
            files[name] = damaged(r, data)
        elif name.endswith(".jsonl"):
            lines = [json.loads(line) for line in data.splitlines()]
            for line in lines:
                sealed = isinstance(line, dict) and line.pop("seal", None)
            write = resealed if lines and sealed else as_json
            files[name] = b"".join(write(line) + b"\n" for line in _some_altered(r, lines))
        elif name.endswith(".json"):
            value = json.loads(data)
            sealed = isinstance(value, dict) and value.pop("seal", None)
            files[name] = (resealed if sealed else as_json)(altered(r, value))
        elif name.endswith(".toml"):
            files[name] = _toml(altered(r, tomllib.loads(data.decode())), data)
        else:
            files[name] = damaged(r, data)


def _some_altered(r: Random, lines: list[Any]) -> list[Any]:
    """One line altered; or lines left out, and all of them altered."""
    if lines and r.random() < 0.8:
        place = r.randrange(len(lines))
        return [altered(r, line) if number == place else line for number, line in enumerate(lines)]
    return [altered(r, line) for line in lines if r.random() < 0.7]


def _toml(value: Any, otherwise: bytes) -> bytes:
    import tomli_w

    try:
        return tomli_w.dumps(value).encode()
    except Exception:  # TOML has no such value
        return otherwise[: len(otherwise) // 2]


def models(r: Random) -> Files:
    """A finished run whose list of models is altered, with checksums that fit."""
    files = dict(run_folder(r.choice(KINDS)))
    index = json.loads(files["models/index.json"])
    if r.random() < 0.3:
        inside = r.choice([name for name in files if name.startswith("models/") and not name.endswith(".json")])
        files[inside] = damaged(r, files[inside])
        for entry in index.values():
            texts = entry.get("texts")
            for file in entry["sha256"]:
                entry["sha256"][file] = hashlib.sha256(files[f"models/{file}"]).hexdigest()
            if texts is not None:
                texts["sha256"] = hashlib.sha256(files["models/words.txt"]).hexdigest()
    if r.random() < 0.8:
        index = altered(r, index) if r.random() < 0.2 else {name: altered(r, entry, 2) for name, entry in index.items()}
    files["models/index.json"] = as_json(index)
    files["models/index.json.sha256"] = hashlib.sha256(files["models/index.json"]).hexdigest().encode()
    return files


def records(r: Random) -> Files:
    """A finished run with altered records, for what runs it again; its recipe is whole."""
    files = dict(run_folder("plain"))
    for name in r.choice([["rounds.jsonl"], ["result.json"], ["rounds.jsonl", "result.json"], ["models/index.json"]]):
        spoil(r, files, name)
    return files


def releases(r: Random) -> Files:
    """A finished run with noise, and records that tell of it otherwise."""
    files = dict(run_folder(r.choice(["noise", "samples"])))
    lines = [json.loads(line) for line in files["rounds.jsonl"].splitlines()]
    for line in lines:
        del line["seal"]
        if r.random() < 0.7:
            key = r.choice(["releases", "releases", "epsilon"])
            line[key] = altered(r, line.get(key), 2)
    files["rounds.jsonl"] = b"".join(resealed(line) + b"\n" for line in lines)
    if r.random() < 0.2:
        spoil(r, files, "result.json")
    return files


def use_epsilon(place: Path) -> None:
    """What it has cost in privacy."""
    from polyfed.experiments.privacy_report import privacy_costs, to_text

    to_text(privacy_costs([place]))
    privacy_costs([place], 1e-6)


def use_results(place: Path) -> None:
    """The page of results."""
    from polyfed.report.results_page import results_page

    results_page([place], file=place / "results.md")


def use_figures(place: Path) -> None:
    """The figures of records and of labels."""
    from polyfed.analysis import analyze

    analyze(place, r_figures(place))


def r_figures(place: Path) -> list[str]:
    """One figure, by what the input's files are."""
    names = ("curves", "clients", "architectures", "sizes", "variants", "labels")
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    return [names[size % len(names)]]


def use_predict(place: Path) -> None:
    """A client's model, and what it says of new inputs."""
    import numpy as np

    from polyfed.analysis.layer_outputs import clients_of
    from polyfed.experiments.prediction import load_model, predict

    model = load_model(place, 0)
    inputs = np.zeros((2, *model.form.shape), dtype=str(model.form.dtype).removeprefix("torch."))
    predict(place, 0, inputs).to_csv(probabilities=True)
    (place / "new.csv").write_bytes(b"height,width,label\n1,2,yes\n")
    predict(place, 0, place / "new.csv")
    clients_of(place)


def use_clients(place: Path) -> None:
    """Who has a model."""
    from polyfed.analysis.layer_outputs import clients_of

    clients_of(place)


def use_leakage(place: Path) -> None:
    """What the server got, heard again; and what a client sent last."""
    from polyfed.attacks.api import audit
    from polyfed.attacks.attack_target import collect_target

    audit(place, shadows=0, images=0)
    collect_target(place, 0, 1, None, None, "cpu")


def swept(r: Random) -> Files:
    """A sweep's table, altered."""
    files = dict(sweep_folder())
    spoil(r, files, "sweep.json")
    return files


def use_sweep(place: Path) -> None:
    """Read, shown in every form."""
    from polyfed.report.sensitivity import map_of, read_sweep
    from polyfed.report.sweeps import to_csv, to_html, to_json, to_markdown, to_text

    table = read_sweep(place)
    for form in (to_text, to_csv, to_html, to_json, to_markdown):
        form(table)
    map_of(table)


def use_sensitivity(place: Path) -> None:
    """Drawn again."""
    from matplotlib import pyplot

    from polyfed.report.sensitivity import sensitivity

    try:
        sensitivity(place)
    finally:
        pyplot.close("all")


def use_report(place: Path) -> None:
    """Tables in every form, the page, and the curves' numbers."""
    from polyfed.report.comparison import compare_runs, to_text, write
    from polyfed.report.figures import curves
    from polyfed.report.html_report import write_page
    from polyfed.report.run_records import load_runs

    runs = load_runs(place)
    table = compare_runs(runs)
    to_text(table)
    write(table, place)
    write_page(runs, table, place)
    if DRAWS.get("curves"):
        curves(runs, place)


DRAWS = {"curves": False}  # a figure takes a tenth of a second


def use_resume(place: Path) -> None:
    """Go on with the run, or read it where it is finished."""
    kind = next(kind for kind in KINDS if not (place / "kind").exists() or kind == (place / "kind").read_text())
    (place / "kind").unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        federation(place, kind).run(resume=True)


def checkpoint(r: Random) -> Files:
    """An unfinished run with damaged checkpoints and altered records, most with checksums and seals that fit."""
    kind = r.choice(["plain", "plain", "noise", "samples"])
    files = {name: data for name, data in run_folder(kind).items() if name != "result.json"}
    inside = [name for name in files if name.startswith("checkpoint/")]
    for _ in range(r.randint(1, 2)):
        name = r.choice([*inside, "rounds.jsonl"])
        if name.endswith(".safetensors") and r.random() < 0.6:
            files[name] = rewritten(r, files[name])
        elif name.endswith(".safetensors"):
            files[name] = damaged(r, files[name])
        elif name == "rounds.jsonl":
            spoil(r, files, name)
    if r.random() < 0.8:
        for index in [name for name in inside if name.endswith("index.json")]:
            files[index] = forged(r, files, index)
    return {**files, "kind": kind.encode()}


def rewritten(r: Random, data: bytes) -> bytes:
    """Safetensors with an altered head, also in what its metadata say in JSON."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        head = json.loads(data[8:end])
    except (ValueError, RecursionError):  # it is broken already
        return damaged(r, data)
    said = head.get("__metadata__") if isinstance(head, dict) else None
    if isinstance(said, dict) and said and r.random() < 0.7:
        key = r.choice(sorted(said))
        with contextlib.suppress(ValueError, RecursionError):
            said[key] = as_json(altered(r, json.loads(said[key]))).decode()
    else:
        head = altered(r, head)
    text = as_json(head)
    return len(text).to_bytes(8, "little") + text + data[end:]


def forged(r: Random, files: Files, index: str) -> bytes:
    """An index, perhaps altered, with checksums that fit."""
    facts = json.loads(files[index])
    del facts["seal"]
    above = index.removesuffix("index.json")
    facts["sha256"] = {name: hashlib.sha256(files[above + name]).hexdigest() for name in facts["sha256"]}
    return resealed(altered(r, facts) if r.random() < 0.6 else facts)


def parquet_bytes(r: Random) -> Files:
    """Damaged Parquet files."""
    return {"set/train.parquet": damaged(r, r.choice(parquets()))}


def parquet_values(r: Random) -> Files:
    """Whole Parquet files with odd columns."""
    cells: list[Any] = [r.choice(images()) for _ in range(3)]
    kind = r.randrange(4)
    if kind == 0:
        cells[r.randrange(3)] = r.choice([None, b"", damaged(r, cells[0]), images()[1], pickles()[0]])
    columns: dict[str, Any] = {
        r.choice(["img", "image", "picture", ""]): cells,
        r.choice(["label", "y", "kind"]): [0, 1, 2],
    }
    if kind == 1:
        columns[r.choice(list(columns))] = [odd(r, 1) for _ in range(3)]
    if kind == 2:
        columns["text"] = [r.choice(["so good", "", None, "\x00", "9" * 999]) for _ in range(3)]
    if kind == 3:
        columns[r.choice(["label", "fine_label", "image", "client"])] = [r.choice(["a", "b", "-1"]) for _ in range(3)]
    said = altered(r, {"img": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "b"]}})
    with contextlib.suppress(Exception):  # Arrow has no such column
        return {"set/train.parquet": parquet(columns, said if r.random() < 0.5 else None)}
    return {"set/train.parquet": parquets()[0]}


def use_images(place: Path) -> None:
    """As images."""
    from polyfed.data.datasets import load_dataset

    load_dataset("set", place)


def use_texts(place: Path) -> None:
    """As texts."""
    from polyfed.data.datasets import load_dataset
    from polyfed.data.text import TextConfig

    load_dataset("set", place, words=TextConfig("text"))


def csv(r: Random) -> Files:
    """Damaged CSV files: of numbers, of texts."""
    return {"table.csv": damaged(r, CSV, 6), "texts.csv": damaged(r, TEXTS, 6), "vectors.txt": damaged(r, VECTORS, 6)}


def use_table(place: Path) -> None:
    """As a table."""
    from polyfed.data.datasets import load_dataset

    load_dataset(f"csv:{place / 'table.csv'}")


def use_csv_texts(place: Path) -> None:
    """As texts, with words' vectors from a file."""
    from polyfed.data.datasets import load_dataset
    from polyfed.data.text import TextConfig

    load_dataset(f"csv:{place / 'texts.csv'}", words=TextConfig("text"))
    load_dataset(f"csv:{place / 'texts.csv'}", words=TextConfig("text", vectors=place / "vectors.txt"))


def use_vectors(place: Path) -> None:
    """The vectors alone."""
    from polyfed.data.text import load_word_vectors

    load_word_vectors(place / "vectors.txt", {"so", "good"})


def npz(r: Random) -> Files:
    """A client's file of arrays: damaged outside or inside, with odd arrays or pickles that would run something."""
    import numpy as np

    members = dict(r.choice(arrays()))
    name, kind = r.choice(sorted(members)), r.randrange(6)
    if kind == 0:
        return {"train/0.npz": damaged(r, archive(members, deflated=r.random() < 0.5)), "config.json": _config(r)}
    if kind == 1:
        members[name] = damaged(r, members[name])
    elif kind == 2:
        head = arrays()[1]["data.npy"][: arrays()[1]["data.npy"].index(b"\n") + 1]
        members = {
            "data.npy": head + damaged(r, r.choice(pickles())) if r.random() < 0.5 else head + r.choice(pickles())
        }
    elif kind == 3:
        shape = tuple(r.choice([0, 1, 2, 5, 2**20, 2**40]) for _ in range(r.randint(0, 4)))
        kind_of = r.choice(["<f4", "<i8", "|u1", "|O", "<U9", "<c8", "<M8[s]"])
        text = f"{{'descr': '{kind_of}', 'fortran_order': False, 'shape': {shape}, }}"
        head = text.ljust(117).encode() + b"\n"
        members[name] = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(r.randrange(200))
    elif kind == 4:
        choices = [
            np.zeros((5, 2, 2), np.float64),
            np.full((5, 1, 4, 4), np.nan),
            np.zeros(5, bool),
            np.array(["a"] * 5),
        ]
        members[name] = npy(
            r.choice([*choices, np.zeros((0, 3)), np.array(3), np.arange(5, dtype=np.uint64), np.arange(-2, 3)])
        )
    else:
        members[r.choice(["z.npy", "../outside.npy", "/outside.npy", "data.npy"])] = members.pop(name)
    return {"train/0.npz": archive(members, deflated=r.random() < 0.5), "config.json": _config(r)}


def _config(r: Random) -> bytes:
    data = as_json({"num_clients": 1, "num_classes": 3})
    return damaged(r, data) if r.random() < 0.3 else data


def use_arrays(place: Path) -> None:
    """As clients' arrays."""
    from polyfed.data.datasets import load_dataset

    load_dataset(f"npz:{place}")


def pictures(r: Random) -> Files:
    """A folder per class with a damaged image; a .npy file."""
    broken = damaged(r, r.choice(images())) if r.random() < 0.9 else r.choice(pickles())
    plain = npy([[1.0, 2.0]])
    return {
        "a/0.png": images()[1],
        "b/0.png": broken,
        "new.npy": damaged(r, plain),
        "lines.txt": damaged(r, b"a\nb c\n"),
    }


def use_pictures(place: Path) -> None:
    """As images in folders."""
    from polyfed.data.datasets import load_dataset

    load_dataset(f"images:{place}", image_size=6)


def use_new(place: Path) -> None:
    """As inputs for a trained model."""
    import torch

    from polyfed.data.inference_inputs import InputSpec, read

    read(place / "new.npy", InputSpec((2,), torch.float32, None, ("a", "b")))


def use_lines(place: Path) -> None:
    """As texts for a trained model."""
    from polyfed.data.text_files import read_lines

    read_lines(place / "lines.txt")


def message(r: Random) -> Files:
    """Damaged safetensors, and headers with odd values."""
    data = r.choice(messages())
    if r.random() < 0.5:
        return {"message": damaged(r, data)}
    end = 8 + int.from_bytes(data[:8], "little")
    head = as_json(altered(r, json.loads(data[8:end])))
    return {"message": len(head).to_bytes(8, "little") + head + data[end:]}


def use_message(place: Path) -> None:
    """As a message; what is accepted must be written again."""
    from polyfed.core.message import from_bytes, to_bytes

    to_bytes(from_bytes((place / "message").read_bytes()))


@functools.cache
def facts() -> tuple[tuple[str, dict[str, Any]], ...]:
    """An envelope's facts of each kind."""
    counts = {"confusion": [[1, 0], [2, 3]], "auc": None, "others": {}}
    who = {
        "client": 0,
        "token": "0" * 64,
        "dataset": "digits",
        "train": 5,
        "validation": 0,
        "test": 1,
        "class_names": ["a", "b"],
    }
    who |= {"feature_names": [], "shape": [1, 8, 8], "dtype": "uint8", "mean": [0.5], "std": [0.5], "table": False}
    who |= {"words": 0, "architecture": "net", "feature_dim": 3, "head": {"weight": [2, 3]}, "linear": True}
    did = {"mark": "000001-00", "variant": "", "steps": 3, "samples": 5, "loss": 0.5, "bytes_up": 8, "sums": {}}
    did |= {"refused": None, "new": True, "score": counts, "kept": {"test": counts}}
    return ("task", {"round": 1, "parts": ["test"]}), ("introduction", who), ("report", did), ("score", counts)


def envelope(r: Random) -> Files:
    """An envelope between server and node: its body damaged, its facts altered."""
    import torch

    from polyfed.deploy.protocol import serialize

    kind, told = r.choice(facts())
    body = serialize({"x": torch.ones(2), "g": {"y": torch.zeros(1)}, "none": {}}, told)
    if r.random() < 0.6:
        end = 8 + int.from_bytes(body[:8], "little")
        head = as_json(altered(r, json.loads(body[8:end])))
        body = len(head).to_bytes(8, "little") + head + body[end:]
    return {"envelope": damaged(r, body) if r.random() < 0.5 else body, "facts": as_json([kind, altered(r, told)])}


def use_envelope(place: Path) -> None:
    """As a body with facts."""
    from polyfed.deploy.protocol import deserialize, serialize

    content, told = deserialize((place / "envelope").read_bytes())
    serialize(content, told)


def use_facts(place: Path) -> None:
    """As the facts alone."""
    from polyfed.deploy import protocol

    kind, told = _told(place / "facts") or ("", None)
    if not isinstance(told, dict):
        return
    if kind == "score":
        protocol.score_from_json(told, 2, 6)
    else:
        protocol.parse(
            {"task": protocol.TaskRequest, "introduction": protocol.ClientHello, "report": protocol.TaskResult}[kind],
            told,
        )


NODES = {
    "data": {"dataset": "digits", "num_clients": 2, "limit_train": 60, "partition": "iid"},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedgh", "header_epochs": 1},
    "training": {"rounds": 2, "batch_size": 16, "lr": 0.05},
    "run": {"executor": "serial", "seed": 3},
}


@functools.cache
def _nodes() -> tuple[Any, Any]:
    """The recipe of a server and its nodes, and where data are kept."""
    from polyfed.config.recipe import Recipe
    from polyfed.experiments.data_cache import DataCache

    return Recipe.from_dict(NODES), DataCache()


def answered(place: Path, client: int, envelope: Any) -> Any:
    """What a node says to an envelope; its disk is in `place`."""
    from polyfed.deploy.node import Node
    from polyfed.deploy.node_config import NodeConfig

    recipe, data = _nodes()
    node = Node(recipe, NodeConfig.read({"client-id": client, "state-dir": str(place / f"node-{client}")}), data)
    return node.answer(envelope)


class Wire:
    """Carries envelopes to two nodes at once. hears: (node, envelope) -> what comes back instead of the answer."""

    def __init__(self, place: Path, hears: Callable[[int, Any, Any], Any]) -> None:
        self.place, self.hears = place, hears
        self.waiting: dict[str, Any] = {}
        self.count = 0

    def nodes(self) -> set[int]:
        """Both."""
        return {1000, 1001}

    def send(self, envelopes: Sequence[tuple[int, Any]], seconds: float) -> list[str]:
        """Answered before they are sent."""
        from polyfed.deploy.protocol import Envelope, NodeError
        from polyfed.errors import PolyfedError

        names = []
        for node, envelope in envelopes:
            self.count += 1
            names.append(str(self.count))
            envelope = Envelope(envelope.kind, json.loads(json.dumps(envelope.facts)), envelope.body)
            try:
                answer = answered(self.place, node - 1000, envelope)
            except PolyfedError as error:
                answer = NodeError(error)
            if isinstance(answer, Envelope):
                answer = Envelope(answer.kind, json.loads(json.dumps(answer.facts)), answer.body)
            self.waiting[names[-1]] = self.hears(node, envelope, answer)
        return names

    def collect(self, names: Sequence[str]) -> dict[str, Any]:
        """What is there."""
        return {name: self.waiting.pop(name) for name in names if name in self.waiting}


@functools.cache
def correspondence() -> tuple[tuple[tuple[str, Any, bytes], ...], Files]:
    """The envelopes to node 0 in a run of two rounds, by kind, facts and body; and all that the run leaves."""
    from polyfed.deploy.server import serve

    place = _mine() / "served"
    sent: list[tuple[str, Any, bytes]] = []

    def hears(node: int, envelope: Any, answer: Any) -> Any:
        if node == 1000:
            sent.append((envelope.kind, envelope.facts, envelope.body))
        return answer

    serve(_nodes()[0], Wire(place, hears), out=place / "out", deadline=0.05)
    return tuple(sent), tree(place)


def asked(r: Random) -> Files:
    """An envelope to a node, altered, and the node's disk, perhaps damaged."""
    sent, files = correspondence()
    kind, facts, body = r.choice(sent)
    if r.random() < 0.7:
        facts = altered(r, facts, 2)
    if body and r.random() < 0.5:
        body = upset(r, body)
    disk = {name: data for name, data in files.items() if name.startswith("node-0/")}
    if r.random() < 0.5:
        disk = {name: data for name, data in disk.items() if "answered" not in name}
    if r.random() < 0.3 and disk:
        spoil(r, disk, r.choice(sorted(disk)))
    return {**disk, "kind": kind.encode(), "facts": as_json(facts), "body": body}


def upset(r: Random, body: bytes) -> bytes:
    """An envelope's body with other bytes, another head, or other tensors."""
    import torch

    from polyfed.deploy.protocol import deserialize, serialize

    way = r.randrange(3)
    if way == 0:
        return damaged(r, body)
    if way == 1:
        end = 8 + int.from_bytes(body[:8], "little")
        head = as_json(altered(r, json.loads(body[8:end])))
        return len(head).to_bytes(8, "little") + head + body[end:]
    message, told = deserialize(body)
    for name in list(message):
        value = message[name]
        if r.random() < 0.5:
            continue
        if isinstance(value, torch.Tensor):
            message[name] = _other(r, value)
        else:
            message[name] = {key: _other(r, each) if r.random() < 0.5 else each for key, each in value.items()}
    if message and r.random() < 0.3:
        message[r.choice(["x", "n" * 300, "labels", "weights"])] = message.pop(r.choice(list(message)))
    return serialize(message, told)


def _other(r: Random, value: Any) -> Any:
    """A tensor of another type, shape or size of numbers."""
    import torch

    return r.choice(
        [
            lambda: value.double(),
            lambda: value.long(),
            lambda: value > 0,
            lambda: value.to(torch.complex64),
            lambda: value.flatten(),
            lambda: value[None],
            lambda: torch.cat([value, value]) if value.dim() else value,
            lambda: value.new_zeros((0, *value.shape[1:])),
            lambda: torch.full_like(value, 10**9 if value.dtype != torch.uint8 else 255),
            lambda: value * 1e30 if value.is_floating_point() else value - 5,
            lambda: value * float("nan") if value.is_floating_point() else value,
            lambda: torch.tensor(1),
        ]
    )()


def use_node(place: Path) -> None:
    """A node answers, or refuses."""
    from polyfed.deploy.protocol import Envelope

    facts = _told(place / "facts")
    if isinstance(facts, dict):
        answered(place, 0, Envelope((place / "kind").read_text(), facts, (place / "body").read_bytes()))


def served(r: Random) -> Files:
    """By which word node 1 answers otherwise, and how."""
    return {"seed": str(r.randrange(10**12)).encode()}


def use_server(place: Path) -> None:
    """Two rounds with a node that answers otherwise; what it says is refused, and the run comes to its end."""
    from polyfed.deploy import node_registry
    from polyfed.deploy.protocol import Envelope
    from polyfed.deploy.server import serve

    r = Random((place / "seed").read_text())
    node_registry.PAUSE = 0.001
    kinds = r.choice([("hello",), ("train",), ("train",), ("score", "finish")])

    def hears(node: int, envelope: Any, answer: Any) -> Any:
        if node == 1000 or envelope.kind not in kinds or not isinstance(answer, Envelope):
            return answer
        facts, body = answer.facts, answer.body
        if not body or r.random() < 0.6:
            facts = json.loads(as_json(altered(r, dict(facts), 2)).replace(DEEP, b"[[[[]]]]"))
        if body and r.random() < 0.6:
            body = upset(r, body)
        return Envelope(answer.kind, facts if isinstance(facts, dict) else {}, body)

    wire = Wire(place, hears)
    serve(_nodes()[0], wire, out=place / "out", deadline=0.02, min_nodes=1)


def diary(r: Random) -> Files:
    """A server's diary of nodes, and a node's disk, damaged or altered."""
    files = {name.removeprefix("out/"): data for name, data in correspondence()[1].items()}
    wanted = ("nodes.jsonl", "node-0/answered", "node-0/number")
    kept = {name: data for name, data in files.items() if name.startswith(wanted)}
    for name in r.sample(sorted(kept), r.randint(1, len(kept))):
        spoil(r, kept, name)
    return kept


def use_diary(place: Path) -> None:
    """Gone on with, and a number given back."""
    from polyfed.deploy.node_registry import release

    release(place, 0)


def use_ledger(place: Path) -> None:
    """The count of what was answered."""
    from polyfed.deploy.answer_ledger import AnswerLedger

    for path in sorted((place / "node-0" / "answered").glob("*")):
        AnswerLedger(path).count("training in round 1, passage 0", "x", 5)


def use_secret(place: Path) -> None:
    """The secrets by which a node is known again, and draws its noise."""
    from polyfed.deploy.node_checkpoints import NodeCheckpoints, load_or_create_key, token

    NodeCheckpoints(place / "node-0" / "client-000").marks()
    token(place / "node-0", "0" * 16)
    load_or_create_key(place / "node-0")


def flags(r: Random) -> Files:
    """Settings as they are typed behind --set."""
    words = []
    for _ in range(r.randint(1, 3)):
        section = r.choice(list(SMALL))
        key = r.choice([*SMALL[section], *_MORE.get(section, ()), "name", "x", "a.b"])
        words.append(f"{section}.{key}={_typed(odd(r, SMALL[section].get(key, 1)))}")
    return {"words": damaged(r, "\n".join(words).encode()) if r.random() < 0.3 else "\n".join(words).encode()}


def _typed(value: Any) -> str:
    return as_json(value).decode()[:10000].encode("utf-8", "replace").decode()


def use_flags(place: Path) -> None:
    """Over a recipe."""
    from polyfed.config.recipe import Recipe

    words = (place / "words").read_bytes().decode("utf-8", "replace").split("\n")
    _repeats(Recipe.load(RECIPES / "quickstart.toml", words))


@functools.cache
def decoded() -> tuple[Files, Files]:
    """A folder of Parquet files and one of images; and the decoded copies of both, by what they are called."""
    from polyfed.data.datasets import load_dataset

    place = _mine() / "decoded"
    sets = {"set/train.parquet": parquets()[1], "a/0.png": images()[0], "b/0.png": images()[0]}
    for name, data in sets.items():
        (place / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "data" / name).write_bytes(data)
    with _cache_at(place / "cache"):
        load_dataset("set", place / "data")
        (place / "data" / "set" / "train.parquet").unlink()
        (place / "data" / "set").rmdir()
        load_dataset(f"images:{place / 'data'}", image_size=6)
    return sets, {name: data for name, data in tree(place / "cache").items() if name.endswith(".safetensors")}


@contextlib.contextmanager
def _cache_at(place: Path) -> Iterator[None]:
    before = os.environ.get("POLYFED_CACHE")
    os.environ["POLYFED_CACHE"] = str(place)
    try:
        yield
    finally:
        os.environ.pop("POLYFED_CACHE")
        os.environ |= {} if before is None else {"POLYFED_CACHE": before}


def copies(r: Random) -> Files:
    """Decoded copies, damaged, or altered with a checksum that fits; and notes of files' checksums that are odd."""
    sets, kept = decoded()
    files = {f"cache/{name}": data if r.random() < 0.2 else _copy(r, data) for name, data in kept.items()}
    told = altered(r, ["@size", "@mtime", "@ctime", "0" * 64])
    return {**{f"data/{name}": data for name, data in sets.items()}, **files, "notes.json": as_json(told)}


def _copy(r: Random, data: bytes) -> bytes:
    """A decoded copy with other tensors and facts, and its checksum."""
    import safetensors.torch

    from polyfed.data.cache import compute_checksum

    if r.random() < 0.2:
        return damaged(r, data)
    tensors = safetensors.torch.load(data)
    end = 8 + int.from_bytes(data[:8], "little")
    facts = json.loads(data[8:end])["__metadata__"]
    del facts["checksum"]
    for name in list(tensors):
        if r.random() < 0.3:
            tensors[name] = _other(r, tensors[name])
        if r.random() < 0.1:
            tensors[r.choice(["train_x", "test_x", "test_y", "x", ""])] = tensors.pop(name)
    if r.random() < 0.5:
        facts["class_names"] = as_json(altered(r, json.loads(facts["class_names"]))).decode()
    if r.random() < 0.1:
        facts[r.choice(["x", "class_name"])] = facts.pop("class_names")
    facts["checksum"] = compute_checksum(tensors, facts)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if r.random() < 0.1:
        name = r.choice(list(tensors))
        tensors[name] = tensors[name].to(__import__("torch").bfloat16)
    return safetensors.torch.save(tensors, metadata=facts)


def use_copies(place: Path) -> None:
    """In place of the files; and notes, in place of reading them."""
    from polyfed.data.datasets import load_dataset

    notes = (place / "notes.json").read_bytes()
    known = []
    for path in sorted((place / "data").rglob("*.*")):
        status, entry = path.stat(), notes
        for token, number in (("size", status.st_size), ("mtime", status.st_mtime_ns), ("ctime", status.st_ctime_ns)):
            entry = entry.replace(f'"@{token}"'.encode(), str(number).encode())
        known.append(json.dumps(str(path.resolve())).encode() + b": " + entry)
    stored = place / "cache" / "datasets" / "checksums.json"
    if len(notes) % 2:
        stored.write_bytes(b"{" + b", ".join(known) + b"}")
    with _cache_at(place / "cache"):
        sources = [load_dataset("set", place / "data")]
        shutil.rmtree(place / "data" / "set")
        sources.append(load_dataset(f"images:{place / 'data'}", image_size=6))
    for source in sources:
        if int(source.train.y.max()) >= len(source.class_names):
            raise Failure("a label that is no class")


@functools.cache
def certificates() -> Files:
    """An authority, a server's certificate, a node's keys."""
    from polyfed.deploy.tls import make_node_key, make_server_certificate

    place = _mine() / "keys"
    make_server_certificate(place, ["localhost"])
    make_node_key(place / "node")
    return tree(place)


def keys(r: Random) -> Files:
    """Certificates and keys, some damaged, exchanged, or gone."""
    files = dict(certificates())
    for _ in range(r.randint(1, 2)):
        name = r.choice(["ca.crt", "ca.key", "ca.crt", "ca.key", *files])
        kind = r.randrange(4)
        if kind == 0:
            files.pop(name, None)
        elif kind == 1:
            files[name] = certificates()[r.choice(sorted(certificates()))]
        elif kind == 2:
            files[name] = damaged(r, certificates()[name], 2)
        else:
            files[name] = _rewrapped(r, certificates()[name])
    return files


def _rewrapped(r: Random, data: bytes) -> bytes:
    """PEM whose content is damaged, well wrapped."""
    import base64

    lines = data.split(b"\n")
    inner = damaged(r, base64.b64decode(b"".join(lines[1:-2]) + b"=="), 2)
    return b"\n".join([lines[0], base64.encodebytes(inner).rstrip(), *lines[-2:]])


def use_certify(place: Path) -> None:
    """A new certificate by the authority that is there."""
    from polyfed.deploy.tls import make_server_certificate

    make_server_certificate(place, ["localhost"], days=r_days(place), overwrite=True)


def r_days(place: Path) -> int:
    """For how long, by what the input's files are."""
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    return [365, 1, 4000, 10**6][size % 4]


def hub_sets(r: Random) -> Files:
    """Data sets as `datasets` has them on disk: Parquet files with odd columns, two splits."""
    first, second = (next(iter(parquet_values(r).values())) for _ in range(2))
    files = {"train.parquet": first, r.choice(["test.parquet", "validation.parquet", "x.parquet"]): second}
    return files if r.random() < 0.7 else {"train.parquet": parquets()[r.randrange(3)]}


def _on_hub(place: Path) -> Callable[..., Any]:
    """What `datasets.load_dataset` would give of the files, without its copies."""
    import datasets
    import pyarrow.parquet as pq

    found = {path.stem: datasets.Dataset(pq.read_table(path)) for path in sorted(place.glob("*.parquet"))}
    first, *others = found.values()
    if any([*each.features] != each.column_names or each.features != first.features for each in (first, *others)):
        raise ValueError("columns that `datasets` would not have cast")
    return lambda *_: datasets.DatasetDict(found)


def use_hub(place: Path) -> None:
    """As images and as texts; what `datasets` itself cannot read is its own."""
    from unittest import mock

    from polyfed.data import hub
    from polyfed.data.datasets import load_dataset
    from polyfed.data.text import TextConfig
    from polyfed.errors import ConfigError

    try:
        known = _on_hub(place)
    except Exception as error:
        raise ConfigError("datasets") from error
    with mock.patch.object(hub, "load_from_hub", known):
        text = (place / "train.parquet").stat().st_size % 2
        if text:
            load_dataset("hub:a/b", words=TextConfig("text"))
        else:
            load_dataset("hub:a/b")


@functools.cache
def compared() -> Files:
    """What a comparison leaves, and a sweep: folders of runs, tables, pages."""
    from polyfed.experiments.compare import compare

    place = _mine() / "compared"
    compare(_small_recipe(place), methods=["fedgh"], out=place / "out")
    return {name: data for name, data in tree(place).items() if not name.endswith((".png", ".svg"))}


def _small_recipe(place: Path) -> Path:
    import tomli_w

    place.mkdir(parents=True, exist_ok=True)
    (place / "recipe.toml").write_text(tomli_w.dumps(settings_of("plain")))
    return place / "recipe.toml"


def old(r: Random) -> Files:
    """A comparison's folders, of which files are damaged, altered or gone."""
    files = dict(compared())
    inside = [name for name in files if name.startswith("out/")]
    likely = [name for name in inside if name.endswith((".json", ".jsonl", ".toml"))]
    for _ in range(r.randint(1, 2)):
        spoil(r, files, r.choice(likely) if r.random() < 0.8 else r.choice(inside))
    return files


def use_compare(place: Path) -> None:
    """Gone on with: what is finished is read, the rest is run."""
    from unittest import mock

    from polyfed.experiments import compare

    def undrawn(*_: Any) -> tuple[Path, ...]:
        return ()

    with mock.patch.object(compare, "curves", undrawn):
        compare.compare(place / "recipe.toml", methods=["fedgh"], out=place / "out")


def shown(r: Random) -> Files:
    """The lines of a run that is watched, some altered."""
    files = {name: run_folder("plain")[name] for name in ("rounds.jsonl",)}
    files["nodes.jsonl"] = correspondence()[1]["out/nodes.jsonl"]
    for name in r.choice([["rounds.jsonl"], ["nodes.jsonl"], list(files)]):
        spoil(r, files, name)
    return files


def use_follow(place: Path) -> None:
    """Shown while it grows."""
    from polyfed.deploy.run_progress import RunProgress
    from polyfed.loggers.console import Console

    facts = {"method": "fedgh", "rounds": 4, "evaluation": {"stage": "personal"}}
    later = {path: path.read_bytes() for path in place.glob("*.jsonl")}
    for path, data in later.items():
        path.write_bytes(data[: len(data) // 2])
    console = Console(stream=io.StringIO(), terminal=False)
    follower = RunProgress(place, facts, console, resume=True)
    for path, data in later.items():
        path.write_bytes(data)
    follower.poll()


def requests(r: Random) -> Files:
    """Requests to a server's port, as its web server hands them on."""
    scope = {"type": "http", "path": "/v1/control/x", "client": ["127.0.0.1", 5], "server": ["127.0.0.1", 8000]}
    scope["path"] = r.choice(["/v1/fleet", "/v1/control/list", "/v1/fleet/../control", "//v1/fleet/", "", "/v1/Fleet/"])
    scope["client"] = r.choice([scope["client"], ["::ffff:127.0.0.1", 1], ["fe80::1%lo", 2], ["", 0], None, ["a", 1]])
    return {"scope": as_json(altered(r, scope) if r.random() < 0.3 else scope)}


def use_gate(place: Path) -> None:
    """Whoever is not the keeper gets to the nodes' routes alone."""
    import asyncio

    from polyfed.deploy.gate import NODES, Gate

    given = _told(place / "scope")
    if not isinstance(given, dict) or not {"type", "path", "client", "server"} <= given.keys():
        return
    if not isinstance(given["path"], str) or any(not _is_end(given[side]) for side in ("client", "server")):
        return  # such as no web server makes
    reached: list[object] = []

    async def app(*_: object) -> None:
        reached.append(1)

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    asyncio.run(Gate(app, os.geteuid())(given, nothing, nothing))
    if reached and given["type"] != "lifespan" and not given["path"].startswith(NODES):
        raise Failure(f"the gate lets {given} through")


def _is_end(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2
    return value is None or (pair and isinstance(value[0], str) and isinstance(value[1], int))


TARGETS: dict[str, Target] = {
    "recipe": Target("a recipe's text", recipe_text, [use_recipe]),
    "recipe-values": Target("a recipe's structure", recipe_values, [use_values]),
    "experiment": Target("a small experiment's values, put together", experiment, [use_experiment]),
    "flags": Target("settings behind --set", flags, [use_flags]),
    "run-folder": Target("a finished run's files", folder, [use_report, use_results, use_clients]),
    "releases": Target("a finished run's account of its noise", releases, [use_epsilon, use_report]),
    "figures": Target("a finished run's files, drawn", folder, [use_figures]),
    "leakage": Target("a finished run's records, run again", records, [use_leakage]),
    "models": Target("a finished run's models and their list", models, [use_predict, use_clients]),
    "sweep": Target("a sweep's table", swept, [use_sweep]),
    "sensitivity": Target("a sweep's table, drawn", swept, [use_sensitivity]),
    "checkpoint": Target("an unfinished run's checkpoints and records", checkpoint, [use_resume]),
    "parquet": Target("bytes of Parquet files", parquet_bytes, [use_images, use_texts]),
    "parquet-values": Target("columns of Parquet files", parquet_values, [use_images, use_texts]),
    "csv": Target("tables, texts and words' vectors", csv, [use_table, use_csv_texts, use_vectors]),
    "npz": Target("clients' arrays, pickles among them", npz, [use_arrays]),
    "pictures": Target("images, .npy files, lines", pictures, [use_pictures, use_new, use_lines]),
    "message": Target("messages as safetensors", message, [use_message]),
    "envelope": Target("envelopes between server and nodes", envelope, [use_envelope, use_facts]),
    "node": Target("envelopes to a node, and its disk", asked, [use_node]),
    "server": Target("a node's answers, in a run of two rounds", served, [use_server]),
    "cache": Target("decoded copies below POLYFED_CACHE", copies, [use_copies]),
    "keys": Target("certificates and keys", keys, [use_certify]),
    "hub": Target("data sets of the Hub that are on disk", hub_sets, [use_hub]),
    "compare": Target("a comparison's folders, gone on with", old, [use_compare]),
    "follow": Target("lines of a run that is watched", shown, [use_follow]),
    "gate": Target("requests to a server's port", requests, [use_gate]),
    "diary": Target("a server's diary, a node's count and secrets", diary, [use_diary, use_ledger, use_secret]),
}


# judging ----------------------------------------------------------------------------------------------------------

_NEVER = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "os.fork")
_NEVER += ("socket.connect", "socket.getaddrinfo", "socket.bind", "os.kill", "os.chown")
_CHANGES = (
    "os.chmod",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard:
    """Listens to what the interpreter does while an input is used. allowed: where files may change."""

    def __init__(self, allowed: Sequence[Path]) -> None:
        self.allowed = tuple(str(path) + os.sep for path in allowed)
        self.listening, self.heard = False, list[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, what: tuple[Any, ...]) -> None:
        if not self.listening:
            return
        if event in _NEVER:
            self.heard.append(f"{event}{what!r:.80}")
        elif event == "open" and isinstance(what[0], str | bytes) and isinstance(what[2], int) and what[2] & _WRITING:
            self._check(event, what[0])
        elif event in _CHANGES:
            inside = what[-1] if event in ("os.remove", "os.rmdir") and what[-1] != -1 else None  # of an open folder
            for path in what[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]:
                self._check(event, path if inside is None else f"/proc/self/fd/{inside}/{os.fsdecode(path)}")

    def _check(self, event: str, path: Any) -> None:
        place = os.path.realpath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        if place and place != os.devnull and not (place + os.sep).startswith(self.allowed):
            self.heard.append(f"{event}({place!r})")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, raise at its end what was heard."""
        self.heard.clear()
        self.listening = True
        try:
            yield
        finally:
            self.listening = False
        if self.heard:
            raise Failure(f"it did what it must not: {self.heard[0]}")


class Bench:
    """Where inputs are tried: `case`, an input's own folder; `beside`, what must stay as it is."""

    def __init__(self, limit: float) -> None:
        from polyfed.errors import PolyfedError

        self._clear: type[Exception] = PolyfedError
        self.root, self.limit = _own() / f"bench-{os.getpid()}", limit
        self.case, self.beside = self.root / "case", self.root / "beside"
        for kept in ("mine.txt", "deep/thesis.tex", "checkpoint/round-000001/index.json"):
            path = self.beside / kept
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")
        self._kept = tree(self.beside)
        os.environ["POLYFED_CACHE"] = str(self.root / "cache")
        os.environ.pop("POLYFED_DATA", None)
        self.guard = Guard([self.case, self.root / "cache", Path(tempfile.gettempdir()) / "pymp"])
        tempfile.tempdir = str(self.root / "cache")  # where runs are run again
        sys.dont_write_bytecode = True
        os.fsync = lambda handle: None  # what is tried need not outlive the machine
        if "matplotlib" in sys.modules:
            draw_quickly()
        (self.root / "cache").mkdir(parents=True, exist_ok=True)
        os.chdir(self.root)

    def put(self, files: Files) -> None:
        """The input's folder with these files and no others."""
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir(parents=True)
        for name, data in files.items():
            path = self.case / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def attempt(self, target: Target, files: Files) -> list[str]:
        """How each use of the input ended: "done" or "refused".

        Raises:
            Failure: it broke a promise.
        """
        ends = []
        for use in target.use:
            self.put(files)
            with self._in_time(), self.guard.watching():
                ends.append(self._used(use))
        if tree(self.beside) != self._kept or {p.name for p in self.root.iterdir()} - {"case", "beside", "cache"}:
            raise Failure(
                f"something beside the input's folder has changed: {sorted(p.name for p in self.root.iterdir())}"
            )
        return ends

    def _used(self, use: Callable[[Path], object]) -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                use(self.case)
        except self._clear as error:
            text = str(error)
            if not text.strip() or "\n" in text or len(text) > 1500:
                raise Failure(f"{use.__name__}: not one clear line: {text[:300]!r}") from error
            return "refused"
        except Failure:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)
            last = next((f for f in reversed(where) if "polyfed" in f.filename and "fuzz" not in f.filename), where[-1])
            place = f"{Path(last.filename).name}:{last.lineno}"
            raise Failure(f"{use.__name__}: {type(error).__name__} at {place}: {str(error)[:200]}") from error
        return "done"

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        def late(*_: Any) -> None:
            raise _Late

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, self.limit)
        try:
            yield
        except _Late:
            raise Failure(f"no end within {self.limit:g} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class _Late(BaseException):
    """Time is up."""


# engines ----------------------------------------------------------------------------------------------------------


def of(name: str, seed: int, number: int) -> Files:
    """The input with this number."""
    return TARGETS[name].make(Random(f"{name} {seed} {number}"))


def draw_quickly() -> None:
    """From now on nine of ten figures are laid out and not written: all that depends on what is shown has happened."""
    from matplotlib.figure import Figure

    whole, count = Figure.savefig, Counter[str]()

    def save(figure: Figure, where: Any, **options: Any) -> None:
        count["figures"] += 1
        if count["figures"] % 20 < 2:  # each is saved twice
            whole(figure, where, **options)
        elif not hasattr(figure, "laid_out"):
            figure.laid_out = True
            figure.set_layout_engine("none")
            figure.draw_without_rendering()

    Figure.savefig = save


def prepare_inputs(name: str) -> None:
    """Make what all inputs of a target are made of, before processes part; and what would be made once, elsewhere."""
    if name == "server":
        correspondence()
    for number in range(20):
        TARGETS[name].make(Random(number))
    if name == "hub":
        import datasets  # noqa: F401  it tries a socket when it is imported
    if TARGETS[name].make in (folder, models, checkpoint, records, swept, releases, old):
        os.environ["MPLCONFIGDIR"] = str(_own())
        import dp_accounting.pld  # noqa: F401  each takes a second
        import matplotlib.font_manager  # noqa: F401

        import polyfed.analysis
        import polyfed.attacks.api  # noqa: F401


def tried(name: str, seed: int, numbers: Iterator[int], limit: float, note: Callable[[int], None]) -> dict[str, Any]:
    """Try inputs in this process: how many, how they ended, and what failed, by its text."""
    bench, ends, failures = Bench(limit), Counter[str](), dict[str, int]()
    total = 0
    for number in numbers:
        note(number)
        total += 1
        try:
            ends.update(bench.attempt(TARGETS[name], of(name, seed, number)))
        except Failure as failure:
            failures.setdefault(re.sub(r"\d+", "#", str(failure))[:100], number)
    return {"inputs": total, "ends": dict(ends), "failures": failures}


def in_children(name: str, seed: int, count: int | None, seconds: float | None, limit: float) -> dict[str, Any]:
    """The same in child processes: one that dies counts as a failure of its input, and another goes on behind it."""
    _own()  # this process's, which removes it: a child ends without a word
    end = time.monotonic() + seconds if seconds is not None else None
    place, found = mmap.mmap(-1, 8), {"inputs": 0, "ends": Counter[str](), "failures": dict[str, int]()}
    first = 0

    def numbers() -> Iterator[int]:
        number = first
        while (count is None or number < count) and (end is None or time.monotonic() < end):
            yield number
            number += 1

    def note(number: int) -> None:
        place[:8] = number.to_bytes(8, "little")
        faulthandler.dump_traceback_later(2 * limit + 60, exit=True)  # what no signal interrupts, a lock in C

    while True:
        read, write = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(read)
            with contextlib.suppress(ValueError, OSError):
                pages = int(Path("/proc/self/statm").read_text().split()[0])  # of whoever has parted from its caller
                most = MEMORY + pages * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            try:
                told = tried(name, seed, numbers(), limit, note)
                with os.fdopen(write, "w") as stream:
                    json.dump(told, stream)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(3)
        os.close(write)
        with os.fdopen(read) as stream:
            said = stream.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            told = json.loads(said)
            found["inputs"] += told["inputs"]
            found["ends"].update(told["ends"])
            found["failures"] = {**told["failures"], **found["failures"]}
            return {**found, "ends": dict(found["ends"])}
        number = int.from_bytes(place[:8], "little")
        found["failures"][f"the process ended with status {status}"] = number
        found["inputs"] += number + 1 - first
        first = number + 1


def by_hypothesis(name: str, count: int, limit: float) -> dict[str, Any]:
    """Inputs that hypothesis chooses; what fails is shrunk to a small one."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    bench, total = Bench(limit), Counter[str]()

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def check(r: Random) -> None:
        total["inputs"] += 1
        bench.attempt(TARGETS[name], TARGETS[name].make(r))

    try:
        check()
    except Failure as failure:
        return {"inputs": total["inputs"], "ends": {}, "failures": {str(failure): -1}}
    return {"inputs": total["inputs"], "ends": {}, "failures": {}}


def by_atheris(name: str, count: int, limit: float) -> None:
    """Inputs that coverage leads to; does not come back: libFuzzer ends the process."""
    try:
        import atheris
    except ImportError:
        sys.exit("expected the package 'atheris' for --engine atheris; install it with: pip install atheris")

    class Led(Random):
        """Draws what libFuzzer hands out."""

        def __init__(self, data: bytes) -> None:
            super().__init__(0)
            self._data = atheris.FuzzedDataProvider(data)

        def random(self) -> float:
            return float(self._data.ConsumeProbability()) * (1 - 2**-53)

        def getrandbits(self, k: int) -> int:
            return int.from_bytes(self._data.ConsumeBytes(-(-k // 8)).ljust(-(-k // 8), b"\0"), "little") >> (-k % 8)

    with atheris.instrument_imports(include=["polyfed"]):
        pass

    bench = Bench(limit)

    def one(data: bytes) -> None:
        bench.attempt(TARGETS[name], TARGETS[name].make(Led(data)))

    atheris.Setup([sys.argv[0], f"-runs={count}", "-max_len=512", "-rss_limit_mb=0"], one)
    atheris.Fuzz()


def main() -> None:
    """Try what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), metavar="A,B,...", help=f"[all: {', '.join(TARGETS)}]")
    parser.add_argument("--count", type=int, metavar="NUMBER", help="inputs of each target [1000]")
    parser.add_argument("--seconds", type=float, help="so long for each target, in place of --count")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this input alone, in this process")
    parser.add_argument("--limit", type=float, default=20.0, metavar="SECONDS", help="of one input [20]")
    parser.add_argument("--engine", choices=["random", "hypothesis", "atheris"], default="random")
    parser.add_argument("--curves", action="store_true", help="run-folder: also draw the curves")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each target")
    asked = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # threads do not come along when processes part, and would be waited for
    names = asked.targets.split(",")
    for name in names:
        if name not in TARGETS:
            parser.error(f"expected targets among {', '.join(TARGETS)}, got '{name}'")
    DRAWS["curves"] = asked.curves
    count = None if asked.seconds is not None else asked.count or 1000
    failed = False
    for name in names:
        if asked.engine == "atheris":
            by_atheris(name, count or 1000, asked.limit)
        prepare_inputs(name)
        began = time.monotonic()
        if asked.only is not None:
            failed |= _again(name, asked.seed, asked.only, asked.limit)
            continue
        found = (
            in_children(name, asked.seed, count, asked.seconds, asked.limit)
            if asked.engine == "random"
            else by_hypothesis(name, count or 1000, asked.limit)
        )
        failed |= bool(found["failures"])
        if asked.json:
            print(json.dumps({"target": name, "seed": asked.seed, **found}), flush=True)
            continue
        ends = ", ".join(f"{number} {end}" for end, number in sorted(found["ends"].items()))
        print(f"{name:16}{found['inputs']:8} inputs  {time.monotonic() - began:6.0f} s  {ends}", flush=True)
        for text, number in found["failures"].items():
            print(f"    input {number}: {text}", flush=True)
    sys.exit(failed)


def _again(name: str, seed: int, number: int, limit: float) -> bool:
    """One input, with its traceback and its files; whether it failed."""
    kept = Path(tempfile.mkdtemp(prefix=f"polyfed-{name}-{number}-"))
    files = of(name, seed, number)
    for path, data in files.items():
        (kept / path).parent.mkdir(parents=True, exist_ok=True)
        (kept / path).write_bytes(data)
    print(f"{name} {number}: {kept}")
    try:
        print(", ".join(Bench(limit).attempt(TARGETS[name], files)))
    except Failure:
        traceback.print_exc()
        return True
    return False


if __name__ == "__main__":
    main()
