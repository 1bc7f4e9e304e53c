"""The read-only settings that every client and the engine see: how to train, how to score."""

from __future__ import annotations

import itertools
import math
import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from polyfed.validation.effect import ActsWith
from polyfed.validation.settings import Settings as Settings

Stage = Literal["received", "after_training", "personal"]
Personalization = Literal["tuned", "shares"]
Metric = Literal["balanced_accuracy", "f1", "auc", "calibration_error", "confusion", "mae", "r2"]
Keep = Literal["last", "best", "nothing"]
Positive = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _check_ranks(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*( [1-9]\d*)*", text):
        raise ValueError(f"expected ranks of at least 1, as in '2 4 8'; got '{text}'")
    return text


def _check_shares(text: str) -> str:
    share = r"(0?\.\d+|1(\.0+)?)"
    shares = numbers_in(text) if re.fullmatch(f"{share}( {share})*", text) else []
    falling = all(one > other for one, other in itertools.pairwise(shares))
    if not shares or shares[0] < 1 or shares[-1] <= 0 or not falling:
        raise ValueError(f"expected shares of the network from 1 down, each above 0, as in '1 0.5 0.25'; got '{text}'")
    return text


Ranks = Annotated[str, AfterValidator(_check_ranks)]
Shares = Annotated[str, AfterValidator(_check_shares)]


def numbers_in(text: str) -> list[float]:
    """The numbers in a list of ranks or shares."""
    return [float(number) for number in text.split()]


def in_turn(text: str, client_id: int) -> str:
    """A client's entry of a list of ranks or shares: of L entries client k has the (k mod L + 1)-th.

    So all entries have equally many clients, up to one, and a client keeps its own whichever clients are available.
    """
    entries = text.split()
    return entries[client_id % len(entries)]


class AdapterSettings(Settings):
    """``method.adapters``: clients train adapters and heads of frozen networks; see `core.adapters`."""

    _place: ClassVar[tuple[str, ...]] = ("method", "adapters")

    ranks: Ranks = Field("4", description="given to the clients in turn")
    alpha: AboveZero = Field(16.0, description="an update counts alpha / rank")
    layers: str = Field("", description="last names of the layers with adapters; '': all linear ones but the head")


class Training(Settings):
    """``[training]``: the federation's rounds and each client's local optimization.

    The optimizer is made afresh in every round, as the papers do. Its learning rate is that of `lr_at`.
    """

    _switches: ClassVar[tuple[str, ...]] = ("lr_schedule",)

    rounds: Positive = Field(10, description="rounds of the federation")
    client_fraction: Annotated[float, Field(gt=0, le=1, description="share of the clients drawn each round")] = 1.0
    local_epochs: Positive = Field(1, description="passes over its own rows that a client makes in a round")
    batch_size: Positive = Field(32, description="rows of a batch of local training")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="of local training")
    lr: Finite = Field(0.01, description="learning rate of local training")
    lr_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="how the learning rate changes from round to round; cosine: down to 0"
    )
    momentum: Annotated[float, Field(ge=0, lt=1, description="SGD only; 0 is off")] = 0.0
    weight_decay: Finite = Field(0.0, description="of the optimizer; 0 is off")
    augmentation: str = Field(
        "none",
        description="'none'; of images 'crop' (pad by an eighth of a side, random crop) or 'crop-flip' (and horizontal "
        "flip)",
    )

    def cohort_size(self, clients: int) -> int:
        """How many of so many clients take part in a round: max(1, floor(C N))."""
        return max(1, int(self.client_fraction * clients + 1e-9))  # 0.29 * 100 is 28.999...

    def lr_at(self, round: int, lr: float | None = None) -> float:
        """The learning rate of a round; a final round after the last one has the last one's.

        After p of n rounds: constant lr; cosine lr (1 + cos(pi p / n)) / 2.

        Args:
            round: counted from 1. lr: of a phase that has its own; None: the setting's.

        >>> [round(Training(rounds=2, lr=0.8, lr_schedule="cosine").lr_at(t), 3) for t in range(1, 4)]
        [0.8, 0.4, 0.4]
        """
        rate = self.lr if lr is None else lr
        passed = max(1, min(round, self.rounds)) - 1
        if self.lr_schedule == "cosine":
            return rate * (1 + math.cos(math.pi * passed / self.rounds)) / 2
        return rate

    @model_validator(mode="after")
    def _momentum_is_sgd(self) -> Training:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is SGD's; with optimizer '{self.optimizer}' expected 0, got {self.momentum}")
        return self


class Privacy(Settings):
    """``[privacy]``: bounds and noise on what clients upload, or in how they train; off by default.

    See `plugins.privacy`, `engine.dp_sgd` and, for what epsilon that is, `engine.privacy_ledger`.
    """

    _switches: ClassVar[tuple[str, ...]] = (
        *("upload_clip_norm", "upload_noise_multiplier", "max_grad_norm", "noise_multiplier"),
        *("target_epsilon", "delta"),
    )

    upload_clip_norm: Finite = Field(
        0.0, description="largest L2 norm of each entry of an upload, of weights the change; 0: none"
    )
    upload_noise_multiplier: Finite = Field(
        0.0, description="standard deviation of Gaussian noise on it, over upload_clip_norm; 0: none"
    )
    max_grad_norm: Finite = Field(
        0.0, description="largest L2 norm of each row's gradient in local training (DP-SGD); 0: none, plain training"
    )
    noise_multiplier: Finite = Field(
        0.0,
        description="standard deviation of Gaussian noise, over what a row can change: max_grad_norm, of the sum of a "
        "batch's gradients, or 1, of sums that are sent once (closed-form with unit_features); 0: none",
    )
    sampling: Annotated[Literal["poisson", "shuffled"], ActsWith("max_grad_norm")] = Field(
        "poisson",
        description="max_grad_norm: each row is in a batch by chance, or rows are shuffled, as in plain training",
    )
    target_epsilon: Finite = Field(
        0.0, description="epsilon of all planned rounds that noise is made for, in place of noise given; 0: none"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(1e-5, description="at which epsilon is reported")

    def upload_noise_std(self, entries: int) -> float:
        """Standard deviation, over upload_clip_norm, of the noise on an upload of so many bounded entries.

        It is `upload_noise_multiplier`; where that was made for a target, it is of an upload as a whole.
        """
        return (
            self.upload_noise_multiplier * math.sqrt(entries) if self.target_epsilon else self.upload_noise_multiplier
        )

    @property
    def hides_rows(self) -> bool:
        """Whether noise is to hide what a client's row holds: then nothing without noise may depend on it."""
        of_rows = self.max_grad_norm or not self.upload_clip_norm
        return bool(self.noise_multiplier or (self.target_epsilon and of_rows))

    @property
    def poisson(self) -> bool:
        """Whether batches are made by drawing each row by itself."""
        return self.max_grad_norm > 0 and self.sampling == "poisson"

    @model_validator(mode="after")
    def _noise_is_for_what_is_bounded(self) -> Privacy:
        """But for rows that a method bounds itself (`plugins.privacy`)."""
        if self.upload_noise_multiplier and not self.upload_clip_norm:
            raise ValueError(
                f"upload_noise_multiplier: expected upload_clip_norm above 0 beside it, of which it is a multiple, got "
                f"{self.upload_noise_multiplier:g}"
            )
        for key in ("upload_noise_multiplier", "noise_multiplier"):
            noise = getattr(self, key)
            if noise and self.target_epsilon:
                raise ValueError(
                    f"target_epsilon: expected no noise beside it, as it makes its own, got {key} = {noise:g}"
                )
        return self


class Evaluation(Settings):
    """``[evaluation]``: which model of each client is scored, on whose test data, how often."""

    _switches: ClassVar[tuple[str, ...]] = ("missing_classes", "held_out", "held_out_epochs", "patience")

    stage: Stage | None = Field(
        None, description="which model of each client is scored; default: the one that the method's paper scores"
    )
    weighting: Literal["clients", "samples"] = Field(
        "clients", description="the mean score counts every client alike, or every test row"
    )
    every_n_rounds: Positive = Field(1, description="rounds between evaluations; the last round is always scored")
    extra_stages: list[Stage] = Field(default_factory=list, description="stages that are scored besides")
    metrics: list[Metric] = Field(
        ["balanced_accuracy", "f1"],
        description="recorded beside the accuracy; beside the RMSE of regression always mae and r2",
    )
    missing_classes: bool = Field(
        False,
        description="score clients also on the classes that they have no training rows of, with all clients' test rows",
    )
    held_out: Annotated[int, Field(ge=0)] | Annotated[list[int | str], Field(min_length=1)] = Field(
        0,
        description="clients that never train and are scored as newcomers: how many, drawn; a list of clients' "
        "numbers, or of values of data.group_by",
    )
    held_out_epochs: Annotated[int, Field(ge=0), ActsWith("held_out")] = Field(
        0, description="held_out: also score them after so many local epochs; 0: only as they receive"
    )
    patience: Annotated[int, Field(ge=0)] = Field(
        0,
        description="evaluations without a better validation score of the main stage, then stop; the best round is "
        "then what counts; 0: never",
    )
    min_delta: Annotated[Finite, ActsWith("patience")] = Field(
        0.0,
        description="patience: better means by more than this, accuracies being in [0, 1], RMSE in the target's unit",
    )

    def is_due(self, number: int, rounds: int, is_final: bool) -> bool:
        """Whether clients are scored at the end of round `number` of so many. is_final: of the round after the last."""
        return is_final or number == rounds or number % self.every_n_rounds == 0

    @model_validator(mode="after")
    def _each_is_asked_once(self) -> Self:
        if self.stage in self.extra_stages:
            raise ValueError(
                f"extra_stages: '{self.stage}' does nothing beside stage = '{self.stage}'; name other stages, or leave "
                "out extra_stages"
            )
        for key in ("extra_stages", "metrics", "held_out"):
            names = getattr(self, key) or []
            if isinstance(names, int | str):
                continue
            if len({*names}) < len(names):
                raise ValueError(f"{key}: expected every name once, got one again")
        return self

    def stages(self, scored: Stage) -> list[Stage]:
        """All stages to score, the main one first; `scored` is the method's own."""
        return list(dict.fromkeys([self.stage or scored, *self.extra_stages]))


Settings._sections.update({"training": Training, "evaluation": Evaluation, "privacy": Privacy})
