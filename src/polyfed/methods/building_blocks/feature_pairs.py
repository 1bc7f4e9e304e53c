"""Feature pairs: how clients make them, the server's pool, and which ones a client takes in a step (FedIN).

A pair is what enters (s_in) and what leaves (s_out) the intermediate part of a client's network, for one sample. In a
message, pairs are the group "features": "s_in" (M, ...) and "s_out" (M, ...), row m of both from the same sample.

Where clients' networks differ in width or family, pairs are sent in one common shape (`functional.feature_pooling`). A
client has two matrices: P_in (C, c) for the channels of what enters its intermediate part, P_out (F, D) for its
representation. They are orthogonal, and a function of the run's seed and of the widths alone.

    l_IN = mean (P_out f(P_in' s_in; w_in) - s_out)^2        (`FedIN.loss_in`, `PairExchange.transform`)

In a context: "pairs", all that a client has for the round, of which a step has "s_in" and "s_out"; "p_in", "p_out", and
"cut" (1, ...), a sample of what enters the intermediate part, for its shape; for noise in training "cuts", a sample of
both, and in a step "z_in" and "z_out", the draws.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core import inference, randomness
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, members
from polyfed.core.method import Context, Exposed, Method, hyperparameters
from polyfed.core.modules import as_split_model
from polyfed.core.releases import Release
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.core.upload_forms import Entry, Form, Members, UploadContext, as_sent
from polyfed.functional.clipping import clip_rows
from polyfed.functional.feature_pooling import from_common, layout, random_orthogonal, to_common
from polyfed.functional.modes import has_batchnorm
from polyfed.validation.effect import ActsWith

WITH_PAIRS = ActsWith("exchange_features")  # without pairs there is nothing to do it with
_PARTS = ("s_in", "s_out")
_Size = Annotated[int, Field(ge=1), ActsWith("projection", ("fixed",))]  # a size of the common shape


@hyperparameters
class PairExchange(Method):
    """A method whose clients send pairs after training, and in the next round train on pairs of others."""

    exchange_features: bool = True  # exchange pairs and train on them; false: FedProx, with mu = 0 FedAvg
    noise_level: Annotated[float, Field(ge=0)] = 0.0  # noise over std(s); FedIN+Noise has 0.8; 0: off
    # "message": on pairs sent, of which there are none without pairs; "forward": in the training pass; or both
    noise_where: Annotated[
        Literal["both", "message", "forward"], ActsWith("noise_level"), ActsWith("exchange_features", of=("message",))
    ] = "both"
    # bound on the L2 norm of each row sent; noise on pairs is then noise_level times this bound; 0: off
    feature_clip: Annotated[float, Field(ge=0), WITH_PAIRS] = 0.0
    # n_S, pairs that a client sends and receives; not set: the batch size
    num_pairs: Annotated[Annotated[int, Field(ge=1)] | None, WITH_PAIRS] = None
    # "fixed": send pairs in one common shape, for any cuts
    projection: Annotated[Literal["none", "fixed"], WITH_PAIRS] = "none"
    projection_channels: _Size = 64  # C, channels of the common shape
    projection_grid: _Size = 8  # g, positions per side
    projection_features: _Size = 512  # F, numbers that s_out becomes

    @property
    def training_level(self) -> float:
        """Noise level in training passes."""
        return 0.0 if self.noise_where == "message" else self.noise_level

    @property
    def message_level(self) -> float:
        """Noise level on uploaded pairs."""
        return self.noise_level if self.exchange_features and self.noise_where != "forward" else 0.0

    @property
    def is_projected(self) -> bool:
        """Whether there are pairs, and in the common shape."""
        return self.projection == "fixed" and self.exchange_features

    # a client's step ---------------------------------------------------------------------------------------
    def with_noise(self, s: Tensor, draws: str, context: Context) -> Tensor:
        """A cut (rows, ...) of a training pass, with the noise whose draws the context has under that name, if any."""
        return add_noise(s, self.noise_level, context[draws][: len(s)]) if draws in context else s

    def transform(self, model: Any, s_in: Tensor, context: Context) -> Tensor:
        """f(s_in; w_in); of projected pairs P_out f(P_in' s_in; w_in)."""
        if "p_in" not in context:
            plain: Tensor = model.transform(s_in)
            return plain
        own_s_in = from_common(s_in, context["p_in"], context["cut"].shape[1:])
        projected: Tensor = model.transform(own_s_in) @ context["p_out"].T
        return projected

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        """Draws of noise in the shapes of the cuts, and the pairs of a step."""
        size = client.training.batch_size
        inputs = {}
        for name, cut in client.context.get("cuts", {}).items():
            inputs[name] = torch.randn((size, *cut.shape[1:]), generator=generator).to(cut.device)
        if "pairs" in client.context:
            inputs |= minibatch(client.context["pairs"], step, size)
        return inputs

    # down --------------------------------------------------------------------------------------------------
    def pairs_of_others(self, server: Server, client_id: int) -> Message:
        """The pairs that a client is sent, if there are any."""
        count = self.num_pairs or server.training.batch_size
        draws = server.generator("pool", client_id)
        pairs = draw_pairs(members(server.state, "pool"), client_id, count, draws)
        return {"features": pairs} if pairs else {}

    def receive_pairs(self, client: Client, message: Message) -> Context:
        """Copies of a message's pairs on the network's device, as floats, and what else training with them needs.

        A single pair is left out under BatchNorm, which normalizes the pairs by themselves and takes no single row.
        """
        context: dict[str, Any] = {}
        features = get_group(message, "features") if "features" in message else {}
        rows = len(features["s_in"]) if features else 0
        if rows > 1 or (rows == 1 and not has_batchnorm(client.model)):
            like = next(client.model.parameters())
            context["pairs"] = {name: t.to(like, copy=True) for name, t in features.items()}
            if self.is_projected:
                context |= self.matrices(client)
        if self.training_level:
            context["cuts"] = _cuts(client)
        return context

    # up ----------------------------------------------------------------------------------------------------
    def own_pairs(self, client: Client) -> Message:
        """The pairs that a client sends, if it exchanges any."""
        if not self.exchange_features:
            return {}
        count = self.num_pairs or client.training.batch_size
        pairs = sample_pairs(client, count, self.message_level, client.generator("features"), self.feature_clip)
        return {"features": self.project(pairs, self.matrices(client)) if self.is_projected else pairs}

    # the common shape --------------------------------------------------------------------------------------
    def matrices(self, client: Client) -> dict[str, Tensor]:
        """P_in and P_out of a client at work, and "cut", on its network's device."""
        model = as_split_model(client.model)
        cut = inference.map_batches(model.extract, model, client.data.train.x[:1], client.prepare)
        p_in = _matrix(client.seed, "in", self.projection_channels, layout(cut.shape[1:]).channels)
        p_out = _matrix(client.seed, "out", self.projection_features, model.feature_dim)
        return {"cut": cut, "p_in": p_in.to(cut), "p_out": p_out.to(cut)}

    def project(self, pairs: Group, matrices: Group) -> dict[str, Tensor]:
        """Pairs of the client's own shapes in the common one."""
        p_in, p_out = (matrices[name].to(pairs["s_in"].device) for name in ("p_in", "p_out"))
        return {"s_in": to_common(pairs["s_in"], p_in, self.projection_grid), "s_out": pairs["s_out"] @ p_out.T}

    def sent_features(self, client: Client) -> Callable[[Tensor], Tensor]:
        """The function from network inputs to "s_in" of a pair, as it is sent."""
        model = as_split_model(client.model)
        if not self.is_projected:
            return model.extract
        matrices = self.matrices(client)

        def project(x: Tensor) -> Tensor:
            s_in = model.extract(x)
            return self.project({"s_in": s_in, "s_out": model.transform(s_in)}, matrices)["s_in"]

        return project

    # what pairs tell ---------------------------------------------------------------------------------------
    def privacy_releases(self, training: Training, rows: int) -> Sequence[Release]:
        return releases(self.feature_clip, self.message_level, self.num_pairs or training.batch_size, rows)

    @property
    def entries_of_rows(self) -> Sequence[str]:
        return ("features",) if self.exchange_features else ()

    @property
    def exposed(self) -> Exposed | None:
        if not self.exchange_features:
            return None
        plain = dataclasses.replace(self, noise_level=0.0, noise_where="both") if self.message_level else None
        return Exposed("features", "features", self.sent_features, plain)


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


def releases(bound: float, level: float, count: int, rows: int) -> Sequence[Release]:
    """What `sample_pairs` gives away of a client with so many rows: one of them may become another.

    Its s_in is then 2 * bound away at most. Its s_out is made of the noisy s_in, so that it tells no more of the row.
    All of it is for given weights: what these tell of the row is another matter.
    """
    return (Release("features", "sample", level / 2, min(count, rows), rows),) if bound and level else ()


def _cuts(client: Client) -> dict[str, Tensor]:
    """A training row of a client at work, (1, ...), at the cuts "z_in" and "z_out", on the device of its network."""
    model = as_split_model(client.model)
    one = client.data.train.x[:1]
    found = {"z_in": model.extract, "z_out": model.represent}
    return {name: inference.map_batches(cut, model, one, client.prepare) for name, cut in found.items()}


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


@functools.lru_cache(maxsize=64)
def _matrix(seed: int, cut: str, size: int, width: int) -> Tensor:
    return random_orthogonal(size, width, randomness.generator(seed, f"projection {cut}", size, width))
