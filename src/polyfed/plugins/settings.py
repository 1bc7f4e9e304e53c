"""The settings of the plugins that have no file of their own for them; nothing here needs PyTorch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from polyfed.core.settings import Finite, Positive, Settings, Share
from polyfed.validation.effect import ActsWith

__all__ = ["Adversaries", "Availability", "Compression", "RobustAggregation"]


class Availability(Settings):
    """``[availability]``: who is there, who drops out, what arrives late; all off by default.

    Share of `client_fraction` is drawn of those present. A final round reaches all who are present, in time; what
    would arrive after the last round is lost.
    """

    dropout_rate: Share = Field(0.0, description="probability that a client asked in a round drops out")
    dropout_stage: Annotated[Literal["before", "after"], ActsWith("dropout_rate")] = Field(
        "before", description="before: nothing reaches it; after: it trains and keeps its work, its upload never leaves"
    )
    delay_rate: Share = Field(0.0, description="probability that what a client sends in a round arrives late")
    delay_rounds: Positive = Field(1, description="rounds that it is late by; for methods that accept late uploads")
    late_joiners: Annotated[int, Field(ge=0)] = Field(
        0, description="clients, drawn by the seed, that are absent at first"
    )
    join_round: Annotated[int, Field(ge=2), ActsWith("late_joiners")] = Field(
        2, description="the first round of the late joiners"
    )

    def _inactive_keys(self) -> set[str]:
        off = {key for key in ("dropout_rate", "delay_rate", "late_joiners") if not getattr(self, key)}
        return super()._inactive_keys() | off | ({"delay_rounds"} if not self.delay_rate else set())


class Compression(Settings):
    """``[compression]``: what clients upload, in fewer bytes; off by default.

    See `plugins.compression`.
    """

    dtype: Literal["float32", "float16", "int8"] = Field("float32", description="of the numbers that go up")
    top_k_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="of each tensor's change, the share of entries that goes up: the largest; 1: all"
    )
    error_feedback: Annotated[bool, ActsWith("top_k_fraction", off=1)] = Field(
        True, description="top_k_fraction: what did not go up is added to the next change"
    )

    @property
    def enabled(self) -> bool:
        """Whether anything is compressed."""
        return self.dtype != "float32" or self.top_k_fraction < 1

    def _inactive_keys(self) -> set[str]:
        off = {"dtype": self.dtype == "float32", "top_k_fraction": self.top_k_fraction == 1}
        return super()._inactive_keys() | {key for key, is_off in off.items() if is_off}


class RobustAggregation(Settings):
    """``[robust_aggregation]``: what the server does about uploads that lead astray; all but `max_magnitude` off by
    default.

    See `plugins.robust_aggregation`.
    """

    _place: ClassVar[tuple[str, ...]] = ("robust_aggregation",)

    aggregator: Literal["none", "median", "trimmed_mean", "geometric_median", "multi_krum", "norm_clipping"] = Field(
        "none", description="what takes the place of clients' weights and class means, or whom it leaves out"
    )
    byzantine_fraction: Annotated[
        float, Field(gt=0, lt=0.5), ActsWith("aggregator", ("trimmed_mean", "multi_krum"))
    ] = Field(
        0.2, description="trimmed_mean, multi_krum: of the clients that are supposed to be adversarial, rounded up"
    )
    bucket_size: Annotated[Positive, ActsWith("aggregator", ("median", "trimmed_mean", "geometric_median"))] = Field(
        1,
        description="median, trimmed_mean, geometric_median: center of means of so many clients each; 1: of clients",
    )
    max_update_norm: Finite = Field(
        0.0, description="largest norm of an entry of an upload, of weights the change; above it is refused; 0: none"
    )
    max_magnitude: Finite = Field(
        1e6, description="largest magnitude of a number in an upload; above it is refused; 0: any that is finite"
    )

    def _inactive_keys(self) -> set[str]:
        off = {
            "aggregator": self.aggregator == "none",
            "bucket_size": self.bucket_size == 1,
            "max_update_norm": not self.max_update_norm,
            "max_magnitude": self.max_magnitude == type(self).model_fields["max_magnitude"].default,
        }
        return super()._inactive_keys() | {key for key, is_off in off.items() if is_off}


class Adversaries(Settings):
    """``[adversaries]``: clients that play false, drawn by the seed; none by default.

    See `plugins.adversaries`.
    """

    label_flip_fraction: Share = Field(
        0.0, description="share of the clients, rounded up, that train on labels C - 1 - y"
    )
    sign_flip_fraction: Share = Field(0.0, description="share of the clients, rounded up, that send the opposite")
    inner_product_fraction: Share = Field(
        0.0, description="share of the clients, rounded up, that send the honest ones' mean, negated"
    )
    alie_fraction: Share = Field(
        0.0, description="share of the clients, rounded up, that send the honest ones' mean less a few spreads"
    )
    attack_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        1.0, description="factor of the negated change (sign_flip) or mean (inner_product), of the spreads (alie)"
    )

    def _inactive_keys(self) -> set[str]:
        off = {
            kind
            for kind in ("label_flip_fraction", "sign_flip_fraction", "inner_product_fraction", "alie_fraction")
            if not getattr(self, kind)
        }
        return off | ({"attack_scale"} if self._scales_nothing() else set())

    def _scales_nothing(self) -> bool:
        return not (self.sign_flip_fraction or self.inner_product_fraction or self.alie_fraction)

    @model_validator(mode="after")
    def _scale_is_of_something(self) -> Adversaries:
        kinds = {"sign_flip_fraction", "inner_product_fraction", "alie_fraction"}
        if self.attack_scale != 1 and self._scales_nothing() and not kinds & self.model_fields_set:
            raise ValueError(
                f"attack_scale = {self.attack_scale:g} does nothing without {', '.join(sorted(kinds))}; set one of "
                "them above 0, or leave attack_scale at 1"
            )
        return self
