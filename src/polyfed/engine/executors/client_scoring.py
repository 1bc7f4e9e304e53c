"""How one client is scored, on a working copy of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import freeze
from polyfed.core.method import Method, uses_default_predict
from polyfed.core.model_factory import ModelFactory
from polyfed.engine.executors.jobs import EvalJob, placed
from polyfed.engine.executors.working_copy import client_weights, working_copy
from polyfed.engine.scoring import Score, ScoreCache
from polyfed.functional.device_copies import move_together
from polyfed.models.split import SplitModel
from polyfed.profiling import timed


@timed("score")
def score_parts(asked: EvalJob, method: Method, model_factory: ModelFactory, memory: ScoreCache) -> dict[str, Score]:
    """The scores of all the parts asked for, by the same working copy of the client.

    Raises:
        RunError: the method failed; says for which client and in which round.
    """
    before = client_weights(asked.client, asked.variant, model_factory)
    client = working_copy(asked.client, asked.variant, model_factory, before)
    client.round = asked.round
    try:
        if asked.message is not None:
            method.receive(client, freeze(asked.message))
        same = asked.message is None or only_head_differs(client, asked.variant, method, model_factory, before)
        body = asked.variant if same else None
        scores = {}
        for part in asked.parts:
            samples = getattr(client.data, part)
            scores[part] = memory.score(client, method, samples, part in asked.shared, counts_others(part), body)
        return scores
    except Exception as error:
        raise placed(error, client, "scoring", asked.round) from error


def only_head_differs(
    client: Client, variant: str, method: Method, model_factory: ModelFactory, before: Mapping[str, Tensor]
) -> bool:
    """Whether a client at work has, but for the head of what is scored, the weights that it had before."""
    model = method.personal_model(client.model)
    if not isinstance(model, SplitModel) or not uses_default_predict(method):  # nobody asks
        return False
    head = {id(tensor) for tensor in model.head.state_dict(keep_vars=True).values()}
    tensors = model_factory.state(client.architecture, variant)
    return _alike(before, {name: tensor for name, tensor in tensors.items() if id(tensor) not in head})


def counts_others(part: str) -> bool:
    """Whether a client is scored by the method's other predictors, too: not where its own chooses rounds."""
    return part == "test"


def _alike(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether a network is bit for bit as it was; of one that is not, the first tensor mostly tells."""
    names = list(after)
    return all(_equal(before, after, some) for some in (names[:1], names[1:]))


def _equal(before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Sequence[str]) -> bool:
    tensors = [found[name] for found in (before, after) for name in names]
    here = move_together(tensors, [torch.device("cpu")] * len(tensors))
    return all(map(torch.equal, here[: len(names)], here[len(names) :]))
