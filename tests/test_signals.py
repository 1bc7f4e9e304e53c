"""What a program that is asked to end raises, and its exit status."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Iterator

import pytest

from polyfed.signals import TERMINATION_SIGNALS, TerminationSignal, exit_status, raise_if_lost, raise_on_termination

SIGNALS = (signal.SIGINT, *TERMINATION_SIGNALS)


class Freed:
    """Something that is freed."""


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_and_is_remembered(number: int) -> None:
    with raise_on_termination() as received:
        assert received == []
        with pytest.raises(TerminationSignal) as raised:
            signal.raise_signal(number)
    assert raised.value.number == number
    assert received == [number]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_python_drops_is_raised_later(number: int) -> None:
    raise_if_lost()
    with raise_on_termination():
        raise_if_lost()
        freed = Freed()
        weakref.finalize(freed, signal.raise_signal, number)
        del freed
        with pytest.raises(TerminationSignal) as raised:
            raise_if_lost()
        with raise_on_termination():
            raise_if_lost()
    assert raised.value.number == number
    raise_if_lost()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_termination() as received:
            signal.raise_signal(signal.SIGHUP)
        assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_elsewhere_than_in_the_main_thread_nothing_changes() -> None:
    handlers = []

    def observe() -> None:
        with raise_on_termination():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=observe)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


def test_the_status_is_of_the_signal_behind_the_error() -> None:
    error = RuntimeError()
    error.__context__ = TerminationSignal(signal.SIGHUP)
    assert exit_status(error) == 129
    assert exit_status(error, [signal.SIGTERM]) == 129


def test_the_status_of_an_interruption_that_carries_no_number() -> None:
    assert exit_status(KeyboardInterrupt()) == 130
    assert exit_status(KeyboardInterrupt(), [signal.SIGHUP, signal.SIGTERM]) == 143
