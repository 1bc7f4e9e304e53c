"""How clients are scored, wherever: those that hold the same model together, by one working copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from polyfed.core.message import flatten, freeze
from polyfed.core.method import Method
from polyfed.core.model_factory import ModelFactory
from polyfed.core.modules import float_state
from polyfed.engine.executors.client_work import working_copy
from polyfed.engine.executors.jobs import EvalBatch, EvalJob, Scores, placed
from polyfed.engine.scoring import ScoreCache, part_of, uses_default_predict

# rows in a batch of clients that are scored together: enough to load their model once for many, few enough for all
# workers to have some; the same whatever the workers, so that passes have the same rows in every executor
_MOST_ROWS = 512
_MOST_OUTPUTS = 2**20  # of all rows of a batch together; the counts of classes take 24 bytes for each


def score_batch(batch: EvalBatch, method: Method, model_factory: ModelFactory, memory: ScoreCache) -> list[Scores]:
    """The scores of all the parts asked for, client by client, by the same working copy of the first.

    Raises:
        RunError: the method failed; says for which client and in which round.
    """
    first = batch.jobs[0]
    client = working_copy(first.client, first.variant, model_factory)
    client.round = first.round
    places = [(job, part) for job in batch.jobs for part in job.parts]
    try:
        if first.message is not None:
            method.receive(client, freeze(first.message))
        parts = [part_of(job.client, part) for job, part in places]
        scores = memory.scores(client, method, parts, [part in job.shared for job, part in places])
    except Exception as error:
        raise placed(error, batch, "scoring", first.round) from error
    taken = iter(scores)
    return [{part: next(taken) for part in job.parts} for job in batch.jobs]


def score_in_batches(
    asked: Sequence[EvalJob],
    method: Method,
    model_factory: ModelFactory,
    score_batches: Callable[[Sequence[EvalBatch]], Sequence[list[Scores]]],
) -> list[Scores]:
    """The scores of all, in order, where those that hold the same model are scored together.

    Args:
        score_batches: gives the scores of each batch's clients.
    """
    if not asked:
        return []
    most = min(_MOST_ROWS, _MOST_OUTPUTS // max(asked[0].client.classes, 1))
    alike = who_are_alike(asked, method, model_factory)
    batches = [some for places in alike for some in _of_size(asked, places, most)]
    found: dict[int, Scores] = {}
    scored = score_batches([EvalBatch([asked[place] for place in places]) for places in batches])
    for places, scores in zip(batches, scored, strict=True):
        found |= zip(places, scores, strict=True)
    return [found[place] for place in range(len(asked))]


def who_are_alike(asked: Sequence[EvalJob], method: Method, model_factory: ModelFactory) -> list[list[int]]:
    """The places of those that hold the same model once they have received, as far as the method says so."""
    together = are_scored_together(method)
    kinds: dict[Hashable, list[int]] = {}
    for place, job in enumerate(asked):
        kinds.setdefault(_kind(job) if together and job.message is not None else place, []).append(place)
    alike: list[list[int]] = []
    for places in kinds.values():
        first = asked[places[0]]
        sent = (first.message or {}).get("model")  # a subclass may leave some of it out
        is_whole = len(places) == 1
        if isinstance(sent, Mapping) and not is_whole:
            network = model_factory.module(first.client.architecture, first.variant)
            is_whole = float_state(network).keys() <= sent.keys()
        alike += [places] if is_whole else [[place] for place in places]
    return alike


def are_scored_together(method: Method) -> bool:
    """Whether clients that are sent the same predict alike."""
    network_alone = uses_default_predict(method) and not method.alternative_predictors
    is_sent_whole = method.ignores_initial_weights and hasattr(method.receive, "loads_message")
    return network_alone and is_sent_whole


def _kind(job: EvalJob) -> Hashable:
    """What is equal for clients that hold the same model once they have received: what they are sent lies in one place.

    Where tensors lie is asked, as some methods send views of the same memory.
    """
    tensors = flatten(job.message or {}).items()
    sent = tuple((name, t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in tensors)
    return job.client.architecture, job.variant, job.round, id(job.client.prepare), sent


def _of_size(asked: Sequence[EvalJob], places: Sequence[int], most: int) -> Iterator[list[int]]:
    """The places in pieces of at most so many rows, each set of samples counted once; or of one client with more."""
    piece: list[int] = []
    sets: dict[int, int] = {}
    for place in places:
        client = asked[place].client
        read = [getattr(client.data, part) for part in asked[place].parts]
        own = {id(samples): len(samples) for samples in (*read, client.missing) if samples is not None}
        if piece and sum(sets.values()) + sum(size for each, size in own.items() if each not in sets) > most:
            yield piece
            piece = []
            sets = {}
        piece.append(place)
        sets |= own
    if piece:
        yield piece
