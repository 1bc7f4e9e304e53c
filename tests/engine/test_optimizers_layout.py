"""An optimizer whose parameters lie in memory in another order than its gradients or what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyfed.core.settings import Training
from polyfed.engine.optimizers import Optimizer


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_what_is_kept_of_some_rows_lies_as_their_parameters(optimizer: str) -> None:
    """Also where the others' parameters lay row by row; PyTorch's fused steps would mix the entries up."""
    training = Training(optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    draws = torch.Generator().manual_seed(0)
    start, first, second = (torch.randn(3, 4, 5, generator=draws) for _ in range(3))
    rows = torch.tensor([0, 2])

    def moved(before: Tensor, after: Tensor) -> Tensor:
        """Two steps, the second of two rows."""
        whole = Optimizer([before], training, 0.1)
        whole.step([first])
        after.copy_(before[rows])
        part = Optimizer([after], training, 0.1)
        part.copy_state_from(whole, rows)
        part.step([second[rows]])
        return after

    plain = moved(start.clone(), torch.empty(2, 4, 5))
    by_columns = moved(start.clone(), torch.empty(2, 5, 4).mT)
    assert torch.equal(plain, by_columns)
