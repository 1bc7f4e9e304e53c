"""Which state of a run is kept, where, and from where a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyfed.core.settings import Evaluation, Keep
from polyfed.engine import checkpoint
from polyfed.engine.checkpoint import Snapshot
from polyfed.engine.evaluation_record import not_evaluated
from polyfed.engine.history import best_round, early_stop_round
from polyfed.engine.run_folder import RunFolder, explain_disk_errors
from polyfed.engine.transaction import Transaction
from polyfed.engine.weight_store import WeightStore
from polyfed.errors import ConfigError
from polyfed.results.main_score import main_score_of


class Checkpointer:
    """Writes checkpoints, and goes back to them.

    Args:
        transaction: the state. history: the records, changed in place. folder: None keeps the best round in memory.
        store: of the clients' weights. clients: how many. evaluation: which rounds are scored, when a run stops.
        keep: whose models are wanted. settings: of the run. is_last: whether no regular round follows that of a number.
        summarize: makes a result of records; fails where they are damaged.
    """

    def __init__(
        self,
        transaction: Transaction,
        history: list[dict[str, Any]],
        folder: RunFolder | None,
        store: WeightStore,
        clients: int,
        evaluation: Evaluation,
        keep: Keep,
        settings: Mapping[str, Any],
        is_last: Callable[[int], bool],
        summarize: Callable[[Sequence[Mapping[str, Any]]], object],
    ) -> None:
        self._transaction = transaction
        self._history = history
        self._folder = folder
        self._store = store
        self._clients = clients
        self._evaluation = evaluation
        self._keep = keep
        self._settings = settings
        self._is_last = is_last
        self._summarize = summarize
        self._best: Snapshot | None = None  # where no folder holds it

    def save(self, number: int) -> None:
        """Keep the present state, after round `number`."""
        if self._folder is not None:
            with explain_disk_errors(self._folder.path):
                snapshot = self._transaction.snapshot(number)
                checkpoint.write(self._folder.checkpoints, snapshot, self.best_round)
        elif self.best_round(number) == number:
            self._best = self._transaction.snapshot(number)

    def best_round(self, upto: int) -> int | None:
        """The best round so far, where its models are wanted."""
        return best_round(self._history[:upto]) if self._keep == "best" else None

    def latest(self, folder: RunFolder, before: int | None = None) -> Snapshot | None:
        """The last whole checkpoint, or the last one before a round."""
        return checkpoint.latest(folder.checkpoints, self._clients, self._store, self._expect(folder), before)

    def show_wanted_round(self) -> int:
        """Be what the federation was after the round whose models are wanted; gives its number."""
        last: int = self._history[-1]["round"]
        number = self.best_round(last)
        if number is None or number == last:
            return last
        snapshot = self._best
        if self._folder is not None:
            snapshot = checkpoint.of_round(self._folder.checkpoints, number, self._clients, self._store)
        assert snapshot is not None
        self.go_back(snapshot, list(self._history))
        return number

    def go_back(self, snapshot: Snapshot, history: Sequence[Mapping[str, Any]]) -> None:
        """Be what the federation was then, with these records."""
        self._transaction.restore(snapshot)
        self._history[:] = [dict(record) for record in history]

    def restore(self, begin: Callable[[], None]) -> int:
        """Go back to the run folder's last checkpoint; the number of its round, 0 where there is none.

        Args:
            begin: called where the run begins anew, before round 1.
        """
        folder = self._folder
        longer = folder is not None and folder.has_fewer_rounds(self._settings)
        snapshot = None if folder is None else self._from_where(folder, longer)
        if snapshot is None:
            if folder is not None:
                folder.rounds(0)
            clients = range(self._clients)
            nothing = Snapshot(0, {}, dict.fromkeys(clients), {number: {} for number in clients})
            self.go_back(nothing, [])
            begin()
        elif folder is not None:
            self.go_back(snapshot, folder.rounds(snapshot.round))
        if folder is not None and longer:
            if self._history:
                self._forget_last_scores(folder)
            folder.write_recipe(self._settings)  # at last: whoever is killed before begins as before
        return len(self._history)

    def _from_where(self, folder: RunFolder, longer: bool) -> Snapshot | None:
        """The checkpoint to go on from: the last one; for more rounds than there were to be, that before a final one.

        Raises:
            ConfigError: there was one and it has gone, or what the final round gave away cannot be taken back.
        """
        snapshot = self.latest(folder)
        if snapshot is None and folder.read_result() is not None:
            raise ConfigError(f"expected a checkpoint to go on from in {folder.checkpoints}, got none; use --overwrite")
        if snapshot is None or not longer:
            return snapshot
        *earlier_records, last = folder.records(snapshot.round)
        self._history[:] = earlier_records
        if not last["final_round"] or self.has_stopped():
            return snapshot
        if last.get("releases"):
            raise ConfigError(
                f"{folder.path} cannot go on for more rounds: its final round has given away what counts in epsilon; "
                "choose another --out or --overwrite"
            )
        earlier = self.latest(folder, before=snapshot.round)
        if earlier is None:
            place = folder.checkpoints
            raise ConfigError(f"expected the checkpoint before the final round in {place}, got none; use --overwrite")
        checkpoint.remove(folder.checkpoints, snapshot.round)
        return earlier

    def has_stopped(self) -> bool:
        """Whether the run stops early after its records so far."""
        return early_stop_round(self._history, self._evaluation.patience, self._evaluation.min_delta) is not None

    def _forget_last_scores(self, folder: RunFolder) -> None:
        """Take the scores out of the record of the round that was to be the last one, if it is not due otherwise."""
        last = self._history[-1]
        number = last["round"]
        if not last["evaluated"] or last["final_round"] or number % self._evaluation.every_n_rounds == 0:
            return
        del self._history[-1]
        if not self._is_last(number):
            last = {**last, "evaluated": False, **not_evaluated(main_score_of(last))}
            folder.replace_last(last)
        self._history.append(last)

    def _expect(self, folder: RunFolder) -> Callable[[int], None]:
        """What must be there besides a checkpoint of a round: the records up to it, and the best one's checkpoint."""

        def expect(number: int) -> None:
            records = folder.records(number)
            known = {str(client) for client in range(self._clients)}
            if strange := {each for record in records for each in record["bytes_by_client"]} - known:
                raise ConfigError(f"the records tell of a client {min(strange)[:20]!r}, who is not in the run")
            self._summarize(records)
            best = best_round(records) if self._keep == "best" else None
            if best not in (None, number) and not checkpoint.is_whole(folder.checkpoints, best or 0):
                raise ConfigError(f"that of the best round before it, {best}, is damaged")

        return expect
