"""Which rows a client trained on: membership inference from what the server got, and from the client's own network.

Asked are rows of two kinds: the client's training samples, all of which it trains on in every round ("members"), and
test samples that nobody trained on; with a common test set as many of each class as the client's own shares ask for.
The attacker has these rows with their classes, as in the papers, and does not know which are which.

* loss threshold (Yeom et al., CSF 2018): the loss of the uploaded network;
* LiRA (Carlini et al., S&P 2022): shadow models do the client's last round from what the client was told, on other
  rows. Offline these are rows that the attacker has (`--shadow-data`), as many of each class as the client has where
  they are there twice; online random halves of the rows asked for, so that each is in half of the shadow models.

Only the last round can be told by LiRA so: what earlier rounds left of a row came down to shadow models, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from polyfed.attacks.message_inspection import ExposedModel
from polyfed.attacks.replay import Replay, Transcript
from polyfed.core.client import Client
from polyfed.core.randomness import generator
from polyfed.data.samples import LabeledSamples
from polyfed.experiments.prediction import ClientModel
from polyfed.functional.membership_scores import (
    auc,
    balanced_accuracy,
    likelihood_ratio,
    logit_of_true_class,
    loss_scores,
    roc,
    tpr_at_fpr,
)

ShadowData = Literal["others", "holdout"]

FPRS = (0.01, 0.001)
_POINTS = 200  # of a curve in the records, at most
_SERVER, _HOLDER = "server", "holder of the network"


@dataclass(frozen=True, eq=False)
class MembershipScores:
    """What one attacker says of some rows.

    by: "server" or "holder of the network". how: "loss", "LiRA offline", "LiRA online" or "distance to the pairs sent".
    scores: (N,), the higher the likelier a member. member: (N,) bool, the truth.
    """

    by: str
    how: str
    scores: Tensor
    member: Tensor

    def summary(self) -> dict[str, Any]:
        """How good it is, as JSON takes it; a rate for which there are too few rows is None."""
        rates = {f"{fpr:g}": tpr_at_fpr(self.scores, self.member, fpr) for fpr in FPRS}
        return {
            "members": int(self.member.sum()),
            "others": int((~self.member).sum()),
            "auc": auc(self.scores, self.member)._asdict(),
            "balanced_accuracy": balanced_accuracy(self.scores, self.member),
            "tpr_at_fpr": {fpr: None if found is None else found._asdict() for fpr, found in rates.items()},
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
    """The rows that are asked for. samples: members first. member: (N,) bool."""

    samples: LabeledSamples
    member: Tensor

    def __len__(self) -> int:
        return len(self.samples)


def membership_samples(client: Client, shared_test: bool, rows: int | None, seed: int) -> MembershipSamples | None:
    """A client's training samples and test samples; None where one of the two is missing.

    Args:
        client: with its data. shared_test: its test samples are everybody's. rows: at most so many of each kind, drawn
            at random; None: all. seed: of the draw.
    """
    draws = generator(seed, "candidates", client.id)
    train, test = client.data.train, client.data.test
    if shared_test and len(test):
        test = test.select(_alike(test.y, train.y, draws))
    if not len(train) or not len(test):
        return None
    train, test = (_some(each, rows, draws) for each in (train, test))
    samples = LabeledSamples(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]))
    return MembershipSamples(samples, torch.arange(len(samples)) < len(train))


def _some(samples: LabeledSamples, rows: int | None, draws: torch.Generator) -> LabeledSamples:
    if rows is None or rows >= len(samples):
        return samples
    return samples.select(torch.randperm(len(samples), generator=draws)[:rows].sort().values)


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


# attackers ----------------------------------------------------------------------------------------------------------


def client_model_loss_attack(model: ClientModel, asked: MembershipSamples) -> MembershipScores:
    """The loss threshold of whoever gets hold of the client's own network as the run left it, in any way."""
    return MembershipScores(_HOLDER, "loss", loss_scores(model.scores(asked.samples.x), asked.samples.y), asked.member)


def loss_attack(
    replay: Replay, transcript: Transcript, network: ExposedModel, asked: MembershipSamples
) -> MembershipScores:
    """The loss threshold of the server, on a network that went up."""
    logits = network.logits(replay, transcript.up, asked.samples.x, transcript.job.client)
    return MembershipScores(_SERVER, "loss", loss_scores(logits, asked.samples.y), asked.member)


def lira(
    replay: Replay,
    transcript: Transcript,
    network: ExposedModel,
    asked: MembershipSamples,
    shadows: int,
    data: ShadowData,
    seed: int,
) -> list[MembershipScores]:
    """The server's LiRA, offline (where there are rows for it) and online; [] where too few shadow models came out."""
    client = transcript.job.client
    samples = asked.samples
    target = logit_of_true_class(network.logits(replay, transcript.up, samples.x, client), samples.y)
    pool = shadow_pool(replay, client.id, data)
    found = []
    for how in ("offline", "online"):
        if how == "offline" and not len(pool):
            continue
        scores = []
        inside = []
        for number in range(shadows):
            part = _half(len(asked), number, seed, client.id)
            own = samples.select(part.nonzero().flatten()) if how == "online" else _shadow_rows(pool, client, number)
            message = replay.rerun_with(transcript, own, f"shadow {how} {seed}", number)
            if message is not None:
                scores.append(logit_of_true_class(network.logits(replay, message, samples.x, client), samples.y))
                inside.append(part if how == "online" else torch.zeros_like(part))
        if len(scores) == shadows:
            ratio = likelihood_ratio(target, torch.stack(scores), torch.stack(inside))
            found.append(MembershipScores(_SERVER, f"LiRA {how}", ratio, asked.member))
    return found


def shadow_pool(replay: Replay, client: int, data: ShadowData) -> LabeledSamples:
    """Rows that the attacker has: the other clients' training samples, or those held out for the server."""
    if data == "holdout":
        public = replay.federation.server.public
        if public is not None and public.origin == "holdout":
            held: LabeledSamples = public.samples
            return held
        return replay.client(client).data.train.head(0)
    others = [each.data.train for each in replay.federation.clients if each.id != client]
    if not others:
        return replay.client(client).data.train.head(0)
    return LabeledSamples(torch.cat([o.x for o in others]), torch.cat([o.y for o in others]))


def _shadow_rows(pool: LabeledSamples, client: Client, number: int) -> LabeledSamples:
    """As many rows of each class as the client has, but at most half of those there; some where that leaves none."""
    draws = generator(client.seed, "shadow rows", client.id, number)
    classes, counts = client.data.train.y.unique(return_counts=True)
    picked = [
        _of_class(pool.y, label, min(count, math.ceil(int((pool.y == label).sum()) / 2)), draws)
        for label, count in zip(classes.tolist(), counts.tolist(), strict=True)
    ]
    rows = torch.cat(picked)
    if not len(rows):
        rows = torch.randperm(len(pool), generator=draws)[: max(1, len(pool) // 2)]
    return pool.select(rows)


def _half(count: int, number: int, seed: int, client: int) -> Tensor:
    """(N,) bool: the rows that a shadow model has; every second one has those that the one before it lacks."""
    order = torch.randperm(count, generator=generator(seed, "halves", client, number // 2))
    half = torch.zeros(count, dtype=torch.bool)
    half[order[: count // 2]] = True
    return half if number % 2 == 0 else ~half
