"""What a client has made in a job, between its work on the device and main memory, where uploads go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, first_nonfinite, freeze, tensors_of, with_tensors
from polyfed.core.method import Method, TrainingResult, scalar_sums
from polyfed.engine.scoring import Score
from polyfed.engine.uploads import Rejected
from polyfed.functional.device_copies import copy_in_place, move_together


@dataclass(frozen=True)
class MadeUpload:
    """What came of a client's work, in tensors of its network.

    message: what its method uploads; None: nothing. after: its network's tensors. refused: why nothing of it counts.
    operations: those of the job, where they are counted. unchanged: of a job without training, whether `after` are the
    weights from before; 0-d, where these lie.
    """

    message: Message | None
    after: Mapping[str, Tensor]
    score: Score | None
    refused: str | None
    operations: int
    unchanged: Tensor | None = None

    def copied(self) -> MadeUpload:
        """The same in tensors of its own, as its network is about to be another client's."""
        tensors = tensors_of(self.message or {})
        copies = copy_in_place([*tensors, *self.after.values()])
        after = dict(zip(self.after, copies[len(tensors) :], strict=True))
        message = None if self.message is None else with_tensors(self.message, copies)
        return replace(self, message=message, after=after)

    def leaving(self, client: Client, trained: TrainingResult) -> list[Tensor]:
        """What goes to main memory of the job, beside the weights: message, state, and what the record tells."""
        told = [] if self.unchanged is None else [self.unchanged]
        sums = scalar_sums(trained.sums).values()
        return [*tensors_of(self.message or {}), *tensors_of(client.state), *sums, *told]

    def is_unchanged(self) -> bool:
        """Whether the job has left the network as it was."""
        return self.unchanged is not None and bool(move_together([self.unchanged], [torch.device("cpu")])[0])


def fetch(tensors: Iterable[Tensor]) -> None:
    """Bring tensors to main memory in one copy for each type, for the block `copy_once` around this call."""
    needed = list(tensors)
    move_together(needed, [torch.device("cpu")] * len(needed))


def encoded(made: Message, client: Client, method: Method, received: Message) -> tuple[Message, str | None]:
    """What leaves the client in place of what its method made; and why nothing of it counts, if it does not."""
    upload = freeze(made)
    name = first_nonfinite(upload)
    if name is not None:
        return upload, f"the upload is not finite ('{name}')"
    try:
        for plugin in client.plugins:
            changed = plugin.encode(upload, client, method, received)
            if changed is not upload:
                upload = freeze(changed)
    except Rejected as problem:
        return freeze({}), str(problem)
    return upload, None
