"""Defense at the server: uploads that are too large are refused, and the others are held to what they have in common.

What is held to one another are the uploads' parts (`plugins.upload_segments`): weights layer by layer, rows of
one class, outputs on common inputs. With `[robust_aggregation] aggregator`

- "median", "trimmed_mean", "geometric_median": the robust center takes the place of every one of them, so that whatever
  the method makes of them is made of the center (equal models average to themselves);
- "norm_clipping": those longer than the median of the clients' lengths are brought to it;
- "multi_krum": the whole uploads of those who are farthest from the others are left out; their distance is the mean
  square over the parts that two have in common.

All other floats (kernels, features) are brought to the median of the clients' sizes, whatever the rule: a size is the
root mean square of the rows' L2 norms. Whole numbers and single numbers are believed, except that where a center has
taken all places, it does not matter how much each of them counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyfed.core.message import Message, flatten
from polyfed.core.method import Method
from polyfed.core.server import Server
from polyfed.core.upload_forms import MOST
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.plugin import Plugin, Rejected, Setup
from polyfed.engine.round_state import Round
from polyfed.engine.uploads import has_upload, iter_tensors
from polyfed.errors import ConfigError
from polyfed.functional import robust
from polyfed.plugins.settings import RobustAggregation
from polyfed.plugins.upload_segments import (
    EditableMessage,
    Pieces,
    blocks_of,
    floats_of,
    owners_of,
    parts_of,
    vectors_of,
)

_FEW = 3  # below so many nobody can be outvoted
_DEFAULT = RobustAggregation().max_magnitude
_LARGEST_SQUARE = torch.finfo(torch.float32).max ** 2


@dataclass
class DefenseLog:
    """What a defense has done in a round. left_out: clients. shortened: vectors and tensors.

    few: parts of which fewer than three clients sent one, where nobody can be outvoted.
    """

    left_out: set[int] = field(default_factory=set)
    shortened: int = 0
    few: int = 0


class RobustAggregator(Plugin):
    """Rejects uploads that are too large, and holds the others to what they have in common."""

    name = "robust_aggregation"
    settings_class = RobustAggregation

    def validate(self, setup: Setup) -> None:
        """A rule can be applied to what the method uploads."""
        method = setup.method
        rule = self.settings.aggregator
        if method.is_alone and rule != "none":
            raise ConfigError(
                f"{method.name}, alone: expected no [robust_aggregation], got one, which holds clients' uploads "
                "to one another where no client has others beside it"
            )
        if rule == "none" or not has_upload(method):
            return
        for entry, reason in method.fixed_entries.items():
            raise ConfigError(
                f"robust_aggregation.aggregator: expected uploads that can be held to one another, got {method.name}, "
                f"which sends '{entry}': {reason}"
            )
        if rule in ("median", "trimmed_mean") and method.unaligned_entries:
            raise ConfigError(
                f"robust_aggregation.aggregator: expected 'geometric_median', 'multi_krum' or 'norm_clipping' for "
                f"{method.name}, got '{rule}', which goes number by number: in '{method.unaligned_entries[0]}', "
                "features of the clients' own networks, a number means something else at every client"
            )

    def receive(self, round: Round, jobs: Sequence[TrainJob], outcomes: Sequence[JobResult]) -> list[JobResult]:
        """As they are, or refused. What lies on a GPU is not looked at where it is known to be small enough."""
        bound = self.settings.max_magnitude or math.inf
        asked = [
            dataclasses.replace(one, message={name: t for name, t in flatten(one.message).items() if t.is_cpu})
            if 0 < one.largest <= bound
            else one
            for one in outcomes
        ]
        read = super().receive(round, jobs, asked)
        return [one if new.refused is None else new for one, new in zip(outcomes, read, strict=True)]

    def decode(self, upload: Message, job: TrainJob, method: Method) -> Message:
        """The upload itself."""
        reason = rejection_reason(self.settings, job.client.classes, upload)
        if reason is not None:
            raise Rejected(reason)
        return upload

    def before_aggregate(self, round: Round, uploads: Mapping[int, Message]) -> Mapping[int, Message]:
        """The uploads as the rule leaves them."""
        done = round.notes.setdefault(self.name, DefenseLog())
        return apply_rule(self.settings, round.method, round.server, uploads, done)

    def record(self, round: Round) -> dict[str, Any]:
        """What the rule has done."""
        if self.settings.aggregator == "none":
            return {}
        done = round.notes.get(self.name, DefenseLog())
        return {self.name: {**vars(done), "left_out": sorted(done.left_out)}}


def rejection_reason(settings: RobustAggregation, classes: int, message: Message) -> str | None:
    """Why an upload is refused, if it is: for its size, or because its "labels" would set rows apart from all others'.

    No number may be larger than `robust_aggregation.max_magnitude`, and none that stands alone (a count of steps, of
    parameters) larger than what any count can be: squares and sums of such numbers are finite, so that one upload
    spoils no arithmetic. Numbers in float64 are sums of squares, of inputs in any unit: with the default they may be as
    large as the square of any number in float32.

    Args:
        classes: of the task. message: finite.
    """
    for entry, name, tensor in iter_tensors(message):
        bound = settings.max_magnitude if tensor.dim() else MOST
        if tensor.dim() and tensor.dtype == torch.float64 and bound == _DEFAULT:
            bound = _LARGEST_SQUARE
        if not bound or not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = tensor.aminmax()
        size = max(-float(low), float(high))
        if not size <= bound:
            place = entry if name is None else f"{entry}/{name}"
            setting = f"robust_aggregation.max_magnitude = {bound:g}" if tensor.dim() else f"{bound:g}"
            return f"a number of '{place}' is {size:.4g}, above {setting}"
    labels = message.get("labels")
    if settings.aggregator != "none" and isinstance(labels, Tensor):
        distinct = labels.unique()
        if len(distinct) < labels.numel() or bool(((distinct < 0) | (distinct >= classes)).any()):
            return f"expected 'labels' that are classes below {classes}, each once, got others"
    return None


def apply_rule(
    settings: RobustAggregation, method: Method, server: Server, uploads: Mapping[int, Message], watch: DefenseLog
) -> Mapping[int, Message]:
    """What the method gets in place of `uploads`; the very same where no rule is set.

    server: before their aggregation: what it would send now is where the clients' changes began.
    """
    if settings.aggregator == "none" or not uploads:
        return uploads
    sent = {i: method.broadcast(server, i) if method.delta_entries else {} for i in uploads}
    parts = parts_of(method, uploads, sent, of_changes=settings.aggregator == "norm_clipping")
    holders = owners_of(parts)
    watch.few += sum(len(who) < _FEW for who in holders.values())
    found = {i: EditableMessage(message) for i, message in uploads.items()}
    chunks = blocks_of(parts, holders)
    if settings.aggregator == "multi_krum":
        kept = _kept(list(uploads), chunks, robust.num_byzantine(len(uploads), settings.byzantine_fraction))
        watch.left_out |= found.keys() - kept
        found = {i: copy for i, copy in found.items() if i in kept}
    else:
        for who, pieces in chunks:
            _replace(who, pieces, _rule(settings, len(who)), found, watch)
    _shorten(found, {i: {part.place[:2] for part in own} for i, own in parts.items()}, watch)
    return {i: copy.message for i, copy in found.items()}


def _rule(settings: RobustAggregation, clients: int) -> Callable[[Tensor], Tensor]:
    """(K, D) -> (D,), the center of all, or (K, D). clients: K."""
    hostile = robust.num_byzantine(clients, settings.byzantine_fraction)
    return {
        "median": robust.median,
        "trimmed_mean": lambda vectors: robust.trimmed_mean(vectors, hostile),
        "geometric_median": robust.geometric_median,
        "norm_clipping": robust.clip_to_median_norm,
    }[settings.aggregator]


# what is done -----------------------------------------------------------------------------------------------------


def _replace(
    who: Sequence[int],
    pieces: Pieces,
    rule: Callable[[Tensor], Tensor],
    found: Mapping[int, EditableMessage],
    watch: DefenseLog,
) -> None:
    """Put what the rule makes of some clients' vectors in their places."""
    before = vectors_of(pieces)
    after = rule(before)
    sizes = [part.value.numel() for part in pieces[0]]
    if after.dim() == 1:  # one center for all, in the same tensors
        new = [part.moved_to(vector) for part, vector in zip(pieces[0], after.split(sizes), strict=True)]
        for i, own in zip(who, pieces, strict=True):
            for part, tensor in zip(own, new, strict=True):
                found[i].put(part.place, tensor.to(part.value.dtype))
        return
    for i, own, old, vector in zip(who, pieces, before, after, strict=True):
        if torch.equal(old, vector):
            continue
        watch.shortened += 1
        for part, piece in zip(own, vector.split(sizes), strict=True):
            found[i].put(part.place, part.moved_to(piece))


def _kept(ids: Sequence[int], chunks: Iterable[tuple[tuple[int, ...], Pieces]], hostile: int) -> set[int]:
    """Whom Krum keeps; everybody where nothing can be compared."""
    place = {i: number for number, i in enumerate(ids)}
    squares = torch.zeros((len(ids), len(ids)), dtype=torch.float64)
    counts = torch.zeros_like(squares)
    for who, pieces in chunks:
        vectors = vectors_of(pieces)
        at = torch.tensor([place[i] for i in who])
        squares[at[:, None], at] += robust.squared_distances(vectors)
        counts[at[:, None], at] += vectors.shape[1]
    if not bool((counts - counts.diag().diag()).any()):
        return set(ids)
    return {ids[number] for number in robust.krum(squares / counts, hostile)}


def _shorten(
    found: Mapping[int, EditableMessage], done: Mapping[int, set[tuple[str, str | None]]], watch: DefenseLog
) -> None:
    """Bring all floats that are no parts to the median of their sizes."""
    sizes: dict[tuple[str, str | None], dict[int, float]] = {}
    for i, copy in found.items():
        for entry, value in copy.message.items():
            for name, tensor in floats_of({entry: value}):
                if (entry, name) not in done[i]:
                    sizes.setdefault((entry, name), {})[i] = _size(tensor)
    for (entry, name), of in sizes.items():
        watch.few += len(of) < _FEW
        factors = robust.median_norm_factors(torch.tensor(list(of.values()), dtype=torch.float64))
        for i, factor in zip(of, factors.tolist(), strict=True):
            if factor < 1:
                members = found[i].message[entry]
                tensor = members if isinstance(members, Tensor) else members[name or ""]
                found[i].put((entry, name, None), tensor * factor)
                watch.shortened += 1


def _size(tensor: Tensor) -> float:
    """The root mean square of the rows' L2 norms."""
    return math.sqrt(float(tensor.double().square().sum()) / len(tensor))
