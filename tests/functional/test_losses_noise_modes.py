"""Losses, noise and modes against NumPy and torch's own (fedin 8.5, 8.10; fedgh 8.2)."""

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.functional.losses import cross_entropy, kl_divergence, mse_loss, task_loss
from polyfed.functional.modes import channels_first, dropout_layers, eval_mode, frozen_running_stats, without_dropout
from polyfed.functional.noise import add_noise


def batch(n=9, c=4, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return (
        5 * torch.randn(n, c, generator=g, dtype=dtype),
        torch.randint(0, c, (n,), generator=g),
        torch.rand(n, generator=g, dtype=dtype),
    )


def test_no_rows_give_no_loss_and_no_gradient():
    logits, y, w = batch()
    logits.requires_grad_()
    loss = cross_entropy(logits, y, 0 * w)
    loss.backward()
    assert loss == 0
    assert logits.grad.eq(0).all()


def test_squared_gaps_against_numpy_are_means_over_columns_and_train_the_first_alone():
    g = torch.Generator().manual_seed(3)
    found, target = (torch.randn(5, 4, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    w = torch.tensor([1.0, 0.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    value = mse_loss(found, target, w)
    gap, share = (found - target).detach().numpy(), w.numpy() / w.sum().item()
    assert gap.min() < 0 < gap.max()
    assert value.item() == pytest.approx((share * np.square(gap).mean(1)).sum())
    mine, other = torch.autograd.grad(value, (found, target), allow_unused=True)
    np.testing.assert_allclose(mine.numpy(), share[:, None] * 2 * gap / 4)
    assert other is None
    assert mse_loss(found, target, 0 * w).item() == 0
    with pytest.raises(ValueError, match="found and target"):
        mse_loss(found, target[:, :3], w)


def test_divergence_against_numpy_sums_over_classes_and_trains_the_first_alone():
    g = torch.Generator().manual_seed(5)
    q, p = (torch.randn(4, 6, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64)
    probabilities = [np.exp(t.detach().numpy()) for t in (p, q)]
    probabilities = [e / e.sum(1, keepdims=True) for e in probabilities]
    rows = (probabilities[0] * np.log(probabilities[0] / probabilities[1])).sum(1)
    found = kl_divergence(q, p, w)
    assert found.item() == pytest.approx((rows * w.numpy()).sum() / 4)
    found.backward()
    assert p.grad is None
    expected = w.numpy()[:, None] * (probabilities[1] - probabilities[0]) / 4
    np.testing.assert_allclose(q.grad.numpy(), expected, atol=1e-12)
    assert {np.sign(v) for v in expected.ravel()} >= {-1.0, 1.0}
    assert kl_divergence(p, p + 3, w).item() == pytest.approx(0, abs=1e-12)
    assert kl_divergence(q, p, 0 * w).item() == 0
    with pytest.raises(ValueError, match="found and target"):
        kl_divergence(q, p[:, :3], w)


def test_bad_losses():
    logits, y, w = batch()
    with pytest.raises(ValueError, match=r"got \(9, 4\), \(9,\) and \(8,\)"):
        cross_entropy(logits, y, w[:8])


def test_noise_by_hand_and_its_standard_deviation():
    g = torch.Generator().manual_seed(0)
    s = 3 * torch.randn(64, 512, generator=g) + 7
    z = torch.randn(s.shape, generator=g)
    noisy = add_noise(s, 0.8, z)
    np.testing.assert_allclose(noisy.numpy(), s.numpy() + 0.8 * s.numpy().std(dtype=np.float64) * z.numpy(), atol=1e-5)
    ratio = float((noisy - s).std() / s.std())
    assert ratio == pytest.approx(0.8, rel=0.01)
    assert ratio**2 == pytest.approx(0.64, rel=0.02), "the variance ratio is 0.64, not 0.8"
    assert not torch.equal(noisy, add_noise(s, 0.4, z))


def test_sigma_is_constant_for_the_gradient_and_per_client_under_vmap():
    g = torch.Generator().manual_seed(0)
    s, z = torch.randn(3, 5, 4, generator=g), torch.randn(3, 5, 4, generator=g)
    s[1] *= 10
    grad = torch.func.grad(lambda s: (add_noise(s, 0.8, z[0]) * z[1]).sum())(s[0])
    torch.testing.assert_close(grad, z[1])
    together = torch.func.vmap(lambda s, z: add_noise(s, 0.8, z))(s, z)
    for k in range(3):
        torch.testing.assert_close(together[k], add_noise(s[k], 0.8, z[k]))


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


def test_the_task_loss_is_that_of_classes_or_of_numbers() -> None:
    g = torch.Generator().manual_seed(5)
    outputs, w = torch.randn(7, 3, generator=g), torch.tensor([1.0, 1, 0, 1, 0, 1, 1])
    y = torch.tensor([0, 2, 1, 1, 0, 2, 2])
    assert torch.equal(task_loss(outputs, y, w), cross_entropy(outputs, y, w))
    one, targets = outputs[:, :1], outputs[:, 1]
    expected = np.average((one[:, 0] - targets).numpy().astype(float) ** 2, weights=w.numpy())
    assert float(task_loss(one, targets, w)) == pytest.approx(expected)
    one.requires_grad_()
    task_loss(one, targets, w).backward()
    slopes = 2 * w * (one.detach()[:, 0] - targets) / w.sum()
    torch.testing.assert_close(one.grad[:, 0], slopes)
    with pytest.raises(ValueError, match="expected found and target"):
        task_loss(outputs, targets, w)  # three outputs for one number
    with pytest.raises(ValueError, match=r"expected whole numbers as classes, got torch\.float32"):
        cross_entropy(outputs, targets, w)
