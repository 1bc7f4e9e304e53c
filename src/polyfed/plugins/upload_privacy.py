"""Uploads clipped and noised at the client: ``[privacy] upload_clip_norm`` and
``upload_noise_multiplier``.

1. ``upload_clip_norm``: every entry of the message (a group, or a tensor that stands alone) is shortened to this L2
   norm.
2. ``upload_noise_multiplier``: plus N(0, (multiplier * norm)^2) on every number of it, from the client's own stream,
   or by its secret.

Of groups that the method declares as `delta_entries`, trained weights, this is done to their difference to what came
down under the same names. Other floats are taken as they are. Whole numbers, booleans and single numbers (a count, a
learning rate) go up unaltered. What epsilon that is: `plugins.privacy_budget`.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Group, Message, State, members, to_bytes
from polyfed.core.method import Method
from polyfed.core.modules import static_statistics
from polyfed.core.settings import Privacy
from polyfed.engine.plugin import Plugin, Setup
from polyfed.engine.uploads import base_tensors, batchnorm_buffers, endings, has_upload
from polyfed.errors import ConfigError
from polyfed.functional.drift import Normals, clip_and_noise
from polyfed.functional.secure_noise import KeyedGaussian


class UploadPrivacy(Plugin):
    """Clips and noises what leaves a client, as `client.privacy` says; a target's noise is made by `PrivacyBudget`."""

    name = "privacy"
    settings_class = Privacy

    def validate(self, setup: Setup) -> None:
        """Clipping fits what the method uploads.

        Raises:
            ConfigError: it does not; says what the method sends.
        """
        method = setup.method
        if not self.settings.upload_clip_norm or not has_upload(method):
            return
        name = method.display_name
        for entry, reason in method.fixed_entries.items():
            sent = f"'{entry}': {reason}"
            raise ConfigError(f"privacy: expected uploads that can be clipped, got {name}, which sends {sent}")
        if not method.delta_entries:
            return
        for architecture, client in setup.first_of_each_architecture().items():
            network = setup.model_factory.module(architecture)
            statistics = batchnorm_buffers(network)
            for entry in method.delta_entries:
                sent_statistics = sorted(statistics & members(setup.first_messages[client.id], entry).keys())
                sent_statistics.extend(static_statistics(network))  # taken and sent after training
                if sent_statistics:
                    raise ConfigError(_no_statistics(name, sent_statistics[0]))

    def encode(self, upload: Message, client: Client, method: Method, received: Message) -> Message:
        """The upload, clipped and noised.

        Raises:
            ConfigError: something in it cannot be clipped.
        """
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
    said = [hashlib.sha256(part).digest() for part in (place, to_bytes(message), to_bytes(received))]
    return KeyedGaussian(hmac.digest(client.secret, b"".join(said), "sha256"))


def _clipped_and_noised(
    clip: float, noise: float, draws: torch.Generator | Normals, tensors: Group, base: Group
) -> dict[str, Tensor]:
    """The tensors with what they have changed since `base` clipped and noised, in their own types.

    Args:
        clip: L2 norm. noise: standard deviation over `clip`.
    """
    start = {name: base[name].to(t).float() if name in base else torch.zeros(()) for name, t in tensors.items()}
    update = {name: t.float() - start[name] for name, t in tensors.items()}
    new = clip_and_noise(update, clip, noise * clip, draws)
    return {name: (start[name] + t).to(tensors[name].dtype) for name, t in new.items()}


def _check_bounded(client: Client, method: Method, name: str, floats: Group, base: Group) -> None:
    """Tensors of the client's network go up as changes, and are parameters; others may be anything.

    Raises:
        ConfigError: they do not.
    """
    statistics = batchnorm_buffers(client.model)
    weights = endings(name for name, _ in client.model.named_parameters())
    who = method.display_name
    for key in floats:
        if key in statistics:
            raise ConfigError(_no_statistics(who, key))
        if key in weights and key not in base:
            raise ConfigError(
                f"privacy: expected changes of weights that came down, or figures of the data, from {who}, got whole "
                f"weights, '{name}/{key}' (see Method.delta_entries)"
            )
