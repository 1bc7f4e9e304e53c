"""Modes of modules for a while, and what they leave behind."""

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.functional.modes import channels_first, dropout_layers, eval_mode, frozen_running_stats, without_dropout


def network():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(4, momentum=None))
    )
    with torch.no_grad():
        net(torch.randn(16, 4))
    return net


def flags(net):
    return [(m.training, getattr(m, "track_running_stats", None)) for m in net.modules()]


def state(net):
    return {k: v.clone() for k, v in net.state_dict().items()}


def test_evaluating_restores_each_flag_also_after_an_error():
    net = network()
    net[3].eval()
    before, weights = flags(net), state(net)
    with eval_mode(net) as inner:
        assert inner is net
        assert not any(m.training for m in net.modules())
        random = torch.get_rng_state()
        net(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(torch.get_rng_state(), random), "no dropout, no draw"
    assert flags(net) == before
    with pytest.raises(RuntimeError, match="inside"), eval_mode(net):
        raise RuntimeError("inside")
    assert flags(net) == before
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items())


def test_without_dropout_restores_each_flag_also_after_an_error():
    net = nn.Sequential(network(), nn.Dropout2d(0.5).eval(), nn.AlphaDropout(0.0))
    before, x = flags(net), torch.ones(3, 4)
    assert dropout_layers(net) == [net[0][2], net[1]]
    with without_dropout(net[0]) as inner:
        assert inner is net[0]
        assert torch.equal(net[0][2](x), x)
        assert net[0][1].training
    assert flags(net) == before
    assert not torch.equal(net[0][2](x), x)
    with pytest.raises(ValueError, match="no"), without_dropout(net):
        raise ValueError("no")
    assert flags(net) == before


@pytest.mark.parametrize("training", [True, False])
def test_untracked_statistics_uses_the_batch_and_leaves_buffers_alone(training):
    net = network().train(training)
    net[2].eval()
    before, weights = flags(net), state(net)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    with frozen_running_stats(net):
        out = net(x)
        assert net[2].training is False
    assert flags(net) == before
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items())
    h = net[0](x).detach().numpy()
    for _ in range(2):  # two fresh BatchNorm layers in a row, population variance of the batch
        h = (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5)
    np.testing.assert_allclose(out.detach().numpy(), h, atol=1e-5)
    net[1].train()
    net[1](x)
    assert net[1].num_batches_tracked == weights["1.num_batches_tracked"] + 1, "tracking is back on"


def test_convolutions_lie_channels_first_inside_also_after_an_error():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Conv2d(3, 1, 1), nn.Flatten(), nn.Linear(4, 2))
    net[0].to(memory_format=torch.channels_last)
    before = [(p.clone(), p.stride()) for p in net.parameters()]

    def fail_inside() -> None:
        with channels_first(net):
            assert net[0].weight.is_contiguous()
            assert all(torch.equal(p, old) for p, (old, _) in zip(net.parameters(), before, strict=True))
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    for p, (old, stride) in zip(net.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.stride() == stride
