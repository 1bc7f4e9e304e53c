"""CKA between clients against NumPy's from the definition; what is drawn is what was found."""

import itertools

import pytest
import torch
from torch import Tensor

from polyfed.analysis.cka import draw_maps, pairwise_cka, similarity
from polyfed.analysis.representations import ClientRef, ProbeInputs, RunRepresentations, unit_kernel
from polyfed.errors import ConfigError
from polyfed.report.grouping import Group, group_runs
from polyfed.report.run_records import RunRecord
from tests.helpers.kernels import numpy_cka

WHO = [ClientRef(0, "a"), ClientRef(2, "a"), ClientRef(1, "b")]
INPUTS = ProbeInputs(torch.zeros(6, 1), torch.zeros(6, dtype=torch.int64), "6 rows", ("zero",))


def cka(a: Tensor, b: Tensor) -> float:
    """Of two representations' linear kernels."""
    return numpy_cka(*((t.double() @ t.double().T).numpy() for t in (a, b)))


@pytest.fixture
def representations() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, width, generator=generator) + 5 for width in (3, 40, 3)]


def test_cka_of_any_width_is_numpys(representations: list[torch.Tensor]) -> None:
    found = pairwise_cka([unit_kernel(a_LD) for a_LD in representations])
    expected = [[cka(a, b) for b in representations] for a in representations]
    assert found.tolist() == [pytest.approx(row, abs=1e-5) for row in expected]
    turned = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))[0]
    alike = pairwise_cka([unit_kernel(representations[0]), unit_kernel(-7 * representations[0] @ turned + 3)])
    assert float(alike[0, 1]) == pytest.approx(1, abs=1e-5)
    assert pairwise_cka([unit_kernel(torch.ones(6, 2)), unit_kernel(representations[0])])[0].tolist() == [0, 0]


def found_in(
    run: RunRecord, representations: list[torch.Tensor], layers: tuple[str, ...], who: list[ClientRef] = WHO
) -> RunRepresentations:
    kernels = tuple({layer: unit_kernel(a_LD) for layer in layers} for a_LD in representations)
    return RunRepresentations(run, tuple(who), 5, INPUTS, kernels)


def test_a_title_has_the_mean_over_pairs(runs: list[RunRecord], representations: list[torch.Tensor]) -> None:
    found = found_in(runs[0], representations, ("logits",))
    pairs = [cka(a, b) for a, b in itertools.combinations(representations, 2)]
    (title,) = [axes.get_title() for axes in draw_maps(grouped(runs), [found], 0).figure.axes if axes.images]
    assert title == f"logits\n{sum(pairs) / 3:.3f}"
    with pytest.raises(ConfigError, match="at least two clients"):
        similarity(found_in(runs[0], representations[:1], ("logits",), WHO[:1]))
    (only, *_) = draw_maps(grouped(runs), [found_in(runs[0], representations[:2], ("x",), WHO[:2])], 0).figure.axes
    assert [label.get_text() for label in only.get_yticklabels()] == ["0", "2"], "numbers where networks are alike"


def grouped(runs: list[RunRecord]) -> Group:
    (group,), _ = group_runs(runs)
    return group


def test_maps_show_the_matrices(runs: list[RunRecord], representations: list[torch.Tensor]) -> None:
    layers = ("extractor", "representation", "logits")
    found = [found_in(run, representations, layers) for run in (runs[0], runs[1], runs[2])]
    drawing = draw_maps(grouped(runs), found, 0)
    images = [axes.images[0] for axes in drawing.figure.axes if axes.images]
    assert len(images) == 6, "two methods at three layers"
    matrix = similarity(found[0])["logits"].tolist()
    assert images[2].get_array().tolist() == matrix
    named = [[label.get_text() for label in axes.get_yticklabels()] for axes in drawing.figure.axes[:3]]
    assert [each[0] for each in named] == ["a", "", ""], "at the first map of a row"
    assert images[2].get_clim() == (int(10 * min(map(min, matrix))) / 10, 1)
    lines = drawing.figure.axes[0].lines
    assert [line.get_xdata()[0] for line in lines[2:]] == [1.5, 1.5], "between clients 2 and 1"
    assert [line.get_ydata()[0] for line in lines[:2]] == [1.5, 1.5]
    first = drawing.rows[drawing.rows["layer"] == "logits"].iloc[0]
    assert (first["client_a"], first["client_b"], first["cka"]) == (0, 2, matrix[1][0])
    assert len(drawing.rows) == 3 * 3 * 3, "of both seeds"
    assert "3 of 5 clients, evenly over the architectures; linear CKA on 6 rows" in drawing.about
