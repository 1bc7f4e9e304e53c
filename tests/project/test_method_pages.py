"""What pages say of methods is true: which networks may differ, and how uploads are protected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyfed.config.recipe import Recipe
from polyfed.engine.uploads import has_upload
from polyfed.errors import PolyfedError
from polyfed.experiments.estimate import check_methods
from polyfed.registry import METHODS
from tests.helpers.small_recipe import small_recipe

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page(*path: str) -> str:
    return DOCS.joinpath(*path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", METHODS)
def test_every_page_says_what_is_not_protected(name: str) -> None:
    (told,) = re.findall(r"^\{\{ privacy \}\}(.*?)\n\n", page("methods", f"{name}.md"), flags=re.DOTALL | re.MULTILINE)
    assert ("Not protected:" in " ".join(told.split())) == has_upload(METHODS[name]())


def rows(text: str) -> Iterator[list[str]]:
    """The cells of all tables' rows."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


DIFFERENT = {  # networks for the first column of the page on choosing
    "everything": ["digits-cnn1", "digits-cnn3"],
    "depth": ["resnet10-half", "resnet14-half"],
    "size": ["digits-cnn1"],
    "rank of adapters": ["digits-cnn1"],
    "nothing": ["digits-cnn1"],
}


@pytest.mark.parametrize("networks", DIFFERENT)
def test_the_methods_chosen_run_on_networks_that_differ_so(networks: str, tmp_path: Path) -> None:
    part = page("choosing.md").partition("## By what may differ")[2]
    table = [cells for cells in rows(part) if cells[0] != "networks differ in"]
    assert {cells[0] for cells in table} == set(DIFFERENT)
    named = {name for cells in table if cells[0] == networks for name in re.findall("`([^`]+)`", "".join(cells[3:]))}
    recipe = tmp_path / "recipe.toml"
    data = {"holdout": 40, "image_size": 8}
    fewer = {"feddf": {"server_steps": 1, "server_batch": 20}, "fedhenn": {"alignment_data": {"size": 20}}}
    recipe.write_text(small_recipe(data=data, models={"architectures": DIFFERENT[networks]}, methods=fewer))
    found = dict(check_methods(Recipe.load(recipe), sorted(named)))
    assert found.keys() == named
    assert {name: str(answer) for name, answer in found.items() if isinstance(answer, PolyfedError)} == {}
