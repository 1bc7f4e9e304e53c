"""Figures of twenty classes, clients and networks with long names: texts are large, whole, and not on each other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed.analysis.cka import RunSimilarity, draw_maps, similarity
from polyfed.analysis.label_distribution import plot_labels
from polyfed.analysis.representations import ClientRef, ProbeInputs, RunRepresentations, unit_kernel
from polyfed.analysis.tsne import Embedding, draw_panels
from polyfed.report.grouping import Group, group_runs
from polyfed.report.run_records import RunRecord
from polyfed.results.schema import RunResult
from tests.helpers.quick import others_slow
from tests.helpers.readable import unreadable

THINGS = ("airplane (passenger)", "automobile", "red-tailed bird", "tabby cat", "white-tailed deer")
CLASSES = tuple(f"{thing}, {where}" for where in ("above", "below", "in front", "behind") for thing in THINGS)
NETWORKS = tuple(f"timm:some_network_{n}_with_a_long_name.in1k" if n % 3 else f"cnn{n}" for n in range(20))
LONG = "fedgh-with-a-header-that-was-trained-for-a-hundred-epochs"
RECORD = {
    "method": "fedgh", "dataset": "twenty kinds of pictures", "clients": 20, "rounds": 8, "seed": 0, "accuracy": 0.5,
    "evaluation": {"stage": "personal", "weighting": "clients", "test": "client"},
}  # fmt: skip


def record(name: str) -> RunRecord:
    return RunRecord(Path(name), RunResult(**RECORD), [], name=name)


@pytest.fixture
def group() -> Group:
    (found,), _ = group_runs([record("fedgh"), record(LONG)])
    return found


@pytest.mark.parametrize(("classes", "most"), [(10, 999_999), pytest.param(20, 9_999, marks=pytest.mark.slow)])
def test_label_tables(group: Group, classes: int, most: int) -> None:
    counts = np.random.default_rng(0).integers(0, most, (20, classes), endpoint=True)
    clients = [f"{number} the hospital of the north" for number in range(20)]
    table = {"seed": 0, "matrix": counts.tolist(), "rows": clients, "columns": list(CLASSES[:classes])}
    table["architectures"] = list(NETWORKS)
    drawing = plot_labels(group, table)
    assert unreadable(drawing.figure) == []
    assert drawing.data["columns"] == list(CLASSES[:classes]), "names are shortened in the picture alone"


def alike(name: str, networks: tuple[str, ...], layers: tuple[str, ...]) -> RunSimilarity:
    generator = torch.Generator().manual_seed(0)
    kernels = [{layer: unit_kernel(torch.randn(9, 4, generator=generator)) for layer in layers} for _ in networks]
    inputs = ProbeInputs(torch.zeros(9, 1), torch.zeros(9, dtype=torch.int64), "9 test rows", CLASSES)
    who = tuple(ClientRef(number, network) for number, network in enumerate(networks))
    return similarity(RunRepresentations(record(name), who, len(who), inputs, tuple(kernels)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("networks", "layers"), [(NETWORKS, ("extractor", "representation", "logits")), (("cnn",) * 20, ("logits",))]
)
def test_maps_of_cka(group: Group, networks: tuple[str, ...], layers: tuple[str, ...]) -> None:
    found = [alike(name, networks, layers) for name in (LONG, f"{LONG}-and-more")]
    assert unreadable(draw_maps(group, found).figure) == []


def panel(name: str, clients: int, classes: int) -> Embedding:
    points = np.random.default_rng(0).normal(size=(clients * 20, 2))
    client, label = np.repeat(np.arange(clients), 20), np.tile(np.arange(20) % classes, clients)
    who = tuple(ClientRef(number, NETWORKS[number % 20]) for number in range(clients))
    return Embedding(name, 0, 64, who, 20, points, client, label, 0.1, 0.2, 0.3, 0.4)


INPUTS = ProbeInputs(
    torch.zeros(20, 1), torch.arange(20), "1000 of the 1018 test rows of all clients together", CLASSES
)


@pytest.mark.parametrize(("clients", "classes"), others_slow([(4, 10), (20, 20)], quick=[(20, 20)]))
def test_panels_of_tsne(group: Group, clients: int, classes: int) -> None:
    drawing = draw_panels(group, [panel("local", clients, classes), panel(LONG, clients, classes)], INPUTS)
    assert unreadable(drawing.figure) == []
    by_class: list[Any] = drawing.figure.axes[1].lines
    assert len(by_class) == classes
    assert len({str(line.get_color()) for line in by_class}) == classes, "a color for each class"
    assert len({line.get_marker() for line in by_class}) > 8, "and a marker, for black and white"
    left, right = drawing.figure.legends
    assert len(left.get_texts()) == clients
    assert [text.get_text().replace("\n", " ") for text in right.get_texts()] == [
        f"class {n}" for n in CLASSES[:classes]
    ]


def test_more_groups_than_can_be_told_apart_are_shades_and_the_caption_says_so(group: Group) -> None:
    names = tuple(map(str, range(40)))
    many = replace(panel("local", 3, 20), label=np.arange(60) % 40)
    drawing = draw_panels(group, [many], replace(INPUTS, class_names=names))
    (legend,) = drawing.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["client 0", "client 1", "client 2"]
    assert drawing.data["about"].endswith("The 40 groups from 'class 0' to 'class 39' are shades, from light to dark.")
