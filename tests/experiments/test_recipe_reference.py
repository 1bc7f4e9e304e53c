"""What is said of recipes' keys and of commands: complete, the same on the pages and in the schema for editors."""

from __future__ import annotations

import copy
import functools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from polyfed.cli import app as cli
from polyfed.config.schema import SECTIONS
from polyfed.experiments import method_facts, recipe_reference
from polyfed.registry import METHODS

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
schema = functools.cache(recipe_reference.to_schema)


def said(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.status(words) == 0
    return capsys.readouterr().out


# the keys -----------------------------------------------------------------------------------------------------------


def test_every_key_is_described() -> None:
    found = {section.name: section for section in recipe_reference.sections()}
    assert set(SECTIONS) <= set(found)
    for section in found.values():
        assert section.about
        for key in section.keys:
            assert key.type
            assert key.default
            assert len(key.meaning) > 5, f"nothing is said of {section.name}.{key.name}"
    for name, kind in SECTIONS.items():
        assert [key.name for key in found[name].keys] == list(kind.model_fields)


def test_every_hyperparameter_is_described() -> None:
    for name, kind in METHODS.items():
        assert all(key.meaning and key.type for key in method_facts.list_hyperparameters(kind)), name


def test_a_section_a_method_and_a_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = said("recipe", "training", capsys=capsys)
    assert out.startswith("[training]")
    assert max(map(len, out.splitlines())) <= 100
    assert "batch_size" in out
    assert "kernel.rank" in said("recipe", "method.fedhenn", capsys=capsys)
    assert json.loads(said("recipe", "training.lr", "--json", capsys=capsys)) == {
        "training": [
            {"name": "lr", "type": "number >= 0", "default": "0.01", "meaning": "learning rate of local training"}
        ]
    }
    assert "rank" in said("recipe", "method.fedhenn.kernel.rank", capsys=capsys)
    assert set(SECTIONS) < set(json.loads(said("recipe", "--json", capsys=capsys)))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trainin"], "unknown section 'trainin'; did you mean 'training'?"),
        (["training.lrr"], "unknown key 'training.lrr'; did you mean 'lr'?"),
        (["method.fedhen"], "unknown method 'fedhen'; did you mean 'fedhenn'?"),
        (["training", "--json-schema"], "expected NAME and --json, or --json-schema, got both"),
    ],
)
def test_what_is_not_there(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.status(["recipe", *words]) == 2
    assert capsys.readouterr().err.splitlines() == [f"polyfed: {line}"]


# the schema for editors ---------------------------------------------------------------------------------------------


def test_the_schema_has_every_key_with_its_meaning() -> None:
    for name, kind in SECTIONS.items():
        rules = schema()["definitions"][kind.__name__]["properties"]
        assert all(rule["description"] for rule in rules.values())
        assert list(rules) == list(kind.model_fields), name
    for name in METHODS:
        rules = schema()["definitions"][f"method {name}"]["properties"]
        meanings = {key.name: key.meaning for key in recipe_reference.find_keys(f"method.{name}").keys}
        assert {"name", "alone", "adapters", "personalize", *(key.partition(".")[0] for key in meanings)} == set(rules)
        assert all(rules[key]["description"] == meaning for key, meaning in meanings.items() if "." not in key)


def test_the_schema_is_one() -> None:
    validator = pytest.importorskip("jsonschema").Draft7Validator
    assert [error.message for error in validator(validator.META_SCHEMA).iter_errors(schema())] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_recipes_follow_the_schema(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    checked = jsonschema.Draft7Validator(schema()).iter_errors(tomllib.loads(path.read_text(encoding="utf-8")))
    assert [error.message for error in checked] == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("data.num_clients", "ten"),
        ("data.clients", 10),
        ("training.lr", -1.0),
        ("method.eta", 1.0),
        ("method.kernel.rnk", 3),
        ("methods.fedgh.header_epoch", 3),
        ("devices.custom.mine.flops", 1e9),
        ("presets.small.training.round", 3),
        ("plugin.name", "mine:Mine"),
    ],
)
def test_the_schema_refuses(place: str, value: object) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    recipe: dict[str, Any] = {
        "data": {"dataset": "digits"},
        "models": {"architectures": ["digits-cnn1"]},
        "method": {"name": "fedhenn", "kernel": {"rank": 4}},
        "methods": {"mine": {"name": "fedgh", "header_epochs": 3}},
    }
    validator = jsonschema.Draft7Validator(schema())
    validator.validate(recipe)
    wrong = copy.deepcopy(recipe)
    *tables, key = place.split(".")
    table = wrong
    for name in tables:
        table = table.setdefault(name, {})
    table[key] = value
    assert list(validator.iter_errors(wrong)), "this is refused"
