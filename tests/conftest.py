"""What every test may lean on: one thread, the folder of real data, and a torchvision that imports."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# The same few examples in every run, but with `--hypothesis-profile=long`: thousands, others each time.
settings.register_profile("same", derandomize=True, max_examples=20, deadline=None, database=None)
settings.register_profile("long", max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("same")

_kept: list[Any] = []  # what torch.library declares lives as long as its handle

# A shell that starts the tests in the background, or under nohup, ignores these, and so would every program they start.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


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


# Properties of the kit that take longest, or that the engine answers for more than the method does. `make test` asks
# them of three methods only (an average, a head that the server trains, control variates), `make test-all` of all.
LONG = {
    *("any_subset", "batchnorm", "begins_alike", "degenerate_clients"),
    *("global_generators_untouched", "goes_on_after_its_end", "hyperparameters_matter", "initial_weights_are_ignored"),
    *("learns", "missing_upload_is_not_zero", "nan_is_rejected", "other_seed_other_result", "same_seed_same_result"),
    "state_is_explicit",
}
ASKED_ALL = ("test_fedavg", "test_fedgh", "test_scaffold")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or item.originalname != "test_conformance":
            continue
        if item.callspec.params["property_"] in LONG and item.path.stem not in ASKED_ALL:
            item.add_marker(pytest.mark.slow)


def pytest_configure() -> None:
    """Before anything is collected: the order of sums must not depend on the machine's cores."""
    import torch

    torch.set_num_threads(1)
    _keep_folders_in_memory()
    _let_torchvision_import()
    os.fsync = _do_not_wait


def pytest_sessionstart() -> None:
    """The collector would look through all that is compiled and collected again and again; nothing of it goes."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on it is needed; see `_frozen`."""
    gc.enable()


def _keep_folders_in_memory() -> None:
    """The folders of `tmp_path` lie in memory where there is room: a disk takes milliseconds to remove one."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def _do_not_wait(fd: object) -> None:
    """In place of `os.fsync`: no test cuts the power, and a run waits for the disk forty times."""


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of the real data sets: POLYFED_DATA, else ``shared/data`` beside the repository, else skip."""
    named = os.environ.get("POLYFED_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder; set POLYFED_DATA to the one that holds cifar10/")
    return folder


@pytest.fixture(autouse=True, scope="session")
def _no_collecting_after_runs() -> Iterator[None]:
    """Commands of many runs have the collector look through all there is after each; these runs are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.experiments.planned_runs.gc", SimpleNamespace(collect=lambda: 0))
        yield


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """What is there before a file of tests stays: the collector need not look through thousands of tests each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_same_start() -> None:
    """Networks that a test makes begin alike in every run: PyTorch seeds its global generator from the clock."""
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed queues a seeding of absent GPUs, with its stack


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn and their files written, but empty: to render them takes longer than all else of a table."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda *arguments, **options: None)
