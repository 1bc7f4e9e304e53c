"""FedKD: a private mentor and a common mentee that teach each other; the mentee's updates are sent in low rank (Wu et
al., Nature Communications 2022).

w_k is the mentor, m the mentee; p are softmax outputs, H the heads' inputs. The client's matrix
W_k maps H_m to the mentor's width. a and b are `distillation_weight` and `hidden_weight`.
client k:  m <- m + decode(d);  E epochs of SGD on L_w + L_m, with the number s = CE(w_k) + CE(m)
           L_w = CE(w_k) + a KL(p_m || p_w) / s + b MSE(H_w, W_k H_m) / s       moves w_k
           L_m = CE(m)   + a KL(p_w || p_m) / s + b MSE(W_k H_m, H_w) / s       moves m and W_k
           u_k = encode(m_k - m)
server:    d = encode(sum_k p_k decode(u_k)),  m <- m + decode(d),  p_k = n_k / sum n_j
encode:    of a matrix, the K largest singular values with their vectors, the fewest that hold
           a share T of the sum of squares; T grows linearly from energy_start to energy_end
A convolution (O, I, h, w) is the matrix (O, I h w). Vectors, BatchNorm's statistics and matrices
that would not become smaller are sent in full. In round t, T = energy_start + (energy_end -
energy_start) (t - 1) / rounds.
Sent: down sum K (m + n + 1), or P_m; up sum K (m + n + 1) + 1. Kept: client: mentor, W_k, m; server: m, update.
Deviations from the paper (arXiv:2108.13323): (1) Neither teachers nor s pass a gradient on. One optimizer steps both
networks. (2) Representations are matched; the authors' code matches all layers and attention maps, without W_k. (3)
Clients are weighted by samples; the paper weights them equally (`weighting = "uniform"`). (4) The server adds the
decoded mean, so that its mentee is the clients', bit for bit. (5) In round t, T is computed from t - 1; in the authors'
code from t. (6) Updates of E epochs are exchanged once a round; in Algorithm 1, gradients in every iteration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor
from polyfed.core.method import Batch, Context, Requirements, TrainingResult, hyperparameters
from polyfed.core.modules import float_state
from polyfed.core.server import Server
from polyfed.functional import low_rank
from polyfed.functional.device_copies import move_group
from polyfed.functional.losses import cross_entropy, kl_divergence, mse_loss
from polyfed.methods.building_blocks import auxiliary_model

_UPDATE = tuple(f"update {name}" for name in low_rank.GROUPS)  # in the server's state


def _in_low_rank(known: upload_forms.UploadContext, name: str) -> upload_forms.Members:
    """Form of one group of `functional.low_rank.encode`, for the auxiliary model's tensors."""
    found = {}
    for key, tensor in get_group(known.server.state, "auxiliary_model").items():
        rows = tensor.shape[:1].numel()
        columns = tensor.shape[1:].numel()
        rank = upload_forms.UpTo(f"rank of {key}", min(rows, columns))
        shapes = {"raw": tuple(tensor.shape), "left": (rows, rank), "scale": (rank,), "right": (rank, columns)}
        found[key] = (upload_forms.Entry(shapes[name], (tensor.dtype,)),)
    return upload_forms.Members(found, whole=False)


def _buffer_names(module: nn.Module) -> frozenset[str]:
    """Names of the float buffers (BatchNorm statistics), which are averaged but not compressed."""
    return frozenset(float_state(module)) - frozenset(float_state(module, buffers=False))


@hyperparameters
class FedKD(auxiliary_model.AuxiliaryModelMethod):
    """Mutual distillation between a private mentor and a common mentee, with compressed updates."""

    energy_start: Annotated[float, Field(gt=0, le=1)] = 0.95  # T in round 1; 1: no compression
    energy_end: Annotated[float, Field(gt=0, le=1)] = 0.98  # T at the end, reached linearly
    distillation_weight: Annotated[float, Field(ge=0)] = 1.0  # weight of the KL terms; 0: off
    hidden_weight: Annotated[float, Field(ge=0)] = 1.0  # weight of the distance of the representations; 0: off

    def join_models(self, own: Any, auxiliary: Any) -> nn.Module:
        pair = auxiliary_model.JointModel(own, auxiliary)
        pair.projector = nn.Linear(auxiliary.feature_dim, own.feature_dim, bias=False)
        return pair

    # server ------------------------------------------------------------------------------------------------
    def broadcast(self, server: Server, client_id: int) -> Message:
        if "holders" in server.state and client_id in get_tensor(server.state, "holders"):
            kept = zip(low_rank.GROUPS, _UPDATE, strict=True)
            return {name: server.state[key] for name, key in kept if key in server.state}
        return super().broadcast(server, client_id)

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        for key in _UPDATE:
            server.state.pop(key, None)
        # clients that have m as it was before this round
        server.state["holders"] = torch.tensor(sorted(uploads), dtype=torch.int64)
        if not uploads:
            return
        before = get_group(server.state, "auxiliary_model")
        updates = {i: {**message, "model": low_rank.decode(_groups(message), before)} for i, message in uploads.items()}
        statistics = _buffer_names(server.model(server.auxiliary_model, before))
        mean = self.average(server, updates)
        update = low_rank.encode(mean, self._energy(server), statistics)
        server.state |= {f"update {name}": entries for name, entries in update.items()}
        server.state["auxiliary_model"] = _moved(before, low_rank.decode(update, before))

    def _energy(self, at: Server | Client) -> float:
        rounds = at.rounds if isinstance(at, Server) else at.training.rounds
        return self.energy_start + (self.energy_end - self.energy_start) * min(at.round - 1, rounds) / rounds

    # client ------------------------------------------------------------------------------------------------
    def receive(self, client: Client, message: Message) -> Context:
        if "model" in message:
            synced = {name: t.clone() for name, t in get_group(message, "model").items()}
        else:
            before = get_group(client.state, "synced")
            synced = _moved(before, low_rank.decode(_groups(message), before))
        client.state["synced"] = synced
        return super().receive(client, {"model": synced})

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        h_w = model.own.represent(batch.x)
        h_m = model.auxiliary_model.represent(batch.x)
        mentor = model.own.head(h_w)
        mentee = model.auxiliary_model.head(h_m)
        seen = model.projector(h_m)
        task = cross_entropy(mentor, batch.y, batch.w) + cross_entropy(mentee, batch.y, batch.w)
        kl = kl_divergence(mentor, mentee, batch.w) + kl_divergence(mentee, mentor, batch.w)
        distance = mse_loss(h_w, seen, batch.w) + mse_loss(seen, h_w, batch.w)
        s = task.detach().clamp(min=torch.finfo(task.dtype).eps)
        loss: Tensor = task + (self.distillation_weight * kl + self.hidden_weight * distance) / s
        return loss

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        mentee: Any = client.model.auxiliary_model
        synced = get_group(client.state, "synced")
        change = {name: t - synced[name] for name, t in move_group(float_state(mentee), "cpu").items()}
        update = low_rank.encode(change, self._energy(client), _buffer_names(mentee))
        return {**update, "n": torch.tensor(client.n)}

    # declared -------------------------------------------------------------------------------------------------
    requirements = Requirements(split_model=True, classes="its networks teach each other by probabilities of classes")
    upload_form = {**dict.fromkeys(low_rank.GROUPS, _in_low_rank), "n": upload_forms.SAMPLES}
    delta_entries = ()

    fixed_entries = dict.fromkeys(
        low_rank.GROUPS, "an update in low rank, of which clipping and noise spoil the factors"
    )

    @property
    def planned(self) -> str:
        return "the energy that is sent" if self.energy_start != self.energy_end else ""


def _groups(message: Message) -> dict[str, Group]:
    return {name: get_group(message, name) for name in low_rank.GROUPS if name in message}


def _moved(before: Group, change: Group) -> dict[str, Tensor]:
    """`before` plus `change`; the same operation at server and clients, so that both hold the same bits."""
    return {name: t + change[name] for name, t in before.items()}
