"""How alike clients see the same inputs: linear CKA of every pair, layer by layer in their networks.

CKA as in `polyfed.functional.kernels`: centered, in [0, 1], 1 means alike up to rotation, scale and shift. Layers can
be much wider than there are inputs, so here the centered kernels (L x L) are compared, each divided by its norm:
CKA(K_a, K_b) = <K_a, K_b> / (||K_a|| ||K_b||).

Shapes: L inputs, D width of a layer, N clients.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyfed.analysis.representations import ClientRef, RunRepresentations, common_layers
from polyfed.errors import ConfigError
from polyfed.report.grouping import Group
from polyfed.report.plot_style import SHADES, FigureWithData, add_colorbar, canvas, finish_layout, shortened

__all__ = ["draw_maps", "pairwise_cka", "similarity"]

_HEIGHT = 2.4  # inches of a row of maps
_SIZE = 8  # points of an architecture's name
_LONG = 20  # letters of an architecture's name
_LETTERS = 24  # letters of a method's name, in a line
_NUMBERS = 8  # clients of one architecture whose numbers fit below a map


def pairwise_cka(kernels: Sequence[Tensor]) -> Tensor:
    """Linear CKA of every pair, (N, N), clamped to [0, 1], from `unit_kernel` of N representations."""
    stacked = torch.stack(list(kernels))
    return (stacked @ stacked.mT).clamp(0, 1)


def similarity(found: RunRepresentations) -> dict[str, NDArray[np.float64]]:
    """CKA of a run's clients, (N, N), at each layer that all have.

    Raises:
        ConfigError: fewer than two clients.
    """
    if len(found.clients) < 2:
        raise ConfigError(f"expected at least two clients to compare, got {len(found.clients)} in {found.run.path}")
    return {
        layer: pairwise_cka([each[layer] for each in found.kernels]).double().numpy()
        for layer in common_layers(found.kernels)
    }


_Alike = tuple[RunRepresentations, dict[str, NDArray[np.float64]]]  # a run, and `similarity` of it


def pairs_of(found: Sequence[_Alike]) -> pd.DataFrame:
    """A line for each pair of clients at each layer of each run: name, seed, layer, client_a, client_b, architecture_a,
    architecture_b, cka.
    """
    lines = [
        (one.run.name, one.run.seed, layer, a.client, b.client, a.architecture, b.architecture, float(matrix[k, i]))
        for one, layers in found
        for layer, matrix in layers.items()
        for k, b in enumerate(one.clients)
        for i, a in enumerate(one.clients[:k])
    ]
    about = ["name", "seed", "layer", "client_a", "client_b", "architecture_a", "architecture_b", "cka"]
    return pd.DataFrame(lines, columns=about)


# drawing --------------------------------------------------------------------------------------------------------------


def draw_maps(group: Group, runs: Sequence[RunRepresentations], seed: int, stem: str = "cka") -> FigureWithData:
    """Heat maps of one seed's runs, a row for each method, a map for each layer; the numbers are of every seed."""
    every = [(one, similarity(one)) for one in runs]
    found = [(one, matrices) for one, matrices in every if one.run.seed == seed]
    layers = common_layers([matrices for _, matrices in found])
    about = f"{group.about}, seed {seed}. Personal models after the last round; {_who(found[0][0])}; "
    about += f"linear CKA on {found[0][0].inputs.about}. Over each map: mean over pairs."
    figure, grid = canvas("CKA between clients", about, _HEIGHT * len(found), len(found), len(layers))
    pairs = pairs_of(every)
    low = min(float(matrices[layer].min()) for _, matrices in found for layer in layers)
    low = int(10 * max(0.0, min(low, 0.9))) / 10  # the next lower tenth, where the shades begin
    means = pairs[pairs["seed"] == seed].groupby(["name", "layer"])["cka"].mean()
    for (one, matrices), row in zip(found, grid, strict=True):
        for axes, layer in zip(row, layers, strict=True):
            shown = axes.imshow(matrices[layer], cmap=SHADES, vmin=low, vmax=1, gid=f"cka {one.run.name} {layer}")
            _mark_clients(axes, one.clients, named=axes is row[0])
            axes.set_title(f"{layer}\n{means[one.run.name, layer]:.3f}", fontsize=9, parse_math=False)
        name = "\n".join(textwrap.wrap(one.run.name, _LETTERS))
        row[0].set_ylabel(name, fontsize=9, fontweight="bold", parse_math=False)
    add_colorbar(figure, shown, [axes for row in grid for axes in row], "CKA")
    finish_layout(figure)
    return FigureWithData(stem, figure, about, pairs)


def _who(one: RunRepresentations) -> str:
    if len(one.clients) < one.total:
        return f"{len(one.clients)} of {one.total} clients, evenly over the architectures"
    return f"all {one.total} clients"


def _mark_clients(axes: Any, clients: Sequence[ClientRef], named: bool) -> None:
    """Ticks, and lines between architectures. named: whether the rows have names."""
    blocks = _blocks(clients)
    starts = [start for start, _, _ in blocks[1:]] if len(blocks) < len(clients) else []
    for start in starts:  # lines between architectures; around every client they would hide the cells
        for draw in (axes.axhline, axes.axvline):
            draw(start - 0.5, color="white", linewidth=1.6)
            draw(start - 0.5, color="black", linewidth=0.7)
    if len(blocks) > 1:
        ticks = [(start + end - 1) / 2 for start, end, _ in blocks]
        names = shortened([name for _, _, name in blocks], _LONG)
    else:
        step = -(-len(clients) // _NUMBERS)
        ticks = list(range(0, len(clients), step))
        names = [str(who.client) for who in clients[::step]]
    axes.set_yticks(ticks, names if named else [], fontsize=_SIZE)
    axes.set_xticks(ticks, names, fontsize=_SIZE, rotation=90 if len(blocks) > 1 else 0)
    axes.tick_params(length=2)


def _blocks(clients: Sequence[ClientRef]) -> list[tuple[int, int, str]]:
    """Runs of clients of one architecture: first, behind the last, its name."""
    found: list[tuple[int, int, str]] = []
    for place, who in enumerate(clients):
        if found and found[-1][2] == who.architecture:
            found[-1] = (found[-1][0], place + 1, who.architecture)
        else:
            found.append((place, place + 1, who.architecture))
    return found
