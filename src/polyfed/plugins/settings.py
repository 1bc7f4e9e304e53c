"""The settings of the plugins; nothing here needs PyTorch.

Built-in profiles of devices are orders of magnitude; `docs/devices.md` says where they come from. `flops` is what
training reaches, about a tenth of what the hardware's vector units could do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from polyfed.core.settings import Finite, Positive, Settings, Share
from polyfed.registry import suggest
from polyfed.validation.effect import ActsWith

__all__ = ["Adversaries", "Availability", "Devices", "RobustAggregation", "SecureSums"]


class Availability(Settings):
    """``[availability]``: who is there, and who drops out; off by default.

    Share of `client_fraction` is drawn of those present. A final round reaches all who are present.
    """

    _switches: ClassVar[tuple[str, ...]] = ("dropout_rate", "late_joiners")

    dropout_rate: Share = Field(0.0, description="probability that a client asked in a round drops out")
    dropout_stage: Annotated[Literal["before", "after"], ActsWith("dropout_rate")] = Field(
        "before", description="before: nothing reaches it; after: it trains and keeps its work, its upload never leaves"
    )
    late_joiners: Annotated[int, Field(ge=0)] = Field(
        0, description="clients, drawn by the seed, that are absent at first"
    )
    join_round: Annotated[int, Field(ge=2), ActsWith("late_joiners")] = Field(
        2, description="the first round of the late joiners"
    )


class RobustAggregation(Settings):
    """``[robust_aggregation]``: what the server does about uploads that lead astray; all but `max_magnitude` off by
    default.

    See `plugins.robust_aggregation`.
    """

    _place: ClassVar[tuple[str, ...]] = ("robust_aggregation",)
    _switches: ClassVar[tuple[str, ...]] = ("aggregator", "max_magnitude")

    aggregator: Literal["none", "median", "trimmed_mean", "geometric_median", "multi_krum", "norm_clipping"] = Field(
        "none", description="what takes the place of clients' weights and class means, or whom it leaves out"
    )
    byzantine_fraction: Annotated[
        float, Field(gt=0, lt=0.5), ActsWith("aggregator", ("trimmed_mean", "multi_krum"))
    ] = Field(
        0.2, description="trimmed_mean, multi_krum: of the clients that are supposed to be adversarial, rounded up"
    )
    max_magnitude: Finite = Field(
        1e6,
        description="largest magnitude of a number in an upload, by default more for sums of squares in float64; above "
        "it is refused; 0: any that is finite",
    )


class SecureSums(Settings):
    """``[secure_sums]``: the server learns the total of the uploads and none of them; off by default.

    See `plugins.secure_sums` and, for deployments, `deploy.secure_sums`.
    """

    _place: ClassVar[tuple[str, ...]] = ("secure_sums",)
    _switches: ClassVar[tuple[str, ...]] = ("enabled",)

    enabled: bool = Field(False, description="the server learns the total of the uploads alone")
    threshold: Annotated[float, Field(gt=0.5, le=1), ActsWith("enabled")] = Field(
        2 / 3, description="share of a sum's clients that have to be there at its end; of fewer no total is opened"
    )
    min_clients: Annotated[int, Field(ge=3), ActsWith("enabled")] = Field(
        3, description="clients of a sum, at least; fewer begin none"
    )

    def needed(self, clients: int) -> int:
        """How many of a sum's clients have to be there at its end: more than half.

        >>> SecureSums(enabled=True).needed(20)
        14
        """
        return max(clients // 2 + 1, math.ceil(self.threshold * clients - 1e-9))


class Adversaries(Settings):
    """``[adversaries]``: clients that play false, drawn by the seed; none by default.

    See `plugins.adversaries`.
    """

    _switches: ClassVar[tuple[str, ...]] = ("label_flip_fraction", "sign_flip_fraction")

    label_flip_fraction: Share = Field(
        0.0, description="share of the clients, rounded up, that train on labels C - 1 - y"
    )
    sign_flip_fraction: Share = Field(0.0, description="share of the clients, rounded up, that send the opposite")
    attack_scale: Annotated[float, Field(gt=0, allow_inf_nan=False), ActsWith("sign_flip_fraction")] = Field(
        1.0, description="sign_flip: factor of the negated change"
    )


# devices --------------------------------------------------------------------------------------------------------------

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Profile(Settings):
    """``[devices.custom.NAME]``: a kind of device."""

    flops: Rate = Field(description="FLOP/s that training reaches")
    memory_bytes: Rate = Field(description="bytes that training may take")
    download_bps: Rate = Field(description="bit/s from the server")
    upload_bps: Rate = Field(description="bit/s to the server")
    latency: Finite = Field(0.0, description="seconds that every message takes beside its bits")


BUILT_IN: Mapping[str, Profile] = {
    "microcontroller": Profile(flops=5e7, memory_bytes=8e6, download_bps=5e6, upload_bps=5e6, latency=0.05),
    "phone-low": Profile(flops=2e9, memory_bytes=5e8, download_bps=1e7, upload_bps=3e6, latency=0.1),
    "phone-mid": Profile(flops=1e10, memory_bytes=1e9, download_bps=5e7, upload_bps=1e7, latency=0.05),
    "phone-high": Profile(flops=3e10, memory_bytes=2e9, download_bps=1e8, upload_bps=2e7, latency=0.05),
    "raspberry-pi": Profile(flops=5e9, memory_bytes=2e9, download_bps=5e7, upload_bps=5e7, latency=0.02),
    "laptop": Profile(flops=1e11, memory_bytes=8e9, download_bps=1e8, upload_bps=4e7, latency=0.02),
    "gpu": Profile(flops=4e12, memory_bytes=2.4e10, download_bps=1e9, upload_bps=1e9, latency=0.005),
}


class Devices(Settings):
    """``[devices]``: who computes on what; off unless `profiles` assigns devices."""

    _switches: ClassVar[tuple[str, ...]] = ("profiles", "custom", "time_jitter")

    profiles: list[str] = Field([], description="profiles, assigned to the clients as `assignment` says")
    assignment: Annotated[Literal["round_robin", "blocks", "random"], ActsWith("profiles", several=True)] = Field(
        "round_robin", description="profiles: as in [models]"
    )
    custom: dict[str, Profile] = Field({}, description="your own; of a built-in one, what is not given stays")
    round_timeout: Annotated[Rate | None, ActsWith("profiles")] = Field(
        None, description="seconds that the server waits for uploads, in each exchange; what comes later does not count"
    )
    buffer_size: Annotated[Positive | None, ActsWith("profiles")] = Field(
        None,
        description="uploads after which the server aggregates, of any clients (FedBuff); default: those of all "
        "who take part in the round",
    )
    on_out_of_memory: Annotated[Literal["refuse", "leave out"], ActsWith("profiles")] = Field(
        "refuse", description="clients whose network does not fit their memory: none are run with, or without them"
    )
    time_jitter: Annotated[Finite, ActsWith("profiles")] = Field(
        0.0, description="a factor on a client's times, drawn each round: standard deviation of its logarithm; 0: none"
    )

    @property
    def enabled(self) -> bool:
        """Whether devices are simulated."""
        return bool(self.profiles)

    def profile(self, name: str) -> Profile:
        """The profile of that name, one's own or built in."""
        return self.custom[name] if name in self.custom else BUILT_IN[name]

    @field_validator("custom", mode="before")
    @classmethod
    def _whole_profiles(cls, given: Any) -> Any:
        """What a built-in profile's namesake does not give is the built-in one's."""
        if not isinstance(given, Mapping):
            return given
        return {
            name: {**BUILT_IN[name].model_dump(), **own} if name in BUILT_IN and isinstance(own, Mapping) else own
            for name, own in given.items()
        }

    @model_validator(mode="after")
    def _fits_together(self) -> Devices:
        if self.round_timeout is not None and self.buffer_size is not None:
            raise ValueError("expected round_timeout or buffer_size, got both")
        for name in self.custom:
            if name not in self.profiles:
                raise ValueError(
                    f"custom.{name} does nothing, as no client has it; name it in profiles, or leave it out"
                )
        for name in self.profiles:
            if name not in self.custom and name not in BUILT_IN:
                raise ValueError(f"unknown device '{name}'{suggest(name, [*self.custom, *BUILT_IN])}")
        return self
