"""`polyfed audit attack` on a few digits: what is attacked was sent, and what it prints was found."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import polyfed as pf
from polyfed.attacks import reconstruction
from polyfed.attacks.reconstruction import AttackTarget, collect_target, reconstruction_grid, run_attack
from polyfed.cli import app as cli
from polyfed.core.inference import representations
from polyfed.core.message import get_group
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import Prepare
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.functional.class_prototypes import class_means
from polyfed.methods import FedIN
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


Ran = Callable[..., Done]


def exposed(path: Path, client: int = 0, images: int = 2, **options: Any) -> AttackTarget:
    given = {"noise": None, "sources": None, "device": "cpu", **options}
    return collect_target(path, client, images, **given)


def fedin(ran: Ran, sections: Any = None, **hyperparameters: Any) -> Done:
    return ran("fedin", sections, aggregation="same-shape", **hyperparameters)


def sent_by(done: Done, client: int, part: str) -> Tensor:
    pool = get_group(done.federation.server.state, "pool")
    return pool[part][pool["sender"] == client]


# what is attacked is what was sent ----------------------------------------------------------------------------------


PROJECTED = {"projection": "fixed", "projection_channels": 5, "projection_grid": 2, "projection_features": 7}
TRAINING_ALONE = {"noise_std": 0.5, "noise_where": "forward"}


@pytest.mark.parametrize(
    ("hyperparameters", "noise"),
    [({}, 0.0), ({"noise_std": 0.6}, 0.6), (TRAINING_ALONE, 0.0), (PROJECTED, 0.0)],
    ids=["plain", "noisy", "noisy in training alone", "projected"],
)
def test_features_are_those_that_the_server_holds_and_of_the_clients_images(
    ran: Ran, hyperparameters: dict[str, Any], noise: float
) -> None:
    done = fedin(ran, **hyperparameters)
    seen = exposed(done.record.path, 1, 10, sources=["s_in", "s_out"])
    assert (seen.rows, seen.noise_of_run, [sent.name for sent in seen.sent]) == (10, noise, ["s_in", "s_out"])
    assert list(seen.sent[0].values) == [0.0, noise or 0.8]
    assert all(len(images) == 1 for images in seen.behind)
    assert torch.equal(torch.cat(seen.behind), seen.targets)
    x = (seen.targets - seen.mean) / seen.std
    assert torch.allclose(seen.to_images(x), seen.targets, atol=1e-6)
    assert torch.equal(seen.to_images(2 * x), seen.to_images(2 * x).clamp(0, 1))
    for sent in seen.sent:
        assert torch.equal(sent.values[noise], sent_by(done, 1, sent.name).float()), "bit for bit"
        with torch.no_grad():
            assert torch.allclose(sent.function(x), sent.values[0.0], atol=1e-4)
    if hyperparameters is PROJECTED:
        assert [tuple(sent.values[0.0].shape) for sent in seen.sent] == [(10, 5, 5), (10, 7)]


def test_levels_share_their_draw_and_scale_it(ran: Ran) -> None:
    values = exposed(fedin(ran).record.path, 0, 10, noise=[0.0, 0.4, 0.8]).sent[0].values
    one, two = (values[level] - values[0.0] for level in (0.4, 0.8))
    assert float(one.std()) > 0
    assert torch.allclose(2 * one, two, atol=1e-5)


@pytest.mark.parametrize("method", ["fedgh", "fedsaf", "fedtgp"])
def test_prototypes_are_the_class_means_of_representations(ran: Ran, method: str) -> None:
    done = ran(method)
    seen = exposed(done.record.path, 1, 3)
    assert seen.kind == "prototypes"
    data = DataCache().federated(pf.Recipe.load(done.record.path / "recipe.toml")).clients[1].train
    assert isinstance(seen.model.prepare, Prepare)
    labels, means, counts = class_means(representations(seen.model.network, data.x, seen.model.prepare), data.y, 10)
    rarest = counts.argsort(stable=True)[:3]
    assert list(seen.labels) == labels[rarest].tolist()
    assert [len(images) for images in seen.behind] == counts[rarest].tolist()
    (sent,) = seen.sent
    assert torch.allclose(sent.values[0.0], means[rarest], atol=1e-5)
    for label, images, target in zip(seen.labels, seen.behind, seen.targets, strict=True):
        assert torch.equal(images, data.x[data.y == label] / 255)
        assert torch.allclose(target, images.mean(dim=0))
    added = sent.values[0.8] - sent.values[0.0]
    assert 0.5 < float(added.std() / (0.8 * means.std(correction=0))) < 1.5


FEW = {"data": {"max_train_per_client": 6}}


@pytest.mark.parametrize("unit", [False, True])
def test_sums_are_attacked_by_class_means_of_a_map_that_everybody_knows(ran: Ran, unit: bool) -> None:
    seen = exposed(ran("closed-form", FEW, unit_features=unit).record.path, 1, 3)
    assert seen.kind == "prototypes"
    assert seen.is_public
    (sent,) = seen.sent
    for images, value in zip(seen.behind, sent.values[0.0], strict=True):
        phi = sent.function((images - seen.mean) / seen.std)
        assert torch.allclose(phi.mean(dim=0), value, atol=1e-5)


def test_all_rows_of_a_client_are_made_of_its_sums(ran: Ran) -> None:
    seen = exposed(ran("closed-form", FEW).record.path, 0, sources=["rows"])
    assert [len(images) for images in seen.behind] == [1] * 6
    (sent,) = seen.sent
    real = (seen.targets - seen.mean) / seen.std
    assert torch.allclose(sent.function(real.unsqueeze(0)), sent.values[0.0], atol=2e-3)
    mixed = real.roll(1, dims=0)  # of other classes
    assert (sent.function(mixed.unsqueeze(0)) - sent.values[0.0]).abs().max() > 0.1
    result = run_attack(seen, 400)
    (found,) = result.content["results"]
    assert found["psnr"] > result.content["guess"]["psnr"] + 5
    assert "6 of 6 rows. Everybody knows the map." in reconstruction.to_text(result, 200)


def test_noise_of_a_target_is_on_what_is_attacked(ran: Ran) -> None:
    plain, noisy = (
        exposed(ran("closed-form", {**FEW, **privacy}, unit_features=True).record.path, 0).sent[0].values[0.0]
        for privacy in ({}, {"privacy": {"target_epsilon": 10.0}})
    )
    assert (noisy - plain).abs().mean() > 0.1


def test_the_round_is_the_last_in_which_the_client_took_part(ran: Ran) -> None:
    done = fedin(ran, {"training": {"client_fraction": 0.34, "rounds": 4}})
    asked = [json.loads(line)["clients"] for line in (done.record.path / "rounds.jsonl").read_text().splitlines()]
    for client in range(3):
        took = [number for number, clients in enumerate(asked, 1) if client in clients]
        if took:
            assert exposed(done.record.path, client).round == took[-1]
        else:
            with pytest.raises(ConfigError, match=f"client {client} took part in no round"):
                exposed(done.record.path, client)
    last = asked[-1][0]
    assert torch.equal(exposed(done.record.path, last).sent[0].values[0.0], sent_by(done, last, "s_in")[:2])


# what is found ------------------------------------------------------------------------------------------------------


def test_shallow_features_give_digits_away(ran: Ran) -> None:
    """That noise hides them by degrees: test_inversion.py."""
    found = run_attack(exposed(fedin(ran).record.path, 0, 6, noise=[0.0, 0.8]), 150, (0.0,)).content
    plain, noisy = found["results"]
    assert plain["psnr"] > max(25, found["guess"]["psnr"] + 10, noisy["psnr"] + 5)
    assert plain["ssim"] > noisy["ssim"]


def test_numbers_are_computed_from_the_images(ran: Ran) -> None:
    found = run_attack(exposed(ran("fedgh").record.path, 0, 3), 5, (0.0, 0.5))
    told, targets = found.content, found.target.targets.double().numpy()

    def db(one: Any, other: Any) -> float:
        return 10 * math.log10(1 / np.mean((one - other) ** 2))

    assert [(row["from"], row["tv"], row["noise"]) for row in told["results"]] == [
        ("prototypes", weight, level) for weight in (0.0, 0.5) for level in (0.0, 0.8)
    ]
    for row, images in zip(told["results"], found.images, strict=True):
        made = images.double().numpy()
        assert made.min() >= 0
        assert made.max() <= 1
        own = [db(a, b) for a, b in zip(made, targets, strict=True)]
        assert row["per_image"]["psnr"] == pytest.approx(own, rel=1e-4)
        assert row["psnr"] == pytest.approx(np.mean(own), rel=1e-4)
        best = [
            max(db(a, image) for image in images.double().numpy())
            for a, images in zip(made, found.target.behind, strict=True)
        ]
        assert row["per_image"]["best_psnr"] == pytest.approx(best, rel=1e-4)
    guess = found.target.guess.double().numpy()
    assert told["guess"]["psnr"] == pytest.approx(np.mean([db(guess, target) for target in targets]), rel=1e-4)
    assert [target["class"] for target in told["targets"]] == list(found.target.labels)


def test_same_settings_same_numbers_and_every_hyperparameter_bites(ran: Ran) -> None:
    seen = exposed(fedin(ran).record.path)
    base = run_attack(seen, 5, (0.0,)).content
    assert run_attack(exposed(fedin(ran).record.path), 5, (0.0,)).content == base
    for change in ({"steps": 6}, {"tv": (0.5,)}, {"seed": 1}):
        changed = run_attack(seen, **{"steps": 5, "tv": (0.0,), **change}).content  # type: ignore[arg-type]
        assert [row["psnr"] for row in changed["results"]] != [row["psnr"] for row in base["results"]], change
    other = run_attack(exposed(fedin(ran).record.path, client=1), 5, (0.0,)).content
    assert other["results"][0]["psnr"] != base["results"][0]["psnr"]


# the command --------------------------------------------------------------------------------------------------------


def say(*words: str | Path) -> int:
    return cli.status([str(word) for word in words])


def test_the_command_writes_and_tells(ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--images", "2", "--steps", "5", "--noise", "0,0.4", "--out", str(tmp_path / "a")]
    words = ["audit", "attack", str(ran("fedgh").record.path), *options]
    assert say(*words) == 0
    out = capsys.readouterr().out
    names = {"attack.json", "reconstructions.png", "reconstructions.svg"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    assert all(str(tmp_path / "a" / name) in out for name in names)
    told = json.loads((tmp_path / "a" / "attack.json").read_text())
    assert [(row["tv"], row["noise"]) for row in told["results"]] == [(0, 0), (0, 0.4), (1, 0), (1, 0.4)]
    for row in told["results"]:
        assert f"{row['psnr']:.2f}" in out
        assert f"{row['best_psnr']:.2f}" in out
        assert f"{row['ssim']:.3f}" in out
    assert "white box" in told["attacker"]
    assert "White box" in out
    assert f"against {told['against']}" in " ".join(out.split())
    with Image.open(tmp_path / "a" / "reconstructions.png") as picture:
        assert min(picture.size) > 500
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert say(*words) == 2
    assert "already holds an attack; replace it with --overwrite" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}


@pytest.mark.slow
def test_the_grid_has_a_row_for_each_reconstruction(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    means = reconstruction_grid(run_attack(exposed(ran("fedgh").record.path, images=2), 5, (0.0,)))
    assert len(means.axes) == 4 * 2  # the mean, the nearest of the class, two levels
    assert all(axes.get_xlabel().endswith(")") for axes in means.axes[:2])
    done = run_attack(exposed(fedin(ran).record.path, images=3), 5, (0.0, 0.5))
    names = [f"articulated lorry {number}, seen from above" for number in range(3)]
    monkeypatch.setattr(AttackTarget, "class_names", names)
    figure = reconstruction_grid(done)
    assert len(figure.axes) == 5 * 3  # the original, two levels without and with the prior
    assert unreadable(figure) == []
    assert [axes.get_xlabel().replace("\n", " ") for axes in figure.axes[:3]] == names


WRONG = [
    (["--client", "9"], "expected a client whose model is in"),
    (["--images", "11"], "--images: expected at most 10, as client 0 sends 10 pairs, one per image, got 11"),
    (["--images", "0"], "--images: expected at least 1, got 0"),
    (["--noise", "0,-1"], "--noise: expected levels of at least 0"),
    (["--noise", "much"], "expected --noise as numbers with commas between (0,0.8), got 'much'"),
    (["--sources", "s_i"], "--sources: expected what this run uploads (s_in, s_out), got 's_i'; did you mean 's_in'?"),
    (["--steps", "0"], "--steps: expected at least 1, got 0"),
    (["--seed", "-1"], "--seed: expected at least 0, got -1"),
    (["--device", "cuda:99"], "expected a device that is here"),
    (["--out", "RUN"], "expected an empty or new folder for the attack"),
    (["--out", "RUN/recipe.toml"], "where nothing can be written"),
]


def refused(words: list[str], line: str, capsys: pytest.CaptureFixture[str], path: Path) -> None:
    before = sorted(path.rglob("*"))
    assert say("audit", "attack", path, *(word.replace("RUN", str(path)) for word in words)) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert sorted(path.rglob("*")) == before


def test_wrong_options_are_one_line(ran: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    for words, line in WRONG:
        refused(words, line, capsys, fedin(ran).record.path)


def test_a_run_that_has_nothing_to_attack(ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs = "prototypes (closed-form, own-plus-common, fedgh, fedorgp, fedproto, fedsa, fedsaf, fedtgp, protonorm), "
    refused([], needs + "got local", capsys, ran("local").record.path)
    for method in (FedIN(exchange_features=False), FedIN(projection="trained")):
        with pytest.raises(ConfigError, match=f"got {method.name}, which sends none with these settings"):
            reconstruction.exposed_by(method)
    refused(["--sources", "s_in"], "(prototypes), got 's_in'", capsys, ran("fedgh").record.path)
    sums = ran("closed-form", FEW).record.path
    refused(["--sources", "prototypes,rows"], "--sources: expected rows alone", capsys, sums)
    refused(["--sources", "rows", "--noise", "1"], "--noise: expected 0 with --sources rows", capsys, sums)
    refused(["--images", "11"], "as client 0 sends prototypes of ", capsys, ran("fedgh").record.path)
    refused([], "expected the folder of a finished run", capsys, tmp_path)
    (tmp_path / "result.json").write_bytes((fedin(ran).record.path / "result.json").read_bytes())
    refused([], "expected a run that keeps weights, got", capsys, tmp_path)


def test_data_that_have_changed_or_are_no_images(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = fedin(ran).record.path, DataCache.federated

    def other(change: Callable[[LabeledSamples], LabeledSamples]) -> None:
        def changed(self: DataCache, recipe: pf.Recipe) -> Any:
            found = plain(self, recipe)
            clients = [dataclasses.replace(each, train=change(each.train)) for each in found.clients]
            return dataclasses.replace(found, clients=clients)

        monkeypatch.setattr(DataCache, "federated", changed)

    other(lambda train: train.head(30))
    with pytest.raises(ConfigError, match="gives other data now than the run had: client 0"):
        exposed(path)
    other(lambda train: LabeledSamples(train.x.float(), train.y))
    with pytest.raises(ConfigError, match="expected a run on images of bytes"):
        exposed(path)
