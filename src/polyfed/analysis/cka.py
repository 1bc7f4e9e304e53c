"""How alike clients see the same inputs: linear CKA of every pair, place by place in their networks.

CKA as in `polyfed.functional.kernels`: centered, in [0, 1], 1 means alike up to rotation, scale and shift. Places can
be much wider than there are inputs, so here the centered kernels (L x L) are compared, each divided by its norm:
CKA(K_a, K_b) = <K_a, K_b> / (||K_a|| ||K_b||).

Shapes: L inputs, D width of a place, N clients.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyfed.analysis.layer_outputs import ClientRef, common_layers
from polyfed.analysis.probe_inputs import ProbeInputs
from polyfed.errors import ConfigError
from polyfed.functional.centering import center_and_scale, nonzero
from polyfed.registry import suggest
from polyfed.report.grouping import Group
from polyfed.report.plot_style import (
    SHADES,
    WIDTH,
    FigureWithData,
    add_colorbar,
    bar_style,
    canvas,
    finish_layout,
    inches,
    legend,
    shortened,
    style_axes,
)
from polyfed.report.run_records import RunRecord

__all__ = [
    "MAIN_PLACES",
    "CkaMatrix",
    "RunSimilarity",
    "draw_maps",
    "draw_means",
    "pairwise_cka",
    "similarity",
    "unit_kernel",
]

MAIN_PLACES = ("extractor", "representation", "logits")
_COLUMNS = 3  # heat maps side by side
_SIZE = 8  # points of an architecture's name
_LONG = 36  # letters of it
_LETTER = 0.085  # inches of a letter in a map's title and a method's name
_SIDE = 1.2  # inches of a map, at least
_LINE = 0.14  # inches of it that a name beside it takes
_NUMBERS = 8  # clients of one architecture whose numbers fit below a map
_BAR = 0.085  # inches of a bar
_PAIRS = {"within": "pairs of one architecture", "between": "pairs of two architectures"}


@dataclass(frozen=True)
class CkaMatrix:
    """CKA at one place.

    matrix: N x N. all: mean over all pairs of clients. within, between: over those of one, of two architectures; None
    where there is no such pair.
    """

    matrix: tuple[tuple[float, ...], ...]
    all: float
    within: float | None
    between: float | None


@dataclass(frozen=True)
class RunSimilarity:
    """One run. name, seed: which. clients: those compared, of `total`. places: place -> how alike. inputs: in words."""

    name: str
    seed: int
    clients: tuple[ClientRef, ...]
    total: int
    places: Mapping[str, CkaMatrix]
    inputs: str

    def maps(self) -> dict[str, Any]:
        """Place -> matrix with the names of its rows and columns, as JSON takes it."""
        labels = [f"{who.client} {who.architecture}" for who in self.clients]
        about = f"Linear CKA between clients, {self.name}, seed {self.seed}, on {self.inputs}."
        axes = {"about": about, "labels": labels, "row_axis": "client", "column_axis": "client"}
        return {
            place: axes
            | {"matrix": [list(row) for row in one.matrix]}
            | {"all": one.all, "within": one.within, "between": one.between}
            for place, one in self.places.items()
        }


def unit_kernel(a_LD: Tensor) -> Tensor:
    """The centered linear kernel divided by its Frobenius norm, flat: (L * L,); 0 for equal rows."""
    centered_LD = center_and_scale(a_LD)
    kernel_LL = centered_LD @ centered_LD.mT
    return (kernel_LL / nonzero(kernel_LL.norm())).flatten()


def pairwise_cka(kernels: Sequence[Tensor]) -> Tensor:
    """Linear CKA of every pair, (N, N), clamped to [0, 1], of what `unit_kernel` gives for N representations."""
    stacked = torch.stack(list(kernels))
    return (stacked @ stacked.mT).clamp(0, 1)


def similarity(
    run: RunRecord,
    clients: Sequence[ClientRef],
    total: int,
    kernels: Sequence[Mapping[str, Tensor]],
    inputs: ProbeInputs,
) -> RunSimilarity:
    """Put together what the clients of one run kept of their places.

    Args:
        run: which. clients, total: those compared, and of how many. kernels: for each, place -> `unit_kernel`.
        inputs: what they saw.

    Raises:
        ConfigError: fewer than two clients.
    """
    if len(clients) < 2:
        raise ConfigError(f"expected at least two clients to compare, got {len(clients)} in {run.path}")
    found = {}
    for place in common_layers(kernels):
        matrix = pairwise_cka([each[place] for each in kernels]).double().tolist()
        found[place] = _alike(matrix, [who.architecture for who in clients])
    return RunSimilarity(run.name, run.seed, tuple(clients), total, found, inputs.about)


def _alike(matrix: Sequence[Sequence[float]], architectures: Sequence[str]) -> CkaMatrix:
    pairs: dict[bool, list[float]] = {True: [], False: []}
    for a, row in enumerate(matrix):
        for b in range(a):
            pairs[architectures[a] == architectures[b]].append(row[b])
    means = [statistics.fmean(values) if values else None for values in (pairs[True], pairs[False])]
    return CkaMatrix(tuple(map(tuple, matrix)), statistics.fmean(pairs[True] + pairs[False]), *means)


# drawing ----------------------------------------------------------------------------------------------------------


def draw_maps(
    group: Group, found: Sequence[RunSimilarity], places: Sequence[str] | None = None, stem: str = "cka"
) -> FigureWithData:
    """Heat maps of one seed's runs: a row of maps for each method, a map for each place (by default the main ones).

    Raises:
        ConfigError: a place that the networks do not all have.
    """
    known = common_layers([one.places for one in found])
    places = [place for place in MAIN_PLACES if place in known] if places is None else places
    for one in found:
        for place in places:
            if place not in one.places:
                raise ConfigError(f"no place '{place}' in all networks of '{one.name}'{suggest(place, one.places)}")
    about = f"{group.about}, seed {found[0].seed}. Personal models after the last round; {_who(found[0])}; "
    about += f"linear CKA on {found[0].inputs}. Over each map: mean over pairs."
    columns = min(_COLUMNS, len(places) if len(places) > 1 else len(found))
    # each method begins a row, unless there is a single map of each
    lines = [
        [(one, place) for place in places[at : at + columns]] for one in found for at in range(0, len(places), columns)
    ]
    if len(places) == 1:
        lines = [[(one, places[0]) for one in found[at : at + columns]] for at in range(0, len(found), columns)]
    blocks = [_blocks(one.clients) for one in found]
    named = max(inches(_names(each), _SIZE) for each in blocks)
    side = max(_SIDE, (WIDTH - 1.2 - named) / columns - 0.1, _LINE * max(map(len, blocks)))
    letters = int(side / _LETTER)
    titled = [_titles(line, places, letters) for line in lines]
    high = max(title.count("\n") for titles in titled for title in titles)
    height = 0.15 + named + (side + 0.35 + 0.16 * high) * len(lines)
    width = max(WIDTH, 1.2 + named + columns * (side + 0.1))
    figure, grid = canvas("CKA between clients", about, height, len(lines), columns, width=width)
    low = _floor(
        min(value for line in lines for one, place in line for row in one.places[place].matrix for value in row)
    )
    alike = len({one.clients for one in found}) == 1
    for number, (line, titles, row) in enumerate(zip(lines, titled, grid, strict=True)):
        for axes in row[len(line) :]:
            axes.set_axis_off()
        for axes, (one, place), title in zip(row, line, titles, strict=False):
            beside = axes is not row[0] and (alike or len(places) > 1)
            shown = _map(axes, one, place, low, named=not beside, numbered=number == len(lines) - 1 or not alike)
            axes.set_title(title, fontsize=9, parse_math=False)
        if len(places) > 1:
            name = "\n".join(textwrap.wrap(line[0][0].name, letters))
            row[0].set_ylabel(name, fontsize=9, fontweight="bold", parse_math=False)
    add_colorbar(figure, shown, [axes for row in grid for axes in row], "CKA")
    finish_layout(figure)
    data = {"about": about, "places": known, "runs": [_plain(one) for one in found]}
    return FigureWithData(stem, figure, data, list(_pairs(found)))


def _titles(line: Sequence[tuple[RunSimilarity, str]], places: Sequence[str], letters: int) -> list[str]:
    """What stands over the maps of a row: the place and its mean; of a single place also the method's name."""
    between = "\n" if max(map(len, places)) + len(" 0.000") > letters else " "
    told = [f"{place}{between}{one.places[place].all:.3f}" for one, place in line]
    if len(places) > 1:
        return told
    names = ["\n".join(textwrap.wrap(one.name, letters)) for one, _ in line]
    return [f"{name}\n{title}" for name, title in zip(names, told, strict=True)]


def _who(one: RunSimilarity) -> str:
    if len(one.clients) < one.total:
        return f"{len(one.clients)} of {one.total} clients, evenly over the architectures"
    return f"all {one.total} clients"


def _floor(value: float) -> float:
    """The next lower tenth, where the shades begin."""
    return int(10 * max(0.0, min(value, 0.9))) / 10


def _map(axes: Any, one: RunSimilarity, place: str, low: float, named: bool, numbered: bool) -> Any:
    alike = one.places[place]
    clients = one.clients
    shown = axes.imshow(alike.matrix, cmap=SHADES, vmin=low, vmax=1, gid=f"cka {one.name} {place}")
    blocks = _blocks(clients)
    if len(blocks) < len(clients):  # around every client lines would hide the cells
        _divide(axes, blocks)
    if len(blocks) > 1:
        ticks = [(start + end - 1) / 2 for start, end, _ in blocks]
        names = _names(blocks)
    else:
        step = -(-len(clients) // _NUMBERS)
        ticks = list(range(0, len(clients), step))
        names = [str(who.client) for who in clients[::step]]
    axes.set_yticks(ticks, names if named else [], fontsize=_SIZE)
    axes.set_xticks(ticks, names if numbered else [], fontsize=_SIZE, rotation=90 if len(blocks) > 1 else 0)
    axes.tick_params(length=2)
    return shown


def _divide(axes: Any, blocks: Sequence[tuple[int, int, str]]) -> None:
    """Lines between architectures."""
    for start, _, _ in blocks[1:]:
        for draw in (axes.axhline, axes.axvline):
            draw(start - 0.5, color="white", linewidth=1.6)
            draw(start - 0.5, color="black", linewidth=0.7)


def _blocks(clients: Sequence[ClientRef]) -> list[tuple[int, int, str]]:
    """Runs of clients of one architecture: first, behind the last, its name."""
    found: list[tuple[int, int, str]] = []
    for place, who in enumerate(clients):
        if found and found[-1][2] == who.architecture:
            found[-1] = (found[-1][0], place + 1, who.architecture)
        else:
            found.append((place, place + 1, who.architecture))
    return found


def _names(blocks: Sequence[tuple[int, int, str]]) -> list[str]:
    return shortened([name for _, _, name in blocks], _LONG)


def _plain(one: RunSimilarity) -> dict[str, Any]:
    clients = [{"client": who.client, "architecture": who.architecture} for who in one.clients]
    return {"name": one.name, "seed": one.seed, "clients": clients, "inputs": one.inputs, "places": one.maps()}


def _pairs(found: Sequence[RunSimilarity]) -> Iterator[dict[str, Any]]:
    for one in found:
        for place, alike in one.places.items():
            for a, row in enumerate(alike.matrix):
                for b in range(a):
                    first = one.clients[b]
                    second = one.clients[a]
                    yield {
                        "name": one.name, "seed": one.seed, "place": place, "client_a": first.client,
                        "client_b": second.client, "architecture_a": first.architecture,
                        "architecture_b": second.architecture, "cka": row[b],
                    }  # fmt: skip


def draw_means(group: Group, found: Sequence[RunSimilarity], stem: str = "cka-means") -> FigureWithData:
    """Bars of mean CKA at every place, within and between architectures; lines from the lowest to the highest seed."""
    places = common_layers([one.places for one in found])
    names = list(dict.fromkeys(one.name for one in found))
    kinds = [kind for kind in _PAIRS if any(getattr(one.places[p], kind) is not None for one in found for p in places)]
    about = (
        f"{group.about}, {group.seeds_text()}. Personal models after the last round; {_who(found[0])}; linear CKA on "
    )
    about += f"{found[0].inputs}."
    if len(group.seeds) > 1:
        about += " Bar: mean over seeds; line: lowest to highest."
    height = 0.2 + 1.75 * len(kinds)
    width = max(WIDTH, 0.8 + 1.25 * _BAR * len(places) * len(names))
    figure, grid = canvas("Mean CKA between clients", about, height, len(kinds), 1, width=width, sharex=True)
    rows: list[dict[str, Any]] = []
    handles: list[Any] = []
    for (axes,), kind in zip(grid, kinds, strict=True):
        style_axes(axes, "y")
        handles.clear()
        for number, name in enumerate(names):
            at = []
            means = []
            reach = []
            for place_number, place in enumerate(places):
                of_name = [getattr(one.places[place], kind) for one in found if one.name == name]
                each = [value for value in of_name if value is not None]
                if not each:
                    continue
                mean = statistics.fmean(each)
                at.append(place_number + 0.8 * ((number + 0.5) / len(names) - 0.5))
                means.append(mean)
                reach.append((mean - min(each), max(each) - mean))
                rows.append({"name": name, "place": place, "pairs": kind, "mean": mean, "low": min(each),
                             "high": max(each), "seeds": len(each)})  # fmt: skip
            several = any(sum(pair) > 0 for pair in reach)
            lines = {"yerr": list(zip(*reach, strict=True)), "capsize": 2, "error_kw": {"linewidth": 1}}
            bars = axes.bar(at, means, 0.8 / len(names), **bar_style(group.looks[name]), **(lines if several else {}))
            handles.append(bars)
        axes.set_title(_PAIRS[kind], loc="left", fontsize=9)
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("CKA")
        turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(places) > 5 else {}
        axes.set_xticks(range(len(places)), places, **turned)
    legend(grid[0][0], handles, names)
    return FigureWithData(stem, figure, {"about": about, "means": rows}, rows)
