"""Clients of one network scored together: their outputs are one vectorized call, and reach main memory in one copy.

Where a method predicts by more than the network's output, clients predict one after the other.

Shapes: K clients, N rows of the client with most, B rows of a pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import freeze
from polyfed.core.method import Method, NotVectorizable, predictors, uses_default_predict
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.base import WorkerContext
from polyfed.engine.executors.client_work import client_weights, counts_others, working_copy
from polyfed.engine.executors.jobs import EvalJob, Scores, placed
from polyfed.engine.executors.stack_parts import Tensors, attributes_kept, begins, own_tensors, put_row, weights_on
from polyfed.engine.scoring import CHUNK, Score, evaluate_model, predict_samples
from polyfed.errors import RunError
from polyfed.functional.device_copies import copy_once, move_together
from polyfed.functional.modes import eval_mode
from polyfed.functional.tied_tensors import call_with
from polyfed.functional.vmapped import FewerKernels
from polyfed.profiling import timed

_ROWS = 1024  # of all clients together in a pass


def can_score_together(asked: EvalJob) -> bool:
    """Whether what is asked is about the client's own rows, and nothing else."""
    if asked.client.missing is not None:
        return False
    return all(part not in asked.shared and len(getattr(asked.client.data, part)) for part in asked.parts)


@timed("score")
def score_together(asked: Sequence[EvalJob], context: WorkerContext) -> list[Scores]:
    """The scores of clients of one network, who receive one after the other.

    Raises:
        NotVectorizable: their outputs cannot be taken together.
        RunError: the method failed; says for which client and in which round.
    """
    model_factory = context.model_factory
    method = context.method
    as_one = uses_default_predict(method) and not method.alternative_predictors
    first = asked[0]
    template = model_factory.module(first.client.architecture, first.variant)
    before = [client_weights(each.client, each.variant, model_factory) for each in asked]
    clients: list[Client] = []
    stacked: Tensors = {}
    outputs: dict[tuple[int, str, str], Tensor] = {}  # by place, part and predictor
    with copy_once():  # of what all are sent
        for place, (each, weights) in enumerate(zip(asked, weights_on(before, model_factory.device), strict=True)):
            clients.append(_received(each, working_copy(each.client, each.variant, model_factory, weights), context))
            if as_one:
                put_row(stacked, place, len(asked), own_tensors(template))
            else:
                predicted = _predicted(clients[place], method, first.parts)
                outputs |= {(place, part, name): scores for (part, name), scores in predicted.items()}
    parts = first.parts if as_one else ()
    for part in parts:
        samples: list[LabeledSamples] = [getattr(client.data, part) for client in clients]
        by_client = _tried(_Predict(method, template), stacked, clients, samples)
        outputs |= {(place, part, ""): scores for place, scores in enumerate(by_client)}
    here = move_together(list(outputs.values()), [torch.device("cpu")] * len(outputs))
    outputs = dict(zip(outputs, here, strict=True))
    found: list[dict[str, Score]] = [{} for _ in asked]
    for part in first.parts:
        others = counts_others(part)
        for place, client in enumerate(clients):
            known = {name: outputs[place, part, name].split(CHUNK) for name in predictors(method, others)}
            own = getattr(client.data, part)
            found[place][part] = evaluate_model(client, method, own, context.from_scores, others, outputs=known)
    return list(found)


def _predicted(client: Client, method: Method, parts: Sequence[str]) -> dict[tuple[str, str], Tensor]:
    """What each predictor gives for a client at work, by part and name, on the device of its network.

    Raises:
        RunError: one failed; says for which client and in which round.
    """
    found = {}
    try:
        for part in parts:
            samples = getattr(client.data, part)
            for name, one in predictors(method, counts_others(part)).items():
                found[part, name] = torch.cat(predict_samples(client, one, samples))
    except Exception as error:
        raise placed(error, client, "scoring", client.round) from error
    return found


def _received(asked: EvalJob, client: Client, context: WorkerContext) -> Client:
    """The client, at work, after receiving what it is sent."""
    client.round = asked.round
    if asked.message is not None:
        try:
            context.method.receive(client, freeze(asked.message))
        except Exception as error:
            raise placed(error, client, "scoring", asked.round) from error
    return client


class _Predict(nn.Module):
    """What a method predicts by a network, as a module around it, so that `functional_call` reaches its tensors."""

    def __init__(self, method: Method, model: nn.Module) -> None:
        super().__init__()
        self.method, self.model = method, model

    def forward(self, x: Tensor) -> Tensor:
        """See `Method.predict`."""
        return self.method.predict(self.method.personal_model(self.model), x, {})


def _tried(
    predict: _Predict, stacked: Tensors, clients: Sequence[Client], samples: Sequence[LabeledSamples]
) -> list[Tensor]:
    """See `_outputs`.

    Raises:
        NotVectorizable: they cannot be taken together.
    """
    try:
        with warnings.catch_warnings(), attributes_kept(predict.model):
            warnings.filterwarnings("error", message=".*performance drop")  # client by client in truth
            return _outputs(predict, stacked, clients, samples)
    except torch.OutOfMemoryError as error:
        first = f"{clients[0].title} ({clients[0].architecture}), round {clients[0].round}, scoring"
        hint = f"set run.workers below {len(clients)}"
        raise RunError(f"{first}: the device's memory ran out with {len(clients)} clients as one; {hint}") from error
    except Exception as error:  # also one of the network's own, which shows when the client is scored alone
        raise NotVectorizable(str(error)) from error


def _outputs(
    predict: _Predict, stacked: Tensors, clients: Sequence[Client], samples: Sequence[LabeledSamples]
) -> list[Tensor]:
    """Each client's outputs for its samples, on the CPU."""
    tensors = {f"model.{name}": t for name, t in stacked.items()}
    device = next(iter(stacked.values())).device
    counts = [len(own) for own in samples]
    whole = torch.cat([own.at(device).x.to(device) for own in samples])
    rows_KN = torch.arange(max(counts)).clamp(max=torch.tensor(counts).unsqueeze(1) - 1)
    rows_KN = (rows_KN + torch.tensor(begins(counts)).unsqueeze(1)).to(device)

    def call(tensors: Tensors, x: Tensor) -> Tensor:
        outputs: Tensor = call_with(predict, tensors, (x,))
        return outputs

    found = []
    with torch.no_grad(), eval_mode(predict.model), FewerKernels():
        for rows_KB in rows_KN.split(max(1, _ROWS // len(clients)), dim=1):
            x = clients[0].prepare(whole[rows_KB.flatten()]).unflatten(0, rows_KB.shape)
            found.append(torch.func.vmap(call)(tensors, x))
    outputs_KN = torch.cat(found, dim=1).cpu()
    return [outputs[:count] for outputs, count in zip(outputs_KN, counts, strict=True)]
