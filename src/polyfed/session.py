"""From a recipe to a federation, a run, a comparison, or a check: what the command line does, for Python.

The only place that puts data, models and a method together by name.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from polyfed.core.client import Client, Public
from polyfed.core.message import Message, flatten, nbytes, read_only
from polyfed.core.method import floats
from polyfed.core.randomness import numpy_generator
from polyfed.data.federate import Federated, federate
from polyfed.data.samples import ClientData, Samples
from polyfed.data.sources import Source, load
from polyfed.data.transforms import Prepare
from polyfed.engine.evaluation import score_model
from polyfed.engine.executors import at_work
from polyfed.engine.federation import Federation, Run, Tracker
from polyfed.engine.folder import RunFolder
from polyfed.engine.training import train
from polyfed.errors import Interrupted, PolyfedError, RequestError, RunError
from polyfed.models.split import SplitModel, cuts
from polyfed.models.zoo import build
from polyfed.recipe import Recipe
from polyfed.report.figures import curves
from polyfed.report.folders import find_runs
from polyfed.report.tables import Table, comparison, to_text, write
from polyfed.track.console import Console
from polyfed.units import human_bytes, human_seconds

__all__ = ["Check", "Comparison", "Prepared", "check", "compare", "prepare", "run"]

_SHOWN_CLIENTS = 20  # lines of a check's table of clients


# data and models --------------------------------------------------------------------------------------------------


class Prepared:
    """Data as recipes want them; the last source and the last deal are kept, as a comparison asks for them often."""

    def __init__(self) -> None:
        self._source: tuple[object, Source] | None = None
        self._dealt: tuple[object, Federated] | None = None

    def source(self, recipe: Recipe) -> Source:
        """The recipe's data set, cut to its first rows where the recipe says so."""
        data = recipe.data
        key = (data.name, data.root, data.image_column, data.label_column, data.max_rows, data.max_test_rows)
        if self._source is None or self._source[0] != key:
            whole = load(data.name, data.root, image_column=data.image_column, label_column=data.label_column)
            if data.max_test_rows is not None and whole.test is None:
                raise RequestError(f"data.max_test_rows: expected no value, as '{data.name}' has no official test side")
            test = None if whole.test is None else whole.test.first(data.max_test_rows)
            self._source = (key, replace(whole, train=whole.train.first(data.max_rows), test=test))
        return self._source[1]

    def dealt(self, recipe: Recipe) -> Federated:
        """The data set as it is dealt to clients: a function of ``[data]`` and the seed, never of the method."""
        data, seed = recipe.data, recipe.run.seed
        if self._dealt is None or self._dealt[0] != (data, seed):
            dealt = federate(
                self.source(recipe),
                clients=data.clients,
                partition=data.partition,
                rng=lambda purpose: numpy_generator(seed, f"data {purpose}"),
                alpha=data.alpha,
                min_size=data.min_size,
                classes_per_client=data.classes_per_client,
                deal=data.deal,
                split=data.split,
                test=data.test,
                holdout=data.holdout,
                max_train=data.max_train,
                max_test=data.max_test,
            )
            self._dealt = ((data, seed), dealt)
        return self._dealt[1]


def prepare(
    recipe: Recipe,
    *,
    out: str | Path | None = None,
    trackers: Sequence[Tracker] = (),
    data: Prepared | None = None,
) -> Federation:
    """The federation that a recipe describes; nothing is written.

    Args:
        recipe: resolved settings.
        out: run folder; None for a run that leaves nothing behind.
        trackers: who watches.
        data: where data are kept between calls.

    Raises:
        RequestError: data that are not there or cannot be dealt so, models or a method that do not fit.
    """
    method = recipe.build_method()
    dealt = (data or Prepared()).dealt(recipe)
    source = dealt.source
    stored_as_is = Prepare(source.mean, source.std)
    names = _assign(recipe)
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
        seed=recipe.run.seed,
        public=Public(dealt.holdout, stored_as_is) if len(dealt.holdout) else None,
        test=dealt.test,
        classes=dealt.classes,
        builders={name: functools.partial(build, name, in_shape, dealt.classes, width) for name in names},
        device=recipe.run.device,
        out=out,
        checkpoint_every=recipe.run.checkpoint_every,
        dataset=source.name,
        settings=recipe.to_dict(),
        label=recipe.run.label,
        trackers=trackers,
    )


def _assign(recipe: Recipe) -> list[str]:
    """The architecture of every client."""
    names, count = recipe.models.architectures, recipe.data.clients
    if recipe.models.assign == "blocks":
        places = [client * len(names) // count for client in range(count)]
    elif recipe.models.assign == "random":
        drawn = numpy_generator(recipe.run.seed, "architectures").integers(0, len(names), count)
        places = [int(place) for place in drawn]
    else:
        places = [client % len(names) for client in range(count)]
    return [names[place] for place in places]


def _read(recipe: str | Path | Recipe, overrides: Sequence[str], method: str | None, **settings: Any) -> Recipe:
    """A recipe from a file, or the one given with the same changes."""
    if not isinstance(recipe, Recipe):
        return Recipe.load(recipe, overrides, method=method, **settings)
    if overrides:
        raise RequestError("expected overrides together with a recipe's file, came a Recipe; change its settings itself")
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
) -> Run:
    """Run a recipe.

    Args:
        recipe: a TOML file, or a `Recipe`.
        method: a method's or a variant's name, in place of the recipe's own.
        seed: in place of the recipe's own.
        overrides: ``"data.clients=20"``, as ``--set`` on the command line.
        out: run folder; default: the recipe's, else ``runs/<recipe>-<method>-seed<seed>``.
        resume: go on where the run folder's last checkpoint ends; a finished run is only read.
        force: replace the run that the folder holds.
        progress: show how it gets on, on standard error.
        device: "cpu", "cuda", "cuda:1".
        workers: 1, so far.

    Raises:
        RequestError: the request is wrong; nothing has been written.
        RunError: the run failed.
        Interrupted: Ctrl-C; a checkpoint has been written.
    """
    resolved = _read(recipe, overrides, method, seed=seed, out=out, device=device, workers=workers)
    folder = resolved.run.out or f"runs/{resolved.stem}-{resolved.name}-seed{resolved.run.seed}"
    RunFolder(folder).check(resolved.to_dict(), resume, force)  # before data are loaded
    federation = prepare(resolved, out=folder, trackers=[Console()] if progress else ())
    return federation.run(resume=resume, force=force)


# many runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What `compare` leaves behind. failures: ``"fedin, seed 0"`` -> why; files: tables and curves in `folder`."""

    folder: Path
    table: Table | None
    files: tuple[Path, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "no run was finished" if self.table is None else to_text(self.table)


@dataclass(frozen=True)
class _Member:
    """One run of a comparison."""

    recipe: Recipe
    folder: Path

    @property
    def title(self) -> str:
        return f"{self.recipe.name}, seed {self.recipe.run.seed}"


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
) -> Comparison:
    """Run methods x seeds on the same data, and put them side by side. Local is always among them.

    What is already done in `out` is not run again, what was interrupted goes on; a run that fails does not keep the
    others from running.

    Args:
        recipe: a TOML file, or a `Recipe`.
        methods: names of methods, or of variants in the recipe's ``[methods]``; default: all that the recipe names.
        seeds: one run of every method for each.
        out: folder; default ``runs/<recipe>``. The runs lie in ``<out>/<method>/seed-<n>``, the tables and curves in it.
        overrides: as for `run`; for one method only: ``"methods.fedgh.header_lr=0.1"``.
        force: run again what is already done.
        progress: show how it gets on, on standard error.
        device, workers: as for `run`.

    Raises:
        RequestError: the request is wrong; nothing has been written.
        Interrupted: Ctrl-C; call it again to go on.
    """
    if any(text.strip().startswith("method.") for text in overrides):
        raise RequestError("expected --set methods.NAME.KEY=VALUE, which says whose knob it is, came --set method.*")
    given = list(dict.fromkeys(methods or ()))
    base = _read(recipe, overrides, None, device=device, workers=workers) if not given else None
    base = base or _read(recipe, overrides, given[0], device=device, workers=workers)
    if not seeds:
        raise RequestError("expected at least one seed, came none")
    folder = Path(out if out is not None else base.run.out or f"runs/{base.stem}")
    members = _members(base, given or base.variants(), list(dict.fromkeys(seeds)), folder)
    watchers: list[Tracker] = [Console()] if progress else []
    data = Prepared()
    pending = _check_all(members, folder, force, data)
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
    return _summed_up(folder, members, failures)


def _members(base: Recipe, names: Sequence[str], seeds: Sequence[int], folder: Path) -> list[_Member]:
    """All runs, Local first; seed by seed, so that the runs of a seed share the data in memory."""
    chosen = {name: base.choose(name) for name in names}
    if not any(recipe.method.name == "local" for recipe in chosen.values()):
        chosen = {"local": base.choose("local"), **chosen}
    return [
        _Member(recipe.with_run(seed=seed, out=None), folder / name / f"seed-{seed}")
        for seed in seeds
        for name, recipe in chosen.items()
    ]


def _check_all(members: Sequence[_Member], folder: Path, force: bool, data: Prepared) -> list[_Member]:
    """The runs that are still to be done, after everything that can be known beforehand has been checked."""
    pending = []
    if (folder / "rounds.jsonl").exists() or (folder / "recipe.toml").exists():
        raise RequestError(f"expected a folder for many runs, came {folder}, which holds a single one")
    for member in members:
        place = RunFolder(member.folder)
        place.check(member.recipe.to_dict(), resume=not force, force=force)
        if force or place.read_result() is None:
            pending.append(member)
    fitted: set[str] = set()
    for member in pending:
        data.dealt(member.recipe)
        if member.recipe.name not in fitted:
            prepare(member.recipe, data=data)
            fitted.add(member.recipe.name)
    return pending


def _summed_up(folder: Path, members: Sequence[_Member], failures: Mapping[str, str]) -> Comparison:
    done = [member.folder for member in members if member.title not in failures]
    if not done:
        return Comparison(folder, None, (), dict(failures))
    runs = find_runs(done)
    table = comparison(runs)
    files = [*write(table, folder), *curves(runs, folder)]
    return Comparison(folder, table, tuple(files), dict(failures))


# a check ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArchitectureCheck:
    """What one architecture is and costs, measured on one of its clients.

    Attributes:
        name: of the architecture.
        client: number of the client that was measured. clients: how many have this architecture.
        parameters: how many numbers are trained. nbytes: of all its weights and buffers.
        cut: shape of a sample where it leaves the extractor. feature_dim: width of its representation.
        down, up: bytes of one exchange with that client in rounds 1 and 2.
        seconds_batch: one training step. seconds_rest: all else that one client costs in a round, scoring included.
    """

    name: str
    client: int
    clients: int
    parameters: int
    nbytes: int
    cut: tuple[int, ...] | None
    feature_dim: int | None
    down: tuple[int, int]
    up: tuple[int, int]
    seconds_batch: float
    seconds_rest: float


@dataclass(frozen=True)
class Check:
    """What a recipe would do, without doing it: that everything fits, and what it will cost.

    Attributes:
        recipe: the resolved recipe.
        architectures: one entry each.
        clients: one line of facts per client: architecture, sizes, labels.
        unused: rows of the data set that nobody gets. holdout: rows that the server holds.
        seconds: estimate for the whole run. bytes_up, bytes_down: likewise.
        nbytes: of all clients' weights and states and the server's, in memory.
    """

    recipe: Recipe
    architectures: tuple[ArchitectureCheck, ...]
    clients: tuple[Mapping[str, Any], ...]
    unused: int
    holdout: int
    seconds: float
    bytes_up: float
    bytes_down: float
    nbytes: int

    def __str__(self) -> str:
        recipe, training = self.recipe, self.recipe.training
        facts = [
            f"{recipe.name} on {recipe.data.name}: {recipe.data.clients} clients, {training.rounds} rounds; "
            "models and data fit the method",
            "",
            *_columns(
                [
                    "architecture",
                    "clients",
                    "parameters",
                    "cut",
                    "features",
                    "down, round 1 and 2",
                    "up, round 1 and 2",
                    "one batch",
                ],
                [
                    [
                        a.name,
                        str(a.clients),
                        f"{a.parameters:,}",
                        "-" if a.cut is None else "x".join(map(str, a.cut)),
                        "-" if a.feature_dim is None else str(a.feature_dim),
                        " and ".join(map(human_bytes, a.down)),
                        " and ".join(map(human_bytes, a.up)),
                        f"{1000 * a.seconds_batch:.1f} ms",
                    ]
                    for a in self.architectures
                ],
            ),
            "",
            *_columns(
                ["client", "architecture", "train", "valid.", "test", "training rows by class"],
                [
                    [
                        str(c["id"]),
                        c["architecture"],
                        str(c["train"]),
                        str(c["validation"]),
                        str(c["test"]),
                        " ".join(f"{label}:{count}" for label, count in c["labels"].items()),
                    ]
                    for c in self.clients[:_SHOWN_CLIENTS]
                ],
            ),
        ]
        if len(self.clients) > _SHOWN_CLIENTS:
            facts.append(f"... and {len(self.clients) - _SHOWN_CLIENTS} more clients")
        facts += [
            "",
            f"rows: {self.holdout} held out for the server, {self.unused} unused",
            f"whole run, about: {human_seconds(self.seconds)}, {human_bytes(self.bytes_up)} up, "
            f"{human_bytes(self.bytes_down)} down; {human_bytes(self.nbytes)} of weights in memory",
        ]
        return "\n".join(facts)


def check(
    recipe: str | Path | Recipe,
    *,
    method: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    device: str | None = None,
) -> Check:
    """Try a recipe on one batch per architecture, without writing anything.

    Two rounds are played with one client of each architecture, training on one batch only, but sending what it would
    send: some methods' first messages are smaller than the later ones.

    Raises:
        RequestError: the request is wrong, or models and data do not fit the method.
    """
    resolved = _read(recipe, overrides, method, seed=seed, device=device)
    data = Prepared()
    federation = prepare(resolved, data=data)
    dealt = data.dealt(resolved)
    trial = _Trial(federation)
    measured = trial.play()
    per_round = max(1, int(resolved.training.participation * len(federation.clients) + 1e-9))
    share, rounds = per_round / len(federation.clients), resolved.training.rounds
    kinds = {a.name: a for a in measured}
    all_of = [kinds[client.architecture] for client in federation.clients]
    steps = [trial.steps(client) for client in federation.clients]
    busy = sum(a.seconds_batch * n + a.seconds_rest for a, n in zip(all_of, steps, strict=True))
    return Check(
        recipe=resolved,
        architectures=tuple(measured),
        clients=tuple(_client_facts(client) for client in federation.clients),
        unused=dealt.unused,
        holdout=len(dealt.holdout),
        seconds=rounds * (share * busy + trial.server_seconds),
        bytes_up=share * sum(a.up[0] + (rounds - 1) * a.up[1] for a in all_of),
        bytes_down=share * sum(a.down[0] + (rounds - 1) * a.down[1] for a in all_of),
        nbytes=sum(a.nbytes for a in all_of) + nbytes(federation.server.state),
    )


class _Trial:
    """Two rounds of a federation with one client per architecture and one batch each."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._members = list({c.architecture: c for c in reversed(federation.clients)}.values())[::-1]
        self.server_seconds = 0.0

    def play(self) -> list[ArchitectureCheck]:
        """Measure every architecture.

        Raises:
            RunError: the method fails; says with which client.
        """
        federation, first = self._federation, {}
        federation.method.start(federation.server)
        for number in (1, 2):
            costs = self._round(number)
            first = first or costs
        return [self._describe(member, first[member.id], costs[member.id]) for member in self._members]

    def steps(self, client: Client) -> int:
        """Training steps of a client in a round."""
        size = client.training.batch_size
        phases = self._federation.method.phases(client.training)
        per_exchange = sum(phase.epochs * -(-len(getattr(client.data, phase.data)) // size) for phase in phases)
        return per_exchange * sum(exchange.trains for exchange in self._federation.method.exchanges(1))

    def _round(self, number: int) -> dict[int, _Cost]:
        method, server = self._federation.method, self._federation.server
        costs = {member.id: _Cost() for member in self._members}
        server.round = number
        began = time.perf_counter()
        method.plan(server, [member.id for member in self._members])
        for exchange in method.exchanges(number):
            server.exchange = exchange.name
            messages = {member.id: read_only(method.broadcast(server, member.id)) for member in self._members}
            self.server_seconds = time.perf_counter() - began
            uploads = {}
            for member in self._members:
                member.round, member.exchange = number, exchange.name
                uploads[member.id] = self._client(member, messages[member.id], exchange.trains, costs[member.id])
            began = time.perf_counter()
            method.aggregate(server, uploads)
            self.server_seconds += time.perf_counter() - began
        server.exchange = "train"
        return costs

    def _client(self, member: Client, message: Message, trains: bool, cost: _Cost) -> Message:
        """One client's part: everything as in a run, but for training on one batch instead of all."""
        federation = self._federation
        worker = at_work(member, federation.method.variant(federation.server, member.id), federation.architectures)
        began = time.perf_counter()
        try:
            context = federation.method.receive(worker, message)
            cost.rest += time.perf_counter() - began
            whole, trained = worker.data, None
            worker.data = _first_batch(whole, worker.training.batch_size)
            worker.training = worker.training.model_copy(update={"epochs": 1})
            began = time.perf_counter()
            if trains:
                trained = train(worker, federation.method, context)
                cost.batch = (time.perf_counter() - began) / max(trained.steps, 1)
            worker.data, worker.training = whole, member.training
            began = time.perf_counter()
            upload = federation.method.upload(worker, trained or _untrained())
            if len(whole.test):
                score_model(worker, federation.method, whole.test)
            cost.rest += time.perf_counter() - began
        except PolyfedError:
            raise
        except Exception as error:
            raise RunError(
                f"client {member.id} ({member.architecture}), round {member.round}: {type(error).__name__}: {error}"
            ) from error
        cost.down += nbytes(message)
        cost.up += nbytes(upload)
        cost.kept = nbytes(worker.state) + sum(t.numel() * t.element_size() for t in worker.model.state_dict().values())
        member.weights = {name: tensor.detach().cpu().clone() for name, tensor in worker.model.state_dict().items()}
        member.state = worker.state
        return {k: copy.deepcopy(dict(v)) if isinstance(v, Mapping) else v.clone() for k, v in upload.items()}

    def _describe(self, member: Client, first: _Cost, second: _Cost) -> ArchitectureCheck:
        module = self._federation.architectures.template(member.architecture)
        split = module if isinstance(module, SplitModel) else None
        x = member.prepare(member.data.train.x[:1]).to(self._federation.architectures.device)
        return ArchitectureCheck(
            name=member.architecture,
            client=member.id,
            clients=sum(c.architecture == member.architecture for c in self._federation.clients),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            nbytes=second.kept,
            cut=None if split is None else tuple(cuts(split, x)[0]),
            feature_dim=None if split is None else split.feature_dim,
            down=(first.down, second.down),
            up=(first.up, second.up),
            seconds_batch=second.batch,
            seconds_rest=second.rest,
        )


@dataclass
class _Cost:
    """What a client costs in a round: bytes, seconds per batch and beside training, bytes that it keeps."""

    down: int = 0
    up: int = 0
    batch: float = 0.0
    rest: float = 0.0
    kept: int = 0
