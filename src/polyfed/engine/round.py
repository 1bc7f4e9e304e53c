"""One round: plugins select, the method plans, clients work, uploads are read and aggregated, the round is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from polyfed.core.message import Message, contiguous, writes
from polyfed.core.method import Exchange
from polyfed.engine.evaluation import Evaluator, figures_of, not_evaluated
from polyfed.engine.executors.jobs import JobResult, TrainJob, make_job
from polyfed.engine.plugin import Setup, read_uploads
from polyfed.engine.round_state import Round, draw_cohort
from polyfed.engine.weight_store import kept_weights
from polyfed.errors import PolyfedError, RunError
from polyfed.records.schema import RoundRecord, in_order
from polyfed.registry import PLUGINS
from polyfed.signals import raise_if_lost


def start(setup: Setup, present: Iterable[int]) -> None:
    """Before round 1: the server knows who is there, and the method begins."""
    setup.server.set_available(present)
    with server_stage("start", 0):
        setup.method.init_server(setup.server)


def run_round(setup: Setup, round: Round, exchanges: Sequence[Exchange], evaluator: Evaluator) -> dict[str, Any]:
    """Run a round; its record, but for the seconds.

    Raises:
        RunError: a client or the server failed; says which, when and where.
    """
    selected = play(setup, round, exchanges)
    return _record(setup, round, selected, evaluator)


def play(setup: Setup, round: Round, exchanges: Sequence[Exchange]) -> list[int]:
    """A round without its scores and its record; who of the cohort was reached.

    Raises:
        RunError: as for `run_round`.
    """
    server = setup.server
    selected = _select(setup, round)
    server.state = contiguous(server.state, server.device)
    with server_stage("planning", round.number):
        setup.method.start_round(server, selected)
    for place, exchange in enumerate(exchanges):
        jobs = _jobs(setup, round, exchange, place)

        def count(done: int, of: int = len(jobs)) -> None:
            raise_if_lost()
            setup.tell("client_done", done, of)

        sent = setup.executor.run(jobs, count)
        with server_stage("reading uploads", round.number):
            read = read_uploads(setup.plugins, round, jobs, sent)
        uploads = _take_over(setup, round, jobs, sent, read)
        with server_stage("aggregation", round.number):
            _aggregate(setup, round, uploads)
            server.state = contiguous(server.state, server.device)
        del sent, read, uploads  # messages that nobody needs while the clients are scored
    server.exchange = "train"
    return selected


def _select(setup: Setup, round: Round) -> list[int]:
    """Let everybody be asked in a final round, else the cohort, drawn where none is given; who is reached."""
    setup.server.round = round.number
    for plugin in setup.plugins:
        plugin.select(round)
    setup.server.set_available(round.present)
    if round.final:
        round.cohort = list(round.present)
    elif not round.cohort:
        round.cohort = draw_cohort(setup.training, setup.seed, round.number, round.present)
    round.asked = set(round.cohort)
    return round.reached(round.cohort)


def _jobs(setup: Setup, round: Round, exchange: Exchange, place: int) -> list[TrainJob]:
    method, server = setup.method, setup.server
    round.exchange = exchange
    server.exchange = exchange.name
    ids = round.cohort if exchange.who == "selected" else round.present
    round.asked.update(ids)
    with server_stage("broadcast", round.number):
        return [
            make_job(
                method,
                setup.clients[client_id],
                method.broadcast(server, client_id),
                variant=method.variant(server, client_id),
                round=round.number,
                scores=round.evaluated and exchange.trains and "after_training" in setup.stages,
                figures=figures_of(setup.evaluation, setup.metrics),
                is_final=round.final,
                exchange_index=place,
                counted=round.counts_operations,
                device=server.device,
            )
            for client_id in round.working(ids)
        ]


def _take_over(
    setup: Setup, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
) -> Mapping[int, Message]:
    """Count the results of jobs, have clients take over those that count, and give the uploads of these.

    Plugins may hold back what is still under way.
    """
    for plugin in setup.plugins:
        plugin.after_jobs(round, jobs, sent, read)
    for job, outcome in zip(jobs, read, strict=True):
        if outcome.dropped:
            round.failed.add(outcome.client_id)
        with server_stage("nbytes_in_paper", round.number):
            round.totals.add(job, outcome, setup.method, outcome.client_id not in round.silenced)
    done = list(read)
    for plugin in setup.plugins:
        done = plugin.complete(round, jobs, done)
    counted = [outcome for outcome in done if outcome.counts]
    for outcome in counted:
        client = setup.clients[outcome.client_id]
        client.weights, client.state = outcome.weights, outcome.state
        client.version += 1
        round.changed.add(client.id)
    lost = round.silenced | round.late
    return {o.client_id: o.message for o in counted if o.client_id not in lost}


def _aggregate(setup: Setup, round: Round, uploads: Mapping[int, Message]) -> None:
    """Have the server take in the uploads, of which weights that clients took over may be a part.

    Raises:
        RunError: it has written into one.
    """
    written = {number: writes(message) for number, message in uploads.items()}
    given = uploads
    for plugin in setup.plugins:
        given = plugin.before_aggregate(round, given)
    if not any(plugin.aggregate(round, given) for plugin in setup.plugins):
        setup.method.aggregate(setup.server, given)
    kept = {number: kept_weights(setup.clients[number]) for number in round.changed}
    touched = [number for number, before in written.items() if writes(uploads[number]) != before]
    touched += [number for number, own in kept.items() if own is not None and not own.is_intact]
    if touched:
        title = setup.clients[touched[0]].title
        raise RunError(f"{title}'s upload was written into; copy what is to be changed")


def _record(setup: Setup, round: Round, selected: list[int], evaluator: Evaluator) -> dict[str, Any]:
    record: dict[str, Any] = {"round": round.number, "seconds": 0.0, "processor_seconds": 0.0}
    record |= {
        "final_round": round.final,
        "clients": selected,
        "lr": setup.training.lr_at(round.number),
        **round.totals.record(),
    }
    for plugin in setup.plugins:
        entry = plugin.record(round)
        if plugin.name in PLUGINS:
            record |= entry
        elif entry:
            record.setdefault("plugins", {})[plugin.name] = entry
    record["server"] = dict(setup.server.log)
    setup.server.log.clear()
    record["evaluated"] = round.evaluated
    scores = round.totals.scores
    record |= evaluator.record(scores) if round.evaluated else not_evaluated(setup.task.main_score)
    return in_order(record, RoundRecord)


@contextlib.contextmanager
def server_stage(stage: str, number: int) -> Iterator[None]:
    """Errors of the server half name the stage and the round."""
    try:
        yield
    except RunError as error:
        raise RunError(f"server, round {number}, {stage}: {error}") from error
    except PolyfedError:
        raise
    except Exception as error:
        raise RunError(f"server, round {number}, {stage}: {type(error).__name__}: {error}") from error
