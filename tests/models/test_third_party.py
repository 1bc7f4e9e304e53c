"""Networks of other packages by name, drawn and pre-trained, and networks that polyfed cuts where it sees fit."""

from __future__ import annotations

import logging
import re
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
from polyfed.models import SplitModel, build, cut_shapes, third_party
from polyfed.models.adapt import Adapted, split
from polyfed.models.third_party import auto_split, pretrained_normalization
from tests.helpers.refusals import refusal

IMAGE = (1, 32, 32)
GRAY = (1, 8, 8)
Made = list[dict[str, Any]]


class Residual(nn.Module):
    """Named as ResNets are, with dropout and BatchNorm; branches meet again behind `layer1`."""

    def __init__(self, channels: int, classes: int, width: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)
        self.layer1, self.layer2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.side, self.drop = nn.Conv2d(width, width, 3, padding=1), nn.Dropout(0.5)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.bn1(self.conv1(x)).relu())
        x = torch.cat([self.layer2(x), self.side(x)], dim=1)
        return self.fc(self.drop(x.mean((2, 3))))


OWN = types.SimpleNamespace(
    residual=lambda in_shape, classes: Residual(in_shape[0], classes),
    already=lambda in_shape, classes: split(Residual(in_shape[0], classes)),
)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of one's own."""
    monkeypatch.setitem(sys.modules, "our_nets", OWN)
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


@pytest.mark.parametrize(("end", "extractor"), [("", "layer1"), ("@bn1", "bn1"), ("@none", None)])
def test_a_module_of_ones_own_is_cut_where_its_name_says(here: str, end: str, extractor: str | None) -> None:
    name = f"{here}:residual{end}"
    model = build(name, IMAGE, 5)
    assert isinstance(model, Adapted)
    assert (model.architecture, model.extractor_name, model.feature_dim) == (name, extractor, 8)
    assert model.names("head") == ("original.fc.weight", "original.fc.bias")
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


@pytest.mark.usefixtures("here", "made")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("our_nets:residual@layer9", "no submodule 'layer9' to be its extractor; did you mean 'layer"),
        ("our_nets:already@layer1", "is a SplitModel already; expected no '@layer1'"),
        ("timm:small?pretrianed", r"expected '\?pretrained' .* got '\?pretrianed' behind 'timm:small'"),
        ("digits-cnn1?pretrained", r"a network of timm or torchvision, got .* behind 'digits-cnn1'"),
        ("timm:smal?pretrained", "unknown model 'timm:smal'; did you mean 'timm:small'"),
    ],
)
def test_names_that_are_refused(name: str, says: str) -> None:
    assert re.search(says, refusal(lambda: build(name, GRAY, 10)))


# the packages: a stand-in, which every machine has, and the real ones -------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """A timm of a few networks, whose trained weights are all 0.5; what they were made with."""
    asked: Made = []
    means = {"small": (0.1, 0.2, 0.3), "large": (0.1, 0.2, 0.3), "other": (0.5, 0.5, 0.5), "patch16": (0.5, 0.5, 0.5)}

    def create_model(name: str, **options: Any) -> nn.Module:
        asked.append({"name": name, **options})
        if name == "patch16":
            return nn.Sequential(nn.Conv2d(3, 2, 40))
        net = Residual(options["in_chans"], options["num_classes"], {"small": 3, "large": 4, "other": 5}[name])
        if options.get("pretrained"):
            for tensor in net.state_dict().values():
                tensor.fill_(0.5)
        return net

    def about(name: str) -> Any:
        return types.SimpleNamespace(fixed_input_size=name == "patch16", mean=means[name], std=(0.2, 0.2, 0.5))

    timm = types.ModuleType("timm")
    vars(timm).update(is_model=means.__contains__, list_models=lambda: [*means], get_pretrained_cfg=about)
    vars(timm).update(create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", timm)
    yield asked
    third_party.fetch_weights.cache_clear()  # what has been fetched is remembered in a process
    third_party.read_normalization.cache_clear()


def fetched(made: Made) -> list[str]:
    """The networks whose weights were fetched."""
    return [asked["name"] for asked in made if asked.get("pretrained")]


def test_a_network_of_timm_gets_channels_classes_and_size(made: Made) -> None:
    model = build("timm:small", IMAGE, 5)
    assert model(torch.rand(2, *IMAGE)).shape == (2, 5)
    with pytest.raises(ConfigError, match=r"an nn\.Linear of 7 outputs for its head"):
        build("timm:patch16", (3, 32, 16), 7)
    assert made == [
        {"name": "small", "num_classes": 5, "in_chans": 1},
        {"name": "patch16", "num_classes": 7, "in_chans": 3, "img_size": (32, 16)},
    ]


@pytest.mark.parametrize(
    ("name", "error"),
    [("timm:resnet10t", ImportError("No module\nhere")), ("torchvision:resnet18", RuntimeError("nms"))],
)
def test_a_package_that_is_missing_or_broken(name: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(package: str) -> None:
        raise error

    monkeypatch.setattr("polyfed.models.third_party.importlib", types.SimpleNamespace(import_module=fail))
    assert re.search(r"cannot be imported \(.*pip install 'polyfed\[vision\]'", refusal(lambda: build(name, IMAGE, 3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "s_in", "width"),
    [
        ("timm:resnet10t", (64, 8, 8), 512),
        ("timm:vit_tiny_patch16_224", (5, 192), 192),
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
    with pytest.raises(ConfigError, match=r"unknown model '(timm|torchvision):resnet1O'; did you mean .*resnet1"):
        build(f"{name.partition(':')[0]}:resnet1O", IMAGE, 5)


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


def body(network: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for name, t in network.items() if "fc" not in name and t.dim()])


def test_all_begin_with_the_same_body_and_a_head_of_their_own(made: Made) -> None:
    federation = build_federation(pf.Recipe.from_dict(tomllib.loads(RECIPE)))
    weights = [federation.model_factory.initial_state(c.architecture, owner=c.id) for c in federation.clients]
    assert all((body(one) == 0.5).all() for one in weights)
    heads = [one["original.fc.weight"] for one in weights]
    assert not torch.equal(heads[0], heads[2]), "clients of one network"
    assert not (heads[0] == 0.5).any()
    assert fetched(made) == ["small", "large"], "once each, however many clients there are"
    torch.manual_seed(5)
    trained = build("timm:small?pretrained", GRAY, 10)
    torch.manual_seed(5)
    drawn = build("timm:small", GRAY, 10)
    assert torch.equal(trained.head.weight, drawn.head.weight), "the head that it has without"
    assert not (body(drawn.export()) == 0.5).all()
    cut = build("timm:small?pretrained@bn1", GRAY, 10, feature_dim=6)
    assert (cut.names("extractor")[-1].split(".")[1], cut.feature_dim) == ("bn1", 6)


def test_images_are_normalized_as_the_weights_want(made: Made) -> None:
    settings = tomllib.loads(RECIPE)
    alike = build_federation(pf.Recipe.from_dict(settings))
    (mean,), (std,) = (getattr(alike.clients[0].prepare, key) for key in ("mean", "std"))
    assert (mean, std) == (pytest.approx(0.2), pytest.approx(0.3)), "gray: the mean of the channels"
    assert alike.server.prepare == alike.server.public.prepare == alike.clients[1].prepare  # type: ignore[union-attr]
    mixed = {"architectures": ["timm:small?pretrained", "digits-cnn1"]}
    assert build_federation(pf.Recipe.from_dict(settings | {"models": mixed})).server.prepare == alike.server.prepare
    two = {"architectures": ["timm:small?pretrained", "timm:other?pretrained"]}
    with pytest.raises(ConfigError, match=r"normalized alike, got 'timm:small\?pretrained' \(mean \(0.1.*'timm:other"):
        build_federation(pf.Recipe.from_dict(settings | {"models": two}))
    assert pretrained_normalization("timm:small") is None


def test_a_run_and_its_models_without_a_second_fetch(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(RECIPE, encoding="utf-8")
    assert status(["run", "mine.toml", "--out", "run", "-q"]) == 0
    before = fetched(made)
    third_party.fetch_weights.cache_clear()
    found = predict("run", 0, torch.zeros(2, *GRAY, dtype=torch.uint8))
    assert found.scores.shape == (2, 10)
    assert fetched(made) == before


def test_without_a_network_one_line_and_nothing_is_written(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create_model = sys.modules["timm"].create_model

    def offline(name: str, **options: Any) -> nn.Module:
        if options.pop("pretrained", False):
            print("Downloading")
            logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
            raise OSError("cannot reach the Hub\nTraceback ...")
        return create_model(name, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(sys.modules["timm"], "create_model", offline)
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(RECIPE, encoding="utf-8")
    assert status(["run", "mine.toml", "--set", "models.architectures=['timm:small?pretrained']", "-q"]) == 2
    problem = capsys.readouterr()
    (first, line) = problem.err.splitlines()
    assert (problem.out, first) == ("", "Downloading"), "what is printed meanwhile is no part of the answer"
    assert line.startswith(
        "polyfed: cannot fetch the pre-trained weights of 'timm:small' (OSError: cannot reach the Hub)"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]


def test_weights_of_another_network_are_refused(made: Made) -> None:
    weights = dict(Residual(1, 10, 3).state_dict())
    del weights["bn1.running_mean"]
    with pytest.raises(ConfigError, match=r"'bn1.running_mean' of shape \(3,\), got nothing; set data.image_size"):
        third_party.load_weights(Residual(1, 10, 3), weights, "timm:small?pretrained", 10)
    with pytest.raises(ConfigError, match=r"of shape \(4, 1, 3, 3\), got \(3, 1, 3, 3\)"):
        third_party.load_weights(Residual(1, 10, 4), Residual(1, 10, 3).state_dict(), "timm:large?pretrained", 10)


def test_gray_images_see_what_rgb_images_would() -> None:
    rgb, gray = Residual(3, 10, 4).eval(), Residual(1, 10, 4).eval()
    third_party.load_weights(gray, rgb.state_dict(), "a name", 10)
    gray.fc.load_state_dict(rgb.fc.state_dict())
    x = torch.rand(2, 1, 8, 8)
    assert torch.allclose(gray(x), rgb(x.repeat(1, 3, 1, 1)), atol=1e-6)
    five = third_party.adapt_channels(rgb.conv1.weight, 5)
    assert torch.allclose(five[:, 3] * 5 / 3, rgb.conv1.weight[:, 0])
    assert five.shape[1] == 5


# the real packages, with weights made here ---------------------------------------------------------------------------


@pytest.mark.slow
def test_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision", reason="the extra 'vision' is not installed")
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
