"""What a user should know of a federation before round 1, a line each.

Settings that its method does not read are among them: a recipe serves many methods, so that a comparison may have such
settings for the others' sake. A run of the recipe's own method is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from polyfed.core.client import Client
from polyfed.core.settings import Settings
from polyfed.data.classes import remarks as odd_classes
from polyfed.engine.compatibility import common_tensors, listed
from polyfed.engine.plugin import Setup
from polyfed.engine.uploads import has_upload
from polyfed.escaping import clients_text
from polyfed.validation.error_lines import shown

_SHOWN = 4  # architectures, or sets of tensors, that are listed one by one
_LOOKED_AT = 64  # rows of a client, to know how large its inputs are
_LARGE = 100  # where inputs that are standardized, or in [0, 1], are about 1
_OF_UPLOADS = {
    "privacy": ("upload_clip_norm", "upload_noise_multiplier"),
    "robust_aggregation": ("aggregator", "max_magnitude"),
    "adversaries": ("sign_flip_fraction",),
    "secure_sums": ("enabled",),
    "devices": ("round_timeout", "buffer_size"),
}


def all_remarks(setup: Setup) -> list[str]:
    """All of them: whom the method averages with whom, what it says itself, data, and settings that are not read."""
    is_mixed = len(setup.first_of_each_architecture()) > 1
    averaged = averaging(setup) if is_mixed else ""
    of_method = () if setup.method.is_alone else setup.method.remarks(setup.server)
    return [*([averaged] if averaged else []), *of_method, *data_remarks(setup), *unread_settings(setup)]


def averaging(setup: Setup) -> str:
    """Whose networks the method averages whole, and what across architectures; "" where it averages no networks.

    Example: ``averaged: 5 clients of cnn1 whole, 5 of mlp whole; head.weight (640 weights) across all 10``
    """
    method = setup.method
    if method.is_alone or not hasattr(method, "aggregation"):
        return ""
    counts = Counter(client.architecture for client in setup.clients)
    parts = method.requirements.shared_parts
    what = "whole" if parts is None else "in " + " and ".join(parts)
    each = [f"{count} of {architecture} {what}" for architecture, count in counts.items()]
    if len(each) > _SHOWN:
        each = [f"the clients of each of the {len(each)} architectures {what}"]
    else:
        is_one = next(iter(counts.values())) == 1
        each[0] = each[0].replace(" of", " client of" if is_one else " clients of", 1)
    found = ["averaged: " + ", ".join(each)]
    if method.aggregation != "same-shape":
        templates = {one: method.personal_model(setup.model_factory.module(one, alone=True)) for one in counts}
        groups = common_tensors(templates, parts)
        for architectures, tensors in list(groups.items())[:_SHOWN]:
            number = sum(counts[architecture] for architecture in architectures)
            who = f"all {number}" if number == len(setup.clients) else f"{number} of {', '.join(architectures)}"
            found.append(f"{listed(tensors)} across {who}")
        if len(groups) > _SHOWN:
            found.append(f"{len(groups) - _SHOWN} further sets of tensors across others")
        if not groups and len(counts) > 1:
            found.append("nothing across architectures")
    return "; ".join(found)


def data_remarks(setup: Setup) -> list[str]:
    """Who is held out, and what is odd about classes (`polyfed.data.classes`) and the size of inputs."""
    clients = setup.clients
    held_out = clients_text(setup.held_out, [client.name for client in clients])
    lines = [f"held out of training: clients {held_out}"] if setup.held_out else []
    if setup.clients_are_elsewhere:
        return lines
    trained = {label for client in clients for label in client.data.train.y.unique().tolist()}
    sides = {id(client.data.test): client.data.test for client in clients}  # a shared one is looked at once
    tested = {label for side in sides.values() for label in side.y.unique().tolist()}
    odd = odd_classes(list(setup.task.class_names or ()), trained, tested)
    return [*lines, *odd, *_large_inputs(clients)]


def _large_inputs(clients: Sequence[Client]) -> list[str]:
    """A line on clients whose networks get numbers that are far from 0, by some of their rows."""
    sizes = {}
    for client in clients:
        x = client.prepare(client.data.train.x[:_LOOKED_AT])
        if x.is_floating_point() and (size := float(x.abs().median())) > _LARGE:
            sizes[client.id] = size
    if not sizes:
        return []
    first, size = next(iter(sizes.items()))
    more = f" (of {len(sizes)} such clients)" if len(sizes) > 1 else ""
    return [
        f"inputs are far from 0: those of {clients[first].title}{more} have a median size of {size:.4g}; networks "
        "learn best from inputs standardized to a mean of 0 and a deviation of 1"
    ]


def unread_settings(setup: Setup) -> list[str]:
    """A line for every setting that was given and that the method does not read."""
    lines = [
        f"{section}.{key} = {shown(getattr(settings, key))} does nothing with method '{setup.method.name}', {why}"
        for section, settings, keys, why in _unread(setup)
        for key in keys
        if getattr(settings, key) != type(settings).model_fields[key].default
    ]
    public = setup.task.public
    if public is not None and public.origin == "other" and not setup.method.requirements.public:
        name = setup.method.name
        lines.append(f"data.public_dataset does nothing with method '{name}', which uses no public data")
    return lines


def _unread(setup: Setup) -> Iterator[tuple[str, Settings, Sequence[str], str]]:
    """Sections, their settings, the keys that are not read, and why."""
    method, training = setup.method, setup.training
    plugins: dict[str, Any] = {plugin.name: plugin for plugin in setup.plugins}
    other = training.model_copy(update={"local_epochs": training.local_epochs + 1})
    if method.phases(training) == method.phases(other):
        yield "training", training, ["local_epochs"], "whose own hyperparameters say how many epochs clients train"
    privacy = plugins["privacy"].settings
    if not has_upload(method):
        for section, keys in _OF_UPLOADS.items():
            yield section, plugins[section].settings, keys, "which uploads nothing"
        if not privacy.max_grad_norm:
            why = "which uploads nothing; it needs privacy.max_grad_norm"
            yield "privacy", privacy, ["noise_multiplier", "target_epsilon"], why
    if not plugins["privacy"].has_noise:
        why = "as nothing is noised; it needs privacy.noise_multiplier or privacy.upload_noise_multiplier"
        yield "privacy", privacy, ["delta"], why
