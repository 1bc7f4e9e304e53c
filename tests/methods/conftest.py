"""The helpers of these tests are in `tests/helpers/toys.py`; here only a check that one process means one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
