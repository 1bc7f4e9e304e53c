"""Every method on the simulated GPU, one client after the other and as stacks, comes to what it comes to on the CPU."""

from __future__ import annotations

from typing import Any

import gpu
import pytest

from polyfed.core.settings import Evaluation, Training
from polyfed.engine.federation import Federation
from polyfed.registry import METHODS
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, state
from tests.helpers.gentle import gentle
from tests.helpers.quick import others_slow

CLOSE = 1e-5  # of the largest entry
CLOSE_BF16 = 0.1  # of weights and states: CUDA's autocast and the CPU's have other operations in bfloat16
TRAINING = Training(rounds=3, local_epochs=1, batch_size=8, lr=0.1, momentum=0.5)
EVALUATION = Evaluation(every_n_rounds=1, extra_stages=["received", "after_training", "personal"], metrics=["auc"])
EXECUTORS = ["serial", "vectorized"]
FAMILIES = ["fedavg", "fedgh", "fedhenn", "fedkd", "fedrolex"]  # one of each kind


def ran(name: str, device: str, executor: str, training: Training = TRAINING, **kinds: Any) -> Federation:
    """A run of the conformance kit's clients."""
    settings = {key: kinds.pop(key) for key in ("precision",) if key in kinds}
    method = gentle(name)
    among = ConformanceKit(method=method, device=device).world(**kinds)
    return among.run(method, training, evaluation=EVALUATION, executor=executor, **settings)


def compare(name: str, executor: str, device: str = "cuda", **kinds: Any) -> None:
    """A run on the device comes to that on the CPU, and leaves nothing on the device."""
    expected = ran(name, "cpu", executor, **kinds)
    found = ran(name, device, executor, **kinds)
    assert not [key for key, t in all_state(found).items() if t.is_cuda]
    if "precision" in kinds:
        assert difference(state(expected), state(found), CLOSE_BF16) is None
        return
    assert difference(all_state(expected), all_state(found), CLOSE) is None
    for one, other in zip(expected.history, found.history, strict=True):
        if one["train_loss"] is not None:  # somebody trained
            assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
        assert other["accuracy_per_client"] == pytest.approx(one["accuracy_per_client"])


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", others_slow(METHODS, quick=FAMILIES))
def test_plain_networks(name: str, executor: str) -> None:
    compare(name, executor, one=True)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "kinds", [{"one": False}, {"one": True, "norm": True}, {"one": True, "precision": "bf16"}], ids=str
)
@pytest.mark.parametrize("name", METHODS)
def test_other_networks(name: str, kinds: dict[str, Any], executor: str) -> None:
    compare(name, executor, **kinds)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", METHODS)
def test_the_second_of_two_devices(name: str, executor: str) -> None:
    compare(name, executor, device="cuda:1")


@pytest.mark.parametrize("executor", others_slow(EXECUTORS, quick=["serial"]))
@pytest.mark.parametrize("name", others_slow(METHODS, quick=["fedgh"]))
def test_a_device_without_float64(name: str, executor: str) -> None:
    with gpu.without_float64():
        compare(name, executor, one=True)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_masks_that_grow_apart(executor: str) -> None:
    """FedSelect's begin as one number for a whole tensor and grow from the fourth round on."""
    compare("fedselect", executor, one=True, training=TRAINING.model_copy(update={"rounds": 6}))
