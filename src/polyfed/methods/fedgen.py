"""FedGen: clients learn from features that a server-trained generator makes (Zhu, Hong and Zhou, ICML 2021).

G(z, y) makes what enters the head h from noise z and a class y; f is the whole network, of D features and C classes;
n_ky are client k's samples of class y. In brackets, who has a line: the paper, or the authors' code alone.
Generator: G = Linear, BatchNorm, ReLU, Linear of z and y one-hot                       `generate` (code, see 5)
Server:    L_div = exp(-mean over pairs |z_a - z_b|^2 |G_a - G_b|), both as means over entries  `diversity_loss` (code)
           omega_ky = n_ky / sum_j n_jy, heads h_k as received                          `head_loss` (code, see 11)
           y drawn as often as the clients have it, by sum_k n_ky                       `observed_classes` (see 2, 6)
           G by Adam on  sum_k omega_ky CE(h_k(G(z, y)), y) + L_div                     `train_generator` (code, see 1)
           w <- sum_k p_k w_k                                                           `FedAvg.aggregate` (paper)
Client k:  w <- received;  E local epochs of SGD on  CE(f(x; w), y)                     `loss` (paper)
               + a_t CE(h(G(z_drawn, y_drawn)), y_drawn),  y_drawn by sum_k n_ky        (paper, see 1, 6, 9)
               + b_t KL(softmax h(G(z_batch, y)) || softmax f(x)),  y of the batch, h(G) a constant  (code)
           a_t = max(0.98^(t - 1) alpha, min(alpha, 1e-4)),  b_t alike of beta          `decayed` (code, see 8)
Scored:    f(x; w) with the weights received
Steps and rate of G are those of the authors' code on MNIST. `tests/methods/test_fedgen.py` holds a step of G, and the
clients' loss, against NumPy. In the context: "generator", G's weights; "counts", sum_k n_ky of which G was trained;
"a_t", "b_t"; in a step also "y_drawn", "z_drawn" and "z_batch".
Sent: down P + P_G + C; up P + C. Kept: server: w, G and its Adam, class counts.
Deviations from the paper (arXiv:2105.10056): (1) The KL term, the decay, L_div and the sum of the clients' losses are
those of the authors' code. The paper has a_t's term, with weight 1, and the loss of the clients' mean logits. (2) Round
1 has no generator, which is still untrained. G is not trained on a class with a single sample in total. As in the
authors' code, the KL term nevertheless asks for all classes of the batch, also for such ones and for those that no
responding client has had. (3) Architectures may differ; the paper has one. (4) On clients, G normalizes by its running
statistics, and BatchNorm in a head normalizes generated features by their batch, while its running statistics leave
them out; at the server heads are in eval mode.
From the authors' code, where classes drawn and the factor of a_t's term change an equation, the others none: (5) Noise
is normal, as in the paper; there it is uniform. (6) Classes are drawn by the responding clients' counts; there all
equally. (7) Per step, a client generates `training.batch_size` features of drawn classes (there 32), and the server 128
(that code's `ensemble_batch_size`, which its loop does not use); there alpha = beta = 10 on MNIST, and 10 and 1 on
EMNIST. (8) There a_t and b_t are 1e-4 at least, also of alpha = 0, which here switches the term off. (9) There a_t's
term has the factor gen_batch_size / batch_size. (10) There a client uses no generated features after its 20th local
epoch. (11) There n_ky counts the rows of the batches that were drawn, and begins at 1; here it is of all the client's
rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core import upload_forms
from polyfed.core.client import Client
from polyfed.core.message import Group, Message, get_group, get_tensor, members
from polyfed.core.method import Batch, Context, Requirements, TrainingResult, hyperparameters, loads_message
from polyfed.core.modules import as_split_model, head_names, load_state
from polyfed.core.optimizers import Optimizer
from polyfed.core.server import Server
from polyfed.core.settings import Training
from polyfed.functional.losses import cross_entropy, kl_divergence
from polyfed.functional.modes import frozen_running_stats
from polyfed.methods.fedavg import FedAvg

DECAY = 0.98  # factor of a_t and b_t, per round
LATENT_DIM = 32  # Z, numbers of noise
HIDDEN_DIM = 256  # H, hidden units of G
GENERATOR_STEPS = 50  # steps of Adam, per round
GENERATOR_BATCH = 128  # generated features per step
GENERATOR_LR = 3e-4  # learning rate of Adam in round 1
GENERATOR_LR_DECAY = 0.98  # per round
WEIGHT_DECAY = 0.01  # L2 penalty in Adam

# the generator -------------------------------------------------------------------------------------------------------
# Shapes: B rows made, Q pairs of them, Z numbers of noise, C classes, H hidden units, D features, S clients.


def generate(weights: Group, z_BZ: Tensor, y_B: Tensor, training: bool = False) -> Tensor:
    """G(z, y), features (B, D): Linear (Z + C to H), BatchNorm, ReLU, Linear (H to D).

    Uses running statistics, or with `training` those of the batch, which also update the running ones.
    """
    w = weights
    classes = weights["hidden.weight"].shape[1] - z_BZ.shape[1]
    given = torch.cat([z_BZ, F.one_hot(y_B, classes).to(z_BZ)], dim=1)
    hidden_BH = F.linear(given, w["hidden.weight"], w["hidden.bias"])
    statistics = w["norm.running_mean"], w["norm.running_var"]
    hidden_BH = F.batch_norm(hidden_BH, *statistics, w["norm.weight"], w["norm.bias"], training)
    return F.linear(F.relu(hidden_BH), w["output.weight"], w["output.bias"])


def diversity_loss(z_BZ: Tensor, made_BD: Tensor) -> Tensor:
    """L_div = exp(-mean over pairs of |z_a - z_b|^2 |G_a - G_b|), distances as means over entries."""
    noise_Q = F.pdist(z_BZ).square() / z_BZ.shape[1]
    features_Q = F.pdist(made_BD, p=1) / made_BD.shape[1]
    return (-2 / len(z_BZ) ** 2 * (noise_Q * features_Q).sum()).exp()  # B^2 pairs: each is there twice, and B are 0


def head_loss(made_BD: Tensor, y_B: Tensor, heads: Sequence[nn.Module], omega_SC: Tensor) -> Tensor:
    """sum_k omega_ky CE(h_k(G(z, y)), y), a mean over the rows made."""
    losses_SB = torch.stack([F.cross_entropy(head(made_BD), y_B, reduction="none") for head in heads])
    return (omega_SC[:, y_B] * losses_SB).sum(0).mean()


def observed_classes(n_SC: Tensor) -> Tensor:
    """sum_k n_ky (C,); 0 for classes with a single sample, which are not generated."""
    totals_C = n_SC.sum(0)
    return totals_C * (totals_C > 1)


def train_generator(
    weights: Group, moments: Group, heads: Sequence[nn.Module], n_SC: Tensor, lr: float, draws: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Steps of Adam, which move G alone; in float64, so that the order of clients has no effect.

    Args:
        moments: of Adam, as an earlier call left them; empty at first.
        n_SC: the clients' samples of each class, more than one of some class in all.

    Returns:
        New weights, new moments, and the mean loss over the steps.
    """
    observed_C = observed_classes(n_SC).double()
    omega_SC = (n_SC / n_SC.sum(0).clamp(min=1)).double()
    noise = weights["hidden.weight"].shape[1] - n_SC.shape[1]
    now = {name: t.double().clone() for name, t in weights.items()}
    trained = {name: t.requires_grad_() for name, t in now.items() if "running" not in name}
    parameters = list(trained.values())
    optimizer = Optimizer(parameters, Training(optimizer="adam", weight_decay=WEIGHT_DECAY), lr)
    optimizer.remember(list(trained), moments)
    total = 0.0
    for _ in range(GENERATOR_STEPS):
        y_B = torch.multinomial(observed_C, GENERATOR_BATCH, replacement=True, generator=draws)
        z_BZ = torch.randn(GENERATOR_BATCH, noise, generator=draws).double()
        made_BD = generate(now, z_BZ, y_B, training=True)
        loss = head_loss(made_BD, y_B, heads, omega_SC) + diversity_loss(z_BZ, made_BD)
        optimizer.step(torch.autograd.grad(loss, parameters))
        total += float(loss.detach())
    new = {name: t.detach().to(weights[name].dtype) for name, t in now.items()}
    return new, optimizer.memory(list(trained)), total / GENERATOR_STEPS


# the method ----------------------------------------------------------------------------------------------------------


def decayed(weight: float, round: int) -> float:
    """a_t of alpha, b_t of beta: falls with the round t, from 1, to 1e-4, or not where it is less at first."""
    return max(weight * DECAY ** (round - 1), min(weight, 1e-4))


@hyperparameters
class FedGen(FedAvg):
    """Averaging of weights, and features of all classes from a server-trained generator."""

    alpha: Annotated[float, Field(ge=0)] = 1.0  # weight of the loss on generated features of drawn classes; 0: off
    beta: Annotated[float, Field(ge=0)] = 1.0  # weight of the KL towards features of the batch's classes; 0: off

    # client ------------------------------------------------------------------------------------------------
    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        scores = model(batch.x)
        task = cross_entropy(scores, batch.y, batch.w)
        if "generator" not in context:  # round 1, and as long as nobody has trained it
            return task
        y_drawn = context["y_drawn"]
        g_drawn = generate(context["generator"], context["z_drawn"], y_drawn)
        g_batch = generate(context["generator"], context["z_batch"][: len(batch.y)], batch.y)
        with frozen_running_stats(model.head):
            h_drawn = model.head(g_drawn)
            h_batch = model.head(g_batch)
        of_drawn = cross_entropy(h_drawn, y_drawn, torch.ones_like(g_drawn[:, 0]))
        of_batch = kl_divergence(scores, h_batch, batch.w)  # KL(h_batch || scores)
        generated = context["a_t"] * of_drawn + context["b_t"] * of_batch
        return task + generated, {"own_loss": task, "generated_loss": generated}

    @loads_message
    def receive(self, client: Client, message: Message) -> Context:
        super().receive(client, message)
        if "generator" not in message:
            return {}
        like = next(client.model.parameters())
        generator = {name: t.to(like.dtype) for name, t in get_group(message, "generator").items()}
        counts = get_tensor(message, "counts").clone()
        a_t, b_t = (torch.tensor(decayed(w, client.round), dtype=like.dtype) for w in (self.alpha, self.beta))
        return {"generator": generator, "counts": counts, "a_t": a_t, "b_t": b_t}

    def step_inputs(self, client: Client, step: int, generator: torch.Generator) -> Context:
        if "generator" not in client.context:
            return {}
        rows = client.training.batch_size
        y_drawn = torch.multinomial(client.context["counts"].double(), rows, replacement=True, generator=generator)
        z_drawn = torch.randn(rows, LATENT_DIM, generator=generator)
        z_batch = torch.randn(rows, LATENT_DIM, generator=generator)
        return {"y_drawn": y_drawn, "z_drawn": z_drawn, "z_batch": z_batch}

    # server ------------------------------------------------------------------------------------------------
    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        counts = {i: get_tensor(message, "counts") for i, message in uploads.items()}
        super().aggregate(server, {i: {**message, "n": counts[i].sum()} for i, message in uploads.items()})
        if not uploads or not (self.alpha or self.beta):
            return
        n_SC = torch.stack([counts[i].long() for i in uploads])
        observed_C = observed_classes(n_SC)
        if not observed_C.any():
            return
        lr = GENERATOR_LR * GENERATOR_LR_DECAY ** (server.round - 1)
        weights = get_group(server.state, "generator")
        moments = members(server.state, "moments")
        draws = server.generator("features")
        new, left, loss = train_generator(weights, moments, received_heads(server, uploads), n_SC, lr, draws)
        server.log["generator_loss"] = loss
        server.state |= {"generator": new, "moments": left, "counts": observed_C.int()}

    # Nothing below changes an equation: messages, initial weights, what is declared.
    def upload(self, client: Client, trained: TrainingResult) -> Message:
        counts = torch.bincount(client.data.train.y, minlength=client.classes).int()
        return {"model": super().upload(client, trained)["model"], "counts": counts}

    def init_server(self, server: Server) -> None:
        super().init_server(server)
        features = as_split_model(server.model(server.architectures[0], {})).feature_dim
        server.state["generator"] = init_generator(server.classes, features, server.generator("generator"))

    def broadcast(self, server: Server, client_id: int) -> Message:
        message = super().broadcast(server, client_id)
        if "counts" not in server.state:  # nobody has trained the generator yet
            return message
        return {**message, "generator": server.state["generator"], "counts": server.state["counts"]}

    upload_form = {"model": upload_forms.as_sent, "counts": upload_forms.BY_CLASS}
    ignores_initial_weights = True

    @property
    def requirements(self) -> Requirements:
        return Requirements(
            split_model=True,
            same_feature_dim=True,
            shared_shapes=self.aggregation != "same-shape",
            same_columns=True,
            classes="its generator draws representations by class",
            hint="use method.aggregation = 'same-shape'",
        )


def init_generator(classes: int, features: int, draws: torch.Generator) -> dict[str, Tensor]:
    """Initial weights (uniform within 1 / sqrt(inputs), from `draws`) and statistics."""
    made = {f"norm.{name}": torch.ones(HIDDEN_DIM) for name in ("weight", "running_var")}
    made |= {f"norm.{name}": torch.zeros(HIDDEN_DIM) for name in ("bias", "running_mean")}
    for layer, inputs, outputs in (("hidden", LATENT_DIM + classes, HIDDEN_DIM), ("output", HIDDEN_DIM, features)):
        for name, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
            made[f"{layer}.{name}"] = torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=draws)
    return made


def received_heads(server: Server, uploads: Mapping[int, Message]) -> list[nn.Module]:
    """The clients' heads h_k, frozen: in eval mode, float64, without gradients of their own."""
    plain: dict[str, nn.Module] = {}  # by architecture, whatever their weights
    heads = []
    for i, message in uploads.items():
        architecture = server.clients[i].architecture
        model = server.model(architecture, {})
        if architecture not in plain:
            head = copy.deepcopy(as_split_model(model).head).to("cpu", torch.float64)
            plain[architecture] = head.eval().requires_grad_(False)
        heads.append(copy.deepcopy(plain[architecture]))
        sent = get_group(message, "model")
        load_state(heads[-1], {inner: sent[name] for name, inner in head_names(model).items() if name in sent})
    return heads
