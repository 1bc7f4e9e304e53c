"""Checkpoints: the whole state of a federation after a round, verified by checksum when it is read; and which are kept.

`checkpoint/round-000010/` holds `states.safetensors`, the states of server and clients, their weights, and work that is
under way (`engine.wire`); and `index.json`, which has its checksum and its own. It appears by one rename. The last two
are kept, and that of the best round where its models are wanted: if the newest is damaged, or the records up to its
round are, the one before it is used, with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from polyfed.core.message import clone
from polyfed.core.method import Method
from polyfed.engine.plugin import Setup
from polyfed.engine.run import best_record, early_stop_round, is_best_wanted
from polyfed.engine.run_facts import made_of, result_of
from polyfed.engine.run_folder import RunFolder, explain_disk_errors
from polyfed.engine.snapshot import Snapshot, restore, take_snapshot
from polyfed.engine.weight_store import ClientWeights, WeightStore
from polyfed.engine.wire import read as read_value
from polyfed.engine.wire import split
from polyfed.engine.work_in_flight import describe
from polyfed.engine.work_in_flight import restore as restore_work
from polyfed.errors import ConfigError, PolyfedError
from polyfed.records.fields import validated
from polyfed.records.main_score import main_score_of
from polyfed.records.read import atomic_write, seal, sync_folder, unseal
from polyfed.records.schema import MadeOf, RunResult

# of the "server", of "clients" by number, "work" under way, and "weights" by number, as a checkpoint stores them
States = dict[str, Any]
Forget = Callable[[States], States]

KEPT = 2
_STATES = "states.safetensors"
_NEW = ".new"  # ends the name of a checkpoint that is to replace one

# what may come of files that were written by somebody else, with checksums that fit
_DAMAGE: tuple[type[Exception], ...] = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError),
    *(safetensors.SafetensorError, PolyfedError),
)


class _OtherClients(ConfigError):
    """A run folder is of another number of clients than the run that is to go on."""


class Checkpointer:
    """Decides which states of a federation are kept, and from which it goes on."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._clients = len(setup.clients)
        self._best: Snapshot | None = None  # where no folder holds it

    def save(self) -> None:
        """Keep the present state."""
        setup, number = self._setup, len(self._setup.history)
        if setup.folder is not None:
            with explain_disk_errors(setup.folder.path):
                snapshot = take_snapshot(setup)
                write(setup.folder.checkpoints, snapshot, made_of(setup), self.best_round, self.forget)
        elif self.best_round(number) == number:
            self._best = take_snapshot(setup)

    @property
    def forget(self) -> Forget:
        """What takes out the clients that the run folder says are forgotten.

        Raises:
            ConfigError: as `forgetting`.
        """
        folder = self._setup.folder
        return forgetting(self._setup.method, () if folder is None else folder.forgotten())

    def best_round(self, upto: int) -> int | None:
        """The best round so far but for a final one, where its models are wanted."""
        return self._best_of(self._setup.history[:upto])

    def _best_of(self, records: Sequence[Mapping[str, Any]]) -> int | None:
        if not is_best_wanted(self._setup.output.keep, self._setup.evaluation.patience):
            return None
        best = best_record([record for record in records if not record["final_round"]])
        return None if best is None else best["round"]

    def show_wanted_round(self) -> int:
        """Be what the federation was after the round whose models are wanted; gives its number.

        That of a final round, which has begun from the one that is wanted else.
        """
        setup = self._setup
        last: int = setup.history[-1]["round"]
        number = None if setup.history[-1]["final_round"] else self.best_round(last)
        if number is None or number == last:
            return last
        snapshot = self._best
        if setup.folder is not None:
            path = setup.folder.checkpoints / _name(number)
            if not _is_whole(path):
                raise ConfigError(f"expected a whole checkpoint in {path}, got another")
            snapshot = read(path, self._clients, setup.store, self.forget)
        assert snapshot is not None
        self.go_back(snapshot, list(setup.history))
        return number

    def go_back(self, snapshot: Snapshot, history: Sequence[Mapping[str, Any]]) -> None:
        """Be what the federation was then, with these records."""
        restore(self._setup, snapshot)
        self._setup.history[:] = [dict(record) for record in history]

    def latest(self, folder: RunFolder, before: int | None = None) -> Snapshot | None:
        """The last whole checkpoint, or the last one before a round."""
        path = newest(folder.checkpoints, functools.partial(self._expect, folder), before)
        return None if path is None else read(path, self._clients, self._setup.store, self.forget)

    def restore(self) -> int:
        """Go back to the run folder's last checkpoint, or to the start; the number of its round, 0 where there is none.

        Raises:
            ConfigError: there was a checkpoint and it has gone, or its final round cannot be undone for more rounds.
        """
        setup, folder = self._setup, self._setup.folder
        snapshot = None if folder is None else self._where_to_go_on(folder)
        if snapshot is None:
            if folder is not None:
                if folder.read_result() is not None:
                    raise ConfigError(
                        f"expected a checkpoint to go on from in {folder.checkpoints}, got none; use --overwrite"
                    )
                folder.rounds(0)
            clients = range(self._clients)
            server = self.forget({"server": {}, "clients": {}, "work": []})["server"]
            self.go_back(Snapshot(0, server, dict.fromkeys(clients), {number: {} for number in clients}), [])
        elif folder is not None:
            self.go_back(snapshot, folder.rounds(snapshot.round))
        if folder is not None and folder.has_fewer_rounds(setup.settings):
            folder.write_recipe(setup.settings)  # at last: a run that is killed before begins as before
        return len(setup.history)

    def _where_to_go_on(self, folder: RunFolder) -> Snapshot | None:
        """The last checkpoint; where more rounds are planned than before, that before the final round."""
        settle(folder.checkpoints)
        snapshot = self.latest(folder)
        if snapshot is None or not folder.has_fewer_rounds(self._setup.settings):
            return snapshot
        *earlier_records, last = folder.records(snapshot.round)
        self._setup.history[:] = earlier_records
        if not last["final_round"] or self.has_stopped():
            return snapshot
        if any(not one["once"] for one in last.get("releases", ())):
            raise ConfigError(
                f"{folder.path} cannot go on for more rounds: its final round has given away what counts in epsilon; "
                "choose another --out or --overwrite"
            )
        earlier = self.latest(folder, before=snapshot.round)
        if earlier is None:
            place = folder.checkpoints
            raise ConfigError(f"expected the checkpoint before the final round in {place}, got none; use --overwrite")
        shutil.rmtree(folder.checkpoints / _name(snapshot.round))
        sync_folder(folder.checkpoints)
        return earlier

    def has_stopped(self) -> bool:
        """Whether the run stops early after its records so far."""
        evaluation = self._setup.evaluation
        return early_stop_round(self._setup.history, evaluation.patience, evaluation.min_delta) is not None

    def _expect(self, folder: RunFolder, number: int) -> None:
        """What must be there besides a checkpoint of a round: the records up to it, and the best one's checkpoint."""
        records = folder.records(number)
        score = main_score_of(records[0] if records else ())
        scored = [len(record[f"{score.name}_per_client"]) for record in records if record["evaluated"]]
        if scored and scored[-1] != self._clients:
            raise _OtherClients(
                f"expected {scored[-1]} clients, as in the rounds that {folder.path} holds, got {self._clients}; "
                "go on with as many (in a deployment, data.num_clients says how many), or choose another --out"
            )
        known = {str(client) for client in range(self._clients)}
        if strange := {each for record in records for each in record["bytes_by_client"]} - known:
            raise ConfigError(f"the records tell of a client {min(strange)[:20]!r}, who is not in the run")
        result_of(self._setup, records)
        best = self._best_of(records)
        if best not in (None, number) and not _is_whole(folder.checkpoints / _name(best or 0)):
            raise ConfigError(f"that of the best round before it, {best}, is damaged")


# files ----------------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    snapshot: Snapshot,
    made_of: Mapping[str, Any],
    best: Callable[[int], int | None],
    forget: Forget,
) -> None:
    """Write a checkpoint, then drop all but the last `KEPT`, and those of the best rounds up to each of these.

    Args:
        made_of: see `RunResult`. best: the best round up to a number; None where none is kept.
        forget: takes out clients of whom nothing is written.
    """
    final = folder / _name(snapshot.round)
    if final.exists() and _is_whole(final):
        return
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _fill(temporary, snapshot, made_of, forget)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # or a full disk stays full
    sync_folder(folder)
    last = [path.name for path in _all(folder) if path.name <= final.name][-KEPT:]  # those behind it could not be used
    best_ones = [best(int(name.rpartition("-")[2])) for name in last]
    kept = {*last, *(_name(number) for number in best_ones if number is not None)}
    for other in _all(folder):
        if other.name not in kept:
            shutil.rmtree(other)


def _fill(temporary: Path, snapshot: Snapshot, made_of: Mapping[str, Any], forget: Forget) -> None:
    temporary.mkdir(parents=True)
    held = {number: own for number, own in snapshot.weights.items() if own is not None}
    states = {
        "server": snapshot.server,
        "clients": snapshot.states,
        "work": describe(snapshot.work),
        "weights": {number: [own.architecture, own.variant, own.in_main_memory()] for number, own in held.items()},
    }
    _write_files(temporary, forget(states), {"round": snapshot.round, "made_of": made_of})


def newest(folder: Path, expect: Callable[[int], object], before: int | None = None) -> Path | None:
    """The newest checkpoint that is whole, or None where there is none.

    Args:
        folder: `checkpoint/` of a run folder. before: only those of earlier rounds than this.
        expect: raises a `PolyfedError` where what belongs to a checkpoint of this round is not there.

    Raises:
        ConfigError: there are checkpoints and none of them is whole.
    """
    found = [path for path in _all(folder) if before is None or path.name < _name(before)]
    for path in reversed(found):
        try:
            expect(_verified(path, path.name)["round"])
        except _OtherClients:  # the folder is whole
            raise
        except _DAMAGE as error:
            why = " ".join(str(error).split()) or type(error).__name__
            warnings.warn(f"the checkpoint {path} is damaged ({why}); trying the one before it", stacklevel=2)
        else:
            return path
    if found:
        raise ConfigError(
            f"expected a whole checkpoint in {folder}, all {len(found)} are damaged; start again with --overwrite"
        )
    return None


def read(path: Path, clients: int, store: WeightStore, forget: Forget) -> Snapshot:
    """A checkpoint that is whole.

    Args:
        clients: how many the federation has. store: where their weights go. forget: takes out clients.

    Raises:
        ConfigError: it is of other clients or networks.
    """
    weights: dict[int, ClientWeights | None] = dict.fromkeys(range(clients))
    try:
        stored = forget(read_value(path / _STATES))
        server = clone(stored["server"])
        states = {i: clone(stored["clients"].get(str(i), {})) for i in range(clients)}
        weights |= {int(number): store.restore(int(number), *own) for number, own in stored["weights"].items()}
        work = restore_work(stored["work"], store)
    except _DAMAGE as error:
        raise ConfigError(f"{path} does not fit this federation: {error}; start again with --overwrite") from None
    return Snapshot(int(path.name.rpartition("-")[2]), server, weights, states, work)


def began_with(folder: RunFolder) -> MadeOf:
    """What the run in a folder was made of when it began, as far as its result or its newest checkpoint tells.

    Raises:
        ConfigError: its result cannot be read.
    """
    result = folder.read_result()
    if result is not None:
        return validated(RunResult, result).made_of
    for path in reversed(_all(folder.checkpoints)):
        with contextlib.suppress(OSError, ValueError):  # damaged; who goes on from it is warned
            return validated(MadeOf, unseal((path / "index.json").read_bytes()).get("made_of", {}))
    return MadeOf()


def check_made_of(folder: RunFolder, data: str | None, code: Mapping[str, str]) -> None:
    """Whether the run in a folder, if there is one, began with the data that there are now; of other code it is warned.

    data, code: checksums of those that there are now, as results have them; None: not known.

    Raises:
        ConfigError: it began with others.
    """
    before = began_with(folder)
    if before.data is not None and data not in (None, before.data):
        raise ConfigError(
            f"{folder.path} holds a run of other data under this name: rows, or names of classes or features, have "
            "changed since it began; put them back, or choose another --out or --overwrite"
        )
    changed = [module for module, checksum in code.items() if before.code.get(module, checksum) != checksum]
    if changed:
        warnings.warn(f"{folder.path} holds a run that began with other code in {', '.join(changed)}", stacklevel=2)


def _name(number: int) -> str:
    return f"round-{number:06d}"


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-[0-9]*")) if folder.is_dir() else []


def _is_whole(path: Path, name: str = "") -> bool:
    """Whether a checkpoint is there as it was written. name: that it is to have; "": its own."""
    try:
        _verified(path, name or path.name)
    except _DAMAGE:
        return False
    return True


def _verified(path: Path, name: str) -> dict[str, Any]:
    """The index; ValueError where a checksum does not fit."""
    index = unseal((path / "index.json").read_bytes())
    if name != _name(index["round"]):
        raise ValueError(f"index.json is of round {index['round']}")
    if _checksum(path / _STATES) != index["sha256"]:
        raise ValueError(f"{_STATES} does not match its checksum")
    return index


def _write_files(folder: Path, states: States, facts: Mapping[str, Any]) -> None:
    """A checkpoint's files, the index last; all is on disk when this returns. facts: of it, but for the checksum."""
    path = folder / _STATES
    tensors, metadata = split(states)
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from None
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    atomic_write(folder / "index.json", seal({**facts, "sha256": _checksum(path)}))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# clients that are forgotten -------------------------------------------------------------------------------------------


def forgetting(method: Method, clients: Sequence[int]) -> Forget:
    """What takes clients out of states, which it gives as they are where nothing of the clients is in them.

    Who is forgotten stands in a file of the run folder, which nothing removes: so nobody comes back with an older
    checkpoint, or with a run that replaces the present one.

    Raises:
        ConfigError: there are some, and the method cannot take them out.
    """
    if clients:
        method.remembered({})

    def forget(states: States) -> States:
        server = functools.reduce(method.forget, clients, states["server"])
        work = [
            {**one, "upload": method.forget_upload(one["upload"])} if one["client"] in clients else one
            for one in states["work"]
        ]
        if server is not states["server"]:  # what clients have was made of what it was
            own = {number: method.forget_at_client(state, server) for number, state in states["clients"].items()}
            work = [{**one, "state": method.forget_at_client(one["state"], server)} for one in work]
            return {**states, "server": server, "clients": own, "work": work}
        is_same = all(new["upload"] is old["upload"] for new, old in zip(work, states["work"], strict=True))
        return states if is_same else {**states, "work": work}

    return forget


def remembered_in(folder: Path, method: Method) -> set[int]:
    """The clients of whose rows something is in the checkpoints that are whole.

    Raises:
        ConfigError: there is none, or the method cannot take a client out.
    """
    found = set[int]()
    for path in _all_whole(folder):
        stored = read_value(path / _STATES)
        found |= {*method.remembered(stored["server"])}
        found |= {one["client"] for one in stored["work"] if method.forget_upload(one["upload"]) is not one["upload"]}
    return found


def purge(folder: Path, forget: Forget) -> None:
    """Take forgotten clients out of all checkpoints; those that are not whole are removed.

    Killed meanwhile, it can be done again.

    Raises:
        ConfigError: no checkpoint is whole; then nothing has changed.
    """
    whole = _all_whole(folder)
    for path in _all(folder):
        if path not in whole:
            shutil.rmtree(path)
            continue
        stored = read_value(path / _STATES)
        changed = forget(stored)
        if changed is not stored:
            _replace(path, changed)


def settle(folder: Path) -> None:
    """Finish what `purge` has begun: a checkpoint that is whole comes into its place."""
    for new in folder.glob(f".round-[0-9]*{_NEW}"):
        path = folder / new.name.removeprefix(".").removesuffix(_NEW)
        if _is_whole(new, path.name):
            shutil.rmtree(path, ignore_errors=True)
            new.rename(path)
        else:
            shutil.rmtree(new)
        sync_folder(folder)


def _all_whole(folder: Path) -> list[Path]:
    settle(folder)
    whole = [path for path in _all(folder) if _is_whole(path)]
    if not whole:
        raise ConfigError(
            f"expected a whole checkpoint in {folder}, got none; what is left of one goes with --overwrite"
        )
    return whole


def _replace(path: Path, states: States) -> None:
    """Put a checkpoint with other states in the place of one."""
    new = path.with_name(f".{path.name}{_NEW}")
    new.mkdir()
    _write_files(new, states, unseal((path / "index.json").read_bytes()))
    settle(path.parent)
