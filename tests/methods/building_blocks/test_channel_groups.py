"""Channel plans, read off networks; and what they make of the networks of the zoo."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from polyfed.errors import ConfigError
from polyfed.functional.channel_slices import OUTPUT, WHOLE, Axis, first_channels, slice_channels
from polyfed.methods.building_blocks.channel_groups import channel_plan, narrow_model
from polyfed.models import build
from polyfed.registry import MODELS
from tests.helpers.quick import others_slow
from tests.helpers.toys import Forward

RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)


def narrowed(module: nn.Module, rate: float) -> nn.Module:
    plan = channel_plan(module)
    return narrow_model(copy.deepcopy(module), plan.channels(lambda size: first_channels(size, rate)))


def test_a_cnn_and_an_mlp_have_one_group_per_hidden_layer():
    plan = channel_plan(build("digits-cnn5", (1, 8, 8), 10))
    assert list(plan.sizes.values()) == [16, 32, 64, 64]
    assert plan.axes["extractor.conv1.weight"] == (Axis(2), Axis(WHOLE), Axis(WHOLE), Axis(WHOLE))
    assert plan.axes["intermediate.conv2.weight"][:2] == (Axis(3), Axis(2))
    assert plan.axes["intermediate.fc1.weight"] == (Axis(5), Axis(4, repeat=4))  # 2 x 2 pixels a channel
    assert plan.axes["head.weight"] == (Axis(OUTPUT), Axis(5))
    assert plan.axes["head.bias"] == (Axis(OUTPUT),)
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    assert channel_plan(mlp).axes["1.weight"] == (Axis(2), Axis(WHOLE))
    assert channel_plan(mlp).axes["5.weight"] == (Axis(OUTPUT), Axis(3))


def test_a_residual_stream_is_one_group():
    plan = channel_plan(build("resnet14", (3, 32, 32), 10))
    stream = plan.axes["extractor.conv1.weight"][0]
    for name in ("extractor.bn1.weight", "extractor.bn1.running_var", "intermediate.stage1.0.conv2.weight"):
        assert plan.axes[name][0] == stream
    third = plan.axes["intermediate.stage3.0.shortcut.conv.weight"]
    for name in ("stage3.0.conv2.weight", "stage3.0.bn2.bias", "stage3.0.shortcut.bn.weight", "stage3.1.conv2.weight"):
        assert plan.axes[f"intermediate.{name}"][0] == third[0]
    assert plan.axes["intermediate.stage3.1.conv1.weight"][1] == third[0]
    assert third[1] == plan.axes["intermediate.stage2.0.conv2.weight"][0]
    inner = [plan.axes[f"intermediate.stage3.{i}.conv1.weight"][0] for i in (0, 1)]
    assert len({*inner, third[0], third[1]}) == 4
    assert len(plan.sizes) == 4 + 6  # streams, insides of blocks


def test_what_is_added_to_the_input_stays_whole():
    """A stream that begins with the input cannot be cut; what is inside can."""
    layers = {"one": nn.Conv2d(3, 5, 3, padding=1), "two": nn.Conv2d(5, 3, 3, padding=1), "out": nn.Linear(48, 2)}
    plan = channel_plan(Forward(lambda m, x: m.out((x + m.two(m.one(x).relu()) * 0.5).flatten(1)), **layers))
    assert plan.sizes == {2: 5}
    assert plan.axes["two.weight"][:2] == (Axis(WHOLE), Axis(2))
    assert plan.axes["out.weight"] == (Axis(OUTPUT), Axis(WHOLE))


# Networks for series and texts; and, of those for images, transformers.
CANNOT_BE_CUT = ("cnn1d", "series-", "harcnn", "text-", "fasttext", "fedhenn-lstm", "vit")
LEFT_OUT = ("resnet2", "resnet14", "resnet8-gn", "resnet10-gn", "resnet12-gn", *CANNOT_BE_CUT)
ZOO = [n for n in MODELS if "152" not in n and not n.startswith(LEFT_OUT)]


@pytest.mark.parametrize("name", others_slow(ZOO, quick=("digits-cnn3", "fedgh-cnn1", "resnet10-cifar")))
def test_all_of_the_zoo_is_cut(name):
    shape = (1, 8, 8) if name.startswith("digits") else (3, 32, 32)
    model = build(name, shape, 10).eval()
    x, before = torch.randn(2, *shape), copy.deepcopy(model)
    plan, small = channel_plan(model), narrowed(model, 0.25)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in before.state_dict().items())
    expected = slice_channels(
        plan, dict(model.named_parameters()), plan.channels(lambda size: first_channels(size, 0.25))
    )
    assert {n: p.shape for n, p in small.named_parameters()} == {n: t.shape for n, t in expected.items()}
    assert small(x).shape == (2, 10)
    assert small.feature_dim == small.head.in_features < model.feature_dim
    assert torch.equal(narrowed(model, 1.0)(x), model(x))


def test_resnet152_has_the_counts_of_heterofl():
    with torch.device("meta"):  # no memory
        model = build("resnet152-preact-1000", (3, 32, 32), 10)
    plan, weights = channel_plan(model), dict(model.named_parameters())
    cuts = [
        slice_channels(plan, weights, plan.channels(lambda size, rate=rate: first_channels(size, rate)))
        for rate in RATES
    ]
    found = [sum(t.numel() for t in cut.values()) for cut in cuts]
    assert found == [60_177_448, 15_593_480, 4_173_304, 1_181_168, 364_588]
    assert sum(found) / 5 == 16_297_997.6
    small = narrow_model(model, plan.channels(lambda size: first_channels(size, RATES[-1])))
    assert sum(p.numel() for p in small.parameters()) == found[-1]


CONV = {"conv": nn.Conv2d(1, 4, 3), "fc": nn.Linear(4, 2)}


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)), "'1' is a GroupNorm"),
        (nn.Sequential(nn.Conv2d(4, 8, 3, groups=2)), "'0' is a convolution in groups"),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Linear(4, 3)), "'1' is a linear layer on channels that are not flatt"),
        (nn.Sequential(nn.Linear(4, 6), nn.Flatten(), nn.Linear(24, 3)), "'2' takes 24 channels where 6 come"),
        (Forward(lambda m, x: m.fc(torch.cat([m.conv(x), m.conv(x)], 1).flatten(1)), **CONV), "'conv.weight' is used"),
        (Forward(lambda m, x: m.fc(torch.cat([m.conv(x), x], 1).flatten(1)), **CONV), "what 'cat' does to channels"),
        (Forward(lambda m, x: m.fc(m.conv(x if x.sum() > 0 else -x).flatten(1)), **CONV), "cannot be recorded"),
        (
            Forward(lambda m, x: m.a(x) + m.b(x), a=nn.Conv2d(1, 4, 3), b=nn.Conv2d(1, 2, 3)),
            "'add' adds 4 channels to 2",
        ),
        (Forward(lambda m, x: m.fc(x) * m.fc.weight.sum(), fc=nn.Linear(4, 2)), "'fc.weight' is used outside a layer"),
        (Forward(lambda m, x: {"a": m.fc(x)}, fc=nn.Linear(4, 2)), "it returns something else than a tensor"),
    ],
)
def test_what_cannot_be_cut_is_said_in_one_line(module, why):
    with pytest.raises(ConfigError, match=f"cannot be cut to narrower networks: .*{why}") as caught:
        channel_plan(module)
    assert "\n" not in str(caught.value)
