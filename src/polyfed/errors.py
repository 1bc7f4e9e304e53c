"""The library's errors, and with which exit status the command line ends on each."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from polyfed.escaping import visible

T = TypeVar("T")

_LONGEST = 1000  # characters of a line; what is quoted in it may come from anywhere


class PolyfedError(Exception):
    """Anything polyfed raises on purpose. ``str(error)`` is one clear line."""

    exit_status = 1

    def __str__(self) -> str:
        line = visible(" ".join(super().__str__().split()))
        return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


class ConfigError(PolyfedError):
    """What was asked for is wrong: says what was expected, what was given, and the nearest valid name.

    Raised before anything is written and before the first round.
    """

    exit_status = 2


class ConfigErrors(ConfigError):
    """Several things are wrong: all problems that can be found at once.

    Args:
        problems: a line each. ``str(error)`` is the first, and how many more there are.
        command: lists them.
    """

    def __init__(self, problems: Sequence[str], command: str = "check") -> None:
        more = len(problems) - 1
        super().__init__(problems[0] + (f" (and {more} more; `polyfed {command}` lists them)" if more else ""))
        self.problems = tuple(str(ConfigError(problem)) for problem in problems)


def gathered(attempts: Iterable[Callable[[], T]], command: str = "check") -> list[T]:
    """What these give, one after the other. command: lists what is wrong.

    Raises:
        ConfigErrors: what is wrong with any of them.
    """
    found = []
    problems: list[str] = []
    for attempt in attempts:
        try:
            found.append(attempt())
        except ConfigErrors as error:
            problems += error.problems
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigErrors(problems, command)
    return found


class MissingPackage(ConfigError):
    """A package of one of polyfed's extras is not installed: reported once, whatever else needs it."""


class RunError(PolyfedError):
    """A run that had begun failed: names the client, the round and the stage."""

    exit_status = 1


class NothingLearnt(PolyfedError):
    """Runs ended in which clients' work did not count, or diverged: commands say so once their results are shown.

    In Python such a run is returned, and its `result` has the line as "nothing_learnt".
    """

    exit_status = 3


class RunInterrupted(PolyfedError):
    """The user stopped the run; a checkpoint of the last whole round has been written.

    The command line ends with 128 and the number of the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP.
    """

    exit_status = 130


def suggest(name: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` for the nearest known name, or the list of known names when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names)}"


def described(value: object) -> str:
    """What somebody gave in place of something else.

    >>> [described(value) for value in ("fedgh", 3, None, dict, len, (1, 2), OSError())]
    ["'fedgh'", '3', 'none', 'the class dict', 'the function len', 'a tuple', 'an OSError']
    """
    if value is None:
        return "none"
    if isinstance(value, str | int | float):
        return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, types.ModuleType):
        return f"the module {value.__name__}"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return f"the function {value.__name__}"
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def first_line(error: BaseException) -> str:
    """What an error says, its first line; its kind where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def kind_and_line(error: BaseException) -> str:
    """The kind of an error and its first line, ``"ValueError: no such"``; its kind where it says nothing."""
    kind = type(error).__name__
    return f"{kind}: {first_line(error)}" if str(error).strip() else kind
