"""What the clients' networks make of the same inputs, place by place in the network; read from a run folder's models/.

Places: "extractor" is what leaves the extractor (s_in, flattened), "representation" what enters the head (z), "logits"
what leaves the network. Between the first two, every block of the intermediate part (a module made of others, such as
`stage1` to `stage4` of a ResNet) is a place of its own if all clients' networks have one of that name.

Shapes: L inputs, D width of a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyfed.errors import ConfigError
from polyfed.experiments.prediction import ClientModel, load_model
from polyfed.functional.modes import eval_mode
from polyfed.results.read import check_links, parse_json

__all__ = ["ClientRef", "clients_of", "common_layers", "layer_outputs", "layers_of", "subsample_clients"]

CHUNK = 256  # rows per forward pass
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class ClientRef:
    """A client with a personal model, and its architecture."""

    client: int
    architecture: str


def clients_of(run: str | Path) -> list[ClientRef]:
    """Every client with a personal model in the folder, clients of one architecture side by side.

    Raises:
        ConfigError: no models there, or a link.
    """
    check_links(Path(run))
    path = Path(run) / "models" / "index.json"
    try:
        index: Mapping[str, Mapping[str, Any]] = parse_json(path.read_bytes())
        found = [
            ClientRef(int(Path(file).stem.removeprefix("client-")), str(e["architecture"])) for file, e in index.items()
        ]
    except FileNotFoundError:
        raise ConfigError(f"{run} holds no clients' models (models/index.json), which this figure is made of") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"expected a list of models in {path}, got nothing readable: {error}") from None
    order = list(dict.fromkeys(who.architecture for who in sorted(found, key=lambda who: who.client)))
    return sorted(found, key=lambda who: (order.index(who.architecture), who.client))


def subsample_clients(clients: Sequence[ClientRef], most: int) -> list[ClientRef]:
    """At most so many of them, evenly over the architectures: in turn the first of each, the second, and so on."""
    turns: dict[str, int] = {}
    numbered = []
    for who in clients:
        numbered.append((turns.get(who.architecture, 0), who))
        turns[who.architecture] = turns.get(who.architecture, 0) + 1
    chosen = [who for _, who in sorted(numbered, key=lambda pair: pair[0])[:most]]
    return [who for who in clients if who in chosen]


def layer_outputs(
    run: str | Path,
    clients: Sequence[ClientRef],
    x: Tensor,
    keep: Callable[[str, Tensor], Kept],
    device: str = "cpu",
    trust: bool = False,
) -> list[dict[str, Kept]]:
    """One pass of the inputs through each client's personal model, one model in memory at a time.

    Args:
        run: run folder. clients: whose models, in this order. x: (L, ...) inputs as stored.
        keep: (place, its outputs (L, D) in float32 on the CPU) -> what to keep of them.
        device: where the networks compute. trust: whether code that the folder names may be imported.

    Returns:
        For each client: place -> what was kept.

    Raises:
        ConfigError: see `load_model`; a network whose outputs are not finite.
    """
    found = []
    for who in clients:
        outputs = _outputs(load_model(run, who.client, device, trust), x)
        for place, a_LD in outputs.items():
            if not bool(torch.isfinite(a_LD).all()):
                raise ConfigError(f"{run}: what client {who.client}'s network gives at '{place}' is not finite")
        found.append({place: keep(place, a_LD) for place, a_LD in outputs.items()})
    return found


def common_layers(found: Sequence[Mapping[str, object]]) -> list[str]:
    """The places that all networks have, in the order in which inputs meet them."""
    return [place for place in found[0] if all(place in one for one in found)] if found else []


def _outputs(model: ClientModel, x: Tensor) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {}
    with torch.no_grad(), eval_mode(model.network):
        for rows in x.split(CHUNK):
            for place, value in layers_of(model.network, model.prepare(rows.to(model.device))).items():
                parts.setdefault(place, []).append(value.flatten(1).float().cpu())
    return {place: torch.cat(values) for place, values in parts.items()}


def layers_of(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Place -> output for a batch x (N, ...). A network that is no `SplitModel` has those places that it offers."""
    found: dict[str, Tensor] = {}
    blocks = _blocks(network)
    if callable(getattr(network, "represent", None)):
        with _watched(blocks, found):
            z: Tensor = network.represent(x)  # type: ignore[operator]
        if callable(getattr(network, "extract", None)):
            found = {"extractor": network.extract(x), **found}  # type: ignore[operator]
        found["representation"] = z
    found["logits"] = network(x)
    return found


def _blocks(network: nn.Module) -> dict[str, nn.Module]:
    """The children of the intermediate part that are made of other modules, by name."""
    inner = getattr(network, "intermediate", None)
    return {name: part for name, part in inner.named_children() if len(list(part.children()))} if inner else {}


@contextmanager
def _watched(blocks: Mapping[str, nn.Module], seen: dict[str, Tensor]) -> Iterator[None]:
    """Within it, what leaves each block is put into `seen`."""

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _, __, output: seen.update({name: output}) if isinstance(output, Tensor) else None

    handles = [block.register_forward_hook(note(name)) for name, block in blocks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
