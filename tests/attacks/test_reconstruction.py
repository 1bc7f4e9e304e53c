"""Images made again on a few digits: what is attacked was sent, and what is told was found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.attacks.reconstruction import Reconstruction, draw_images, reconstruct
from polyfed.attacks.replay import Replay, Transcript, replay
from tests.attacks.conftest import Done
from tests.helpers.readable import unreadable

RECIPE: dict[str, Any] = {
    "data": {
        "dataset": "digits",
        "num_clients": 3,
        "max_train_per_client": 40,
        "max_test_per_client": 20,
        "holdout": 20,
    },
    "models": {"architectures": ["digits-cnn1", "digits-cnn2"]},
    "method": {"name": "fedin"},
    "training": {"rounds": 1, "batch_size": 10, "lr": 0.05},
    "run": {"executor": "serial"},
}
FEW = {"data": {"max_train_per_client": 6}}
ON_THE_WAY = {
    "privacy": {"upload_clip_norm": 3.0, "upload_noise_multiplier": 0.02},
}
PROJECTED = {"projection": "fixed", "projection_channels": 5, "projection_grid": 2, "projection_features": 7}

Ran = Callable[..., Done]


def heard(done: Done, client: int = 0) -> tuple[Replay, Transcript]:
    run = replay(done.record)
    return run, run.transcripts[client]


def made(done: Done, count: int = 2, steps: int = 5, client: int = 0) -> Reconstruction:
    found, why_not = reconstruct(*heard(done, client), count, steps)
    assert found is not None, why_not
    return found


def fedin(ran: Ran, sections: Any = None, **hyperparameters: Any) -> Done:
    return ran("fedin", sections, aggregation="same-shape", **hyperparameters)


def decibels(one: Tensor, other: Tensor) -> float:
    return 10 * math.log10(1 / np.mean((one.double().numpy() - other.double().numpy()) ** 2))


def test_features_give_digits_away_and_noise_hides_them(ran: Ran) -> None:
    plain, noisy = (made(fedin(ran, noise_level=level), 6, 150).summary for level in (0.0, 0.8))
    assert plain["psnr"] > max(plain["guess_psnr"], noisy["psnr"]) + 2


@pytest.mark.parametrize(
    ("sections", "hyperparameters"),
    [(None, {"noise_level": 0.8}), (ON_THE_WAY, {}), (None, PROJECTED)],
    ids=["noise", "on the way", "projected"],
)
def test_each_feature_is_compared_with_the_image_behind_it(
    ran: Ran, sections: Any, hyperparameters: dict[str, Any]
) -> None:
    """Also where noise, clipping or a projection hide it: the same rows as in the run without them."""
    hidden, plain = made(fedin(ran, sections, **hyperparameters), 4), made(fedin(ran), 4)
    assert torch.equal(hidden.nearest, plain.nearest)
    assert not torch.equal(hidden.images, plain.images)


@pytest.mark.parametrize("method", ["fedgh", "fedproto", "fedtgp"])
def test_class_means_of_the_rarest_classes_are_attacked(ran: Ran, method: str) -> None:
    done = ran(method)
    found = made(done, 3, client=1)
    train = heard(done, 1)[0].federation.clients[1].data.train
    classes, counts = train.y.unique(return_counts=True)
    rarest = classes[counts.argsort(stable=True)[:3]]
    for image, nearest, label in zip(found.images, found.nearest, rarest, strict=True):
        pictures = train.x[train.y == label].float() / 255
        best = max(range(len(pictures)), key=lambda k: decibels(image, pictures[k]))
        assert torch.equal(nearest, pictures[best])
    assert found.summary["images"] == 3
    assert "the extractor is known" in found.what


@pytest.mark.parametrize("unit", [pytest.param(False, marks=pytest.mark.slow), True])
def test_all_rows_of_a_client_are_made_of_its_sums(ran: Ran, unit: bool) -> None:
    found = made(ran("closed-form", FEW, map="random", features=256, unit_features=unit), 1, 300)
    assert found.summary["images"] == 6
    train = (
        heard(ran("closed-form", FEW, map="random", features=256, unit_features=unit))[0]
        .federation.clients[0]
        .data.train
    )
    assert torch.equal(found.nearest, train.x.float() / 255)
    if not unit:
        assert found.summary["psnr"] > found.summary["guess_psnr"] + 5
        sections = {**FEW, "privacy": {"target_epsilon": 10.0}}
        private = made(ran("closed-form", sections, map="random", features=256, unit_features=True), 1, 300)
        assert private.summary["psnr"] < found.summary["psnr"] - 5, "the noise is in what is attacked"


def test_numbers_are_computed_from_the_images(ran: Ran) -> None:
    found = made(ran("fedgh"), 3)
    assert 0 <= float(found.images.min()) <= float(found.images.max()) <= 1
    own = [decibels(image, nearest) for image, nearest in zip(found.images, found.nearest, strict=True)]
    assert found.summary["psnr"] == pytest.approx(np.mean(own), rel=1e-4)
    again = made(ran("fedgh"), 3)
    assert again.summary == found.summary
    assert made(ran("fedgh"), 3, steps=6).summary["psnr"] != found.summary["psnr"]


def test_a_reason_is_given_where_there_is_nothing_to_attack(ran: Ran) -> None:
    rows = {"data": {"max_train_per_client": 40}}
    for done, reason in (
        (ran("local"), "nothing goes up"),
        (ran("fedavg", aggregation="same-shape"), "weights are not inverted"),
        (fedin(ran, exchange_features=False), "weights are not inverted"),
        (ran("closed-form", rows, features=8), "do not determine the rows"),
        (ran("closed-form", {**FEW, "training": {"rounds": 2}}), "holds no sums"),
    ):
        found, why_not = reconstruct(*heard(done), 2, 5)
        assert found is None
        assert reason in str(why_not)


@pytest.mark.slow
def test_the_figure_has_two_lines_of_images_for_each_run(ran: Ran) -> None:
    found = {"fedin with a name of many words and more": made(fedin(ran), 3), "fedgh": made(ran("fedgh"), 2)}
    figure = draw_images(found)
    assert len(figure.axes) == 4 * 3
    assert unreadable(figure) == []
    assert sum(bool(axes.get_images()) for axes in figure.axes) == 2 * 3 + 2 * 2
