"""What can be chosen of figures."""

from __future__ import annotations

from dataclasses import dataclass

from polyfed.errors import ConfigError


@dataclass(frozen=True)
class FigureOptions:
    """What can be chosen of figures, all of them together.

    Attributes:
        stage: scoring stage of curves and variants; None: each run's own.
        smoothing_window: evaluated rounds over which curves take the trailing mean.
        inputs: of cka and tsne; inputs_from: "test" or "holdout", see `polyfed.analysis.probe_inputs.common_inputs`.
        layers: of the heat maps, in the networks; None: extractor, representation and logits, as far as all networks
            have them. clients: of cka and tsne, at most, evenly over the architectures.
        points: of each panel of tsne, at most. device: where networks compute.

    Raises:
        ConfigError: a number below 1, or an empty list of layers.
    """

    stage: str | None = None
    smoothing_window: int = 1
    inputs: int = 1000
    inputs_from: str = "test"
    layers: tuple[str, ...] | None = None
    clients: int = 40
    points: int = 1000
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in (("smoothing_window", 1), ("inputs", 2), ("clients", 2), ("points", 4)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.layers is not None and not self.layers:
            raise ConfigError("layers: expected at least one layer of the networks, got none")
