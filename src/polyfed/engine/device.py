"""Where networks compute, with how many threads, and the time of processors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from polyfed.errors import ConfigError, first_line

_of_workers = 0.0  # seconds


def parse_device(name: str) -> torch.device:
    """The device of that name ("cpu", "cuda", "cuda:1").

    Raises:
        ConfigError: no such device, or it is not here; says which are, and what to do.
    """
    try:
        found = torch.device(name)
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        here = ["cpu", *(["cuda"] if count else []), *(f"cuda:{number}" for number in range(1, count))]
        if torch.backends.mps.is_available():
            here.append("mps")
        listed = ", ".join(f"'{one}'" for one in here)
        reason = first_line(error)
        if name.startswith("cuda") and not torch.cuda.is_available():
            reason = f"this PyTorch ({torch.__version__}) is built for the CPU alone, or finds no NVIDIA GPU"
        raise ConfigError(f"expected a device that is here ({listed}), got '{name}'; {reason:.160}") from None
    return found


def device_name(device: torch.device) -> str:
    """What people call a device: "NVIDIA H100 80GB HBM3"; by PyTorch's name where that is all there is to know."""
    is_cuda = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_cuda else str(device)


def processor_seconds() -> float:
    """Processor time that this process has used so far, all threads, and the workers whose answers it has."""
    return time.process_time() + _of_workers


def include_processor_seconds(seconds: float) -> None:
    """Count what a worker has used for an answer."""
    global _of_workers
    _of_workers += seconds


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """One computing thread: the same bits whatever the machine's cores, and no slow-down beside busy neighbors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
