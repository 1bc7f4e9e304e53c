"""Privacy of uploads: clipped and noised at the client, and the account of what a run releases.

1. ``upload_clip_norm``: every entry of the message (a group, or a tensor that stands alone) is shortened to this norm.
2. ``upload_noise_multiplier``: plus N(0, (multiplier * norm)^2) on every number of it, from the client's own stream, or
   by its secret.

Of groups that the method declares as `delta_entries`, trained weights, this is done to their difference to what was
sent down under the same names. Other floats are taken as they are. Whole numbers, booleans and single numbers (a count,
a learning rate) go up unaltered. What epsilon that is: `engine.privacy_ledger`.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import ADDENDS, Group, Message, State, members, to_bytes
from polyfed.core.method import Exchange, Method
from polyfed.core.modules import static_statistics
from polyfed.core.releases import Release
from polyfed.core.settings import Privacy
from polyfed.data.samples import TargetScale
from polyfed.engine import privacy_ledger
from polyfed.engine.dp_sgd import check_dp_sgd
from polyfed.engine.dp_sgd import releases as of_training
from polyfed.engine.executors.jobs import JobResult, TrainJob
from polyfed.engine.plugin import Plugin, Setup
from polyfed.engine.round_state import Round
from polyfed.engine.uploads import base_tensors, batchnorm_buffers, endings, has_upload
from polyfed.errors import ConfigError
from polyfed.functional.clipping import Normals, clip_and_noise
from polyfed.functional.noise import KeyedGaussian


class UploadPrivacy(Plugin):
    """Clips and noises what leaves a client, as `client.privacy` says, and keeps the account of what a run releases.

    Attributes:
        settings: with the noise that a target asks for, once validated. has_noise: whether anything that clients give
            away is noised.
    """

    name = "privacy"
    settings_class = Privacy

    def __init__(self, settings: Privacy | None = None) -> None:
        super().__init__(settings)
        self.has_noise = False

    def validate(self, setup: Setup) -> None:
        """Make the noise that a target asks for, and give it to the clients."""
        self._check_uploads(setup)
        self._method, self._training = setup.method, setup.training
        self._bounds_rows = setup.method.bounds_rows
        self._rows = {client.id: client.n for client in setup.clients if client.id not in setup.held_out}
        self._cohort = setup.cohort
        self._check_bounds()
        self.settings = self._with_noise(self.settings)
        self._ledger = privacy_ledger.PrivacyLedger(self.settings.delta)
        expected = [  # of the first round, each upload having one bounded entry
            release
            for client in self._rows
            for exchange in setup.method.exchanges(1)
            for release in self._given(client, 1, self.settings, exchange)
        ]
        self.has_noise = bool(expected)
        if any(release.unit == "sample" for release in expected):
            self._check_rows(setup)
        for client in setup.clients:
            client.privacy = self.settings
        setup.server.privacy = self.settings
        firsts = [*setup.first_of_each_architecture().values()]
        check_dp_sgd(setup.method, self.settings, firsts, setup.model_factory)
        if self.has_noise:
            privacy_ledger.package()  # before anything is trained

    def encode(self, upload: Message, client: Client, method: Method, received: Message) -> Message:
        """The upload, clipped and noised."""
        if not client.privacy.upload_clip_norm:
            return upload
        draws = _noise_of(client, upload, received)
        entries = clipped_entries(upload)
        noise = client.privacy.upload_noise_std(len(entries))
        release = functools.partial(_clipped_and_noised, client.privacy.upload_clip_norm, noise, draws)
        found: State = {}
        for name, value in upload.items():
            if isinstance(value, Tensor):
                found[name] = release({name: value}, {})[name] if name in entries else value
                continue
            floats = {key: tensor for key, tensor in value.items() if tensor.is_floating_point()}
            base = base_tensors(method, name, value, received)
            _check_bounded(client, method, name, floats, base)
            found[name] = {**value, **release(floats, base)}
        return found

    # the account ------------------------------------------------------------------------------------------------------

    def select(self, round: Round) -> None:
        """Begin to count."""
        round.notes[self.name] = {}

    def after_jobs(
        self, round: Round, jobs: Sequence[TrainJob], sent: Sequence[JobResult], read: Sequence[JobResult]
    ) -> None:
        """Count what the clients have given away."""
        if not self.has_noise:
            return
        released: dict[int, list[Release]] = round.notes[self.name]
        for job, left, arrived in zip(jobs, sent, read, strict=True):
            if left.dropped:
                continue
            number = arrived.client_id
            entries = None
            if left.bytes_up > 0 and number not in round.silenced:
                if arrived.counts:
                    entry_names = clipped_entries(arrived.message)
                    if ADDENDS in arrived.message:  # the sum of what was clipped
                        entry_names = list(round.method.delta_entries)
                    entries = len(entry_names)
                else:  # an upload that nobody could read: at most those that it has, and that the method sends
                    entries = min(len(left.message), len(round.method.upload_form or left.message))
            released.setdefault(number, []).extend(self._given(number, entries, self.settings, job.exchange))

    def record(self, round: Round) -> dict[str, Any]:
        """What has been released, in this round and in all."""
        if not self.has_noise:
            return {}
        released = round.notes[self.name]
        self._ledger.update(round.history)
        return {
            "epsilon": self._ledger.epsilon(released),
            "delta": self.settings.delta,
            "releases": privacy_ledger.to_record(released),
        }

    def _check_rows(self, setup: Setup) -> None:
        """Whether a row that noise is to hide changes what others are, or what goes up without noise."""
        method, settings = setup.method, self.settings
        bounded = self._bounds_rows or settings.upload_noise_multiplier or method.privacy_releases(self._training, 1)
        if method.entries_of_rows and has_upload(method) and not bounded:
            raise ConfigError(
                f"privacy.noise_multiplier: expected a method that sends what noise hides, got {method.name}, which "
                f"sends '{method.entries_of_rows[0]}' of a client's rows as it is: no epsilon of training would be true"
            )
        for client in setup.clients:
            if client.data.train.scale != TargetScale():
                raise ConfigError(
                    "privacy: expected numbers to predict as they are where noise hides rows, got those of "
                    f"{client.title}, which are standardized by its own rows"
                )

    def _check_bounds(self) -> None:
        """Whether noise is over something that is bounded."""
        settings = self.settings
        rows = bool(settings.max_grad_norm) or self._bounds_rows
        if rows or not has_upload(self._method) or self._method.is_alone:
            return
        itself = "or a method that bounds rows itself (closed-form, with unit_features)"
        if settings.noise_multiplier:
            raise ConfigError(
                f"privacy.noise_multiplier: expected max_grad_norm above 0 beside it, of which it is a multiple, "
                f"{itself}, got {settings.noise_multiplier:g}"
            )
        if settings.target_epsilon and not settings.upload_clip_norm:
            raise ConfigError(
                f"privacy.target_epsilon: expected upload_clip_norm or max_grad_norm above 0, whose noise it makes, "
                f"{itself}, got {settings.target_epsilon:g}"
            )

    def _given(self, client: int, entries: int | None, settings: Privacy, exchange: Exchange) -> list[Release]:
        """What a client gives away in an exchange. entries: of its upload, that are bounded; None: it sends nothing."""
        found = []
        if exchange.trains:
            phases = self._method.phases(self._training) if exchange.phases is None else exchange.phases
            found += of_training(settings, self._training, phases, self._rows[client])
        if entries is not None and has_upload(self._method):
            found += self._method.privacy_releases(self._training, self._rows[client])
            if self._bounds_rows and settings.noise_multiplier:
                found.append(Release("sums", "sample", settings.noise_multiplier, once=True))
            if settings.upload_noise_multiplier and entries:
                found.append(Release("upload", "client", settings.upload_noise_std(entries) / math.sqrt(entries)))
        return found

    def _with_noise(self, settings: Privacy) -> Privacy:
        """The settings, with the noise that a target asks for, for who is to take part most often."""
        if not settings.target_epsilon:
            return settings
        turns: dict[int, list[Exchange]] = {client: [] for client in self._rows}
        for number in range(1, self._training.rounds + 1):
            for client in self._cohort(number):
                turns[client].extend(self._method.exchanges(number))
        for own in turns.values():
            own.extend(self._method.final_exchanges())
        made = {}
        if settings.upload_clip_norm and has_upload(self._method):
            # of a single release; found to 1e-12, on either side: what is spent is not to exceed the target
            sigma = float(privacy_ledger.package().get_sigma_gaussian(settings.target_epsilon, settings.delta))
            most = max(map(len, turns.values()))
            made["upload_noise_multiplier"] = sigma * (1 + 1e-10) * math.sqrt(most)
        if settings.max_grad_norm or self._bounds_rows:

            def released(noise: float) -> Iterator[list[Release]]:
                tried = settings.model_copy(update={"noise_multiplier": noise})
                for client, own in turns.items():
                    yield [r for e in own for r in self._given(client, 0, tried, e)]

            made["noise_multiplier"] = privacy_ledger.calibrate_noise(released, settings)
        return settings.model_copy(update=made)

    # whether it can be -----------------------------------------------------------------------------------------------

    def _check_uploads(self, setup: Setup) -> None:
        """Whether clipping fits what the method uploads."""
        method = setup.method
        if not self.settings.upload_clip_norm or not has_upload(method):
            return
        name = method.name
        for entry, reason in method.fixed_entries.items():
            sent = f"'{entry}': {reason}"
            raise ConfigError(f"privacy: expected uploads that can be clipped, got {name}, which sends {sent}")
        if not method.delta_entries:
            return
        for architecture, client in setup.first_of_each_architecture().items():
            network = setup.model_factory.module(architecture)
            statistics = batchnorm_buffers(network)
            first_message = method.broadcast(setup.preview, client.id)
            for entry in method.delta_entries:
                sent_statistics = sorted(statistics & members(first_message, entry).keys())
                sent_statistics.extend(static_statistics(network))  # taken and sent after training
                if sent_statistics:
                    raise ConfigError(_no_statistics(name, sent_statistics[0]))


def _no_statistics(name: str, statistic: str) -> str:
    return (
        f"privacy: expected networks without BatchNorm, or a method that leaves its statistics with the clients, as "
        f"noise on a variance may leave none; {name} sends '{statistic}'"
    )


def clipped_entries(message: Message) -> list[str]:
    """The entries of an upload that are clipped and noised: groups with floats, tensors of floats that stand alone."""

    def of_floats(value: Tensor | Group) -> bool:
        if isinstance(value, Tensor):
            return value.dim() > 0 and value.is_floating_point()
        return any(tensor.is_floating_point() for tensor in value.values())

    return [name for name, value in message.items() if of_floats(value)]


def _noise_of(client: Client, message: Message, received: Message) -> torch.Generator | Normals:
    """What the noise on an upload is drawn from: the run's seed, or the client's secret and all that the upload is.

    The same upload once more has the same noise, so that nothing is gained by asking again; any other has noise of its
    own, also in the same round: of two with one noise the difference would be bare.
    """
    if client.secret is None or not client.privacy.upload_noise_multiplier:
        return client.generator("privacy")
    place = json.dumps([client.id, client.exchange, client.round]).encode()
    digests = [hashlib.sha256(part).digest() for part in (place, to_bytes(message), to_bytes(received))]
    return KeyedGaussian(hmac.digest(client.secret, b"".join(digests), "sha256"))


def _clipped_and_noised(
    clip: float, noise: float, draws: torch.Generator | Normals, tensors: Group, base: Group
) -> dict[str, Tensor]:
    """The tensors with what they have changed since `base` clipped and noised, in their own types."""
    start = {name: base[name].to(t).float() if name in base else torch.zeros(()) for name, t in tensors.items()}
    update = {name: t.float() - start[name] for name, t in tensors.items()}
    new = clip_and_noise(update, clip, noise * clip, draws)
    return {name: (start[name] + t).to(tensors[name].dtype) for name, t in new.items()}


def _check_bounded(client: Client, method: Method, name: str, floats: Group, base: Group) -> None:
    """Tensors of the client's network go up as changes, and are parameters; others may be anything."""
    statistics = batchnorm_buffers(client.model)
    weights = endings(name for name, _ in client.model.named_parameters())
    who = method.name
    for key in floats:
        if key in statistics:
            raise ConfigError(_no_statistics(who, key))
        if key in weights and key not in base:
            raise ConfigError(
                f"privacy: expected changes of weights that were sent down, or figures of the data, from {who}, got "
                f"whole weights, '{name}/{key}' (see Method.delta_entries)"
            )
