"""What asks a program to end: SIGINT (Ctrl-C), SIGTERM and SIGHUP, upon which blocks are left, checkpoints written."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

TERMINATION_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # found beforehand: a fork must not look for it
# signals received, by `raise_on_termination` block that is open, innermost last
_received: list[list[int]] = []


class TerminationSignal(KeyboardInterrupt):
    """The program was asked to end. number: by which signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def raise_on_termination() -> Iterator[list[int]]:
    """Within the block SIGINT, SIGTERM and SIGHUP raise `TerminationSignal`; gives the numbers of those received.

    Only the first one does, as what it asks for may take a while. A second SIGINT ends the program at once. What is
    ignored, as SIGHUP is under nohup, stays ignored. Elsewhere than in the main thread nothing changes.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise TerminationSignal(number)
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    asking = (signal.SIGINT, *TERMINATION_SIGNALS)
    heard = [number for number in asking if signal.getsignal(number) != signal.SIG_IGN]
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        before = {number: signal.signal(number, interrupt) for number in heard}
    _received.append(received)
    try:
        yield received
    finally:
        _received.pop()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Have this process asked to end (SIGTERM) as soon as that which started it is no more, even if it is killed.

    For a new process, before its program begins; Linux alone.
    """
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def raise_if_lost() -> None:
    """Raise for a signal received in the innermost block if the program still runs.

    Python drops what is raised while an object is being freed, as in the callback of a weak reference; PyTorch, what is
    raised while it imports a module that it can do without.

    Raises:
        TerminationSignal: there was one.
    """
    if _received and _received[-1]:
        raise TerminationSignal(_received[-1][-1])


def exit_status(error: BaseException, received: Sequence[int] = ()) -> int:
    """128 and the number of the signal behind an interruption.

    That is the number that `error` or what it arose from carries; else the last of those received, as a library in
    between may raise a KeyboardInterrupt of its own, which Ray does; else SIGINT's, as of Ctrl-C.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, TerminationSignal):
        cause = cause.__context__
    if cause is not None:
        return 128 + cause.number
    return 128 + (received[-1] if received else signal.SIGINT)
