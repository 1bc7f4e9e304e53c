"""What leaves a client hidden in Gaussian noise: how much of it, and what of the data a release is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["client", "sample"]


@dataclass(frozen=True)
class Release:
    """A Gaussian mechanism, run so many times.

    Args:
        what: of what it is: "upload" (`[privacy] upload_noise_multiplier`), "features", or "training" or "sums"
            (`[privacy] noise_multiplier`).
        unit: what is hidden. "client": whether it took part at all. "sample": what one of its rows holds.
        noise: standard deviation of the noise over the most (L2) that it can change; above 0.
        drawn, held: it is about so many rows, drawn of so many. Equal (or 0): about all.
        poisson: each row is drawn by itself with probability drawn / held; else exactly so many, without replacement.
        times: how often.
        once: the same numbers whenever it is made, so that it counts once.
    """

    what: str
    unit: Unit
    noise: float
    drawn: int = 0
    held: int = 0
    poisson: bool = False
    times: int = 1
    once: bool = False

    @property
    def sampled(self) -> bool:
        """Whether rows are drawn for it, which hides them, too."""
        return self.drawn < self.held
