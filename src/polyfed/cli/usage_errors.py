"""What is said when words are no command: one line instead of the argument parser's several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from polyfed.errors import suggest


def describe_usage_error(error: Any, arguments: Sequence[str]) -> str:
    """One line for an unknown command or option, a missing argument, a value of the wrong kind.

    Args:
        error: click's. arguments: the words of the command line.
    """
    text = " ".join(str(error.format_message()).split())
    text = text[:1].lower() + text[1:]
    context = getattr(error, "ctx", None)
    command = getattr(context, "command", None)
    place = getattr(context, "command_path", "polyfed")
    option = getattr(error, "option_name", None)
    if option is not None and "no such option" in text:
        known = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
        return f"unknown option '{option}'{suggest(option, known | {'--help'})}"
    if text.startswith("no such command"):
        words = [word for word in arguments if not word.startswith("-")]
        word = next(iter(words[len(place.split()) - 1 :]), "")
        return f"unknown command '{word}'{suggest(word, getattr(command, 'commands', ()))}"
    spellings = list(getattr(getattr(error, "param", None), "opts", ()))
    given = _value_of(spellings, arguments)
    if given is not None and "valid integer" in text:
        return f"{spellings[0]}: expected a whole number, got '{given}'"
    text = text.rstrip(".")
    if given is not None and f"'{given}'" not in text:
        text = f"{text}, got '{given}'"
    return f"{text}; see '{place} --help'"


def _value_of(spellings: Sequence[str], arguments: Sequence[str]) -> str | None:
    """What was given to an option, as ``--option value`` or ``--option=value``; None where it was not."""
    for word, following in pairwise(arguments):
        if word in spellings:
            return following
    for word in arguments:
        name, equals, value = word.partition("=")
        if equals and name in spellings:
            return value
    return None
