"""Epsilon in the records: what uploads with noise add up to, budgets, targets; against SciPy and closed forms."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyfed.core.releases import Release
from polyfed.core.settings import Privacy, Training
from polyfed.engine.federation import Federation
from polyfed.engine.privacy_ledger import (
    PrivacyLedger,
    calibrate_noise,
    compute_epsilon,
    from_record,
    group_releases,
    to_record,
)
from polyfed.engine.round_state import draw_cohort
from polyfed.errors import ConfigError
from polyfed.methods import FD, FedAvg, FedIN, FedRep, Local
from polyfed.plugins.settings import Availability
from polyfed.testing import ConformanceKit
from tests.helpers.quick import others_slow

FOUR = Training(rounds=4, batch_size=64, lr=0.1)
NOISY = {"upload_clip_norm": 1.0, "upload_noise_multiplier": 2.0}


def by_hand(noise: float, times: int, delta: float = 1e-5) -> float:
    """Epsilon of so many Gaussian mechanisms of that noise multiplier: one of noise / sqrt(times), in logarithms."""
    from scipy import optimize, special

    mu = math.sqrt(times) / noise

    def surplus(epsilon: float) -> float:
        first, second = special.ndtr(mu / 2 - epsilon / mu), special.log_ndtr(-mu / 2 - epsilon / mu)
        return float(first - np.exp(epsilon + second)) - delta

    return float(optimize.brentq(surplus, 0.0, 200.0)) if surplus(0.0) > 0 else 0.0


def federation(
    method: Any = None, training: Training = FOUR, *, out: Path | None = None, **settings: Any
) -> Federation:
    method, more = method or FedAvg(), {k: settings.pop(k) for k in ("availability", "evaluation") if k in settings}
    return (
        ConformanceKit(method=method).world().federation(method, training, privacy=Privacy(**settings), out=out, **more)
    )


def ran(method: Any = None, training: Training = FOUR, **settings: Any) -> Federation:
    made = federation(method, training, **settings)
    made.run()
    return made


# what is in the records -------------------------------------------------------------------------------------------


def test_rounds_add_up_to_one_gaussian() -> None:
    made = ran(**NOISY, delta=1e-6)
    for number, record in enumerate(made.history, 1):
        assert record["epsilon"] == {"client": pytest.approx(by_hand(2.0, number, 1e-6), rel=1e-6)}
        assert record["delta"] == 1e-6
        assert [one["clients"] for one in record["releases"]] == [[0, 1, 2, 3, 4, 5]]
    json.dumps(made.history, allow_nan=False)


def test_more_noise_is_less_epsilon_and_clip_alone_has_none() -> None:
    quiet, loud = (
        ran(upload_clip_norm=1.0, upload_noise_multiplier=z).history[-1]["epsilon"]["client"] for z in (1.0, 3.0)
    )
    assert loud < quiet
    assert "epsilon" not in ran(upload_clip_norm=1.0).history[-1]
    assert "epsilon" not in ran(Local(), **NOISY).history[-1]


def test_entries_of_an_upload_share_its_noise() -> None:
    method = FedIN(num_pairs=2)  # weights and pairs: two entries
    (entry,) = ran(method, **NOISY).history[0]["releases"]
    assert entry["noise"] == pytest.approx(2.0 / math.sqrt(2))
    (entry,) = ran(FD(outputs="logits"), **NOISY).history[0]["releases"]
    assert entry["noise"] == 2.0  # labels and counts are no numbers with noise


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_drops_out_has_sent_nothing(when: Any) -> None:
    some = Training(rounds=4, batch_size=64, lr=0.1, client_fraction=0.5)
    made = ran(training=some, availability=Availability(dropout_rate=0.4, dropout_stage=when), **NOISY)
    sent = [
        [i for i in draw_cohort(made.training, made.seed, r["round"], range(6)) if i not in r["dropped"]]
        for r in made.history
    ]  # who takes part is drawn before who drops out
    assert [[*one["releases"][0]["clients"]] if one["releases"] else [] for one in made.history] == sent
    most = max(sum(i in one for one in sent) for i in range(6))
    assert 0 < most < 4
    assert made.history[-1]["epsilon"]["client"] == pytest.approx(by_hand(2.0, most))


# targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", others_slow([FedAvg(), FedIN(num_pairs=2), FedRep()], quick=[FedAvg()]))
def test_noise_for_a_target_spends_it_in_all_rounds(method: Any) -> None:
    made = ran(method, upload_clip_norm=1.0, target_epsilon=3.0)
    assert made.history[-1]["epsilon"]["client"] == pytest.approx(3.0, rel=1e-9)
    assert (
        made.facts["privacy"]["upload_noise_multiplier"]
        == made.plugin("privacy").settings.upload_noise_multiplier
        == pytest.approx(2.781187, rel=1e-6)
    )


def test_a_target_counts_who_is_drawn() -> None:
    half = Training(rounds=4, batch_size=64, lr=0.1, client_fraction=0.5)
    made = ran(training=half, upload_clip_norm=1.0, target_epsilon=3.0)
    assert made.history[-1]["epsilon"]["client"] == pytest.approx(3.0, rel=1e-9)
    most = max(sum(i in r["clients"] for r in made.history) for i in range(6))
    assert made.plugin("privacy").settings.upload_noise_multiplier == pytest.approx(
        2.781187 * math.sqrt(most / 4), rel=1e-6
    )


# the arithmetic ---------------------------------------------------------------------------------------------------

MIXED = [Release("upload", "client", 2.0, times=3), Release("upload", "client", 0.7), Release("upload", "client", 2.0)]


def test_what_is_told_is_read_again() -> None:
    given = {4: MIXED, 2: MIXED[:1], 0: MIXED}
    entries = to_record(given)
    assert [entry["clients"] for entry in entries] == [[0, 4], [0, 4], [2]]
    found = from_record(json.loads(json.dumps(entries)))
    assert {i: group_releases(each) for i, each in found.items()} == {
        i: group_releases(each) for i, each in given.items()
    }


def test_a_ledger_reads_on_and_starts_anew() -> None:
    ledger = PrivacyLedger(DELTA)
    rounds = [{"releases": to_record({0: MIXED[2:], 1: MIXED[1:2]})}, {"releases": to_record({0: MIXED[2:]})}]
    ledger.update(rounds)
    assert ledger.epsilon() == {"client": pytest.approx(by_hand(0.7, 1))}
    ledger.update(rounds[:1])
    both = ledger.epsilon({0: MIXED[2:]})
    ledger.update(rounds)
    assert ledger.epsilon() == both
    assert ledger.epsilon({0: [Release("training", "sample", 0.5)]}).keys() == {"client", "sample"}


def test_releases_of_several_strengths_are_one() -> None:
    together = sum(one.times / one.noise**2 for one in MIXED) ** -0.5
    assert compute_epsilon(MIXED, 1e-5) == pytest.approx(by_hand(together, 1), rel=1e-6)
    assert compute_epsilon([], 1e-5) == 0.0


# rows that are drawn ------------------------------------------------------------------------------------------------

DELTA = 1e-5


def drawn(noise: float, share: float) -> float:
    """Epsilon of one about rows drawn with that share: delta = q delta'(ln(1 + (e^epsilon - 1) / q))."""
    from scipy import optimize, special

    mu = 1 / noise

    def surplus(epsilon: float) -> float:
        whole = math.log1p(math.expm1(epsilon) / share)
        delta = special.ndtr(mu / 2 - whole / mu) - math.exp(whole) * special.ndtr(-mu / 2 - whole / mu)
        return share * float(delta) - DELTA

    return float(optimize.brentq(surplus, 1e-6, 30.0))


def test_without_the_package_noise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"expected the package 'dp-accounting'.*pip install 'polyfed\[privacy\]'"):
        federation(**NOISY)
    federation(upload_clip_norm=1.0)


def test_noise_for_a_target_is_the_least() -> None:
    settings = Privacy(max_grad_norm=1.0, target_epsilon=2.0)

    def released(noise: float) -> Any:
        return [[Release("training", "sample", noise, times=t), Release("features", "sample", 4.0)] for t in (1, 5)]

    noise = calibrate_noise(released, settings)
    assert compute_epsilon(released(noise)[1], DELTA) <= 2.0 < compute_epsilon(released(noise * 0.998)[1], DELTA)
    with pytest.raises(ConfigError, match=r"privacy.target_epsilon: expected one that noise can reach, got 0.1"):
        calibrate_noise(released, settings.model_copy(update={"target_epsilon": 0.1}))


@pytest.mark.parametrize(("noise", "rows", "poisson"), [(0.5, 300, False), (4.0, 40, True)])
def test_of_rows_that_are_drawn_epsilon_is_a_bound(noise: float, rows: int, poisson: bool) -> None:
    one = Release("features", "sample", noise, 32, rows, poisson)
    all_rows = Release("features", "sample", noise)
    assert drawn(noise, 32 / rows) <= compute_epsilon([one], DELTA) <= compute_epsilon([all_rows], DELTA)
    ten = compute_epsilon([dataclasses.replace(one, times=10)], DELTA)
    assert compute_epsilon([one], DELTA) < ten < 10 * compute_epsilon([one], DELTA)
