"""`run.precision`: what a network trains in, and what stays float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import polyfed as pf
from polyfed.config.recipe import Recipe
from polyfed.core.settings import Training
from polyfed.engine.federation import Run
from polyfed.errors import ConfigError
from polyfed.functional.kernel_similarity import kernel_distance
from polyfed.functional.losses import cross_entropy, kl_divergence
from polyfed.models import build


def clients(count: int = 2) -> list[pf.Client]:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(count, 24, 1, 8, 8, generator=draws), torch.randint(3, (count, 24), generator=draws)
    return [pf.Client("digits-cnn1", (x[i], y[i]), (x[i], y[i])) for i in range(count)]


def made(precision: str, executor: str = "serial", out: Path | None = None) -> pf.Federation:
    training = Training(rounds=2, local_epochs=2, batch_size=8, lr=0.1, momentum=0.9)
    return pf.Federation(
        clients(),
        pf.methods.FedAvg(),
        training,
        executor=pf.Execution(executor, precision=precision, workers=2 if executor == "processes" else None),
        out=out,
        builders={"digits-cnn1": lambda: build("digits-cnn1", (1, 8, 8), 3)},
    )


def run(precision: str, executor: str = "serial") -> Run:
    return made(precision, executor).run()


def weights(done: Run) -> dict[str, Tensor]:
    return {f"{i} {name}": t for i, model in done.models.items() for name, t in model.state_dict().items()}


def test_bf16_rounds_and_everything_that_is_kept_stays_float32() -> None:
    full, half = run("float32"), run("bf16")
    assert all(tensor.dtype == torch.float32 for tensor in weights(half).values())
    apart = max(float((a - b).abs().max()) for a, b in zip(weights(full).values(), weights(half).values(), strict=True))
    assert 1e-5 < apart < 0.1
    assert half.history[-1]["train_loss"] == pytest.approx(full.history[-1]["train_loss"], rel=0.05)
    assert half.history[0]["bytes_up"] == full.history[0]["bytes_up"]
    assert (full.result["precision"], half.result["precision"]) == ("float32", "bf16")


def test_each_step_sees_the_weights_of_the_step_before() -> None:
    """Against a loop by hand; rounded weights that outlived a step would show."""
    training = Training(rounds=1, local_epochs=3, batch_size=24, lr=0.5)
    given = build("digits-cnn1", (1, 8, 8), 3)
    x, y = torch.randn(24, 1, 8, 8), torch.arange(24) % 3
    oracle = build("digits-cnn1", (1, 8, 8), 3)
    oracle.load_state_dict(given.state_dict())
    fed = pf.Federation(
        [pf.Client(given, (x, y))], pf.methods.Local(), training, executor=pf.Execution("serial", precision="bf16")
    )
    trained = fed.run().models[0].state_dict()
    for _ in range(3):  # one batch per epoch: its order is only that of a sum
        with torch.autocast("cpu", torch.bfloat16):
            scores = oracle(x)
        grads = torch.autograd.grad(torch.nn.functional.cross_entropy(scores.float(), y), list(oracle.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(oracle.parameters(), grads, strict=True):
                parameter -= 0.5 * grad
    for name, tensor in oracle.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=0.02, atol=2e-3)
    assert not torch.equal(trained["head.weight"], given.state_dict()["head.weight"])


def test_workers_compute_the_same_bits() -> None:
    one, two = weights(run("bf16")), weights(run("bf16", "processes"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_losses_and_kernels_are_not_rounded() -> None:
    draws = torch.Generator().manual_seed(1)
    z, y, w = torch.randn(16, 5, generator=draws).bfloat16(), torch.arange(16) % 5, torch.ones(16)
    target = torch.randn(16, 7, generator=draws)
    with torch.autocast("cpu", torch.bfloat16):
        found = [cross_entropy(z, y, w), kl_divergence(z, z.flip(1), w)]
        found += [kernel_distance(kind, z, target, factor=kind != "procrustes") for kind in ("linear", "rbf")]
    wide = z.float()
    expected = [cross_entropy(wide, y, w), kl_divergence(wide, wide.flip(1), w)]
    expected += [kernel_distance(kind, wide, target, factor=True) for kind in ("linear", "rbf")]
    assert [value.dtype for value in found] == [torch.float32] * 4
    assert [float(value) for value in found] == [float(value) for value in expected]


def test_an_unknown_precision_is_refused() -> None:
    settings = {
        "data": {"dataset": "digits"},
        "models": {"architectures": ["digits-cnn1"]},
        "method": {"name": "local"},
    }
    assert Recipe.from_dict({**settings, "run": {"precision": "bf16"}}).run.precision == "bf16"
    with pytest.raises(ConfigError, match=r"run\.precision.*'float32' or 'bf16'.*'half'"):
        Recipe.from_dict({**settings, "run": {"precision": "half"}})
    with pytest.raises(ConfigError, match="expected the precision 'float32' or 'bf16', got 'half'"):
        run("half")


def test_a_run_is_not_resumed_in_another_precision(tmp_path: Path) -> None:
    made("float32", out=tmp_path / "run").run()
    with pytest.raises(ConfigError, match=r"run\.precision was 'float32', now 'bf16'"):
        made("bf16", out=tmp_path / "run").run(resume=True)
    assert made("float32", out=tmp_path / "run").run(resume=True).result["precision"] == "float32"
