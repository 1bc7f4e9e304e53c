"""t-SNE of the clients' representations of the same inputs, and silhouettes: do clients, or classes, lie apart?

Representations of different widths have no common space: each width has a panel of its own. Silhouettes (Rousseeuw
1987; Euclidean; in [-1, 1], 0: no groups) are of the representations themselves, as an embedding always looks more
grouped than what it was made from. A low one by client says that clients see inputs alike.

Shapes: L inputs, N clients of a panel, D width, P = N L points.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from polyfed.analysis.representations import ClientRef, ProbeInputs, RunRepresentations
from polyfed.errors import ConfigError
from polyfed.report.grouping import Group
from polyfed.report.plot_style import GRAY, FigureWithData, canvas, legends, line_style

__all__ = ["SEED", "Embedding", "draw_panels", "embed", "embeddings", "silhouette"]

SEED = 0  # seed of t-SNE
PERPLEXITY = 30.0
POINTS = 1000  # points of a panel, at most
_LEGEND = 20  # groups that a legend still names
_NUMBERED = 10  # clients up to which each is a group of its own
_LETTERS = 38  # letters of a panel's title, in a line


@dataclass(frozen=True, eq=False)
class Embedding:
    """The clients of one run whose representations have one width.

    points: (P, 2), t-SNE. client, label: (P,). by_client, by_class: silhouettes of the representations; None where
    there is one group only.
    """

    name: str
    seed: int
    width: int
    clients: tuple[ClientRef, ...]
    inputs: int
    points: NDArray[np.float64]
    client: NDArray[np.int64]
    label: NDArray[np.int64]
    by_client: float | None
    by_class: float | None


def embed(a_PD: NDArray[np.float64]) -> NDArray[np.float64]:
    """t-SNE (van der Maaten and Hinton 2008) to two dimensions, from PCA on; perplexity at most a third of the points.

    Raises:
        ConfigError: fewer than four points.
    """
    from sklearn.manifold import TSNE

    if len(a_PD) < 4:
        raise ConfigError(f"expected at least four points to embed, got {len(a_PD)}; take more inputs")
    nearby = min(PERPLEXITY, (len(a_PD) - 1) / 3)
    start = "pca" if a_PD.shape[1] > 1 else "random"
    points = TSNE(2, perplexity=nearby, init=start, random_state=SEED).fit_transform(a_PD)
    return np.asarray(points, dtype=np.float64)


def silhouette(a_PD: NDArray[np.float64], groups: NDArray[np.int64]) -> float | None:
    """Mean silhouette of the points in these groups, Euclidean; None for one group, or as many as there are points."""
    from sklearn.metrics import silhouette_score

    if not 1 < len(np.unique(groups)) < len(groups):
        return None
    return float(silhouette_score(a_PD, groups))


def embeddings(found: RunRepresentations) -> list[Embedding]:
    """Embed the representations of a run's clients, width by width: the same first inputs for all clients of a panel.

    Args:
        found: with vectors.

    Raises:
        ConfigError: fewer points than can be embedded.
    """
    widths = dict.fromkeys(a_LD.shape[1] for a_LD in found.vectors)
    return [_panel(found, width) for width in widths]


def _panel(found: RunRepresentations, width: int) -> Embedding:
    pairs = zip(found.clients, found.vectors, strict=True)
    mine = [(who, a_LD) for who, a_LD in pairs if a_LD.shape[1] == width]
    y = found.inputs.y
    count = max(1, min(len(y), POINTS // len(mine)))
    a_PD = np.concatenate([a_LD[:count].double().numpy() for _, a_LD in mine])
    client = np.repeat([who.client for who, _ in mine], count)
    label = np.tile(y[:count].numpy(), len(mine))
    scores = [silhouette(a_PD, groups) for groups in (client, label)]
    clients = tuple(who for who, _ in mine)
    return Embedding(found.run.name, found.run.seed, width, clients, count, embed(a_PD), client, label, *scores)


# drawing ----------------------------------------------------------------------------------------------------------


def draw_panels(group: Group, found: Sequence[Embedding], inputs: ProbeInputs, stem: str = "tsne") -> FigureWithData:
    """One seed's runs: for each method (and width) the points marked by client, or architecture, and by class."""
    everybody = list(dict.fromkeys(who for panel in found for who in panel.clients))
    by_client = len(everybody) <= _NUMBERED
    whose = {who.client: f"client {who.client}" if by_client else who.architecture for who in everybody}
    class_names = inputs.class_names
    counts = sorted({panel.inputs for panel in found})
    count = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    classes = [int(label) for label in np.unique(np.concatenate([panel.label for panel in found]))]
    named = {label: f"class {class_names[label] if label < len(class_names) else label}" for label in classes}
    sides = [_looks(list(dict.fromkeys(names.values()))) for names in (whose, named)]
    about = f"{group.about}, seed {found[0].seed}. Personal models after the last round; t-SNE (perplexity "
    about += f"{PERPLEXITY:g}, PCA initialization, seed {SEED}) of each client's representations of the same "
    about += f"{count} inputs, from {inputs.about}. Over each panel: silhouette of the representations."
    figure, grid = canvas("t-SNE of representations", about, 2.75 * len(found), len(found), 2)
    several = len({panel.width for panel in found}) > 1
    for panel, (left, right) in zip(found, grid, strict=True):
        what = f"{panel.name}, {panel.width} wide" if several else panel.name
        _scatter(left, panel.points, [whose[client] for client in panel.client.tolist()], sides[0])
        _scatter(right, panel.points, [named[label] for label in panel.label.tolist()], sides[1])
        _title(left, f"{what}, by client", panel.by_client)
        _title(right, f"{what}, by class", panel.by_class)
    shown = [side for side in sides if len(side) <= _LEGEND]
    if shown:
        legends(figure, [([_key(look) for look in side.values()], side) for side in shown])
    rows = pd.concat([_rows(panel) for panel in found], ignore_index=True)
    return FigureWithData(stem, figure, about, rows.astype(object).where(rows.notna(), None))


def _title(axes: Any, what: str, score: float | None) -> None:
    """What a panel shows, in as many lines as it takes, and its silhouette."""
    line = "one group only" if score is None else f"silhouette {score:.3f}"
    axes.set_title("\n".join([*textwrap.wrap(what, _LETTERS), line]), fontsize=9, parse_math=False)


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A color and a marker for each group."""
    return {name: {key: line_style(number)[key] for key in ("color", "marker")} for number, name in enumerate(names)}


def _scatter(
    axes: Any, points: NDArray[np.float64], names: Sequence[str], looks: Mapping[str, Mapping[str, Any]]
) -> None:
    groups = np.array(names)
    for name in dict.fromkeys(names):
        mine = points[groups == name]
        looks_here = {"markersize": 3.8, "markeredgewidth": 0.3, "linestyle": "none", **looks[name]}
        axes.plot(mine[:, 0], mine[:, 1], gid=f"points {name}", markeredgecolor="white", **looks_here)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(GRAY)
        spine.set_linewidth(0.6)


def _key(look: Mapping[str, Any]) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **{**look, "linestyle": "none", "markersize": 6})


def _rows(panel: Embedding) -> pd.DataFrame:
    """The points of a panel, with the silhouettes of all."""
    of_panel = {"name": panel.name, "seed": panel.seed, "width": panel.width}
    of_point = {"client": panel.client, "label": panel.label, "x": panel.points[:, 0], "y": panel.points[:, 1]}
    return pd.DataFrame(of_panel | of_point | {"by_client": panel.by_client, "by_class": panel.by_class})
