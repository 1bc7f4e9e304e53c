"""Where networks compute."""

from __future__ import annotations

import torch

from polyfed.errors import ConfigError, first_line

_LONGEST = 160  # characters of what PyTorch says
_NVIDIA = {"gpu", "cuda", "nvidia"}  # what people call it
_APPLE = {"mps", "metal", "apple"}


def parse_device(name: str) -> torch.device:
    """The device of that name ("cpu", "cuda", "cuda:1").

    Raises:
        ConfigError: no such device, or it is not here; says which are, and what to do.
    """
    try:
        found = torch.device(name)
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        here = ", ".join(f"'{one}'" for one in _here())
        raise ConfigError(f"expected a device that is here ({here}), got '{name}'; {_hint(name, error)}") from None
    return found


def device_name(device: torch.device) -> str:
    """What people call a device: "NVIDIA H100 80GB HBM3"; by PyTorch's name where that is all there is to know."""
    is_cuda = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_cuda else str(device)


def _here() -> list[str]:
    """The devices of this machine that PyTorch can use."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = ["cuda", *(f"cuda:{number}" for number in range(1, count))] if count else []
    return ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]


def _hint(name: str, error: Exception) -> str:
    """Why there is no such device, and what to do about it. error: PyTorch's."""
    kind = name.partition(":")[0].strip()
    if kind == "cuda":
        return _no_cuda(error)
    if kind == "mps":
        return "PyTorch finds no GPU of Apple's here, which macOS alone has"
    if kind.lower() in _NVIDIA:
        return "did you mean 'cuda'?" + ("" if torch.cuda.is_available() else f" But {_no_cuda(error)}")
    if kind.lower() in _APPLE:
        return "did you mean 'mps'?"
    said = first_line(error)
    if "Expected one of" in said:  # two dozen kinds
        return "PyTorch does not know it"
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."


def _no_cuda(error: Exception) -> str:
    """Why an NVIDIA GPU cannot be used."""
    version = str(torch.__version__)
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this PyTorch ({version}) is built for the CPU alone: install one that is built for CUDA, a wheel whose "
            "version ends with +cu and CUDA's number and not with +cpu"
        )
    if not torch.cuda.is_available():
        return f"this PyTorch ({version}) finds no NVIDIA GPU: see whether nvidia-smi, the driver's program, shows one"
    count = torch.cuda.device_count()
    if "ordinal" in str(error) or "index" in str(error):
        return f"there {'is' if count == 1 else 'are'} {count}, counted from 0"
    return str(error).splitlines()[0][:_LONGEST]
