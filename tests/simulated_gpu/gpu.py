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
    ops.set_iterated(_iterated())
    _replace_functions()
    _replace_storages()
    _replace_recurrent()


def counts() -> dict[str, int]:
    """What was done on the devices since `reset`.

    Kernels launched, waits of the host for the device, copies to ("h2d") and from ("d2h") the device with their bytes,
    the bytes held now and the most held at a time.
    """
    names = ("kernels", "syncs", "h2d", "h2d_bytes", "d2h", "d2h_bytes", "allocated", "peak")
    return dict(zip(names, ops.counts(), strict=True))


def by_name() -> dict[str, int]:
    """The same by operation, the most frequent first."""
    pairs = (line.rpartition("=")[::2] for line in ops.names())
    return dict(sorted(((name, int(count)) for name, count in pairs), key=lambda pair: -pair[1]))


def reset() -> None:
    """Count from zero."""
    ops.reset()


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """What is done within the block is in the dictionary after it."""
    reset()
    found: dict[str, int] = {}
    yield found
    found |= counts()


@contextmanager
def memory(size: int) -> Iterator[None]:
    """Within the block the devices have so many bytes; who wants more gets `torch.OutOfMemoryError`."""
    ops.set_limit(size)
    try:
        yield
    finally:
        ops.set_limit(0)


@contextmanager
def without_float64() -> Iterator[None]:
    """Within the block the devices have no float64, as Apple's GPUs."""
    ops.set_narrow(True)
    try:
        yield
    finally:
        ops.set_narrow(False)


def repair() -> None:
    """After an index out of range, which stops a GPU until the process ends."""
    ops.set_broken(False)


def _iterated() -> list[str]:
    """The operations that take one number on the CPU beside tensors on a device."""
    import torchgen  # a part of PyTorch

    listed = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found = []
    name = ""
    for line in listed.read_text().splitlines():
        if line.startswith("- func: "):
            name = line.removeprefix("- func: ").partition("(")[0]
        elif line.strip().startswith("device_check: NoCheck"):
            found.append(f"aten::{name}")
    return found


def _number(device: Any = None) -> int:
    """A device's number; the present one's where none is named."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(ops.get_device()) if index is None else index


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

    def reset_peak(device: Any = None) -> None:
        ops.reset()

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
        "set_device": lambda device: ops.set_device(_number(device)),
        "get_device_name": lambda device=None: "a simulated GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (room - counts()["allocated"], room),
        "memory_allocated": lambda device=None: counts()["allocated"],
        "max_memory_allocated": lambda device=None: counts()["peak"],
        "reset_peak_memory_stats": reset_peak,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: ops.seed_default(_number(), int(seed)),
        "manual_seed_all": manual_seed_all,
        "default_generators": (),
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


def _replace_recurrent() -> None:
    """Recurrent layers of cuDNN's take no gradient of a forward pass in eval mode; these would."""

    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")

    def wrapped(plain: Any) -> Any:
        def run(x: torch.Tensor, *rest: Any) -> Any:
            found = plain(x, *rest)
            training = [value for value in rest if isinstance(value, bool)][1]  # after whether there are biases
            if x.is_cuda and not training:
                for output in found:
                    if output.requires_grad:
                        output.register_hook(refuse)
            return found

        return run

    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        setattr(torch._VF, name, wrapped(getattr(torch._VF, name)))
