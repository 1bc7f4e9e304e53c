"""The result in words: nothing is claimed below three seeds, and of more only what an interval supports."""

from typing import Any

import pytest

from polyfed.report.comparison import compare_runs
from polyfed.report.findings import is_distinguishable
from polyfed.report.run_records import load_runs
from polyfed.report.statistics import Paired


@pytest.fixture
def found(make: Any) -> Any:
    """The sentence of a comparison of these methods' accuracies, seed by seed."""

    def of(**methods: tuple[float, ...]) -> str:
        for method, accuracies in methods.items():
            for seed, accuracy in enumerate(accuracies):
                make(f"{method}-{seed}", method, seed, (accuracy,))
        return compare_runs(load_runs(make.root)).sections[0].finding

    return of


def test_one_seed_or_two_claim_nothing(found: Any) -> None:
    assert found(local=(0.5,), fedgh=(0.625,), fedavg=(0.3,)) == (
        "fedgh leads with 62.50 %, 12.50 points above Local (50.00 %). With one seed nothing can be claimed: it takes "
        "three to tell a difference from chance."
    )


def test_a_difference_on_some_of_locals_seeds_does_not_stand_beside_the_mean_of_all(found: Any) -> None:
    said = found(local=(0.5, 0.1), fedgh=(0.625,))
    assert said.startswith(
        "fedgh leads with 62.50 %, 12.50 points above Local on the seeds that both have. With one seed"
    )


def test_two_seeds_claim_nothing_however_clear_they_look(found: Any) -> None:
    said = found(local=(0.5, 0.5), fedgh=(0.9, 0.9))
    assert said.endswith("With two seeds nothing can be claimed: it takes three to tell a difference from chance.")
    assert "distinguishable" not in said


def test_three_seeds_and_an_interval_above_zero(found: Any) -> None:
    # differences 0.10, 0.11, 0.12: mean 0.11, s 0.01, margin 4.3027 * 0.01 / sqrt(3) = 0.02484
    assert found(local=(0.5, 0.5, 0.5), fedgh=(0.6, 0.61, 0.62)) == (
        "fedgh leads with 61.00 %, 11.00 points above Local (50.00 %); over 3 seeds this is distinguishable from Local "
        "(95 % interval +8.52 to +13.48 points)."
    )


def test_an_interval_with_zero_in_it(found: Any) -> None:
    said = found(local=(0.5, 0.5, 0.5), fedgh=(0.4, 0.6, 0.8), fedavg=(0.1, 0.11, 0.12))
    assert "fedgh leads with 60.00 %, 10.00 points above Local (50.00 %); over 3 seeds this is not disting" in said
    assert said.endswith(" points). Distinguishable from Local: fedavg (below).")


def test_local_leads(found: Any) -> None:
    said = found(local=(0.6, 0.6, 0.6), fedgh=(0.5, 0.4, 0.3), fedavg=(0.2, 0.2, 0.2))
    assert said.startswith(
        "local leads with 60.00 %: no method is above it. fedgh comes next, 20.00 points below it; over 3 seeds this "
        "is not distinguishable from Local (95 % interval -44.84 to +4.84 points)."
    )
    assert said.endswith(". Distinguishable from Local: fedavg (below).")


def test_others_that_differ_from_local_are_named(found: Any) -> None:
    said = found(local=(0.5,) * 3, fedgh=(0.6, 0.61, 0.62), fedavg=(0.2,) * 3, fedin=(0.55, 0.55, 0.56))
    assert said.endswith(" Also distinguishable from Local: fedavg (below), fedin (above).")


def test_many_others_are_counted(found: Any) -> None:
    others = dict.fromkeys(("fedavg", "fedin", "fedprox", "moon"), (0.2,) * 3)
    said = found(local=(0.5,) * 3, fedgh=(0.6, 0.61, 0.62), fml=(0.55, 0.55, 0.56), **others)
    assert said.endswith(" Also distinguishable from Local: 5 others, 1 above and 4 below.")


def test_without_local_the_leader_is_held_against_the_next(found: Any) -> None:
    assert found(fedgh=(0.6, 0.61, 0.62), fedavg=(0.5, 0.5, 0.5), fedin=(0.1, 0.1, 0.1)) == (
        "fedgh leads with 61.00 %, 11.00 points above fedavg; over 3 seeds this is distinguishable from fedavg (95 % "
        "interval +8.52 to +13.48 points)."
    )


def test_one_method_alone(found: Any) -> None:
    assert found(fedgh=(0.6,)) == "fedgh reaches 60.00 %; there is no other method to compare it with."


def test_seeds_that_are_not_shared(make: Any) -> None:
    make("a", "local", 0, (0.5,))
    make("b", "fedgh", 1, (0.6,))
    said = compare_runs(load_runs(make.root)).sections[0].finding
    assert said == (
        "fedgh leads with 60.00 %, at an unknown distance from Local (50.00 %); the two share no seed, so that nothing "
        "can be claimed."
    )


def test_nothing_known(make: Any) -> None:
    make("a", accuracy=None)
    assert compare_runs(load_runs(make.root)).sections[0].finding == "No accuracy is known."


def test_what_is_distinguishable() -> None:
    seeds = (0, 1, 2)
    assert is_distinguishable(Paired(seeds, -0.2, 0.1, 0.1)) is True
    assert is_distinguishable(Paired(seeds, 0.1, 0.1, 0.2)) is False
    assert is_distinguishable(Paired(seeds, 0.1, 0.0, 0.1)) is False, "zero lies on the edge"
    assert is_distinguishable(Paired(seeds[:2], 0.2, 0.0, None)) is None, "two seeds have no margin"
    assert is_distinguishable(Paired(seeds, None, None, None)) is None
