"""What the server got in a finished run, heard again: the last rounds are run once more, and every message is kept.

A run is a function of its recipe, so that its messages need not be stored. They are made again from a copy of the run
folder, from the checkpoint before the rounds that are asked for where there still is one, else from the start; the run
folder stays as it is. What the clients then send is what they sent: bytes and losses of these rounds are compared with
the records.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.randomness import derive_seed
from polyfed.data.samples import ClientData, LabeledSamples
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.plugins.compression import restore_upload
from polyfed.report.run_records import RunRecord
from polyfed.results.fields import validated
from polyfed.results.schema import RoundRecord

_MAIN = "train"  # name of a method's one or main exchange


@dataclass(frozen=True, eq=False)
class Transcript:
    """What went down to one client and up again.

    job: the engine's, with the client as it was before. down: what it was sent. traveled: what left it.
    up: the same as the method's server half reads it, without compression.
    """

    job: Any
    down: Message
    traveled: Message
    up: Message


class RecordingExecutor:
    """An executor that keeps what it carries out, of every client in one round.

    Args:
        read: (what traveled, what came down) -> what the server reads.
        rounds: client -> the round to keep.

    Attributes:
        heard: (client, exchange) -> transcript.
    """

    def __init__(self, read: Callable[[Message, Message], Message], rounds: Mapping[int, int]) -> None:
        self.inner: Any = None
        self.workers = 1
        self.heard: dict[tuple[int, str], Transcript] = {}
        self._read, self._rounds = read, rounds

    def listen(self, inner: Any) -> RecordingExecutor:
        """Listen to an executor, in whose place it stands."""
        self.inner, self.workers = inner, inner.workers
        return self

    def run(self, jobs: Sequence[Any], done: Callable[[int], None]) -> list[Any]:
        """As the inner one; what counts is kept."""
        outcomes: list[Any] = self.inner.run(jobs, done)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome.counts and job.round == self._rounds.get(job.client.id):
                up = self._read(outcome.message, job.message)
                before = dataclasses.replace(job, client=copy.copy(job.client))
                self.heard[job.client.id, job.exchange.name] = Transcript(before, job.message, outcome.message, up)
        return outcomes

    def score(self, asked: Sequence[Any]) -> list[Any]:
        """As the inner one."""
        scores: list[Any] = self.inner.score(asked)
        return scores

    def close(self) -> None:
        """As the inner one."""
        self.inner.close()


@dataclass(frozen=True, eq=False)
class Replay:
    """A run's last rounds, heard again. equal: whether losses came out as recorded, bit for bit."""

    record: RunRecord
    recipe: Recipe
    federation: Any
    wire: RecordingExecutor
    equal: bool

    def transcript(self, client: int, exchange: str = _MAIN) -> Transcript:
        """The last one of a client that the server heard.

        Raises:
            ConfigError: it took part in no such exchange.
        """
        found = self.wire.heard.get((client, exchange))
        if found is None:
            raise ConfigError(f"client {client} of {self.record.path} took part in no exchange '{exchange}'")
        return found

    def client(self, number: int) -> Client:
        """A client, with its data."""
        found: Client = self.federation.clients[number]
        return found

    def rerun_with(
        self, transcript: Transcript, data: LabeledSamples, purpose: str, number: int, **training: Any
    ) -> Message | None:
        """What a stranger with these training samples would have sent up in the client's place.

        It is told what the client was told, has no weights or state of its own and other random streams, and is no
        client of the run: what the engine does with a job, `[privacy]` and `[compression]` included, is done with it.

        Args:
            transcript: of the client. data: its training samples. purpose, number: of its random streams.
            training: settings in place of the run's.

        Returns:
            What the server reads of it; None where it was refused.
        """
        client = copy.copy(transcript.job.client)
        client.seed = derive_seed(client.seed, purpose, number)
        client.data = ClientData(data, client.data.validation, client.data.test)
        client.n = len(data)
        client.weights = None
        client.state = {}
        client.training = client.training.model_copy(update=training)
        job = dataclasses.replace(transcript.job, client=client, scores=False)
        (outcome,) = self.wire.inner.run([job], lambda _: None)
        settings = self.federation.plugin("compression").settings
        return restore_upload(settings, outcome.message, job.message) if outcome.counts else None


def last_upload_rounds(record: RunRecord) -> dict[int, int]:
    """Client -> the last round in which the server got an upload of it; final rounds do not count."""
    found: dict[int, int] = {}
    for line in record.rounds:
        lost = {upload.client for upload in line.refused} | {*line.dropped}
        if not line.final_round:
            found |= {client: line.round for client in line.clients if client not in lost}
    return dict(sorted(found.items()))


def replay(record: RunRecord, clients: Sequence[int]) -> Replay:
    """Run the rounds in which these clients sent last, and all after them, once more.

    Raises:
        ConfigError: an unfinished run, one without a recipe or of code that is not trusted, no such client, or it does
            not come out as recorded.
    """
    if not record.finished:
        raise ConfigError(f"expected the folder of a finished run, got {record.path}, which holds no result.json")
    if not record.recipe.data:
        raise ConfigError(
            f"expected a run of a recipe, whose last rounds can be run again, got {record.path}, made in Python"
        )
    recipe = Recipe.of_run(record.path, record.trusted)
    stacked = recipe.run.executor == "vectorized" or recipe.run.device != "cpu"
    recipe = recipe.with_run(loggers=[], out=None, keep="last", **({} if stacked else {"executor": "serial"}))
    rounds = last_upload_rounds(record)
    for client in clients:
        if client not in rounds:
            raise ConfigError(f"client {client} took part in no round of {record.path}, and sent nothing")
    first = min(rounds[client] for client in clients)
    with tempfile.TemporaryDirectory(prefix="polyfed-replay-") as place:
        begun = _begun(record.path, first, Path(place), recipe)
        wire = RecordingExecutor(lambda message, down: restore_upload(recipe.compression, message, down), rounds)
        federation = build_federation(recipe, out=begun, wrap_executor=wire.listen)
        run = federation.run(resume=begun is not None)
        equal = _compared(record, list(run.history), first)
    return Replay(record, recipe, federation, wire, equal)


def _begun(run: Path, first: int, place: Path, recipe: Recipe) -> Path | None:
    """A copy of a run folder as it was before round `first`, as near as its checkpoints go; None: at the start."""
    rounds = {int(folder.name[-6:]): folder for folder in sorted((run / "checkpoint").glob("round-[0-9]*"))}
    earlier = [number for number in rounds if number < first]
    if not earlier:
        return None
    folder = place / "run"
    newest = rounds[max(earlier)]
    shutil.copytree(newest, folder / "checkpoint" / newest.name)
    shutil.copyfile(run / "rounds.jsonl", folder / "rounds.jsonl")
    (folder / "recipe.toml").write_text(recipe.dumps(), encoding="utf-8")
    return folder


def _compared(record: RunRecord, history: Sequence[Mapping[str, Any]], first: int) -> bool:
    """Whether the rounds from `first` on have the recorded losses.

    Raises:
        ConfigError: other clients, or other bytes.
    """
    equal = True
    for old, anew in zip(record.rounds, history, strict=False):
        if old.round < first:
            continue
        new = validated(RoundRecord, anew)
        for key in ("clients", "bytes_by_client"):
            if getattr(old, key) != getattr(new, key):
                raise ConfigError(
                    f"expected {record.path} to come out as recorded when its rounds are run again, got other '{key}' "
                    f"in round {old.round}; are these its data, and this the version that made it?"
                )
        equal &= old.train_loss == new.train_loss
    return equal
