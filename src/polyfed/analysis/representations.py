"""One pass through the clients' networks for all figures that look into them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from polyfed.analysis.cka import unit_kernel
from polyfed.analysis.figure_options import FigureOptions
from polyfed.analysis.layer_outputs import ClientRef, clients_of, layer_outputs, subsample_clients
from polyfed.analysis.probe_inputs import ProbeInputs, common_inputs
from polyfed.errors import ConfigError
from polyfed.experiments.data_cache import DataCache
from polyfed.report.grouping import Group, group_runs
from polyfed.report.run_records import RunRecord

__all__ = ["GroupRepresentations", "RunRepresentations", "represent_runs"]


@dataclass(frozen=True, eq=False)
class RunRepresentations:
    """One run. clients: those looked at, of `total`. kernels: for each, place -> `unit_kernel`, where it was asked for.

    seen: for each, its representations (L, D), where they were asked for.
    """

    run: RunRecord
    clients: tuple[ClientRef, ...]
    total: int
    inputs: ProbeInputs
    kernels: tuple[dict[str, Tensor], ...]
    seen: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class GroupRepresentations:
    """Comparable runs. seed: the one whose runs are shown singly."""

    group: Group
    seed: int
    views: tuple[RunRepresentations, ...]


def represent_runs(
    runs: Iterable[RunRecord], choices: FigureOptions, kernels: bool, seen: bool
) -> list[GroupRepresentations]:
    """Show the common inputs of each seed to the personal models of all runs.

    Args:
        runs: from ``load_runs``. choices: inputs, inputs_from, clients, device.
        kernels: keep the kernel of every place, of all seeds. seen: keep the representations, of the seed shown.

    Raises:
        ConfigError: see `common_inputs`, `clients_of` and `layer_outputs`.
    """
    groups, _ = group_runs(runs)
    for run in (run for group in groups for run in group.runs):
        clients_of(run.path)  # before any is loaded
    data = DataCache()
    return [_group(group, choices, kernels, seen, data) for group in groups]


def _group(group: Group, choices: FigureOptions, kernels: bool, seen: bool, data: DataCache) -> GroupRepresentations:
    has = [{run.seed for run in row} for row in group.rows.values()]
    shown = min(set.intersection(*has), default=group.seeds[0])
    found = {}
    seeds = group.seeds if kernels else (shown,)
    for seed in seeds:
        mine = [run for run in group.runs if run.seed == seed]
        inputs = common_inputs(mine[0], choices.inputs, choices.inputs_from, data)
        for run in mine:
            found[run.path] = _view(run, inputs, choices, kernels, seen and seed == shown)
    return GroupRepresentations(group, shown, tuple(found[run.path] for run in group.runs if run.path in found))


def _view(run: RunRecord, inputs: ProbeInputs, choices: FigureOptions, kernels: bool, seen: bool) -> RunRepresentations:
    everybody = clients_of(run.path)
    clients = subsample_clients(everybody, choices.clients)
    kept = layer_outputs(
        run.path,
        clients,
        inputs.x,
        lambda place, a_LD: _kept(place, a_LD, kernels, seen),
        choices.device,
        run.trusted,
    )
    if seen and any("representation" not in each for each in kept):
        raise ConfigError(f"tsne: expected networks with a representation, got one without in {run.path}")
    return RunRepresentations(
        run,
        tuple(clients),
        len(everybody),
        inputs,
        tuple({place: kernel for place, (kernel, _) in each.items() if kernel is not None} for each in kept),
        tuple(z for each in kept for place, (_, z) in each.items() if z is not None),
    )


def _kept(place: str, a_LD: Tensor, kernels: bool, seen: bool) -> tuple[Tensor | None, Tensor | None]:
    return unit_kernel(a_LD) if kernels else None, a_LD if seen and place == "representation" else None
