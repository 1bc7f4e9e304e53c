"""The temperature of scores: found again where labels were drawn by it, and moved little by few rows."""

from __future__ import annotations

import pytest
import torch

from polyfed.functional.closed_forms import fit_temperature

SHARES = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("true", [1.0, 0.25, 1 / 16])
def test_the_temperature_by_which_labels_were_drawn_is_found(true: float) -> None:
    g = torch.Generator().manual_seed(0)
    scores = 4 / true * torch.randn(3000, 4, generator=g, dtype=torch.float64)
    y = torch.multinomial((true * scores + SHARES.log()).softmax(dim=1), 1, generator=g)[:, 0]
    assert fit_temperature(scores, y, torch.ones(4), SHARES) == true
    lacking = torch.full((500,), 3)  # rows of a class that is never predicted
    more = fit_temperature(torch.cat([scores, scores[:500]]), torch.cat([y, lacking]), torch.ones(4), SHARES)
    assert more == true


def test_without_rows_it_is_the_usual_one_and_a_row_moves_it_by_little() -> None:
    scores = torch.tensor([[0.0, 50.0, 0.0, 0.0]], dtype=torch.float64)
    assert fit_temperature(scores[:0], torch.tensor([], dtype=torch.int64), SHARES, SHARES) == 0.5
    assert fit_temperature(scores, torch.tensor([1]), SHARES, SHARES) == 0.5
    assert 0 < fit_temperature(scores, torch.tensor([0]), SHARES, SHARES) < 0.25
