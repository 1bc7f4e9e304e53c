"""From a recipe to a federation, a run, a comparison, or a check: what the command line does, for Python.

The only place that puts data, models and a method together by name.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from polyfed.config.recipe import Data, Recipe
from polyfed.core.acting import without_effect
from polyfed.core.client import Client, Public
from polyfed.core.method import Method
from polyfed.core.randomness import numpy_generator
from polyfed.data.dataset import told
from polyfed.data.datasets import Source, load
from polyfed.data.federated_dataset import Federated
from polyfed.data.federated_dataset import federate as deal
from polyfed.data.partition import Partition, whole
from polyfed.data.public import public_inputs
from polyfed.data.samples import Samples
from polyfed.data.transforms import Prepare, resized
from polyfed.engine.arguments import list_of
from polyfed.engine.executors.base import Executor
from polyfed.engine.federation import Federation, Run, Tracker
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.task import Execution, Output, Task
from polyfed.errors import Interrupted, PolyfedError, RequestError, described
from polyfed.experiments.dry_run import Check, measure
from polyfed.markup import Line, notes, paragraph
from polyfed.models.third_party import normalisation
from polyfed.models.zoo import build
from polyfed.places import check_name
from polyfed.registry import MODELS, PARTITIONS, TRACKERS
from polyfed.report.comparison import Table, comparison, to_text, write
from polyfed.report.comparison_formats import to_html
from polyfed.report.figures import Series, axes_of, curves, series
from polyfed.report.grouping import group_runs
from polyfed.report.html_report import write_page
from polyfed.report.results_page import write_command
from polyfed.report.run_records import RunRecord, find_runs
from polyfed.report.statistics import Target
from polyfed.tracking.console import Console

__all__ = ["Check", "Comparison", "Prepared", "check", "compare", "federate", "prepare", "run"]


# data and models --------------------------------------------------------------------------------------------------


class Prepared:
    """Data as recipes want them; the last source and the last deal are kept, as a comparison asks for them often."""

    def __init__(self) -> None:
        self._source: tuple[object, Source] | None = None
        self._dealt: tuple[object, Federated] | None = None
        self._public: tuple[object, Samples] | None = None

    def source(self, recipe: Recipe) -> Source:
        """The recipe's data set, cut to its first rows and resized where the recipe says so."""
        data = recipe.data
        rows = (data.max_rows, data.max_test_rows)
        options: dict[str, Any] = {
            "image_column": data.image_column,
            "label_column": data.label_column,
            "train_splits": tuple(data.train_splits),
            "columns": data.columns,
            "subset": data.subset,
            "revision": data.revision,
            "words": data.words,
            "feature_columns": data.feature_columns,
            "image_size": data.image_size,
            "beside": recipe.beside,
        }
        key = (data.name, data.root, options, data.class_names, data.mean, data.std, *rows)
        if self._source is None or self._source[0] != key:
            whole = load(data.name, data.root, **options)
            if data.max_test_rows is not None and whole.test is None:
                raise RequestError(f"data.max_test_rows: expected no value, as '{data.name}' has no official test side")
            cut = whole.first(data.max_rows, data.max_test_rows)
            train = resized(cut.train, data.image_size)
            test = None if cut.test is None else resized(cut.test, data.image_size)
            as_told = told(replace(cut, train=train, test=test), data.class_names, data.mean, data.std)
            self._source = (key, as_told)
        return self._source[1]

    def dealt(self, recipe: Recipe) -> Federated:
        """The data set as it is dealt to clients: a function of ``[data]`` and the seed, never of the method."""
        data, seed = recipe.data, recipe.run.seed
        key = (data, data.client_count, recipe.beside, seed)
        if self._dealt is None or self._dealt[0] != key:
            dealt = federate(
                self.source(recipe),
                data.client_count,
                data.partition,
                seed=seed,
                alpha=data.alpha,
                min_size=data.min_size,
                classes_per_client=data.classes_per_client,
                deal=data.deal,
                split=data.split,
                test=data.test,
                holdout=data.holdout,
                max_train=data.max_train,
                max_test=data.max_test,
                halved=data.halved,
                natural_column=data.natural_column,
                natural_groups=data.natural_groups,
                partitioner=data.partitioner,
                skew=data.skew,
                skew_strength=data.skew_strength,
            )
            self._dealt = (key, dealt)
        return self._dealt[1]

    def public(self, recipe: Recipe) -> Public | None:
        """What everybody may see: inputs of ``data.public`` where there is one, else the hold-out, if there is any."""
        data, seed = recipe.data, recipe.run.seed
        if data.public is None and not data.holdout:
            return None
        dealt = self.dealt(recipe)
        stored_as_is = normalised(dealt.source, recipe.models.architectures)
        if data.public is None:
            return Public(dealt.holdout, stored_as_is)
        key = (data, recipe.beside, seed)
        if self._public is None or self._public[0] != key:
            other = load(data.public, data.root, image_size=data.image_size, beside=recipe.beside)
            drawn = public_inputs(other, dealt.source, data.public_rows, numpy_generator(seed, "data public"))
            self._public = (key, drawn)
        return Public(self._public[1], stored_as_is, origin="other")


def federate(
    source: Source, clients: int | None = 10, partition: str | Partition | Any = "iid", *, seed: int = 0, **how: Any
) -> Federated:
    """Deal a data set to clients, as a recipe with these keys in ``[data]`` and this seed deals it.

    Args:
        source: what `load` or `from_tensors` gave.
        clients: how many; None with partition "natural": one per value.
        partition: a name, or a function of your own (labels, clients, generator) -> each client's rows.
        seed: every draw is derived from it.
        how: the further keys, ``classes_per_client=2, split="8:1:1"``; see `polyfed.data.federated_dataset.federate`.

    Raises:
        RequestError: settings that cannot be, or rows that cannot be dealt so.
    """
    if not isinstance(source, Source):
        write = "polyfed.from_tensors((x, y))"
        raise RequestError(f"source: expected what polyfed.load or {write} gives, got {described(source)}")
    given = whole("seed", seed, 0)
    _check_all_act(partition, how)
    return deal(
        source, clients=clients, partition=partition, rng=lambda what: numpy_generator(given, f"data {what}"), **how
    )


def _check_all_act(partition: object, how: Mapping[str, Any]) -> None:
    """Whether every further key of a deal does something, as ``[data]`` of a recipe asks."""
    known = [name for name, function in PARTITIONS.items() if partition in (name, function)]
    settings = {name: field.get_default(call_default_factory=True) for name, field in Data.model_fields.items()}
    settings |= {"partition": partition if isinstance(partition, str) else [*known, "a deal of your own"][0], **how}
    if said := without_effect(Data.model_fields, settings, how):
        raise RequestError(said)


def normalised(source: Source, names: Sequence[str]) -> Prepare:
    """How stored inputs become what networks take: as pre-trained weights want it, else as the data set says.

    One way for everybody, as clients' networks are compared on inputs that they share. For images of other than three
    channels it is the mean of the channels' values.

    Raises:
        RequestError: pre-trained weights that want it in several ways, or cannot be asked.
    """
    told = {name: wanted for name in dict.fromkeys(names) if (wanted := normalisation(name)) is not None}
    if not told or source.train.x.dtype != torch.uint8:
        return source.prepare
    (first, wanted), *others = told.items()
    for other, another in others:
        if another != wanted:
            raise RequestError(
                f"expected pre-trained networks that want images normalised alike, came '{first}' (mean {wanted[0]}, "
                f"std {wanted[1]}) and '{other}' (mean {another[0]}, std {another[1]}); choose weights that agree"
            )
    channels = source.train.x.shape[1]
    mean, std = (tuple(v) if len(v) == channels else (sum(v) / len(v),) * channels for v in wanted)
    return Prepare(mean, std)


def prepare(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    trackers: Sequence[object] = (),
    data: Prepared | None = None,
    timings: bool = False,
    wrap_executor: Callable[[Executor], Executor] | None = None,
) -> Federation:
    """The federation that a recipe describes; nothing is written.

    Args:
        recipe: resolved settings.
        out: run folder; None for a run that leaves nothing behind.
        trackers: who watches.
        data: where data are kept between calls.
        timings: whether the records tell where the time of each round went.
        wrap_executor: makes the executor that is used of the recipe's.

    Raises:
        RequestError: data that are not there or cannot be dealt so, models or a method that do not fit.
    """
    method = recipe.build_method()
    live = [TRACKERS[name]() for name in recipe.run.track]
    data = data or Prepared()
    dealt = data.dealt(recipe)
    source = dealt.source
    stored_as_is = normalised(source, recipe.models.architectures)
    if recipe.training.augment != "none" and source.train.x.dim() != 4:
        raise RequestError(f"training.augment '{recipe.training.augment}' expects images, '{source.name}' has none")
    names = assigned(recipe, len(dealt.clients))
    in_shape = tuple(source.train.x.shape[1:])
    width = recipe.models.feature_dim
    return Federation(
        [
            Client(
                name,
                train=own.train,
                test=own.test if dealt.test is None else None,
                validation=own.validation,
                prepare=stored_as_is,
            )
            for name, own in zip(names, dealt.clients, strict=True)
        ],
        method,
        recipe.training,
        recipe.evaluation,
        plugins=recipe.plugins,
        task=Task(
            classes=dealt.classes,
            class_names=source.class_names,
            public=data.public(recipe),
            test=dealt.test,
            dataset=source.name,
            feature_names=source.feature_names,
            vocabulary=source.vocabulary,
            label_column=source.label_column,
        ),
        executor=Execution(
            recipe.run.executor, recipe.run.workers, recipe.run.device, recipe.run.precision, timings, wrap_executor
        ),
        out=Output(out, recipe.run.checkpoint_every, recipe.run.keep, recipe.run.label, recipe.to_dict()),
        seed=recipe.run.seed,
        builders={
            name: functools.partial(build, name, in_shape, dealt.classes, width, source.words, beside=recipe.beside)
            for name in (*names, *companions(method))
        },
        trackers=[*trackers, *(live if out is not None else ())],
    )


def assigned(recipe: Recipe, count: int) -> list[str]:
    """The architecture of each of `count` clients."""
    names = recipe.models.architectures
    if recipe.models.assign == "blocks":
        places = [client * len(names) // count for client in range(count)]
    elif recipe.models.assign == "random":
        drawn = numpy_generator(recipe.run.seed, "architectures").integers(0, len(names), count)
        places = [int(place) for place in drawn]
    else:
        places = [client % len(names) for client in range(count)]
    return [names[place] for place in places]


def companions(method: Method) -> list[str]:
    """Networks that a method may name to stand beside the clients' own: all registered, or one that it imports."""
    wanted = method.companion
    return [] if wanted is None else [*MODELS, *([wanted.network] if ":" in wanted.network else [])]


def _check_place(folder: Path) -> None:
    """Whether a run folder can be made there; nothing is."""
    check_name(folder)
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise RequestError(f"expected a place for the run folder {folder}, came {above}, where nothing can be written")


def _read(recipe: str | Path | Recipe, overrides: Sequence[str], method: str | None, **settings: Any) -> Recipe:
    """A recipe from a file, or the one given with the same changes."""
    if not isinstance(recipe, Recipe | str | os.PathLike):
        write = "; write polyfed.Recipe.from_dict(...)" if isinstance(recipe, Mapping) else ""
        raise RequestError(f"recipe: expected a recipe's file or a Recipe, got {described(recipe)}{write}")
    if method is not None and not isinstance(method, str):
        raise RequestError(
            f"method: expected a method's name, such as 'fedgh', got {described(method)}; its knobs are overrides, "
            "such as 'method.header_lr=0.1'"
        )
    for text in list_of("overrides", overrides):
        if not isinstance(text, str):
            raise RequestError(f"overrides: expected texts such as 'data.clients=20', got {described(text)}")
    if not isinstance(recipe, Recipe):
        return Recipe.load(recipe, overrides, method=method, **settings)
    for what, given in (("overrides", overrides), ("a profile", settings.pop("profile", None))):
        if given:
            raise RequestError(f"expected {what} together with a recipe's file, came {what} with a Recipe")
    chosen = recipe if method is None else recipe.choose(method)
    out = settings.pop("out", None)
    changes = {key: value for key, value in settings.items() if value is not None}
    return chosen.with_run(**changes, **({} if out is None else {"out": str(out)}))


# one run ----------------------------------------------------------------------------------------------------------


def run(
    recipe: str | Path | Recipe,
    *,
    method: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = False,
    device: str | None = None,
    workers: int | None = None,
    timings: bool = False,
    profile: str | None = None,
    trackers: Sequence[object] = (),
) -> Run:
    """Run a recipe.

    Args:
        recipe: a TOML file, or a `Recipe`.
        method: a method's or a variant's name, in place of the recipe's own.
        seed: in place of the recipe's own.
        overrides: ``"data.clients=20"``, as ``--set`` on the command line.
        out: run folder; default: the recipe's own, if it names one, else nothing is written. (The command line writes
            to `Recipe.folder`.)
        resume: go on where the run folder's last checkpoint ends; a finished run is only read, unless it is to have
            more rounds now (``overrides=["training.rounds=25"]``): it goes on, to the result of so many from the start.
        force: replace the run that the folder holds, and what `polyfed analyse` and `attack` made of it.
        progress: show how it gets on, on standard error.
        device: "cpu", "cuda", "cuda:1".
        workers: clients that train at the same time, each in a process of its own; default: one per core, where that
            pays. The result does not depend on it.
        timings: have records and result tell where the time went, too.
        profile: one of the recipe's ``[profiles]``, or several with commas between.
        trackers: who watches: functions of a round's record, and objects with any of `Tracker`'s methods.

    Raises:
        RequestError: the request is wrong; nothing has been written.
        RunError: the run failed.
        Interrupted: Ctrl-C; a checkpoint has been written.
    """
    options = {"seed": seed, "out": out, "device": device, "workers": workers, "profile": profile}
    resolved = _read(recipe, overrides, method, **options)
    folder = resolved.run.out
    if folder is not None:
        _check_place(Path(folder))
        planned = resolved.build_method().planned
        RunFolder(folder).check(resolved.to_dict(), resume, force, planned)  # before data are loaded
    elif resume:
        raise RequestError("expected a run folder to resume from, came none; name it with out=...")
    elif resolved.run.track:
        raise RequestError("run.track: expected a run folder for live curves, came none; name it with out=...")
    federation = prepare(resolved, out=folder, trackers=trackers, timings=timings)
    return federation.run(resume=resume, force=force, progress=progress)


# many runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What `compare` leaves behind; in a notebook its tables and curves.

    failures: ``"fedin, seed 0"`` -> why; files: tables and curves in `folder`; lines: the curves of each of the tables.
    unlearnt: ``"fedin, seed 0"`` -> the line on a run in which nothing was learnt.
    """

    folder: Path
    table: Table | None
    files: tuple[Path, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[tuple[Line, ...], ...] = ()
    unlearnt: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "no run was finished" if self.table is None else to_text(self.table)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} runs failed" if self.failures else ""
        return f"Comparison({self.table!r}{failed}, in {self.folder})"

    def _repr_html_(self) -> str:
        shown = paragraph(str(self)) if self.table is None else to_html(self.table, self.lines)
        failed = notes(f"{run} failed: {why}" for run, why in self.failures.items())
        return f"{shown}{failed}{paragraph(f'In {self.folder}')}"


@dataclass(frozen=True)
class Member:
    """One run of several. name: what tells it from the others, but for the seed."""

    name: str
    recipe: Recipe
    folder: Path

    @property
    def title(self) -> str:
        """For progress and errors: ``"fedgh, seed 0"``."""
        return f"{self.name}, seed {self.recipe.run.seed}"


def compare(
    recipe: str | Path | Recipe,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    out: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    force: bool = False,
    progress: bool = False,
    device: str | None = None,
    workers: int | None = None,
    profile: str | None = None,
    target: str | float | None = None,
) -> Comparison:
    """Run methods x seeds on the same data, and put them side by side. Local is always among them.

    What is already done in `out` is not run again, what was interrupted goes on, also what is to have more rounds now;
    a run that fails does not keep the others from running.

    Args:
        recipe: a TOML file, or a `Recipe`.
        methods: names of methods, or of variants in the recipe's ``[methods]``; default: all that the recipe names.
        seeds: one run of every method for each.
        out: folder; default ``runs/<recipe>``. Runs lie in ``<out>/<method>/seed-<n>``, tables and curves in `out`.
        overrides: as for `run`; for one method only: ``"methods.fedgh.header_lr=0.1"``.
        force: run again what is already done.
        progress: show how it gets on, on standard error.
        device, workers, profile: as for `run`.
        target: an accuracy (0.6 or "60 %"), or a share of another row's ("90 % of local", "90 % of best"): also tell
            the rounds, bytes and seconds that it took.

    Raises:
        RequestError: the request is wrong; nothing has been written.
        Interrupted: Ctrl-C; call it again to go on.
    """
    given = list(dict.fromkeys(list_of("methods", methods or ())))
    seeds = list_of("seeds", seeds)
    base = _read(recipe, overrides, given[0] if given else None, device=device, workers=workers, profile=profile)
    if any(text.strip().startswith("method.") for text in overrides):
        raise RequestError("expected --set methods.NAME.KEY=VALUE, which says whose knob it is, came --set method.*")
    if not seeds:
        raise RequestError("expected at least one seed, came none")
    wanted = None if target is None else Target.parse(target)
    folder = Path(out if out is not None else base.run.out or f"runs/{base.stem}")
    members = _members(base, given or base.variants(), list(dict.fromkeys(seeds)), folder)
    watchers: list[Tracker] = [Console()] if progress else []
    data = Prepared()
    pending = check_all(members, folder, force, data)
    failures = run_all(members, pending, force, data, watchers)
    if len(failures) < len(members) and not isinstance(recipe, Recipe):
        words = _words(recipe, given, seeds, out, overrides, profile)
        write_command(folder, shlex.join(["polyfed", "compare", *words]), ran=bool(pending))
    return _summed_up(folder, members, failures, wanted)


def _words(
    recipe: str | Path,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: str | Path | None,
    overrides: Sequence[str],
    profile: str | None,
) -> list[str]:
    """The command line's words for a comparison, without those that are the default."""
    options = {
        "--methods": ",".join(methods),
        "--seeds": ",".join(map(str, seeds)),
        "--profile": profile or "",
        "--out": "" if out is None else str(out),
    }
    named = [word for pair in options.items() if pair[1] for word in pair]
    return [str(recipe), *named, *(word for text in overrides for word in ("--set", text))]


def _members(base: Recipe, names: Sequence[str], seeds: Sequence[int], folder: Path) -> list[Member]:
    """All runs, Local first; seed by seed, so that the runs of a seed share the data in memory."""
    chosen = {name: base.choose(name) for name in names}
    if not any(recipe.method.name == "local" for recipe in chosen.values()):
        chosen = {"local": base.choose("local"), **chosen}
    return [
        Member(recipe.name, recipe.with_run(seed=seed, out=None), folder / recipe.name / f"seed-{seed}")
        for seed in seeds
        for recipe in chosen.values()
    ]


def check_all(members: Sequence[Member], folder: Path, force: bool, data: Prepared) -> list[Member]:
    """The runs that are still to be done, after everything that can be known beforehand has been checked.

    Args:
        members: all runs. folder: where tables will lie. force: also those that are done. data: kept between calls.

    Raises:
        RequestError: a folder is taken or cannot be made, data that are not there, models that do not fit.
    """
    pending = []
    _check_place(folder)
    if (folder / "rounds.jsonl").exists() or (folder / "recipe.toml").exists():
        raise RequestError(f"expected a folder for many runs, came {folder}, which holds a single one")
    for member in members:
        place = RunFolder(member.folder)
        settings = member.recipe.to_dict()
        place.check(settings, not force, force, member.recipe.build_method().planned)
        if force or place.finished(settings) is None:
            pending.append(member)
    fitted: set[str] = set()
    for member in pending:
        data.dealt(member.recipe)
        if member.name not in fitted:
            prepare(member.recipe, data=data)
            fitted.add(member.name)
    return pending


def run_all(
    members: Sequence[Member], pending: Sequence[Member], force: bool, data: Prepared, watchers: Sequence[Tracker]
) -> dict[str, str]:
    """Run what is pending, in order; a run that fails does not keep the others from running.

    Returns:
        ``"fedin, seed 0"`` -> why it failed.

    Raises:
        Interrupted: Ctrl-C; what is done is kept.
    """
    failures: dict[str, str] = {}
    for member in members:
        if member not in pending:
            for watcher in watchers:
                watcher.message(f"{member.title}: already done, in {member.folder}")
            continue
        try:
            federation = prepare(member.recipe, out=member.folder, trackers=watchers, data=data)
            federation.run(resume=not force, force=force)
        except Interrupted as stop:
            raise Interrupted(f"{member.title}: {stop}; the same command goes on") from None
        except PolyfedError as error:
            failures[member.title] = str(error)
            for watcher in watchers:
                watcher.message(f"{member.title} failed: {error}")
    return failures


def _summed_up(
    folder: Path, members: Sequence[Member], failures: Mapping[str, str], target: Target | None
) -> Comparison:
    done = [member.folder for member in members if member.title not in failures]
    if not done:
        return Comparison(folder, None, (), dict(failures))
    runs = find_runs(done)
    table = comparison(runs, target=target)
    axes = [axis for axis in axes_of(runs) if axis in ("round", "simulated")]
    drawn = [file for axis in axes for file in curves(runs, folder, axis)]
    files = [*write(table, folder), *drawn, write_page(runs, table, folder)]
    groups, _ = group_runs(runs)
    lines = tuple(tuple(_line(one) for one in series(group)) for group in groups)
    return Comparison(folder, table, tuple(files), dict(failures), lines, unlearnt_of(members, runs))


def unlearnt_of(members: Sequence[Member], runs: Sequence[RunRecord]) -> dict[str, str]:
    """``"fedin, seed 0"`` -> the line on a run in which nothing was learnt."""
    told = {run.path.resolve(): run.result.get("nothing_learnt") for run in runs if run.finished}
    found = {member.title: told.get(member.folder.resolve()) for member in members}
    return {title: line for title, line in found.items() if line}


def _line(curve: Series) -> Line:
    return Line(curve.name, curve.x, [100 * mean for mean in curve.mean])


# a check ----------------------------------------------------------------------------------------------------------


def check(
    recipe: str | Path | Recipe,
    *,
    method: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
    workers: int | None = None,
    profile: str | None = None,
) -> Check:
    """Whether a recipe works and what it costs: one batch per architecture is trained on, nothing is written.

    The arguments are those of `run`.

    Raises:
        RequestError: the request is wrong, or models and data do not fit the method.
        RunError: the method fails; says with which client.
    """
    resolved = _read(recipe, overrides, method, seed=seed, device=device, workers=workers, profile=profile)
    data = Prepared()
    federation = prepare(resolved, data=data)
    dealt = data.dealt(resolved)
    return measure(federation, unused=dealt.unused, holdout=len(dealt.holdout))
