"""Settings beside the method on the simulated GPU: networks, precision, uploads, resuming, prediction."""

from __future__ import annotations

import gc
import tomllib
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.analysis import FigureOptions, analyze
from polyfed.attacks import attack
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.method import Batch, Context, Method
from polyfed.core.settings import Privacy, Training
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution, Task
from polyfed.errors import RunError, RunInterrupted
from polyfed.methods import FedAvg, FedGH, FedHeNN, FedProto
from polyfed.plugins.settings import Adversaries, Availability, Compression, RobustAggregation
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import CLASSES, all_state, difference, state
from tests.helpers.small_recipe import small_recipe

CLOSE = 1e-5  # of the largest entry
CLOSE_BF16 = 0.1  # the CPU's autocast and CUDA's have other operations in bfloat16
TRAINING = Training(rounds=3, local_epochs=1, batch_size=8, lr=0.1, momentum=0.5)
EXECUTORS = ["serial", "vectorized"]
executors = pytest.mark.parametrize("executor", EXECUTORS)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def ran(method: Method, device: str, training: Training = TRAINING, **options: Any) -> Federation:
    """A run of the conformance kit's clients."""
    kinds = {key: options.pop(key) for key in ("one", "norm") if key in options}
    models = options.pop("models", None)
    return ConformanceKit(method=method, models=models, device=device).world(**kinds).run(method, training, **options)


def compare(method: Method, device: str = "cuda", close: float = CLOSE, **options: Any) -> None:
    """A run on the device comes to that on the CPU."""
    expected = ran(method, "cpu", **options)
    found = ran(method, device, **options)
    assert difference(all_state(expected), all_state(found), close) is None


# networks and precision -----------------------------------------------------------------------------------------------


@executors
def test_batchnorm(executor: str) -> None:
    compare(FedAvg(), one=True, norm=True, executor=executor)


@executors
def test_several_architectures(executor: str) -> None:
    compare(FedHeNN(), executor=executor)


@executors
def test_dropout(executor: str) -> None:
    """A GPU draws other masks than a CPU; here both draw alike, one after the other as well as together."""
    compare(FedAvg(), models=[dropping], one=True, executor=executor)


@executors
def test_bf16(executor: str) -> None:
    compare(FedAvg(), one=True, precision="bf16", executor=executor, close=CLOSE_BF16)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@executors
def test_optimizers(executor: str, optimizer: str) -> None:
    training = TRAINING.model_copy(update={"optimizer": optimizer, "momentum": 0.0, "lr": 0.01})
    compare(FedAvg(), one=True, training=training, executor=executor)


@executors
def test_the_second_device(executor: str) -> None:
    compare(FedGH(), device="cuda:1", executor=executor)


@executors
def test_no_float64(executor: str) -> None:
    with gpu.without_float64():
        compare(FedGH(), executor=executor)


# what is done to uploads ----------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "clipped and noised": {"privacy": Privacy(upload_clip_norm=1.0, upload_noise_multiplier=0.5)},
    "gradients bounded row by row": {"privacy": Privacy(max_grad_norm=1.0, noise_multiplier=0.5)},
    "int8": {"compression": Compression(dtype="int8")},
    "top k": {"compression": Compression(top_k_fraction=0.2)},
    "median": {"robust_aggregation": RobustAggregation(aggregator="median")},
    "multi-krum": {"robust_aggregation": RobustAggregation(aggregator="multi_krum")},
    "attacked": {"adversaries": Adversaries(alie_fraction=0.2, label_flip_fraction=0.2)},
    "unreliable": {"availability": Availability(dropout_rate=0.3, late_joiners=1)},
}


@executors
@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_done_to_uploads(settings: str, executor: str) -> None:
    compare(FedAvg(), one=True, executor=executor, **SETTINGS[settings])
    if settings in ("multi-krum", "attacked"):
        compare(FedProto(), executor=executor, **SETTINGS[settings])


# resuming, exporting, predicting --------------------------------------------------------------------------------------


class Stop:
    """Presses Ctrl-C after a round."""

    def round(self, record: Any, remaining_seconds: float) -> None:
        raise KeyboardInterrupt


@executors
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda:1")], ids="-".join)
def test_a_run_goes_on_elsewhere(devices: tuple[str, str], executor: str, tmp_path: Path) -> None:
    def federation(device: str, **options: Any) -> Federation:
        among = ConformanceKit(method=FedHeNN(), device=device).world()
        return among.federation(FedHeNN(), TRAINING, executor=executor, **options)

    whole = federation("cpu")
    whole.run()
    folder = tmp_path / "run"
    with pytest.raises(RunInterrupted):
        federation(devices[0], out=folder, checkpoint_every=1, loggers=[Stop()]).run()
    resumed = federation(devices[1], out=folder, checkpoint_every=1)
    resumed.run(resume=True)
    assert difference(all_state(whole), all_state(resumed), CLOSE) is None


def test_networks_come_back_on_the_cpu() -> None:
    found = ran(FedGH(), "cuda")
    model = found.export(0)
    assert {t.device.type for t in model.state_dict().values()} == {"cpu"}
    assert not [name for name, t in state(found).items() if t.is_cuda]


def test_a_recipe_runs_and_its_models_predict(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(small_recipe(), encoding="utf-8")
    for device in ("cpu", "cuda"):
        pf.run(Recipe.load(recipe), out=tmp_path / device, device=device)
    x = torch.arange(5 * 64, dtype=torch.uint8).view(5, 1, 8, 8)
    expected = pf.predict(tmp_path / "cpu", 0, x)
    for folder, device in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda:1")):
        found = pf.predict(tmp_path / folder, 0, x, device=device)
        torch.testing.assert_close(found.scores, expected.scores)


@pytest.mark.slow
def test_a_run_is_attacked_analyzed_and_estimated(tmp_path: Path) -> None:
    fedin = {"name": "fedin", "aggregation": "same-shape"}
    made = Recipe.from_dict(tomllib.loads(small_recipe(method=fedin)))
    run = pf.run(made, out=tmp_path / "run", device="cuda").path
    levels = {"images": 1, "noise": [0.0], "steps": 3}
    found = [attack(run, out=tmp_path / device, device=device, **levels)[0] for device in ("cpu", "cuda")]
    scores = [trial.score["psnr"] for one in found for trial in one.trials]
    assert scores[:2] == [pytest.approx(score, rel=1e-3) for score in scores[2:]]
    figures = [
        analyze(run, ["cka"], out=tmp_path / f"figures-{device}", choices=FigureOptions(inputs=10, device=device))
        for device in ("cpu", "cuda")
    ]
    assert len(figures) == 2
    found = pf.check(made, device="cuda")
    assert found.seconds > 0
    assert found.device_nbytes is not None
    assert 0 < found.device_nbytes <= found.nbytes
    assert "of weights, which stay there, and as much again" in str(found)


# what the user hands in -----------------------------------------------------------------------------------------------


def clients(place: str, network: str) -> list[Client]:
    """Two clients whose data lie at `place`, and whose networks at `network`."""
    torch.manual_seed(0)
    rows = torch.randn(20, 36)
    y = torch.arange(20) % 3
    return [
        Client(nn.Linear(36, 3).to(network), (rows.to(place), y.to(place)), test=(rows.to(place), y.to(place)))
        for _ in range(2)
    ]


@executors
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_data_and_networks_may_lie_on_the_device(device: str, executor: str) -> None:
    found = []
    for place in ("cpu", "cuda"):
        workers = 2 if executor == "vectorized" else None
        execution = Execution(executor, workers, device)
        given = Federation(clients(place, place), FedAvg(), TRAINING, task=Task(classes=3), executor=execution)
        given.run()
        found.append(state(given))
    assert difference(*found, CLOSE) is None


class Constant(FedAvg):
    """A user's method that makes a tensor on the CPU."""

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        weights = torch.tensor([1.0, 2.0, 3.0])
        return nn.functional.cross_entropy(model(batch.x), batch.y, weights)


@executors
def test_a_method_that_mixes_devices_is_told_so(executor: str) -> None:
    with pytest.raises(RunError, match=r"client 0 .*training.*same device"):
        ran(Constant(), "cuda", executor=executor)


def test_the_kit_holds_a_method_to_a_device() -> None:
    import polyfed.testing as kit

    asked = ["speaks_in_tensors", "loss_is_pure", "batchnorm", "begins_alike", "reductions", "any_subset"]
    off = kit.Reduction(FedAvg(), FedAvg())
    assert kit.violations(FedAvg(), asked, device="cuda", reductions=[off]) == {}
    found = kit.violations(Constant(), device="cuda")
    assert "same device" in next(iter(found.values()))


@pytest.mark.parametrize(
    ("executor", "room", "said"),
    [
        ("serial", 2_000, "client 0 .*out of memory"),
        ("vectorized", 25_000, "client 0 .*ran out with 6 .*set run.workers below 6"),
    ],
)
def test_memory_that_ends(executor: str, room: int, said: str) -> None:
    given = (
        ConformanceKit(method=FedAvg(), device="cuda").world(one=True).federation(FedAvg(), TRAINING, executor=executor)
    )
    gc.collect()  # what goes later would be room
    with gpu.memory(gpu.counts()["allocated"] + room), pytest.raises(RunError, match=said):
        given.run()
