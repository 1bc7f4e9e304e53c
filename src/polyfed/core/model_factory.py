"""One template network per (architecture, variant), and the seeded weights from which everybody starts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from polyfed.core.frozen_network import FrozenNetwork, refer_to
from polyfed.core.modules import as_split_model, copy_into, copy_network, redraw
from polyfed.core.randomness import derive_seed, seeded_global_rng
from polyfed.models.split import with_projection

Builder = Callable[[], nn.Module]
Build = Callable[[nn.Module, str], nn.Module]
Beside = Callable[[nn.Module, nn.Module], nn.Module]
BY_SIZE = ("smallest", "largest")
_FROZEN = ", frozen"


@dataclass(frozen=True)
class AuxiliaryModel:
    """One network for the whole federation, in addition to the clients' own.

    network: "smallest" or "largest" of the clients' by the number of parameters, or the name of one that can be built.
    features: width of its representation, by a projection (`models.with_projection`); None: as it is.
    frozen: nobody trains it, and clients compute with its representation (`core.frozen_network`).
    """

    network: str
    features: int | None = None
    frozen: bool = False

    @property
    def architecture(self) -> str:
        """Its name among the architectures; another one where it is frozen, as it is then built in another way."""
        return f"{self.network}{_FROZEN}" if self.frozen else self.network


def is_frozen(architecture: str) -> bool:
    """Whether an architecture is one that nobody trains."""
    return architecture.endswith(_FROZEN)


def with_classes(network: str, classes: int) -> str:
    """The name of an architecture with so many outputs, where clients have label spaces of their own."""
    return f"{network}, {classes} classes"


def with_columns(network: str, columns: Sequence[str]) -> str:
    """The name of an architecture that reads these columns of a table, where clients have different ones."""
    digest = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
    return f"{network}, columns {digest[:8]}"


def network_of(architecture: str) -> str:
    """The network's name in it.

    >>> network_of(with_classes("resnet18", 3)), network_of("resnet18")
    ('resnet18', 'resnet18')
    """
    return re.sub(r", (\d+ classes|columns [0-9a-f]{8})$", "", architecture).removesuffix(_FROZEN)


class ModelFactory:
    """Builds networks by architecture name, as the method wants them.

    Args:
        builders: architecture name -> a function that makes a new network of it.
        build: turns a client's network and a variant's name into the network that is trained (`Method.build`).
        seed: the run's seed. device: where the templates live.
        auxiliary: the method's auxiliary model. others: builders that it may name, in addition to `builders`.
        beside: joins a client's network and the auxiliary model (`Method.join_models`); None: clients train their own
        only.
        blank: clients' own networks begin as zeros (`Method.ignores_initial_weights`), which spares drawing their
        weights.
        common: "head": the heads of clients' own networks begin alike; "all": all clients of an architecture do
        (`Method.common_start`).

    Attributes:
        auxiliary_model: the auxiliary model's architecture, "" without one.
        chosen: the auxiliary model with its network's name ("smallest" and "largest" resolved).
        frozen_network: the auxiliary model, where nobody trains it; else None.
    """

    def __init__(
        self,
        builders: Mapping[str, Builder],
        build: Build,
        seed: int,
        device: torch.device,
        auxiliary: AuxiliaryModel | None = None,
        beside: Beside | None = None,
        others: Mapping[str, Builder] | None = None,
        blank: bool = False,
        common: Literal["nothing", "head", "all"] = "nothing",
    ) -> None:
        self.builders = dict(builders)
        self._build = build
        self._seed = seed
        self.device = device
        self._blank = blank
        self._common = common
        self._heads: dict[str, dict[str, Tensor]] = {}  # with which an architecture's clients begin, if alike
        self._templates: dict[tuple[str, str, bool], nn.Module] = {}
        self._buffers: dict[tuple[str, str, bool], dict[str, Tensor]] = {}  # the templates', as they were made
        self._beside = None if auxiliary is None else beside
        self.frozen_network: FrozenNetwork | None = None
        self.chosen = None if auxiliary is None else replace(auxiliary, network=self._named(auxiliary))
        self.auxiliary_model = "" if self.chosen is None else self._admit(self.chosen, others or {})
        if self.chosen is not None and self.chosen.frozen:
            made = self._make(self.auxiliary_model, "", self.auxiliary_model, None, alone=True)
            self.frozen_network = FrozenNetwork(made.to(device), self.chosen.network)

    @property
    def together(self) -> bool:
        """Whether what clients train is more than their own network."""
        return self._beside is not None

    def _named(self, auxiliary: AuxiliaryModel) -> str:
        """The network's name; of two of one size, the first's."""
        network = auxiliary.network
        if auxiliary.frozen or network not in BY_SIZE:
            return network
        sizes = {a: sum(p.numel() for p in self.module(a, alone=True).parameters()) for a in self.builders}
        choose = min if network == "smallest" else max
        return choose(sizes, key=sizes.__getitem__)

    def _admit(self, auxiliary: AuxiliaryModel, others: Mapping[str, Builder]) -> str:
        """Register the auxiliary model as an architecture; returns the architecture's name."""
        name, features = auxiliary.architecture, auxiliary.features
        builder = self.builders.get(name) or others.get(name) or others[auxiliary.network]
        if features is not None:
            name = f"{name}, {features} features"
            self.builders[name] = lambda: with_projection(as_split_model(builder()), features)
        else:
            self.builders[name] = builder
        return name

    def _make(
        self, architecture: str, variant: str, owner: str | int, given: nn.Module | None, alone: bool
    ) -> nn.Module:
        with seeded_global_rng(derive_seed(self._seed, "weights", owner)):
            model = self.builders[architecture]() if given is None else copy_network(given, f"client {owner}")
        model = model.cpu()  # where everything begins; a user's network may lie on the device already
        if is_frozen(architecture):
            return model
        with seeded_global_rng(derive_seed(self._seed, "build", owner)):
            network = self._build(model, variant)
        if self._common == "head" and isinstance(owner, int):
            as_split_model(network).head.load_state_dict(self._first_head(architecture, redrawn=given is None))
        if alone or self._beside is None:
            return network
        auxiliary = self._make(self.auxiliary_model, "", self.auxiliary_model, None, alone=True)
        with seeded_global_rng(derive_seed(self._seed, "beside", owner)):
            return self._beside(network, auxiliary)

    def _first_head(self, architecture: str, redrawn: bool) -> dict[str, Tensor]:
        """The head with which an architecture's clients begin: that of `initial_state` without an owner.

        redrawn: its layers are drawn once more, by a stream that knows no architecture. So heads of the same layers are
            the same everywhere, and nobody builds another's network to know its head.
        """
        if architecture not in self._heads:
            head = as_split_model(self._make(architecture, "", architecture, None, alone=True)).head
            if redrawn:
                with seeded_global_rng(derive_seed(self._seed, "weights", "head")):
                    redraw(head)
            self._heads[architecture] = dict(head.state_dict())
        return self._heads[architecture]

    def module(self, architecture: str, variant: str = "", alone: bool = False) -> nn.Module:
        """The shared network of this kind, `alone` without the auxiliary model; load weights before use."""
        key = (architecture, variant, alone and self.together)
        if key not in self._templates:
            made = self._templates[key] = self._make(architecture, variant, architecture, None, alone).to(self.device)
            if self.frozen_network is not None:
                refer_to(made, self.frozen_network)
            self._buffers[key] = {name: buffer.clone() for name, buffer in made.named_buffers()}
        return self._templates[key]

    def build_raw(self, architecture: str) -> nn.Module:
        """A client's own network as its builder makes it, before the method has its say; with any weights."""
        with seeded_global_rng(0):
            return self.builders[architecture]().cpu()

    def state(self, architecture: str, variant: str = "", alone: bool = False) -> dict[str, Tensor]:
        """The present tensors of `module`, which see, by name in the order of its state dict; not copies."""
        return dict(self.module(architecture, variant, alone).state_dict())

    def initial_state(
        self,
        architecture: str,
        variant: str = "",
        owner: str | int | None = None,
        given: nn.Module | None = None,
        alone: bool = False,
    ) -> dict[str, Tensor]:
        """Initial weights by name, on the CPU: a function of the seed and of `owner` (a client's number, or the
        architecture).

        An auxiliary model is the same for every client, and does not change the weights of clients' own networks.
        `given` is a client's own network, whose present weights are kept. `alone`: see `module`.
        """
        stream = architecture if owner is None or self._common == "all" else owner
        module = self._make(architecture, variant, stream, given, alone)
        plain = torch.contiguous_format
        return {name: tensor.detach().clone(memory_format=plain) for name, tensor in module.state_dict().items()}

    def starting_state(self, architecture: str, variant: str, owner: int, given: nn.Module | None) -> dict[str, Tensor]:
        """What a client's network holds before it has weights of its own: `initial_state`, or blank parameters."""
        if not self._blank or given is not None:
            return self.initial_state(architecture, variant, owner, given)
        weights = self.state(architecture, variant)
        buffers = self._buffers[architecture, variant, False]
        return {name: buffers[name] if name in buffers else torch.zeros_like(t) for name, t in weights.items()}

    def load(self, architecture: str, variant: str, weights: Mapping[str, Tensor], alone: bool = False) -> nn.Module:
        """The template holding (copies of) `weights`; `alone`: see `module`."""
        module = self.module(architecture, variant, alone)
        copy_into(self.state(architecture, variant, alone), weights, type(module).__name__)
        return module
