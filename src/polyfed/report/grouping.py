"""Which runs may stand side by side, and the sentence over every table and figure that says what was measured.

Two runs are comparable when they had the same data (assigned alike), the same number of clients and of rounds, the same
preset, and were scored on the same test data with the same mean, over all clients or the honest ones. Everything else
(hyperparameters, learning rates, networks) is what a comparison is about, or stands in a note.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from polyfed.errors import ConfigError
from polyfed.escaping import clients_text
from polyfed.records.main_score import MainScore
from polyfed.records.schema import EvaluationFacts
from polyfed.report.run_records import EXPERIMENT, RunRecord, format_setting, frame_of
from polyfed.report.statistics import resplit_ratio

if TYPE_CHECKING:
    import pandas as pd

_TEST = {"client": "each client's own test data", "global": "one global test set"}
_MEAN = {"clients": "plain mean over clients", "samples": "mean over clients weighted by samples"}
_OF_PARTITION = {"dirichlet": ("dirichlet_alpha",), "by_class": ("classes_per_client", "class_assignment")}
_NOT_DATA = ("dataset", "root", "num_clients")  # root: where the files lie; the others are in every result


@dataclass(frozen=True)
class Group:
    """Comparable runs: ``rows`` maps each name to its runs, Local first, one run per seed, seeds in order."""

    rows: Mapping[str, Sequence[RunRecord]]
    about: str  # "cifar10 (dirichlet, alpha=0.5), 20 clients, 15 rounds"
    seeds: tuple[int, ...]
    evaluation: EvaluationFacts
    notes: tuple[str, ...] = ()

    @property
    def score(self) -> MainScore:
        """What the runs' accuracies are: where numbers are predicted, the RMSE."""
        return self.runs[0].result.main_score

    @property
    def resplit(self) -> float:
        """By how much seeds that split the same rows anew widen intervals (`polyfed.report.statistics`)."""
        return resplit_ratio(self.runs[0].recipe.data)

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """All that the runs have recorded (`polyfed.report.frames.results`)."""
        return frame_of(self.runs)

    @property
    def runs(self) -> list[RunRecord]:
        """All runs of the group, row after row."""
        return [run for runs in self.rows.values() for run in runs]

    @property
    def looks(self) -> dict[str, int]:
        """Row -> the number of its look in figures: -1 for Local, the others' by the order of their names."""
        local = next((name for name, runs in self.rows.items() if runs[0].is_local), "")
        others = sorted(name for name in self.rows if name != local)
        return {name: others.index(name) if name in others else -1 for name in self.rows}

    @property
    def stages(self) -> dict[str, str]:
        """Row name -> the stage scored in it, that of the run's own evaluation."""
        return {name: runs[0].stage for name, runs in self.rows.items()}

    def scoring(self) -> str:
        """What the main scores are, in words."""
        stages = list(dict.fromkeys(self.stages.values()))
        which = f"stage {stages[0]}" if len(stages) == 1 else f"each method's own stage ({' or '.join(stages)})"
        return f"{which}, {self.on_what()}"

    def on_what(self) -> str:
        """Whose test data, and which mean, in words."""
        test = str(self.evaluation.test)
        mean = str(self.evaluation.weighting)
        honest = " (honest ones only)" if self.evaluation.clients == "honest" else ""
        return f"on {_TEST.get(test, f'test data {test}')}, {_MEAN.get(mean, f'mean over {mean}')}{honest}"

    def preset_text(self) -> str:
        """What networks began with, what was laid over the recipe and scales it down, and what --set changed, as in
        " Preset small: ..."; or "".

        A setting that was not changed in all runs is what distinguishes them, and is shown there.
        """
        run = self.runs[0]
        name = run.recipe.run.preset
        preset = f" Preset {': '.join(filter(None, (name, run.scaled_down)))}." if name else ""
        common = [text for text in run.overrides if all(text in other.overrides for other in self.runs)]
        return self._base_text() + preset + (f" Changed by --set: {', '.join(common)}." if common else "")

    def _base_text(self) -> str:
        """What networks began with: " Base pre-trained on 4000 rows, 61 seconds."; or ""."""
        bases = [run.result.pretraining for run in self.runs if run.result.pretraining]
        if not bases:
            return ""
        ends = dict.fromkeys(f"{bound(float(base['seconds']) for base in bases):.0f}" for bound in (min, max))
        return f" Base pre-trained on {bases[0]['rows']} rows, {' to '.join(ends)} seconds."

    def seeds_text(self) -> str:
        """``"seed 0"`` or ``"seeds 0, 1"``."""
        return f"seed{'s' if len(self.seeds) > 1 else ''} {', '.join(map(str, self.seeds))}"


def group_runs(runs: Iterable[RunRecord]) -> tuple[list[Group], tuple[str, ...]]:
    """Sort finished runs into comparable groups.

    Returns:
        The groups, and notes on runs that were left out or odd.
    """
    runs = list(runs)
    notes = tuple(f"left out: {note}" if not run.finished else note for run in runs for note in run.notes)
    finished = [run for run in runs if run.finished]
    if not finished:
        where = f"; unfinished: {', '.join(str(run.path) for run in runs)}" if runs else ""
        raise ConfigError(f"no finished run to report on{where}")
    keyed: dict[str, list[RunRecord]] = {}
    for run in finished:
        keyed.setdefault(json.dumps(_context(run), sort_keys=True, default=str), []).append(run)
    data = [_context(members[0])["data"] for members in keyed.values()]
    keys = dict.fromkeys(key for settings in data for key in settings)
    differing = [key for key in keys if any(settings.get(key) != data[0].get(key) for settings in data)]
    return [_group(members, differing) for members in keyed.values()], notes


def _context(run: RunRecord) -> dict[str, Any]:
    result = run.result
    return {
        "dataset": result.dataset,
        "score": result.score,
        "clients": result.clients,
        "rounds": result.rounds,
        "test": result.evaluation.test,
        "mean": result.evaluation.weighting,
        "round": result.evaluation.round,
        "clients scored": result.evaluation.clients,
        "held out": run.recipe.evaluation.get("held_out"),
        "preset": run.recipe.run.preset,
        "data": {key: value for key, value in run.recipe.data.items() if key not in _NOT_DATA},
    }


def _group(runs: list[RunRecord], differing: Iterable[str]) -> Group:
    rows: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda run: 2 if run.control else not run.is_local):  # Local first, controls last
        rows.setdefault(run.name or run.method, []).append(run)
    for name, members in rows.items():
        members.sort(key=lambda run: run.seed)
        for one, two in pairwise(members):
            if one.seed == two.seed:
                both = f"{one.path} and {two.path}"
                raise ConfigError(f"two runs are '{name}' with seed {one.seed}: {both}; leave one out or label them")
    seeds = tuple(sorted({run.seed for run in runs}))
    notes = (*_unlike(rows), *_made_of_others(rows), *how_ended(rows))
    return Group(rows, _about(runs[0], differing), seeds, runs[0].result.evaluation, notes)


def _unlike(rows: Mapping[str, Sequence[RunRecord]]) -> Iterator[str]:
    """Where methods were trained or built differently, so that nobody takes the rows for alike in all else."""
    recipes = {name: runs[0].recipe for name, runs in rows.items() if not runs[0].recipe.is_empty}
    for section in EXPERIMENT:
        settings = {name: getattr(recipe, section) for name, recipe in recipes.items()}
        for key in dict.fromkeys(key for found in settings.values() for key in found if key != "rounds"):
            values: dict[str, list[str]] = {}
            for name, found in settings.items():
                value = shorten(format_setting(found.get(key, "unset")), 60, placeholder="...")
                values.setdefault(value, []).append(name)
            if len(values) > 1:
                each = "; ".join(f"{value} for {', '.join(names)}" for value, names in values.items())
                yield f"{section}.{key} differs: {each}"


def _made_of_others(rows: Mapping[str, Sequence[RunRecord]]) -> Iterator[str]:
    """Which runs had other data under the same name than runs of their seed before them, or other code."""
    first: dict[tuple[str, str], tuple[str, str]] = {}  # what -> its checksum, and whose it is
    for name, runs in rows.items():
        for run in runs:
            parts = {("code", module): checksum for module, checksum in run.result.made_of.code.items()}
            if run.data_checksum:
                parts["data", str(run.seed)] = run.data_checksum
            for (kind, which), checksum in parts.items():
                known, owner = first.setdefault((kind, which), (checksum, name))
                if known != checksum and kind == "data":
                    yield f"{name}, seed {which}: other data under the same name than of {owner}, which do not compare"
                elif known != checksum:
                    yield f"{name}, seed {run.seed}: other code in {which} than of {owner}"


def how_ended(rows: Mapping[str, Sequence[RunRecord]]) -> Iterator[str]:
    """Which runs ended otherwise than with their last planned round, and without whom."""
    for name, runs in rows.items():
        stops = [str(run.result.stopped_after) for run in runs if run.result.stopped_after]
        if stops:
            yield f"{name}: stopped early, after round {', '.join(stops)} ({len(stops)} of {len(runs)} runs)"
        is_final = any(run.last("final_round") for run in runs)
        if any(run.result.best_round for run in runs):
            chosen = ", ".join(str(run.result.best_round) for run in runs)
            what = "a final round began from" if is_final else "figures of"
            yield f"{name}: {what} the best round by validation, {chosen}"
        yield from (f"{name}: {line}" for line in dict.fromkeys(run.result.nothing_learnt for run in runs) if line)
        if runs[0].control == "pooled-tuned":
            yield f"{name}: {_about_tuning(runs)}"
        elif is_final:
            yield f"{name}: figures after a final round"
        names = runs[0].result.client_names
        last = {(row.last_evaluated, row.id) for run in runs for row in run.result.clients_table or ()}
        for number in sorted({number for number, _ in last if number is not None}):
            whom = clients_text((client for at, client in last if at == number), names)
            yield f"{name}: clients {whom} were not evaluated after round {number}; last figures are of the others"
        left_out = {number for run in runs for number in run.result.left_out}
        if left_out:
            whom = clients_text(left_out, names)
            yield f"{name}: clients {whom} are left out, as their devices are too small; they count, untrained"


def _about_tuning(runs: Sequence[RunRecord]) -> str:
    """For how many epochs networks of pooled data were trained on clients' own rows."""
    epochs = ", ".join(f"{run.last('server.tuned_epochs') or 0:g} (seed {run.seed})" for run in runs)
    has_validation = any(run.last("server.validation_after_1") is not None for run in runs)
    why = "as validation chose" if has_validation else "as no client has validation rows"
    return f"epochs on a client's own rows: {epochs}, {why}"


def _about(run: RunRecord, differing: Iterable[str]) -> str:
    data = run.recipe.data
    partition = str(data.get("partition", ""))
    keys = dict.fromkeys([*_OF_PARTITION.get(partition, ()), *(key for key in differing if key != "partition")])
    details = [partition] if partition else []
    details += [f"{key}={format_setting(data[key])}" for key in keys if key in data]
    result = run.result
    dataset = f"{result.dataset} ({', '.join(details)})" if details else result.dataset
    return f"{dataset}, {result.clients} clients{_held_out(run)}, {result.rounds} rounds"


def _held_out(run: RunRecord) -> str:
    """How many, or which, clients never train: " (2 held out)"; or ""."""
    asked = run.recipe.evaluation.get("held_out")
    if not asked:
        return ""
    return f" ({asked} held out)" if isinstance(asked, int) else f" (held out: {', '.join(map(str, asked))})"
