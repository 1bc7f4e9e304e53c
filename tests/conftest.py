"""What every test may lean on: one thread, the folder of real data, and a torchvision that imports."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

_kept: list[Any] = []  # what torch.library declares lives as long as its handle


def _let_torchvision_import() -> None:
    """Declare two operators where torchvision is installed but its compiled ones do not load.

    Its own import registers shape rules for ``nms`` and ``qnms`` and fails when nothing has declared them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        from torch.library import Library

        library = Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


def pytest_configure() -> None:
    """Before anything is collected: the order of sums must not depend on the machine's cores."""
    import torch

    torch.set_num_threads(1)
    _let_torchvision_import()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of the real data sets: POLYFED_DATA, else ``shared/data`` beside the repository, else skip."""
    named = os.environ.get("POLYFED_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder; set POLYFED_DATA to the one that holds cifar10/")
    return folder
