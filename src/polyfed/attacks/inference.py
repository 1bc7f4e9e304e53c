"""What the server can infer of a client's rows from what it sent: which rows it trained on, and which classes it has.

**Membership.** Tested are rows of two kinds: the client's training samples, all of which it trains on in every round
("members"), and its test samples, that nobody trained on. The attacker has these rows with their classes, as in the
papers, and does not know which are which.

The score is a loss threshold's (Yeom, Giacomelli, Fredrikson, Jha, CSF 2018): the loss of the uploaded network, or of
the client's own ("holder"). A row of small loss is called a member.

**Classes.** Where they are not stated, they are guessed from the head's step: with cross entropy, the bias of a class
that occurs grows by 1 - p, that of one that does not shrinks by p (Zhao et al., arXiv:2001.02610; Wainakh et al.,
PoPETs 2022); without a bias the sum of its weights' step.

Shapes: N rows, C classes. A higher score means "member"; `member` (N,) is True for those that are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.attacks.replay import Replay, Transcript, plaintext_facts
from polyfed.core.client import Client
from polyfed.core.modules import head_names
from polyfed.data.samples import LabeledSamples
from polyfed.functional.metrics import ranks
from polyfed.models.split import SplitModel

SERVER, HOLDER = "server", "holder of the network"
_FPR = 0.01
_Z95 = 1.959963984540054  # two-sided 95 %
_STATED = "which classes"  # the fact of `plaintext_facts`


def describe_guesses(by: str, clients: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """How good the guesses of `SERVER` or `HOLDER` are over the rows of several clients, as JSON takes it.

    clients: of each, the scores (N,) and (N,) bool, the truth. The rate is None where there are too few rows for it.
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


def membership_samples(client: Client) -> tuple[LabeledSamples, Tensor]:
    """A client's training samples, then its test samples, and which are the former, (N,) bool."""
    train, test = client.data.train, client.data.test
    samples = LabeledSamples(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]))
    return samples, torch.arange(len(samples)) < len(train)


# how good guesses are ------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def loss_scores(logits: Tensor, y: Tensor) -> Tensor:
    """Minus the cross entropy of each row, (N,) float64: the higher, the likelier a member (Yeom et al.)."""
    return -F.cross_entropy(logits.double(), y, reduction="none")


def auc(scores: Tensor, member: Tensor) -> Interval:
    """The area under the ROC curve, ties counting half, with DeLong's 95 % interval, kept within [0, 1].

    Where DeLong's variance is 0 or unknown (no errors at all, or a side of a single row), the interval reaches
    1 / (rows of the smaller side + 1) to either side.

    Raises:
        ValueError: no member, or nobody else.

    Source: DeLong, DeLong, Clarke-Pearson, Biometrics 44(3), 1988.
    """
    _check(member)
    of = int(member.sum())
    others = int((~member).sum())
    places = ranks(scores)
    above = (places[member] - ranks(scores[member])) / others  # share of the others that each member beats
    below = (places[~member] - ranks(scores[~member])) / of  # share of the members that are below each other row
    value = float(above.mean())
    known = min(of, others) > 1
    error = math.sqrt(float(above.var()) / of + float(below.var()) / others) if known else 0.0
    margin = _Z95 * error or 1 / (min(of, others) + 1)
    return Interval(value, max(0.0, value - margin), min(1.0, value + margin))


def tpr_at_fpr(scores: Tensor, member: Tensor, fpr: float) -> Interval | None:
    """The true positive rate where at most the share `fpr` of the others is called a member; Wilson's 95 % interval.

    The interval is that of the members' share; the threshold counts as given.

    Returns:
        None where there are too few others for such a rate: fewer than 1 / fpr.

    Raises:
        ValueError: no member, or nobody else.
    """
    _check(member)
    most = fpr + 1e-9  # a share that is meant to be equal to it counts
    of = int(member.sum())
    if most * (len(member) - of) < 1:
        return None
    from scipy.stats import binomtest  # comes with scikit-learn; takes a second
    from sklearn.metrics import roc_curve

    false_rates, true_rates, _ = roc_curve(member.numpy(), scores.numpy(), drop_intermediate=False)
    rate = float(true_rates[false_rates <= most].max())
    interval = binomtest(round(rate * of), of).proportion_ci(method="wilson")
    return Interval(rate, float(interval.low), float(interval.high))


def _check(member: Tensor) -> None:
    if not bool(member.any()) or bool(member.all()):
        raise ValueError("expected members and others, got one of them alone")


# classes --------------------------------------------------------------------------------------------------------------


def infer_labels(replay: Replay) -> dict[str, Any]:
    """What the server learns of the clients' classes, in the best way that the messages offer.

    how: "stated" or "head's step". auc: over pairs of client and class. why_not: the reason where there is
    none; the others are None then.
    """
    nothing = {"how": None, "auc": None}
    transcripts = replay.transcripts
    clients = {number: replay.federation.clients[number] for number in transcripts}
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
        down = transcript.job.message.get(name)
        if isinstance(sent, Tensor) or down is None or isinstance(down, Tensor):
            continue
        for within in ("bias", "weight"):
            for key in (inner.get(within, ""), within):
                if key in sent and key in down and len(sent[key]) == client.classes:
                    step: Tensor = sent[key].float() - down[key].float()
                    return step if step.dim() == 1 else step.flatten(1).sum(dim=1)
    return None
