"""The run folder: everything needed to resume, to rebuild tables and figures, and to use the models elsewhere.

    recipe.toml      the resolved settings                     rounds.jsonl   one object per round
    result.json      written when the run is done              checkpoint/    the last two whole states
    models/          received-000.safetensors, personal-007.safetensors; index.json, which says whose they are, and
                     README.md, how each is loaded; of texts words.txt, the words that have ids
    tensorboard/, mlflow/, wandb/     of the loggers that were asked for
    forgotten.json   of clients that were taken out: their numbers
    .lock            empty; locked by the process that is at work

Every file is written under a temporary name, flushed to disk and renamed, so that a process killed at any moment leaves
a folder that resumes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tomllib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import tomli_w
from torch import Tensor

from polyfed.core.message import Message, to_bytes
from polyfed.data.text import WORDS_FILE
from polyfed.engine.executors.choice import clients_per_batch
from polyfed.errors import ConfigError, RunError
from polyfed.escaping import one_line
from polyfed.records.fields import Record, validated
from polyfed.records.read import (
    ANALYSIS,
    ATTACK,
    FORGOTTEN,
    PARTS,
    SUM_FILE,
    atomic_write,
    check_links,
    parse_toml,
    seal,
    unseal,
)
from polyfed.records.schema import RoundRecord, RunResult, check_complete
from polyfed.records.stored_files import StoredRecipe

Weights = Mapping[str, Tensor]
WriteModel = Callable[[int, Mapping[str, tuple[Weights, Message]], Mapping[str, Any]], None]
LOCK = ".lock"
_MADE_FORMS = frozenset({".json", ".csv", ".md", ".png", ".svg"})  # endings of files that later commands make of a run
# keys of [run] that may differ when a run goes on: where, how often and by whom, and what stands beside results
_MAY_DIFFER = {"out", "checkpoint_every", "executor", "workers", "label", "loggers", "paper_tables", "preset_note"}
_MAY_DIFFER |= {"overrides", "modules", "client_names"}  # names are compared by themselves
_MODELS_README = """# The networks of this run

`index.json` says of each client which files hold its network at each stage; equal ones are one file, named after the
first client that has it. `received-*` is what the client has after the server's next message, before it trains;
`personal-*` what it keeps after its last local training. A `*.state.safetensors` holds what the method predicts by
beside the network.

```python
import polyfed as pf

trained = pf.load("..", 0)  # of client 0, in this folder; stage="personal"; trust=True where code is your own
scores = trained.scores(x)  # of inputs as the run stored them, as the method predicts
```

Without polyfed, a network of your own class loads a file by
`load_state_dict(safetensors.torch.load_file("personal-000.safetensors"))`, and `polyfed export RUN FILE.pt2 --client 0`
writes all of it as a program.
"""


@contextlib.contextmanager
def explain_disk_errors(place: Path) -> Iterator[None]:
    """Within the block, a disk that is full or a folder that may not be written to is a RunError, one clear line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(
            f"cannot write to {place}: {reason}; whole rounds are kept: put that right, then go on with --resume"
        ) from error


def append_line(path: Path, line: bytes) -> None:
    """Add to a file, all of it on disk when this returns. Other names of the file (hard links) keep what they have."""
    with path.open("ab") as file:
        if os.fstat(file.fileno()).st_nlink == 1:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
            return
    atomic_write(path, path.read_bytes() + line)


class RunFolder:
    """One run's folder. Nothing is written before `open`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        return self.path / "checkpoint"

    def validate(self, settings: Mapping[str, Any], resume: bool, overwrite: bool, planned: str = "") -> None:
        """Whether `open` would succeed; a ConfigError says why not.

        Args:
            settings: of the run. With `resume` they may have more rounds than those of the run that the folder holds.
            planned: what of the method depends on the number of rounds.
        """
        if resume and overwrite:
            raise ConfigError("expected one of --resume and --overwrite, got both")
        check_links(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"expected a folder for the run, got the file {self.path}")
        # listed once, as another process may begin the run meanwhile
        held = [entry.name for entry in self.path.iterdir()] if self.path.exists() else []
        present = [name for name in PARTS if name in held]
        own = (
            LOCK,
            FORGOTTEN,
            *(f".{name}." for name in (*PARTS, FORGOTTEN)),
        )  # half-written by `atomic_write` of a process that was killed
        strange = any(not name.startswith(own) for name in held)
        if strange and not present:
            raise ConfigError(f"expected an empty or new folder for the run, got {self.path} with other files in it")
        if present and not resume and not overwrite:
            raise ConfigError(
                f"{self.path} already holds a run; continue it with --resume (resume=True) or replace it with "
                "--overwrite (overwrite=True)"
            )
        if resume and present:
            self._same_recipe(settings, planned)

    def _same_recipe(self, settings: Mapping[str, Any], planned: str) -> None:
        stored = self._stored_recipe()
        asked = tomllib.loads(tomli_w.dumps(settings))
        before = rounds_of(stored)
        now = rounds_of(asked)
        if before < now:
            stored = {**stored, "training": {**stored.get("training", {}), "rounds": now}}
        self.check_clients(asked.get("run", {}).get("client_names", ()))
        found = first_difference(stored, asked, _MAY_DIFFER)
        difference = None if found is None else f"{found[0]} was {found[1]!r}, now {found[2]!r}"
        if difference := difference or _other_stacks(stored.get("run", {}), asked.get("run", {})):
            raise ConfigError(
                f"{self.path} holds another recipe's run: {difference}; choose another --out or --overwrite"
            )
        if before < now and (why := why_not_longer(asked, self.read_result(), planned, self.forgotten())):
            raise ConfigError(
                f"{self.path} cannot go on from {before} to {now} rounds: {why}; choose another --out or --overwrite"
            )

    def _stored_recipe(self) -> dict[str, Any]:
        path = self.path / "recipe.toml"
        try:
            stored = parse_toml(path.read_bytes())
            validated(StoredRecipe, stored)
        except (OSError, ValueError) as error:
            raise ConfigError(f"expected the run's recipe in {path}, got nothing readable: {error}") from None
        return stored

    def check_clients(self, names: Sequence[str]) -> None:
        """Whether the clients of the run that the folder holds, if there is one that names them, are called so."""
        if not (self.path / "recipe.toml").exists():
            return
        kept = self._stored_recipe().get("run", {}).get("client_names", ())
        if kept and names and (difference := other_clients(kept, names)):
            raise ConfigError(
                f"{self.path} holds a run of other clients than the data have now: {difference}; put that right, or "
                "choose another --out or --overwrite"
            )

    @contextlib.contextmanager
    def open(self, settings: Mapping[str, Any], resume: bool, overwrite: bool, planned: str = "") -> Iterator[None]:
        """Make the folder ready, after `validate`, and keep other processes out of it within the block.

        With `overwrite` the old run's own files go, with the analyses and attacks made of it, and nothing else. What a
        killed process left half-written goes too.
        """
        with explain_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with lock_folder(self.path):
            self.validate(settings, resume, overwrite, planned)  # it may have changed hands meanwhile
            with explain_disk_errors(self.path):
                if overwrite:
                    self.clear_made()
                    for name in PARTS:
                        _remove(self.path / name)
                self.clear_unfinished()
                if not (self.path / "recipe.toml").exists():
                    self.write_recipe(settings)
            yield

    def has_fewer_rounds(self, settings: Mapping[str, Any]) -> bool:
        """Whether the run that the folder holds was to have fewer rounds than these settings."""
        return rounds_of(parse_toml((self.path / "recipe.toml").read_bytes())) < rounds_of(settings)

    def write_recipe(self, settings: Mapping[str, Any]) -> None:
        """Keep the settings; they replace those that are there."""
        with explain_disk_errors(self.path):
            atomic_write(self.path / "recipe.toml", tomli_w.dumps(settings).encode())

    def clear_unfinished(self) -> None:
        """Remove what killed processes have left half-written."""
        for place in (self.path, self.checkpoints, self.path / "models"):
            for left in place.glob(".*.tmp"):
                _remove(left)

    def forgotten(self) -> list[int]:
        """The clients whose rows must not count any more.

        Raises:
            ConfigError: the file that lists them is damaged.
        """
        path = self.path / FORGOTTEN
        if not path.exists():
            return []
        try:
            return [int(number) for number in unseal(path.read_bytes())["clients"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"expected the list of forgotten clients in {path}, got something else: {error}"
            ) from None

    def write_forgotten(self, clients: Sequence[int]) -> None:
        """List the clients whose rows must not count any more."""
        atomic_write(self.path / FORGOTTEN, seal({"clients": list(clients)}) + b"\n")

    def clear_models(self) -> bool:
        """Remove the clients' models, and what was made of them; whether there were any."""
        self.clear_made()
        found = any((self.path / "models").glob("*.safetensors"))
        _remove(self.path / "models")
        return found

    def clear_made(self) -> None:
        """Remove the analyses and attacks that were made of the run, and nothing else."""
        for folder in (self.path / name for name in (ANALYSIS, ATTACK)):
            if folder.is_symlink():
                continue
            for made in folder.glob("*"):
                if made.suffix in _MADE_FORMS and made.is_file():
                    _remove(made)
            with contextlib.suppress(OSError):  # somebody else's files are in it, or there is none
                folder.rmdir()

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one round's line."""
        _check_written(RoundRecord, record, f"the record of round {record.get('round')}")
        with explain_disk_errors(self.path):
            append_line(self.path / "rounds.jsonl", seal(record) + b"\n")

    def records(self, upto: int | None = None, sealed: bool = True) -> list[dict[str, Any]]:
        """The records of rounds 1 to `upto`, or of all; with `sealed`, one without a seal counts as damaged.

        Raises:
            ConfigError: they are not all there, or one is not as it was written.
        """
        path = self.path / "rounds.jsonl"
        lines = self._lines()
        kept = list[dict[str, Any]]()
        for number, line in enumerate(lines[:upto], 1):
            try:
                kept.append(unseal(line.rstrip(b"\n"), sealed))
                record = validated(RoundRecord, kept[-1])
                if sealed:
                    check_complete(record)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}, is damaged: {error}") from None
        expected = len(lines) if upto is None else upto
        if len(kept) != expected or any(record.get("round") != number for number, record in enumerate(kept, 1)):
            raise ConfigError(
                f"expected rounds 1 to {expected} in {path}, as the checkpoint says; they are not all there"
            )
        return kept

    def rounds(self, upto: int) -> list[dict[str, Any]]:
        """`records`; later ones, and a half-written last line, are cut off the file."""
        kept = self.records(upto)
        lines = self._lines()
        if len(lines) > upto:
            self._write_lines(lines[:upto])
        return kept

    def clear_validation(self) -> None:
        """Take the validation scores out of all records, so that no round of before is the best one any more."""
        cleared = []
        for line in self._lines():
            try:
                cleared.append(seal({**unseal(line.rstrip(b"\n")), "validation": None}) + b"\n")
            except ValueError:  # of a process that was killed, or damaged: nobody goes on from it
                cleared.append(line)
        self._write_lines(cleared)

    def _write_lines(self, lines: Sequence[bytes]) -> None:
        with explain_disk_errors(self.path):
            atomic_write(self.path / "rounds.jsonl", b"".join(lines))

    def _lines(self) -> list[bytes]:
        path = self.path / "rounds.jsonl"
        try:
            return path.read_bytes().splitlines(keepends=True) if path.exists() else []
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None

    def write_result(self, result: Mapping[str, Any], keeps_weights: bool = True) -> None:
        """The last thing written of a run. What was made of a run of fewer rounds goes, and, where no weights are kept,
        the checkpoints.
        """
        _check_written(RunResult, result, "the result")
        with explain_disk_errors(self.path):
            if self.read_result() is not None:
                self.clear_made()
            atomic_write(self.path / "result.json", seal(result, indent=2) + b"\n")
            if not keeps_weights:
                shutil.rmtree(self.checkpoints, ignore_errors=True)

    def read_result(self) -> dict[str, Any] | None:
        """The result of a finished run, or None."""
        path = self.path / "result.json"
        if not path.exists():
            return None
        try:
            result = unseal(path.read_bytes(), needed=False)
            validated(RunResult, result)
        except (OSError, ValueError) as error:
            raise ConfigError(f"expected a run's result in {path}, got something else: {error}") from None
        return result

    def finished(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a run that has all the rounds of these settings behind it, or None."""
        result = self.read_result()
        planned = rounds_of(settings)
        return None if result is None or result.get("rounds", planned) < planned else result

    @contextlib.contextmanager
    def models(self) -> Iterator[WriteModel]:
        """Within the block, a function that writes one client's networks: (number, stage -> weights and state, what
        they are).

        Weights go to ``received-007.safetensors``, a state that is not empty to ``received-007.state.safetensors``, and
        what is equal to one file, that of the first client. At the end `index.json` says whose each is, with checksums,
        `index.json.sha256` has its own, and files of an earlier index are gone.
        """
        folder = self.path / "models"
        index = {}
        written: dict[str, str] = {}  # checksum -> file
        with explain_disk_errors(folder):
            folder.mkdir(exist_ok=True)
            atomic_write(folder / "README.md", _MODELS_README.encode())

        def write(number: int, kept: Mapping[str, tuple[Weights, Message]], about: Mapping[str, Any]) -> None:
            sums: dict[str, str] = {}

            def file_of(name: str, data: bytes) -> str:
                checksum = hashlib.sha256(data).hexdigest()
                if checksum not in written:
                    with explain_disk_errors(folder):
                        atomic_write(folder / name, data)
                file = written.setdefault(checksum, name)
                sums[file] = checksum
                return file

            stages: dict[str, dict[str, str]] = {}
            for stage, (weights, state) in kept.items():
                plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in weights.items()}
                name = f"{stage}-{number:03d}"
                stages[stage] = {"weights": file_of(f"{name}.safetensors", safetensors.torch.save(plain))}
                if state:
                    stages[stage]["state"] = file_of(f"{name}.state.safetensors", to_bytes(state))
            keeps = {stage: sorted(state) for stage, (_, state) in kept.items()}
            index[str(number)] = {**about, "stages": stages, "keeps": keeps, "sha256": sums}

        yield write
        listed = (json.dumps(index, indent=2) + "\n").encode()
        with explain_disk_errors(folder):
            atomic_write(folder / "index.json", listed)
            atomic_write(folder / SUM_FILE, f"{hashlib.sha256(listed).hexdigest()}  index.json\n".encode())
            for file in folder.glob("*-[0-9]*.safetensors"):
                if file.name not in written.values():
                    file.unlink()

    def write_vocabulary(self, words: Sequence[str]) -> str:
        """Write the words that have ids beside the models, one a line; gives the file's checksum."""
        data = "".join(f"{word}\n" for word in words).encode()
        with explain_disk_errors(self.path):
            atomic_write(self.path / "models" / WORDS_FILE, data)
        return hashlib.sha256(data).hexdigest()


def _check_written(model: type[Record], value: Mapping[str, Any], what: str) -> None:
    try:
        validated(model, value)
    except ValueError as error:
        raise RunError(f"{what} cannot be written, as nothing could read it: {error}") from None


def _remove(entry: Path) -> None:
    whole = entry.is_dir() and not entry.is_symlink()
    shutil.rmtree(entry) if whole else entry.unlink(missing_ok=True)


class FolderInUse(ConfigError):
    """Another process is at work in a folder."""


@contextlib.contextmanager
def lock_folder(folder: Path, waits: bool = False, needed: bool = False) -> Iterator[None]:
    """The folder for this process alone, where system and disk have such locks; they end with the process.

    A file in it is locked, and stays: disks of a network have locks of files that all machines see, none of folders.

    Args:
        waits: until other processes have left it. needed: an error where the disk has no locks.

    Raises:
        FolderInUse: another process has it, and this one does not wait.
        ConfigError: the disk has no locks, and they are needed.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with explain_disk_errors(folder):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise FolderInUse(f"another process is at work in {folder}; let it end, or choose another") from None
        except OSError as error:  # a disk without locks, as of some clusters
            if needed:
                raise ConfigError(f"expected a disk with file locks for {folder}, got: {error.strerror}") from None
            warnings.warn("the disk has no file locks: let only one process at a time use a folder", stacklevel=3)
        yield
    finally:
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process that was forked meanwhile would keep it
        os.close(handle)


def _other_stacks(stored: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    """How two ``[run]`` sections differ in which clients train as one, on which the last bits of a result depend."""
    old, new = (
        clients_per_batch(run.get("executor", "auto"), run.get("device", "cpu"), run.get("workers"))
        for run in (stored, asked)
    )
    before, now = (f"in stacks of {size}" if size > 1 else "one by one" for size in (old, new))
    return None if old == new else f"clients trained {before}, now {now} (run.executor)"


def other_clients(before: Sequence[str], now: Sequence[str]) -> str | None:
    """How clients' names differ from those of before, in words; None where they do not.

    >>> other_clients(["east", "west"], ["east", "new", "west"])
    "'new' has come"
    """
    for more, fewer, what in ((now, before, "come"), (before, now, "gone")):
        found = [name for name in more if name not in {*fewer}]
        if found:
            others = f" and {len(found) - 1} more have" if len(found) > 1 else " has"
            return f"'{one_line(found[0]):.60}'{others} {what}"
    return None if list(before) == list(now) else "they stand in another order"


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], but: Collection[str] = (), place: str = ""
) -> tuple[str, Any, Any] | None:
    """The first key in which two resolved recipes differ, with both values; None: they do not.

    but: keys of [run] that may differ.
    """
    for key in dict.fromkeys((*one, *other)):
        if place == "run." and key in but:
            continue
        mine = one.get(key)
        theirs = other.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            if found := first_difference(mine, theirs, but, f"{place}{key}."):
                return found
        elif mine != theirs:
            return f"{place}{key}", mine, theirs
    return None


def rounds_of(settings: Mapping[str, Any]) -> int:
    """How many rounds are planned, as a recipe or a run folder has it; 0 where it does not say."""
    rounds = settings.get("training", {}).get("rounds")
    return rounds if isinstance(rounds, int) else 0


def why_not_longer(
    asked: Mapping[str, Any], result: Mapping[str, Any] | None, planned: str, forgotten: Sequence[int] = ()
) -> str | None:
    """Why the rounds that are done are lost or would have been others, or none would follow; None: they go on.

    asked: settings with more rounds. result: of the run so far. planned: see `Method.planned`.
    forgotten: clients; without them the best round is another, and patience begins anew.
    """
    if result is not None and asked.get("run", {}).get("keep") == "nothing":
        return "it kept no weights (keep = 'nothing')"
    if asked.get("training", {}).get("lr_schedule") == "cosine":
        return "the learning rates of training.lr_schedule = 'cosine' depend on the number of rounds"
    if asked.get("privacy", {}).get("target_epsilon"):
        return "the noise for privacy.target_epsilon depends on the number of rounds"
    if planned:
        return f"{planned} depends on the number of rounds"
    if result is not None and result.get("stopped_after") is not None:
        if forgotten:
            return None
        return (
            f"it stopped early, after round {result['stopped_after']} (evaluation.patience), and would stop there again"
        )
    return None
