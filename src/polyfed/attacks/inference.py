"""What the server can infer of a client's rows from what it sent: which rows it trained on, and which classes it has.

**Membership.** Tested are rows of two kinds: the client's training samples, all of which it trains on in every round
("members"), and test samples that nobody trained on; with a common test set as many of each class as the client's own
shares ask for. The attacker has these rows with their classes, as in the papers, and does not know which are which.

The score is a loss threshold's (Yeom et al., CSF 2018): the loss of the uploaded network, or of the client's own
("holder").

**Classes.** Where they are not stated, they are guessed from the head's step: with cross entropy, the bias of a class
that occurs grows by 1 - p, that of one that does not shrinks by p (Zhao et al., arXiv:2001.02610; Wainakh et al.,
PoPETs 2022); without a bias the sum of its weights' step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.attacks.membership_scores import auc, tpr_at_fpr
from polyfed.attacks.replay import Replay, Transcript, plaintext_facts
from polyfed.core.client import Client
from polyfed.core.modules import head_names
from polyfed.core.randomness import generator
from polyfed.data.samples import LabeledSamples
from polyfed.models.split import SplitModel

SEED = 0  # of the attacker's draws
SERVER, HOLDER = "server", "holder of the network"
_FPR = 0.01
_STATED = "which classes"  # the fact of `plaintext_facts`


def describe_guesses(by: str, clients: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """How good an attacker's guesses are over the rows of several clients, as JSON takes it.

    The rate is None where there are too few rows for it.

    Args:
        by: `SERVER` or `HOLDER`.
        clients: of each, the scores (N,), the higher the likelier a member, and (N,) bool, the truth.
    """
    scores = torch.cat([own for own, _ in clients])
    member = torch.cat([truth for _, truth in clients])
    rate = tpr_at_fpr(scores, member, _FPR)
    return {
        "by": by,
        "members": int(member.sum()),
        "others": int((~member).sum()),
        "auc": auc(scores, member)._asdict(),
        "tpr_at_1_percent": None if rate is None else rate._asdict(),
    }


def membership_samples(client: Client, shared_test: bool) -> tuple[LabeledSamples, Tensor] | None:
    """A client's training samples, then test samples, and which are the former, (N,) bool; None where one is missing.

    Args:
        client: with its data.
        shared_test: its test samples are everybody's, so that some are drawn with the client's shares of classes.
    """
    train, test = client.data.train, client.data.test
    if not len(train) or not len(test):
        return None
    if shared_test:
        test = test.select(_alike(test.y, train.y, generator(SEED, "candidates", client.id)))
    samples = LabeledSamples(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]))
    return samples, torch.arange(len(samples)) < len(train)


def _alike(pool: Tensor, like: Tensor, draws: torch.Generator) -> Tensor:
    """Places in `pool` (M,), classes, of as many rows as have the class shares of `like`; at most as many as these."""
    classes, wanted = like.unique(return_counts=True)
    places = [(pool == label).nonzero().flatten() for label in classes]
    share = min(1.0, *(len(own) / int(n) for own, n in zip(places, wanted, strict=True)))
    if share == 0:  # a class is missing: those that are there
        share = 1.0
    shuffled = [own[torch.randperm(len(own), generator=draws)] for own in places]
    return torch.cat([own[: math.ceil(share * int(n))] for own, n in zip(shuffled, wanted, strict=True)])


# classes --------------------------------------------------------------------------------------------------------------


def infer_labels(replay: Replay, transcripts: Mapping[int, Transcript]) -> dict[str, Any]:
    """What the server learns of the clients' classes, in the best way that the messages offer.

    how: "stated" or "head's step". auc: over pairs of client and class. why_not: the reason where there is
    none; the others are None then.
    """
    nothing = {"how": None, "auc": None}
    clients = {number: replay.client(number) for number in transcripts}
    held = [client.data.train.y.bincount(minlength=client.classes)[: client.classes] > 0 for client in clients.values()]
    member = torch.stack(held).flatten()
    if not any(transcript.up for transcript in transcripts.values()):
        return {**nothing, "why_not": "nothing goes up"}
    if bool(member.all()):
        return {**nothing, "why_not": "every client has every class"}
    if all(_STATED in plaintext_facts(transcript.up, clients[number]) for number, transcript in transcripts.items()):
        return {"how": "stated", "auc": {"value": 1.0, "low": 1.0, "high": 1.0}, "why_not": None}
    steps = [step for transcript in transcripts.values() if (step := _head_step(replay, transcript)) is not None]
    if len(steps) < len(transcripts):
        return {**nothing, "why_not": "neither stated, nor the step of a head"}
    scores = torch.cat([step / step.abs().max().clamp(min=1e-12) for step in steps])
    return {"how": "head's step", "auc": auc(scores, member)._asdict(), "why_not": None}


def _head_step(replay: Replay, transcript: Transcript) -> Tensor | None:
    """(C,) the step of the head's biases, else of its weights' sums; None where no head went both ways."""
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
