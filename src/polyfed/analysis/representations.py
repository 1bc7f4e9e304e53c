"""What the clients' networks make of the same inputs, layer by layer: one pass for all figures that look into them.

Networks are the personal models in a run folder's models/; no client has trained on the inputs. Layers: "extractor" is
the output of the extractor (s_in, flattened), "representation" the input of the head (z), "logits" the network's
output.

Shapes: L inputs, D width of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.randomness import numpy_generator
from polyfed.data.partition import balanced_order
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache, load_run_data
from polyfed.experiments.prediction import ClientModel, load
from polyfed.functional.centering import center_and_scale, nonzero
from polyfed.functional.modes import eval_mode
from polyfed.records.read import check_links, parse_json
from polyfed.report.grouping import Group, group_runs
from polyfed.report.run_records import RunRecord

__all__ = ["ClientRef", "GroupRepresentations", "ProbeInputs", "RunRepresentations", "represent_runs", "unit_kernel"]

CLIENTS = 40  # clients of a run that are compared, at most
CHUNK = 256  # rows per forward pass


@dataclass(frozen=True)
class ClientRef:
    """A client with a personal model, and its architecture."""

    client: int
    architecture: str


@dataclass(frozen=True, eq=False)
class ProbeInputs:
    """Inputs for all clients of a run.

    x: (L, ...) as stored. y: (L,) int64. about: in words. class_names: one per class.
    Any first n rows are as evenly spread over the classes as their numbers allow.
    """

    x: Tensor
    y: Tensor
    about: str
    class_names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RunRepresentations:
    """One run. clients: those compared, of `total`. kernels: for each, layer -> `unit_kernel`, where wanted.

    vectors: for each, its representations (L, D), where wanted.
    """

    run: RunRecord
    clients: tuple[ClientRef, ...]
    total: int
    inputs: ProbeInputs
    kernels: tuple[dict[str, Tensor], ...] = ()
    vectors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class GroupRepresentations:
    """Comparable runs. seed: the one whose runs are shown singly."""

    group: Group
    seed: int
    runs: tuple[RunRepresentations, ...]


def represent_runs(
    runs: Iterable[RunRecord],
    *,
    inputs: int,
    kernels: bool = False,
    vectors: bool = False,
) -> list[GroupRepresentations]:
    """Pass the common inputs of each seed through the personal models of all runs.

    Args:
        runs: from ``load_runs``. inputs: see `common_inputs`.
        kernels: keep the kernel of every layer, of all seeds. vectors: keep the representations, of the seed shown.

    Raises:
        ConfigError: no models, no such inputs, or a network whose outputs are not finite.
    """
    groups, _ = group_runs(runs)
    for run in (run for group in groups for run in group.runs):
        clients_of(run.path)  # before any is loaded
    cache = DataCache()
    found = []
    for group in groups:
        of_all = set.intersection(*({run.seed for run in row} for row in group.rows.values()))
        seed = min(of_all, default=group.seeds[0])
        probes: dict[int, ProbeInputs] = {}
        represented = []
        for run in group.runs:
            if kernels or run.seed == seed:
                if run.seed not in probes:
                    probes[run.seed] = common_inputs(run, inputs, cache)
                keep = {"kernels": kernels, "vectors": vectors and run.seed == seed}
                represented.append(_represent(run, probes[run.seed], **keep))
        found.append(GroupRepresentations(group, seed, tuple(represented)))
    return found


def _represent(run: RunRecord, inputs: ProbeInputs, kernels: bool, vectors: bool) -> RunRepresentations:
    everybody = clients_of(run.path)
    clients = subsample_clients(everybody, CLIENTS)
    found = []
    seen = []
    for who in clients:
        outputs = layer_outputs(load(run.path, who.client, trust=run.trusted, stage="personal"), inputs.x)
        for layer, a_LD in outputs.items():
            if not bool(torch.isfinite(a_LD).all()):
                raise ConfigError(f"{run.path}: client {who.client}'s outputs at '{layer}' are not finite")
        if vectors and "representation" not in outputs:
            raise ConfigError(f"tsne: expected networks with a representation, got one without in {run.path}")
        if kernels:
            found.append({layer: unit_kernel(a_LD) for layer, a_LD in outputs.items()})
        if vectors:
            seen.append(outputs["representation"])
    return RunRepresentations(run, tuple(clients), len(everybody), inputs, tuple(found), tuple(seen))


def unit_kernel(a_LD: Tensor) -> Tensor:
    """The centered linear kernel divided by its Frobenius norm, flat: (L * L,); 0 for equal rows."""
    centered_LD = center_and_scale(a_LD)
    kernel_LL = centered_LD @ centered_LD.mT
    return (kernel_LL / nonzero(kernel_LL.norm())).flatten()


# clients --------------------------------------------------------------------------------------------------------------


def clients_of(run: str | Path) -> list[ClientRef]:
    """Every client with a personal model in the folder, clients of one architecture side by side.

    Raises:
        ConfigError: no models there, or a link.
    """
    check_links(Path(run))
    path = Path(run) / "models" / "index.json"
    try:
        index: Mapping[str, Mapping[str, Any]] = parse_json(path.read_bytes())
        found = [ClientRef(int(number), str(entry["architecture"])) for number, entry in index.items()]
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


# inputs ---------------------------------------------------------------------------------------------------------------


def common_inputs(run: RunRecord, count: int, cache: DataCache | None = None) -> ProbeInputs:
    """Draw inputs that are the same for all clients of a run, and for all runs with its data and seed.

    Args:
        run: its recipe names the data. count: L, of the common test set where the run has one, else of all clients'
            test rows put together; all of them where there are fewer.
        cache: keeps data between calls.

    Raises:
        ConfigError: a recipe without data, or data that differ from the run's.
    """
    data = load_run_data(run, cache)
    if data.test is not None:
        rows = [data.test]
        whose = "rows of the common test set"
    else:
        rows = [client.test for client in data.clients]
        whose = "test rows of all clients together"
    x = torch.cat([part.x for part in rows])
    y = torch.cat([part.y for part in rows])
    order = torch.from_numpy(balanced_order(y.numpy(), numpy_generator(run.seed, "analysis inputs"))[:count])
    which = f"all {len(y)} {whose}" if len(order) == len(y) else f"{len(order)} of the {len(y)} {whose}, classes evenly"
    return ProbeInputs(x[order], y[order], which, tuple(data.source.class_names))


# layers ---------------------------------------------------------------------------------------------------------------


def layer_outputs(model: ClientModel, x: Tensor) -> dict[str, Tensor]:
    """Layer -> its outputs (L, D) for stored inputs x (L, ...), in float32 on the CPU."""
    parts: dict[str, list[Tensor]] = {}
    with torch.no_grad(), eval_mode(model.network):
        for rows in x.split(CHUNK):
            for layer, value in layers_of(model.network, model.prepare(rows)).items():
                parts.setdefault(layer, []).append(value.flatten(1).float().cpu())
    return {layer: torch.cat(values) for layer, values in parts.items()}


def common_layers(found: Sequence[Mapping[str, object]]) -> list[str]:
    """The layers that all networks have, in the order in which inputs meet them."""
    return [layer for layer in found[0] if all(layer in one for one in found)] if found else []


def layers_of(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Layer -> output for a batch x (N, ...). A network that is no `SplitModel` has those layers that it offers."""
    found: dict[str, Tensor] = {}
    for layer, verb in (("extractor", "extract"), ("representation", "represent")):
        if callable(compute := getattr(network, verb, None)):
            found[layer] = compute(x)
    found["logits"] = network(x)
    return found
