"""The command line: reads words, calls `polyfed.experiments`, prints, ends with the right exit status.

Exit status: 0 done; 1 the run failed; 2 the request is wrong (one line on standard error); 3 nothing was learnt; 130
interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP: 128 and the signal's number.
Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, get_type_hints

import typer
import typer.main
from typer.core import TyperCommand

from polyfed import registry
from polyfed.cli import deploy_commands, list_commands, report_commands, run_commands
from polyfed.cli.output import print_stderr
from polyfed.errors import ConfigError, PolyfedError, RunInterrupted
from polyfed.signals import exit_status, raise_on_termination


class OutputClosed(Exception):
    """Nobody reads the output any more."""


class Command(TyperCommand):
    """A command that takes each option once, and whose help says what its arguments are."""

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Read the words; of an option given twice the first value would have no effect."""
        _, _, given = self.make_parser(context).parse_args(args=[*args])
        single = [one for one in given if not (one.multiple or getattr(one, "is_flag", True))]
        if again := next((one for one in single if single.count(one) > 1), None):
            raise ConfigError(f"expected {again.opts[0]} once, got it {single.count(again)} times")
        return super().parse_args(context, args)

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


COMMANDS: tuple[Callable[..., None], ...] = (  # in the order in which --help lists them
    run_commands.new,
    run_commands.run,
    run_commands.compare,
    run_commands.sweep,
    run_commands.benchmark,
    run_commands.check,
    report_commands.report,
    report_commands.predict,
    report_commands.export,
    list_commands.recipe,
    list_commands.methods,
    list_commands.models,
    list_commands.datasets,
)
AUDIT_COMMANDS: tuple[Callable[..., None], ...] = (report_commands.leakage,)
DEPLOY_COMMANDS: tuple[Callable[..., None], ...] = (
    deploy_commands.init,
    deploy_commands.check,
    deploy_commands.certify,
    deploy_commands.key,
    deploy_commands.forget,
    deploy_commands.server,
    deploy_commands.node,
    deploy_commands.local,
)

app = typer.Typer(
    name="polyfed",
    help="Federated learning among clients whose neural networks differ.\n\n"
    "An experiment is a recipe, a TOML file; `polyfed new DIR` writes one.\n\n"
    "Exit status: 0 done, 1 failed, 2 invalid request, 3 nothing was learnt, 130 interrupted (Ctrl-C).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # the parser does so itself
    context_settings={"help_option_names": ["-h", "--help"]},
)
deploy = typer.Typer(
    help="Run a recipe on several machines.\n\nFlower carries the messages: pip install 'polyfed[flower]'.",
    rich_markup_mode=None,
)
audit = typer.Typer(help="What finished runs have given away of their clients' data.", rich_markup_mode=None)
app.add_typer(audit, name="audit")
app.add_typer(deploy, name="deploy")
for group, commands in ((app, COMMANDS), (audit, AUDIT_COMMANDS), (deploy, DEPLOY_COMMANDS)):
    for command in commands:
        add_command(group, command)


@app.callback(invoke_without_command=True)
def _polyfed(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from polyfed import __version__

        print(f"polyfed {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@audit.callback(invoke_without_command=True)
@deploy.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@functools.cache
def parser() -> Any:
    """All commands as the argument parser has them, made once."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The program: runs a command and exits."""
    warnings.showwarning = lambda message, *_, **__: print_stderr(f"note: {message}")
    registry.announce = print_stderr
    code = status(sys.argv[1:] if arguments is None else arguments)
    gc.freeze()  # else Python looks for cycles among all of PyTorch's objects before it ends: half a second
    raise SystemExit(code)


def status(arguments: Sequence[str]) -> int:
    """Run a command; its exit status."""
    received: list[int] = []
    try:
        with raise_on_termination() as received:
            code = parser().main(list(arguments), prog_name="polyfed", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (OutputClosed, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's last flush is quiet
        return 1
    except KeyboardInterrupt as error:
        return _fail("interrupted", exit_status(error, received))
    except RunInterrupted as error:
        hint = _how_to_go_on(arguments) if "kept" in str(error) else ""
        return _fail(f"{error}{hint}", exit_status(error, received))
    except Exception as error:
        if received:  # by C code that calls Python, an interruption is told as an error of another kind
            return _fail("interrupted", exit_status(error, received))
        if isinstance(error, PolyfedError):
            return _fail(str(error), error.exit_status)
        if hasattr(error, "format_message"):  # the argument parser's own
            return _fail(describe_usage_error(error), 2)
        if os.environ.get("POLYFED_DEBUG"):
            raise
        return _fail(f"{type(error).__name__}: {error} (POLYFED_DEBUG=1 shows where)", 1)


def _how_to_go_on(arguments: Sequence[str]) -> str:
    """The command that goes on with an interrupted one: of several runs it is the same one."""
    again = [word for word in arguments if word not in ("--overwrite", "--resume")]
    resume = [] if arguments[0] in ("compare", "sweep", "benchmark") else ["--resume"]
    return f"; go on with: {shlex.join(['polyfed', *again, *resume])}"


def _fail(text: str, code: int) -> int:
    """Say why a command ends, in one line; its exit status."""
    with contextlib.suppress(OSError):  # a terminal that has gone
        print_stderr(f"polyfed: {text}")
    return code


def describe_usage_error(error: Any) -> str:
    """One line for an unknown command or option, a missing argument, a value of the wrong kind. error: the parser's."""
    text = " ".join(str(error.format_message()).split())
    place = error.ctx.command_path if getattr(error, "ctx", None) else "polyfed"
    see = " See" if text.endswith("?") else "; see"
    return f"{text[:1].lower()}{text[1:].rstrip('.')}{see} '{place} --help'"
