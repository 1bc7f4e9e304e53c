"""FedKD: what is compressed and averaged, who is sent what, and which loss moves whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from polyfed import methods, testing
from polyfed.core.message import nbytes
from polyfed.functional.low_rank import decode, encode
from polyfed.methods import FedKD
from polyfed.testing import Reduction
from tests.helpers.toys import Round, batch, clients, federation, moved, rounds, same, samples


def trained(round: Round, number: int) -> dict[str, torch.Tensor]:
    """The mentee as the client has trained it."""
    weights, prefix = round.trained[number], "auxiliary_model."
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix) and t.is_floating_point()}


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("architecture", ["broad", "bn"])
def test_updates_are_truncated_averaged_and_truncated_again(weighting: Any, architecture: str) -> None:
    sizes, planned = [4, 12], 4
    method = FedKD(energy_start=0.6, energy_end=1.0, weighting=weighting, shared=architecture)
    history = rounds(method, clients(["wide", "shallow"], sizes), rounds=planned)
    shares = [0.25, 0.75] if weighting == "samples" else [0.5, 0.5]
    for number, round in enumerate(history):
        energy = 0.6 + 0.4 * number / planned
        m = round.before["auxiliary_model"]
        whole = [name for name in m if "running" in name]
        updates = []
        for i in (0, 1):
            encoded = encode({name: trained(round, i)[name] - t for name, t in m.items()}, energy, exempt=whole)
            updates.append(decode(round.up[i], m))
            assert moved(updates[i], decode(encoded, m)) < 1e-6
            assert (
                nbytes(round.up[i]) == 4 * sum(t.numel() for entries in encoded.values() for t in entries.values()) + 8
            )
        mean = {name: sum(s * u[name] for s, u in zip(shares, updates, strict=True)) for name in m}
        sent = decode(encode(mean, energy, exempt=whole), m)
        assert moved(round.after["auxiliary_model"], {name: t + sent[name] for name, t in m.items()}) < 2e-6
    signs = {float(t.sum().sign()) for t in updates[0].values()}
    assert signs >= {-1.0, 1.0}


def test_everybody_who_works_holds_the_servers_mentee_bit_for_bit() -> None:
    kinds = ["wide", "broad", "shallow", "deep"]
    history = rounds(
        FedKD(shared="bn"), clients(kinds), rounds=6, client_fraction=0.5, lose=lambda r, i: r == 3 and i < 2
    )
    forms = set()
    for before, round in zip([None, *history], history, strict=False):
        answered = (
            set()
            if before is None
            else {i for i, u in before.up.items() if not (before.record["round"] == 3 and i < 2)}
        )
        for number, message in round.down.items():
            if round.record["round"] != 3 or number > 1:  # what is lost leaves nothing behind
                assert same(round.states[number]["synced"], round.before["auxiliary_model"])
            full = "model" in message
            assert full == (number not in answered), "who does not hold the m from before is sent m itself"
            forms.add(full)
            if full:
                assert same(message["model"], round.before["auxiliary_model"])
                assert nbytes(message) == 4 * sum(t.numel() for t in round.before["auxiliary_model"].values())
            assert round.record["bytes_by_client"][str(number)]["down"] == nbytes(message)
    assert forms == {True, False}


@pytest.mark.parametrize(("distil", "mimic"), [(1.0, 1.0), (2.0, 0.0), (0.0, 0.5)])
def test_each_loss_moves_its_own_network(distil: float, mimic: float) -> None:
    """L_w the mentor alone, L_m mentee and projector alone; s is a number."""
    method, data = FedKD(distillation_weight=distil, hidden_weight=mimic, shared="broad"), batch(samples(8, 0))
    fed, _ = federation(method, clients(["wide"]))
    pair: Any = fed.model_factory.module("wide")
    assert pair.projector.weight.shape == (5, 8)
    assert pair.projector.bias is None
    h_w, h_m = pair.own.represent(data.x), pair.auxiliary_model.represent(data.x)
    z_w, z_m, seen = pair.own.head(h_w), pair.auxiliary_model.head(h_m), pair.projector(h_m)
    ce_w, ce_m = F.cross_entropy(z_w, data.y), F.cross_entropy(z_m, data.y)
    s = (ce_w + ce_m).item()

    def kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
        return F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")

    l_w = ce_w + distil * kl(z_m, z_w) / s + mimic * F.mse_loss(h_w, seen.detach()) / s
    l_m = ce_m + distil * kl(z_w, z_m) / s + mimic * F.mse_loss(seen, h_w.detach()) / s
    found = method.gradients(pair, data, {})
    assert float(found.loss) == pytest.approx((l_w + l_m).item(), rel=1e-5)
    names = dict(pair.named_parameters())
    for prefix, loss in (("own.", l_w), ("auxiliary_model.", l_m), ("projector.", l_m)):
        mine = {n: p for n, p in names.items() if n.startswith(prefix)}
        grads = torch.autograd.grad(loss, list(mine.values()), retain_graph=True, allow_unused=True)
        for name, expected in zip(mine, grads, strict=True):
            torch.testing.assert_close(
                found.grads[name], torch.zeros_like(mine[name]) if expected is None else expected
            )


test_conformance = testing.conformance(
    methods.FedKD(distillation_weight=1.5, hidden_weight=0.5),
    changed_values={"shared": "largest"},
    reductions=[Reduction({"distillation_weight": 0.0, "hidden_weight": 0.0}, methods.Local(), part="own.")],
)
