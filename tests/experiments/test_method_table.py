"""The table of methods: complete, said in one place, the same in the docs; and which methods a recipe can run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

import polyfed as pf
from polyfed.cli.app import status
from polyfed.config.recipe import Recipe
from polyfed.core.method import Method, hyperparameters
from polyfed.experiments import estimate, reference
from polyfed.experiments.estimate import check, check_methods
from polyfed.registry import METHODS
from tests.helpers.checked_recipe import CHECKED

ROOT = Path(__file__).parents[2]
RECIPE = f"""{CHECKED}
[methods.fedavg]
aggregation = "same-shape"

[methods.fedhenn]
alignment_data.size = 20
alignment_data.batch = 10

[methods.small-rad]
name = "fedhenn"
alignment_data.size = 8
alignment_data.batch = 8
"""
FEW = ("local", "fedavg", "fedgh", "fedhenn", "fedin", "incoavg")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    path = tmp_path / "small.toml"
    path.write_text(RECIPE, encoding="utf-8")
    monkeypatch.setattr(estimate, "METHODS", {name: METHODS[name] for name in FEW})
    monkeypatch.chdir(tmp_path)
    return path


# ---- what a method says of itself ----


def test_every_method_says_what_it_is():
    for name in METHODS:
        row = reference.page(name)
        assert re.search(r"(19|20)\d\d|arXiv", row["paper"]) or name == "local", "expected authors, venue and year"
        sent = {row[key] for key in ("down", "up", "states")}
        assert (sent & {"nothing", "none"} == set()) == (name != "local")
        assert not any(need.startswith("hint=") for need in row["needs"]), "advice for messages is no need"
        assert all(key.meaning and key.type for key in row["hyperparameters"]), name


def test_deviations_are_numbered():
    for name in METHODS:
        found = reference.page(name)
        numbers = re.findall(r"\((\d+)\) ", found["deviations"])
        least = 0 if found["paper"].startswith("none") else 1
        assert numbers == [str(number) for number in range(1, max(len(numbers), least) + 1)], name


def test_what_may_differ_is_read_off_the_requirements():
    shapes, cuts = "depth; same-named tensors need the same shape", "cuts of equal shape"
    assert {name: reference.page(name)["differs"] for name in FEW} == {
        "local": "anything",
        "fedavg": f"{shapes} (same-shape: anything)",
        "fedgh": "anything before the head; a linear head of equal width",
        "fedhenn": "anything",
        "fedin": f"{shapes}; {cuts} (fixed: {shapes}, same-shape: anything; {cuts})",
        "incoavg": f"{shapes} (same-shape: anything)",
    }


@hyperparameters
class Mine(Method):
    """A method of one's own."""

    # spare lines above

    plain: int = 1
    beside: float = 0.5  # said beside it
    # said above it,
    # on two lines
    above: Annotated[int, Field(ge=0)] = 2
    long: tuple[
        int,  # on two
        str,
    ] = (1, "#")  # of its lines


def test_comments_are_found_where_they_stand():
    assert {key.name: (key.default, key.meaning) for key in reference.list_hyperparameters(Mine)} == {
        "plain": ("1", ""),
        "beside": ("0.5", "said beside it"),
        "above": ("2", "said above it, on two lines"),
        "long": ('[1, "#"]', "on two of its lines"),
    }


# ---- which of them fit ----


def test_which_fit_and_what_they_send(recipe, tmp_path):
    found = dict(check_methods(Recipe.load(recipe)))
    assert list(found) == [*FEW, "small-rad"]
    assert {name for name, one in found.items() if isinstance(one, pf.PolyfedError)} == {"incoavg", "fedin"}
    assert "client 1 ('digits-cnn2')" in str(found["incoavg"])

    def down(name):
        return [network.down[:2] for network in found[name].architectures]

    assert [network.name for network in found["local"].architectures] == ["digits-cnn1", "digits-cnn2"]
    assert down("local") == [(0, 0), (0, 0)]
    for name in ("fedavg", "fedgh", "small-rad"):  # the bytes that `polyfed check` tells
        assert down(name) == [network.down[:2] for network in check(recipe, method=name).architectures]
    assert down("small-rad")[0][1] < down("fedhenn")[0][1], "the recipe's own hyperparameters"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small.toml"], "nothing is written"


def test_the_command(recipe, capsys):
    assert status(["check", str(recipe), "--methods", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["method", "runs", "down,", "per", "client", "up,", "per", "client", "a", "round"]
    assert len(lines) == 1 + len(FEW) + 1
    assert re.match(r"fedgh +yes +2\.5 KiB +\d+\.\d KiB", lines[3])
    assert re.match(r"incoavg +no +needs tensors of one name", lines[6])
