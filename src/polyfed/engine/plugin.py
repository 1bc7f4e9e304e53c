"""What a federation can be given beside its method: plugins, whose hooks the engine calls at fixed places of a round.

A plugin's hooks do nothing unless they are overridden. They run in the order of the federation's plugins, those that
read what arrived (`decode`, `receive`) in the reverse order: what was done last to an upload is undone first.

    before round 1   validate
    a round          absent, select; then for every exchange: encode (at the client), receive / decode, after_jobs,
                     complete, before_aggregate, aggregate; at its end: record
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from polyfed.core.client import Client
from polyfed.core.message import ADDENDS, Message, first_nonfinite, freeze
from polyfed.core.method import Method
from polyfed.core.model_factory import Builder, ModelFactory
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Settings, Stage, Training
from polyfed.core.upload_forms import UploadContext
from polyfed.data.samples import ClientData
from polyfed.engine.executors.executor import Executor
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.method_wrappers import preview
from polyfed.engine.round_state import Round, draw_cohort
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.scoring import Measure
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.uploads import Rejected as Rejected
from polyfed.engine.uploads import find_mismatch
from polyfed.engine.weight_store import WeightStore
from polyfed.engine.work_in_flight import WorkInFlight
from polyfed.errors import ConfigError, RunError, described, first_line
from polyfed.loggers.base import notify
from polyfed.registry import PLUGINS

_LONGEST = 300  # characters of an error that an upload has caused


class Setup:
    """A federation as its plugins see it, and all parts of a run: what was given, completed and checked.

    Attributes:
        method, clients, server, model_factory, training, evaluation, seed, task, metrics, execution, output, loggers:
            those of the federation; clients by number.
        plugins: all of them, in order.
        stages: at which clients are scored, the main one first.
        held_out: clients that never train, and are scored as newcomers.
        excluded: clients that take no part at all -> the variant of their network. Plugins add to it.
        unscored: clients that are not scored. Plugins add to it.
        by_name: architectures of clients that a recipe can name.
        history: the records of the rounds so far. given_data: of the clients, which plugins may give others.

        Not yet there when plugins see it:
        folder: of the run; None writes nothing. store: of the clients' weights. executor: carries out their jobs.
        facts: what loggers, results and tables know of the run. settings: what the run folder records.
        code: checksums of the user's modules.
    """

    clients_are_elsewhere: ClassVar[bool] = False  # their networks and rows here are placeholders

    method: Method
    clients: list[Client]
    server: Server
    model_factory: ModelFactory
    training: Training
    evaluation: Evaluation
    seed: int
    task: Task
    metrics: Mapping[str, Measure]
    execution: Execution
    output: Output
    loggers: list[Any]
    plugins: list[Plugin]
    stages: Sequence[Stage]
    held_out: frozenset[int]
    excluded: dict[int, str]
    unscored: set[int]
    by_name: Mapping[str, Builder]
    history: list[dict[str, Any]]
    given_data: Sequence[ClientData]
    folder: RunFolder | None
    store: WeightStore
    executor: Executor
    facts: Mapping[str, Any]
    settings: Mapping[str, Any]
    code: Mapping[str, str]

    def present(self, number: int) -> list[int]:
        """Who is in the federation in round `number`, asked or not, in order of number."""
        absent = {client for plugin in self.plugins for client in plugin.absent(number)}
        return [client.id for client in self.clients if client.id not in absent | self.held_out]

    def cohort(self, number: int) -> list[int]:
        """Who is to take part in a round, as far as nobody drops out."""
        present = self.present(number)
        everybody = any(exchange.who == "all" for exchange in self.method.exchanges(number))
        return present if everybody else draw_cohort(self.training, self.seed, number, present)

    @functools.cached_property
    def preview(self) -> Server:
        """The server as it would be in round 1."""
        return preview(self.method, self.server)

    def first_of_each_architecture(self) -> dict[str, Client]:
        """Architecture -> its first client."""
        return {client.architecture: client for client in reversed(self.clients)}

    def tell(self, event: str, *what: Any) -> None:
        """Call a method of all loggers that have it."""
        notify(self.loggers, event, *what)


class Plugin:
    """One concern of a federation. Most need some of the first five hooks; see the module's docstring for the order.

    Attributes:
        name: of the recipe's section and, where there is something to tell, of the record's.
        settings_class: what the recipe's section is made of; None: it has no settings.
        settings: as given.
        work: what it holds back between rounds, if it `holds_work`. The engine keeps it in checkpoints and gives it
            back.
    """

    name: ClassVar[str] = ""
    settings_class: ClassVar[type[Settings] | None] = None

    def __init__(self, settings: Any = None) -> None:
        if settings is None and self.settings_class is not None:
            settings = self.settings_class()
        if self.settings_class is not None and not isinstance(settings, self.settings_class):
            kind = self.settings_class.__name__
            raise ConfigError(f"plugin '{self.name}': expected its settings, {kind}(...), got {described(settings)}")
        self.settings: Any = settings

    def select(self, round: Round) -> None:
        """Say who drops out of a round, or is late: `round.unreachable`, `round.silenced`, `round.late`.

        A final round reaches everybody who is present: most plugins leave it alone.
        """

    def encode(self, upload: Message, client: Client, method: Method, received: Message) -> Message:
        """What leaves the client in place of `upload`. Pure but for `client.state`; also called in workers and nodes.

        Args:
            upload: on the CPU, finite. client: at work, after its training. received: what it was sent.

        Raises:
            Rejected: nothing is to leave the client, and its work counts for nothing.
        """
        return upload

    def decode(self, upload: Message, job: TrainJob, method: Method) -> Message:
        """What the server reads of an upload as it arrived.

        Raises:
            Rejected: the upload, and the client's work of this exchange, count for nothing.
        """
        return upload

    def before_aggregate(self, round: Round, uploads: Mapping[int, Message]) -> Mapping[int, Message]:
        """What the method aggregates in place of `uploads`, by number of client."""
        return uploads

    def aggregate(self, round: Round, uploads: Mapping[int, Message]) -> bool:
        """Have the method aggregate, in a way of the plugin's own; whether it has."""
        return False

    def record(self, round: Round) -> dict[str, Any]:
        """Entries of the round's record; those of a plugin of your own stand in it under "plugins" and its name."""
        return {}

    # before round 1, and after the last -------------------------------------------------------------------------------

    def validate(self, setup: Setup) -> None:
        """Look at the federation before round 1, and prepare.

        Raises:
            ConfigError: what is asked for cannot be done here.
        """

    def facts(self) -> dict[str, Any]:
        """What the run's result says of the settings; nothing where they are off."""
        active = {} if self.settings is None else self.settings.effective()
        return {self.name: active} if active else {}

    def about_client(self, client_id: int) -> dict[str, Any]:
        """What the result says of a client."""
        return {}

    # who is there, and what reaches the server when -------------------------------------------------------------------

    holds_work: ClassVar[bool] = False
    work: Sequence[WorkInFlight] = ()

    def absent(self, number: int) -> Collection[int]:
        """Who is not in the federation in round `number`: the server does not know of them."""
        return ()

    def receive(self, round: Round, jobs: Sequence[TrainJob], outcomes: Sequence[JobResult]) -> list[JobResult]:
        """What the server reads of all uploads of an exchange; by default, what `decode` makes of each."""
        if type(self).decode is Plugin.decode:
            return list(outcomes)

        def decoder(job: TrainJob) -> Callable[[Message], Message]:
            return lambda upload: self.decode(upload, job, round.method)

        return [_decoded(outcome, decoder(job)) for job, outcome in zip(jobs, outcomes, strict=True)]

    def after_jobs(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> None:
        """See the results of an exchange. sent: as they left the clients. read: as the server read them."""

    def complete(self, round: Round, jobs: Sequence[TrainJob], outcomes: Sequence[JobResult]) -> list[JobResult]:
        """What is done by now of `outcomes`, and of the work held back before, ordered by number of client.

        Only then do clients take over their results, and the server their uploads.
        """
        return list(outcomes)


def reads_uploads(plugin: Plugin) -> bool:
    """Whether a plugin does anything with uploads; one of the library's, whether it is on."""
    if plugin.name in PLUGINS:
        return bool(plugin.facts())
    hooks = ("encode", "decode", "receive", "after_jobs", "complete", "before_aggregate", "aggregate")
    return any(getattr(type(plugin), hook) is not getattr(Plugin, hook) for hook in hooks)


def read_uploads(
    plugins: Sequence[Plugin], round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult]
) -> list[JobResult]:
    """What the server reads of the uploads of an exchange, as the plugins decode them.

    An upload from another machine may be anything: whatever goes wrong with it, its client's work counts for nothing,
    and the others go on. It must also be finite as it arrives, and have the method's form (`Method.upload_form`) once
    it is decoded.
    """
    read = [_decoded(outcome, _check_finite) if outcome.is_remote else outcome for outcome in sent]
    for plugin in reversed(plugins):  # what was done last to uploads is undone first
        read = plugin.receive(round, jobs, read)
    checks = [functools.partial(_check_form, round, job) for job in jobs]
    return [_decoded(one, check) if one.is_remote else one for one, check in zip(read, checks, strict=True)]


def _decoded(outcome: JobResult, decode: Callable[[Message], Message]) -> JobResult:
    """The outcome with its upload decoded; refused if that fails, of another machine in whatever way."""
    if not outcome.counts:
        return outcome
    try:
        message = decode(outcome.message)
    except (Rejected, RunError) as problem:
        reason = str(problem)
    except Exception as error:
        if not outcome.is_remote:  # the fault is the plugin's
            raise
        reason = f"the upload cannot be read: {first_line(error)[:_LONGEST]}"
    else:
        return outcome if message is outcome.message else dataclasses.replace(outcome, message=message)
    return dataclasses.replace(outcome, message=freeze({}), refused=reason)


def _check_finite(upload: Message) -> Message:
    if name := first_nonfinite(upload):
        raise Rejected(f"the upload is not finite ({name[:60]!r})")
    return upload


def _check_form(round: Round, job: TrainJob, upload: Message) -> Message:
    form = round.method.upload_form
    rest = {name: value for name, value in upload.items() if name != ADDENDS}  # which are masked: no form is seen
    known = UploadContext(round.method, round.server, job.client.id, job.message)
    if form is not None and (problem := find_mismatch(form, rest, known)):
        raise Rejected(problem)
    return upload
