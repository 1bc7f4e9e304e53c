"""Epsilon where rows are drawn: two accountants against closed forms, and against each other."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from scipy import optimize, special

from polyfed.core.releases import Release
from polyfed.core.settings import Privacy, Training
from polyfed.engine.accounting import calibrate_noise, compute_epsilon, require_packages
from polyfed.errors import ConfigError
from polyfed.methods import FedIN
from polyfed.testing import ConformanceKit

DELTA = 1e-5


def gaussian(noise: float, epsilon: float) -> float:
    """Delta of one Gaussian mechanism, by SciPy."""
    mu = 1 / noise
    return float(special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * special.ndtr(-mu / 2 - epsilon / mu))


def drawn(noise: float, share: float) -> float:
    """Epsilon of one, about rows drawn with that share: delta = q delta'(ln(1 + (e^epsilon - 1) / q))."""
    return float(
        optimize.brentq(lambda e: share * gaussian(noise, math.log1p(math.expm1(e) / share)) - DELTA, 1e-6, 30.0)
    )


def test_without_the_package_drawn_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    said = r"expected the package 'dp-accounting'.*pip install 'polyfed\[privacy\]'"
    require_packages([Release("features", "sample", 1.0, 8, 8)])  # all rows: exact without it
    with pytest.raises(ConfigError, match=said):
        require_packages([Release("features", "sample", 1.0, 4, 8)])
    method = FedIN(num_pairs=2, feature_clip=1.0, noise_std=1.0)
    with pytest.raises(ConfigError, match=said):
        ConformanceKit(method=method).world().federation(method)


def test_noise_for_a_target_is_the_least() -> None:
    settings = Privacy(max_grad_norm=1.0, target_epsilon=2.0)

    def released(noise: float) -> Any:
        return [[Release("training", "sample", noise, times=t), Release("features", "sample", 4.0)] for t in (1, 5)]

    noise = calibrate_noise(released, settings)
    assert compute_epsilon(released(noise)[1], DELTA) <= 2.0 < compute_epsilon(released(noise * 0.998)[1], DELTA)
    with pytest.raises(ConfigError, match=r"privacy.target_epsilon: expected one that noise can reach, got 0.1"):
        calibrate_noise(released, settings.model_copy(update={"target_epsilon": 0.1}))


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def _package(self) -> None:
        pytest.importorskip("dp_accounting")

    def test_what_a_node_says_of_its_rows_costs_no_minutes(self) -> None:
        """Of 2^31 rows there are so many batches that to compose their losses takes hours."""
        many = [Release("training", "sample", 1.0, 10, 2**31, poisson=True, times=2**31 // 10)]
        assert compute_epsilon(many, DELTA, "pld") == compute_epsilon(many, DELTA, "rdp") > 0
        few = [Release("training", "sample", 1.0, 10, 1000, poisson=True, times=100)]
        assert compute_epsilon(few, DELTA, "pld") < compute_epsilon(few, DELTA, "rdp")

    @pytest.mark.parametrize("poisson", [False, True])
    @pytest.mark.parametrize(("noise", "rows"), [(0.5, 300), (1.0, 300), (4.0, 40)])
    def test_of_one_release_losses_are_exact_and_divergences_a_bound(
        self, noise: float, rows: int, poisson: bool
    ) -> None:
        one = [Release("features", "sample", noise, 32, rows, poisson)]
        exact = drawn(noise, 32 / rows)
        assert compute_epsilon(one, DELTA, "pld") == pytest.approx(exact, rel=0.01)
        assert (
            exact
            <= compute_epsilon(one, DELTA, "rdp")
            <= compute_epsilon([Release("features", "sample", noise)], DELTA)
        )

    @pytest.mark.parametrize("poisson", [False, True])
    def test_many_add_up(self, poisson: bool) -> None:
        def of(times: int, by: Any) -> float:
            return compute_epsilon([Release("features", "sample", 1.0, 32, 300, poisson, times)], DELTA, by)

        for by in ("rdp", "pld"):
            assert of(1, by) < of(10, by) < 10 * of(1, by)
        assert of(10, "pld") < of(10, "rdp") < 1.8 * of(10, "pld")

    def test_all_rows_are_as_if_none_were_drawn(self) -> None:
        mixed = [Release("training", "sample", 2.0, times=7), Release("features", "sample", 500.0, 1, 100_000)]
        exact = compute_epsilon(mixed[:1], DELTA)
        assert compute_epsilon(mixed, DELTA, "rdp") == pytest.approx(exact, rel=1e-3)
        assert compute_epsilon(mixed, DELTA, "pld") == pytest.approx(exact, rel=1e-3)

    @pytest.mark.slow
    def test_records_tell_of_pairs_and_a_tighter_accountant(self) -> None:
        method, two = FedIN(num_pairs=2, feature_clip=1.0, noise_std=2.0), Training(rounds=2, batch_size=64)
        found = {}
        for by in ("rdp", "pld"):
            made = ConformanceKit(method=method).world().run(method, two, privacy=Privacy(accountant=by))
            smallest = min(client.n for client in made.clients)
            entry = next(e for e in made.history[0]["releases"] if e["held"] == smallest)
            assert (entry["noise"], entry["drawn"], entry["unit"]) == (1.0, 2, "sample")
            found[by] = made.history[-1]["epsilon"]["sample"]
            expected = Release("features", "sample", 1.0, 2, smallest, times=2)
            assert found[by] == compute_epsilon([expected], DELTA, by)
        assert found["pld"] < found["rdp"]
