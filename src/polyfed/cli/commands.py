"""How functions become commands: their help, and what passes through the argument parser unhandled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand

from polyfed.errors import RunInterrupted


class OutputClosed(Exception):
    """Whoever read our output has gone."""


class Command(TyperCommand):
    """A command whose help says what its arguments are, and shows brackets as they are."""

    def format_options(self, context: Any, formatter: Any) -> None:
        """Write the sections of arguments and options."""
        for head, kind in (("Arguments", "argument"), ("Options", "option")):
            records = self.help_records(context, kind)
            if records:
                with formatter.section(head):
                    formatter.write_dl(records)

    def help_records(self, context: Any, kind: str | None = None) -> list[tuple[str, str]]:
        """How each parameter is written, and what it says. kind: "argument" or "option"; None: all."""
        hints: dict[str, Any] = {}
        if self.callback is not None:
            hints = get_type_hints(inspect.unwrap(self.callback), include_extras=True)
        found = []
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is None or kind not in (None, parameter.param_type_name):
                continue
            name, text = record
            if parameter.param_type_name == "option":
                text = text.replace("\\[", "[")  # typer escapes them, as if for rich
            else:  # whose help is lost between typer 0.20 and click 8.3
                text = hints[parameter.name].__metadata__[0].help
            found.append((name, text))
        return found


def add_command(group: typer.Typer, function: Callable[..., None]) -> None:
    """Make a function a command of a group, and keep the parser from handling what `polyfed.cli.app.main` handles."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            raise RunInterrupted("interrupted") from None
        except BrokenPipeError:
            raise OutputClosed from None

    group.command(cls=Command)(guarded)
