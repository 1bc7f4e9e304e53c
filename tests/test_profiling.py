"""The stopwatch: nested sections, by a clock that only the tests turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polyfed import profiling
from polyfed.profiling import SECTIONS, Stopwatch, profile, section, timed

Turn = Callable[[float], None]


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Turn:
    """Lets so many seconds pass."""
    now = [0.0]
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: now[0])

    def pass_(seconds: float) -> None:
        now[0] += seconds

    return pass_


def spent(watch: Stopwatch | None) -> dict[str, float]:
    assert watch is not None
    return {name: seconds for name, seconds in watch.seconds.items() if seconds}


def test_time_in_an_inner_section_does_not_count_in_the_outer(turn: Turn) -> None:
    with profile() as watch:
        turn(1)
        with section("train"):
            turn(2)
            with section("align"):
                turn(4)
                with section("train"):
                    turn(8)
            turn(16)
        turn(32)
    assert spent(watch) == {"other": 33, "train": 26, "align": 4}


def test_functions_may_be_sections_and_errors_close_them(turn: Turn) -> None:
    @timed("score")
    def fails() -> None:
        turn(1)
        assert watch is not None
        watch.enter("align")  # never closed
        turn(2)
        raise ValueError

    with profile(base="messages") as watch:
        with pytest.raises(ValueError, match=r"^$"):
            fails()
        turn(4)
    assert spent(watch) == {"score": 1, "align": 2, "messages": 4}
    assert fails.__name__ == "fails"


def test_off_nothing_is_counted(turn: Turn) -> None:
    with profile() as outer:
        turn(1)
        with profile(False) as watch, section("train"):
            assert watch is None
            assert not profiling.is_profiling()
            turn(2)
            profiling.include({"train": 5.0})
        assert profiling.is_profiling()
        profiling.include({"train": 3.0})
        profiling.include(None)
    assert not profiling.is_profiling()
    assert spent(outer) == {"other": 3, "train": 3}


@pytest.mark.parametrize("workers", [1, 3])
def test_shares_add_up_to_all_workers_seconds(workers: int, turn: Turn) -> None:
    with profile() as watch:
        turn(1)
        with section("idle"):  # the process that deals out waits
            turn(10)
        profiling.include({"train": 9.0 * workers})
    assert watch is not None
    shares = watch.breakdown(11.0, workers)
    assert tuple(shares) == SECTIONS
    assert sum(shares.values()) == pytest.approx(11 * workers)
    assert shares["idle"] == (0 if workers == 1 else 33 - 27 - 1)
    assert shares["other"] == (2 if workers == 1 else 1)
    assert min(watch.breakdown(0.5, workers).values()) == 0
