"""Reconstructions of what a client sent, over noise levels and priors, and how near they are to its images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.attacks.attack_target import AttackTarget, Kind, Target
from polyfed.attacks.feature_inversion import reconstruct
from polyfed.attacks.lpips import Lpips
from polyfed.core.randomness import generator
from polyfed.errors import ConfigError, RunError
from polyfed.functional.image_quality import psnr, ssim
from polyfed.report.text_tables import finite

__all__ = ["AttackConfig", "AttackResult", "ImageQuality", "Reconstruction", "run_attack"]

_ATTACKER = "white box: knows the client's network, its weights and its BatchNorm statistics; knows none of its images"
_AGAINST: dict[Kind, str] = {
    "features": "the image itself",
    "prototypes": "the mean of the client's images of the class",
}
_POINTS = 50  # of a curve


@dataclass(frozen=True)
class AttackConfig:
    """How the attacker goes about it."""

    steps: int
    lr: float
    tv: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"--steps: expected at least 1, got {self.steps}")
        if not 0 < self.lr < 1e30:  # beyond, Adam's own numbers overflow
            raise ConfigError(f"--lr: expected a number above 0 and below 1e30, got {self.lr:g}")
        if not self.tv or not all(0 <= weight < math.inf for weight in self.tv):
            raise ConfigError(f"--tv-weights: expected numbers of at least 0, got {list(self.tv)}")
        if self.seed < 0:
            raise ConfigError(f"--seed: expected at least 0, got {self.seed}")


@dataclass(frozen=True)
class ImageQuality:
    """How near images are to the private ones. Each a number per target.

    psnr [dB], ssim: see `against`. lpips: None where it cannot be had. best_psnr, best_ssim: against the nearest of
    the private images behind the target (for features there is one, and they are the same numbers).
    """

    psnr: tuple[float, ...]
    ssim: tuple[float, ...]
    best_psnr: tuple[float, ...]
    best_ssim: tuple[float, ...]
    lpips: tuple[float, ...] | None = None

    def mean(self, name: str) -> float | None:
        """The mean over targets; None where it is not known, or infinite."""
        values = getattr(self, name)
        return None if values is None else finite(sum(values) / len(values))


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """One reconstruction of all targets.

    source: what it was made from. tv: weight of the prior. noise: level on what was sent. images: (N, C, H, W) in
    [0, 1]. nearest: (N, C, H, W), of the private images behind each target the one that comes nearest to it, by PSNR.
    score: after the last step. loss: (N,) there. psnr_by_step, loss_by_step: means over the targets.
    """

    source: str
    tv: float
    noise: float
    images: Tensor
    nearest: Tensor
    score: ImageQuality
    loss: tuple[float, ...]
    psnr_by_step: tuple[float, ...]
    loss_by_step: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class AttackResult:
    """What came of an attack.

    exposure: who was attacked, and what it sent. settings: of the attacker. against: what PSNR and SSIM are against.
    guess: the score of the mean of all the client's training images, which sees nothing that was sent.
    steps: where the curves have points.
    lpips_missing: why there is no LPIPS; "" where there is.
    """

    exposure: AttackTarget
    settings: AttackConfig
    trials: tuple[Reconstruction, ...]
    guess: ImageQuality
    steps: tuple[int, ...]
    lpips_missing: str

    @property
    def against(self) -> str:
        """What PSNR and SSIM are against."""
        return _AGAINST[self.exposure.kind]

    def to_dict(self) -> dict[str, Any]:
        """`attack.json`, without anything that differs between two equal attacks."""
        seen, run = self.exposure, self.exposure.run
        return {
            "method": run.method,
            "label": run.result.label,
            "hyperparameters": run.result.hyperparameters,
            "dataset": run.result.dataset,
            "run_seed": run.seed,
            "client": seen.model.client,
            "architecture": seen.model.architecture,
            "round": seen.round,
            "kind": seen.kind,
            "sent": seen.rows,
            "noise_of_run": seen.noise_of_run,
            "on_the_way": seen.treated or None,
            "attacker": _ATTACKER,
            "against": self.against,
            **asdict(self.settings),
            "targets": [
                {"class": label, "class_name": name, "images": len(group)}
                for label, name, group in zip(seen.labels, seen.class_names, seen.behind, strict=True)
            ],
            "guess": _scored(self.guess),
            "steps_shown": list(self.steps),
            "results": [
                {
                    "from": trial.source,
                    "tv": trial.tv,
                    "noise": trial.noise,
                    **_scored(trial.score),
                    "loss": list(trial.loss),
                    "psnr_by_step": [finite(value) for value in trial.psnr_by_step],
                    "loss_by_step": list(trial.loss_by_step),
                }
                for trial in self.trials
            ],
            "lpips_missing": self.lpips_missing or None,
        }


def run_attack(exposure: AttackTarget, settings: AttackConfig) -> AttackResult:
    """Attack what a client sent; nothing is written.

    Raises:
        RunError: the loss is not finite.
    """
    shape = tuple(exposure.guess.shape)
    device = str(exposure.guess.device)
    lpips = Lpips(shape, device)
    steps = tuple(sorted({round(settings.steps * k / _POINTS) for k in range(_POINTS + 1)}))
    trials = [trial for sent in exposure.sent for trial in _trials(exposure, sent, settings, steps, lpips)]
    guess = exposure.guess.expand_as(exposure.targets)
    score = _score(guess, exposure.targets, _nearest(guess, exposure), lpips)
    return AttackResult(exposure, settings, tuple(trials), score, steps, lpips.missing)


def _trials(
    exposure: AttackTarget, sent: Target, settings: AttackConfig, steps: Sequence[int], lpips: Lpips
) -> list[Reconstruction]:
    """All reconstructions from one thing sent, made side by side: (tv, noise) in order, N targets each."""
    kinds = list(itertools.product(settings.tv, sent.values))
    count = len(exposure.targets)
    targets = exposure.targets.repeat(len(kinds), 1, 1, 1)
    curves: dict[str, list[list[float]]] = {"psnr": [], "loss": []}

    def watch(step: int, x: Tensor, losses: Tensor) -> None:
        if not bool(torch.isfinite(losses).all()):
            raise RunError(f"the loss is not finite after {step} steps; take a smaller --lr than {settings.lr:g}")
        for name, values in (("psnr", psnr(exposure.to_images(x), targets)), ("loss", losses)):
            curves[name].append(values.view(len(kinds), count).mean(dim=1).tolist())

    x, losses = reconstruct(
        sent.function,
        torch.cat([sent.values[level] for _, level in kinds]),
        _start(exposure, settings.seed).repeat(len(kinds), 1, 1, 1),
        steps=settings.steps,
        lr=settings.lr,
        tv=torch.tensor([weight for weight, _ in kinds], device=targets.device).repeat_interleave(count),
        pixel=exposure.std,
        watched=steps,
        watch=watch,
    )
    trials = []
    for k, (weight, level) in enumerate(kinds):
        rows = slice(k * count, (k + 1) * count)
        made = exposure.to_images(x[rows])
        nearest = _nearest(made, exposure)
        score = _score(made, exposure.targets, nearest, lpips)
        lines = {name: tuple(point[k] for point in points) for name, points in curves.items()}
        loss = tuple(losses[rows].tolist())
        trials.append(
            Reconstruction(sent.name, weight, level, made, nearest, score, loss, lines["psnr"], lines["loss"])
        )
    return trials


def _start(exposure: AttackTarget, seed: int) -> Tensor:
    """(N, C, H, W) standard normal noise, each target's of its own stream."""
    shape = tuple(exposure.guess.shape)
    draws = [generator(seed, "attack", exposure.model.client, number) for number in range(len(exposure.behind))]
    return torch.stack([torch.randn(shape, generator=each) for each in draws]).to(exposure.guess.device)


def _nearest(made: Tensor, exposure: AttackTarget) -> Tensor:
    """For images (N, C, H, W) the nearest, by PSNR, of the private ones behind each target."""
    groups = zip(made, exposure.behind, strict=True)
    return torch.stack([group[int(psnr(one.expand_as(group), group).argmax())] for one, group in groups])


def _score(made: Tensor, targets: Tensor, nearest: Tensor, lpips: Lpips) -> ImageQuality:
    """Images (N, C, H, W) against the targets, and against the nearest of the images behind each."""
    distances = lpips(made, targets)
    return ImageQuality(
        tuple(psnr(made, targets).tolist()),
        tuple(ssim(made, targets).tolist()),
        tuple(psnr(made, nearest).tolist()),
        tuple(ssim(made, nearest).tolist()),
        None if distances is None else tuple(distances),
    )


def _scored(score: ImageQuality) -> dict[str, Any]:
    """Means and single numbers, as JSON takes them."""
    names = ("psnr", "ssim", "best_psnr", "best_ssim", "lpips")
    singles: Mapping[str, Any] = {name: getattr(score, name) for name in names}
    return {
        **{name: score.mean(name) for name in names},
        "per_image": {n: v if v is None else [finite(one) for one in v] for n, v in singles.items()},
    }
