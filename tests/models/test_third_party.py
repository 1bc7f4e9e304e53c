"""Networks of other packages by name, and networks that polyfed cuts where it sees fit."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.errors import ConfigError
from polyfed.models import SplitModel, build, cut_shapes, with_projection
from polyfed.models.adapt import Adapted, split
from polyfed.models.third_party import auto_split, python_source

IMAGE = (1, 32, 32)


class Residual(nn.Module):
    """Named as ResNets are, with dropout and BatchNorm; branches meet again behind `layer1`."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.layer1, self.layer2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.side, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.5)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.bn1(self.conv1(x)).relu())
        x = torch.cat([self.layer2(x), self.side(x)], dim=1)
        return self.fc(self.drop(x.mean((2, 3))))


def residual(in_shape: tuple[int, ...], classes: int) -> nn.Module:
    return Residual(in_shape[0], classes)


def already(in_shape: tuple[int, ...], classes: int) -> SplitModel:
    return split(Residual(in_shape[0], classes))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """The file at hand, under a name that can be imported."""
    monkeypatch.setitem(sys.modules, "our_nets", sys.modules[__name__])
    return "our_nets"


def same_in_train_mode(model: SplitModel, x: Tensor) -> None:
    """Two steps with dropout and BatchNorm: split and whole end with the same weights and statistics, bit for bit."""
    assert isinstance(model, Adapted)
    ended = []
    for whole in (False, True):
        again = build(model.architecture, tuple(x.shape[1:]), 5)
        again.load_state_dict(model.state_dict())
        assert isinstance(again, Adapted)
        network = again.original.train() if whole else again.train()
        steps = torch.optim.SGD(network.parameters(), lr=0.1)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            for _ in range(2):
                steps.zero_grad()
                out = network(x)
                getattr(out, "logits", out).square().sum().backward()
                steps.step()
        ended.append(again.export())
    assert all(torch.equal(tensor, ended[1][name]) for name, tensor in ended[0].items())
    assert any(not torch.equal(tensor, ended[0][name]) for name, tensor in model.export().items())


@pytest.mark.parametrize(
    ("end", "extractor"), [("", "layer1"), ("@bn1", "bn1"), ("@layer1", "layer1"), ("@none", None)]
)
def test_a_module_of_ones_own_is_cut_where_its_name_says(here: str, end: str, extractor: str | None) -> None:
    name = f"{here}:residual{end}"
    model = build(name, IMAGE, 5)
    assert isinstance(model, Adapted)
    assert (model.architecture, model.head_name, model.extractor_name, model.feature_dim) == (name, "fc", extractor, 8)
    assert (model.names("intermediate") == ()) == (extractor is None)
    same_in_train_mode(model, torch.rand(4, *IMAGE))


def test_without_a_usual_name_all_before_the_head_is_the_extractor() -> None:
    model = auto_split(nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), "mine", 3, None)
    assert model.names("extractor") == ("original.1.weight", "original.1.bias")
    assert model.names("head") == ("original.3.weight", "original.3.bias")


def test_a_block_that_cannot_be_cut_after_is_passed_over() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1, self.blocks, self.fc = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.blocks(self.layer1(x) + x).relu())

    class Across(Around):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer1(x)
            return self.fc(self.blocks(y.relu()) + y)

    assert auto_split(Around(), "mine", 3, None).extractor_name == "blocks.0"  # type: ignore[attr-defined]
    assert auto_split(Across(), "mine", 3, None).extractor_name == "layer1"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="'add', after the cut, also needs"):
        auto_split(Around(), "mine", 3, "layer1")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("our_nets:residual@layer9", "no submodule 'layer9' to be its extractor; did you mean 'layer"),
        ("our_nets:already@layer1", "is a SplitModel already; expected no '@layer1'"),
        ("our_nets:Tensor", "failed"),
        ("digits-cnn1@extractor", "is a SplitModel already"),
    ],
)
def test_names_that_are_refused(here: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        build(name, IMAGE, 3)
    assert "\n" not in str(caught.value)


# the packages: a stand-in, which every machine has, and the real ones -------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A timm of two networks; what they were made with."""
    made: list[dict[str, Any]] = []

    def create_model(name: str, *, num_classes: int, in_chans: int, **rest: Any) -> nn.Module:
        made.append({"name": name, "num_classes": num_classes, "in_chans": in_chans, **rest})
        return Residual(in_chans, num_classes) if name == "net10" else nn.Sequential(nn.Conv2d(3, 2, 40))

    timm = types.ModuleType("timm")
    timm.is_model = ["net10", "patch16"].__contains__  # type: ignore[attr-defined]
    timm.list_models = lambda: ["net10", "patch16"]  # type: ignore[attr-defined]
    timm.get_pretrained_cfg = lambda name: types.SimpleNamespace(fixed_input_size=name == "patch16")  # type: ignore[attr-defined]
    timm.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    return made


def test_a_network_of_timm_gets_channels_classes_and_size(fake: list[dict[str, Any]]) -> None:
    model = build("timm:net10", IMAGE, 5)
    assert model(torch.rand(2, *IMAGE)).shape == (2, 5)
    with pytest.raises(ConfigError, match=r"^timm:patch16 cannot take 3 x 32 x 16 images \(RuntimeError.*image_size"):
        build("timm:patch16", (3, 32, 16), 7)
    assert fake == [
        {"name": "net10", "num_classes": 5, "in_chans": 1},
        {"name": "patch16", "num_classes": 7, "in_chans": 3, "img_size": (32, 16)},
    ]
    lines = python_source("timm:net10@layer1", with_projection(model, 6), IMAGE, 5)
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    assert not any("polyfed" in line for line in lines)
    names["model"].load_state_dict(with_projection(model, 6).export())


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("timm:net1O", "unknown model 'timm:net1O'; did you mean 'timm:net10'?"),
        ("timm:something", r"unknown model 'timm:something'; timm.list_models\(\) lists"),
        ("timm:net10@layer3", "no submodule 'layer3' to be its extractor"),
    ],
)
def test_unknown_names(fake: list[dict[str, Any]], name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(name, IMAGE, 3)


@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:resnet18", "hf:owner/name"])
@pytest.mark.parametrize("error", [ImportError("No module\nhere"), RuntimeError("operator nms does not exist")])
def test_a_package_that_is_missing_or_broken(name: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(package: str) -> None:
        raise error

    monkeypatch.setattr("polyfed.models.third_party.importlib", types.SimpleNamespace(import_module=fail))
    with pytest.raises(ConfigError, match=r"cannot be imported \(.*pip install 'polyfed\[vision\]'") as caught:
        build(name, IMAGE, 3)
    assert "\n" not in str(caught.value)


def loads_without_polyfed(name: str, model: SplitModel, shape: tuple[int, ...], classes: int) -> None:
    """The lines make a network that takes the exported weights and then says the same."""
    names: dict[str, Any] = {}
    exec("\n".join(python_source(name, model, shape, classes)), names)
    other = names["model"]
    other.load_state_dict(model.export())
    x = torch.rand(2, *shape)
    with torch.no_grad():
        out = other.eval()(x)
        assert torch.equal(getattr(out, "logits", out), model.eval()(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "s_in", "width"),
    [
        ("timm:resnet10t", (64, 8, 8), 512),
        ("timm:vit_tiny_patch16_224", (5, 192), 192),
        ("timm:convnext_atto", (40, 8, 8), 320),
        ("torchvision:resnet18", (64, 8, 8), 512),
        ("torchvision:mobilenet_v2", (16, 16, 16), 1280),
        ("torchvision:googlenet", (1024,), 1024),  # in train mode it returns logits and those of two more heads
    ],
)
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_networks_of_the_packages(name: str, s_in: tuple[int, ...], width: int) -> None:
    pytest.importorskip(name.partition(":")[0], reason="the extra 'vision' is not installed")
    model = build(name, IMAGE, 5)
    assert (tuple(cut_shapes(model, torch.rand(2, *IMAGE))[0]), model.feature_dim) == (s_in, width)
    same_in_train_mode(model, torch.rand(4, *IMAGE))
    loads_without_polyfed(name, model, IMAGE, 5)
    with pytest.raises(ConfigError, match=r"unknown model '(timm|torchvision):resnet1O'; did you mean .*resnet1"):
        build(f"{name.partition(':')[0]}:resnet1O", IMAGE, 5)


@pytest.mark.slow
def test_networks_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'vision' is not installed")
    transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    ).save_pretrained(tmp_path / "net")
    name = f"hf:{tmp_path / 'net'}"
    model = build(name, IMAGE, 5)
    assert isinstance(model, Adapted)
    assert (model.head_name, cut_shapes(model, torch.rand(2, *IMAGE))[0]) == ("classifier.1", (8, 8, 8))
    same_in_train_mode(model, torch.rand(4, *IMAGE))
    loads_without_polyfed(name, model, IMAGE, 5)
    transformers.BertConfig().save_pretrained(tmp_path / "text")
    with pytest.raises(ConfigError, match=r"classifies no images .model type 'bert'.; for others write a function"):
        build(f"hf:{tmp_path / 'text'}", IMAGE, 5)
    with pytest.raises(ConfigError, match=r"^unknown model 'hf:.*nothing'"):
        build(f"hf:{tmp_path / 'nothing'}", IMAGE, 5)
