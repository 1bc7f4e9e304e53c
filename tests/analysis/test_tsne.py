"""Silhouettes of groups whose answer is known, panels by width, and what is drawn."""

import numpy as np
import pytest
import torch

from polyfed.analysis.representations import ClientRef, ProbeInputs, RunRepresentations
from polyfed.analysis.tsne import Embedding, draw_panels, embed, embeddings, silhouette
from polyfed.errors import ConfigError
from polyfed.report.grouping import group_runs
from polyfed.report.run_records import RunRecord


def test_silhouettes_by_hand() -> None:
    points, groups = np.array([[0.0], [1.0], [10.0], [11.0]]), np.array([0, 0, 1, 1])
    # 0: own 1, other (10 + 11) / 2; 1: own 1, other (9 + 10) / 2; the others mirror them
    assert silhouette(points, groups) == pytest.approx((2 * (9.5 / 10.5) + 2 * (8.5 / 9.5)) / 4)
    # groups 0 and 10, 1 and 11: own 10; 0: (1 + 11) / 2, 10: (9 + 1) / 2
    assert silhouette(points, np.array([0, 1, 0, 1])) == pytest.approx((2 * (6 - 10) / 10 + 2 * (5 - 10) / 10) / 4)
    assert silhouette(points, np.zeros(4, dtype=np.int64)) is None
    assert silhouette(points, np.arange(4)) is None


def test_embedding_keeps_far_groups_apart_and_repeats_itself() -> None:
    generator = np.random.default_rng(0)
    a_PD = np.concatenate([generator.normal(50 * group, 1, (12, 5)) for group in range(2)])
    points = embed(a_PD)
    groups = np.repeat([0, 1], 12)
    apart = silhouette(points, groups)
    assert apart is not None
    assert apart > 0.6
    assert np.array_equal(points, embed(a_PD))
    with pytest.raises(ConfigError, match="at least four points"):
        embed(a_PD[:3])


@pytest.fixture
def found(runs: list[RunRecord], monkeypatch: pytest.MonkeyPatch) -> list[Embedding]:
    """Two clients of width 3 that see classes alike, far apart from each other; one of width 2."""
    monkeypatch.setattr("polyfed.analysis.tsne.embed", lambda a_PD: a_PD[:, :2])
    monkeypatch.setattr("polyfed.analysis.tsne.POINTS", 8)
    y = torch.arange(10) % 2
    a = torch.stack([y * 1.0, torch.zeros(10), torch.zeros(10)], dim=1)
    inputs = ProbeInputs(torch.zeros(10, 1), y, "10 rows", ("even", "odd"))
    who = (ClientRef(0, "a"), ClientRef(2, "b"), ClientRef(1, "a"))
    return embeddings(RunRepresentations(runs[0], who, 3, inputs, vectors=(a, a[:, :2], a + 100)))


def test_a_panel_for_each_width(found: list[Embedding]) -> None:
    wide, narrow = found
    assert (wide.width, narrow.width) == (3, 2)
    assert [who.client for who in wide.clients] == [0, 1]
    assert (wide.inputs, narrow.inputs) == (4, 8), "8 points at most, the same inputs for all clients of a panel"
    assert wide.client.tolist() == [0] * 4 + [1] * 4
    assert wide.label.tolist() == [0, 1, 0, 1] * 2
    assert wide.by_client is not None
    assert wide.by_client > 0.99, "the clients lie apart"
    assert wide.by_class is not None
    assert wide.by_class < 0
    assert narrow.by_client is None, "one client has no neighbor"
    assert narrow.by_class == pytest.approx(1)


def test_what_is_drawn_is_what_was_found(found: list[Embedding], runs: list[RunRecord]) -> None:
    (group,), _ = group_runs(runs)
    inputs = ProbeInputs(torch.zeros(10, 1), torch.arange(10) % 2, "10 rows", ("even", "odd"))
    drawing = draw_panels(group, found, inputs)
    axes = drawing.figure.axes
    assert [a.get_title().partition("\n")[0] for a in axes] == [
        "local, 3 wide, by client", "local, 3 wide, by class", "local, 2 wide, by client", "local, 2 wide, by class",
    ]  # fmt: skip
    assert axes[0].get_title().endswith(f"silhouette {found[0].by_client:.3f}")
    assert axes[2].get_title().endswith("one group only")
    second = next(line for line in axes[0].lines if line.get_gid() == "points client 1")
    assert second.get_xdata().tolist() == found[0].points[4:, 0].tolist()
    odd = next(line for line in axes[3].lines if line.get_gid() == "points class odd")
    even = next(line for line in axes[3].lines if line.get_gid() == "points class even")
    assert odd.get_marker() != even.get_marker()
    assert odd.get_color() != even.get_color()
    assert len(odd.get_xdata()) == 4
    names = [[text.get_text() for text in legend.get_texts()] for legend in drawing.figure.legends]
    assert names == [["client 0", "client 1", "client 2"], ["class even", "class odd"]]
    assert len(drawing.rows) == 16
    assert "seed 0) of each client's representations of the same 4 to 8 inputs, from 10 rows" in drawing.about
