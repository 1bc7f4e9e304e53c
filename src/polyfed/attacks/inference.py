"""What the server can infer of a client's rows from what it sent: which rows it trained on, and which classes it has.

**Membership.** Tested are rows of two kinds: the client's training samples, all of which it trains on in every round
("members"), and test samples that nobody trained on; with a common test set as many of each class as the client's own
shares ask for. The attacker has these rows with their classes, as in the papers, and does not know which are which.

* loss threshold (Yeom et al., CSF 2018): the loss of the uploaded network, or of the client's own ("holder");
* LiRA (Carlini et al., S&P 2022, online): shadow models do the client's last round from the client's broadcast, on
  random halves of the tested rows, so that each row is in half of the shadow models.

**Classes.** Where they are not stated, they are guessed from the head's step: with cross entropy, the bias of a class
that occurs grows by 1 - p, that of one that does not shrinks by p (Zhao et al., arXiv:2001.02610; Wainakh et al.,
PoPETs 2022); without a bias the sum of its weights' step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.attacks.replay import ExposedModel, Replay, Transcript, plaintext_facts
from polyfed.core.client import Client
from polyfed.core.modules import head_names
from polyfed.core.randomness import generator
from polyfed.data.samples import LabeledSamples
from polyfed.experiments.prediction import ClientModel
from polyfed.functional.membership_scores import (
    Interval,
    auc,
    likelihood_ratio,
    logit_of_true_class,
    loss_scores,
    roc,
    tpr_at_fpr,
)
from polyfed.models.split import SplitModel

SEED = 0  # of the attacker's draws
_FPR = 0.01
_POINTS = 200  # of a curve in the records, at most
SERVER, HOLDER = "server", "holder of the network"
_STATED = "which classes"  # the fact of `plaintext_facts`


@dataclass(frozen=True, eq=False)
class MembershipScores:
    """One attacker's scores of some rows.

    by: "server" or "holder of the network". how: "loss" or "LiRA".
    scores: (N,), the higher the likelier a member. member: (N,) bool, the truth.
    """

    by: str
    how: str
    scores: Tensor
    member: Tensor

    def summary(self) -> dict[str, Any]:
        """How good it is, as JSON takes it; the rate is None where there are too few rows for it."""
        rate = tpr_at_fpr(self.scores, self.member, _FPR)
        return {
            "by": self.by,
            "how": self.how,
            "members": int(self.member.sum()),
            "others": int((~self.member).sum()),
            "auc": auc(self.scores, self.member)._asdict(),
            "tpr_at_1_percent": None if rate is None else rate._asdict(),
            "roc": self.curve(),
        }

    def curve(self) -> dict[str, list[float]]:
        """Its ROC curve in at most `_POINTS` points, denser where few others are called members."""
        alarms, hits = roc(self.scores, self.member)
        last = len(alarms) - 1
        places = {round(last ** (k / (_POINTS - 1))) for k in range(_POINTS)} if last > _POINTS else {*range(last + 1)}
        kept = sorted({0, last, *places})
        return {"fpr": alarms[kept].tolist(), "tpr": hits[kept].tolist()}


def pool(guesses: Sequence[MembershipScores]) -> MembershipScores:
    """The rows of several clients, guessed in the same way, as one."""
    first = guesses[0]
    return MembershipScores(
        first.by, first.how, torch.cat([g.scores for g in guesses]), torch.cat([g.member for g in guesses])
    )


@dataclass(frozen=True, eq=False)
class MembershipSamples:
    """The tested rows. samples: members first. member: (N,) bool."""

    samples: LabeledSamples
    member: Tensor

    def __len__(self) -> int:
        return len(self.samples)


def membership_samples(client: Client, shared_test: bool) -> MembershipSamples | None:
    """A client's training samples and test samples; None where one of the two is missing.

    Args:
        client: with its data. shared_test: its test samples are everybody's.
    """
    draws = generator(SEED, "candidates", client.id)
    train, test = client.data.train, client.data.test
    if shared_test and len(test):
        test = test.select(_alike(test.y, train.y, draws))
    if not len(train) or not len(test):
        return None
    samples = LabeledSamples(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]))
    return MembershipSamples(samples, torch.arange(len(samples)) < len(train))


def _alike(pool: Tensor, like: Tensor, draws: torch.Generator) -> Tensor:
    """Places in `pool` (M,), classes, of as many rows as have the class shares of `like`; at most as many as these."""
    classes, wanted = like.unique(return_counts=True)
    there = torch.stack([(pool == label).sum() for label in classes])
    share = min(1.0, float((there / wanted).min()))
    if share == 0:  # a class is missing: those that are there
        share = 1.0
    counts = [min(int(n), math.ceil(share * int(w))) for n, w in zip(there, wanted, strict=True)]
    picked = [_of_class(pool, int(label), count, draws) for label, count in zip(classes, counts, strict=True)]
    return torch.cat(picked)


def _of_class(y: Tensor, label: int, count: int, draws: torch.Generator) -> Tensor:
    places = (y == label).nonzero().flatten()
    return places[torch.randperm(len(places), generator=draws)[:count]]


def client_model_loss_attack(model: ClientModel, rows: MembershipSamples) -> MembershipScores:
    """The loss threshold of an attacker with the client's own network as the run left it."""
    return MembershipScores(HOLDER, "loss", loss_scores(model.scores(rows.samples.x), rows.samples.y), rows.member)


def loss_attack(
    replay: Replay, transcript: Transcript, network: ExposedModel, rows: MembershipSamples
) -> MembershipScores:
    """The loss threshold of the server, on a network that went up."""
    logits = network.logits(replay, transcript.up, rows.samples.x, transcript.job.client)
    return MembershipScores(SERVER, "loss", loss_scores(logits, rows.samples.y), rows.member)


def lira(
    replay: Replay, transcript: Transcript, network: ExposedModel, rows: MembershipSamples, shadows: int
) -> MembershipScores | None:
    """The server's LiRA; None where a shadow model was refused."""
    client = transcript.job.client
    samples = rows.samples
    target = logit_of_true_class(network.logits(replay, transcript.up, samples.x, client), samples.y)
    scores = []
    inside = []
    for number in range(shadows):
        half = _half(len(rows), number, client.id)
        own = samples.select(half.nonzero().flatten())
        message = replay.rerun_with(transcript, own, f"shadow online {SEED}", number)
        if message is None:
            return None
        scores.append(logit_of_true_class(network.logits(replay, message, samples.x, client), samples.y))
        inside.append(half)
    return MembershipScores(
        SERVER, "LiRA", likelihood_ratio(target, torch.stack(scores), torch.stack(inside)), rows.member
    )


def _half(count: int, number: int, client: int) -> Tensor:
    """(N,) bool: the rows that a shadow model has; every second one has those that the one before it lacks."""
    order = torch.randperm(count, generator=generator(SEED, "halves", client, number // 2))
    half = torch.zeros(count, dtype=torch.bool)
    half[order[: count // 2]] = True
    return half if number % 2 == 0 else ~half


# classes --------------------------------------------------------------------------------------------------------------


def infer_labels(replay: Replay, transcripts: dict[int, Transcript]) -> dict[str, Any]:
    """What the server learns of the clients' classes, in the best way that the messages offer.

    how: "stated" or "head's step". auc: over pairs of client and class. why_not: the reason where there is
    none; the others are None then.
    """

    def found(how: str, auc: Interval) -> dict[str, Any]:
        return {"how": how, "auc": auc._asdict(), "why_not": None}

    def nothing(why: str) -> dict[str, Any]:
        return {"how": None, "auc": None, "why_not": why}

    if not any(transcript.up for transcript in transcripts.values()):
        return nothing("nothing goes up")
    clients = {number: replay.client(number) for number in transcripts}
    held = [client.data.train.y.bincount(minlength=client.classes)[: client.classes] > 0 for client in clients.values()]
    member = torch.stack(held).flatten()
    if bool(member.all()):
        return nothing("every client has every class")
    if all(_STATED in plaintext_facts(transcript.up, clients[number]) for number, transcript in transcripts.items()):
        return found("stated", Interval(1.0, 1.0, 1.0))
    scores = _by_head(replay, transcripts)
    if scores is None:
        return nothing("neither stated, nor the step of a head")
    return found("head's step", auc(scores.flatten(), member))


def _by_head(replay: Replay, transcripts: dict[int, Transcript]) -> Tensor | None:
    """(K, C) steps of the head's biases, each client's over its largest; None where no head went both ways."""
    rows = [_head_step(replay, transcript) for transcript in transcripts.values()]
    found = [row / row.abs().max().clamp(min=1e-12) for row in rows if row is not None]
    return torch.stack(found) if len(found) == len(rows) else None


def _head_step(replay: Replay, transcript: Transcript) -> Tensor | None:
    client, server = transcript.job.client, replay.federation.server
    network = server.model(client.architecture, {}, transcript.job.variant)
    if not isinstance(network, SplitModel):
        return None
    inner = {within: own for own, within in head_names(network).items()}
    for name, sent in transcript.up.items():
        down = transcript.down.get(name)
        if isinstance(sent, Tensor) or down is None or isinstance(down, Tensor):
            continue
        for within in ("bias", "weight"):
            for key in (inner.get(within, ""), within):
                if key in sent and key in down and len(sent[key]) == client.classes:
                    step = sent[key].float() - down[key].float()
                    return step if step.dim() == 1 else step.flatten(1).sum(dim=1)
    return None
