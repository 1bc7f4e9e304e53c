"""[data] of a recipe: new keys reach the deal, keys without effect are left out, wrong ones are one line; its page."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.config.schema import Data
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.registry import DATASETS, PARTITIONS
from tests.helpers.small_data import some_images, write_parquet

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
ALWAYS = {"dataset", "num_clients", "partition", "split", "test", "holdout"}


def recipe(seed: int = 0, **data: Any) -> Recipe:
    models = {"architectures": ["digits-cnn1", "digits-cnn2"]}
    settings = {"data": {"dataset": "digits", **data}, "models": models, "method": {"name": "local"}}
    return Recipe.from_dict({**settings, "run": {"seed": seed}})


def kept(**data: Any) -> dict[str, Any]:
    settings = recipe(**data).to_dict()["data"]
    assert Recipe.from_dict({**recipe(**data).to_dict()}).to_dict()["data"] == settings
    return settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """160 small images by eight writers, without a test side."""
    columns = {"label": [r % 2 for r in range(160)], "writer": [f"w{r // 20}" for r in range(160)]}
    write_parquet(tmp_path / "letters" / "train.parquet", some_images(160, (8, 8)), columns)
    return tmp_path


def test_keys_without_effect_are_left_out() -> None:
    assert set(kept(num_clients=3)) == ALWAYS
    assert set(kept(partition="quantity")) == ALWAYS | {"dirichlet_alpha", "min_samples"}
    by_user = {"partition": "by_group", "group_by": "user"}
    assert set(kept(**by_user)) == ALWAYS - {"num_clients"} | {"group_by"}
    assert kept(**by_user, num_clients=10)["num_clients"] == 10
    assert kept(**by_user, min_samples=10)["min_samples"] == 10
    assert recipe(**by_user).data.partition_options.min_samples is None
    assert set(kept(feature_shift="noise")) == ALWAYS | {"feature_shift", "feature_shift_strength"}
    assert kept(partition="flwr:Any", partitioner={"alpha": 0.5})["partitioner"] == {"alpha": 0.5}
    assert set(kept(partition="flwr:Any")) == ALWAYS
    assert set(kept(train_splits=["train", "extra"], public_dataset="plants")) == ALWAYS | {
        "train_splits",
        "public_dataset",
    }
    assert kept(dataset="hub:a/b", config="s", revision="r")["config"] == "s"


def test_by_group_without_clients_is_one_per_value(folder: Path) -> None:
    data, where = DataCache(), {"dataset": "letters", "root": str(folder), "label_column": "label"}
    by_writer = {**where, "partition": "by_group", "group_by": "writer", "split": "8:1:1"}
    assert len(data.federated(recipe(**by_writer)).clients) == 8
    assert len(data.federated(recipe(**by_writer, num_clients=4)).clients) == 4
    with pytest.raises(ConfigError, match=r"values to deal by \(8\), got 10"):
        data.federated(recipe(**by_writer, num_clients=10))
    assert len(data.federated(recipe(**by_writer)).clients) == 8  # what was kept is not mistaken for it
    federation = build_federation(recipe(**by_writer))
    assert [c.architecture for c in federation.clients] == ["digits-cnn1", "digits-cnn2"] * 4


def test_keys_reach_the_deal(folder: Path) -> None:
    data = DataCache()
    plain = data.federated(recipe(num_clients=4))
    sizes = [
        len(c.train) for c in data.federated(recipe(num_clients=4, partition="quantity", dirichlet_alpha=0.3)).clients
    ]
    assert max(sizes) > 2 * min(sizes)
    turned = data.federated(recipe(num_clients=4, feature_shift="rotation", feature_shift_strength=1.0))
    for one, two in zip(plain.clients, turned.clients, strict=True):
        assert any(torch.equal(torch.rot90(one.train.x, q, (2, 3)), two.train.x) for q in range(4))
    assert data.source(recipe(dataset="letters", root=str(folder))).train_columns == {}


def test_a_partitioner_of_flower_from_a_recipe() -> None:
    pytest.importorskip("flwr_datasets")
    table = {"num_classes_per_partition": 2, "class_assignment_mode": "first-deterministic"}
    dealt = DataCache().federated(recipe(num_clients=5, partition="flwr:PathologicalPartitioner", partitioner=table))
    assert ((dealt.label_table > 0).sum(axis=1) == 2).all()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"partition": "by_grup", "group_by": "a"}, "data.partition: unknown partition 'by_grup'; did you mean"),
        ({"partition": "flower:IidPartitioner"}, "did you mean 'flwr:DirichletPartitioner'"),
        ({"partition": "flwr:"}, "unknown partition 'flwr:'"),
        ({"partition": "by_group"}, "partition 'by_group' expects group_by"),
        ({"partitioner": {"alpha": 1}}, "partitioner = a table does nothing beside partition = 'iid'"),
        ({"config": "small"}, "expect a dataset 'hub:owner/name', got 'digits'"),
        (
            {"feature_shift": "colr"},
            "data.feature_shift: expected 'none', 'rotation', 'noise' or 'color', got 'colr'; did you mean",
        ),
        ({"feature_shift_strength": 1.5}, "data.feature_shift_strength: expected at most 1"),
        ({"feature_shift_strength": -0.1}, "data.feature_shift_strength: expected at least 0"),
        ({"train_splits": []}, "data.train_splits: expected at least 1"),
        ({"train_splits": "train"}, "data.train_splits: expected a list"),
        ({"public_samples": 0}, "data.public_samples: expected at least 1"),
        ({"group_byy": "a"}, "did you mean 'group_by'"),
    ],
)
def test_wrong_keys_are_one_line(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(**data)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


CIFAR_LABELS = """
import torch

def rows():
    # 5000 training and 1000 test rows of each class, of one number each
    sides = {"train": 50_000, "test": 10_000}
    return {side: (torch.arange(n).remainder(7).float()[:, None], torch.arange(n) % 10) for side, n in sides.items()}
"""


def test_three_strong_and_seven_weak_clients_share_all_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar_labels.py").write_text(CIFAR_LABELS)
    monkeypatch.syspath_prepend(tmp_path)
    path = ROOT / "recipes" / "fedhenn" / "strong-and-weak.toml"
    dealt = DataCache().federated(Recipe.load(path, ['data.dataset="cifar_labels:rows"']))
    assert [len(client.train) for client in dealt.clients] == [1000] * 3 + [200] * 7
    assert dealt.label_table[:3].min() > 70
    assert dealt.label_table[3:].min() > 10
    assert all(990 < len(client.test) < 1010 for client in dealt.clients)
    assert all(90 < len(client.validation) < 110 for client in dealt.clients)
    assert len(dealt.holdout) == 1000


# docs/data.md --------------------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("block", blocks("toml"))
def test_the_recipes_on_the_page_are_valid(block: str) -> None:
    rest = {"models": {"architectures": ["digits-cnn1"]}, "method": {"name": "local"}}
    given = tomllib.loads(block)
    read = Recipe.from_dict({**given, **rest})
    assert read.data.model_fields_set >= given.get("data", {}).keys()


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines() if line.strip()])
def test_the_commands_on_the_page_run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)
    assert words[0] in {"polyfed", "pip"}
    if words[0] == "polyfed":
        assert cli.status(words[1:]) == 0


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_code_on_the_page_runs(number: int) -> None:
    exec(compile(blocks("python")[number], "docs/data.md", "exec"), {})


def test_the_page_names_every_set_partition_and_key() -> None:
    for name in [*DATASETS, *PARTITIONS, *Data.model_fields]:
        assert f"`{name}`" in PAGE, name
