"""What commands write: results to standard output, remarks and errors to standard error."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.errors import ConfigError, ConfigErrors, NothingLearnt, RunError
from polyfed.escaping import visible


def print_text(text: str) -> None:
    """To standard output, in whatever encoding it has; control characters are written out."""
    encoding = sys.stdout.encoding or "utf-8"
    text = visible(text)
    if "utf" not in encoding.lower():
        text = text.replace("±", "+/-").replace("─", "-")
    print(text.encode(encoding, "replace").decode(encoding))


def print_stderr(text: str) -> None:
    """One line to standard error, likewise."""
    print(visible(" ".join(text.split())), file=sys.stderr)


@contextlib.contextmanager
def all_problems_listed(write: Callable[[str], None] = print_text) -> Iterator[None]:
    """Several things that are wrong get a line each."""
    try:
        yield
    except ConfigErrors as error:
        if len(error.problems) == 1:
            raise
        for problem in error.problems:
            write(f"- {problem}")
        raise ConfigError(f"{len(error.problems)} things do not fit, as listed") from None


def print_json(value: Any) -> None:
    """For machines."""
    print(json.dumps(value, indent=2))


def print_files(files: Sequence[Path]) -> None:
    """What was written, a line for each file."""
    for file in files:
        print_text(f"wrote {file}")


def terminal_width() -> int:
    """Columns of the terminal, within what is still readable; 100 where there is none."""
    columns = shutil.get_terminal_size((100, 24)).columns
    return min(max(60, columns), 120)


# one run ----------------------------------------------------------------------------------------------------------


def print_run(folder: str) -> None:
    """What a run has reached and cost: the table of `polyfed report` of this run alone."""
    from polyfed.report.comparison import compare_runs
    from polyfed.report.comparison_tables import to_text
    from polyfed.report.run_records import load_runs

    print_text(to_text(compare_runs(load_runs(folder)), terminal_width()))
    print_text(f"run folder {folder}")


def raise_if_nothing_learnt(result: Mapping[str, Any]) -> None:
    """An error for a run in which nothing was learnt, once the rest is shown.

    Raises:
        NothingLearnt: the result says so.
    """
    if result.get("nothing_learnt"):
        raise NothingLearnt(result["nothing_learnt"])


# several runs -----------------------------------------------------------------------------------------------------


def print_table(to_text: Callable[[Any, int], str], done: Any) -> None:
    """The table of several runs and its files; what failed or learnt nothing is an error, once the rest is shown.

    Raises:
        RunError: runs have failed.
        NothingLearnt: in runs nothing was learnt.
    """
    print_text("no run was finished" if done.table is None else to_text(done.table, terminal_width()))
    print_files(done.files)
    if done.failures:
        raise RunError("; ".join(f"{title} failed: {reason}" for title, reason in done.failures.items()))
    if done.unlearnt:
        first = next(iter(done.unlearnt.values()))
        raise NothingLearnt(f"{'; '.join(done.unlearnt)}: {first}")
