"""Early exits: where they are, what they compute, and the network up to one of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from polyfed.errors import ConfigError
from polyfed.methods.building_blocks.early_exits import add_early_exits
from polyfed.models import build
from polyfed.models.networks.resnet import PreActBottleneck
from tests.helpers.toys import Forward

DEPTHS = (0.4, 0.55, 0.7, 0.85, 1.0)


@pytest.mark.parametrize(
    ("name", "shape", "of", "blocks"),
    [
        ("resnet10", (3, 32, 32), 5, (2, 3, 4, 5)),  # the stem and four residual blocks
        pytest.param("resnet26-cifar", (3, 32, 32), 13, (6, 8, 10, 12, 13), marks=pytest.mark.slow),
        ("fedgh-cnn1", (3, 32, 32), 4, (2, 3, 4)),  # two convolutions, two hidden layers
        ("fedhenn-h5", (3, 32, 32), 5, (2, 3, 4, 5)),
        ("digits-cnn1", (1, 8, 8), 2, (1, 2)),
    ],
)
def test_exits_lie_behind_shares_of_the_blocks(name, shape, of, blocks):
    model = build(name, shape, 10).eval()
    keys, x = list(model.state_dict()), torch.randn(2, *shape)
    expected = model(x)
    exits = add_early_exits(model, DEPTHS).eval()
    assert (exits.of, exits.blocks, exits.architecture) == (of, blocks, name)
    assert [out.shape for out in exits(x)] == [(2, 10)] * len(blocks)
    assert torch.equal(exits(x)[-1], expected)
    assert torch.equal(exits.final_exit()(x), expected)
    assert sorted(exits.final_exit().state_dict()) == sorted(keys)
    early = {name.split(".")[1] for name in exits.state_dict() if name not in keys}
    assert early == {f"block{count}" for count in blocks[:-1]}


def test_an_exit_is_a_linear_layer_on_the_means_of_its_block():
    model = build("resnet10", (3, 32, 32), 7).eval()
    stem = model.extractor
    exits, x = add_early_exits(model, DEPTHS).eval(), torch.randn(2, 3, 32, 32)
    own, h = exits.state_dict(), stem(x)
    for count, out in zip(exits.blocks[:-1], exits(x), strict=False):
        h = model.intermediate.get_submodule(f"stage{count - 1}")(h)
        by_hand = F.linear(
            h.mean((2, 3)), own[f"early_exits.block{count}.linear.weight"], own[f"early_exits.block{count}.linear.bias"]
        )
        torch.testing.assert_close(out, by_hand)


def test_hidden_layers_are_blocks_and_dropout_and_pooling_belong_to_them():
    hidden = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU()]
    model = add_early_exits(nn.Sequential(nn.Flatten(), *hidden, nn.Linear(5, 3)), (0.3, 0.6, 1.0))
    assert (model.blocks, model.of) == ((1, 2, 3), 3)
    assert model.early_exits.block1.linear.in_features == 8
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.MaxPool2d(2)]
    rest = [nn.Conv2d(4, 6, 1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(24, 3)]
    exits = add_early_exits(nn.Sequential(*layers, *rest), (0.5, 1.0)).eval()
    x = torch.randn(5, 1, 6, 6)
    inner = nn.Sequential(*layers).eval()(x).mean((2, 3))
    torch.testing.assert_close(exits(x)[0], exits.early_exits.block1.linear(inner))
    assert list(dict(exits.early_exits.block1.named_children())) == ["pool", "flatten", "linear"]


def test_behind_a_plain_sum_the_exit_normalizes_first():
    body = [nn.Conv2d(3, 8, 3, padding=1), PreActBottleneck(8, 2, 1), PreActBottleneck(8, 2, 1)]
    tail = [nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)]
    exits, x = add_early_exits(nn.Sequential(*body, *tail), (0.6, 1.0)).eval(), torch.randn(4, 3, 8, 8)
    assert (exits.blocks, exits.of) == ((2, 3), 3)
    assert list(dict(exits.early_exits.block2.named_children())) == ["norm", "relu", "pool", "flatten", "linear"]
    norm, sums = exits.early_exits.block2.norm, nn.Sequential(*body[:2]).eval()(x)
    torch.testing.assert_close(exits(x)[0], exits.early_exits.block2.linear(norm(sums).relu().mean((2, 3))))
    plain = add_early_exits(Forward(lambda m, x: m.b(x1 := m.a(x)) + x1, a=nn.Linear(4, 6), b=nn.Linear(6, 6)), (1.0,))
    assert plain.blocks == (1,)  # the sum is the head; nothing is attached


def test_the_network_up_to_an_exit_has_what_it_needs_and_shares_it():
    model = build("resnet14", (3, 32, 32), 10)
    whole, x = add_early_exits(model, DEPTHS).eval(), torch.randn(2, 3, 32, 32)
    part = whole.truncated(0.55)  # 4 of 7 blocks: the stem, stages 1 and 2, one block of stage 3
    assert part.blocks == (3, 4)
    tops = {".".join(name.split(".")[:3]) for name in part.state_dict()}
    assert {t for t in tops if t.startswith("intermediate")} == {f"intermediate.stage{s}.0" for s in (1, 2, 3)}
    assert {t for t in tops if t.startswith(("early", "head"))} == {f"early_exits.block{b}.linear" for b in (3, 4)}
    assert all(torch.equal(a, b) for a, b in zip(part(x), whole(x), strict=False))
    before = part(x)
    with torch.no_grad():
        for name, p in whole.named_parameters():
            if name not in dict(part.named_parameters()):
                p.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(part(x), before, strict=True))
    with torch.no_grad():
        model.extractor.conv1.weight.mul_(2)
    assert not torch.equal(part(x)[0], before[0])
    assert torch.equal(part.final_exit()(x), part(x)[-1])
    assert "early_exits.block3.linear.weight" not in part.final_exit().state_dict()


def in_place(m, x):
    h = m.a(x)
    h.relu_()
    return m.b(h)


AB = {"a": nn.Linear(4, 6), "b": nn.Linear(6, 3)}


@pytest.mark.parametrize(
    ("network", "why"),
    [
        (
            build("fedhenn-h1", (3, 32, 32), 10),
            "fedhenn-h1 has no place for an early exit at depth 0.4: it has 1 block ",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "Sequential has no place .*: it has 0 blocks .*heterofl"),
        (nn.Sequential(nn.Flatten(), nn.ReLU()), "Sequential has no layer to train"),
        (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), "cannot be cut.*'1' is a LayerNorm"),
        (Forward(in_place, **AB), "the result of 'relu_' is not used"),
        (
            Forward(lambda m, x: m.b(F.dropout(m.a(x), 0.5, m.training)), **AB),
            "takes other steps in training than in scoring",
        ),
        (
            Forward(lambda m, x: m.b(m.early_exits(m.a(x))), **AB, early_exits=nn.Linear(6, 6)),
            "has a part named 'early_exits' of its own",
        ),
    ],
)
def test_a_network_without_a_place_is_refused_in_one_line(network, why):
    with pytest.raises(ConfigError, match=why) as caught:
        add_early_exits(copy.deepcopy(network), (0.4, 0.6, 1.0))
    assert "\n" not in str(caught.value)
