"""Where networks compute."""

from __future__ import annotations

import torch

from polyfed.errors import RequestError


def named_device(name: str) -> torch.device:
    """The device of that name ("cpu", "cuda", "cuda:1").

    Raises:
        RequestError: no such device, or it is not here.
    """
    expected = "expected a device that is here ('cpu', 'cuda', 'cuda:1')"
    try:
        found = torch.device(name)
    except RuntimeError:  # its message lists two dozen kinds
        raise RequestError(f"{expected}, came '{name}', which PyTorch does not know") from None
    try:
        torch.zeros(1, device=found).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RequestError(f"{expected}, came '{name}': {str(error).splitlines()[0]}") from None
    return found
