"""Settings of a federation that its method does not read: what is done with uploads where there are none, and the like.

A recipe serves many methods, so that a comparison may have such settings for the others' sake: there they are told. A
run of the recipe's own method is refused.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from polyfed.core.settings import Settings
from polyfed.engine.federation_parts import FederationParts
from polyfed.engine.uploads import has_upload
from polyfed.validation.error_lines import shown

__all__ = ["unread_settings"]

_OF_UPLOADS = {
    "privacy": ("upload_clip_norm", "upload_noise_multiplier"),
    "compression": ("dtype", "top_k_fraction"),
    "robust_aggregation": ("aggregator", "max_update_norm", "max_magnitude"),
    "adversaries": ("sign_flip_fraction", "inner_product_fraction", "alie_fraction"),
    "availability": ("delay_rate",),
    "devices": ("round_timeout", "buffer_size"),
}


def unread_settings(federation: FederationParts) -> list[str]:
    """A line for every setting that was given and that the method does not read."""
    return [
        *_without_local_epochs(federation),
        *_without_uploads(federation),
        *_without_late_uploads(federation),
        *_without_noise(federation),
        *_without_public(federation),
        *_without_averages(federation),
    ]


def _without_local_epochs(federation: FederationParts) -> Iterator[str]:
    run = (federation.output.settings or {}).get("run", {})
    if run.get("control") == "pooled-steps":
        return  # they say how many rows are drawn
    training = federation.training
    other = training.model_copy(update={"local_epochs": training.local_epochs + 1})
    if federation.method.phases(training) == federation.method.phases(other):
        for key, value in _given(training, ("local_epochs",)).items():
            yield _line(
                federation, "training", key, value, "whose own hyperparameters say how many epochs clients train"
            )


def _without_uploads(federation: FederationParts) -> Iterator[str]:
    if has_upload(federation.method):
        return
    for section, keys in _OF_UPLOADS.items():
        settings = federation.plugin(section).settings
        for key, value in _given(settings, keys).items():
            yield _line(federation, section, key, value, "which uploads nothing")
    privacy = federation.plugin("privacy").settings
    if not privacy.max_grad_norm:
        for key, value in _given(privacy, ("target_epsilon", "max_epsilon")).items():
            yield _line(federation, "privacy", key, value, "which uploads nothing; it needs privacy.max_grad_norm")


def _without_late_uploads(federation: FederationParts) -> Iterator[str]:
    if federation.method.accepts_stale_uploads:
        return
    settings = federation.plugin("availability").settings
    for key, value in _given(settings, ("delay_rounds",)).items():
        yield _line(federation, "availability", key, value, "which takes no late uploads")


def _without_noise(federation: FederationParts) -> Iterator[str]:
    budget = federation.plugin("privacy budget")
    settings = federation.plugin("privacy").settings
    if not budget.has_noise:
        for key, value in _given(settings, ("delta", "accountant")).items():
            needed = "as nothing is noised; it needs privacy.noise_multiplier or privacy.upload_noise_multiplier"
            yield _line(federation, "privacy", key, value, needed)
    elif not budget.draws_rows:
        for key, value in _given(settings, ("accountant",)).items():
            needed = "whose noise is on whole uploads; it needs privacy.noise_multiplier"
            yield _line(federation, "privacy", key, value, needed)


def _without_public(federation: FederationParts) -> Iterator[str]:
    public = federation.task.public
    if public is not None and public.origin == "other" and not federation.method.requirements.public:
        name = federation.method.name
        yield f"data.public_dataset does nothing with method '{name}', which uses no public data"


def _without_averages(federation: FederationParts) -> Iterator[str]:
    weighting = typing.get_type_hints(type(federation.method)).get("weighting")
    if "samples" not in typing.get_args(weighting):
        for key, value in _given(federation.training, ("client_weights",)).items():
            yield _line(federation, "training", key, value, "which has no `weighting` by samples that they multiply")


def _given(settings: Settings, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Those of the keys that are not at their default, with their values."""
    fields = type(settings).model_fields
    return {key: getattr(settings, key) for key in keys if getattr(settings, key) != fields[key].default}


def _line(federation: FederationParts, section: str, key: str, value: Any, why: str) -> str:
    name = federation.method.name
    return f"{section}.{key} = {shown(value)} does nothing with method '{name}', {why}"
