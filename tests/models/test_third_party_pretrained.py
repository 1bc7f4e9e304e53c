"""Networks of other packages that begin with fetched weights. Nothing is fetched here: stand-ins hand them out."""

from __future__ import annotations

import logging
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyfed as pf
from polyfed.cli.app import status
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.prediction import predict
from polyfed.models import build, third_party
from polyfed.models.third_party import pretrained_normalization, python_source

IMAGE = (1, 8, 8)
RECIPE = """
[data]
dataset = "digits"
limit_train = 120
num_clients = 4
partition = "iid"
split = "6:1:3"
holdout = 10

[models]
architectures = ["timm:small?pretrained", "timm:large?pretrained"]

[method]
name = "local"

[training]
rounds = 1
"""


class Net(nn.Module):
    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width)
        self.layer1, self.fc = nn.Conv2d(width, width, 3), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.layer1(self.bn1(self.conv1(x)).relu()).relu().mean((2, 3)))
        return out


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What has been fetched is remembered in a process, but not from test to test."""
    yield
    third_party.fetch_weights.cache_clear()
    third_party.read_normalization.cache_clear()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A timm of two networks, whose trained weights are all 0.5; those that were fetched."""
    came: list[str] = []
    means = {"small": (0.1, 0.2, 0.3), "large": (0.1, 0.2, 0.3), "other": (0.5, 0.5, 0.5)}

    def create_model(name: str, *, num_classes: int, in_chans: int, pretrained: bool = False) -> nn.Module:
        net = Net(in_chans, num_classes, {"small": 3, "large": 4, "other": 5}[name])
        if pretrained:
            came.append(name)
            for tensor in net.state_dict().values():
                tensor.fill_(0.5)
        return net

    def about(name: str) -> Any:
        return types.SimpleNamespace(fixed_input_size=False, mean=means[name], std=(0.2, 0.2, 0.5))

    timm = types.ModuleType("timm")
    vars(timm).update(is_model=means.__contains__, list_models=lambda: [*means], get_pretrained_cfg=about)
    vars(timm).update(create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", timm)
    return came


def body(network: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for name, t in network.items() if "fc" not in name and t.dim()])


def test_all_begin_with_the_same_body_and_a_head_of_their_own(fetched: list[str]) -> None:
    made = build_federation(pf.Recipe.from_dict(tomllib.loads(RECIPE)))
    weights = [made.model_factory.initial_state(c.architecture, owner=c.id) for c in made.clients]
    assert all((body(one) == 0.5).all() for one in weights)
    heads = [one["original.fc.weight"] for one in weights]
    assert not torch.equal(heads[0], heads[2]), "clients of one network"
    assert not (heads[0] == 0.5).any()
    assert fetched == ["small", "large"], "once each, however many clients there are"
    torch.manual_seed(5)
    trained = build("timm:small?pretrained", IMAGE, 10)
    torch.manual_seed(5)
    drawn = build("timm:small", IMAGE, 10)
    assert torch.equal(trained.head.weight, drawn.head.weight), "the head that it has without"
    assert not (body(drawn.export()) == 0.5).all()
    assert trained.architecture == "timm:small?pretrained"


def test_the_cut_stands_behind(fetched: list[str]) -> None:
    model = build("timm:small?pretrained@bn1", IMAGE, 10, feature_dim=6)
    assert model.names("extractor")[-1].startswith("original.bn1")
    assert model.feature_dim == 6
    (line, *_) = python_source("timm:small?pretrained@bn1", model, IMAGE, 10)[1:]
    assert line == "model = timm.create_model('small', num_classes=10, in_chans=1)", "any weights: others are loaded"


def test_images_are_normalized_as_the_weights_want(fetched: list[str]) -> None:
    settings = tomllib.loads(RECIPE)
    made = build_federation(pf.Recipe.from_dict(settings))
    (mean,), (std,) = (getattr(made.clients[0].prepare, key) for key in ("mean", "std"))
    assert (mean, std) == (pytest.approx(0.2), pytest.approx(0.3)), "gray: the mean of the channels"
    assert made.server.prepare == made.server.public.prepare == made.clients[1].prepare  # type: ignore[union-attr]
    plain = build_federation(pf.Recipe.from_dict(settings | {"models": {"architectures": ["timm:small"]}}))
    assert plain.clients[0].prepare != made.clients[0].prepare
    mixed = {"architectures": ["timm:small?pretrained", "digits-cnn1"]}
    assert build_federation(pf.Recipe.from_dict(settings | {"models": mixed})).server.prepare == made.server.prepare
    two = {"architectures": ["timm:small?pretrained", "timm:other?pretrained"]}
    with pytest.raises(ConfigError, match=r"normalized alike, got 'timm:small\?pretrained' \(mean \(0.1.*'timm:other"):
        build_federation(pf.Recipe.from_dict(settings | {"models": two}))
    assert pretrained_normalization("timm:small") is None
    assert pretrained_normalization("digits-cnn1") is None


def test_a_run_and_its_models_without_a_second_fetch(
    fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(RECIPE, encoding="utf-8")
    assert status(["run", "mine.toml", "--out", "run", "-q"]) == 0
    del fetched[:]
    third_party.fetch_weights.cache_clear()
    found = predict("run", 0, torch.zeros(2, *IMAGE, dtype=torch.uint8))
    assert found.scores.shape == (2, 10)
    assert fetched == []


def test_without_a_network_one_line_and_nothing_is_written(
    fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = sys.modules["timm"].create_model

    def offline(name: str, **options: Any) -> nn.Module:
        if options.pop("pretrained", False):
            print("Downloading")
            logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
            raise OSError("cannot reach the Hub\nTraceback ...")
        return made(name, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(sys.modules["timm"], "create_model", offline)
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(RECIPE, encoding="utf-8")
    assert status(["run", "mine.toml", "--set", "models.architectures=['timm:small?pretrained']", "-q"]) == 2
    said = capsys.readouterr()
    (first, line) = said.err.splitlines()
    assert (said.out, first) == ("", "Downloading"), "what is printed meanwhile is no part of the answer"
    assert line.startswith(
        "polyfed: cannot fetch the pre-trained weights of 'timm:small' (OSError: cannot reach the Hub)"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("timm:small?pretrianed", r"expected '\?pretrained' .* got '\?pretrianed' behind 'timm:small'"),
        ("digits-cnn1?pretrained", r"a network of timm, torchvision or hf, .* got .* behind 'digits-cnn1'"),
        ("vit-s8?pretrained", r"expects images of at least 128 x 128, .* got 8 x 8; set data.image_size = 224"),
        ("mynets:tiny?pretrained", r"behind 'mynets:tiny'"),
        ("timm:smal?pretrained", "unknown model 'timm:smal'; did you mean 'timm:small'"),
    ],
)
def test_names_that_are_refused(fetched: list[str], name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(name, IMAGE, 10)


def test_weights_of_another_network_are_refused(fetched: list[str]) -> None:
    weights = dict(Net(1, 10, 3).state_dict())
    del weights["bn1.running_mean"]
    with pytest.raises(ConfigError, match=r"'bn1.running_mean' of shape \(3,\), got nothing; set data.image_size"):
        third_party.load_weights(Net(1, 10, 3), weights, "timm:small?pretrained", 10)
    with pytest.raises(ConfigError, match=r"of shape \(4, 1, 3, 3\), got \(3, 1, 3, 3\)"):
        third_party.load_weights(Net(1, 10, 4), Net(1, 10, 3).state_dict(), "timm:large?pretrained", 10)


def test_gray_images_see_what_rgb_images_would() -> None:
    rgb, gray = Net(3, 10, 4).eval(), Net(1, 10, 4).eval()
    third_party.load_weights(gray, rgb.state_dict(), "a name", 10)
    gray.fc.load_state_dict(rgb.fc.state_dict())
    x = torch.rand(2, 1, 8, 8)
    assert torch.allclose(gray(x), rgb(x.repeat(1, 3, 1, 1)), atol=1e-6)
    five = third_party.adapt_channels(rgb.conv1.weight, 5)
    assert torch.allclose(five[:, 3] * 5 / 3, rgb.conv1.weight[:, 0])
    assert five.shape[1] == 5


# the real packages, with weights made here ---------------------------------------------------------------------------


@pytest.mark.slow
def test_the_zoos_transformers_begin_as_timms_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With timm's own first eight blocks and a head in common, they say the same."""
    timm = pytest.importorskip("timm", reason="the extra 'vision' is not installed")
    whole = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=9).eval()
    kept = dict(whole.state_dict())
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", lambda *_, **__: dict(kept))
    options = {"num_classes": 10, "in_chans": 3, "depth": 9}
    monkeypatch.setattr(third_party, "timm_options", lambda *_, **__: options)
    model = build("vit-s8-half?pretrained", (3, 224, 224), 10).eval()
    assert model.architecture == "vit-s8-half?pretrained"
    whole.head.load_state_dict(model.head.state_dict())
    whole.blocks = whole.blocks[:8]
    x = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.allclose(model(x), whole(x), atol=1e-5)
    assert pretrained_normalization("vit-s8-half?pretrained") == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    (_, line) = python_source("vit-s8-half?pretrained", model, (3, 224, 224), 10)
    assert line == "model = build('vit-s8-half', (3, 224, 224), 10)"


@pytest.mark.slow
def test_torchvision_and_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision", reason="the extra 'vision' is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra 'vision' is not installed")
    asked: list[dict[str, Any]] = []
    kept = torchvision.models.resnet18().state_dict()

    def load(url: str, **options: Any) -> dict[str, Tensor]:
        asked.append(options)
        return dict(kept)

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", load)
    export = build("torchvision:resnet18?pretrained", (1, 32, 32), 1000).export()
    assert torch.equal(export["layer1.0.conv1.weight"], kept["layer1.0.conv1.weight"])
    assert torch.allclose(export["conv1.weight"], kept["conv1.weight"].sum(1, keepdim=True))
    assert not torch.equal(export["fc.weight"], kept["fc.weight"]), "the head is new, also where its shape would do"
    assert asked == [{"progress": False, "check_hash": True, "weights_only": True}], "nothing is unpickled"
    mean, std = pretrained_normalization("torchvision:resnet18?pretrained") or ((), ())
    assert (mean, std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

    folder = tmp_path / "net"
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=24, num_labels=7
    )
    saved = transformers.ViTForImageClassification(config)
    saved.save_pretrained(folder)
    name = f"hf:{folder}?pretrained"
    layers = {key: value for key, value in saved.state_dict().items() if "classifier" not in key}
    export = build(name, (3, 224, 224), 10).export()
    assert all(torch.equal(export[key], value) for key, value in layers.items())
    assert pretrained_normalization(name) is None, "the folder does not tell"
    transformers.ViTImageProcessor(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.2, 0.2]).save_pretrained(folder)
    third_party.read_normalization.cache_clear()
    assert pretrained_normalization(name) == ((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    with pytest.raises(ConfigError, match=r"position_embeddings' of shape .*data.image_size"):
        build(name, (3, 32, 32), 10)
    with pytest.raises(ConfigError, match="unknown model 'hf:"):
        build(f"hf:{tmp_path / 'nothing'}?pretrained", (3, 32, 32), 10)
