"""The library's errors, and with which exit status the command line ends on each."""

from __future__ import annotations

_LONGEST = 1000  # characters of a line; what is quoted in it may come from anywhere


class PolyfedError(Exception):
    """Anything polyfed raises on purpose. ``str(error)`` is one clear line."""

    exit_status = 1

    def __str__(self) -> str:
        line = " ".join(super().__str__().split())
        return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


class RequestError(PolyfedError):
    """What was asked for is wrong: says what was expected, what came, and the nearest valid name.

    Raised before anything is written and before the first round.
    """

    exit_status = 2


class RunError(PolyfedError):
    """A run that had begun failed: names the client, the round and the stage."""

    exit_status = 1


class Interrupted(PolyfedError):
    """The user stopped the run; a checkpoint of the last whole round has been written.

    The command line ends with 128 and the number of the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    """

    exit_status = 130
