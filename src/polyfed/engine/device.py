"""Where networks compute."""

from __future__ import annotations

import torch

from polyfed.errors import ConfigError, first_line

_OTHER_NAMES = {"gpu": "cuda", "nvidia": "cuda", "metal": "mps", "apple": "mps"}  # what people call them


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
        raise ConfigError(f"expected a device that is here ({listed}), got '{name}'; {_hint(name, error)}") from None
    return found


def device_name(device: torch.device) -> str:
    """What people call a device: "NVIDIA H100 80GB HBM3"; by PyTorch's name where that is all there is to know."""
    is_cuda = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_cuda else str(device)


def _hint(name: str, error: Exception) -> str:
    """Why there is no such device, and what to do about it. error: PyTorch's."""
    kind = name.partition(":")[0].strip().lower()
    usual = _OTHER_NAMES.get(kind, kind)
    meant = "" if name.startswith(usual) else f"did you mean '{usual}'? "
    version = str(torch.__version__)
    if usual == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return (
            f"{meant}this PyTorch ({version}) is built for the CPU alone: install one that is built for CUDA, a wheel "
            "whose version ends with +cu and CUDA's number and not with +cpu"
        )
    if usual == "cuda" and not torch.cuda.is_available():
        return f"{meant}this PyTorch ({version}) finds no NVIDIA GPU: see whether nvidia-smi, its driver's, shows one"
    if meant and usual in ("cuda", "mps"):
        return meant.strip()
    reason = first_line(error)
    return "PyTorch does not know it" if "Expected one of" in reason else f"{reason:.160}"  # two dozen kinds
