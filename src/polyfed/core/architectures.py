"""One template network per (architecture, variant), and the seeded weights from which everybody starts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from polyfed.core.networks import load
from polyfed.core.randomness import derive, scoped_global

Builder = Callable[[], nn.Module]
Build = Callable[[nn.Module, str], nn.Module]


class Architectures:
    """Builds networks by architecture name, as the method wants them.

    Args:
        builders: architecture name -> a function that makes a new network of it.
        build: turns a client's network and a variant's name into the network that is trained (`Method.build`).
        seed: the run's seed. device: where the templates live.
        blank: clients' own networks begin as zeros (`Method.starts_blank`), which spares drawing their weights.
    """

    def __init__(
        self, builders: Mapping[str, Builder], build: Build, seed: int, device: torch.device, blank: bool = False
    ) -> None:
        self._builders = dict(builders)
        self._build = build
        self._seed = seed
        self.device = device
        self._blank = blank
        self._templates: dict[tuple[str, str], nn.Module] = {}
        self._buffers: dict[tuple[str, str], dict[str, Tensor]] = {}  # the templates', as they were made

    def _make(self, architecture: str, variant: str, owner: str | int, given: nn.Module | None) -> nn.Module:
        with scoped_global(derive(self._seed, "weights", owner)):
            model = copy.deepcopy(given) if given is not None else self._builders[architecture]()  # build may cut it
        with scoped_global(derive(self._seed, "build", owner)):
            return self._build(model, variant)

    def template(self, architecture: str, variant: str = "") -> nn.Module:
        """The one network of this kind; whoever uses it loads weights first."""
        key = (architecture, variant)
        if key not in self._templates:
            made = self._templates[key] = self._make(architecture, variant, architecture, None).to(self.device)
            self._buffers[key] = {name: buffer.clone() for name, buffer in made.named_buffers()}
        return self._templates[key]

    def initial(
        self, architecture: str, variant: str = "", owner: str | int | None = None, given: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Initial weights by name: a function of the seed and of `owner` (a client's number, or the architecture).

        `given` is a client's own network, whose present weights are kept.
        """
        module = self._make(architecture, variant, architecture if owner is None else owner, given)
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    def begun(self, architecture: str, variant: str, owner: int, given: nn.Module | None) -> dict[str, Tensor]:
        """What a client's network holds before the client has weights of its own: `initial`, or blank parameters."""
        if not self._blank or given is not None:
            return self.initial(architecture, variant, owner, given)
        weights = self.template(architecture, variant).state_dict()
        buffers = self._buffers[architecture, variant]
        return {name: buffers[name] if name in buffers else torch.zeros_like(t) for name, t in weights.items()}

    def bound(self, architecture: str, variant: str, weights: Mapping[str, Tensor]) -> nn.Module:
        """The template holding (copies of) `weights`."""
        module = self.template(architecture, variant)
        load(module, weights)
        return module
