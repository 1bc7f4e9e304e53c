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
    """

    def __init__(self, builders: Mapping[str, Builder], build: Build, seed: int, device: torch.device) -> None:
        self._builders = dict(builders)
        self._build = build
        self._seed = seed
        self.device = device
        self._templates: dict[tuple[str, str], nn.Module] = {}

    def _make(self, architecture: str, variant: str, owner: str | int, given: nn.Module | None) -> nn.Module:
        with scoped_global(derive(self._seed, "weights", owner)):
            model = copy.deepcopy(given) if given is not None else self._builders[architecture]()  # build may cut it
        with scoped_global(derive(self._seed, "build", owner)):
            return self._build(model, variant)

    def template(self, architecture: str, variant: str = "") -> nn.Module:
        """The one network of this kind; whoever uses it loads weights first."""
        key = (architecture, variant)
        if key not in self._templates:
            self._templates[key] = self._make(architecture, variant, architecture, None).to(self.device)
        return self._templates[key]

    def initial(
        self, architecture: str, variant: str = "", owner: str | int | None = None, given: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Initial weights by name: a function of the seed and of `owner` (a client's number, or the architecture).

        `given` is a client's own network, whose present weights are kept.
        """
        module = self._make(architecture, variant, architecture if owner is None else owner, given)
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    def bound(self, architecture: str, variant: str, weights: Mapping[str, Tensor]) -> nn.Module:
        """The template holding (copies of) `weights`."""
        module = self.template(architecture, variant)
        load(module, weights)
        return module
