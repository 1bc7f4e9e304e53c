"""What an honest-but-curious server got in a finished run: its last rounds are run once more, and all messages kept.

A run is a function of its recipe, so that its messages need not be stored. A copy of the run folder is resumed from the
checkpoint before the rounds wanted, where there still is one, else the run begins anew; the run folder stays as it is.
Bytes and losses of these rounds are compared with the records.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.inference import map_batches
from polyfed.core.message import Message, members
from polyfed.core.server import Server
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.records.fields import validated
from polyfed.records.schema import RoundRecord
from polyfed.report.run_records import RunRecord

_MAIN = "train"  # name of a method's one or main exchange
_Run = Callable[..., list[Any]]  # of an executor


@dataclass(frozen=True, eq=False)
class Transcript:
    """The messages to one client and from it.

    job: the engine's, with the broadcast, and the client with its weights and state after it. up: the upload.
    """

    job: Any
    up: Message


def _record(rounds: Mapping[int, int], transcripts: dict[int, Transcript], run: _Run) -> _Run:
    """An executor's `run`, of which the messages of main exchanges that count are kept in `transcripts`.

    rounds: client -> the round to keep.
    """

    def run_recorded(jobs: Sequence[Any], done: Callable[[int], None]) -> list[Any]:
        outcomes = run(jobs, done)
        for job, outcome in zip(jobs, outcomes, strict=True):
            is_wanted = job.exchange.name == _MAIN and job.round == rounds.get(job.client.id)
            if is_wanted and outcome.counts:
                client = copy.copy(job.client)
                client.weights = {name: t.detach().cpu().clone() for name, t in (outcome.weights or {}).items()}
                client.state = outcome.state
                transcripts[client.id] = Transcript(dataclasses.replace(job, client=client), outcome.message)
        return outcomes

    return run_recorded


@dataclass(frozen=True, eq=False)
class Replay:
    """A run's last rounds, run again.

    transcripts: client -> its last messages of the method's one or main exchange, of all whom the server got an upload
    of. equal: whether losses are those recorded, bit for bit.
    """

    record: RunRecord
    recipe: Recipe
    federation: Any
    transcripts: Mapping[int, Transcript]
    equal: bool


def last_upload_rounds(record: RunRecord) -> dict[int, int]:
    """Client -> the last round in which the server got an upload of it; final rounds do not count."""
    found: dict[int, int] = {}
    for line in record.read_rounds():
        lost = {upload.client for upload in line.refused} | {*line.dropped}
        if not line.final_round:
            found |= {client: line.round for client in line.clients if client not in lost}
    return dict(sorted(found.items()))


def replay(record: RunRecord) -> Replay:
    """Run the rounds in which clients sent last, and all after them, once more.

    Args:
        record: of a finished run.

    Raises:
        ConfigError: a run without a recipe or of code that is not trusted, one without uploads, or it differs from the
            records.
    """
    if not record.recipe.data:
        raise ConfigError(
            f"expected a run of a recipe, whose last rounds can be run again, got {record.path}, made in Python"
        )
    recipe = Recipe.of_run(record.path, record.trusted)
    stacked = recipe.run.executor == "vectorized" or recipe.run.device != "cpu"
    recipe = recipe.with_run(loggers=[], out=None, keep="last", **({} if stacked else {"executor": "serial"}))
    rounds = last_upload_rounds(record)
    if not rounds:
        raise ConfigError(f"expected a run in which the server received an upload, got {record.path}")
    first = min(rounds.values())
    transcripts: dict[int, Transcript] = {}
    with tempfile.TemporaryDirectory(prefix="polyfed-replay-") as place:
        begun = _begun(record.path, first, Path(place), recipe)
        federation = build_federation(recipe, out=begun, wrap=functools.partial(_record, rounds, transcripts))
        run = federation.run(resume=begun is not None)
        equal = _compared(record, list(run.history), first)
    if silent := rounds.keys() - transcripts.keys():
        raise ConfigError(f"client {min(silent)} of {record.path} took part in no exchange '{_MAIN}'")
    return Replay(record, recipe, federation, dict(sorted(transcripts.items())), equal)


def _begun(run: Path, first: int, place: Path, recipe: Recipe) -> Path | None:
    """A copy of a run folder as it was before round `first`, as near as its checkpoints go; None: at the start."""
    rounds = {int(folder.name[-6:]): folder for folder in sorted((run / "checkpoint").glob("round-[0-9]*"))}
    earlier = [number for number in rounds if number < first]
    if not earlier:
        return None
    folder = place / "run"
    for number in earlier:  # the newest, and that of the best round before it, where that counts
        shutil.copytree(rounds[number], folder / "checkpoint" / rounds[number].name)
    shutil.copyfile(run / "rounds.jsonl", folder / "rounds.jsonl")
    (folder / "recipe.toml").write_text(recipe.dumps(), encoding="utf-8")
    return folder


def _compared(record: RunRecord, history: Sequence[Mapping[str, Any]], first: int) -> bool:
    """Whether the rounds from `first` on have the recorded losses."""
    equal = True
    for old, anew in zip(record.read_rounds(), history, strict=False):
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


# what is in the messages ----------------------------------------------------------------------------------------------


def describe(message: Message) -> list[str]:
    """The entries of a message: ``["labels (10 int64)", "model (4 tensors of 1250 float32)"]``."""
    entries = []
    for name, value in message.items():
        tensors = [value] if isinstance(value, Tensor) else list(value.values())
        types = "+".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors))
        size = "x".join(map(str, tensors[0].shape)) or "1"
        if len(tensors) > 1:
            size = f"{len(tensors)} tensors of {sum(t.numel() for t in tensors)}"
        entries.append(f"{name} ({size} {types})")
    return entries


def plaintext_facts(message: Message, client: Client) -> dict[str, str]:
    """Facts about a client's training data that its upload states in whole numbers: fact -> the entry that states it.

    Compared with the data: an entry counts where it is the very set of classes, the counts of these, or the number of
    samples.
    """
    classes, counts = client.data.train.y.unique(return_counts=True)
    found: dict[str, str] = {}
    groups = [(name, {name: value} if isinstance(value, Tensor) else value) for name, value in message.items()]
    for name, value in [(name, tensor) for name, group in groups for tensor in group.values()]:
        if value.is_floating_point() or value.dtype == torch.bool:
            continue
        sent = value.long()
        if value.dim() == 0:
            if int(sent) == client.n:
                found.setdefault("number of samples", name)
        elif torch.equal(sent.unique(), classes):
            found.setdefault("which classes", name)
        elif sent.shape == counts.shape and torch.equal(sent, counts):
            found.setdefault("samples per class", name)
    return found


# outputs (N, C) for a message with a network's weights, stored inputs (N, ...), and the client that prepares them
Scoring = Callable[[Message, Tensor, Client], Tensor]


def find_full_model(replay: Replay, transcript: Transcript) -> Scoring | None:
    """Scores by the network that a client's upload holds all parameters of; None where it holds none whole.

    BatchNorm's statistics, where they are not sent, are those of a new network.
    """
    client, server = transcript.job.client, replay.federation.server
    kinds = [(client.architecture, transcript.job.variant)]
    if server.auxiliary_model:
        kinds.append((server.auxiliary_model, ""))
    groups = [name for name, value in transcript.up.items() if not isinstance(value, Tensor)]
    for (architecture, variant), group in itertools.product(kinds, groups):
        sent = members(transcript.up, group)
        parameters = server.model(architecture, {}, variant).named_parameters()
        if all(name in sent and sent[name].shape == p.shape for name, p in parameters):
            return functools.partial(_scores, server, group, architecture, variant)
    return None


def _scores(
    server: Server, group: str, architecture: str, variant: str, message: Message, x: Tensor, client: Client
) -> Tensor:
    start = server.initial_state(architecture, variant)
    weights = {**start, **{name: t for name, t in members(message, group).items() if name in start}}
    network = server.model(architecture, weights, variant)
    return map_batches(network, network, x, client.prepare).cpu()
