"""Scores already taken: only what may have changed since it was last scored is scored again."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, flatten
from polyfed.core.method import Method, uses_default_predict
from polyfed.data.samples import LabeledSamples
from polyfed.engine.scoring import Score, evaluate_model, represent_samples
from polyfed.models.split import SplitModel

REMEMBERED_BYTES = 256 * 2**20  # bytes of representations that are kept at most
_Place = tuple[int, str, int]  # client, variant, identity of the samples


class ScoreCache:
    """Scores already taken. A client is scored again only when its weights, its state or what it is sent changed.

    Where all clients share one test set, models that are equal bit for bit, and are given the same inputs, are scored
    once. Where all but the head is as the client keeps it, its representations are taken once.
    """

    def __init__(self, from_scores: Collection[str] = ()) -> None:
        self.from_scores = from_scores  # taken with every score
        self._by_client: dict[tuple[int, bool, str], tuple[object, Score]] = {}
        self._by_content: dict[object, Score] = {}
        self._represented: dict[_Place, tuple[int, list[Tensor]]] = {}
        self._held = 0  # bytes of representations
        self.scored = 0  # forward passes over a test set that were really made

    def recall(self, client_id: int, received: bool, part: str, key: object) -> Score | None:
        """The score under this key, if the client was scored under it last time."""
        known = self._by_client.get((client_id, received, part))
        return known[1] if known is not None and known[0] == key else None

    def keep(self, client_id: int, received: bool, part: str, key: object, score: Score) -> None:
        """Remember it until the key changes."""
        self._by_client[client_id, received, part] = (key, score)

    def forget(self, client_id: int) -> None:
        """Take a client's scores anew."""
        self._by_client = {place: known for place, known in self._by_client.items() if place[0] != client_id}

    def score(
        self,
        client: Client,
        method: Method,
        samples: LabeledSamples,
        shared: bool,
        others: bool = True,
        own_body: str | None = None,
    ) -> Score:
        """Score a working client; with `shared` samples, equal models once.

        others: see `evaluate_model`. own_body: the network's variant, where all of it but the head is as in the
        client's own weights.
        """
        if not shared:
            return self._take(client, method, samples, others, own_body)
        model = method.personal_model(client.model)
        inputs = (id(samples), id(client.prepare), id(client.missing))
        content = (client.architecture, inputs, fingerprint(_content(model.state_dict(), client.state)))
        if content not in self._by_content:
            self._by_content[content] = self._take(client, method, samples, others, own_body)
        return self._by_content[content]

    def _take(
        self, client: Client, method: Method, samples: LabeledSamples, others: bool, own_body: str | None
    ) -> Score:
        model = method.personal_model(client.model)
        known = None
        if own_body is not None and uses_default_predict(method) and isinstance(model, SplitModel):
            known = self._representations(client, own_body, samples, model)
        else:
            self.scored += 1
        return evaluate_model(client, method, samples, self.from_scores, others, known)

    def _representations(
        self, client: Client, variant: str, samples: LabeledSamples, model: SplitModel
    ) -> list[Tensor]:
        """Those by the client's own weights, anew if these have changed."""
        place = (client.id, variant, id(samples))
        version, known = self._represented.get(place, (-1, []))
        if version != client.version:
            self.scored += 1
            self._drop(place)  # the last to have changed are the last to go
            known = represent_samples(client, samples, model)
            self._represented[place] = (client.version, known)
            self._held += sum(z.nbytes for z in known)
            while self._held > REMEMBERED_BYTES and len(self._represented) > 1:
                self._drop(next(iter(self._represented)))
        return known

    def _drop(self, place: _Place) -> None:
        _, known = self._represented.pop(place, (-1, []))
        self._held -= sum(z.nbytes for z in known)

    def forget_content(self) -> None:
        """At the end of an evaluation: models will have changed by the next."""
        self._by_content.clear()


def fingerprint(message: Message) -> bytes:
    """A digest of names, shapes, types and bytes: equal only for equal messages."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(flatten(message).items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(_bytes(tensor))
    return digest.digest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _content(weights: Mapping[str, Tensor], state: Message) -> Message:
    return {"weights": dict(weights), **{f"state {name}": value for name, value in state.items()}}
