"""A simulated "cuda" of two devices in the host's memory, for a PyTorch that is built for the CPU alone.

`enable` compiles `device.cpp` with g++ and loads it; from then on a program that says `device="cuda"` runs the code
that it would run on a GPU, and fails where it would fail there. Kernels, waits and copies are counted; speed is not
simulated. It changes PyTorch for the rest of the process, so the tests load it in processes of their own.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import graphs
import torch

DEVICES = 2
SOURCE = Path(__file__).with_name("device.cpp")
TRIED = "2.13."  # the PyTorch whose private parts device.cpp was written for
ops: Any = torch.ops.simulated_gpu


def missing() -> str | None:
    """Why there can be no simulated device here; None where there can be one."""
    if torch.cuda.is_available() or torch.version.cuda is not None or torch.version.hip is not None:
        return "this PyTorch is built for a real GPU"
    if not sys.platform.startswith("linux"):
        return "it is written for Linux"
    if shutil.which("g++") is None:
        return "there is no g++ to build it with"
    if not torch.__version__.startswith(TRIED):
        return f"it is written for PyTorch {TRIED}x, and this is {torch.__version__}"
    return None


def library() -> Path:
    """The compiled device; compiled once for each source and PyTorch, which takes a quarter of a minute."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"polyfed-simulated-gpu-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / f"{key}.so"
    with (folder / "lock").open("w") as lock:  # one compiles, the others wait
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            compile_to(made)
    return made


def compile_to(made: Path) -> None:
    """Compile `device.cpp` against the headers that come with PyTorch."""
    home = Path(torch.__file__).parent
    include = home / "include"
    paths = [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", f"-L{home / 'lib'}"]
    part = made.with_suffix(".part")
    command = ["g++", "-std=c++20", "-O1", "-w", "-fPIC", "-shared", *paths, str(SOURCE), "-o", str(part)]
    subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True)
    part.rename(made)


def enable() -> None:
    """Have "cuda:0" and "cuda:1" from now on, in this process."""
    if getattr(torch.cuda, "is_simulated", False):
        return
    if reason := missing():
        raise RuntimeError(f"no simulated device: {reason}")
    torch.ops.load_library(str(library()))
    _replace_functions()
    _replace_storages()


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """What is done on the devices within the block is in the dictionary after it.

    Kernels launched, waits of the host for the device, copies to ("h2d") and from ("d2h") the device, captures and
    replays of graphs. A replay is one launch.
    """
    before = _counts()
    found: dict[str, int] = {}
    yield found
    found |= {name: after - before[name] for name, after in _counts().items()}


def _counts() -> dict[str, int]:
    names = ("kernels", "syncs", "h2d", "h2d_bytes", "d2h", "d2h_bytes")
    launched = (count - other for count, other in zip(ops.counts(), graphs.uncounted, strict=True))
    found = dict(zip(names, launched, strict=True)) | graphs.done
    found["kernels"] += graphs.done["replays"]
    return found


def _number(device: Any = None) -> int:
    """A device's number; the present one's where none is named."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(ops.get_device()) if index is None else index


@contextmanager
def _in_device(device: Any) -> Iterator[None]:
    """Have a device be the present one."""
    before = _number()
    ops.set_device(_number(device))
    try:
        yield
    finally:
        ops.set_device(before)


def _replace_functions() -> None:
    """What `torch.cuda` does in Python."""
    cuda: Any = torch.cuda
    room = 80 * 2**30

    def initialize() -> None:
        cuda._initialized = True

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        state: torch.Tensor = ops.default_state(_number(device))
        return state

    def set_rng_state(state: torch.Tensor, device: Any = "cuda") -> None:
        ops.set_default_state(_number(device), state)

    def manual_seed_all(seed: int) -> None:
        for index in range(DEVICES):
            ops.seed_default(index, int(seed))

    simulated: dict[str, Any] = {
        "is_simulated": True,
        "_initialized": False,
        "_lazy_init": initialize,
        "init": initialize,
        "is_available": lambda: True,
        "is_initialized": lambda: cuda._initialized,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: DEVICES,
        "current_device": _number,
        "device": _in_device,
        "set_device": lambda device: ops.set_device(_number(device)),
        "get_device_name": lambda device=None: "a simulated GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (room, room),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: ops.seed_default(_number(), int(seed)),
        "manual_seed_all": manual_seed_all,
        "default_generators": (),
        **graphs.FUNCTIONS,
    }
    for name, value in simulated.items():
        setattr(cuda, name, value)
    cuda.random.get_rng_state = get_rng_state
    cuda.random.set_rng_state = set_rng_state


def _replace_storages() -> None:
    """Copies of storages, which `copy.deepcopy` and `torch.save` make, and which a CPU-only build refuses on "cuda"."""
    kind: Any = torch.UntypedStorage
    clone, cpu = kind.clone, kind.cpu

    def as_bytes(storage: Any) -> torch.Tensor:
        nothing = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return nothing.set_(storage, 0, (storage.nbytes(),), (1,))

    kind.clone = lambda self: as_bytes(self).clone().untyped_storage() if self.device.type == "cuda" else clone(self)
    kind.cpu = lambda self: as_bytes(self).cpu().untyped_storage() if self.device.type == "cuda" else cpu(self)
