"""Recipes: what is read, what is refused, how hyperparameters find their method."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError
from polyfed.methods import FedAvg, FedGH, Local
from polyfed.report.paper_results import entries
from tests.helpers.refusals import refusal

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "recipes").rglob("*.toml"))
TEXT = """
[data]
dataset = "digits"
num_clients = 3

[models]
architectures = ["digits-cnn1", "digits-cnn2"]

[method]
name = "fedgh"
header_lr = 1.0

[training]
rounds = 2

[methods.fedgh]
header_epochs = 100
header_lr = 2.0

[methods.fedgh-random-header]
name = "fedgh"
header_lr = 0.0

[methods.fedavg]
aggregation = "same-shape"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(TEXT)
    return file


def test_the_recipes_own_method_takes_both_tables_its_own_last(path: Path) -> None:
    recipe = Recipe.load(path)
    assert recipe.chosen_method == FedGH(header_epochs=100, header_lr=1.0)
    assert recipe.run.label is None
    assert recipe.variants() == ["fedgh", "fedgh-random-header", "fedavg"]


def test_another_method_takes_its_own_table_only(path: Path) -> None:
    assert Recipe.load(path, method="fedavg").chosen_method == FedAvg(aggregation="same-shape")
    assert Recipe.load(path, method="local").chosen_method == Local()
    assert Recipe.load(path, ["method.name=fedavg"]).chosen_method == FedAvg(aggregation="same-shape")


def test_a_variant_is_labeled_and_leaves_nothing_behind(path: Path) -> None:
    variant = Recipe.load(path, method="fedgh-random-header")
    assert variant.chosen_method == FedGH(header_lr=0.0)
    assert variant.name == variant.run.label == "fedgh-random-header"
    again = Recipe.load(path).choose("fedgh-random-header").choose("fedgh")
    assert again == Recipe.load(path)
    assert Recipe.load(path, ['run.label="mine"'], method="fedavg").name == "mine"


def test_set_means_the_method_that_is_asked_for(path: Path) -> None:
    assert Recipe.load(path, ["method.header_lr=0.5"]).chosen_method == FedGH(header_epochs=100, header_lr=0.5)
    chosen = Recipe.load(path, ["method.weighting=uniform"], method="fedavg")
    assert chosen.chosen_method == FedAvg(aggregation="same-shape", weighting="uniform")
    other = Recipe.load(path, ["methods.fedgh-random-header.header_lr=0.25"], method="fedgh-random-header")
    assert other.chosen_method.header_lr == 0.25


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data.num_clients=20", 20),
        ("data.num_clients = 20", 20),
        ("data.partition=iid", "iid"),
        ("training.lr=1", 1.0),
        ("models.architectures=['digits-cnn3']", ["digits-cnn3"]),
        ("run.out=/a/path with=signs", "/a/path with=signs"),
        ("run.label=", ""),
    ],
)
def test_overrides_are_values_as_toml_has_them(path: Path, text: str, expected: Any) -> None:
    section, _, key = text.partition("=")[0].strip().partition(".")
    value = getattr(getattr(Recipe.load(path, [text]), section), key)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("text", ["data.num_clients", "clients=3", "data.=3"])
def test_an_override_needs_section_key_and_value(path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected --set SECTION\.KEY=VALUE"):
        Recipe.load(path, [text])


def test_what_is_written_reads_as_the_same_recipe(path: Path) -> None:
    for name in Recipe.load(path).variants():
        recipe = Recipe.load(path, method=name, seed=3, out="somewhere")
        written = tomllib.loads(recipe.dumps())
        assert written == recipe.to_dict()
        assert "methods" not in written
        again = Recipe.from_dict(written)
        assert again.to_dict() == recipe.to_dict()
        assert again.chosen_method == recipe.chosen_method


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"num_clinets": 3}}, "unknown key 'data.num_clinets'; did you mean 'num_clients'?"),
        ({"data": {"lr": 0.1}}, "unknown key 'data.lr'; it belongs to [training]"),
        ({"daata": {}}, "unknown key 'daata'; did you mean 'data'?"),
        ({"data": {"num_clients": 0}}, "data.num_clients: expected at least 1, got 0"),
        (
            {"data": {"max_train_per_client": []}},
            "data.max_train_per_client: expected a whole number or at least 1 entry, got []",
        ),
        ({"data": 3}, "data: expected a table, got 3"),
        ({"training": {"lr": "x", "rounds": 0}}, "(and 1 more)"),
        ({"method": {"name": "fedgh", "header_epoch": 1}}, "unknown key 'method.header_epoch'; did you mean"),
        (
            {"method": {"name": "fedgh", "header_batch": "lr"}},
            "expected 'lar', 'client' or 'round' or a whole number, got 'lr'; did you mean 'lar'?",
        ),
        ({"methods": {"mine": {"header_lr": 0.0}}}, "methods.mine: unknown method 'mine'"),
        ({"methods": {"a/b": {"name": "local"}}}, "methods: expected names of letters"),
        ({"methods": {"fedgh": {"heder_lr": 0.0}}}, "unknown key 'methods.fedgh.heder_lr'; did you mean 'header_lr'?"),
    ],
)
def test_errors_are_one_line_with_place_expectation_and_hint(
    path: Path, settings: dict[str, Any], message: str
) -> None:
    base = tomllib.loads(path.read_text())
    for section, values in settings.items():
        own = base.get(section)
        base[section] = {**own, **values} if isinstance(own, dict) and isinstance(values, dict) else values
    assert message in refusal(lambda: Recipe.from_dict(base))


def test_a_missing_section_is_named(path: Path) -> None:
    base = tomllib.loads(path.read_text())
    del base["models"]
    with pytest.raises(ConfigError, match="expected the section 'models', which is missing"):
        Recipe.from_dict(base)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_the_shipped_recipes_are_valid_with_every_preset(file: Path) -> None:
    presets = tomllib.loads(file.read_text()).get("presets", {})
    for preset in [
        None,
        *presets,
        *(f"{name},small" for name in presets if "small" in presets and "small" not in name),
    ]:
        recipe = Recipe.load(file, preset=preset)
        for name in recipe.variants():
            assert recipe.choose(name).to_dict()


# presets

PRESETS = """
[presets.small]
note = "scaled down: 4 rounds"

[presets.small.training]
rounds = 4
lr = 0.5

[presets.small.methods.fedgh-random-header]
header_epochs = 7

[presets.small.methods.fedprox]
mu = 0.5

[presets.many.data]
num_clients = 33

[presets.many.training]
lr = 0.25

[presets.other.method]
name = "fedavg"
"""


@pytest.fixture
def with_presets(path: Path) -> Path:
    path.write_text(TEXT + PRESETS)
    return path


def test_a_preset_is_laid_over_the_recipe_and_set_over_both(with_presets: Path) -> None:
    plain, small = Recipe.load(with_presets), Recipe.load(with_presets, preset="small")
    assert (plain.run.preset, plain.run.preset_note) == (None, None)
    assert (small.run.preset, small.run.preset_note) == ("small", "scaled down: 4 rounds")
    assert (small.training.rounds, small.training.lr) == (4, 0.5)
    assert small.data == plain.data
    assert small.chosen_method == plain.chosen_method
    assert small.choose("fedgh-random-header").chosen_method == FedGH(header_lr=0.0, header_epochs=7)
    assert plain.choose("fedgh-random-header").chosen_method == FedGH(header_lr=0.0)
    assert set(small.variants()) - set(plain.variants()) == {"fedprox"}
    assert Recipe.load(with_presets, ["training.rounds=5"], preset="small").training.rounds == 5
    assert Recipe.from_dict(tomllib.loads(with_presets.read_text()), preset="small").to_dict() == small.to_dict()


def test_a_run_keeps_what_set_has_changed(with_presets: Path) -> None:
    asked = ["training.rounds=5", "training.lr=0.01", "data.num_clients=3", "method.header_lr=3.0", "run.seed=3"]
    assert Recipe.load(with_presets, ["data.root=x", "data.dataset=svhn"]).run.overrides == ["data.dataset=svhn"]
    recipe = Recipe.load(with_presets, [*asked, "evaluation.every_n_rounds=2"], method="fedgh")
    assert recipe.run.overrides == ["training.rounds=5", "method.header_lr=3.0"], (
        "the default rate, the recipe's clients"
    )
    assert Recipe.load(with_presets, ["training.rounds=4"], preset="small").run.overrides == [], "the preset's own"
    assert "overrides" not in Recipe.load(with_presets).to_dict()["run"]
    written = with_presets.parent / "kept.toml"
    written.write_text(recipe.dumps())
    assert Recipe.load(written, ["data.num_clients=2"]).run.overrides == [*recipe.run.overrides, "data.num_clients=2"]
    with pytest.raises(ConfigError, match=r"run.overrides: expected nothing, as --set itself"):
        Recipe.load(with_presets, ["run.overrides=[]"])


def test_a_preset_may_name_another_method_whose_hyperparameters_are_its_own(with_presets: Path) -> None:
    assert Recipe.load(with_presets, preset="other").chosen_method == FedAvg(aggregation="same-shape")
    asked = Recipe.load(with_presets, ["method.header_lr=3.0"], method="fedgh", preset="other")
    assert asked.chosen_method == FedGH(header_epochs=100, header_lr=3.0)


def test_a_run_keeps_its_preset_and_its_folder_has_the_name(with_presets: Path) -> None:
    recipe = Recipe.load(with_presets, preset="small")
    written = recipe.to_dict()
    assert {"preset": "small", "preset_note": "scaled down: 4 rounds"}.items() <= written["run"].items()
    assert "presets" not in written
    assert Recipe.from_dict(written).to_dict() == written
    assert recipe.folder == "runs/mine-small-fedgh-seed0"
    inside = with_presets.parent / "recipes" / "paper"
    inside.mkdir(parents=True)
    with_presets.rename(inside / "table.toml")
    assert Recipe.load(inside / "table.toml", preset="small").stem == "paper/table-small"


@pytest.mark.parametrize(
    ("text", "preset", "message"),
    [
        (PRESETS, "smal", "unknown preset 'smal'; did you mean 'small'?"),
        ("", "small", "unknown preset 'small'; the recipe has none"),
        ("[presets.a.training]\nrouds = 2", "a", "unknown key 'training.rouds'; did you mean 'rounds'?"),
        ("[presets.a.trainin]\nrounds = 2", None, "presets.a: unknown key 'trainin'; did you mean 'training'?"),
        ("[presets.a]\nnote = 3", None, "presets.a.note: expected text, got 3"),
        ('[presets."a b".data]\nclients = 3', None, "presets: expected names of letters"),
        ('[presets.a.run]\npreset = "b"', None, "run.preset: expected --preset NAME, which writes it"),
    ],
)
def test_errors_in_presets_are_one_line(path: Path, text: str, preset: str | None, message: str) -> None:
    path.write_text(TEXT + text)
    assert refusal(lambda: Recipe.load(path, preset=preset)).startswith(message)


# the papers' recipes

PAPERS = [file for file in SHIPPED if file.parent.name in ("fedgh", "fedhenn", "fedin")]
PAPERS.remove(ROOT / "recipes" / "fedgh" / "header-steps.toml")  # an experiment of ours


@pytest.mark.parametrize("file", PAPERS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_the_papers_recipes_have_a_small_preset_and_rows_of_the_papers_tables(file: Path) -> None:
    whole, small = Recipe.load(file), Recipe.load(file, preset="small")
    assert str(small.run.preset_note).startswith("scaled down: ")
    assert small.training.rounds * small.training.local_epochs <= whole.training.rounds * whole.training.local_epochs
    for name in whole.run.paper_tables:
        assert name.partition("/")[0] == file.parent.name
        rows = {entry.method for entry in entries() if entry.place == name}
        assert rows & set(whole.variants()), f"no row of {name} is a variant of {file}"
