"""The executor `ray`, with actors in this process in place of Ray: its results, and what it does when actors die."""

from __future__ import annotations

import functools
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed import registry
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.modules import export_state
from polyfed.engine.executors import ray_executor
from polyfed.engine.federation import Federation, Run
from polyfed.engine.task import Execution
from polyfed.engine.wire import decode
from polyfed.errors import ConfigError, RunError, RunInterrupted
from polyfed.experiments import build
from polyfed.experiments import run as experiment
from polyfed.experiments.build import build_federation
from polyfed.methods import Local
from tests.deploy.test_server import KERNELS, ONE, SMALL, comparable
from tests.helpers.nearby import DATA, own_recipe, recipe_of
from tests.helpers.other_users import needs_root, open_to_nobody, shared_folder
from tests.helpers.ray_stub import ActorDiedError, RayStub, stand_in
from tests.helpers.told import Told

if sys.platform != "linux":
    pytest.skip("the executor 'ray' needs Linux", allow_module_level=True)

STAGES: Mapping[str, Any] = {"stage": "received", "extra_stages": ["after_training", "personal"], "metrics": ["auc"]}


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayStub]:
    stub = stand_in(monkeypatch)
    yield stub
    assert not stub.is_on, "Ray was left running"
    assert stub.ended >= stub.actors, "actors were left running"


def on_ray(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.with_run(executor="ray", **{"workers": 2, **changes})


def run(recipe: Recipe, **options: Any) -> Run:
    return build_federation(recipe, data=DATA, **options).run()


def same(found: Run, expected: Run) -> None:
    """Records and models, bit for bit."""
    assert comparable(found.history) == comparable(expected.history)
    for number, network in expected.models.items():
        theirs, ours = export_state(network), export_state(found.models[number])
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


# the result of one process ----------------------------------------------------------------------------------------


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedhenn", KERNELS),
        slow("scaffold", ONE),
        ("fedgh", {"evaluation": STAGES}),
        slow(
            "fml",
            {"privacy": {"upload_clip_norm": 1.0, "upload_noise_multiplier": 0.1}},
        ),
        ("fedavg", {**ONE, "adversaries": {"label_flip_fraction": 0.4}}),
        ("fedavg", {**ONE, "adversaries": {"sign_flip_fraction": 0.4}}),
        ("fedproto", {"availability": {"dropout_rate": 0.3, "late_joiners": 1}}),
        slow("local", {"data": {"test": "global"}, "devices": {"profiles": ["laptop", "phone-mid"]}}),
        slow("heterofl", ONE),
        slow("fedmd", {"data": {"holdout": 20}}),
        ("feddf", {"hyperparameters": SMALL["feddf"], "data": {"holdout": 20}}),
    ],
)
def test_the_result_is_that_of_one_process(method: str, options: Mapping[str, Any]) -> None:
    recipe = recipe_of(method, **options)
    same(run(on_ray(recipe)), run(recipe))


def test_a_method_and_a_network_of_ones_own_are_found_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = own_recipe(tmp_path, "own_on_ray")
    expected = run(recipe)
    monkeypatch.delitem(sys.modules, "own_on_ray")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path)])
    monkeypatch.setattr(registry, "added_folders", [])
    same(run(on_ray(recipe)), expected)


def test_a_network_that_learns_from_all_rows_trains_once() -> None:
    recipe = recipe_of("local").with_run(control="pooled")
    same(run(on_ray(recipe)), run(recipe))


def test_a_run_goes_on_with_another_executor(tmp_path: Path, ray: RayStub) -> None:
    recipe = recipe_of("fedgh", training={"rounds": 3})
    whole = run(recipe)

    def stop(name: str, args: tuple[Any, ...]) -> None:
        if name == "answer" and decode(args[0])["round"] == 2:
            raise KeyboardInterrupt

    ray.fault = stop
    with pytest.raises(RunInterrupted, match="interrupted; 1 whole round kept"):
        experiment.run(on_ray(recipe), out=tmp_path / "run")
    assert not ray.is_on
    same(experiment.run(recipe, out=tmp_path / "run", resume=True), whole)


def test_what_crosses_is_bytes(ray: RayStub) -> None:
    run(on_ray(recipe_of("fedgh")))
    assert ray.sent
    assert all(type(each) is bytes for each in ray.sent)


# actors that die --------------------------------------------------------------------------------------------------


def dies(when: Callable[[dict[str, Any]], bool], times: int) -> Callable[[str, tuple[Any, ...]], Exception | None]:
    """A fault: actors die of the first such requests."""
    left = [times]

    def fault(name: str, args: tuple[Any, ...]) -> Exception | None:
        if name != "answer" or not left[0] or not when(decode(args[0])):
            return None
        left[0] -= 1
        return ActorDiedError("its node is gone")

    return fault


def test_work_whose_actor_died_is_done_again_by_another(ray: RayStub) -> None:
    recipe, watch = recipe_of("fedgh"), Told()
    ray.fault = dies(lambda asked: (asked["what"], asked["round"], asked["client"]) == ("TrainJob", 2, 1), 1)
    same(run(on_ray(recipe), loggers=[watch]), run(recipe))
    assert ray.actors == 3
    assert "round 2: the worker of client 1 died (ActorDiedError); its work is done again" in watch.messages


@pytest.mark.parametrize("why", ["no free core", "a lost node"])
def test_where_no_other_begins_in_its_place_the_others_go_on(why: str, ray: RayStub) -> None:
    recipe, watch = recipe_of("fedgh"), Told()
    first = dies(lambda asked: asked["round"] == 2, 1)
    begun: list[str] = []

    def fault(name: str, args: tuple[Any, ...]) -> Exception | None:
        if name == "begin":
            begun.append(name)
            return ActorDiedError("its node is gone") if why == "a lost node" and len(begun) == 3 else None
        error = first(name, args)
        if error is not None:
            ray.without_room = why == "no free core"
        return error

    ray.fault = fault
    same(run(on_ray(recipe), loggers=[watch]), run(recipe))
    assert watch.messages[-1].endswith("in place of it; the run goes on with 1 workers")
    ray.without_room, why, first = False, "no free core", dies(lambda asked: True, 1)
    with pytest.raises(RunError, match="the last of Ray's workers died, and there is no free core for another one"):
        run(on_ray(recipe, workers=1))


# what cannot be ---------------------------------------------------------------------------------------------------


def toy(**options: Any) -> Federation:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    rows = torch.linspace(-1, 1, 32).reshape(8, 4)
    clients = [
        Client(network, (rows + shift, torch.arange(8) % 2), test=(rows, torch.arange(8) % 2)) for shift in (0, 1)
    ]
    return Federation(clients, Local(), executor=Execution(**options))


def rebuild() -> Federation:
    return toy(executor="serial")


def test_a_federation_made_in_python_says_how_it_is_made() -> None:
    found, expected = toy(executor="ray", workers=2, rebuild=rebuild).run(), toy(executor="serial").run()
    assert comparable(found.history) == comparable(expected.history)
    with pytest.raises(ConfigError, match="whose processes make the federation anew, got a federation made in"):
        toy(executor="ray")


def test_what_the_actors_cannot_make_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_data(recipe: str) -> Federation:
        raise ConfigError("no data in /data")

    monkeypatch.setattr(build, "rebuild_federation", without_data)
    with pytest.raises(ConfigError, match="no data in /data"):
        run(on_ray(recipe_of("local")))
    monkeypatch.undo()


def test_machines_with_another_version_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ray_executor.WorkerActor().begin("99.0", torch.__version__, "/", rebuild)
    assert b"expected polyfed 99.0 with PyTorch" in said


def test_on_a_cluster_workers_say_how_many_cores(monkeypatch: pytest.MonkeyPatch, ray: RayStub) -> None:
    recipe = on_ray(recipe_of("local"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"expected workers with RAY_ADDRESS=10.0.0.1:6379: how many of the cluster"):
        build_federation(recipe_of("local").with_run(executor="ray"), data=DATA)
    monkeypatch.setattr(ray_executor, "check_reachable", lambda address: None)
    assert run(recipe).result["workers"] == 2
    assert ray.starts[0]["address"] == "10.0.0.1:6379"
    assert "num_cpus" not in ray.starts[0]
    ray.cpus = 1
    with pytest.raises(ConfigError, match="expected at most 1 workers, as Ray has so many cores here, got 2"):
        run(recipe)
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match="expected RAY_ADDRESS as host:port of a cluster that this machine is of"):
        build_federation(recipe, data=DATA)


def test_a_ray_that_is_there_already_is_left(ray: RayStub) -> None:
    ray.init()
    run(on_ray(recipe_of("local")))
    assert ray.is_on
    assert len(ray.starts) == 1
    ray.shutdown()


def test_ray_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch, ray: RayStub) -> None:
    recipe = on_ray(recipe_of("local"))
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setattr(ray_executor, "cluster_token", functools.cache(lambda: "secret"))
    with pytest.raises(ConfigError, match="expected Ray to be imported first by the executor 'ray'"):
        run(recipe)
    assert ray_executor.cluster_token() == "secret"  # as if the executor had imported Ray
    seen = {}
    start = ray.init

    def init(**settings: Any) -> None:
        seen.update(os.environ)
        start(**settings)

    monkeypatch.setattr(ray, "init", init)
    run(recipe)
    assert (seen["RAY_AUTH_MODE"], seen["RAY_AUTH_TOKEN"], seen["RAY_USAGE_STATS_ENABLED"]) == ("token", "secret", "0")
    assert seen["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"  # the loopback interface alone
    assert "RAY_AUTH_TOKEN" not in os.environ


@needs_root
def test_what_ray_leaves_open_lies_in_a_folder_that_others_do_not_enter(
    ray: RayStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives everybody all rights to its folder, its sockets and its logs."""
    seen = []
    with shared_folder() as shared:
        monkeypatch.setattr(tempfile, "tempdir", str(shared))
        start = ray.init

        def init(**settings: Any) -> None:
            folder = Path(settings["_temp_dir"])
            folder.mkdir()
            folder.chmod(0o777)
            (folder / "socket").touch()
            seen.append(open_to_nobody(folder, folder / "socket", *shared.glob("polyfed-ray-*")))
            start(**settings)

        monkeypatch.setattr(ray, "init", init)
        run(on_ray(recipe_of("local")))
        assert seen == [[]]
        assert list(shared.glob("polyfed-ray-*")) == []


def test_what_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ray: RayStub) -> None:
    recipe = on_ray(recipe_of("local"))

    def fail(**settings: Any) -> None:
        raise ConnectionError("nobody\nanswers")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(RunError, match=r"^Ray did not start: nobody answers$"):
        run(recipe)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS: no cluster at auto: nobody answers$"):
        run(recipe)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=rf"^RAY_ADDRESS: no cluster at 127\.0\.0\.1:{port}: .*[Cc]onnection refused"):
        run(recipe)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        experiment.run(recipe, out=tmp_path / "run")
    assert (
        str(caught.value) == "the executor 'ray' needs the package 'ray'; install it with: pip install 'polyfed[ray]'"
    )
    assert not (tmp_path / "run").exists()
