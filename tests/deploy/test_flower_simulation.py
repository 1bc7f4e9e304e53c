"""The executor `flower-sim`: what it does with letters, with an engine in this process in place of Flower and Ray."""

from __future__ import annotations

import importlib.util
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from deploy.nearby import DATA, own_recipe, recipe_of
from deploy.test_served import KERNELS, ONE, told
from polyfed import registry
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.modules import exported
from polyfed.deploy import ray_executor, remote_jobs
from polyfed.deploy.node_registry import Answer
from polyfed.deploy.protocol import Letter, Trouble
from polyfed.engine.federation import Federation, Run
from polyfed.errors import Interrupted, RequestError, RunError
from polyfed.experiments import run as experiment
from polyfed.experiments.build import build_federation
from polyfed.methods import Local

STAGES: Mapping[str, Any] = {"stage": "received", "extra_stages": ["after_local", "personal"], "metrics": ["auc"]}
Fault = Callable[[int, Letter], Answer | None]


class Here:
    """Does what `_Engine` does at once, the last letter first; `fault` may say something else."""

    made: ClassVar[list[Here]] = []
    fault: ClassVar[Fault] = staticmethod(lambda number, letter: None)

    def __init__(self, settings: str, nodes: int, actors: int) -> None:
        self.settings, self.nodes, self.actors, self.ended = settings, nodes, actors, False
        self.answers: list[bytes] = []
        self.most = 0
        Here.made.append(self)

    def send(self, number: int, letter: Letter) -> None:
        (number, travelled) = ray_executor._opened(ray_executor._sealed(number, letter))
        assert isinstance(travelled, Letter)
        answer = Here.fault(number, travelled) or remote_jobs.work(self.settings, travelled)
        self.answers.append(ray_executor._sealed(number, answer))
        self.most = max(self.most, len(self.answers))

    def answer(self) -> tuple[int, Answer]:
        return ray_executor._opened(self.answers.pop())

    def end(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ray_executor, "_Engine", Here)
    monkeypatch.setattr(ray_executor, "expect", lambda *_, **__: None)
    monkeypatch.setattr(remote_jobs, "_DATA", DATA)
    monkeypatch.setattr(Here, "made", [])
    monkeypatch.setattr(Here, "fault", staticmethod(lambda number, letter: None))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield
    assert all(engine.ended for engine in Here.made)


def elsewhere(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.with_run(executor="flower-sim", **changes)


def run(recipe: Recipe, **options: Any) -> Run:
    return build_federation(recipe, data=DATA, **options).run()


def same(found: Run, expected: Run) -> None:
    """Records and models, bit for bit."""
    assert told(found.history) == told(expected.history)
    for number, network in expected.models.items():
        theirs, ours = exported(network), exported(found.models[number])
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedhenn", KERNELS),
        ("scaffold", ONE),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("local", {"data": {"test": "global"}}),
                ("fedavg", ONE),
                (
                    "fedgh",
                    {
                        "evaluation": {
                            "stage": "received",
                            "extra_stages": ["after_local", "personal"],
                            "metrics": ["auc"],
                        }
                    },
                ),
                ("fedmd", {"data": {"holdout": 20}}),
                ("heterofl", ONE),
                ("fml", {"compression": {"precision": "int8"}, "privacy": {"clip": 1.0, "noise": 0.1}}),
            )
        ),
    ],
)
def test_the_numbers_are_those_of_one_process(method: str, options: Mapping[str, Any]) -> None:
    recipe = recipe_of(method, **options)
    same(run(elsewhere(recipe)), run(recipe))


def test_a_method_and_a_network_of_ones_own_are_found_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = own_recipe(tmp_path, "own_simulated")
    expected = run(recipe)
    remote_jobs._recipe.cache_clear()
    monkeypatch.delitem(sys.modules, "own_simulated")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(tmp_path)])
    monkeypatch.setattr(registry, "_added", [])
    same(run(elsewhere(recipe)), expected)


def test_a_run_goes_on_with_another_executor(tmp_path: Path) -> None:
    recipe = recipe_of("fedgh")
    whole = run(recipe)

    def stop(number: int, letter: Letter) -> None:
        if letter.facts["round"] == 2:
            raise KeyboardInterrupt

    Here.fault = staticmethod(stop)
    with pytest.raises(Interrupted, match="interrupted in round 2; 1 whole rounds are kept"):
        experiment.run(elsewhere(recipe), out=tmp_path / "run")
    assert Here.made[0].ended
    resumed = experiment.run(recipe, out=tmp_path / "run", resume=True)
    same(resumed, whole)


@pytest.mark.parametrize("kind", ["label_flip", "sign_flip"])
def test_hostile_clients_are_hostile_there_too(kind: str) -> None:
    recipe = recipe_of("fedavg", **ONE, hostile={kind: 0.4})
    played = run(elsewhere(recipe))
    same(played, run(recipe))
    assert played.history[-1]["train_loss"] != run(recipe_of("fedavg", **ONE)).history[-1]["train_loss"]


def test_work_whose_process_died_is_done_again_by_new_ones() -> None:
    said: list[str] = []

    class Watch:
        def message(self, text: str) -> None:
            said.append(text)

    recipe, dead = recipe_of("fedgh"), list[int]()

    def die(number: int, letter: Letter) -> Answer | None:
        hit = letter.kind == "train" and letter.facts["round"] == 2 and number == 1 and not dead
        dead.extend([number] if hit else [])
        return Trouble("ActorDiedError") if hit else None

    Here.fault = staticmethod(die)
    same(run(elsewhere(recipe), trackers=[Watch()]), run(recipe))
    assert len(Here.made) == 2
    assert said == ["round 2: the process of client 1 died (ActorDiedError); its work is done again"]


def test_who_dies_of_it_twice_has_dropped_out() -> None:
    Here.fault = staticmethod(
        lambda number, letter: Trouble("gone") if (letter.kind, letter.facts["client"]) == ("train", 1) else None
    )
    found = run(elsewhere(recipe_of("fedgh")))
    assert [record["dropped"] for record in found.history] == [[1], [1]]
    Here.fault = staticmethod(lambda number, letter: Trouble("no memory"))
    with pytest.raises(RunError, match="no process of Ray could do the work of any client: no memory"):
        run(elsewhere(recipe_of("fedgh")))


def test_a_method_that_fails_ends_the_run_as_it_would_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, client: Client, message: Any) -> Any:
        if client.id:
            raise ValueError(f"no good at {client.id}")
        return {}

    monkeypatch.setattr("polyfed.methods.FedGH.receive", fail)
    recipe = recipe_of("fedgh")
    with pytest.raises(RunError) as ours:
        run(elsewhere(recipe))
    with pytest.raises(RunError) as theirs:
        run(recipe)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("cluster", "workers", "nodes", "actors"), [(False, 1, 2, 1), (True, 2, 2, 2), (True, None, 3, 3)]
)
def test_workers_say_how_many_are_at_work(
    monkeypatch: pytest.MonkeyPatch, cluster: bool, workers: int | None, nodes: int, actors: int
) -> None:
    if cluster:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    found = run(elsewhere(recipe_of("local", training={"rounds": 1}), workers=workers))
    (engine,) = Here.made
    assert (engine.nodes, engine.actors, engine.most) == (nodes, actors, nodes)
    assert found.result["workers"] == actors


def test_where_the_time_went_is_told_here_too() -> None:
    found = run(elsewhere(recipe_of("fedgh"), workers=1), timings=True)
    for record in found.history:
        assert record["timings"]["train"] > 0
        assert record["timings"]["score"] > 0
        assert sum(record["timings"].values()) == pytest.approx(record["seconds"], rel=0.05)


def test_what_cannot_be_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe, network = elsewhere(recipe_of("local")), torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    with pytest.raises(
        RequestError, match="expected a recipe for the executor 'flower-sim', came a federation made in"
    ):
        Federation([Client(network, (torch.rand(8, 4), torch.arange(8) % 2))], Local(), executor="flower-sim")
    monkeypatch.undo()
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else there(name) or object())
    with pytest.raises(RequestError) as caught:
        experiment.run(recipe, out=tmp_path / "run")
    line = "the executor 'flower-sim' needs the package 'ray'; install it with: pip install 'polyfed[flower-sim]'"
    assert str(caught.value) == line
    assert not (tmp_path / "run").exists()


def test_only_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = build_federation(recipe_of("local"), data=DATA)
    crew: Any = type("Crew", (), {"architectures": federation.architectures, "clients": federation.clients})
    monkeypatch.setattr(federation.architectures, "device", torch.device("meta"))
    with pytest.raises(RequestError, match=r"another executor than 'flower-sim', as .* need device 'cpu', and this"):
        ray_executor.FlowerSim(crew, None, print, {"data": {}})


def test_letters_go_to_nodes_that_are_free() -> None:
    """The relay in the engine's process, with a wire that answers when it is asked the third time."""

    class Wire:
        def __init__(self) -> None:
            self.open: dict[str, tuple[int, Letter]] = {}
            self.seen: list[int] = []
            self.asked = 0

        def nodes(self) -> set[int]:
            return {7, 8}

        def send(self, letters: Any, seconds: float) -> list[str]:
            ((node, letter),) = letters
            assert node not in {other for other, _ in self.open.values()}, "one letter at a time"
            self.seen.append(node)
            self.open[str(len(self.seen))] = (node, letter)
            return [str(len(self.seen))]

        def collect(self, names: Any) -> dict[str, Answer]:
            self.asked += 1
            if self.asked % 3:
                return {}
            name = min(names)
            _, letter = self.open.pop(name)
            return {name: Trouble("gone") if letter.body == b"bad" else letter}

    ours, far = Pipe()
    letters: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    wire: Any = Wire()
    threading.Thread(target=ray_executor._relay, args=(far, letters, wire), daemon=True).start()
    for number, body in enumerate([b"one", b"bad", b"", b"four"]):
        letters.put(ray_executor._sealed(number, Letter("train", {"round": number}, body)))
    found = dict(ray_executor._opened(ours.recv_bytes()) for _ in range(4))
    assert found == {
        0: Letter("train", {"round": 0}, b"one"),
        1: Trouble("gone"),
        2: Letter("train", {"round": 2}, b""),
        3: Letter("train", {"round": 3}, b"four"),
    }
    assert set(wire.seen) == {7, 8}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("flwr") is not None, reason="Flower is there")
def test_an_engine_that_ends_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    engine = ray_executor._Engine(json.dumps({}), 1, 1)
    try:
        with pytest.raises(
            RunError, match=r"Flower's simulation has ended: ModuleNotFoundError: No module named 'flwr"
        ):
            engine.answer()
    finally:
        engine.end()
