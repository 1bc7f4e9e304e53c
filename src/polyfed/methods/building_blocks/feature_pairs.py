"""Feature pairs: how clients make them, the server's pool, and which ones a client takes in a step (FedIN).

A pair is what enters (s_in) and what leaves (s_out) the intermediate part of a client's network, for one sample. In a
message, pairs are the group "features": "s_in" (M, ...) and "s_out" (M, ...), row m of both from the same sample.

Where clients' networks differ in width or family, pairs are sent in one common shape (`functional.feature_pooling`). A
client has two matrices: P_in (C, c) for the channels of what enters its intermediate part, P_out (F, D) for its
representation. They are orthogonal, and a function of the run's seed and of the widths alone.

    l_IN = mean (P_out f(P_in' s_in; w_in) - s_out)^2        (`FedIN.loss_in`)

In a context: "p_in", "p_out", and "cut" (1, ...), a sample of what enters the intermediate part, for its shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core import inference, randomness
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group
from polyfed.core.method import Context
from polyfed.core.modules import as_split_model
from polyfed.core.releases import Release
from polyfed.core.server import Server
from polyfed.core.upload_forms import Entry, Form, Members, UploadContext, as_sent
from polyfed.functional.clipping import clip_rows
from polyfed.functional.feature_pooling import layout, random_orthogonal, to_common
from polyfed.functional.modes import has_batchnorm
from polyfed.validation.effect import ActsWith

WITH_PAIRS = ActsWith("exchange_features")  # without pairs there is nothing to do it with
# without pairs there is no message to add noise to: FedIN then has noise in the training pass alone
Where = Annotated[
    Literal["both", "message", "forward"], ActsWith("noise_level"), ActsWith("exchange_features", of=("message",))
]
Releases = tuple[Release, ...]
Projection = Literal["none", "fixed"]
Size = Annotated[int, Field(ge=1), ActsWith("projection", ("fixed",))]  # a size of the common shape
_PARTS = ("s_in", "s_out")


def _pairs(known: UploadContext, name: str) -> Members:
    """As many pairs as are asked for, of a client with fewer rows all; how wide they are the pool will see."""
    asked = getattr(known.method, "num_pairs", None) or known.server.training.batch_size
    rows = min(asked, known.size("N"))
    return Members({part: (Entry(None, rows=rows),) for part in _PARTS})


FORM: Form = {"model": as_sent, "features": _pairs}


def sample_pairs(
    client: Client, count: int, level: float, generator: torch.Generator, bound: float = 0.0
) -> dict[str, Tensor]:
    """Pairs of `count` training rows of a client at work, drawn at random; all where it has fewer.

    Its network is in eval mode. level: of the noise on s_in, of which s_out is then made, and on s_out (eq. 5, 6); 0
    draws nothing. bound: every row is first shortened to this L2 norm, of which the noise then is a multiple; 0: it is
    one of the features' own standard deviation.

    Returns:
        "s_in" and "s_out", on the device of its network.
    """
    model = as_split_model(client.model)
    x = client.data.train.x[torch.randperm(client.n, generator=generator)[:count]]
    s_in = _noisy(inference.map_batches(model.extract, model, x, client.prepare), level, generator, bound)
    s_out = _noisy(inference.map_batches(model.transform, model, s_in, lambda rows: rows), level, generator, bound)
    return {"s_in": s_in, "s_out": s_out}


def _noisy(s: Tensor, level: float, generator: torch.Generator, bound: float) -> Tensor:
    s = clip_rows(s, bound) if bound else s
    if not level:
        return s
    z = torch.randn(s.shape, generator=generator).to(s.device)
    return s + (level * bound * z).to(s.dtype) if bound else add_noise(s, level, z)


def add_noise(s: Tensor, level: float, z: Tensor) -> Tensor:
    """Returns s + level * sigma * z. Sigma is one number, the population standard deviation over all entries of ``s``.

    So the standard deviation of what is added is ``level * sigma`` (variance ``level^2 sigma^2``). sigma is a constant
    for the gradient: d result / d s is the identity. It is a scale taken from private features, hence no differential
    privacy by itself.

    Args:
        s: features, any shape; every entry counts towards sigma, so leave padding rows out.
        level: 0.8 in the paper. At level 0 do not call this and do not draw ``z``: the generator's state must stay.
        z: standard normal draws of the same shape, drawn by the caller.

    Source: FedIN, section 4.3, eq. 5 and 6 (main text; the appendix reads N(0, 0.8 sigma^2)).
    """
    wide = s.detach().to(torch.promote_types(s.dtype, torch.float32))
    sigma = wide.std(correction=0)
    return s + (level * sigma * z).to(s.dtype)


def releases(bound: float, level: float, count: int, rows: int) -> Releases:
    """What `sample_pairs` gives away of a client with so many rows: one of them may become another.

    Its s_in is then 2 * bound away at most. Its s_out is made of the noisy s_in, so that it tells no more of the row.
    All of it is for given weights: what these tell of the row is another matter.
    """
    return (Release("features", "sample", level / 2, min(count, rows), rows),) if bound and level else ()


def cut_shapes(client: Client) -> dict[str, Tensor]:
    """A training row of a client at work, (1, ...), at the cuts "z_in" and "z_out", on the device of its network."""
    model = as_split_model(client.model)
    one = client.data.train.x[:1]
    found = {"z_in": model.extract, "z_out": model.represent}
    return {name: inference.map_batches(cut, model, one, client.prepare) for name, cut in found.items()}


def add_drawn_noise(s: Tensor, level: float, draws: str, context: Context) -> Tensor:
    """A cut (rows, ...) of a training pass, with the noise whose draws the context has under that name, if any."""
    return add_noise(s, level, context[draws][: len(s)]) if draws in context else s


def draw_noise(cuts: Group, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Standard normal draws (rows, ...) in the shape of each of `cuts`, on its device; {} of none."""
    return {name: torch.randn((rows, *cut.shape[1:]), generator=generator).to(cut.device) for name, cut in cuts.items()}


def collect(uploads: Mapping[int, Message]) -> dict[str, Tensor]:
    """The pairs of all who sent any, one sender after the other, and "sender" (M,) int64; {} where nobody did."""
    sent = {i: get_group(message, "features") for i, message in uploads.items() if "features" in message}
    if not sent:
        return {}
    senders = [torch.full((len(features["s_in"]),), i) for i, features in sent.items()]
    return {**{name: torch.cat([f[name] for f in sent.values()]) for name in _PARTS}, "sender": torch.cat(senders)}


def store(server: Server, uploads: Mapping[int, Message]) -> None:
    """The server's pool is what was uploaded in this round."""
    server.state.pop("pool", None)
    pool = collect(uploads)
    if pool:
        server.state["pool"] = pool


def draw_pairs(pool: Group, receiver: int, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """At most `count` pairs for a client, in random order, none of them its own and none twice.

    "s_in" and "s_out"; {} where nobody else has sent anything, and then nothing is drawn.
    """
    if not pool:
        return {}
    others = (pool["sender"] != receiver).nonzero().flatten()
    if not len(others):
        return {}
    rows = others[torch.randperm(len(others), generator=generator)[:count]]
    rows = rows.to(pool[_PARTS[0]].device)
    return {name: pool[name][rows] for name in _PARTS}


def receive(model: nn.Module, message: Message) -> dict[str, Tensor]:
    """Copies of a message's pairs on the network's device, as floats; {} without any, or one for BatchNorm.

    BatchNorm, which normalizes the pairs by themselves, takes no single row.
    """
    if "features" not in message:
        return {}
    features = get_group(message, "features")
    if not len(features["s_in"]) or (len(features["s_in"]) == 1 and has_batchnorm(model)):
        return {}
    like = next(model.parameters())
    return {name: t.to(like, copy=True) for name, t in features.items()}


def minibatch(pairs: Group, visit: int, size: int) -> dict[str, Tensor]:
    """The pairs of the visit-th pass (from 0): `size` of them, round and round in their order; all where no more.

    >>> pairs = {"s_in": torch.arange(3), "s_out": torch.arange(3) * 10}
    >>> [minibatch(pairs, visit, 2)["s_out"].tolist() for visit in range(3)]
    [[0, 10], [20, 0], [10, 20]]
    """
    held = len(pairs["s_in"])
    if held <= size:
        return dict(pairs)
    rows = torch.arange(visit * size, (visit + 1) * size) % held
    return {name: rows_of[rows.to(rows_of.device)] for name, rows_of in pairs.items()}


# one common shape ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommonSpace:
    """The common shape of pairs: (1 + grid grid, channels) and (features)."""

    channels: int
    grid: int
    features: int

    def matrices(self, client: Client) -> dict[str, Tensor]:
        """What a context needs, of a client at work, on its network's device."""
        model = as_split_model(client.model)
        cut = inference.map_batches(model.extract, model, client.data.train.x[:1], client.prepare)
        p_in = _matrix(client.seed, "in", self.channels, layout(cut.shape[1:]).channels)
        p_out = _matrix(client.seed, "out", self.features, model.feature_dim)
        return {"cut": cut, "p_in": p_in.to(cut), "p_out": p_out.to(cut)}

    def project(self, pairs: Group, matrices: Group) -> dict[str, Tensor]:
        """Pairs of the client's own shapes in the common one."""
        p_in, p_out = (matrices[name].to(pairs["s_in"].device) for name in ("p_in", "p_out"))
        return {"s_in": to_common(pairs["s_in"], p_in, self.grid), "s_out": pairs["s_out"] @ p_out.T}


def features_of(common: CommonSpace | None, client: Client) -> Callable[[Tensor], Tensor]:
    """The function from network inputs to "s_in" of a pair, as it is sent."""
    model = as_split_model(client.model)
    if common is None:
        return model.extract
    matrices = common.matrices(client)

    def project(x: Tensor) -> Tensor:
        s_in = model.extract(x)
        return common.project({"s_in": s_in, "s_out": model.transform(s_in)}, matrices)["s_in"]

    return project


@functools.lru_cache(maxsize=64)
def _matrix(seed: int, cut: str, size: int, width: int) -> Tensor:
    return random_orthogonal(size, width, randomness.generator(seed, f"projection {cut}", size, width))
