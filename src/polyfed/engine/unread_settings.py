"""Settings of a federation that its method does not read: what is done with uploads where there are none, and the like.

A recipe serves many methods, so that a comparison may have such settings for the others' sake: there they are remarks.
A run of the recipe's own method is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    "devices": ("round_timeout", "buffer_size"),
}


def unread_settings(federation: FederationParts) -> list[str]:
    """A line for every setting that was given and that the method does not read."""
    lines = [
        f"{section}.{key} = {shown(getattr(settings, key))} does nothing with method '{federation.method.name}', {why}"
        for section, settings, keys, why in _unread(federation)
        for key in keys
        if getattr(settings, key) != type(settings).model_fields[key].default
    ]
    public = federation.task.public
    if public is not None and public.origin == "other" and not federation.method.requirements.public:
        name = federation.method.name
        lines.append(f"data.public_dataset does nothing with method '{name}', which uses no public data")
    return lines


def _unread(federation: FederationParts) -> Iterator[tuple[str, Settings, Sequence[str], str]]:
    """Sections, their settings, the keys that are not read, and why."""
    method, training = federation.method, federation.training
    other = training.model_copy(update={"local_epochs": training.local_epochs + 1})
    if method.phases(training) == method.phases(other):
        yield "training", training, ["local_epochs"], "whose own hyperparameters say how many epochs clients train"
    privacy = federation.plugin("privacy").settings
    if not has_upload(method):
        for section, keys in _OF_UPLOADS.items():
            yield section, federation.plugin(section).settings, keys, "which uploads nothing"
        if not privacy.max_grad_norm:
            why = "which uploads nothing; it needs privacy.max_grad_norm"
            yield "privacy", privacy, ["noise_multiplier", "target_epsilon"], why
    if not federation.plugin("privacy budget").has_noise:
        why = "as nothing is noised; it needs privacy.noise_multiplier or privacy.upload_noise_multiplier"
        yield "privacy", privacy, ["delta"], why
