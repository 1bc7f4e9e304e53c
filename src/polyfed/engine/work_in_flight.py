"""Work under way whose uploads the server has not got yet, and what checkpoints keep of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.message import clone, freeze
from polyfed.engine.executors.jobs import JobResult
from polyfed.engine.weight_store import ClientWeights, WeightStore


@dataclass(frozen=True, eq=False)
class WorkInFlight:
    """A client's work that is under way on the simulated clock.

    Attributes:
        round: in which it began. seconds: until its upload arrives. result: what will have come of it; without losses
        and scores, which are in the record of that round.
    """

    round: int
    seconds: float
    result: JobResult

    @property
    def client_id(self) -> int:
        """Whose work it is."""
        return self.result.client_id


def describe(work: Sequence[WorkInFlight]) -> list[dict[str, Any]]:
    """Work as a value that `engine.wire` stores."""
    found = []
    for one in work:
        own = one.result.weights
        assert own is None or isinstance(own, ClientWeights)
        found.append(
            {
                "client": one.client_id,
                "round": one.round,
                "seconds": one.seconds,
                "refused": one.result.refused,
                "upload": one.result.message,
                "state": one.result.state,
                "weights": None if own is None else [own.architecture, own.variant, own.in_main_memory()],
            }
        )
    return found


def restore(stored: Sequence[Mapping[str, Any]], store: WeightStore) -> list[WorkInFlight]:
    """The inverse of `describe`. store: gets the weights; ValueError where they are not its networks'."""
    work = []
    for one in stored:
        number = one["client"]
        own = None if one["weights"] is None else store.restore(number, *one["weights"])
        result = JobResult(number, freeze(clone(one["upload"])), own, clone(one["state"]), refused=one["refused"])
        work.append(WorkInFlight(one["round"], one["seconds"], result))
    return work
