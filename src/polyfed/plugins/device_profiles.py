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
from polyfed.core.settings import Finite, Settings, Share
from polyfed.errors import RequestError
from polyfed.plugins.settings import Availability
from polyfed.registry import nearest
from polyfed.validation.effect import ActsWith

__all__ = ["BUILT_IN", "Devices", "Profile", "attendance_in_effect", "check_lateness", "dealt"]

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Profile(Settings):
    """``[devices.profiles.NAME]``: a kind of device."""

    compute: Rate = Field(description="FLOP/s that training reaches")
    memory: Rate = Field(description="bytes that training may take")
    down: Rate = Field(description="bit/s from the server")
    up: Rate = Field(description="bit/s to the server")
    latency: Finite = Field(0.0, description="seconds that every message takes beside its bits")
    availability: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="probability of being there in a round")


BUILT_IN: Mapping[str, Profile] = {
    "microcontroller": Profile(compute=5e7, memory=8e6, down=5e6, up=5e6, latency=0.05),
    "phone-low": Profile(compute=2e9, memory=5e8, down=1e7, up=3e6, latency=0.1),
    "phone-mid": Profile(compute=1e10, memory=1e9, down=5e7, up=1e7, latency=0.05),
    "phone-high": Profile(compute=3e10, memory=2e9, down=1e8, up=2e7, latency=0.05),
    "raspberry-pi": Profile(compute=5e9, memory=2e9, down=5e7, up=5e7, latency=0.02),
    "laptop": Profile(compute=1e11, memory=8e9, down=1e8, up=4e7, latency=0.02),
    "gpu": Profile(compute=4e12, memory=2.4e10, down=1e9, up=1e9, latency=0.005),
}


class Devices(Settings):
    """``[devices]``: who computes on what; off unless devices are dealt by `names`, `shares` or `numbers`."""

    names: list[str] = Field([], description="profiles, dealt to the clients as `assign` says")
    assign: Annotated[Literal["cycle", "blocks", "random"], ActsWith("names")] = Field(
        "cycle", description="names: as in [models]"
    )
    shares: dict[str, Share] = Field({}, description="profile -> share of the clients, which are drawn; not with names")
    numbers: dict[str, str] = Field({}, description="number of a client -> its profile, before names and shares")
    profiles: dict[str, Profile] = Field({}, description="your own; of a built-in one, what is not told stays")
    deadline: Rate | None = Field(
        None, description="seconds that the server waits for uploads, in each passage; what comes later is late"
    )
    unfit: Literal["refuse", "leave out"] = Field(
        "refuse", description="clients whose network does not fit their memory: none are run with, or without them"
    )
    jitter: Finite = Field(
        0.0, description="a factor on a client's times, drawn each round: standard deviation of its logarithm; 0: none"
    )
    server_compute: Rate | None = Field(None, description="FLOP/s of the server; default: its work takes no time")

    @property
    def on(self) -> bool:
        """Whether devices are simulated."""
        return bool(self.names or self.shares or self.numbers)

    def profile(self, name: str) -> Profile:
        """The profile of that name, one's own or built in."""
        return self.profiles[name] if name in self.profiles else BUILT_IN[name]

    def _idle(self) -> set[str]:
        if not self.on:
            return set(type(self).model_fields)
        off = {key for key in ("names", "shares", "numbers", "profiles", "jitter") if not getattr(self, key)}
        return super()._idle() | off

    @field_validator("profiles", mode="before")
    @classmethod
    def _whole_profiles(cls, given: Any) -> Any:
        """What a built-in profile's namesake does not tell is the built-in one's."""
        if not isinstance(given, Mapping):
            return given
        return {
            name: {**BUILT_IN[name].model_dump(), **own} if name in BUILT_IN and isinstance(own, Mapping) else own
            for name, own in given.items()
        }

    @field_validator("shares")
    @classmethod
    def _shares_are_whole(cls, shares: dict[str, float]) -> dict[str, float]:
        if shares and abs(sum(shares.values()) - 1) > 1e-6:
            raise ValueError(f"expected shares that add up to 1, came {sum(shares.values()):g}")
        return shares

    @model_validator(mode="after")
    def _fits_together(self) -> Devices:
        if self.names and self.shares:
            raise ValueError("expected names or shares, came both")
        asked = [name for name in ("profiles", "deadline", "jitter", "server_compute") if getattr(self, name)]
        if not self.on and (asked or self.unfit != "refuse"):
            raise ValueError(
                f"{(asked or ['unfit'])[0]}: expected names, shares or numbers beside it, which say who has which "
                "device, came none"
            )
        for name in (*self.names, *self.shares, *self.numbers.values()):
            if name not in self.profiles and name not in BUILT_IN:
                raise ValueError(f"unknown device '{name}'{nearest(name, [*self.profiles, *BUILT_IN])}")
        for number in self.numbers:
            if not number.isdecimal():
                raise ValueError(f"numbers: expected numbers of clients, came '{number}'")
        return self


def attendance_in_effect(availability: Availability, devices: Devices) -> dict[str, Any]:
    """`[availability]` as a run folder keeps it: `late_by` also says how late those are that miss the deadline."""
    late = {"late_by": availability.late_by} if devices.deadline is not None else {}
    return {**availability.in_effect(), **late}


def check_lateness(availability: Availability, devices: Devices) -> None:
    """Whether anybody can be late by `late_by`.

    Raises:
        RequestError: it was given, and nobody can: nothing arrives late, and there is no deadline to miss.
    """
    default = Availability.model_fields["late_by"].default
    off = not availability.late and "late" not in availability.model_fields_set
    if off and devices.deadline is None and availability.late_by != default:
        raise RequestError(
            f"availability: late_by = {availability.late_by} does nothing beside late = 0.0; set late above 0 or "
            f"devices.deadline, or leave late_by at {default}"
        )


def dealt(devices: Devices, clients: int, seed: int) -> list[str]:
    """The profile's name of each of so many clients; nothing where devices are off.

    Shares become whole numbers of clients by largest remainders, and the seed says which clients these are.

    Raises:
        RequestError: `numbers` names a client that is not there, or nothing says what some client has.

    >>> dealt(Devices(names=["laptop", "gpu"], numbers={"2": "phone-low"}), 4, seed=0)
    ['laptop', 'gpu', 'phone-low', 'gpu']
    """
    if not devices.on:
        return []
    found = dict(enumerate(_by_rule(devices, clients, seed)))
    for number, name in devices.numbers.items():
        if int(number) >= clients:
            raise RequestError(f"devices.numbers: expected clients 0 to {clients - 1}, came {number}")
        found[int(number)] = name
    if missing := [number for number in range(clients) if number not in found]:
        raise RequestError(
            f"devices.numbers: expected a device for each of the {clients} clients, or names or shares for the others, "
            f"came none for {', '.join(map(str, missing))}"
        )
    return [found[number] for number in range(clients)]


def _by_rule(devices: Devices, clients: int, seed: int) -> list[str]:
    """By `names` or `shares`; nothing where neither is given."""
    if devices.shares:
        return _by_shares(devices.shares, clients, seed)
    names: Sequence[str] = devices.names
    if not names:
        return []
    if devices.assign == "blocks":
        return [names[client * len(names) // clients] for client in range(clients)]
    if devices.assign == "random":
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
