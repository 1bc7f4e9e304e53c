"""Trial passes of a network before round 1: it takes the rows of all sides, and the smallest batch in training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polyfed.core.client import Client
from polyfed.core.modules import copy_network
from polyfed.core.randomness import seeded_global_rng
from polyfed.data.samples import LabeledSamples
from polyfed.errors import ConfigError, described, first_line
from polyfed.functional.modes import eval_mode, has_batchnorm
from polyfed.units import human_count

__all__ = ["check_parameters", "example_input", "try_network", "try_row"]


def example_input(client: Client, module: nn.Module) -> Tensor:
    """The client's first training sample as `module` takes it, a batch of one."""
    return client.prepare(client.data.train.x[:1]).to(next(iter(module.parameters())).device)


def check_parameters(module: nn.Module, who: str) -> None:
    """Check that a network has parameters, and that their shapes are known.

    Raises:
        ConfigError: it has not; `who` says whose it is.
    """
    if next(module.parameters(), None) is None:
        raise ConfigError(f"{who}: expected a network with parameters, which are what is trained, got one without any")
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigError(
            f"{who}: expected a network whose layers have shapes, got one with a lazy layer (nn.LazyLinear, ...); "
            "call it once on a batch of its inputs before"
        )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"{who}: expected parameters that are real, got '{name}', which is complex; "
                "keep its real and imaginary parts, torch.view_as_real(...), as the parameter"
            )


def try_network(clients: Sequence[Client], module: nn.Module) -> None:
    """Pass rows of all kinds that one architecture's clients have, and a training batch; nothing is changed by it.

    Raises:
        ConfigError: the network cannot take some of them; names the client and the side.
    """
    names = module.state_dict().keys()
    with seeded_global_rng(0):  # whatever the user's code draws
        for client, side, row in _tried_rows(clients):
            _try_prepared(client, module, row, side, client.title_with_network)
            new = module.state_dict().keys() - names
            if new:
                raise ConfigError(
                    f"{client.title_with_network}: expected a network that has all its tensors before its first "
                    f"forward, got one whose forward adds '{min(new)}'; make them in its __init__"
                )
        _try_training(clients, module)


def try_row(client: Client, module: nn.Module, who: str = "") -> None:
    """Pass the client's first training row; `who` says in messages whose network it is, if not the client's own.

    Raises:
        ConfigError: the network cannot take it, or gives no scores.
    """
    _try_prepared(client, module, client.prepare(client.data.train.x[:1]), "train", who or client.title_with_network)


def _tried_rows(clients: Sequence[Client]) -> list[tuple[Client, str, Tensor]]:
    """A row of every kind (shape and type) that one architecture's clients have, as the network takes it.

    With its client and side. Of ids, which a table may be too short for, it is the row with the largest.
    """
    tried: dict[tuple[torch.Size, torch.dtype], tuple[Client, str, Tensor]] = {}
    for side in ("train", "test", "validation"):
        for client in clients:
            samples = getattr(client.data, side)
            if not len(samples):
                continue
            row = _prepared(client, _telling_row(samples), side)
            known = tried.get((row.shape, row.dtype))
            if known is None or (not row.is_floating_point() and row.max() > known[2].max()):
                tried[row.shape, row.dtype] = (client, side, row)
    return list(tried.values())


def _prepared(client: Client, row: Tensor, side: str) -> Tensor:
    """A stored row as the network takes it; the function may be the user's."""
    what = f"{client.title_with_network}: prepare"
    try:
        prepared: object = client.prepare(row)
    except Exception as error:
        shape = tuple(row.shape[1:])
        raise ConfigError(f"{what} cannot take {side} inputs of shape {shape}: {first_line(error)}") from error
    if not isinstance(prepared, Tensor):
        raise ConfigError(f"{what} should return a tensor, got {described(prepared)} for {side} inputs")
    return prepared


def _telling_row(samples: LabeledSamples) -> Tensor:
    """The stored row with the largest id, (1, ...); of other inputs the first."""
    if samples.x.dtype != torch.int64 or not samples.x[0].numel():
        return samples.x[:1]
    place = int(samples.x.flatten(1).amax(dim=1).argmax())
    return samples.x[place : place + 1]


def _try_prepared(client: Client, module: nn.Module, row: Tensor, side: str, who: str) -> None:
    """Check that a network, in evaluation mode, gives scores for a prepared row of one side of the client's data."""
    what = "inputs" if side == "train" else f"{side} inputs"
    with torch.no_grad(), eval_mode(module):
        _check_scores(client, module, row, what, who)


def _try_training(clients: Sequence[Client], module: nn.Module) -> None:
    """Check that a copy of one architecture's network, in training mode, takes the smallest batch of its clients."""
    needed = 2 if has_batchnorm(module) else 1
    batches = [(rows, client) for client in clients for rows in _batch_sizes(client) if rows >= needed]
    if clients[0].training.batch_size < needed:
        raise ConfigError(
            f"{clients[0].title_with_network} has BatchNorm, which cannot normalize a single row; expected "
            "training.batch_size of at least 2, got 1"
        )
    if not batches:
        return  # nobody trains it: such clients are refused, and told, in each round
    rows, client = min(batches, key=lambda batch: batch[0])
    who = client.title_with_network
    x = client.prepare(client.data.train.x[:rows])
    what = f"a batch of {human_count(rows, 'input')}"
    scores = _check_scores(client, copy_network(module, who).train(), x, what, f"{who}, in training mode,")
    if client.classes and _are_probabilities(scores.detach()):
        warnings.warn(
            f"{clients[0].title_with_network} gives probabilities (they are not negative, and each row sums to one), "
            "which losses take for logits, so that it learns little; leave out its last softmax",
            stacklevel=2,
        )


def _are_probabilities(scores: Tensor) -> bool:
    """Whether rows of scores, (B, C), are probabilities of several classes."""
    sums = scores.sum(dim=1)
    return scores.shape[1] > 1 and bool((scores >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3))


def _batch_sizes(client: Client) -> set[int]:
    """Rows of the client's minibatches: all but the last alike."""
    size = client.training.batch_size
    return {min(size, client.n), client.n % size or size}


def _check_scores(client: Client, module: nn.Module, x: Tensor, what: str, who: str) -> Tensor:
    """A network's scores (B, C), checked; `who` and `what` say in messages whose it is, and what it was given."""
    try:
        scores = module(x.to(next(module.parameters()).device))
    except Exception as error:  # the network is the user's
        raise ConfigError(f"{who} cannot take {what} of shape {tuple(x.shape[1:])}: {first_line(error)}") from error
    came = f"shape {tuple(scores.shape[1:])}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
    if not client.classes and (not isinstance(scores, Tensor) or scores.shape != (len(x), 1)):
        raise ConfigError(
            f"expected one output per sample, shape (1,), from {who}, as labels are floats, numbers to predict, got "
            f"{came}; write y.long() if they are classes"
        )
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < client.classes:
        raise ConfigError(f"expected scores for {client.classes} classes per sample from {who}, got {came}")
    return scores
