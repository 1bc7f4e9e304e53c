"""What a CPU cannot show: tensors of two devices that meet, what waits for a GPU, and what is copied to it."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import runpy
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import gpu
import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.cli.app import status
from polyfed.config.recipe import Recipe
from polyfed.core import inference
from polyfed.core.client import Client, to_float
from polyfed.core.message import Message, get_group
from polyfed.core.method import Batch, Context, Method, TrainingResult, follows_device
from polyfed.core.modules import export_state
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Privacy, Training
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors import recorded_step
from polyfed.engine.executors.shared_stacks import run_together
from polyfed.engine.executors.worker_requests import unpack
from polyfed.engine.federation import Federation
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.task import Execution, Task
from polyfed.engine.weight_store import WeightRow
from polyfed.errors import RunError, RunInterrupted
from polyfed.experiments import planned_runs
from polyfed.experiments.build import build_federation
from polyfed.functional import stacked_convolutions
from polyfed.methods import FedAvg
from polyfed.methods.fedhenn import AlignmentData
from polyfed.plugins.settings import Adversaries, Compression, RobustAggregation
from polyfed.registry import METHODS
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import CLASSES, all_state, difference, state, tiny_model, world
from tests.engine.executors.test_agreement import near
from tests.helpers.gentle import gentle
from tests.helpers.interrupt import Interrupt
from tests.helpers.nearby import DATA, recipe_of
from tests.helpers.quick import others_slow
from tests.helpers.ray_stub import stand_in
from tests.helpers.small_recipe import small_recipe

CLOSE = 1e-5  # of the largest entry
TRAINING = Training(rounds=3, local_epochs=1, batch_size=8, lr=0.1, momentum=0.5)
STAGES = Evaluation(every_n_rounds=1, extra_stages=["received", "after_training", "personal"], metrics=["auc"])
FAMILIES = itertools.product(["fedavg", "fedgh", "fedhenn", "fedkd", "fedrolex"], ["vectorized"])  # one of each kind
executors = pytest.mark.parametrize("executor", ["serial", "vectorized"])


@pytest.fixture(autouse=True, scope="module")
def _simulated() -> None:
    """Not on import: pytest also imports this file where it looks for doctests, in the process of other tests."""
    gpu.enable()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: torch.ones(2, device="cuda") + torch.ones(2), "same device"),
        (lambda: torch.ones(2, device="cuda") + torch.ones(2, device="cuda:1"), "same device"),
        (lambda: torch.arange(5)[torch.tensor([1], device="cuda")], "indices should be"),
        (lambda: torch.randperm(4, generator=torch.Generator(), device="cuda"), "'cuda' device type for generator"),
        (lambda: torch.ones(2, device="cuda").numpy(), "can't convert cuda"),
    ],
)
def test_the_simulated_device_refuses_what_a_gpu_refuses(what: Any, message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        what()


# results ----------------------------------------------------------------------------------------------------------


def compare(method: Method, executor: str, device: str = "cuda", kinds: Any = None, **options: Any) -> None:
    """A run on the device gives that of the CPU, and leaves nothing on the device."""
    given = {"evaluation": STAGES, "executor": executor, **options}
    expected, found = (
        ConformanceKit(method=method, device=place).world(**(kinds or {"one": True})).run(method, TRAINING, **given)
        for place in ("cpu", device)
    )
    assert not [key for key, t in all_state(found).items() if t.is_cuda]
    assert difference(all_state(expected), all_state(found), CLOSE) is None
    for one, other in zip(expected.history, found.history, strict=True):
        assert other["accuracy_per_client"] == pytest.approx(one["accuracy_per_client"])


@pytest.mark.parametrize(
    ("name", "executor"),
    others_slow(itertools.product(METHODS, ["serial", "vectorized"]), quick=[*FAMILIES, ("fedgh", "serial")]),
)
def test_every_method(name: str, executor: str) -> None:
    compare(gentle(name), executor)


@pytest.mark.parametrize("form", ["unfolded", "in_turn"])
def test_convolutions_in_other_forms(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU may find them fastest; the CPU's stay grouped."""
    timed: list[str] = []
    monkeypatch.setattr(stacked_convolutions, "is_timed", lambda device: device.type == "cuda")
    monkeypatch.setattr(stacked_convolutions, "_fastest", lambda conv, x, *others: timed.append(x.device.type) or form)
    compare(gentle("fedgh"), "vectorized")
    assert set(timed) == {"cuda"}


@pytest.mark.slow
@executors
@pytest.mark.parametrize("kinds", [{"one": False}, {"one": True, "norm": True}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_other_networks_on_the_second_device(name: str, kinds: dict[str, Any], executor: str) -> None:
    compare(gentle(name), executor, "cuda:1", kinds)


@pytest.mark.slow
@executors
@pytest.mark.parametrize(
    "options",
    [
        {"privacy": Privacy(upload_clip_norm=1.0, upload_noise_multiplier=0.5)},
        {"privacy": Privacy(max_grad_norm=1.0, noise_multiplier=0.5)},
        {"compression": Compression(dtype="int8", top_k_fraction=0.2)},
        {"robust_aggregation": RobustAggregation(aggregator="multi_krum")},
        {"adversaries": Adversaries(alie_fraction=0.2, label_flip_fraction=0.2)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_plugins(options: dict[str, Any], executor: str) -> None:
    compare(FedAvg(), executor, **options)


def test_processes_of_ray_train_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its GPU, which here is one for all; what they send lies in main memory."""
    ray = stand_in(monkeypatch)
    data = {"num_clients": 8, "limit_train": 160}
    recipe = recipe_of("fedgh", models={"architectures": ["digits-cnn1"]}, data=data, training={"rounds": 1})
    expected = build_federation(recipe, data=DATA).run()
    on_gpus = recipe.with_run(executor="ray", workers=2, device="cuda")
    found = build_federation(on_gpus, data=DATA).run()
    asked = [unpack(bytearray(request))[0] for request in ray.sent[::2]]
    assert [len(each["jobs"]) for each in asked if each["what"] == "stack"] == [4, 4]
    for number, network in expected.models.items():
        assert difference(export_state(network), export_state(found.models[number]), CLOSE) is None


@pytest.mark.slow
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")], ids="-".join)
@pytest.mark.parametrize("name", ["fedhenn", "fedopt"])
def test_a_run_goes_on_elsewhere(name: str, devices: tuple[str, str], tmp_path: Path) -> None:
    def federation(device: str, **options: Any) -> Federation:
        method = gentle(name)
        return ConformanceKit(method=method, device=device).world(one=True).federation(method, TRAINING, **options)

    whole = federation("cpu")
    whole.run()
    with pytest.raises(RunInterrupted):
        federation(devices[0], out=tmp_path / "run", checkpoint_every=1, loggers=[Interrupt(1)]).run()
    resumed = federation(devices[1], out=tmp_path / "run", checkpoint_every=1)
    resumed.run(resume=True)
    assert difference(all_state(whole), all_state(resumed), CLOSE) is None


@pytest.mark.slow
def test_models_of_a_recipe_predict_anywhere(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(small_recipe(), encoding="utf-8")
    for device in ("cpu", "cuda"):
        pf.run(Recipe.load(recipe), out=tmp_path / device, device=device)
    x = torch.arange(5 * 64, dtype=torch.uint8).view(5, 1, 8, 8)
    expected = pf.predict(tmp_path / "cpu", 0, x)
    for folder, device in (("cuda", "cpu"), ("cpu", "cuda")):
        torch.testing.assert_close(pf.predict(tmp_path / folder, 0, x, device=device).scores, expected.scores)


@executors
def test_data_and_networks_may_lie_on_the_device(executor: str) -> None:
    found = []
    for place in ("cpu", "cuda"):
        torch.manual_seed(0)
        rows, y = torch.randn(20, 36), torch.arange(20) % 3
        data = (rows.to(place), y.to(place))
        clients = [Client(nn.Linear(36, 3).to(place), data, test=data) for _ in range(2)]
        execution = Execution(executor, 2 if executor == "vectorized" else None, "cuda")
        federation = Federation(clients, FedAvg(), TRAINING, task=Task(classes=3), executor=execution)
        federation.run()
        found.append(state(federation))
    assert difference(*found, CLOSE) is None


class Constant(FedAvg):
    """A user's method that makes a tensor on the CPU."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return nn.functional.cross_entropy(model(batch.x), batch.y, torch.tensor([1.0, 2.0, 3.0]))


@executors
def test_a_method_that_mixes_devices_is_named(executor: str) -> None:
    with pytest.raises(RunError, match=r"client 0 .*training.*same device"):
        compare(Constant(), executor)


class Mixed(FedAvg):
    """A user's method that makes a part of its upload on the CPU."""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {**super().upload(client, trained), "extra": torch.ones(3)}


@executors
def test_an_upload_may_lie_in_two_places(executor: str) -> None:
    compare(Mixed(), executor)


# what a round costs -----------------------------------------------------------------------------------------------

CLIENTS = 20
NETWORK = functools.partial(tiny_model, 1, 4, 6)
MOST = {  # in benchmarks/README.md
    "serial": {"kernels": 3968, "syncs": 41, "h2d": 20, "d2h": 41},
    "vectorized": {"kernels": 262, "syncs": 3, "h2d": 2, "d2h": 3},
}
ON_DEVICE = ["fedavg", "fedmrl", "fednova", "fedopt", "fedrep", "inclusivefl", "incoavg", "lgfedavg", "moon"]
WAITS = {  # whatever the number of clients
    **dict.fromkeys(("closed-form", "fedavg", "fedgh", "fedproto", "fedtgp", "scaffold"), 3),
    **dict.fromkeys(("fedgen", "fedmd"), 5),
    "local-mutual": 2,
}
WAITS_PER_CLIENT = {
    **dict.fromkeys(("feddpa", "fedfomo", "fedkd", "own-plus-common"), 1),
    "fedin": 2,
    "fedhenn": 3,
}
SMALL = {"fedhenn": {"alignment_data": AlignmentData(size=16, batch=8)}}
COPIES_PER_CLIENT = {"fedhenn": 6, "fedfomo": 2, "fedin": 4, "fedkd": 1, "fedproto": 2, "fedtgp": 2}


def counted(
    executor: str,
    rounds: int,
    clients: int = CLIENTS,
    steps: Sequence[int] = (5,),
    method: Method | None = None,
    network: Any = NETWORK,
    **training: Any,
) -> tuple[dict[str, int], Federation]:
    """What is done in so many rounds of clients who take so many steps in turn."""
    method = method or FedAvg(aggregation="same-shape")
    sizes = [8 * steps[place % len(steps)] for place in range(clients)]
    labels = (tuple(range(CLASSES)),) * clients
    among = world([network], public=24, sizes=sizes, labels=labels, device="cuda")
    settings = Training(rounds=rounds, local_epochs=1, batch_size=8, lr=0.1, **training)
    federation = among.federation(method, settings, evaluation=Evaluation(every_n_rounds=1), executor=executor)
    with gpu.counting() as done:
        federation.run()
    return done, federation


def third_round(executor: str, clients: int, method: Method | None = None, network: Any = NETWORK) -> dict[str, int]:
    """What is done in a round when everything that is brought to the device once is there."""
    two, _ = counted(executor, 2, clients, method=method, network=network)
    three, _ = counted(executor, 3, clients, method=method, network=network)
    return {name: three[name] - two[name] for name in three}


@executors
def test_a_round_costs_no_more(executor: str) -> None:
    found = third_round(executor, CLIENTS)
    assert all(found[name] <= most for name, most in MOST[executor].items()), found


@executors
@pytest.mark.parametrize("augmentation", others_slow(["none", "crop-flip"], quick=["crop-flip"]))
def test_a_step_waits_for_nothing_and_copies_nothing(executor: str, augmentation: str) -> None:
    """However many steps there are; what augmentation draws for them reaches the device in one copy."""
    short, _ = counted(executor, 1, clients=4, steps=(2, 3), augmentation=augmentation)
    long, _ = counted(executor, 1, clients=4, steps=(12, 13), augmentation=augmentation)
    assert long["kernels"] > short["kernels"]
    assert (long["syncs"], long["h2d"]) == (short["syncs"], short["h2d"])


def test_a_step_of_a_stack_costs_the_same_for_any_number_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is launched."""
    monkeypatch.setattr(recorded_step, "RECORDS", False)
    few, many = (
        counted("vectorized", 1, clients, steps=(12,))[0]["kernels"]
        - counted("vectorized", 1, clients, steps=(2,))[0]["kernels"]
        for clients in (4, 12)
    )
    assert few == many <= 10 * 37


def test_a_pass_without_gradient_takes_many_rows() -> None:
    network = NETWORK().cuda()
    found = []
    for count in (100, 1000):
        samples = LabeledSamples(torch.zeros(count, 1, 6, 6), torch.zeros(count, dtype=torch.int64))
        with gpu.counting() as done:
            inference.map_batches(network, network, samples, to_float)
        found.append(done["kernels"])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WAITS, *WAITS_PER_CLIENT])
def test_waits_of_methods(name: str) -> None:
    few, many = (third_round("vectorized", clients, METHODS[name](**SMALL.get(name, {}))) for clients in (4, 8))
    assert many["syncs"] - few["syncs"] <= 4 * WAITS_PER_CLIENT.get(name, 0)
    assert many["h2d"] - few["h2d"] <= 4 * COPIES_PER_CLIENT.get(name, 0)
    assert name not in WAITS or few["syncs"] == few["d2h"] == WAITS[name]


@executors
@pytest.mark.parametrize("name", others_slow(ON_DEVICE, quick=["fedavg", "lgfedavg"]))
def test_uploads_and_the_servers_state_stay_on_the_device(name: str, executor: str) -> None:
    """What crosses does not grow with the networks."""
    small, large = (
        third_round(executor, 4, METHODS[name](), functools.partial(tiny_model, 1, width, 6)) for width in (4, 8)
    )
    assert large["h2d_bytes"] == small["h2d_bytes"]
    assert large["d2h_bytes"] == small["d2h_bytes"]


class Faulty(FedAvg):
    """In round 2 something is wrong with client 1's upload, or with what the server does."""

    fault: ClassVar[str] = ""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        message = super().upload(client, trained)
        spoilt = {"nan": math.nan, "large": 1e30}.get(self.fault, 1.0)
        if (client.id, client.round) != (1, 2):
            return message
        return {**message, "model": {name: t * spoilt for name, t in get_group(message, "model").items()}}

    @follows_device
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        super().aggregate(server, uploads)
        if server.round == 2 and self.fault == "raises":
            raise ValueError("on purpose")
        if server.round == 2 and self.fault == "writes":
            get_group(uploads[1], "model")["extractor.conv.weight"].add_(1)


@executors
@pytest.mark.parametrize(("fault", "message"), [("raises", "on purpose"), ("writes", "client 1's upload was written")])
def test_a_round_that_fails_changes_nothing_on_the_device(fault: str, message: str, executor: str) -> None:
    _, expected = counted(executor, 1, 4)
    method = type("Mine", (Faulty,), {"fault": fault})(aggregation="same-shape")
    found = world([NETWORK], public=0, sizes=[40] * 4, labels=(tuple(range(CLASSES)),) * 4, device="cuda").federation(
        method, Training(rounds=2, local_epochs=1, batch_size=8, lr=0.1), executor=executor
    )
    with pytest.raises(RunError, match=message):
        found.run()
    assert found.server.device.type == "cuda"
    assert difference(state(expected), state(found)) is None


@executors
@pytest.mark.parametrize("fault", ["nan", "large"])
def test_an_upload_on_the_device_is_refused_as_in_main_memory(fault: str, executor: str) -> None:
    method = type("Mine", (Faulty,), {"fault": fault})()
    compare(method, executor)
    _, found = counted(executor, 2, 4, method=method)
    assert [refused["client"] for refused in found.history[1]["refused"]] == [1]


@pytest.mark.parametrize(
    ("method", "options"),
    [(FedAvg(), {"availability": pf.Availability(dropout_rate=0.1)}), (METHODS["fedgh"](), {})],
    ids=["a plugin", "a method that works in main memory"],
)
def test_uploads_go_to_main_memory_for(method: Method, options: dict[str, Any]) -> None:
    among = world([NETWORK], public=0, device="cuda")
    assert among.federation(method, TRAINING, executor="serial", **options).server.device.type == "cpu"


@executors
def test_weights_stay_on_the_device_and_stream_where_it_has_no_room(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, held = counted(executor, 2)
    assert all(isinstance(client.weights, WeightRow) and client.weights.bytes.is_cuda for client in held.clients)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    streamed, again = counted(executor, 2)
    assert streamed["h2d_bytes"] > 1.2 * kept["h2d_bytes"]
    assert all(isinstance(client.weights, WeightRow) and client.weights.bytes.is_cpu for client in again.clients)
    assert difference(all_state(held), all_state(again)) is None


# several runs -----------------------------------------------------------------------------------------------------


def kernels_side_by_side(runs: int, steps: int) -> int:
    """Kernels of a round of several runs, whose clients take so many steps."""
    training = Training(rounds=1, batch_size=8, lr=0.1)
    federations = []
    for seed in range(runs):
        among = world([NETWORK], public=24, sizes=[8 * steps] * 4, labels=[(0, 1, 2)] * 4, device="cuda")
        federations.append(among.federation(FedAvg(), training, seed=seed, executor="vectorized"))
    with gpu.counting() as done:
        run_together([one.run for one in federations], 64, torch.device("cuda"))
    return done["kernels"]


def test_a_step_of_several_runs_costs_that_of_one() -> None:
    one, three = (kernels_side_by_side(runs, 12) - kernels_side_by_side(runs, 2) for runs in (1, 3))
    assert one == three > 0


def test_rates_that_differ_are_those_of_runs_alone() -> None:
    def run(lr: float) -> Federation:
        training = Training(rounds=2, batch_size=8, lr=lr, momentum=0.5)
        return (
            ConformanceKit(method=FedAvg(), device="cuda")
            .world(one=True)
            .federation(FedAvg(), training, executor="vectorized")
        )

    rates = (0.1, 0.01, 0.3)
    expected, found = ([run(lr) for lr in rates] for _ in range(2))
    for federation in expected:
        federation.run()
    run_together([federation.run for federation in found], 64, torch.device("cuda"))
    for one, other in zip(expected, found, strict=True):
        assert difference(all_state(one), all_state(other), CLOSE) is None


@pytest.mark.parametrize(
    ("given", "networks", "count"),
    [
        ({}, 1, 32),
        ({"workers": 8}, 1, 2),
        ({"workers": 6}, 2, 3),
        ({"workers": 2}, 1, 1),
        ({"executor": "serial"}, 1, 1),
    ],
)
def test_so_many_runs_fill_a_stack_of_each_network(given: dict[str, Any], networks: int, count: int) -> None:
    run = {"device": "cuda", "executor": "vectorized", **given}
    models = {"architectures": ["digits-cnn1", "digits-cnn2"][:networks]}
    recipe = tomllib.loads(small_recipe(data={"num_clients": 4}, models=models, run=run))
    assert planned_runs.runs_in_a_stack(Recipe.from_dict(recipe), DATA) == count


def test_a_comparison_trains_its_runs_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records are those of runs one after the other, and the command line says what goes side by side."""
    recipe = tmp_path / "recipe.toml"
    data = {"num_clients": 4, "max_train_per_client": 40}
    recipe.write_text(
        small_recipe(data=data, models={"architectures": ["digits-cnn1"]}, training={"rounds": 2}), encoding="utf-8"
    )
    asked = ["compare", str(recipe), "--methods", "local,fedavg", "--seeds", "0,1", "--device", "cuda"]
    together, plain = tmp_path / "together", tmp_path / "plain"
    with gpu.counting() as shared:
        assert status([*asked, "--out", str(together)]) == 0
    monkeypatch.setattr(planned_runs, "runs_in_a_stack", lambda *_: 1)
    with gpu.counting() as apart:
        assert status([*asked, "--out", str(plain)]) == 0
    assert shared["kernels"] < 0.7 * apart["kernels"]
    folders = [path.parent.relative_to(plain) for path in plain.rglob("rounds.jsonl")]
    assert len(folders) == 4
    for folder in folders:
        one, other = (RunFolder(place / folder).records() for place in (plain, together))
        assert all(map(near, one, other))
        assert {path.name for path in (plain / folder).iterdir()} == {
            path.name for path in (together / folder).iterdir()
        }


# the benchmark ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_benchmark_measures_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    words = ["--methods", "fedavg", "--jobs", "lenet:2", "--samples", "12", "--rounds", "2", "--minutes", "10"]
    fewer = ("training.rounds=2", "training.local_epochs=1", "data.max_train_per_client=4")
    words += [word for setting in fewer for word in ("--set", setting)]
    words += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "gpu.json")]
    monkeypatch.setattr(sys, "argv", [str(program), *words])
    runpy.run_path(str(program), run_name="__main__")
    measured = [json.loads(line)["part"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    parts = {"methods", "steps", "precision", "runs"}
    has_data = Path(os.environ.get("POLYFED_DATA", "runs/data"), "cifar10", "test.parquet").exists()
    assert set(measured) == (parts | {"table3"} if has_data else parts)
    runpy.run_path(str(program), run_name="__main__")
    again = [json.loads(line)["part"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert set(again) <= {"table3"}, "what is in the file is not measured again"
