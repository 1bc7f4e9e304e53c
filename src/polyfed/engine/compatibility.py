"""Whether these models and data can carry this method: asked before round 1; all that does not is told."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from polyfed.core.client import Client, PublicData
from polyfed.core.method import Method, Requirements
from polyfed.core.model_factory import BY_SIZE, ModelFactory
from polyfed.core.modules import as_split_model, float_state
from polyfed.engine import network_checks
from polyfed.engine.averaging_summary import listed, only_heads_shared
from polyfed.engine.trial_passes import check_parameters, example_input, try_network, try_row
from polyfed.errors import ConfigError, ConfigErrors, MissingPackage, PolyfedError
from polyfed.functional.feature_pooling import layout
from polyfed.functional.modes import eval_mode
from polyfed.functional.tied_tensors import call_with
from polyfed.models.split import SplitModel, cut_shapes
from polyfed.registry import suggest


class IncompatibleError(ConfigErrors):
    """Models or data do not fit the method."""


def check_compatibility(
    method: Method, clients: Sequence[Client], model_factory: ModelFactory, public: PublicData | None
) -> None:
    """Check every architecture against its clients' data and against `method.requirements`.

    Raises:
        Unfit: all that does not fit, each with the client, both sides and what to do.
    """
    first = {client.architecture: client for client in reversed(clients)}
    problems: list[str] = []
    templates = _working(method, model_factory, clients, problems)
    for question in _questions(method, clients, model_factory, public, templates, first):
        try:
            question()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise IncompatibleError(problems)


def _working(
    method: Method, model_factory: ModelFactory, clients: Sequence[Client], problems: list[str]
) -> dict[str, nn.Module]:
    """The networks that can be made and take their clients' data, in the order of these; why not, of the others."""
    templates = {}
    for architecture in dict.fromkeys(client.architecture for client in clients):
        owners = [client for client in clients if client.architecture == architecture]
        try:
            module = model_factory.module(architecture, alone=True)
            check_parameters(module, owners[0].title_with_network)
            module = module if model_factory.together else method.personal_model(module)
            try_network(owners, module)
        except MissingPackage:
            raise
        except ConfigError as error:
            problems.append(str(error))
        else:
            templates[architecture] = module
    return templates


def _questions(
    method: Method,
    clients: Sequence[Client],
    model_factory: ModelFactory,
    public: PublicData | None,
    templates: Mapping[str, nn.Module],
    first: Mapping[str, Client],
) -> Iterator[Callable[[], None]]:
    """What is to be asked of data, settings and the networks that work, one after the other."""
    needs = method.requirements
    name = method.display_name
    yield lambda: _check_classes(name, needs, clients)
    yield lambda: _check_public(name, needs, public)
    yield lambda: _check_inputs(name, needs, clients, public)
    yield lambda: _check_images(name, needs, clients)
    yield lambda: _check_rounds(name, needs, clients[0].training.rounds)
    yield lambda: _check_validation(name, needs, clients)
    yield from _questions_of_networks(needs, model_factory, templates, first)
    if needs.split_model or needs.same_feature_dim or needs.same_head or needs.linear_head or needs.same_cut_shapes:
        whole = [architecture for architecture, module in templates.items() if not isinstance(module, SplitModel)]
        yield from (functools.partial(_refuse_whole, name, first[a], templates[a]) for a in whole)
        templates = {architecture: module for architecture, module in templates.items() if architecture not in whole}
    yield from _questions_of_parts(name, needs, templates, first)
    if needs.shared_shapes:
        yield lambda: _check_nested(name, needs, templates, first)
    if needs.more_than_head:
        yield lambda: _check_more_than_head(name, needs, templates, clients)
    if needs.twice_differentiable:
        yield lambda: _check_second_derivatives(name, needs, templates, first)
    if model_factory.auxiliary_model and templates:
        yield lambda: _check_together(method, model_factory, {a: first[a] for a in templates})


def _questions_of_networks(
    needs: Requirements, model_factory: ModelFactory, templates: Mapping[str, nn.Module], first: Mapping[str, Client]
) -> Iterator[Callable[[], None]]:
    """What is to be asked of the tensors and the state of every client's own network."""
    for architecture, template in templates.items():
        client = first[architecture]
        build = functools.partial(model_factory.build_raw, architecture)
        yield functools.partial(network_checks.check_memory, client, template if client.given is None else client.given)
        yield functools.partial(network_checks.check_state, client, template, build)
        if needs.split_model and isinstance(template, SplitModel):
            yield functools.partial(network_checks.check_parts, client, template)


def _questions_of_parts(
    name: str, needs: Requirements, templates: Mapping[str, nn.Module], first: Mapping[str, Client]
) -> Iterator[Callable[[], None]]:
    """What is to be asked of the networks' heads, widths and cuts."""
    if needs.linear_head:
        yield lambda: _check_linear(name, templates, first)
    for needed, what, facts in (
        (needs.same_architecture, "one architecture for all clients", {a: a for a in templates}),
        (needs.same_feature_dim, "one feature width for all clients", _facts(templates, _feature_dim)),
        (needs.same_head, "heads with the same tensors", _facts(templates, _head)),
    ):
        if needed:
            yield functools.partial(_check_equal, name, needs, what, facts, first)
    if needs.same_cut_shapes:
        what, cut = "equally shaped cuts (into and out of the intermediate part)", _cut_shapes
        yield lambda: _check_equal(name, needs, what, {a: cut(first[a], m) for a, m in templates.items()}, first)
    if needs.gridlike_cuts:
        for architecture, module in templates.items():
            yield functools.partial(_check_grid, name, first[architecture], module)


def _refuse_whole(name: str, client: Client, module: nn.Module) -> None:
    raise ConfigError(
        f"{name} needs split models; {client.title_with_network} is a plain "
        f"{type(module).__name__}; split it with polyfed.split(module, head=..., extractor=...)"
    )


def check_auxiliary_model(method: Method, known: Collection[str]) -> None:
    """Check that the auxiliary model that a method names can be built.

    Raises:
        ConfigError: it is not.
    """
    wanted = method.auxiliary_model
    if wanted is not None and wanted.network not in (*BY_SIZE, *known):
        raise ConfigError(
            f"{method.display_name}: expected 'smallest', 'largest' or a network that can be built "
            f"as auxiliary model, got '{wanted.network}'{suggest(wanted.network, [*BY_SIZE, *known])}"
        )


def _check_together(method: Method, model_factory: ModelFactory, first: Mapping[str, Client]) -> None:
    """Check that the auxiliary model takes every client's inputs, and that the joined networks give scores."""
    name = method.display_name
    auxiliary = model_factory.auxiliary_model
    who = f"the auxiliary model '{auxiliary}'"
    try:
        module = model_factory.module(auxiliary, alone=True)
    except PolyfedError:
        raise
    except Exception as error:  # the builder may be the user's
        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        raise ConfigError(f"{who} cannot be built: {reason}") from error
    if method.requirements.split_model and not isinstance(module, SplitModel):
        raise ConfigError(
            f"{name} needs split models; {who} is a plain {type(module).__name__}; split it with polyfed.split(module, "
            f"head=..., extractor=...)"
        )
    theirs = model_factory.module(next(iter(first)), alone=True)
    if (
        method.requirements.same_head
        and isinstance(theirs, SplitModel)
        and _head(as_split_model(module)) != _head(theirs)
    ):
        raise ConfigError(
            f"{name} needs heads with the same tensors; {who} gives {_head(as_split_model(module))}, "
            f"the clients' networks {_head(theirs)}"
            + (f"; {method.requirements.hint}" if method.requirements.hint else "")
        )
    for client in first.values():
        try_row(client, module, who)
    if not model_factory.together:
        return
    for architecture, client in first.items():
        try_row(client, method.personal_model(model_factory.module(architecture)))


def _few(names: Sequence[str]) -> str:
    """The first names."""
    return ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])


def _check_classes(name: str, needs: Requirements, clients: Sequence[Client]) -> None:
    """Whether labels are what the method is made for."""
    if needs.classes and not clients[0].classes:
        raise ConfigError(
            f"{name} needs classes as labels, as {needs.classes}; got numbers to predict (regression); "
            "`polyfed methods --compatible-with RECIPE` lists methods that take them"
        )
    first = clients[0]
    reason = needs.classes or needs.shared_outputs
    for client in clients:
        if reason and client.class_names != first.class_names:
            raise ConfigError(
                f"{name} needs the same classes at all clients, as {reason}; {client.title} has "
                f"{_few(client.class_names)}, {first.title} {_few(first.class_names)}; use fedhenn, or fedrep, "
                "which averages extractors alone"
            )


def _check_public(name: str, needs: Requirements, public: PublicData | None) -> None:
    fits = public is not None and needs.public_origin in ("", public.origin)
    held = len(public) if public is not None and fits else 0
    if held < needs.public:
        other = needs.public_origin == "other"
        rows = "inputs of another data set" if other else "rows that everybody may see"
        kind = "" if public is None or fits else f" (and {len(public)} of the kind '{public.origin}')"
        place = "name one as data.public_dataset, with" if other else "set data.holdout to"
        raise ConfigError(
            f"{name} needs {needs.public} {rows}, got {held}{kind}; {place} at least {needs.public} (for every method "
            f"that is compared alike), or ask the method for fewer; in Python give public=polyfed.PublicData(...)"
        )


def _check_inputs(name: str, needs: Requirements, clients: Sequence[Client], public: PublicData | None) -> None:
    inputs = {client.title: client.data.train.x for client in clients}
    if needs.public and public is not None:
        inputs["what everybody may see"] = public.samples.x
    kinds = {owner: f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}" for owner, x in inputs.items()}
    first = next(iter(kinds))
    for owner, kind in kinds.items():
        if needs.same_input_shape and kind != kinds[first]:
            raise ConfigError(
                f"{name} needs stored inputs of one shape and type; {owner} has {kind}, {first} {kinds[first]}"
            )


def _check_images(name: str, needs: Requirements, clients: Sequence[Client]) -> None:
    if not needs.images:
        return
    for client in clients:
        x = client.prepare(client.data.train.x[:1])
        if x.dim() != 4 or not x.is_floating_point():
            found = f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"
            raise ConfigError(f"{name} needs images, inputs (C, H, W) of floats; {client.title} has {found}")


def _check_validation(name: str, needs: Requirements, clients: Sequence[Client]) -> None:
    without = [client.title for client in clients if not len(client.data.validation)]
    if needs.validation and without:
        raise ConfigError(
            f"{name} needs validation rows at every client, {without[0]} has none; give data.split a validation "
            f"part ('8:1:1', 'official:9:1')"
        )


def _check_rounds(name: str, needs: Requirements, rounds: int) -> None:
    if needs.warmup >= rounds:
        raise ConfigError(
            f"{name} warms up for {needs.warmup} rounds, in which nobody trains, and needs more than these; got "
            f"training.rounds = {rounds}; raise it, or lower the method's warm-up"
        )


def _check_second_derivatives(
    name: str, needs: Requirements, templates: Mapping[str, nn.Module], first: Mapping[str, Client]
) -> None:
    for architecture, module in templates.items():
        w = {n: p.detach().requires_grad_() for n, p in module.named_parameters() if p.requires_grad}
        try:
            with eval_mode(module):
                scores = call_with(module, w, (example_input(first[architecture], module),))
            grads = torch.autograd.grad(scores.square().sum(), tuple(w.values()), create_graph=True, allow_unused=True)
            # backward reaches every node, also those that only raise; grad would pass them by, and give too little
            torch.stack([g.square().sum() for g in grads if g is not None]).sum().backward()
        except RuntimeError as error:
            raise ConfigError(
                f"{name} needs networks with second derivatives; {first[architecture].title_with_network} "
                f"has none: {str(error).splitlines()[0]}" + (f"; {needs.hint}" if needs.hint else "")
            ) from error


def _check_linear(name: str, templates: Mapping[str, nn.Module], first: Mapping[str, Client]) -> None:
    for architecture, module in templates.items():
        head = as_split_model(module).head
        who = first[architecture].title_with_network
        if not isinstance(head, nn.Linear) or head.bias is None:
            raise ConfigError(
                f"{name} needs a head that is one linear layer with a bias; {who} has {type(head).__name__}"
            )
        if head.state_dict().keys() != {"weight", "bias"}:  # by a parametrization, or as older PyTorch did it
            raise ConfigError(
                f"{name} needs a head whose tensors are a weight and a bias; {who} has one with a parametrization "
                f"(weight_norm, spectral_norm), whose tensors are {', '.join(head.state_dict())}"
            )


def _check_equal(
    name: str, needs: Requirements, what: str, facts: Mapping[str, Any], first: Mapping[str, Client]
) -> None:
    """All architectures must give the same fact; the message names the first client and the first that differs."""
    ordered = sorted(facts, key=lambda architecture: first[architecture].id)
    for other in ordered[1:]:
        if facts[other] != facts[ordered[0]]:
            a = first[other]
            b = first[ordered[0]]
            raise ConfigError(
                f"{name} needs {what}; {a.title_with_network} gives {facts[other]}, {b.title_with_network} "
                f"gives {facts[ordered[0]]}" + (f"; {needs.hint}" if needs.hint else "")
            )


def _check_grid(name: str, client: Client, module: nn.Module) -> None:
    into, _ = cut_shapes(as_split_model(module), example_input(client, module))
    try:
        layout(into)
    except ValueError as error:
        what = f"what enters the intermediate part of {client.title_with_network}"
        raise ConfigError(f"{name} cannot project {what}: {error}") from None


def _check_nested(
    name: str, needs: Requirements, templates: Mapping[str, nn.Module], first: Mapping[str, Client]
) -> None:
    known: dict[str, tuple[tuple[int, ...], str]] = {}
    for architecture in sorted(templates, key=lambda a: first[a].id):
        for tensor_name, tensor in float_state(templates[architecture], parts=needs.shared_parts).items():
            shape, owner = known.setdefault(tensor_name, (tuple(tensor.shape), architecture))
            if shape != tuple(tensor.shape):
                facts = {architecture: f"'{tensor_name}' {tuple(tensor.shape)}", owner: f"'{tensor_name}' {shape}"}
                _check_equal(name, needs, "tensors of one name to have one shape", facts, first)


def _check_more_than_head(
    name: str, needs: Requirements, templates: Mapping[str, nn.Module], clients: Sequence[Client]
) -> None:
    """Averaging by name is meant for networks of one family: among others a head alone would be averaged."""
    lonely = only_heads_shared({a: templates[a] for a in (client.architecture for client in clients) if a in templates})
    if not lonely:
        return
    first = next(client for client in clients if client.architecture in lonely)
    what = lonely[first.architecture]
    raise ConfigError(
        f"{name} would average nothing but the head ({listed(what)}) of {first.title_with_network} "
        f"with clients of other architectures; {needs.hint}, or 'by-name' if that is meant"
    )


def _facts(templates: Mapping[str, nn.Module], fact: Any) -> dict[str, Any]:
    return {architecture: fact(module) for architecture, module in templates.items() if isinstance(module, SplitModel)}


def _feature_dim(model: SplitModel) -> int:
    return model.feature_dim


def _head(model: SplitModel) -> str:
    return ", ".join(f"{name} {tuple(t.shape)}" for name, t in model.head.state_dict().items())


def _cut_shapes(client: Client, module: nn.Module) -> str:
    assert isinstance(module, SplitModel)
    into, out = cut_shapes(module, example_input(client, module))
    return f"{tuple(into)} and {tuple(out)}"
