"""The diagonal Fisher information and the length of an update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyfed.core import inference
from polyfed.core.client import to_float
from polyfed.core.inference import fisher_diagonal
from polyfed.data.samples import LabeledSamples
from polyfed.functional.clipping import clip_and_noise


def data(n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=g), torch.randint(0, 3, (n,), generator=g)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def test_all_rows_in_whatever_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = linear(), data(11)
    expected = fisher_diagonal(model, x, y)
    for rows in (1, 3, 5, 64):
        monkeypatch.setattr(inference, "BACKWARD_ROWS", rows)
        for name, value in inference.fisher_information(model, LabeledSamples(x, y), to_float).items():
            torch.testing.assert_close(value, expected[name] / 11)


class Recurrent(nn.Module):
    """Reads four numbers one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x[:, :, None])[0][:, -1])


class Branching(nn.Module):
    """Takes a step that vmap cannot follow, as it depends on the numbers; uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.b(self.a(x)) if x.sum() > 0 else self.a(x).tanh())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))


@pytest.mark.parametrize("build", [linear, network, Recurrent, Branching])
def test_sample_by_sample_in_eval_mode_and_nothing_else_changes(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, (x, y) = build().train(), data()
    next(model.parameters()).requires_grad_(build is not network)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = fisher_diagonal(model, x, y)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    model.eval()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == parameters.keys()
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        for name, g in zip(total, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True), strict=True):
            total[name] += 0 if g is None else g.square()
    for name, value in total.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


PLACES = {"a": torch.tensor([[0.5, -2.0], [1.0, 0.1]]), "b": torch.tensor([0.4, -0.3])}


@pytest.mark.parametrize("bound", [0.5, 100.0])
def test_an_update_is_shortened_to_the_bound(bound: float) -> None:
    update = {name: PLACES[name] * 3 for name in PLACES}
    norm = float(torch.cat([t.flatten() for t in update.values()]).norm())
    found = clip_and_noise(update, bound, 0.0, torch.Generator())
    for name, t in update.items():
        torch.testing.assert_close(found[name], t * min(1.0, bound / norm))


def test_noise_is_added_to_what_was_shortened() -> None:
    update = {"a": torch.full((200, 200), 5.0), "b": torch.zeros(3)}
    calm = clip_and_noise(update, 1.0, 0.0, torch.Generator())
    found = clip_and_noise(update, 1.0, 0.3, torch.Generator().manual_seed(0))
    added = found["a"] - calm["a"]
    assert float(added.std()) == pytest.approx(0.3, rel=0.02)
    assert abs(float(added.mean())) < 0.01
    assert found["b"].all()
