"""Every page as a reader would follow it: its files are written, its code and commands are run, in order.

A block whose first line names a file is saved. Commands that take longer are parsed instead, with their recipes and
methods; those of three pages are run with fewer rounds and rows in the slow tests. Where all commands are run, a block
of text after Python is what it prints; digits may differ, as they do between machines.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import pytest
import torch
from safetensors.torch import load_file

from polyfed import registry
from polyfed.cli import app as cli
from polyfed.config.recipe import Recipe
from polyfed.config.schema import SECTIONS
from polyfed.experiments.sweep import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))]
COMMANDS_RUN = {
    f"docs/{name}.md" for name in ("coming-from-flower", "coming-from-htfllib", "coming-from-pfllib", "own-model")
}
SLOW = ["docs/compare.md", "docs/analysis.md", "docs/resume.md"]
FILES_OF = {"docs/coming-from-htfllib.md": "docs/coming-from-pfllib.md"}  # it names files of another page
WITHOUT_CODE = {
    "README.md": "tests/project/test_docs.py compares what it prints",
    "docs/analysis.md": "reads the runs of the page's commands; see the slow test",
    "docs/own-method.md": "continues a tutorial; tests/test_own_methods.py follows it",
    "docs/reference/records.md": "reads a run",
    "docs/deployment.md": "needs Flower",
}
NUMBER = re.compile(r"\d[\d.]*")
TRANSLATED = "docs/coming-from-pfllib.md"  # its runs of a method and of that method's translation end alike


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of all blocks of code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The calls of polyfed and of Python scripts in a block of bash, each as its words."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        call = re.sub(r"^(\$|srun) ", "", re.split(r" (?:&&?|>|\|) ?", line)[0].strip())
        words = shlex.split(call, comments=True)
        if words[:1] in (["polyfed"], ["python"], ["make"]):
            found.append(words)
    return found


def check(words: Sequence[str]) -> None:
    """Parse a command as the program would, read its recipe and make its methods; write nothing."""
    command: click.Command = cli.parser()
    rest = list(words[1:])
    while isinstance(command, click.Group):
        assert rest[0] in command.commands or rest[0].startswith("--"), words
        if rest[0].startswith("--"):
            return
        command = command.commands[rest.pop(0)]
    given = command.make_context(words[1], rest).params
    if "recipe" not in given:
        return
    path = Path(given["recipe"])
    if not path.is_file():  # the page says only what such a recipe would hold
        assert path.parts[0] != "recipes", words
        return
    settings = given.get("overrides") or ()
    if words[1] == "sweep":  # the first of each setting's values
        settings = [f"{key}={json.dumps(values[0])}" for key, values in parse(given["grid"] or ()).items()]
    asked = given.get("methods")
    for name in [given.get("method")] if asked in (None, "all") else ["local", *asked.split(",")]:
        Recipe.load(path, settings, method=name, preset=given.get("preset"))


@pytest.fixture
def _reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unrendered: None) -> Iterator[None]:
    """A folder with the recipes; the modules that a page gives are gone afterwards."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "suites").symlink_to(ROOT / "suites")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(registry, "added_folders", [])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def save(text: str) -> bool:
    """Write a block whose first line names a file; whether it does."""
    named = re.match(r"# (\w+\.(?:py|toml))\n", text)
    if named:
        Path(named[1]).write_text(text, encoding="utf-8")
    return named is not None


def follow(
    page: str,
    code: bool,
    run: bool,
    capsys: pytest.CaptureFixture[str],
    fewer: Mapping[str, list[str]] | None = None,
) -> None:
    """Take the blocks of a page in order.

    Args:
        page: its path. code: whether its Python is run. run: whether its commands are run, or else parsed.
        capsys: has what a command that fails says.
        fewer: command -> options to add, for less work.
    """
    names: dict[str, object] = {"__name__": page}
    printed = None
    for language, text in blocks(page):
        if language == "text" and printed is not None:
            assert NUMBER.sub("0", printed) == NUMBER.sub("0", text), f"{page}: {printed}"
        printed = None
        if save(text):
            continue
        if language == "python" and code:
            capsys.readouterr()
            exec(compile(text, page, "exec", dont_inherit=True), names)
            printed = capsys.readouterr().out if run else None
        elif language == "bash":
            follow_commands(text, run, capsys, fewer)


def follow_commands(
    text: str, run: bool, capsys: pytest.CaptureFixture[str], fewer: Mapping[str, list[str]] | None
) -> None:
    """Run or parse the commands of one block; see `follow`."""
    for words in commands(text):
        if words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
        elif words[0] == "python" and Path(words[1]).is_file():
            runpy.run_path(words[1], run_name="__main__")
        elif words[0] == "polyfed" and (not run or (fewer is None and "recipes/" in " ".join(words))):
            check(words)
        elif words[0] == "polyfed" and cli.status(with_fewer(words[1:], fewer or {})) != 0:
            error = capsys.readouterr().err
            assert "pip install 'polyfed[" in error, (words, error)  # an extra is not installed here


def with_fewer(words: list[str], fewer: Mapping[str, list[str]]) -> list[str]:
    """A command with the options added for less work, in the place of its own seeds."""
    more = fewer.get(words[0], [])
    if "--seeds" in more and "--seeds" in words:
        at = words.index("--seeds")
        words = [*words[:at], *words[at + 2 :]]
    return [*words, *more]


@pytest.mark.usefixtures("_reader")
@pytest.mark.parametrize("page", PAGES)
def test_the_page_can_be_followed(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    for _, text in blocks(FILES_OF.get(page, page)):
        save(text)
    follow(page, page not in WITHOUT_CODE, page in COMMANDS_RUN, capsys)
    if page == TRANSLATED:
        files = sorted(Path("runs/mine/models").glob("*-???.safetensors"))
        assert len(files) >= 4
        for file in files:
            same = load_file(Path("runs/own/models", file.name))
            torch.testing.assert_close(load_file(file), same, rtol=1e-3, atol=1e-5)


_LESS = ["training.rounds=1", "data.limit_train=2000", "data.max_train_per_client=16", "data.num_clients=5"]
_RUN = [word for setting in _LESS for word in ("--set", setting)]
FEWER = {"run": _RUN, "compare": [*_RUN, "--seeds", "0"], "sweep": [*_RUN, "--seeds", "0"]}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on a busy machine
@pytest.mark.usefixtures("_reader")
@pytest.mark.parametrize("page", SLOW)
def test_the_commands_of_the_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    follow(page, True, True, capsys, FEWER)


# what pages and messages name -----------------------------------------------------------------------------------------


def texts_of_pages() -> Iterator[tuple[str, str]]:
    """Each page, and its text."""
    for page in PAGES:
        yield page, (ROOT / page).read_text(encoding="utf-8")


def test_the_keys_that_pages_name_are_keys_of_recipes() -> None:
    for page, text in texts_of_pages():
        if page == "docs/python.md":  # where `run` is a variable
            continue
        for section, key in re.findall(r"`(data|models|training|evaluation|run)\.(\w+)(?: = [^`]+)?`", text):
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


def test_options_that_are_named_exist() -> None:
    known = {*options_of(cli.parser()), "--help", *OTHER_PROGRAMS}
    texts = [*texts_of_messages(), *texts_of_pages()]
    assert {(where, option) for where, text in texts for option in OPTION.findall(text) if option not in known} == set()


def test_commands_give_each_option_once() -> None:
    """The parser takes the last of two values; only --set and --logger take several."""
    bash = [text for page in PAGES for language, text in blocks(page) if language == "bash"]
    comments = [re.sub("(?m)^# +", "", path.read_text(encoding="utf-8")) for path in (ROOT / "recipes").rglob("*.toml")]
    lines = [line for text in [*bash, *comments] for line in text.replace("\\\n", " ").splitlines()]
    for line in lines:
        command = line.split(" and ")[0]  # a comment may go on in words
        once = [word for word in command.split() if word.startswith("--") and word not in ("--set", "--logger")]
        assert not command.startswith("polyfed ") or len(once) == len({*once}), line


# how long pages are ---------------------------------------------------------------------------------------------------

HOW_TO = ("data", "deployment", "privacy", "coming-from-flower", "coming-from-htfllib", "coming-from-pfllib")
MOST = {"README.md": 500} | {f"docs/{name}.md": 700 for name in HOW_TO}  # words besides code
ALL_WORDS = 36_000  # of hand-written pages, with their code


def words_of(text: str, code: bool) -> int:
    """Words of a page, without what the site makes; code: with its blocks of code."""
    kept = text if code else re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(bool(re.search(r"\w", word)) for word in re.sub(r"\{\{.*?\}\}", "", kept).split())


def test_pages_are_short() -> None:
    besides_code = {page: words_of(text, code=False) for page, text in texts_of_pages()}
    methods = {page: 250 for page in besides_code if page.startswith("docs/methods/")}
    assert {page: besides_code[page] for page, most in (MOST | methods).items() if besides_code[page] > most} == {}


def test_all_pages_together_are_short() -> None:
    others = [(ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "SECURITY.md", "AGENTS.md")]
    pages = [text for page, text in texts_of_pages() if not page.startswith(("docs/reference/", "docs/results/"))]
    assert sum(words_of(text, code=True) for text in [*pages, *others]) <= ALL_WORDS
