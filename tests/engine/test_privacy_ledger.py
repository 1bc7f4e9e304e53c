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
from polyfed.core.settings import Evaluation, Privacy, Training
from polyfed.engine.federation import Federation
from polyfed.engine.privacy_ledger import (
    PrivacyLedger,
    calibrate_noise,
    compute_epsilon,
    from_record,
    group_releases,
    to_record,
)
from polyfed.engine.round import draw_cohort
from polyfed.errors import ConfigError, RunInterrupted
from polyfed.methods import FD, FedAvg, FedIN, FedRep, Local
from polyfed.plugins.settings import Availability
from polyfed.testing import ConformanceKit
from polyfed.testing.fixtures import all_state, difference, records
from tests.helpers.interrupt import Interrupt
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


def test_what_arrives_late_has_left() -> None:
    made = ran(availability=Availability(delay_rate=1.0), **NOISY)
    assert made.history[-1]["epsilon"]["client"] == pytest.approx(by_hand(2.0, 4))


# budgets ----------------------------------------------------------------------------------------------------------


def test_a_run_stops_before_the_round_that_would_exceed_its_budget() -> None:
    whole, budget = ran(**NOISY), by_hand(2.0, 3) + 1e-6
    made = ran(**NOISY, max_epsilon=budget)
    assert records(made)[:2] == records(whole)[:2]
    assert len(made.history) == 3
    assert made.history[-1]["epsilon"]["client"] <= budget
    assert made.history[-1]["evaluated"], "the last round is scored, whenever it comes"
    assert len(ran(**NOISY, max_epsilon=budget - 1e-3).history) == 2
    assert len(ran(**NOISY, max_epsilon=by_hand(2.0, 4) + 1e-6).history) == 4


def test_the_result_tells_epsilon_and_why_it_stopped(tmp_path: Path) -> None:
    made = federation(**NOISY, max_epsilon=by_hand(2.0, 2) + 0.01, out=tmp_path / "run")
    result = made.run().result
    assert (result["stopped_after"], result["stopped_by"], result["final_round"]) == (2, "budget", False)
    assert result["epsilon"] == {"client": pytest.approx(by_hand(2.0, 2))}
    assert result["epsilon_of"] == {"client": ["upload"]}
    again = federation(**NOISY, max_epsilon=by_hand(2.0, 2) + 0.01, out=tmp_path / "run").run(resume=True)
    assert again.result == result
    assert len(again.history) == 2


def test_a_resumed_run_stops_alike(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**NOISY, "max_epsilon": by_hand(2.0, 3) + 1e-6}
    whole = ran(**settings)

    broken = federation(out=tmp_path / "run", **settings)
    broken.loggers.append(Interrupt(2))
    with pytest.raises(RunInterrupted):
        broken.run()
    resumed = federation(out=tmp_path / "run", **settings)
    resumed.run(resume=True)
    assert records(resumed) == records(whole)
    assert difference(all_state(resumed), all_state(whole)) is None


def test_an_unforeseen_round_is_taken_back() -> None:
    """A method that sends two entries from round 3 on spends more than was to be foreseen."""

    class Grows(FedAvg):
        def upload(self, client: Any, trained: Any) -> Any:
            message = super().upload(client, trained)
            return {**message, "more": next(iter(message["model"].values()))} if client.round > 2 else message

    made = ran(Grows(), **NOISY, max_epsilon=by_hand(2.0, 3) + 1e-6)
    assert len(made.history) == 2
    assert made.server.round == 2
    assert (
        difference(all_state(made), all_state(ran(**NOISY, training=FOUR, max_epsilon=by_hand(2.0, 2) + 1e-6))) is None
    )
    seldom = ran(Grows(), **NOISY, max_epsilon=by_hand(2.0, 3) + 1e-6, evaluation=Evaluation(every_n_rounds=4))
    assert [record["evaluated"] for record in seldom.history] == [False, True], "what is kept is what is scored"
    assert seldom.history[1]["accuracy"] == made.history[1]["accuracy"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**NOISY, "max_epsilon": 1.0}, "privacy.max_epsilon: expected at least 1.993, .*, got 1"),
        ({"upload_clip_norm": 1.0, "max_epsilon": 1.0}, "privacy.max_epsilon: expected noise"),
    ],
)
def test_an_impossible_budget_is_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        federation(**settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", others_slow([FedAvg(), FedIN(num_pairs=2), FedRep()], quick=[FedAvg()]))
def test_noise_for_a_target_spends_it_in_all_rounds(method: Any) -> None:
    made = ran(method, upload_clip_norm=1.0, target_epsilon=3.0)
    assert made.history[-1]["epsilon"]["client"] == pytest.approx(3.0, rel=1e-9)
    assert (
        made.facts["privacy"]["upload_noise_multiplier"]
        == made.plugin("privacy budget").settings.upload_noise_multiplier
        == pytest.approx(2.781187, rel=1e-6)
    )


def test_a_target_counts_who_is_drawn() -> None:
    half = Training(rounds=4, batch_size=64, lr=0.1, client_fraction=0.5)
    made = ran(training=half, upload_clip_norm=1.0, target_epsilon=3.0)
    assert made.history[-1]["epsilon"]["client"] == pytest.approx(3.0, rel=1e-9)
    most = max(sum(i in r["clients"] for r in made.history) for i in range(6))
    assert made.plugin("privacy budget").settings.upload_noise_multiplier == pytest.approx(
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


def test_releases_of_several_strengths_are_one() -> None:
    together = sum(one.times / one.noise**2 for one in MIXED) ** -0.5
    assert compute_epsilon(MIXED, 1e-5) == pytest.approx(by_hand(together, 1), rel=1e-6)
    assert compute_epsilon([], 1e-5) == 0.0


def test_a_ledger_reads_on_and_starts_anew() -> None:
    ledger = PrivacyLedger(Privacy(**NOISY, max_epsilon=3.0), lambda _: [Release("upload", "client", 2.0)])
    rounds = [{"releases": to_record({0: MIXED[2:], 1: MIXED[1:2]})}, {"releases": to_record({0: MIXED[2:]})}]
    ledger.update(rounds)
    assert ledger.epsilon() == {"client": pytest.approx(by_hand(0.7, 1))}
    assert ledger.exceeded()
    ledger.update(rounds[:1])
    both = ledger.epsilon({0: MIXED[2:]})
    ledger.update(rounds)
    assert ledger.epsilon() == both
    # 0 as last time, twice; 5, of whom nothing is known, as it is expected, but as many entries as others have had
    more = ledger.predict_next([0, 0, 5])
    assert more == {0: [*MIXED[2:]] * 2, 5: [dataclasses.replace(MIXED[2], noise=0.7)]}


def test_a_budget_is_kept_by_every_unit() -> None:
    ledger = PrivacyLedger(Privacy(**NOISY, max_epsilon=3.0), lambda _: [])
    sample = Release("training", "sample", 0.5)
    assert not ledger.exceeded({0: MIXED[2:]})
    assert ledger.exceeded({0: [*MIXED[2:], sample]})
    assert ledger.epsilon({0: [sample]}).keys() == {"sample"}


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


def test_what_a_node_says_of_its_rows_costs_no_minutes() -> None:
    """Of 2^31 rows there are so many batches that to compose their losses takes hours."""
    many = [Release("training", "sample", 1.0, 10, 2**31, poisson=True, times=2**31 // 10)]
    assert compute_epsilon(many, DELTA, "pld") == compute_epsilon(many, DELTA, "rdp") > 0


@pytest.mark.parametrize(("noise", "rows", "poisson"), [(0.5, 300, False), (4.0, 40, True)])
def test_of_one_release_losses_are_exact_and_divergences_a_bound(noise: float, rows: int, poisson: bool) -> None:
    one = [Release("features", "sample", noise, 32, rows, poisson)]
    exact = drawn(noise, 32 / rows)
    assert compute_epsilon(one, DELTA, "pld") == pytest.approx(exact, rel=0.01)
    assert exact <= compute_epsilon(one, DELTA, "rdp") <= compute_epsilon([Release("features", "sample", noise)], DELTA)


@pytest.mark.parametrize("poisson", [False, True])
def test_many_add_up(poisson: bool) -> None:
    def of(times: int, by: Any) -> float:
        return compute_epsilon([Release("features", "sample", 1.0, 32, 300, poisson, times)], DELTA, by)

    for by in ("rdp", "pld"):
        assert of(1, by) < of(10, by) < 10 * of(1, by)
    assert of(10, "pld") < of(10, "rdp") < 1.8 * of(10, "pld")


def test_all_rows_are_as_if_none_were_drawn() -> None:
    mixed = [Release("training", "sample", 2.0, times=7), Release("features", "sample", 500.0, 1, 100_000)]
    exact = compute_epsilon(mixed[:1], DELTA)
    assert compute_epsilon(mixed, DELTA, "rdp") == pytest.approx(exact, rel=1e-3)
    assert compute_epsilon(mixed, DELTA, "pld") == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
def test_records_tell_of_pairs_and_a_tighter_accountant() -> None:
    method, two = FedIN(num_pairs=2, feature_clip=1.0, noise_std=2.0), Training(rounds=2, batch_size=64)
    found = {}
    for by in ("rdp", "pld"):
        made = ConformanceKit(method=method).world().run(method, two, privacy=Privacy(accountant=by))
        smallest = min(client.n for client in made.clients)
        entry = next(e for e in made.history[0]["releases"] if e["held"] == smallest)
        assert (entry["noise"], entry["drawn"], entry["unit"]) == (1.0, 2, "sample")
        found[by] = made.history[-1]["epsilon"]["sample"]
        assert found[by] == compute_epsilon([Release("features", "sample", 1.0, 2, smallest, times=2)], DELTA, by)
    assert found["pld"] < found["rdp"]
