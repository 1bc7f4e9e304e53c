"""Which classes a client has, as an honest-but-curious server can guess where they are not stated.

Two ways, each a score per client and class, the higher the likelier that the client has training samples of it:

* the head's step: with cross entropy, the bias of a class that occurs grows by 1 - p, that of one that does not shrinks
  by p (Zhao et al., arXiv:2001.02610; Wainakh et al., PoPETs 2022); without a bias the sum of its weights' step;
* the kernel: the alignment (CKA) of an uploaded representation of common inputs with the indicator of a class among
  them, over the mean of all clients'; the server knows the classes of hold-out rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.attacks.message_inspection import plaintext_facts
from polyfed.attacks.replay import Replay, Transcript
from polyfed.core.client import Client
from polyfed.core.message import get_group
from polyfed.core.modules import head_names
from polyfed.functional.compression import dequantize_columns
from polyfed.functional.kernels import cka
from polyfed.functional.membership_scores import Interval, auc
from polyfed.models.split import SplitModel

_STATED = "which classes"  # the fact of `plaintext_facts`


@dataclass(frozen=True)
class LabelInference:
    """What the server learns of the classes that clients have. how: by what; "" where by nothing. why_not: then why.

    auc: over pairs of client and class; None where nothing is learnt, or all clients have all classes.
    """

    how: str
    auc: Interval | None
    why_not: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "how": self.how or None,
            "auc": None if self.auc is None else self.auc._asdict(),
            "why_not": self.why_not or None,
        }


def infer_labels(replay: Replay, transcripts: dict[int, Transcript]) -> LabelInference:
    """By the best of what the messages offer: stated, the head's step, the kernel."""
    if not any(transcript.up for transcript in transcripts.values()):
        return LabelInference("", None, "nothing goes up")
    clients = {number: replay.client(number) for number in transcripts}
    member = torch.stack([_held(client) for client in clients.values()]).flatten()
    if bool(member.all()):
        return LabelInference("", None, "every client has every class")
    if all(_STATED in plaintext_facts(transcript.up, clients[number]) for number, transcript in transcripts.items()):
        return LabelInference("stated", Interval(1.0, 1.0, 1.0))
    for how, scores in (("head's step", _by_head(replay, transcripts)), ("kernel", _by_kernel(replay, transcripts))):
        if scores is not None:
            return LabelInference(how, auc(scores.flatten(), member))
    return LabelInference(
        "", None, "neither stated, nor the step of a head, nor a kernel of rows whose classes are known"
    )


def _held(client: Client) -> Tensor:
    """(C,) bool: the classes that the client has training samples of."""
    return torch.bincount(client.data.train.y, minlength=client.classes)[: client.classes] > 0


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


def _by_kernel(replay: Replay, transcripts: dict[int, Transcript]) -> Tensor | None:
    """(K, C) alignments with each class of the common inputs, over the clients' mean; None where there are none."""
    labels = _known_classes(replay)
    if labels is None or not all("kernel" in transcript.up for transcript in transcripts.values()):
        return None
    classes = next(iter(transcripts.values())).job.client.classes
    rows = []
    for transcript in transcripts.values():
        a_LD = dequantize_columns(get_group(transcript.up, "kernel"))
        if len(a_LD) != len(labels):
            return None
        indicators = ((labels == label).float().unsqueeze(1) for label in range(classes))
        rows.append(torch.stack([cka(a_LD, indicator) for indicator in indicators]))
    aligned = torch.stack(rows)
    return aligned - aligned.mean(dim=0)


def _known_classes(replay: Replay) -> Tensor | None:
    """(L,) the classes of the common inputs, which the server knows where they are hold-out rows."""
    server = replay.federation.server
    rad = server.state.get("rad")
    public = server.public
    if not isinstance(rad, Tensor) or public is None or public.origin != "holdout":
        return None
    known = {x.contiguous().numpy().tobytes(): int(y) for x, y in zip(public.samples.x, public.samples.y, strict=True)}
    found = [known.get(x.contiguous().numpy().tobytes()) for x in rad]
    labels = [label for label in found if label is not None]
    return torch.tensor(labels) if len(labels) == len(found) else None
