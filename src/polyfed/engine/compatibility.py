"""Whether these models and data can carry this method, by trial before round 1; all that does not fit is listed."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polyfed.core.client import Client, PublicData
from polyfed.core.frozen_network import frozen_beside
from polyfed.core.method import Method
from polyfed.core.model_factory import BY_SIZE, ModelFactory
from polyfed.core.modules import as_split_model, copy_network, float_state
from polyfed.core.randomness import global_draws, seeded_global_rng
from polyfed.data.samples import LabeledSamples
from polyfed.engine import network_checks
from polyfed.errors import ConfigError, ConfigErrors, MissingPackage, PolyfedError, described, first_line, kind_and_line
from polyfed.functional.feature_pooling import layout
from polyfed.functional.modes import eval_mode, has_batchnorm
from polyfed.models.split import Part, SplitModel, cut_shapes
from polyfed.registry import suggest
from polyfed.units import human_count

_NAMED = 2  # tensors that are listed by name
_ROUNDED = 1e-3  # from 1


class IncompatibleError(ConfigErrors):
    """Models or data do not fit the method."""


def check_compatibility(
    method: Method, clients: Sequence[Client], model_factory: ModelFactory, public: PublicData | None
) -> None:
    """Check every architecture against its clients' data and against `method.requirements`.

    Raises:
        IncompatibleError: all that does not fit, each with the client, both sides and what to do.
    """
    checks = _Checks(method, clients, model_factory, public)
    checks.run()
    if checks.problems:
        raise IncompatibleError(checks.problems)


def check_auxiliary_model(method: Method, known: Collection[str]) -> None:
    """Check that the auxiliary model that a method names can be built.

    Raises:
        ConfigError: it is not.
    """
    wanted = method.auxiliary_model
    if wanted is not None and not {wanted.network, wanted.architecture} & {*BY_SIZE, *known}:
        raise ConfigError(
            f"{method.name}: expected 'smallest', 'largest' or a network that can be built "
            f"as auxiliary model, got '{wanted.network}'{suggest(wanted.network, [*BY_SIZE, *known])}"
        )


class _Checks:
    """The checks of a method, its clients' data and their networks.

    Attributes:
        first: architecture -> its first client. templates: architecture -> its network, of those that work; later
        checks need split ones. problems: so far.
    """

    def __init__(
        self, method: Method, clients: Sequence[Client], model_factory: ModelFactory, public: PublicData | None
    ) -> None:
        self.method = method
        self.name = method.name
        self.needs = method.requirements
        self._hint = f"; {self.needs.hint}" if self.needs.hint else ""
        self.clients = clients
        self.model_factory = model_factory
        self.public = public
        self.first = {client.architecture: client for client in reversed(clients)}
        self.templates: dict[str, nn.Module] = {}
        self.problems: list[str] = []

    def run(self) -> None:
        """Every check, in order; those of networks concern the ones that passed the trial."""
        owners: dict[str, list[Client]] = {}
        for client in self.clients:
            owners.setdefault(client.architecture, []).append(client)
        for own in owners.values():
            self._note(self._try, own)
        self._note(self._check_classes)
        self._note(self._check_public)
        self._note(self._check_inputs)
        self._note(self._check_columns)
        self._note(self._check_validation)
        for architecture in list(self.templates):
            self._note(self._check_own, architecture)
        self._check_networks()

    def _check_networks(self) -> None:
        needs = self.needs
        beside = self.model_factory.frozen_network
        if needs.split_model or needs.same_feature_dim or needs.same_head or needs.linear_head or needs.same_cut_shapes:
            for architecture, module in self.templates.items():
                self._note(self._need_split, module, self.first[architecture].title_with_network)
            self.templates = {name: one for name, one in self.templates.items() if isinstance(one, SplitModel)}
        if needs.linear_head:
            self._note(self._check_linear)
        if needs.same_architecture:
            self._note(self._check_equal, "one architecture for all clients", {name: name for name in self.templates})
        if needs.same_feature_dim:
            self._note(
                self._check_equal, "one feature width for all clients", self._facts(lambda model: model.feature_dim)
            )
        if needs.same_head:
            self._note(self._check_equal, "heads with the same tensors", self._facts(_head))
        for needed, check in (
            (needs.same_cut_shapes, self._check_cuts),
            (needs.gridlike_cuts, self._check_grids),
            (needs.shared_shapes, self._check_nested),
            (needs.more_than_head, self._check_more_than_head),
            (self.model_factory.auxiliary_model and not beside and self.templates, self._check_auxiliary),
            (beside and self.templates, self._check_map),
        ):
            if needed:
                self._note(check)

    def _note(self, check: Callable[..., None], *arguments: Any) -> None:
        try:
            check(*arguments)
        except MissingPackage:
            raise
        except ConfigError as error:
            self.problems.append(str(error))

    def _try(self, owners: Sequence[Client]) -> None:
        """Whether the network of some clients can be made and takes their data."""
        architecture = owners[0].architecture
        module = self.model_factory.module(architecture, alone=True)
        check_parameters(module, owners[0].title_with_network)
        module = module if self.model_factory.together else self.method.personal_model(module)
        try_network(owners, module)
        self.templates[architecture] = module

    # data and settings ------------------------------------------------------------------------------------------------

    def _check_classes(self) -> None:
        needs = self.needs
        first = self.clients[0]
        if needs.classes and not first.classes:
            raise ConfigError(
                f"{self.name} needs classes as labels, as {needs.classes}; got numbers to predict (regression); "
                "`polyfed check RECIPE --methods all` lists methods that take them"
            )
        reason = needs.classes or needs.shared_outputs
        for client in self.clients:
            if reason and client.class_names != first.class_names:
                raise ConfigError(
                    f"{self.name} needs the same classes at all clients, as {reason}; {client.title} has "
                    f"{_few(client.class_names)}, {first.title} {_few(first.class_names)}; use fedhenn, or fedrep, "
                    "which averages extractors alone"
                )

    def _check_public(self) -> None:
        needs, public = self.needs, self.public
        fits = public is not None and needs.public_origin in ("", public.origin)
        held = len(public) if public is not None and fits else 0
        if held < needs.public:
            other = needs.public_origin == "other"
            rows = human_count(needs.public, "input" if other else "public row") + other * " of another data set"
            kind = "" if public is None or fits else f" (and {len(public)} of the kind '{public.origin}')"
            place = "name one as data.public_dataset, with" if other else "set data.holdout to"
            raise ConfigError(
                f"{self.name} needs {rows}, got {held}{kind}; {place} at least {needs.public} (the same for every "
                "method that is compared), or ask the method for fewer; in Python give public=polyfed.PublicData(...)"
            )

    def _check_inputs(self) -> None:
        if self.needs.same_input_shape:
            inputs = {client.title: client.data.train.x for client in self.clients}
            if self.needs.public and self.public is not None:
                inputs["what everybody may see"] = self.public.samples.x
            kinds = {owner: _kind(x) for owner, x in inputs.items()}
            first = next(iter(kinds))
            for owner, kind in kinds.items():
                if kind != kinds[first]:
                    raise ConfigError(
                        f"{self.name} needs stored inputs of one shape and type; {owner} has {kind}, {first} "
                        f"{kinds[first]}"
                    )

    def _check_columns(self) -> None:
        """Where clients' tables have different columns, networks must not share what reads them."""
        needs = self.needs
        is_shared = needs.same_columns or needs.same_input_shape or needs.same_architecture
        if not (is_shared or self.method.auxiliary_model is not None):
            return
        first = self.clients[0]
        for client in self.clients:
            if client.columns is not None and first.columns is not None and client.columns.names != first.columns.names:
                raise ConfigError(
                    f"{self.name} needs the same columns at all clients; {client.title} has "
                    f"{_few(client.columns.names)}, {first.title} {_few(first.columns.names)}; "
                    "closed-form-columns, fedgh, fedproto and fd need not"
                )

    def _check_validation(self) -> None:
        without = [client.title for client in self.clients if not len(client.data.validation)]
        if self.needs.validation and without:
            raise ConfigError(
                f"{self.name} needs validation rows at every client, {without[0]} has none; give data.split a "
                "validation part ('8:1:1', 'official:9:1')"
            )

    # networks ---------------------------------------------------------------------------------------------------------

    def _check_own(self, architecture: str) -> None:
        """Whether the tensors and the state of a client's own network can be copied and trained elsewhere."""
        client = self.first[architecture]
        template = self.templates[architecture]
        network_checks.check_memory(client, template if client.given is None else client.given)
        build = functools.partial(self.model_factory.build_raw, architecture)
        network_checks.check_state(client, template, build)
        if self.needs.split_model and isinstance(template, SplitModel):
            network_checks.check_parts(client, template)

    def _need_split(self, module: nn.Module, who: str) -> None:
        if not isinstance(module, SplitModel):
            raise ConfigError(
                f"{self.name} needs split models; {who} is a plain {type(module).__name__}; split it with "
                "polyfed.split(module, head=..., extractor=...)"
            )

    def _check_linear(self) -> None:
        for architecture, module in self.templates.items():
            head = as_split_model(module).head
            who = self.first[architecture].title_with_network
            if not isinstance(head, nn.Linear) or head.bias is None:
                raise ConfigError(
                    f"{self.name} needs a head that is one linear layer with a bias; {who} has {type(head).__name__}"
                )
            if head.state_dict().keys() != {"weight", "bias"}:  # by a parametrization, or as older PyTorch did it
                raise ConfigError(
                    f"{self.name} needs a head whose tensors are a weight and a bias; {who} has one with a "
                    f"parametrization (weight_norm, spectral_norm), whose tensors are {', '.join(head.state_dict())}"
                )

    def _check_equal(self, what: str, facts: Mapping[str, Any]) -> None:
        """All architectures must give the same fact; the message names the first client and the first that differs."""
        ordered = sorted(facts, key=lambda architecture: self.first[architecture].id)
        for other in ordered[1:]:
            if facts[other] != facts[ordered[0]]:
                a = self.first[other]
                b = self.first[ordered[0]]
                raise ConfigError(
                    f"{self.name} needs {what}; {a.title_with_network} gives {facts[other]}, {b.title_with_network} "
                    f"gives {facts[ordered[0]]}{self._hint}"
                )

    def _facts(self, fact: Callable[[SplitModel], Any]) -> dict[str, Any]:
        return {name: fact(module) for name, module in self.templates.items() if isinstance(module, SplitModel)}

    def _check_cuts(self) -> None:
        shapes = {name: f"{tuple(into)} and {tuple(out)}" for name, (into, out) in self._cuts().items()}
        self._check_equal("equally shaped cuts (into and out of the intermediate part)", shapes)

    def _check_grids(self) -> None:
        for architecture, (into, _) in self._cuts().items():
            try:
                layout(into)
            except ValueError as error:
                what = f"what enters the intermediate part of {self.first[architecture].title_with_network}"
                raise ConfigError(f"{self.name} cannot project {what}: {error}") from None

    def _cuts(self) -> dict[str, tuple[torch.Size, torch.Size]]:
        """Architecture -> the shapes of what enters and leaves the intermediate part."""
        return {
            name: cut_shapes(as_split_model(module), example_input(self.first[name], module))
            for name, module in self.templates.items()
        }

    def _check_nested(self) -> None:
        shapes: dict[str, dict[str, str]] = {}
        for architecture, module in self.templates.items():
            for name, tensor in float_state(module, parts=self.needs.shared_parts).items():
                shapes.setdefault(name, {})[architecture] = f"'{name}' {tuple(tensor.shape)}"
        for facts in shapes.values():
            self._check_equal("tensors of one name to have one shape", facts)

    def _check_more_than_head(self) -> None:
        """Averaging by name is meant for networks of one family: among others a head alone would be averaged."""
        groups = common_tensors(self.templates, None)
        for architecture, module in self.templates.items():
            found = [tensors for owners, tensors in groups.items() if architecture in owners]
            common = {name: tensor for tensors in found for name, tensor in tensors.items()}
            if common and common.keys() <= _head_names(module):
                raise ConfigError(
                    f"{self.name} would average nothing but the head ({listed(common)}) of "
                    f"{self.first[architecture].title_with_network} with clients of other architectures; "
                    f"{self.needs.hint}"
                )

    def _check_map(self) -> None:
        """Check that the network that nobody trains gives features of every client's inputs."""
        for architecture, module in self.templates.items():
            beside = frozen_beside(module)
            assert beside is not None
            beside.count_features(example_input(self.first[architecture], module))

    def _check_auxiliary(self) -> None:
        """Check that the auxiliary model takes every client's inputs, and that the joined networks give scores."""
        auxiliary = self.model_factory.auxiliary_model
        who = f"the auxiliary model '{auxiliary}'"
        try:
            module = self.model_factory.module(auxiliary, alone=True)
        except PolyfedError:
            raise
        except Exception as error:  # the builder may be the user's
            raise ConfigError(f"{who} cannot be built: {kind_and_line(error)}") from error
        if self.needs.split_model:
            self._need_split(module, who)
        theirs = self.model_factory.module(next(iter(self.templates)), alone=True)
        if self.needs.same_head and isinstance(theirs, SplitModel):
            own = _head(as_split_model(module))
            if own != _head(theirs):
                raise ConfigError(
                    f"{self.name} needs heads with the same tensors; {who} gives {own}, the clients' networks "
                    f"{_head(theirs)}{self._hint}"
                )
        for architecture in self.templates:
            client = self.first[architecture]
            row = client.prepare(client.data.train.x[:1])
            _try_prepared(client, module, row, "train", who)
            if self.model_factory.together:
                joined = self.method.personal_model(self.model_factory.module(architecture))
                _try_prepared(client, joined, row, "train", client.title_with_network)


def _few(names: Sequence[str]) -> str:
    return ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape[1:])} {str(x.dtype).removeprefix('torch.')}"


def _head(model: SplitModel) -> str:
    return ", ".join(f"{name} {tuple(t.shape)}" for name, t in model.head.state_dict().items())


# trial passes ---------------------------------------------------------------------------------------------------------


def example_input(client: Client, module: nn.Module) -> Tensor:
    """The client's first training sample as `module` takes it, a batch of one."""
    return client.prepare(client.data.train.x[:1]).to(next(iter(module.parameters())).device)


def check_parameters(module: nn.Module, who: str) -> None:
    """Check that a network has parameters, and that their shapes are known.

    Raises:
        ConfigError: it has not; `who` says whose it is.
    """
    if next(module.parameters(), None) is None:
        raise ConfigError(f"{who}: expected a network with parameters, which are what is trained, got one without any")
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ConfigError(
            f"{who}: expected a network whose layers have shapes, got one with a lazy layer (nn.LazyLinear, ...); "
            "call it once on a batch of its inputs before"
        )
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"{who}: expected parameters that are real, got '{name}', which is complex; "
                "keep its real and imaginary parts, torch.view_as_real(...), as the parameter"
            )


def try_network(clients: Sequence[Client], module: nn.Module) -> None:
    """Pass rows of all kinds that one architecture's clients have, and a training batch; nothing is changed by it.

    Raises:
        ConfigError: the network cannot take some of them; names the client and the side.
    """
    forms = _forms(module)
    with seeded_global_rng(0):  # whatever the user's code draws
        before = global_draws()
        for client, side, row in _tried_rows(clients):
            _try_prepared(client, module, row, side, client.title_with_network)
            _check_forms(module, forms, client)
        if global_draws() != before:
            raise ConfigError(
                f"{clients[0].title_with_network}: expected a network and a preparation that draw nothing in eval "
                "mode, so that equal inputs have equal scores, got random numbers; write F.dropout(x, "
                "training=self.training), say"
            )
        _try_training(clients, module)


def _forms(module: nn.Module) -> dict[str, str]:
    """The shape and type of each of the network's tensors, in words."""
    return {name: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in module.state_dict().items()}


def _check_forms(module: nn.Module, before: Mapping[str, str], client: Client) -> None:
    """Check that a forward has left the network's tensors what they were `before`, but for their values."""
    after = _forms(module)
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, "nothing"), after.get(name, "nothing")
        if old != new:
            raise ConfigError(
                f"{client.title_with_network}: expected a network whose tensors keep their shapes and types, got one "
                f"whose forward turns '{name}' from {old} into {new}; give it its full size in __init__, and write "
                "into it: self.queue[:] = ..."
            )


def _tried_rows(clients: Sequence[Client]) -> list[tuple[Client, str, Tensor]]:
    """A row of every kind (shape and type) that one architecture's clients have, as the network takes it.

    With its client and side. Of ids, which a table may be too short for, it is the row with the largest.
    """
    tried: dict[tuple[torch.Size, torch.dtype], tuple[Client, str, Tensor]] = {}
    for side in ("train", "test", "validation"):
        for client in clients:
            samples = getattr(client.data, side)
            if not len(samples):
                continue
            row = _prepared(client, _telling_row(samples), side)
            known = tried.get((row.shape, row.dtype))
            if known is None or (not row.is_floating_point() and row.max() > known[2].max()):
                tried[row.shape, row.dtype] = (client, side, row)
    return list(tried.values())


def _prepared(client: Client, row: Tensor, side: str) -> Tensor:
    """A stored row as the network takes it; the function may be the user's."""
    what = f"{client.title_with_network}: prepare"
    try:
        prepared: object = client.prepare(row)
    except Exception as error:
        shape = tuple(row.shape[1:])
        raise ConfigError(f"{what} cannot take {side} inputs of shape {shape}: {first_line(error)}") from error
    if not isinstance(prepared, Tensor):
        raise ConfigError(f"{what} should return a tensor, got {described(prepared)} for {side} inputs")
    return prepared


def _telling_row(samples: LabeledSamples) -> Tensor:
    """The stored row with the largest id, (1, ...); of other inputs the first."""
    if samples.x.dtype != torch.int64 or not samples.x[0].numel():
        return samples.x[:1]
    place = int(samples.x.flatten(1).amax(dim=1).argmax())
    return samples.x[place : place + 1]


def _try_prepared(client: Client, module: nn.Module, row: Tensor, side: str, who: str) -> None:
    """Check that a network, in evaluation mode, gives scores for a prepared row of one side of the client's data."""
    what = "inputs" if side == "train" else f"{side} inputs"
    with torch.no_grad(), eval_mode(module):
        _check_scores(client, module, row, what, who)


def _try_training(clients: Sequence[Client], module: nn.Module) -> None:
    """Check that a copy of one architecture's network, in training mode, takes the smallest batch of its clients."""
    needed = 2 if has_batchnorm(module) else 1
    size = clients[0].training.batch_size
    batches = [(rows, one) for one in clients for rows in (min(size, one.n), one.n % size or size) if rows >= needed]
    if size < needed:
        raise ConfigError(
            f"{clients[0].title_with_network} has BatchNorm, which cannot normalize a single row; expected "
            "training.batch_size of at least 2, got 1"
        )
    if not batches:
        return  # nobody trains it: such clients are refused in each round
    rows, client = min(batches, key=lambda batch: batch[0])
    who = client.title_with_network
    x = client.prepare(client.data.train.x[:rows])
    what = f"a batch of {human_count(rows, 'input')}"
    network = copy_network(module, who).train()
    scores = _check_scores(client, network, x, what, f"{who}, in training mode,")
    _check_forms(network, _forms(module), client)
    sources = [source for source in (module, clients[0].given) if source is not None]
    theirs = [parameter for source in sources for parameter in source.parameters() if parameter.requires_grad]
    if scores.requires_grad and any(
        g is not None for g in torch.autograd.grad(scores.sum(), theirs, allow_unused=True)
    ):
        raise ConfigError(
            f"{who}: expected a network whose copy computes with its own parameters, got one whose copy uses the "
            "original's, as where its forward is a function made of the network (net.forward = ...); define forward in "
            "its class"
        )
    sums = scores.detach().sum(dim=1)
    if client.classes > 1 and scores.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=_ROUNDED):
        warnings.warn(
            f"{clients[0].title_with_network} gives probabilities (they are not negative, and each row sums to one), "
            "which losses take for logits, so that it learns little; leave out its last softmax",
            stacklevel=2,
        )


def _check_scores(client: Client, module: nn.Module, x: Tensor, what: str, who: str) -> Tensor:
    """A network's scores (B, C), checked; `who` and `what` say in messages whose it is, and what it was given."""
    try:
        scores = module(x.to(next(module.parameters()).device))
    except Exception as error:  # the network is the user's
        raise ConfigError(f"{who} cannot take {what} of shape {tuple(x.shape[1:])}: {first_line(error)}") from error
    given = f"shape {tuple(scores.shape[1:])}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
    if not client.classes and (not isinstance(scores, Tensor) or scores.shape != (len(x), 1)):
        raise ConfigError(
            f"expected one output per sample, shape (1,), from {who}, as labels are floats, numbers to predict, got "
            f"{given}; write y.long() if they are classes"
        )
    if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[1] < client.classes:
        raise ConfigError(f"expected scores for {client.classes} classes per sample from {who}, got {given}")
    return scores


# tensors that architectures have in common ----------------------------------------------------------------------------


def listed(tensors: Mapping[str, Tensor]) -> str:
    """The names of a few tensors, or how many there are; and of how many weights."""
    names = ", ".join(tensors) if len(tensors) <= _NAMED else f"{len(tensors)} tensors"
    return f"{names} ({sum(tensor.numel() for tensor in tensors.values()):,} weights)"


def common_tensors(
    templates: Mapping[str, nn.Module], parts: Collection[Part] | None
) -> dict[tuple[str, ...], dict[str, Tensor]]:
    """Architectures, at least two, -> what all of these and no others have; most weights first."""
    held = {architecture: float_state(module, parts=parts) for architecture, module in templates.items()}
    groups: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for name, tensor in {name: t for tensors in held.values() for name, t in tensors.items()}.items():
        owners = tuple(architecture for architecture, tensors in held.items() if name in tensors)
        if len(owners) > 1:
            groups.setdefault(owners, {})[name] = tensor
    return dict(sorted(groups.items(), key=lambda group: -sum(t.numel() for t in group[1].values())))


def _head_names(module: nn.Module) -> set[str]:
    """Names of the head's tensors; of a network that is not split, of its last layer's."""
    names = list(float_state(module))
    if isinstance(module, SplitModel):
        return {name for name in names if module.part_of(name) == "head"}
    last = names[-1].rpartition(".")[0] if names else ""
    return {name for name in names if name.rpartition(".")[0] == last}
