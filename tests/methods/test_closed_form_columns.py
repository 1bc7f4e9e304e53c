"""The closed form of unlike columns, on clinics' files: against NumPy on all rows, and what nobody is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from torch import Tensor

import polyfed as pf
from polyfed import testing
from polyfed.core.client import Client
from polyfed.core.message import State, get_group
from polyfed.deploy.server import serve
from polyfed.engine.federation import Federation
from polyfed.errors import PolyfedError
from polyfed.experiments import prediction
from polyfed.experiments.build import build_federation
from polyfed.experiments.exported_model import export_model
from polyfed.functional.column_moments import THRESHOLDS
from polyfed.methods import ClosedFormColumns
from polyfed.registry import METHODS
from tests.helpers import oracles
from tests.helpers.nearby import Nearby, event_log

COLUMNS = {"north": ["a", "b", "kind"], "south": ["b", "c", "kind"], "west": ["a", "c", "d"]}
FEATURES: dict[str, Any] = {
    "a": {"unit": "m", "names": ["a of west"], "convert": {"cm": 0.01}},
    "b": {},
    "c": {},
    "d": {},
    "kind": {"categories": ["x", "y", "z"]},
}


def drawn(rows: int, seed: int, target: bool = False) -> pd.DataFrame:
    """Rows with all columns, whose label depends on each of them."""
    draws = np.random.default_rng(seed)
    values = draws.normal(size=(rows, 4)) * [1, 2, 3, 4] + [5, 0, -5, 1]
    frame = pd.DataFrame(values, columns=list("abcd")).assign(kind=draws.choice(list("xyz"), rows))
    score = frame.a + frame.b - frame.c / 2 + frame.d / 4 + 2 * (frame.kind == "y") + draws.normal(size=rows)
    return frame.assign(label=score.round(3) if target else (score > 8.5).map({True: "ill", False: "well"}))


def clinics(
    folder: Path, rows: int = 30, columns: dict[str, list[str]] | None = None, target: bool = False
) -> dict[str, pd.DataFrame]:
    """Each clinic's training rows with its own columns, which lie in its folder beside its test rows."""
    found = {}
    for seed, (name, own) in enumerate((columns or COLUMNS).items()):
        (folder / name).mkdir(parents=True)
        found[name] = drawn(rows, seed, target)[[*own, "label"]]
        found[name].to_csv(folder / name / "train.csv", index=False)
        drawn(60, seed + 10, target)[[*own, "label"]].to_csv(folder / name / "test.csv", index=False)
    return found


def recipe(folder: Path, out: Path | None = None, **sections: dict[str, Any]) -> pf.Recipe:
    settings: dict[str, dict[str, Any]] = {
        "data": {
            "dataset": f"clients:{folder}",
            "label_column": "label",
            "split": "official",
            "missing_values": "client_mean",
            "features": FEATURES,
        },
        "models": {"architectures": ["mlp-16-32"]},
        "method": {"name": "closed-form-columns"},
        "training": {"rounds": 1},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    file = folder.with_suffix(".toml") if out is None else out.with_suffix(".toml")
    file.write_text(tomli_w.dumps(settings))
    return pf.Recipe.load(file)


def run(recipe: pf.Recipe, **more: Any) -> Federation:
    federation = build_federation(recipe, **more)
    federation.run()
    return federation


def told(federation: Federation) -> list[State]:
    """What the server has sent each client of the solution."""
    server = federation.server
    return [dict(get_group(federation.method.broadcast(server, i), "solution")) for i in server.clients]


def test_with_all_columns_it_is_the_discriminant_of_all_rows(tmp_path: Path) -> None:
    rows = clinics(tmp_path / "data", 50, {name: ["a", "b", "c"] for name in ("north", "south")})
    federation = run(recipe(tmp_path / "data", method={"shrinkage": 0.2}))
    every = pd.concat(rows.values())
    x = every[["a", "b", "c"]].to_numpy().astype(np.float32).astype(float)
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    phi = np.column_stack([c for j in range(3) for c in (z[:, j], *(np.maximum(z[:, j] - t, 0) for t in THRESHOLDS))])
    y = (every.label == "well").to_numpy().astype(int)
    means = np.stack([phi[y == c].mean(axis=0) for c in range(2)])
    sigma = (phi - means[y]).T @ (phi - means[y]) / len(phi)
    shrunk = 0.8 * sigma + 0.2 * np.trace(sigma) / len(sigma) * np.eye(len(sigma))
    weight = np.linalg.solve(shrunk, (means - means.mean(axis=0)).T)
    for solution in told(federation):
        np.testing.assert_allclose(solution["weight"], weight, rtol=1e-4, atol=1e-4)


def test_a_column_that_one_client_alone_has_is_told_to_nobody(tmp_path: Path) -> None:
    clinics(tmp_path / "data")
    before = told(run(recipe(tmp_path / "data")))
    file = tmp_path / "data" / "west" / "train.csv"
    changed = pd.read_csv(file)
    changed["d"] = changed["d"] ** 2
    changed.to_csv(file, index=False)
    after = told(run(recipe(tmp_path / "data")))
    for name in before[0]:
        assert all(torch.equal(before[i][name], after[i][name]) for i in (0, 1))
    assert not torch.equal(before[2]["weight"], after[2]["weight"])
    assert len(before[0]["fill"]) == 13  # of a, b and kind


def test_the_others_rows_help(tmp_path: Path) -> None:
    many = {f"{name}-{number}": own for name, own in COLUMNS.items() for number in range(10)}
    clinics(tmp_path / "data", 12, many)
    together = run(recipe(tmp_path / "data")).history[-1]["accuracy"]["received"]["mean"]
    alone = run(recipe(tmp_path / "data", method={"alone": True})).history[-1]["accuracy"]["received"]["mean"]
    assert together > alone + 0.03


def test_names_and_units_of_files_change_nothing(tmp_path: Path) -> None:
    clinics(tmp_path / "data")
    before = told(run(recipe(tmp_path / "data")))
    for side in ("train", "test"):
        file = tmp_path / "data" / "west" / f"{side}.csv"
        frame = pd.read_csv(file)
        frame["a"] *= 100
        frame[["d", "a", "c", "label"]].rename(columns={"a": "a of west [cm]"}).to_csv(file, index=False)
    after = told(run(recipe(tmp_path / "data")))
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one["weight"], other["weight"], rtol=1e-4, atol=1e-5)


def test_executors_agree_and_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    clinics(tmp_path / "data")
    serial = run(recipe(tmp_path / "data", run={"executor": "serial"}))
    parallel = run(recipe(tmp_path / "data", run={"executor": "processes", "workers": 2}))
    longer = recipe(tmp_path / "data", training={"rounds": 2})
    run(recipe(tmp_path / "data"), out=tmp_path / "run")
    federation = build_federation(longer, out=tmp_path / "run")
    federation.run(resume=True)
    for other in (parallel, federation):
        for one, same in zip(told(serial), told(other), strict=True):
            assert all(torch.equal(one[name], same[name]) for name in one)


def test_a_server_that_sees_totals_alone_solves_the_same(tmp_path: Path) -> None:
    clinics(tmp_path / "data")
    plain = run(recipe(tmp_path / "data"))
    hidden = run(recipe(tmp_path / "data", secure_sums={"enabled": True, "min_clients": 3}))
    for one, other in zip(told(plain), told(hidden), strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-6)
    assert hidden.history[0]["secure_sums"]["summed"] == [0, 1, 2]


def test_columns_in_units_that_fixed_point_rounds_away_are_refused_by_name(tmp_path: Path) -> None:
    clinics(tmp_path / "data")
    small = {**FEATURES, "a": {"unit": "km", "convert": {"m": 1e-5}, "names": ["a [m]"]}}
    for file in (tmp_path / "data").glob("*/*.csv"):
        file.write_text(file.read_text().replace("a,", "a [m],", 1))
    del small["a"]["names"]
    sections = {"data": {"features": small}, "secure_sums": {"enabled": True, "min_clients": 3}}
    refused = run(recipe(tmp_path / "data", **sections)).history[0]["refused"]
    assert [one["client"] for one in refused] == [0, 2]
    assert all("expected column 'a' in a unit in which values are around" in one["reason"] for one in refused)


def test_the_scale_is_of_all_who_are_there(tmp_path: Path) -> None:
    clinics(tmp_path / "data")
    few = run(recipe(tmp_path / "data", training={"rounds": 1, "client_fraction": 0.4}))
    everybody = run(recipe(tmp_path / "data"))
    for name in ("mean", "std"):
        scales = [get_group(one.server.state, "scale")[name] for one in (few, everybody)]
        assert torch.equal(*scales)


def test_a_newcomer_with_a_third_set_of_columns_gets_its_own_model(tmp_path: Path) -> None:
    clinics(tmp_path / "data", columns={**COLUMNS, "young": ["b", "d"]})
    federation = run(recipe(tmp_path / "data", evaluation={"held_out": ["young"]}))
    found = federation.history[-1]["held_out"]["received"]
    assert found["n"] == 1
    assert found["mean"] > 0.6


@pytest.mark.parametrize("target", [False, True])
def test_prediction_and_export_on_a_new_file_with_missing_values(tmp_path: Path, target: bool) -> None:
    clinics(tmp_path / "data", target=target)
    more: dict[str, Any] = {"task": "regression"} if target else {}
    federation = run(recipe(tmp_path / "data", data=more), out=tmp_path / "run")
    assert np.isfinite(federation.history[-1]["train_loss"] or 0.0)
    new = tmp_path / "new.csv"
    new.write_text("c,a of west [cm],d\n1,200,3\n,500,\n")
    found = prediction.predict(tmp_path / "run", "west", new)
    export_model(tmp_path / "run", "west", tmp_path / "west.pt2")
    program = torch.export.load(tmp_path / "west.pt2").module()
    rows = torch.tensor([[2.0, 1.0, 3.0], [5.0, torch.nan, torch.nan]])
    scores: Tensor = program(rows)
    stated = found.scores if found.model.scale is None else found.model.scale.restored(found.scores)
    torch.testing.assert_close(scores.double(), stated.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sections", [{}, {"secure_sums": {"enabled": True, "min_clients": 3}}])
def test_nodes_with_their_own_files_get_the_models_of_a_simulation(
    tmp_path: Path, sections: dict[str, dict[str, Any]]
) -> None:
    clinics(tmp_path / "data")
    simulated = run(recipe(tmp_path / "data", **sections), out=tmp_path / "run")
    settings = recipe(tmp_path / "data", **sections).to_dict()
    names = ["north", "south", "west"]
    settings["data"] |= {"num_clients": 3, "class_names": ["ill", "well"]}
    del settings["run"]
    configs = {k: {"data": f"csv:{tmp_path / 'data' / name}"} for k, name in enumerate(names)}
    wire = Nearby(pf.Recipe.from_dict(settings), tmp_path, range(3), configs)
    served = serve(wire.recipe, wire, out=tmp_path / "served", deadline=5)
    assert served.history[0]["accuracy_per_client"] == simulated.history[0]["accuracy_per_client"]
    assert served.history[0]["server"] == pytest.approx(simulated.history[0]["server"], rel=1e-3)
    hellos = [line["claims"] for line in event_log(tmp_path / "served") if line["event"] == "hello"]
    assert [hello["columns"] for hello in hellos] == [[0, 1, 4], [1, 2, 4], [0, 2, 3]]
    assert all(not any(hello["mean"]) for hello in hellos)


def test_other_methods_that_take_unlike_columns_and_those_that_do_not(tmp_path: Path) -> None:
    """Numbers alone and as many at each client: shapes are equal, and the columns are not."""
    clinics(tmp_path / "data", columns={"north": ["a", "b"], "south": ["b", "c"]})
    taken = set()
    for name in METHODS:
        try:
            build_federation(recipe(tmp_path / "data", method={"name": name}))
        except PolyfedError:
            continue
        taken.add(name)
    assert taken == {"closed-form-columns", "fd", "fedgh", "fedproto", "fedtgp", "lgfedavg", "local"}


def test_a_client_is_forgotten_by_a_new_run() -> None:
    with pytest.raises(PolyfedError, match="one round of a new run without the client forgets it"):
        ClosedFormColumns().remembered({})


def test_ids_of_words_are_refused() -> None:
    network = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    client = Client(network, (torch.zeros(4, 2, dtype=torch.int64), torch.arange(4) % 2))
    with pytest.raises(PolyfedError, match="expected inputs of numbers, got ids of words"):
        pf.Federation([client], ClosedFormColumns(), pf.Training(rounds=1)).run()


test_conformance = testing.conformance(
    ClosedFormColumns(),
    counted="statistics",
    skip={"missing_upload_is_not_zero": oracles.FEWER_VARY},
)
