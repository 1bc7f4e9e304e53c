"""The pages for people who write Python: their code runs, and what they say of methods is what the methods say."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from polyfed.cli.app import parser
from polyfed.config.recipe import Recipe
from polyfed.config.schema import SECTIONS
from polyfed.experiments.estimate import check_methods
from tests.helpers.quick import others_slow
from tests.helpers.small_recipe import small_recipe
from tests.test_own_methods import tutorial

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("gpu.md", *("python.md", "own-method.md", "own-plugin.md", "devices.md", "data.md"), "controls.md")


def read(*path: str) -> str:
    return ROOT.joinpath(*path).read_text(encoding="utf-8")


def code(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", read("docs", page), flags=re.DOTALL)


def rows(text: str) -> Iterator[list[str]]:
    """The cells of all tables' rows."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(
    "page",
    others_slow(PAGES, quick=set(PAGES) - {"own-method.md"}),  # tests/test_own_methods.py follows that page
)
def test_every_block_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if page == "python.md":
        pytest.importorskip("pandas")
    names: dict[str, object] = {"__name__": page}
    for block in [*([tutorial()] if page == "own-method.md" else []), *code(page)]:
        exec(compile(block, page, "exec", dont_inherit=True), names)


DIFFERENT = {  # networks for the first column of the page on choosing
    "everything": ["digits-cnn1", "digits-cnn3"],
    "depth": ["resnet10-half", "resnet14-half"],
    "size": ["digits-cnn1"],
    "rank of adapters": ["digits-cnn1"],
    "nothing": ["digits-cnn1"],
}


@pytest.mark.parametrize("networks", DIFFERENT)
def test_the_methods_chosen_run_on_networks_that_differ_so(networks: str, tmp_path: Path) -> None:
    table = [cells for cells in rows(read("docs", "choosing.md")) if cells[0] != "networks differ in"]
    assert {cells[0] for cells in table} == set(DIFFERENT)
    named = {name for cells in table if cells[0] == networks for name in re.findall("`([^`]+)`", "".join(cells[3:]))}
    recipe = tmp_path / "recipe.toml"
    data = {"holdout": 40, "image_size": 8}
    fewer = {"feddf": {"server_steps": 1, "server_batch": 20}, "fedhenn": {"alignment_data": {"size": 20}}}
    recipe.write_text(small_recipe(data=data, models={"architectures": DIFFERENT[networks]}, methods=fewer))
    found = list(check_methods(Recipe.load(recipe), sorted(named)))
    assert {one.method for one in found} == named
    assert {one.method: one.why for one in found if one.why} == {}


def test_the_keys_that_pages_name_are_keys_of_recipes() -> None:
    """`section.key` in the tables for those who come from elsewhere, and on the pages beside them."""
    coming = ("coming-from-pfllib.md", "coming-from-htfllib.md", "coming-from-flower.md")
    for page in (*coming, "gpu.md", "resume.md", "troubleshooting.md", "compare.md"):
        for section, key in re.findall(r"`(\w+)\.(\w+)(?: = [^`]+)?`", read("docs", page)):
            if section in SECTIONS:
                assert key in SECTIONS[section].model_fields, f"{page}: {section}.{key}"


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+\w")
# those of Flower, TensorBoard, MLflow, Ray, Slurm, flock and Docker; "--option" stands for any
OTHER_PROGRAMS = {
    *("--array", "--cpus-per-task", "--gpus-per-task", "--job-name", "--nonblock", "--output", "--time"),
    *("--build-arg", "--rm", "--tag", "--user", "--volume", "--wheel"),
    *("--backend-store-uri", "--port"),
    *("--disable-runtime-dependency-installation", "--enable-supernode-auth", "--logdir", "--option"),
    *("--run-config", "--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile", "--stream"),
}


def options_of(command: click.Command) -> Iterator[str]:
    """All options of a command and of those below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from options_of(below)


def texts_of_messages() -> Iterator[tuple[str, str]]:
    """Where it stands, and every string of the library."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.name}:{node.lineno}", node.value


def texts_of_pages() -> Iterator[tuple[str, str]]:
    """Where it stands, and every page."""
    for path in (ROOT / "docs").rglob("*.md"):
        yield path.name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("texts", [texts_of_messages, texts_of_pages])
def test_options_that_are_named_exist(texts: Callable[[], Iterator[tuple[str, str]]]) -> None:
    known = {*options_of(parser()), "--help", *OTHER_PROGRAMS}
    unknown = {(place, option) for place, text in texts() for option in OPTION.findall(text) if option not in known}
    assert unknown == set()
