"""The settings of the plugins that have no file of their own for them; nothing here needs PyTorch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyfed.core.settings import Finite, Positive, Settings, Share
from polyfed.validation.effect import ActsWith

__all__ = ["Availability", "Compression", "Defence", "Hostile"]


class Availability(Settings):
    """``[availability]``: who is there, who drops out, what arrives late; all off by default.

    Share of `participation` is drawn of those present. A closing round reaches all who are present, in time; what
    would arrive after the last round is lost.
    """

    drop: Share = Field(0.0, description="probability that a client asked in a round drops out")
    drop_when: Annotated[Literal["before", "after"], ActsWith("drop")] = Field(
        "before", description="before: nothing reaches it; after: it trains and keeps its work, its upload never leaves"
    )
    late: Share = Field(0.0, description="probability that what a client sends in a round arrives late")
    late_by: Positive = Field(1, description="rounds that it is late by; for methods that accept late uploads")
    joiners: Annotated[int, Field(ge=0)] = Field(0, description="clients, drawn by the seed, that are absent at first")
    join_round: Annotated[int, Field(ge=2), ActsWith("joiners")] = Field(
        2, description="the first round of the joiners"
    )

    def _idle(self) -> set[str]:
        off = {key for key in ("drop", "late", "joiners") if not getattr(self, key)}
        return super()._idle() | off | ({"late_by"} if not self.late else set())


class Compression(Settings):
    """``[compression]``: what clients upload, in fewer bytes; off by default. See `plugins.compression`."""

    precision: Literal["float32", "float16", "int8"] = Field("float32", description="of the numbers that go up")
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="of each tensor's change, the share of entries that goes up: the largest; 1: all"
    )
    feedback: Annotated[bool, ActsWith("share", off=1)] = Field(
        True, description="share: what did not go up is added to the next change"
    )

    @property
    def on(self) -> bool:
        """Whether anything is compressed."""
        return self.precision != "float32" or self.share < 1

    def _idle(self) -> set[str]:
        off = {"precision": self.precision == "float32", "share": self.share == 1}
        return super()._idle() | {key for key, is_off in off.items() if is_off}


class Defence(Settings):
    """``[defence]``: what the server does about uploads that lead astray; all but `largest` off by default.

    See `plugins.robust_aggregation`.
    """

    rule: Literal["none", "median", "trimmed", "geometric", "krum", "clip"] = Field(
        "none", description="what takes the place of clients' weights and class means, or whom it leaves out"
    )
    share: Annotated[float, Field(gt=0, lt=0.5), ActsWith("rule", ("trimmed", "krum"))] = Field(
        0.2, description="trimmed, krum: of the clients that are supposed to be hostile, rounded up"
    )
    bucket: Annotated[Positive, ActsWith("rule", ("median", "trimmed", "geometric"))] = Field(
        1, description="median, trimmed, geometric: the centre is that of means of so many clients each; 1: of clients"
    )
    max_norm: Finite = Field(
        0.0, description="largest norm of an entry of an upload, of weights the change; above it is refused; 0: none"
    )
    largest: Finite = Field(
        1e6, description="largest magnitude of a number in an upload; above it is refused; 0: any that is finite"
    )

    def _idle(self) -> set[str]:
        off = {
            "rule": self.rule == "none",
            "bucket": self.bucket == 1,
            "max_norm": not self.max_norm,
            "largest": self.largest == type(self).model_fields["largest"].default,
        }
        return super()._idle() | {key for key, is_off in off.items() if is_off}


class Hostile(Settings):
    """``[hostile]``: clients that play false, drawn by the seed; none by default. See `plugins.adversaries`."""

    label_flip: Share = Field(0.0, description="share of the clients, rounded up, that train on labels C - 1 - y")
    sign_flip: Share = Field(0.0, description="share of the clients, rounded up, that send the opposite")
    inner_product: Share = Field(
        0.0, description="share of the clients, rounded up, that send the honest ones' mean, negated"
    )
    alie: Share = Field(
        0.0, description="share of the clients, rounded up, that send the honest ones' mean less a few spreads"
    )
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="factor of the negated change (sign_flip) or mean (inner_product), of the spreads (alie)"
    )

    def _idle(self) -> set[str]:
        off = {kind for kind in ("label_flip", "sign_flip", "inner_product", "alie") if not getattr(self, kind)}
        return off | ({"scale"} if self._scales_nothing() else set())

    def _scales_nothing(self) -> bool:
        return not (self.sign_flip or self.inner_product or self.alie)

    @model_validator(mode="after")
    def _scale_is_of_something(self) -> Hostile:
        kinds = {"sign_flip", "inner_product", "alie"}
        if self.scale != 1 and self._scales_nothing() and not kinds & self.model_fields_set:
            raise ValueError(
                f"scale = {self.scale:g} does nothing without {', '.join(sorted(kinds))}; set one of them above 0, or "
                "leave scale at 1"
            )
        return self
