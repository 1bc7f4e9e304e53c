"""A name that no file can have is refused in one line, wherever a path is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import polyfed as pf
from polyfed.analysis import analyse
from polyfed.data.datasets import load
from polyfed.data.inference_inputs import Form, read
from polyfed.data.text import read_vectors
from polyfed.deploy.node_registry import release
from polyfed.engine.run_folder import RunFolder
from polyfed.errors import RequestError
from polyfed.experiments.prediction import load_model
from polyfed.report.run_records import find_runs
from polyfed.report.sensitivity import read_sweep

RECIPE = """
[data]
name = "digits"
clients = 2
max_rows = 60
[models]
architectures = ["digits-cnn1"]
[method]
name = "local"
"""
USES: dict[str, Callable[[str], object]] = {
    "data": lambda name: load(name, "."),
    **{kind: lambda name, kind=kind: load(f"{kind}:{name}") for kind in ("csv", "npz", "images", "clients")},
    "root": lambda name: load("cifar10", name),
    "parquet": lambda name: load("parquet", name),
    "vectors": lambda name: read_vectors(Path(name), {"a"}),
    "new inputs": lambda name: read(Path(name), Form((2,), torch.float32, None, ("a", "b"))),
    "recipe": lambda name: pf.run(name),
    "model": lambda name: load_model(name, 0),
    "runs": lambda name: find_runs(name),
    "analyse": lambda name: analyse(name),
    "sweep": lambda name: read_sweep(name),
    "release": lambda name: release(name, 0),
    "folder": lambda name: RunFolder(Path(name)).check({}, False, False),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "name", ["n" * 300, "n/" * 3000, "a\0b", "\ud83d"], ids=["300 letters", "6000", "zero", "half"]
)
def test_a_name_that_no_file_has(use: str, name: str) -> None:
    with pytest.raises(RequestError) as refused:
        USES[use](name)
    assert "\n" not in str(refused.value)


def test_a_run_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(RECIPE)
    with pytest.raises(RequestError, match=r"expected the name of a file or folder, came .* File name too long"):
        pf.run(tmp_path / "mine.toml", out=tmp_path / ("n" * 300))


@pytest.mark.parametrize("kind", ["csv", "npz", "images", "clients"])
def test_a_user_that_is_not_there(kind: str) -> None:
    with pytest.raises(RequestError, match="expected a folder of a user that there is, came '~nobody-of-this-name"):
        load(f"{kind}:~nobody-of-this-name/rows")
