"""Numbers for people: bytes and seconds. Used by the live progress and by the reports; imports nothing."""

from __future__ import annotations

import math

__all__ = ["human_bytes", "human_seconds"]

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(count: float) -> str:
    """A byte count in binary units with one decimal; below 1 KiB exact.

    >>> human_bytes(0), human_bytes(1023), human_bytes(1024), human_bytes(3 * 2**20 + 2**19)
    ('0 B', '1023 B', '1.0 KiB', '3.5 MiB')
    """
    if not math.isfinite(count):
        return "?"
    if count < 0:
        return f"-{human_bytes(-count)}"
    if round(count) < 1024:
        return f"{round(count)} B"
    size = float(count)
    for unit in _BINARY:
        size /= 1024
        if round(size, 1) < 1024 or unit == _BINARY[-1]:  # 1023.96 would read "1024.0 KiB"
            return f"{size:.1f} {unit}"
    raise AssertionError("unreachable: the last unit takes everything")


def human_seconds(seconds: float) -> str:
    """A duration with two figures that matter; ``"?"`` where it is unknown (not finite or negative).

    >>> [human_seconds(s) for s in (0.04, 9.96, 59.6, 65, 3599.7, 7500, 100_000)]
    ['0.0 s', '10 s', '1 min 00 s', '1 min 05 s', '1 h 00 min', '2 h 05 min', '1 d 04 h']
    """
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def human_count(number: int, noun: str) -> str:
    """A number of things.

    >>> human_count(1, "round"), human_count(3, "client")
    ('1 round', '3 clients')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
