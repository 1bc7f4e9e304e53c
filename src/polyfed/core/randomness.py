"""Every random draw comes from a stream of its own, derived from (seed, purpose, round, client).

So no draw depends on how many others were made before it: worker count, order, participation and resume never change a
client's stream. Global generators are seeded only where what they held is put back.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch

_DRAWING = threading.RLock()  # held by the thread that draws from seeded global generators


def derive_seed(seed: int, purpose: str, *ids: int | str) -> int:
    """A 63-bit seed for one purpose: the hash of (seed, purpose, ids), the same on every machine.

    >>> derive_seed(0, "batches", 3, 7) == derive_seed(0, "batches", 3, 7)
    True
    >>> derive_seed(0, "batches", 3, 7) == derive_seed(0, "batches", 7, 3)
    False
    """
    text = "\x1f".join([str(int(seed)), purpose, *(f"{type(i).__name__}:{i}" for i in ids)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *ids: int | str) -> torch.Generator:
    """A CPU generator for one purpose."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *ids))


def numpy_generator(seed: int, purpose: str, *ids: int | str) -> np.random.Generator:
    """The same for NumPy (partitions)."""
    return np.random.default_rng(derive_seed(seed, purpose, *ids))


def deal(names: Sequence[str], assignment: str, count: int, seed: int, purpose: str) -> list[str]:
    """Which of the names each of `count` clients has.

    Args:
        assignment: "round_robin", "blocks" (equal ones, in order) or "random", drawn by the seed for this purpose.

    >>> deal(["a", "b"], "round_robin", 3, 0, "networks"), deal(["a", "b"], "blocks", 5, 0, "networks")
    (['a', 'b', 'a'], ['a', 'a', 'a', 'b', 'b'])
    """
    if assignment == "blocks":
        return [names[client * len(names) // count] for client in range(count)]
    if assignment == "random":
        return [names[int(place)] for place in numpy_generator(seed, purpose).integers(0, len(names), count)]
    return [names[client % len(names)] for client in range(count)]


@contextlib.contextmanager
def keep_global_rng() -> Iterator[None]:
    """The global generators of PyTorch, Python and NumPy are put back after a block as they were.

    Threads share them: nobody's are put back while another thread draws in a `seeded_global_rng`.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with _DRAWING:
        torchs = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        pythons = random.getstate()
        numpys = np.random.get_state()
    try:
        yield
    finally:
        with _DRAWING:
            torch.set_rng_state(torchs[0])
            for device, state in zip(devices, torchs[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            random.setstate(pythons)
            np.random.set_state(numpys)


def seed_global_rng(seed: int) -> None:
    """Seed them, within `keep_global_rng`, which takes twelve times as long.

    Layer initialization and dropout draw from the global generator and take no other, and so do forwards that call
    `random.random()`; this is how they are made a function of (seed, purpose, round, client) all the same.
    """
    with _DRAWING:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also queues a seeding of absent GPUs, per call
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded_global_rng(seed: int) -> Iterator[None]:
    """Both, for a block, which threads have one after the other."""
    with _DRAWING, keep_global_rng():
        seed_global_rng(seed)
        yield


def drawn_of_others() -> tuple[object, ...]:
    """Where Python's and NumPy's global generators stand: another value wherever something has drawn from one."""
    numpys = np.random.get_state(legacy=False)
    return random.getstate(), numpys["state"]["key"].tobytes(), numpys["state"]["pos"], numpys["gauss"]


def global_draws() -> tuple[object, ...]:
    """The same for all global generators, PyTorch's too."""
    torchs = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
    return *drawn_of_others(), *(state.numpy().tobytes() for state in torchs)
