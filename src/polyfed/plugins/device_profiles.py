"""The devices that clients are simulated to have: how fast they compute, what they hold, how they are connected.

Built-in profiles are orders of magnitude; `docs/devices.md` says where they come from. `compute` is what training
reaches, about a tenth of what the hardware's vector units could do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator

from polyfed.core.randomness import generator, numpy_generator
from polyfed.core.settings import Finite, Positive, Settings, Share
from polyfed.errors import ConfigError
from polyfed.plugins.settings import Availability
from polyfed.registry import suggest
from polyfed.validation.effect import ActsWith

__all__ = ["BUILT_IN", "Devices", "Profile", "assign_devices", "check_lateness", "effective_availability"]

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Profile(Settings):
    """``[devices.custom.NAME]``: a kind of device."""

    flops: Rate = Field(description="FLOP/s that training reaches")
    memory_bytes: Rate = Field(description="bytes that training may take")
    download_bps: Rate = Field(description="bit/s from the server")
    upload_bps: Rate = Field(description="bit/s to the server")
    latency: Finite = Field(0.0, description="seconds that every message takes beside its bits")
    availability: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="probability of being there in a round")


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
    """``[devices]``: who computes on what; off unless devices are dealt by `profiles`, `fractions` or `by_client`."""

    profiles: list[str] = Field([], description="profiles, dealt to the clients as `assignment` says")
    assignment: Annotated[Literal["round_robin", "blocks", "random"], ActsWith("profiles", several=True)] = Field(
        "round_robin", description="profiles: as in [models]"
    )
    fractions: dict[str, Share] = Field(
        {}, description="profile -> share of the clients, which are drawn; not with profiles"
    )
    by_client: dict[str, str] = Field(
        {}, description="number of a client -> its profile, before profiles and fractions"
    )
    custom: dict[str, Profile] = Field({}, description="your own; of a built-in one, what is not told stays")
    round_timeout: Rate | None = Field(
        None, description="seconds that the server waits for uploads, in each exchange; what comes later is late"
    )
    buffer_size: Positive | None = Field(
        None,
        description="uploads that the server waits for, whoever sends them, before it aggregates (FedBuff); default: "
        "those of all who take part in the round",
    )
    staleness: Annotated[Literal["polynomial", "constant"], ActsWith("buffer_size")] = Field(
        "polynomial",
        description="buffer_size: how much an upload counts that began tau rounds ago: 1 / sqrt(1 + tau), or 1",
    )
    on_out_of_memory: Literal["refuse", "leave out"] = Field(
        "refuse", description="clients whose network does not fit their memory: none are run with, or without them"
    )
    time_jitter: Finite = Field(
        0.0, description="a factor on a client's times, drawn each round: standard deviation of its logarithm; 0: none"
    )
    server_flops: Rate | None = Field(None, description="FLOP/s of the server; default: its work takes no time")

    @property
    def enabled(self) -> bool:
        """Whether devices are simulated."""
        return bool(self.profiles or self.fractions or self.by_client)

    def profile(self, name: str) -> Profile:
        """The profile of that name, one's own or built in."""
        return self.custom[name] if name in self.custom else BUILT_IN[name]

    def _inactive_keys(self) -> set[str]:
        if not self.enabled:
            return set(type(self).model_fields)
        off = {key for key in ("profiles", "fractions", "by_client", "custom", "time_jitter") if not getattr(self, key)}
        return super()._inactive_keys() | off

    @field_validator("custom", mode="before")
    @classmethod
    def _whole_profiles(cls, given: Any) -> Any:
        """What a built-in profile's namesake does not tell is the built-in one's."""
        if not isinstance(given, Mapping):
            return given
        return {
            name: {**BUILT_IN[name].model_dump(), **own} if name in BUILT_IN and isinstance(own, Mapping) else own
            for name, own in given.items()
        }

    @field_validator("fractions")
    @classmethod
    def _shares_are_whole(cls, shares: dict[str, float]) -> dict[str, float]:
        if shares and abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError(f"expected fractions that add up to 1, got {sum(shares.values()):g}")
        return shares

    @model_validator(mode="after")
    def _fits_together(self) -> Devices:
        if self.profiles and self.fractions:
            raise ValueError("expected profiles or fractions, got both")
        if self.round_timeout is not None and self.buffer_size is not None:
            raise ValueError("expected round_timeout or buffer_size, got both")
        switches = ("custom", "round_timeout", "buffer_size", "time_jitter", "server_flops")
        asked = [name for name in switches if getattr(self, name)]
        if not self.enabled and (asked or self.on_out_of_memory != "refuse"):
            raise ValueError(
                f"{(asked or ['on_out_of_memory'])[0]}: expected profiles, fractions or by_client beside it, which say "
                "who has which device, got none"
            )
        dealt_out = {*self.profiles, *self.fractions, *self.by_client.values()}
        for name in self.custom:
            if name not in dealt_out:
                raise ValueError(
                    f"custom.{name} does nothing, as no client has it; name it in profiles, fractions or by_client, or "
                    "leave it out"
                )
        for name in (*self.profiles, *self.fractions, *self.by_client.values()):
            if name not in self.custom and name not in BUILT_IN:
                raise ValueError(f"unknown device '{name}'{suggest(name, [*self.custom, *BUILT_IN])}")
        for number in self.by_client:
            if not number.isdecimal():
                raise ValueError(f"by_client: expected numbers of clients, got '{number}'")
        return self


def effective_availability(availability: Availability, devices: Devices) -> dict[str, Any]:
    """`[availability]` as a run folder keeps it: `delay_rounds` also says how late those are that miss the deadline."""
    late = {"delay_rounds": availability.delay_rounds} if devices.round_timeout is not None else {}
    return {**availability.effective(), **late}


def check_lateness(availability: Availability, devices: Devices) -> None:
    """Whether anybody can be late by `delay_rounds`.

    Raises:
        ConfigError: it was given, and nobody can: nothing arrives late, and there is no deadline to miss.
    """
    default = Availability.model_fields["delay_rounds"].default
    off = not availability.delay_rate and "delay_rate" not in availability.model_fields_set
    if off and devices.round_timeout is None and availability.delay_rounds != default:
        raise ConfigError(
            f"availability: delay_rounds = {availability.delay_rounds} does nothing beside delay_rate = 0.0; set "
            f"delay_rate above 0 or devices.round_timeout, or leave delay_rounds at {default}"
        )


def assign_devices(devices: Devices, clients: int, seed: int) -> list[str]:
    """The profile's name of each of so many clients; nothing where devices are off.

    Fractions become whole numbers of clients by largest remainders, and the seed says which clients these are.

    Raises:
        ConfigError: `by_client` names a client that is not there, or nothing says what some client has.

    >>> assign_devices(Devices(profiles=["laptop", "gpu"], by_client={"2": "phone-low"}), 4, seed=0)
    ['laptop', 'gpu', 'phone-low', 'gpu']
    """
    if not devices.enabled:
        return []
    found = dict(enumerate(_by_rule(devices, clients, seed)))
    for number, name in devices.by_client.items():
        if int(number) >= clients:
            raise ConfigError(f"devices.by_client: expected clients 0 to {clients - 1}, got {number}")
        found[int(number)] = name
    if missing := [number for number in range(clients) if number not in found]:
        raise ConfigError(
            f"devices.by_client: expected a device for each of the {clients} clients, or profiles or fractions for the "
            f"others, got none for {', '.join(map(str, missing))}"
        )
    return [found[number] for number in range(clients)]


def _by_rule(devices: Devices, clients: int, seed: int) -> list[str]:
    """By `profiles` or `fractions`; nothing where neither is given."""
    if devices.fractions:
        return _by_shares(devices.fractions, clients, seed)
    names: Sequence[str] = devices.profiles
    if not names:
        return []
    if devices.assignment == "blocks":
        return [names[client * len(names) // clients] for client in range(clients)]
    if devices.assignment == "random":
        return [names[int(place)] for place in numpy_generator(seed, "devices").integers(0, len(names), clients)]
    return [names[client % len(names)] for client in range(clients)]


def _by_shares(shares: Mapping[str, float], clients: int, seed: int) -> list[str]:
    wanted = {name: share * clients for name, share in shares.items()}
    counts = {name: int(wish + 1e-9) for name, wish in wanted.items()}
    behind = sorted(wanted, key=lambda name: counts[name] - wanted[name])  # stable: the first named goes first
    for name in behind[: clients - sum(counts.values())]:
        counts[name] += 1
    names = [name for name, count in counts.items() for _ in range(count)]
    order = torch.randperm(clients, generator=generator(seed, "devices")).tolist()
    return [names[place] for place in order]
