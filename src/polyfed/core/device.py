"""Where networks compute."""

from __future__ import annotations

import torch

from polyfed.errors import RequestError


def named_device(name: str) -> torch.device:
    """The device of that name ("cpu", "cuda", "cuda:1").

    Raises:
        RequestError: no such device, or it is not here.
    """
    try:
        found = torch.device(name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise RequestError(f"expected a device that is here ('cpu', 'cuda', ...), came '{name}': {why}") from None
    return found
