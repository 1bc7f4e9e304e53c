"""ProtoNorm: prototypes pushed apart on the sphere and sent at one length."""

from __future__ import annotations

import pytest
import torch

from polyfed.functional import server_prototypes
from polyfed.methods import ProtoNorm
from tests.helpers.few_classes import members
from tests.helpers.toys import CLASSES, rounds


def test_the_means_are_averaged_spread_and_lengthened() -> None:
    first, second = rounds(ProtoNorm(spread_steps=20, scale=3.0), members())
    rows, labels = (torch.cat([m[name] for m in first.up.values()]) for name in ("prototypes", "labels"))
    averaged = torch.stack([rows[labels == c].mean(0) for c in range(CLASSES)])
    torch.testing.assert_close(first.after["prototypes"], averaged, atol=1e-6, rtol=0)
    expected = 3 * server_prototypes.spread(averaged, 20)  # itself in tests/functional/test_server_prototypes.py
    for message in second.down.values():
        parts = [message, *([message["others"]] if "others" in message else [])]
        sent = {int(c): row for part in parts for c, row in zip(part["labels"], part["prototypes"], strict=True)}
        torch.testing.assert_close(torch.stack([sent[c] for c in range(CLASSES)]), expected, atol=1e-5, rtol=0)
    assert expected.norm(dim=1).tolist() == pytest.approx([3.0] * CLASSES)
