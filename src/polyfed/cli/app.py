"""The command line: reads words, calls `polyfed.experiments`, prints, ends with the right exit status.

Exit status: 0 done; 1 the run failed; 2 the request is wrong (one line on standard error); 3 nothing was learnt; 130
interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP: 128 and the signal's number.
Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
import typer.main

from polyfed.cli import attack_commands, deploy_commands, list_commands, report_commands, run_commands
from polyfed.cli.commands import OutputClosed, add_command
from polyfed.cli.output import print_stderr
from polyfed.cli.usage_errors import describe_usage_error
from polyfed.errors import PolyfedError, RunInterrupted
from polyfed.signals import exit_status, raise_on_termination

COMMANDS: tuple[Callable[..., None], ...] = (  # in the order in which --help lists them
    run_commands.run,
    run_commands.compare,
    run_commands.sweep,
    run_commands.benchmark,
    run_commands.check,
    report_commands.report,
    report_commands.epsilon,
    report_commands.plot,
    report_commands.predict,
    attack_commands.attack,
    attack_commands.leakage,
    list_commands.recipe,
    list_commands.methods,
    list_commands.models,
    list_commands.datasets,
)
DEPLOY_COMMANDS: tuple[Callable[..., None], ...] = (
    deploy_commands.init,
    deploy_commands.certify,
    deploy_commands.key,
    deploy_commands.release,
    deploy_commands.server,
    deploy_commands.node,
    deploy_commands.local,
)

app = typer.Typer(
    name="polyfed",
    help="Federated learning among clients whose neural networks differ.\n\n"
    "An experiment is a recipe, a TOML file: see recipes/quickstart.toml.\n\n"
    "Exit status: 0 done, 1 failed, 2 wrong request, 3 nothing was learnt, 130 interrupted (Ctrl-C).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
deploy = typer.Typer(
    help="Run a recipe on several machines.\n\nFlower carries the messages: pip install 'polyfed[flower]'.",
    rich_markup_mode=None,
)
app.add_typer(deploy, name="deploy")
for command in COMMANDS:
    add_command(app, command)
for command in DEPLOY_COMMANDS:
    add_command(deploy, command)


@app.callback(invoke_without_command=True)
def _polyfed(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from polyfed import __version__

        print(f"polyfed {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@deploy.callback(invoke_without_command=True)
def _deploy(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@functools.cache
def parser() -> Any:
    """All commands as the argument parser has them, made once."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The program: runs a command and exits."""
    warnings.showwarning = lambda message, *_, **__: print_stderr(f"note: {message}")
    raise SystemExit(status(sys.argv[1:] if arguments is None else arguments))


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
        return _fail(f"{error}{_resume_hint(error)}", exit_status(error, received))
    except PolyfedError as error:
        return _fail(str(error), error.exit_status)
    except Exception as error:
        if hasattr(error, "format_message"):  # the argument parser's own
            return _fail(describe_usage_error(error, arguments), 2)
        if os.environ.get("POLYFED_DEBUG"):
            raise
        return _fail(f"{type(error).__name__}: {error} (POLYFED_DEBUG=1 shows where)", 1)


def _fail(text: str, code: int) -> int:
    """Say why a command ends, in one line; its exit status."""
    with contextlib.suppress(OSError):  # a terminal that has gone
        print_stderr(f"polyfed: {text}")
    return code


def _resume_hint(error: RunInterrupted) -> str:
    """How to go on with a single run; the message of several says so itself."""
    is_single = "whole rounds" in str(error) and "same command" not in str(error)
    return "; go on with --resume" if is_single else ""
