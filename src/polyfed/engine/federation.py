"""The only round loop: select, send down, let the clients work, take up, aggregate, score, record, checkpoint."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyfed.core.build_models import architectures_of
from polyfed.core.client import Client, Public, as_floats, samples_of
from polyfed.core.defence import Watch, check_defence, defended, objection
from polyfed.core.device import named_device
from polyfed.core.hostile import colluded, drawn, enlist
from polyfed.core.message import Message, State, flatten, in_plain_order, nbytes, read_only, shallow
from polyfed.core.method import Exchange, Method, scores_are_outputs
from polyfed.core.model_factory import Builder, Precision
from polyfed.core.modules import exported
from polyfed.core.profiling import section, watching
from polyfed.core.randomness import generator
from polyfed.core.releases import Release
from polyfed.core.server import Member, Server
from polyfed.core.settings import Availability, Compression, Defence, Evaluation, Hostile, Privacy, Training
from polyfed.core.uploads import arrived, bounded, check_uploads
from polyfed.data.classes import remarks
from polyfed.data.partition import check_integer
from polyfed.data.samples import ClientData, Samples, classes_up_to
from polyfed.data.text import Vocabulary
from polyfed.data.transforms import Prepare
from polyfed.engine import checkpoint
from polyfed.engine.arguments import (
    builders_by_name,
    clients_of,
    folder_of,
    list_of,
    mapping_of,
    method_of,
    public_of,
    settings_of,
)
from polyfed.engine.attendance import Attendance, LateUpload, Post, Roll
from polyfed.engine.checkpoint import Snapshot
from polyfed.engine.compatibility import check_companion, check_fit
from polyfed.engine.devices import Devices, attendance_in_effect, check_lateness
from polyfed.engine.dp_sgd import check_rows
from polyfed.engine.evaluation import NOT_EVALUATED, Measure, Memory, Score, check_measures, figures, summary
from polyfed.engine.executors.base import Executor, Job, Outcome, Scoring, at_work, has_own
from polyfed.engine.executors.process_pool import chosen
from polyfed.engine.executors.vectorized import stack_size
from polyfed.engine.executors.worker import Crew
from polyfed.engine.history import History, best_round, result_of, stopped_after
from polyfed.engine.model_readme import Guide
from polyfed.engine.notebook import of_federation, of_run
from polyfed.engine.run_folder import RunFolder, writing
from polyfed.engine.sharing import averaged
from polyfed.engine.simulation import Clock, Effort, Simulation, memory_needs
from polyfed.engine.spending import OverBudget, Spending
from polyfed.engine.weight_store import Row, Store, row_of
from polyfed.errors import Interrupted, PolyfedError, RequestError, RunError, described
from polyfed.registry import TRACKERS, is_own
from polyfed.tracking.base import Tracker as Tracker
from polyfed.tracking.base import tell, watcher


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        result: that of `result.json`. history: the records of `rounds.jsonl`; `history.to_frame()` is a table of them.
        models: one per client, by number. path: the run folder, if there is one.
    """

    result: Mapping[str, Any]
    history: History
    models: Mapping[int, nn.Module]
    path: Path | None

    def __repr__(self) -> str:
        told, accuracy = self.result, self.result["accuracy"]
        scored = "not scored" if accuracy is None else f"accuracy {accuracy:.4f} ({told['evaluation']['stage']})"
        if told.get("nothing_learnt"):
            scored = f"nothing was learnt, {scored}"
        sent = f"{told['bytes_up']:,} bytes up, {told['bytes_down']:,} down"
        where = "" if self.path is None else f", in {self.path}"
        return f"Run({told['method']}, {_count(len(self.history), 'round')}: {scored}, {sent}{where})"

    def _repr_html_(self) -> str:
        return of_run(self.result, self.history, self.path)


# settings that records and run folders name where they are on
_OPTIONAL = ("availability", "privacy", "compression", "defence", "hostile", "devices")


class Federation:
    """Clients, a server and a method.

    Args:
        clients: in order; their numbers are their places.
        method: e.g. ``polyfed.methods.FedGH()``.
        training, evaluation: settings; see there.
        availability: who is there, who drops out, what arrives late; default: everybody, always.
        privacy, compression: bounds and noise on what clients upload, and fewer bytes for it; default: neither.
        devices: what clients are simulated to compute on, and how they are connected; default: nothing is simulated.
        defence: what the server does about uploads that would lead it astray; default: nothing.
        hostile: how many clients play false, and how; default: none. Who does is drawn by the seed, and not scored.
        seed: every random draw of the run is derived from it.
        public: hold-out data that everybody may see. test: one test set shared by all clients, in place of their own.
        classes: of the task; default: the largest label anywhere plus one. class_names: what they are called.
        feature_names: of a table's columns, for whoever uses a model later. vocabulary: likewise, of texts.
        label_column: likewise, where the labels stood in files.
        builders: architecture name -> function that makes the network, for clients given by a name of your own, and for
            a companion that the method names. Names that a recipe takes ("digits-cnn1", "timm:resnet10t") need none.
        device: where networks compute ("cpu", "cuda", "cuda:1").
        precision: "bf16" trains with matrix products and convolutions in bfloat16 (weights, sums, messages and scores
            stay float32): faster where the processor has it, slower elsewhere, and the result is another one.
        executor: how the clients' work is carried out: "serial", one after the other in this process; "pool", by worker
            processes (Linux, device "cpu"), with the same result bit for bit; "cohort": clients of one network as one,
            with the same result up to rounding; "auto": the pool where it pays, on other devices the cohort;
            "flower-sim": processes of Ray, for a federation made of a recipe.
        workers: at most so many work at the same time; default: as many processes as this one may use cores, or
            cohorts of 32.
        out: run folder; None writes nothing. checkpoint_every: rounds between checkpoints.
        dataset: name for the records. settings: the resolved recipe, if there is one. label: name of the run in tables.
        keep: whose weights are the run's models: those after the last round, or after the one with the best validation
            accuracy of the main stage (the first, where several are equal).
        trackers: who watches: functions of a round's record, and objects with any of `Tracker`'s methods.
        metrics: figures of your own, name -> function of a client's counts (C, C), int64, rows the true class, columns
            the predicted one; NaN where it is not defined. They stand in records and tables beside the others.
        timings: whether the records tell where the time of each round went.

    Raises:
        RequestError: models or data do not fit the method or the settings, or a simulated device's memory; a device is
            not there, the executor is not possible here, there are no clients, or a tracker or a metric is none.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        method: Method,
        training: Training | None = None,
        evaluation: Evaluation | None = None,
        *,
        availability: Availability | None = None,
        privacy: Privacy | None = None,
        compression: Compression | None = None,
        devices: Devices | None = None,
        defence: Defence | None = None,
        hostile: Hostile | None = None,
        seed: int = 0,
        public: Public | None = None,
        test: Samples | tuple[Any, Any] | None = None,
        classes: int | None = None,
        class_names: Sequence[str] | None = None,
        feature_names: Sequence[str] = (),
        label_column: str | None = None,
        vocabulary: Vocabulary | None = None,
        builders: Mapping[str, Builder] | None = None,
        device: str | torch.device = "cpu",
        precision: Precision = "float32",
        executor: str = "auto",
        workers: int | None = None,
        out: Path | str | None = None,
        checkpoint_every: int = 5,
        dataset: str = "own data",
        settings: Mapping[str, Any] | None = None,
        label: str | None = None,
        keep: Literal["last", "best"] = "last",
        trackers: Sequence[object] = (),
        metrics: Mapping[str, Measure] | None = None,
        timings: bool = False,
    ) -> None:
        self.clients = clients_of(clients)
        self.method = method = method_of(method)
        self.trackers = [watcher(given) for given in list_of("trackers", trackers)]
        self.metrics = check_measures(mapping_of("metrics", metrics))
        self.training = settings_of("training", training, Training)
        self.evaluation = settings_of("evaluation", evaluation, Evaluation)
        self.availability = settings_of("availability", availability, Availability)
        self.privacy = settings_of("privacy", privacy, Privacy)
        self.compression = settings_of("compression", compression, Compression)
        self.devices = settings_of("devices", devices, Devices)
        self.defence = settings_of("defence", defence, Defence)
        self.hostile = settings_of("hostile", hostile, Hostile)
        check_lateness(self.availability, self.devices)
        seed, checkpoint_every = check_integer("seed", seed, 0), check_integer("checkpoint_every", checkpoint_every, 1)
        workers = None if workers is None else check_integer("workers", workers, 1)
        public, out, device = public_of(public), folder_of(out), str(device)
        test = None if test is None else samples_of(test, "test")
        self._hostile = drawn(self.hostile, len(self.clients), seed)
        _check_settings(self.clients, self.training, self.evaluation, self.availability, keep)
        self.simulation = Simulation(self.devices, len(self.clients), seed)
        self.seed = seed
        self.shared_test = test
        self.stages = self.evaluation.stages(method.scored)
        largest = max(_largest_label(client.data, test) for client in self.clients)
        known = classes_up_to(largest, "the clients' data")
        self.classes = known if classes is None else check_integer("classes", classes, 1)
        self.class_names = [*(map(str, range(self.classes)) if class_names is None else class_names)]
        if len(self.class_names) != self.classes:
            raise RequestError(f"expected {self.classes} class names, came {len(self.class_names)}")
        self.feature_names, self.vocabulary, self.label_column = tuple(feature_names), vocabulary, label_column
        for number, client in enumerate(self.clients):
            data = client.data if test is None else ClientData(client.data.train, client.data.validation, test)
            client.id, client.classes, client.seed, client.data = number, self.classes, seed, data
            client.training, client.public = self.training, public
            client.privacy, client.compression = self.privacy, self.compression
            if number in self._hostile:
                enlist(client, self._hostile[number], self.hostile)
        builders = mapping_of("builders", builders)
        self._by_name = builders_by_name(self.clients, builders, self.classes, self.vocabulary)
        named = _name_architectures(self.clients, {**builders, **self._by_name})
        check_companion(method, [*named, *builders])
        self.architectures = architectures_of(
            method, named, seed, named_device(device), others=builders, precision=precision
        )
        check_fit(method, self.clients, self.architectures, public)
        self.server = Server(
            {client.id: Member(client.architecture, client.n) for client in self.clients},
            self.architectures,
            rounds=self.training.rounds,
            classes=self.classes,
            seed=seed,
            training=self.training,
            public=public,
            initial={client.id: client.given for client in self.clients if client.given is not None},
            prepare=self.clients[0].prepare,
            example=self.clients[0].data.train.x[:0],
        )
        check_defence(method, self.defence)
        if self.privacy.clip or self.compression.on:
            first = first_of(self.clients) if method.changes else {}
            networks = {client.id: self.architectures.template(name) for name, client in first.items()}
            check_uploads(method, self.privacy, self.compression, self.server, networks)
        self._left_out: dict[int, str] = {}  # their variants, by number
        if self.devices.on:
            self._check_memory()
        self.attendance = Attendance(
            self.availability, len(self.clients), seed, self.simulation.availability(), self.simulation.left_out
        )
        if not self.attendance.present(1):
            raise RequestError("expected a client in round 1, came none: all are left out or join later")
        self.history: list[dict[str, Any]] = []
        rows = [client.n for client in self.clients]
        self.spending, self._is_spent = Spending(self.privacy, method, self.training, rows, self._asked), False
        self.privacy = self.spending.settings
        for client in self.clients:
            client.privacy = self.privacy
        check_rows(method, self.privacy, [*first_of(self.clients).values()], self.architectures, precision)
        self.spending.check()
        auc = "auc" in self.evaluation.metrics
        self._memory = Memory(auc)
        self.folder = None if out is None else RunFolder(out)
        beside = None if self.folder is None else self.folder.path
        self.store = Store(self.architectures, [client.architecture for client in self.clients], beside)
        crew = Crew(method, self.architectures, self.clients, self.store, auc)
        say = functools.partial(self._tell, "message")
        self.executor: Executor = chosen(executor, workers, crew, self.training, say, settings)
        self.checkpoint_every, self.keep = checkpoint_every, keep
        self._best: Snapshot | None = None  # where no folder holds it
        self.timings = timings
        self.facts: dict[str, Any] = {
            "method": _called(method, settings),
            "knobs": dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
            "label": label,
            "dataset": dataset,
            "class_names": self.class_names,
            "clients": len(self.clients),
            "rounds": self.training.rounds,
            "seed": seed,
            "workers": self.executor.workers,
            "precision": precision,
            "evaluation": {
                "stage": self.stages[0],
                "mean": self.evaluation.mean,
                "test": "client" if test is None else "global",
                "every": self.evaluation.every,
                "stages": self.stages,
                "patience": self.evaluation.patience,
                "min_delta": self.evaluation.min_delta,
            },
        }
        for name in _OPTIONAL:
            if limits := getattr(self, name).in_effect():
                self.facts[name] = limits
        if limits := attendance_in_effect(self.availability, self.devices):
            self.facts["availability"] = limits
        if self.devices.on:
            self.facts["left_out"] = sorted(self._left_out)
        if self._hostile:
            self.facts["hostile_clients"] = {str(number): kind for number, kind in self._hostile.items()}
            self.facts["evaluation"]["clients"] = "honest"
        size = stack_size(executor, device, workers)
        self._stacked = {"executor": "cohort", "workers": size} if size > 1 else {}
        self.settings = settings if settings is not None else self._settings()
        self._waiting: Sequence[LateUpload] = ()
        self._before: dict[int, tuple[Row | None, State]] = {}  # weights and state of those whom this round has changed

    def __repr__(self) -> str:
        facts, kinds = self.facts, len({client.architecture for client in self.clients})
        who = f"{_count(len(self.clients), 'client')} with {_count(kinds, 'architecture')}"
        what = f"{_count(facts['rounds'], 'round')}, seed {self.seed}"
        return f"Federation({facts['method']}, {who}, {facts['dataset']}, {what})"

    def _repr_html_(self) -> str:
        return of_federation(self.facts, self.clients, {name: self._trained(name) for name in first_of(self.clients)})

    @property
    def averaged(self) -> str:
        """What the method averages with whom, in a line; "" where it averages no networks."""
        if not hasattr(self.method, "aggregation"):
            return ""
        owners = [client.architecture for client in self.clients]
        templates = {name: self.architectures.template(name, alone=True) for name in first_of(self.clients)}
        return averaged(self.method, owners, {name: self.method.personal(one) for name, one in templates.items()})

    def _trained(self, architecture: str) -> int:
        """How many numbers of a client's own network are trained."""
        network = self.architectures.as_built(architecture)
        return sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)

    # running ------------------------------------------------------------------------------------------------

    def run(self, resume: bool = False, force: bool = False, progress: bool = False) -> Run:
        """Run all rounds.

        Args:
            resume: those after the last checkpoint of the run folder; a finished run is only read.
            force: replace the run that the folder holds.
            progress: show how it gets on, on standard error.

        A finished run goes on, too, where more rounds are planned now than it had: it ends as if they had been from the
        start.

        Raises:
            RequestError: the run folder is taken, or holds another recipe's run; nothing has been written then.
            RunError: a client or the server failed; says which, when and where.
            Interrupted: Ctrl-C; a checkpoint of the last whole round has been written.
        """
        for name, value in (("resume", resume), ("force", force), ("progress", progress)):
            if not isinstance(value, bool):
                raise RequestError(f"run: expected {name} to be True or False, got {described(value)}")
        given = self.trackers
        if progress:
            self.trackers = [TRACKERS["console"](), *given]
        try:
            return self._run(resume, force)
        finally:
            self.trackers = given

    def _run(self, resume: bool, force: bool) -> Run:
        if self.folder is None:
            return self._all_rounds()
        self.folder.check(self.settings, resume, force, self.method.planned)
        result = self.folder.finished(self.settings) if resume else None
        if result is not None:
            return self._read(result)
        with self.folder.open(self.settings, resume, force, self.method.planned):
            return self._all_rounds()

    def _all_rounds(self) -> Run:
        """The rounds after the last checkpoint, and then the result."""
        with one_thread(), contextlib.closing(self.executor):
            first, self._is_spent = self._restore() + 1, False
            if first == 1:
                self.server.admit(self.attendance.present(1))
                with _at("start", 0):
                    self.method.start(self.server)
            info = {**self.facts, "start_round": first, "out": None if self.folder is None else str(self.folder.path)}
            info |= {way: sum(r[way] for r in self.history) for way in ("bytes_up", "bytes_down")}
            self._tell("start", info)
            averaging = [self.averaged] if len(first_of(self.clients)) > 1 else []
            for remark in filter(None, [*averaging, *self.class_remarks()]):
                self._tell("message", remark)
            try:
                while not self._is_over():
                    number = len(self.history) + 1
                    self._round_or_undo(number)
                    if number % self.checkpoint_every == 0 or self._is_over() or self._best_round(number) == number:
                        self._checkpoint(number)
                self._close()
                result = result_of(self.history, self.facts, self._members())
                result["models_of_round"] = self._show()
                if self.folder is not None:
                    if self.folder.read_result() is not None:  # of fewer rounds
                        self.folder.clear_made()
                    self._write_models(self.folder)
                    self.folder.write_result(result)
            except KeyboardInterrupt:
                if self.history:
                    self._checkpoint(len(self.history))
                self._tell("end", None)
                raise Interrupted(f"interrupted after {len(self.history)} whole rounds, which are kept") from None
            except BaseException:
                self._tell("end", None)
                raise
        self._tell("end", result)
        return self._finished(result)

    def _is_over(self) -> bool:
        """Whether the last regular round is behind us; told from the records, so that a resumed run stops alike."""
        done = len(self.history)
        return done >= self.training.rounds or self._is_closed() or self._has_stopped() or self._has_spent()

    def _has_stopped(self) -> bool:
        return stopped_after(self.history, self.evaluation.patience, self.evaluation.min_delta) is not None

    def _is_closed(self) -> bool:
        return bool(self.history) and bool(self.history[-1]["closing"])

    def _close(self) -> None:
        """The method's closing round, if it has one."""
        done = len(self.history)
        if done < self.training.rounds and self._has_stopped() and not self._is_closed():
            self._tell("message", f"round {done}: stopped, as the validation accuracy has not become better")
        elif done < self.training.rounds and not self._is_closed():
            self._tell("message", f"round {done}: stopped, as another round would exceed privacy.budget")
        if not self._is_closed() and (closing := self.method.closing()):
            if self.spending.would_exceed(self.history, self.attendance.present(done + 1)):
                self._tell("message", "no closing round, as it would exceed privacy.budget")
                return
            self._round_or_undo(done + 1, closing)
            self._checkpoint(len(self.history))

    def _round_or_undo(self, number: int, closing: Sequence[Exchange] = ()) -> None:
        """A whole round or nothing: what is interrupted or fails leaves the federation as it was before."""
        self._before = {}
        state, waiting = shallow(self.server.state), self._waiting
        began = time.perf_counter()
        try:
            with watching(self.timings) as watch:
                record = self._round(number, closing)
            record["seconds"] = time.perf_counter() - began
            if watch is not None:
                record["timings"] = watch.shares(record["seconds"], self.executor.workers)
            if self.folder is not None:
                self.folder.append(record)
            self.history.append(record)
        except KeyboardInterrupt:
            self._take_back(self._earlier(number - 1, state, waiting))
            if number > 1:
                self._checkpoint(number - 1)
            raise Interrupted(f"interrupted in round {number}; {number - 1} whole rounds are kept") from None
        except OverBudget:
            self._take_back(self._earlier(number - 1, state, waiting))
            self._is_spent = True
            return
        except Exception:
            self._take_back(self._earlier(number - 1, state, waiting))
            raise
        self._before = {}  # or rows that nobody needs would stay
        pace = sum(r["seconds"] for r in self.history) / len(self.history)
        self._tell("round", record, pace * max(0, self.training.rounds - number))
        self._remark()

    def _remark(self) -> None:
        """Tell what the method has to say about the newest round, unless it has spoken in this run before."""
        *earlier, newest = self.history
        with _at("remark", newest["round"]):
            text = self.method.remark(newest)
            before = any(self.method.remark(record) for record in earlier) if text else False
        if text and not before:
            self._tell("message", f"round {newest['round']}: {text}")

    def _round(self, number: int, closing: Sequence[Exchange] = ()) -> dict[str, Any]:
        method, server = self.method, self.server
        roll = Roll(self.attendance.present(number)) if closing else self.attendance.roll(number)
        server.round = number
        server.admit(roll.present)
        drawn = roll.present if closing else self._select(number, roll.present)
        selected, asked = roll.reached(drawn), set(drawn)
        clock = self.simulation.clock(number, bool(closing))
        post = Post(number, () if closing else self._waiting, self.availability.late_by, method.accepts_late)
        due = bool(closing) or number % self.evaluation.every == 0 or self._is_last(number)
        tally, watch = _Tally(self.compression.on), Watch()
        with _at("planning", number), section("aggregate"), clock.serving():
            method.plan(server, selected)
        for place, exchange in enumerate(closing or method.exchanges(number)):
            server.exchange = exchange.name
            ids = drawn if exchange.who == "selected" else roll.present
            asked.update(ids)
            reached = [i for i in roll.reached(ids) if i not in tally.lost and i not in clock.stragglers]
            sent = self._pass(exchange, place, bool(closing), reached, roll, tally, due, clock)
            with _at("aggregation", number), section("aggregate"), clock.serving():
                self._take_in(post.deliver(exchange.name, sent, {*roll.late, *clock.stragglers}), watch)
                server.state = in_plain_order(server.state)
            del sent  # all that was sent, which nobody needs while the clients are scored
        server.exchange = "train"
        self._waiting = post.waiting
        record = {"round": number, "seconds": 0.0, "closing": bool(closing), "clients": selected}
        record |= {
            "lr": self.training.lr_at(number),
            "dropped": sorted({*roll.dropped(asked), *tally.lost}),
            **post.record(),
        }
        record |= {**tally.record(), **clock.record(), **self.spending.record(self.history, tally.releases)}
        if self.defence.rule != "none":
            record["defence"] = watch.record()
        if self._hostile:
            record["hostile"] = sorted(asked & self._hostile.keys())
        record["server"] = dict(server.log)
        server.log.clear()
        with section("score"):
            return {**record, "evaluated": due, **(self._evaluate(tally.scores) if due else NOT_EVALUATED)}

    def _take_in(self, uploads: Mapping[int, Message], watch: Watch) -> None:
        """Let the method aggregate what came up, as the defence leaves it."""
        self.method.aggregate(self.server, defended(self.defence, self.method, self.server, uploads, watch))

    def _pass(
        self,
        exchange: Exchange,
        place: int,
        closing: bool,
        ids: Sequence[int],
        roll: Roll,
        tally: _Tally,
        due: bool,
        clock: Clock,
    ) -> dict[int, Message]:
        """One passage down and up among the clients `ids`; what was sent by those that count and are heard."""
        scores = due and exchange.trains and "after_local" in self.stages
        with _at("broadcast", self.server.round), section("messages"), clock.serving():
            jobs = [
                Job(
                    self.clients[client_id],
                    read_only(self.method.broadcast(self.server, client_id)),
                    self.method.variant(self.server, client_id),
                    exchange,
                    self.server.round,
                    scores,
                    self._memory.auc,
                    closing,
                    place,
                    clock.on,
                )
                for client_id in ids
            ]
        carried_out = self.executor.run(jobs, functools.partial(self._client_done, len(jobs)))
        with section("messages"):
            outcomes = [self._whole(job, outcome) for job, outcome in zip(jobs, carried_out, strict=True)]
            outcomes = self._colluded(jobs, outcomes)
            outcomes = [self._judged(job, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]
        clock.passage(
            {
                outcome.client_id: Effort(nbytes(job.message), outcome.operations, outcome.bytes_up)
                for job, outcome in zip(jobs, outcomes, strict=True)
            },
            {outcome.client_id for outcome in outcomes if not outcome.dropped} - {*roll.unheard, *roll.late},
        )
        for job, sent, outcome in zip(jobs, carried_out, outcomes, strict=True):
            tally.add(job, outcome, self.method, outcome.client_id not in roll.unheard)
            if not sent.dropped and self.spending.hides:
                heard = sent.bytes_up > 0 and outcome.client_id not in roll.unheard
                entries = len(bounded(outcome.message) if outcome.counts else sent.message)  # unread: at most so many
                given = self.spending.releases(outcome.client_id, entries if heard else None, exchange)
                tally.releases.setdefault(outcome.client_id, []).extend(given)
            if outcome.counts:
                client = self.clients[outcome.client_id]
                self._before.setdefault(client.id, (row_of(client), client.state))
                client.weights, client.state = outcome.weights, outcome.state
                client.version += 1
        return {o.client_id: o.message for o in outcomes if o.counts and o.client_id not in roll.unheard}

    def _whole(self, job: Job, outcome: Outcome) -> Outcome:
        """The outcome with the upload as the method made it, up to what compression has lost; or refused."""
        if not self.compression.on or not outcome.counts:
            return outcome
        try:
            return dataclasses.replace(outcome, message=arrived(self.compression, outcome.message, job.message))
        except RunError as problem:
            return dataclasses.replace(outcome, message=read_only({}), refused=str(problem))

    def _colluded(self, jobs: Sequence[Job], outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes, what hostile clients make of the honest ones' uploads in the place of theirs."""
        if not self._hostile:
            return outcomes
        uploads = {outcome.client_id: outcome.message for outcome in outcomes if outcome.counts}
        sent = {job.client.id: job.message for job in jobs}
        false = colluded(self._hostile, self.hostile.scale, self.method, uploads, sent)
        return [
            dataclasses.replace(outcome, message=false[outcome.client_id]) if outcome.counts else outcome
            for outcome in outcomes
        ]

    def _judged(self, job: Job, outcome: Outcome) -> Outcome:
        """The outcome, refused where the defence objects to its upload."""
        if not outcome.counts:
            return outcome
        bad = objection(self.defence, self.method, self.classes, outcome.message, job.message)
        return outcome if bad is None else dataclasses.replace(outcome, message=read_only({}), refused=bad)

    def _select(self, number: int, present: Sequence[int]) -> list[int]:
        """The clients of a round, drawn from those present without replacement, in order of number."""
        order = torch.randperm(len(present), generator=generator(self.seed, "selection", number))
        return sorted(present[place] for place in order[: self.training.drawn(len(present))].tolist())

    def _asked(self, number: int) -> list[int]:
        """Who is to take part in a round, as far as nobody drops out."""
        present = self.attendance.present(number)
        everybody = any(exchange.who == "all" for exchange in self.method.exchanges(number))
        return present if everybody else self._select(number, present)

    def _is_last(self, number: int) -> bool:
        """Whether no regular round comes after this one, by what the settings and the records say before it."""
        if number == self.training.rounds or not self.privacy.budget:
            return number == self.training.rounds
        return self.spending.would_exceed(self.history, [*self._asked(number), *self._asked(number + 1)])

    def _has_spent(self) -> bool:
        """Whether the next round would be beyond the budget; told from the records, so that a resumed run stops so."""
        if not self.privacy.budget:
            return False
        return self._is_spent or self.spending.would_exceed(self.history, self._asked(len(self.history) + 1))

    # scoring --------------------------------------------------------------------------------------------------

    def _evaluate(self, after_local: Mapping[int, Score]) -> dict[str, Any]:
        """The figures of all stages, and the validation accuracy of the main one."""
        validated = self.stages[0] if self.stages[0] != "after_local" else "personal"
        wanted = [(stage, "test") for stage in self.stages if stage != "after_local"] + [(validated, "validation")]
        found = self._scores(wanted)
        honest = {number: score for number, score in after_local.items() if number not in self._hostile}
        scores = {stage: honest if stage == "after_local" else found[stage, "test"] for stage in self.stages}
        names = [client.architecture for client in self.clients]
        record = figures(scores, names, self.evaluation, self.metrics)
        held = found[validated, "validation"].values()
        return {**record, "validation": summary(held, self.evaluation.mean).get("mean")}

    def _scores(self, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], dict[int, Score]]:
        """The scores of the honest ones present by (stage, part of the data), anew where they may have changed."""
        there = self.server.clients.keys() | self._left_out.keys()
        judged = [client for client in self.clients if client.id in there and client.id not in self._hostile]
        looks = {client.id: self._looks(client, [stage for stage, _ in wanted]) for client in judged}
        missing: dict[_Look, list[str]] = {}
        for stage, part in wanted:
            for look in (of_stage[stage] for of_stage in looks.values()):
                asked = missing.setdefault(look, [])
                if len(getattr(look.client.data, part)) and part not in asked and self._recall(look, part) is None:
                    asked.append(part)
        missing = {look: parts for look, parts in missing.items() if parts}
        taken = self.executor.score([self._scoring(look, parts) for look, parts in missing.items()])
        for look, scores in zip(missing, taken, strict=True):
            for part, score in scores.items():
                self._memory.keep(look.client.id, look.message is not None, part, look.key, score)
        known = {
            pair: {i: self._recall(of_stage[pair[0]], pair[1]) for i, of_stage in looks.items()} for pair in wanted
        }
        return {pair: {i: s for i, s in scores.items() if s is not None} for pair, scores in known.items()}

    def _looks(self, client: Client, stages: Sequence[str]) -> dict[str, _Look]:
        """What of the client is scored at each stage; what needs the same message is the same."""
        if client.id in self._left_out:
            variant = self._left_out[client.id]
            return dict.fromkeys(stages, _Look(client, variant, None, _Key(client.version, variant, {})))
        variant = self.method.variant(self.server, client.id)
        own = has_own(client, variant, self.architectures)
        asks = {stage: stage == "received" or not own for stage in stages}  # who never took part, say
        message = self.method.broadcast(self.server, client.id) if any(asks.values()) else {}
        as_it_stands = _Look(client, variant, None, _Key(client.version, variant, {}))
        received = _Look(client, variant, message, _Key(client.version, variant, message)) if message else as_it_stands
        return {stage: received if asked else as_it_stands for stage, asked in asks.items()}

    def _recall(self, look: _Look, part: str) -> Score | None:
        return self._memory.recall(look.client.id, look.message is not None, part, look.key)

    def _scoring(self, look: _Look, parts: Sequence[str]) -> Scoring:
        shared = [part for part in parts if getattr(look.client.data, part) is self.shared_test]
        return Scoring(look.client, look.variant, look.message, self.server.round, parts, shared)

    def _present(self) -> list[Client]:
        return [client for client in self.clients if client.id in self.server.clients]

    def _worker(self, client: Client, variant: str, message: Message | None) -> Client:
        """A working copy holding the client's own weights, after receiving `message` if there is one."""
        worker = at_work(client, variant, self.architectures)
        worker.round = self.server.round
        if message is not None:
            self.method.receive(worker, read_only(message))
        return worker

    def export(self, client_id: int) -> nn.Module:
        """A copy of the client's personal model; where it has none of this kind yet, what it would receive now.

        Raises:
            RequestError: there is no such client, or it has not joined yet.
        """
        if client_id not in self.server.clients:
            here = ", ".join(map(str, self.server.clients))
            raise RequestError(f"expected a client that is present ({here}), came {client_id}")
        return copy.deepcopy(self.method.personal(self._keeper(client_id).model)).eval()

    def _keeper(self, client_id: int) -> Client:
        """The client at work with what it keeps; see `export`."""
        client = self.clients[client_id]
        variant = self.method.variant(self.server, client_id)
        own = has_own(client, variant, self.architectures)
        return self._worker(client, variant, None if own else self.method.broadcast(self.server, client_id))

    # keeping --------------------------------------------------------------------------------------------------

    def _snapshot(self, number: int) -> Snapshot:
        """The present state; its tensors are never written into, so that references are enough."""
        weights = {client.id: row_of(client) for client in self.clients}
        states = {client.id: client.state for client in self.clients}
        return Snapshot(number, shallow(self.server.state), weights, states, self._waiting)

    def _earlier(self, number: int, state: State, waiting: Sequence[LateUpload]) -> Snapshot:
        """What has to be put back to be where the last round ended: of clients, those who have changed since."""
        weights = {client_id: row for client_id, (row, _) in self._before.items()}
        states = {client_id: own for client_id, (_, own) in self._before.items()}
        return Snapshot(number, state, weights, states, waiting)

    def _take_back(self, snapshot: Snapshot) -> None:
        """As it was then; of clients, those that the snapshot names."""
        self.server.state, self.server.round, self.server.exchange = shallow(snapshot.server), snapshot.round, "train"
        self.server.admit(self.attendance.present(max(1, snapshot.round)))
        self.server.log.clear()
        self._waiting = snapshot.late
        del self.history[snapshot.round :]
        for number, weights in snapshot.weights.items():
            client = self.clients[number]
            client.weights, client.state = weights, shallow(snapshot.states[number])
            client.version += 1

    def _checkpoint(self, number: int) -> None:
        if self.folder is not None:
            with writing(self.folder.path):
                checkpoint.write(self.folder.checkpoints, self._snapshot(number), self._best_round)
        elif self._best_round(number) == number:
            self._best = self._snapshot(number)

    def _best_round(self, upto: int) -> int | None:
        """The best round so far, where its models are wanted."""
        return best_round(self.history[:upto]) if self.keep == "best" else None

    def _show(self) -> int:
        """Be what the federation was after the round whose models are wanted; gives its number."""
        last = self.history[-1]["round"]
        number = self._best_round(last)
        if number is None or number == last:
            return int(last)
        snapshot = self._best
        if self.folder is not None:
            snapshot = checkpoint.of_round(self.folder.checkpoints, number, len(self.clients), self.store)
        assert snapshot is not None
        history, self.history = self.history, []
        self._take_back(snapshot)
        self.history = history
        return number

    def _latest(self, folder: RunFolder, before: int | None = None) -> Snapshot | None:
        return checkpoint.latest(folder.checkpoints, len(self.clients), self.store, self._expect(folder), before)

    def _expect(self, folder: RunFolder) -> Callable[[int], None]:
        """What must be there besides a checkpoint of a round: the records up to it, and the best one's checkpoint."""

        def expect(number: int) -> None:
            records = folder.records(number)
            known = {str(client.id) for client in self.clients}
            if strange := {each for record in records for each in record["bytes_by_client"]} - known:
                raise RequestError(f"the records tell of a client {min(strange)[:20]!r}, who is not in the run")
            best = best_round(records) if self.keep == "best" else None
            if best not in (None, number) and not checkpoint.is_whole(folder.checkpoints, best or 0):
                raise RequestError(f"that of the best round before it, {best}, is damaged")

        return expect

    def _restore(self) -> int:
        """Go back to the run folder's last checkpoint; the number of its round, 0 where there is none."""
        longer = self.folder is not None and self.folder.has_fewer_rounds(self.settings)
        snapshot = None if self.folder is None else self._from_where(self.folder, longer)
        if self.folder is None or snapshot is None:
            if self.folder is not None:
                self.folder.rounds(0)
            self._take_back(Snapshot(0, {}, dict.fromkeys(range(len(self.clients))), {c.id: {} for c in self.clients}))
            self.history = []
            self._begin_left_out()
        else:
            self._take_back(snapshot)
            self.history = self.folder.rounds(snapshot.round)
        if self.folder is not None and longer:
            if self.history:
                self._unscore(self.folder)
            self.folder.write_recipe(self.settings)  # at last: whoever is killed before begins as before
        return len(self.history)

    def _from_where(self, folder: RunFolder, longer: bool) -> Snapshot | None:
        """The checkpoint to go on from: the last one; for more rounds than there were to be, that before a closing one.

        Raises:
            RequestError: there was one and it has gone, or what the closing round gave away cannot be taken back.
        """
        snapshot = self._latest(folder)
        if snapshot is None and folder.read_result() is not None:
            raise RequestError(f"expected a checkpoint to go on from in {folder.checkpoints}, got none; use --force")
        if snapshot is None or not longer:
            return snapshot
        *self.history, last = folder.records(snapshot.round)
        if not last["closing"] or self._has_stopped():
            return snapshot
        if last.get("releases"):
            raise RequestError(
                f"{folder.path} cannot go on for more rounds: its closing round has given away what counts in epsilon; "
                "choose another --out or --force"
            )
        earlier = self._latest(folder, before=snapshot.round)
        if earlier is None:
            place = folder.checkpoints
            raise RequestError(f"expected the checkpoint before the closing round in {place}, got none; use --force")
        checkpoint.remove(folder.checkpoints, snapshot.round)
        return earlier

    def _unscore(self, folder: RunFolder) -> None:
        """Take the scores out of the record of the round that was to be the last one, if it is not due otherwise."""
        *before, last = self.history
        number = last["round"]
        if not last["evaluated"] or last["closing"] or number % self.evaluation.every == 0:
            return
        self.history = before
        if not self._is_last(number):
            last = {**last, "evaluated": False, **NOT_EVALUATED}
            folder.replace_last(last)
        self.history = [*before, last]

    def _check_memory(self) -> None:
        """Whose network does not fit its device."""
        needs, names, variants = memory_needs(self.method, self.clients, self.architectures, self.server)
        self.simulation.fit(needs, names)
        self._left_out = {number: variants[number] for number in sorted(self.simulation.left_out)}

    def _begin_left_out(self) -> None:
        """Who is left out keeps the network that it begins with, and is scored with it."""
        for number, variant in self._left_out.items():
            client = self.clients[number]
            begun = self.architectures.initial(client.architecture, variant, number, client.given)
            client.weights = self.store.fresh(client.architecture, variant).write(begun)
            client.version += 1

    def _members(self) -> list[dict[str, Any]]:
        """Who the clients are, for the result."""
        return [
            {
                "id": c.id,
                "architecture": c.architecture,
                "samples": c.n,
                **seen,
                **({"device": self.simulation.names[c.id]} if self.devices.on else {}),
            }
            for c, seen in zip(self.clients, self._seen(), strict=True)
        ]

    def class_remarks(self) -> list[str]:
        """What is odd about the clients' classes (`polyfed.data.classes.remarks`)."""
        trained = {label for client in self.clients for label in client.data.train.y.unique().tolist()}
        sides = {id(client.data.test): client.data.test for client in self.clients}  # a shared one is looked at once
        tested = {label for side in sides.values() for label in side.y.unique().tolist()}
        return remarks(self.class_names, trained, tested)

    def _seen(self) -> list[dict[str, Any]]:
        """Of each client what only whoever has its network and its data can tell."""
        parameters = {name: self._trained(name) for name in first_of(self.clients)}
        return [
            {"parameters": parameters[client.architecture], "labels": client.data.train.counts()}
            for client in self.clients
        ]

    def _write_models(self, folder: RunFolder) -> None:
        alone = scores_are_outputs(self.method)  # else what clients keep may have a say
        guide = Guide(self.architectures, alone)
        with folder.models() as write:
            words = None if self.vocabulary is None else folder.write_words(self.vocabulary.words)
            for client in self._present():
                keeper = self._keeper(client.id)
                weights = exported(self.method.personal(keeper.model))
                about = self._about(client, words)
                write(client.id, weights, {} if alone else keeper.state, about)
                guide.add(client.id, weights, about)
        folder.write_guide(guide.text())

    def _about(self, client: Client, words: str | None) -> dict[str, Any]:
        """What somebody who has neither the data nor the recipe must know to use the client's model.

        words: of texts, the checksum of the file of words.
        """
        models, x, prepare = self.settings.get("models"), client.data.train.x, client.prepare
        modules = self.settings.get("run", {}).get("modules")
        texts = self.vocabulary
        normalised = dataclasses.asdict(prepare) if isinstance(prepare, Prepare) else None
        plain = "plain" if prepare is as_floats else None
        return {
            "architecture": client.architecture,
            "classes": self.classes,
            "class_names": self.class_names,
            "feature_names": list(self.feature_names),
            "label_column": self.label_column,
            "vocabulary": None if texts is None else texts.most,
            "texts": None if texts is None else {"column": texts.column, "sha256": words},
            "vectors": self.settings.get("data", {}).get("vectors"),
            "samples": client.n,
            "zoo": models is not None or client.architecture in self._by_name,
            "feature_dim": None if models is None else models.get("feature_dim"),
            "input": {"shape": list(x.shape[1:]), "type": str(x.dtype).removeprefix("torch.")},
            "image_size": self.settings.get("data", {}).get("image_size"),
            "prepare": normalised or plain,
            "method": self.facts["method"],
            "knobs": self.facts["knobs"],
            "variant": self.method.variant(self.server, client.id),
            "companion": None if self.architectures.chosen is None else self.architectures.chosen.network,
            "round": self.server.round,
            **({} if modules is None else {"modules": modules}),
        }

    def _finished(self, result: Mapping[str, Any]) -> Run:
        path = None if self.folder is None else self.folder.path
        return Run(result, History(self.history), _Models(self.export, list(self.server.clients)), path)

    def _read(self, result: Mapping[str, Any]) -> Run:
        """A finished run, from its folder, which stays as it is; its models need the last checkpoint."""
        assert self.folder is not None
        snapshot = self._latest(self.folder)
        closed = result.get("closed", bool(self.method.closing()))
        last = (result.get("stopped_after") or self.training.rounds) + closed
        self.history = self.folder.rounds(last)
        if snapshot is not None and snapshot.round == last:
            self._take_back(snapshot)
            self.history = self.folder.rounds(last)
            self._show()
            return self._finished(result)
        present = self.attendance.present(last)
        return Run(result, History(self.history), _Models(self._gone, present), self.folder.path)

    def _gone(self, client_id: int) -> nn.Module:
        raise RequestError(f"the run's last checkpoint is gone; client {client_id}'s weights are in its models/ folder")

    def _client_done(self, total: int, done: int) -> None:
        self._tell("client_done", done, total)

    def _tell(self, event: str, *what: Any) -> None:
        tell(self.trackers, event, *what)

    def _settings(self) -> dict[str, Any]:
        """What a run folder records of a federation that was made in Python."""
        knobs = {k: v for k, v in self.facts["knobs"].items() if v is not None}
        kept = {} if self.keep == "last" else {"keep": self.keep}
        return {
            "method": {"name": self.facts["method"], **knobs},
            "training": self.training.in_effect(),
            "evaluation": self.evaluation.in_effect(),
            **{name: self.facts[name] for name in _OPTIONAL if name in self.facts},
            "run": {"seed": self.seed, "precision": self.facts["precision"], **self._stacked, **kept},
            "federation": {
                "dataset": self.facts["dataset"],
                "architectures": [client.architecture for client in self.clients],
                "samples": [client.n for client in self.clients],
                **({"metrics": list(self.metrics)} if self.metrics else {}),
            },
        }


class _Tally:
    """What a round adds up to, over its exchanges."""

    def __init__(self, compressed: bool) -> None:
        self.down: dict[int, int] = {}
        self.up: dict[int, int] = {}
        self.uncompressed = 0 if compressed else None  # bytes that would have gone up
        self.paper = [0, 0]
        self.refused: list[dict[str, Any]] = []
        self.loss = self.samples = self.steps = 0.0
        self.sums: dict[str, float] = {}
        self.scores: dict[int, Score] = {}
        self.releases: dict[int, list[Release]] = {}  # client -> what its uploads gave away
        self.lost: set[int] = set()  # whose work came to nothing, not by their own fault

    def add(self, job: Job, outcome: Outcome, method: Method, heard: bool) -> None:
        """Count one outcome. Bytes count when sent, also those of a refused upload, unless nothing left the client."""
        number = outcome.client_id
        if outcome.dropped:
            self.lost.add(number)
        self.down[number] = self.down.get(number, 0) + nbytes(job.message)
        self.up[number] = self.up.get(number, 0) + (outcome.bytes_up if heard else 0)
        self.paper[0] += method.paper_nbytes(job.message)
        self.paper[1] += method.paper_nbytes(outcome.message) if heard else 0
        if self.uncompressed is not None and heard:
            self.uncompressed += nbytes(outcome.message)
        if outcome.refused is not None:
            self.refused.append({"client": number, "reason": outcome.refused})
        if not outcome.counts:
            return
        self.loss += outcome.trained.loss * outcome.trained.samples
        self.samples += outcome.trained.samples
        self.steps += outcome.trained.steps
        for name, value in outcome.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if outcome.score is not None:
            self.scores[number] = outcome.score

    def record(self) -> dict[str, Any]:
        """The round's part of `rounds.jsonl`; `sums` are the method's own, per training step."""
        return {
            "bytes_up": sum(self.up.values()),
            "bytes_down": sum(self.down.values()),
            **({} if self.uncompressed is None else {"bytes_up_uncompressed": self.uncompressed}),
            "bytes_up_as_in_paper": self.paper[1],
            "bytes_down_as_in_paper": self.paper[0],
            "bytes_by_client": {str(n): {"down": self.down[n], "up": self.up[n]} for n in sorted(self.down)},
            "train_loss": self.loss / self.samples if self.samples else None,
            "samples": int(self.samples),
            "refused": self.refused,
            "sums": {name: value / max(self.steps, 1) for name, value in self.sums.items()},
        }


class _Key:
    """What a score depends on. Equal only if the message is made of the very same tensors, which nobody writes into."""

    def __init__(self, version: int, variant: str, message: Message) -> None:
        self._facts = (version, variant)
        self._tensors = flatten(message)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Key)
            and self._facts == other._facts
            and self._tensors.keys() == other._tensors.keys()
            and all(tensor is other._tensors[name] for name, tensor in self._tensors.items())
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class _Look:
    """A client as it is scored. message: what it receives before; None: nothing. key: what the score depends on."""

    client: Client
    variant: str
    message: Message | None
    key: _Key


class _Models(Mapping[int, nn.Module]):
    """Personal models by client number, made when asked for."""

    def __init__(self, export: Callable[[int], nn.Module], present: Sequence[int]) -> None:
        self._export, self._present = export, present

    def __getitem__(self, client_id: int) -> nn.Module:
        if client_id not in self._present:
            raise KeyError(client_id)
        return self._export(client_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._present)

    def __len__(self) -> int:
        return len(self._present)


@contextlib.contextmanager
def _at(stage: str, number: int) -> Iterator[None]:
    """Errors of the server half name the stage and the round."""
    try:
        yield
    except RunError as error:
        raise RunError(f"server, round {number}, {stage}: {error}") from error
    except PolyfedError:
        raise
    except Exception as error:
        raise RunError(f"server, round {number}, {stage}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One computing thread: the same bits whatever the machine's cores, and no slow-down beside busy neighbours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def first_of(clients: Sequence[Client]) -> dict[str, Client]:
    """The first client of each architecture."""
    return {client.architecture: client for client in reversed(clients)}


def _check_settings(
    clients: Sequence[Client], training: Training, evaluation: Evaluation, availability: Availability, keep: str
) -> None:
    """What the settings ask of each other and of the clients."""
    if keep not in ("last", "best"):
        raise RequestError(f"keep: expected 'last' or 'best', got {keep!r}")
    joiners = availability.joiners
    if joiners >= len(clients):
        raise RequestError(
            f"availability.joiners: expected fewer than the {len(clients)} clients, as one at least is there from "
            f"round 1, came {joiners}"
        )
    if joiners and availability.join_round > training.rounds:
        raise RequestError(
            f"availability.join_round: expected at most training.rounds = {training.rounds}, came "
            f"{availability.join_round}"
        )
    if any(len(client.data.validation) for client in clients):
        return
    for key, asked, why in (
        ("evaluation.patience", evaluation.patience > 0, "by which a run stops early"),
        ("run.keep = 'best'", keep == "best", "by which the best round is told"),
    ):
        if asked:
            raise RequestError(
                f"{key}: expected validation data, {why}, came none; give data.split a validation part ('8:1:1', "
                "'official:9:1')"
            )


def _called(method: Method, settings: Mapping[str, Any] | None) -> str:
    """A method's name, by which it can be made again; one of the user's own goes by that of the recipe."""
    asked = (settings or {}).get("method", {}).get("name", "")
    return asked if is_own(asked) else method.name or type(method).__name__


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _largest_label(data: ClientData, test: Samples | None) -> int:
    parts = [data.train, data.validation, data.test, *([] if test is None else [test])]
    return max(int(part.y.max()) for part in parts if len(part))


def _name_architectures(clients: Sequence[Client], builders: dict[str, Builder]) -> dict[str, Builder]:
    """Name the architectures of clients that came with a network: alike in class and tensors means alike."""
    known: dict[object, str] = {}
    named: dict[str, Builder] = {}
    for client in clients:
        if client.given is None:
            named[client.architecture] = builders[client.architecture]
            continue
        module = client.given
        shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in module.state_dict().items())
        kind = (type(module), repr(module), shapes)
        if kind not in known:
            base = getattr(module, "architecture", "") or type(module).__name__
            taken = set(named) | set(builders)
            names = [base, *(f"{base}-{i}" for i in range(2, len(clients) + 2))]
            known[kind] = next(name for name in names if name not in taken)
            named[known[kind]] = lambda module=module: copy.deepcopy(module)  # type: ignore[misc]
        client.architecture = known[kind]
    return named
