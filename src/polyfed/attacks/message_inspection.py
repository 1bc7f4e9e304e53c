"""What an honest-but-curious server has of a client, told from the messages themselves, whatever the method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.attacks.replay import Replay, Transcript
from polyfed.core.client import Client
from polyfed.core.inference import map_batches
from polyfed.core.message import Group, Message, members, nbytes


@dataclass(frozen=True)
class MessageEntry:
    """One entry of a message. shape: of a tensor that stands alone; empty for a group. tensors: how many it is.

    numbers: in all its tensors. type: the tensors' own, of several joined by "+". bytes: of all of them.
    """

    name: str
    shape: tuple[int, ...]
    tensors: int
    numbers: int
    type: str
    bytes: int

    def __str__(self) -> str:
        many = f"{self.tensors} tensors of {self.numbers}" if self.tensors > 1 else "x".join(map(str, self.shape))
        return f"{self.name} ({many or '1'} {self.type})"


def list_entries(message: Message) -> list[MessageEntry]:
    """What a message is made of, in its order."""
    found = []
    for name, value in message.items():
        tensors = [value] if isinstance(value, Tensor) else list(value.values())
        types = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in tensors)
        shape = tuple(tensors[0].shape) if len(tensors) == 1 else ()
        numbers = sum(t.numel() for t in tensors)
        found.append(MessageEntry(name, shape, len(tensors), numbers, "+".join(types), nbytes({name: value})))
    return found


def plaintext_facts(message: Message, client: Client) -> dict[str, str]:
    """Facts about a client's training data that its upload states in whole numbers: fact -> the entry that states it.

    Compared with the data: an entry counts where it is the very set of classes, the counts of these, or the number of
    samples.
    """
    classes, counts = client.data.train.y.unique(return_counts=True)
    found: dict[str, str] = {}
    for name, value in message.items():
        if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
            continue
        sent = value.long()
        if value.dim() == 0:
            if int(sent) == client.n:
                found.setdefault("number of samples", name)
        elif torch.equal(sent.unique(), classes):
            found.setdefault("which classes", name)
        elif sent.shape == counts.shape and torch.equal(sent, counts):
            found.setdefault("samples per class", name)
    return found


@dataclass(frozen=True, eq=False)
class ExposedModel:
    """A whole network that went up, in the eyes of the server.

    group: name of the entry. architecture, variant: which network.
    """

    group: str
    architecture: str
    variant: str

    def load(self, replay: Replay, message: Message) -> nn.Module:
        """The network with the message's weights, in eval mode; shared, so use it before asking for another.

        BatchNorm's statistics, where they are not sent, are those of a new network.
        """
        server = replay.federation.server
        start: Group = server.initial_state(self.architecture, self.variant)
        sent = members(message, self.group)
        weights = {**start, **{name: t for name, t in sent.items() if name in start}}
        model: nn.Module = server.model(self.architecture, weights, self.variant)
        return model

    def logits(self, replay: Replay, message: Message, x: Tensor, client: Client) -> Tensor:
        """Outputs (N, C) for stored inputs `x` (N, ...), on the CPU."""
        network = self.load(replay, message)
        return map_batches(network, network, x, client.prepare).cpu()

    def was_broadcast(self, replay: Replay, transcript: Transcript) -> bool:
        """Whether its weights were sent down before, so that the server knows where they started."""
        return self.covers(replay, members(transcript.down, self.group))

    def covers(self, replay: Replay, sent: Group) -> bool:
        """Whether all parameters are among these tensors."""
        network = replay.federation.server.model(self.architecture, {}, self.variant)
        parameters = dict(network.named_parameters())
        return all(name in sent and sent[name].shape == p.shape for name, p in parameters.items())


def find_full_model(replay: Replay, transcript: Transcript) -> ExposedModel | None:
    """The network that a client's upload holds all parameters of; None where it holds none whole."""
    client, server = transcript.job.client, replay.federation.server
    kinds = [(client.architecture, transcript.job.variant)]
    if server.auxiliary_model:
        kinds.append((server.auxiliary_model, ""))
    for architecture, variant in kinds:
        for name, value in transcript.up.items():
            found = ExposedModel(name, architecture, variant)
            if not isinstance(value, Tensor) and found.covers(replay, value):
                return found
    return None


def describe(transcript: Transcript) -> dict[str, Any]:
    """Both directions of a transcript, as JSON takes them."""
    return {
        way: {"bytes": nbytes(message), "entries": [_as_json(entry) for entry in list_entries(message)]}
        for way, message in (("up", transcript.traveled), ("down", transcript.down))
    }


def _as_json(entry: MessageEntry) -> dict[str, Any]:
    return {**vars(entry), "shape": list(entry.shape)}
