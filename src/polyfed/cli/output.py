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
from polyfed.escaping import clients_text, visible
from polyfed.records.main_score import main_score_of
from polyfed.records.neighbors import neighbors
from polyfed.units import human_bytes, human_seconds


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


def print_run(result: Mapping[str, Any], path: Path | None) -> None:
    """What a run has reached and cost, as its `result.json` says."""
    _print_scores(result)
    _print_kept_models(result)
    for unit, epsilon in result.get("epsilon", {}).items():
        spent_on = result["epsilon_of"][unit]
        given = ", for given weights" if spent_on == ["features"] else ""
        print_text(f"epsilon {epsilon:.4g} at delta {result['delta']:g}, by {unit}: {', '.join(spent_on)}{given}")
        print_text(f"  {neighbors(spent_on)}")
    _print_costs(result)
    print_text(f"run folder {path}")


def _print_scores(result: Mapping[str, Any]) -> None:
    main = main_score_of(result)
    for stage, found in result[f"{main.name}_by_stage"].items():
        mean, std, low, high = (main.text(found[key]) for key in ("mean", "std", "min", "max"))
        beside = f"clients: std {std}, lowest {low}, highest {high}"
        print_text(f"{main.title} {stage:<12} {mean:>6}{main.unit}  ({beside})")
        figures = {} if main.is_share else result["metrics"].get(stage, {})
        for name, text in (("mae", main.text), ("r2", "{:.3g}".format)):
            if name in figures:
                print_text(f"{name.upper():<4} {stage:<12} {text(figures[name]['mean']):>6}")
    for stage, parts in result.get("accuracy_by_classes", {}).items():
        scores = [f"on {name} classes {100 * score['mean']:.2f} %" for name, score in parts.items()]
        print_text(f"accuracy {stage:<12} {', '.join(scores)}")
    for stage, score in result.get("held_out", {}).items():
        value = main.text(score["mean"]) + main.unit
        print_text(f"{main.title} of {score['n']} clients held out, {stage}: {value}")
    from polyfed.report.grouping import describe_unevaluated

    table = result.get("clients_table") or []
    for line in describe_unevaluated({row["id"]: row["last_evaluated"] for row in table if "last_evaluated" in row}):
        print_text(line)
    before = result.get(f"{main.name}_before_final_round")
    if before is not None:
        print_text(f"{main.title} {main.text(before)}{main.unit} before the final round")
    stopped = result.get("stopped_after")
    if stopped is not None:
        why = (
            f"the validation {main.title} no longer {'fell' if main.lower_is_better else 'rose'} (evaluation.patience)"
        )
        print_text(f"stopped after round {stopped}, as {why}")


def _print_kept_models(result: Mapping[str, Any]) -> None:
    """Which round's figures and models are, where it is not the last one."""
    kept = result.get("models_of_round")
    last = (result.get("stopped_after") or result["rounds"]) + result.get("final_round", False)
    if kept is None or kept == last:
        return
    main = main_score_of(result)
    after = result[f"{main.name}_last_round"]
    score = "" if after is None else f"; after round {last}, the last: {main.title} {main.text(after)}{main.unit}"
    print_text(f"these are figures, and models, of round {kept}, the best by validation{score}")


def _print_costs(result: Mapping[str, Any]) -> None:
    sent = f"{human_bytes(result['bytes_up'])} up, {human_bytes(result['bytes_down'])} down"
    refused = f"; {result['refused']} refused" if result["refused"] else ""
    print_text(f"bytes {sent}; {human_seconds(result['seconds'])}{refused}")
    simulated = result.get("simulated_seconds")
    if simulated is not None:
        late = f"; {result['stragglers']} uploads behind the deadline" if result.get("stragglers") else ""
        numbers = clients_text(result["left_out"], result.get("client_names", ()))
        left_out = f"; left out: clients {numbers}" if numbers else ""
        print_text(f"simulated time {human_seconds(simulated)}{late}{left_out}")


def print_preset(recipe: Any) -> None:
    """What was laid over the recipe, and what that scales down."""
    if recipe.run.preset is None:
        return
    note = f": {recipe.run.preset_note}" if recipe.run.preset_note else ""
    print_text(f"preset {recipe.run.preset}{note}")


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
