"""The read-only settings that every client and the engine see: how to train, how to score."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Stage = Literal["received", "after_local", "personal"]
Positive = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """Strict and frozen: an unknown key or a wrong type is an error, never a guess."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Training(Settings):
    """``[training]``: the federation's rounds and each client's local optimisation.

    The optimiser is made afresh in every round, as the papers do.
    """

    rounds: Positive = 10
    participation: Annotated[float, Field(gt=0, le=1, description="share of the clients drawn each round")] = 1.0
    epochs: Positive = 1
    batch_size: Positive = 32
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Finite = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1, description="SGD only; 0 is off")] = 0.0
    weight_decay: Finite = 0.0
    augment: str = Field("none", description="'none' or 'crop-flip' (pad 4, random crop, horizontal flip)")

    def drawn(self, clients: int) -> int:
        """How many of so many clients take part in a round: max(1, floor(C N))."""
        return max(1, int(self.participation * clients + 1e-9))  # 0.29 * 100 is 28.999...

    @model_validator(mode="after")
    def _momentum_is_sgd(self) -> Training:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum is SGD's; with optimizer '{self.optimizer}' expected 0, came {self.momentum}")
        return self


class Evaluation(Settings):
    """``[evaluation]``: which model of each client is scored, on whose test data, how often."""

    stage: Stage | None = Field(None, description="default: the stage that the method's paper scores")
    mean: Literal["clients", "samples"] = "clients"
    every: Positive = 1
    extra_stages: list[Stage] = Field(default_factory=list)

    def stages(self, scored: Stage) -> list[Stage]:
        """All stages to score, the main one first; `scored` is the method's own."""
        return list(dict.fromkeys([self.stage or scored, *self.extra_stages]))
