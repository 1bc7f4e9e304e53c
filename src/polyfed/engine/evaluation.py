"""Scoring: which model of a client, on which data; and only what may have changed since it was last scored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.method import Method
from polyfed.data.samples import Samples
from polyfed.functional.modes import evaluating

CHUNK = 512  # rows per forward pass


class Score(NamedTuple):
    """Counts, from which every accuracy is made."""

    correct: int
    total: int


def score_model(client: Client, method: Method, samples: Samples) -> Score:
    """Score the model that a working client holds; its BatchNorm statistics and modes stay as they are."""
    model = method.personal(client.model)
    device = next(iter(model.parameters())).device
    correct = 0
    with torch.inference_mode(), evaluating(model):
        for x, y in zip(samples.x.split(CHUNK), samples.y.split(CHUNK), strict=True):
            scores = method.predict(model, client.prepare(x.to(device)), client.state)
            correct += int((scores.argmax(dim=1).cpu() == y).sum())
    return Score(correct, len(samples))


def summary(scores: Iterable[Score], mean: str) -> dict[str, float]:
    """Mean, standard deviation over clients (population), minimum and maximum of the accuracies; n clients.

    Args:
        scores: one per client that has test data.
        mean: "clients" (each counts once) or "samples" (each test sample counts once).
    """
    counted = [s for s in scores if s.total]
    if not counted:
        return {}
    values = [s.correct / s.total for s in counted]
    plain = math.fsum(values) / len(values)
    weighted = sum(s.correct for s in counted) / sum(s.total for s in counted)
    spread = math.sqrt(math.fsum((v - plain) ** 2 for v in values) / len(values))
    return {
        "mean": weighted if mean == "samples" else plain,
        "std": spread,
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def fingerprint(message: Message) -> bytes:
    """A digest of names, shapes, types and bytes: equal only for equal messages."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(flatten(message).items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.digest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Memory:
    """Scores already taken. A client is scored again only when its weights, its state or what it is sent changed.

    Where all clients share one test set, models that are equal bit for bit are scored once.
    """

    def __init__(self) -> None:
        self._by_client: dict[tuple[int, bool, str], tuple[object, Score]] = {}
        self._by_content: dict[object, Score] = {}
        self.scored = 0  # forward passes over a test set that were really made

    def recall(self, client_id: int, received: bool, part: str, key: object) -> Score | None:
        """The score under this key, if the client was scored under it last time."""
        known = self._by_client.get((client_id, received, part))
        return known[1] if known is not None and known[0] == key else None

    def keep(self, client_id: int, received: bool, part: str, key: object, score: Score) -> None:
        """Remember it until the key changes."""
        self._by_client[client_id, received, part] = (key, score)

    def score(self, client: Client, method: Method, samples: Samples, shared: bool) -> Score:
        """Score a working client; with `shared` samples, equal models once."""
        if not shared:
            self.scored += 1
            return score_model(client, method, samples)
        model = method.personal(client.model)
        content = (client.architecture, id(samples), fingerprint(_content(model.state_dict(), client.state)))
        if content not in self._by_content:
            self.scored += 1
            self._by_content[content] = score_model(client, method, samples)
        return self._by_content[content]

    def forget_content(self) -> None:
        """At the end of an evaluation: models will have changed by the next."""
        self._by_content.clear()


def _content(weights: Mapping[str, Tensor], state: Message) -> Message:
    return {"weights": dict(weights), **{f"state {name}": value for name, value in state.items()}}
