"""The documentation as a site: every page is in the navigation, every link leads somewhere, every command is valid.

It is built where the extra `docs` is installed. The commands of compare.md and analysis.md are run, on less data.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyfed.cli import app as cli
from tests.project.test_method_pages import check, commands

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EXTRA = "needs the extra 'docs': make install-docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
NOTEBOOKS = sorted(file.name for file in ROOT.glob("examples/*.ipynb"))
SITE = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "documentation.py")))


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def settings() -> dict[str, Any]:
    """What mkdocs.yml says."""
    yaml = pytest.importorskip("yaml")
    found: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return found


def listed(part: Any) -> Iterator[str]:
    """The pages of the navigation, or of a part of it."""
    if isinstance(part, str):
        yield part
    else:
        for inner in part.values() if isinstance(part, dict) else part:
            yield from listed(inner)


# the site ------------------------------------------------------------------------------------------------------------
def test_the_navigation_has_every_page_once() -> None:
    pages = list(listed(settings()["nav"]))
    made = {page.place for page in SITE.generated().values()}
    own = sorted(page for page in pages if not page.startswith("repository/") and page not in made)
    brought = ["index.md", *(f"tutorials/{name.removesuffix('ipynb')}md" for name in NOTEBOOKS)]
    assert own == sorted([*PAGES, *brought]), "a page below docs/ needs its line in the navigation of mkdocs.yml"
    assert {page for page in made if not page.startswith("results/tables/")} <= set(pages)
    assert len(set(pages)) == len(pages)
    for page in set(pages) - set(own) - made:
        assert (ROOT / page.removeprefix("repository/")).is_file(), page


def test_links_lead_to_files_and_headings() -> None:
    """As on a host that shows the repository; the site's links are made of these."""
    brought = ["README.md", "CONTRIBUTING.md", *(f"examples/{name}" for name in NOTEBOOKS)]
    for page in [*(f"docs/{page}" for page in PAGES), *brought]:
        text = re.sub(r"^```.*?^```|`[^`\n]+`", "", SITE.text_of(ROOT / page), flags=re.DOTALL | re.MULTILINE)
        for link, anchor in re.findall(r"\]\(([^)\s#]*)(#[^)\s]+)?\)", text):
            if "://" in link:
                continue
            target = (ROOT / page).parent / link if link else ROOT / page
            assert target.exists(), f"{page}: nothing at '{link}'"
            made = SITE.generated().get(target.resolve())
            text = made.text if made else SITE.expanded(SITE.text_of(target), target) if anchor else ""
            heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            assert not anchor or anchor[1:] in map(named, heads), f"{page}: no heading '{anchor}' in '{link or page}'"


def named(heading: str) -> str:
    """The anchor of a heading: small letters, hyphens for blanks, no other signs."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason=EXTRA)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    pages = [path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")]
    loaded = [link for text in pages for link in re.findall(r'(?:src|<link[^>]*href)="(https?://[^"]+)"', text)]
    assert pages
    assert not loaded, "pages load nothing from elsewhere"


COMMAND_PAGES = ["../README.md", "compare.md", "analysis.md", "gpu.md", "resume.md"]


def test_names_of_the_library_exist() -> None:
    """`pf.name`, `polyfed.module.name` and what a line imports."""
    text = "\n".join(map(read, PAGES))
    named = {f"polyfed{rest}" for rest in re.findall(r"\b(?:pf|polyfed)((?:\.[A-Za-z_]\w*)+)", text)}
    for module, names in re.findall(r"from (polyfed[\w.]*) import ([\w, ]+)", text):
        named |= {f"{module}.{name.strip()}" for name in names.split(",")}
    assert [name for name in sorted(named) if not exists(name)] == []


def exists(name: str) -> bool:
    module, _, rest = name.partition(".")
    found: Any = importlib.import_module(module)
    for attribute in rest.split("."):
        module = f"{module}.{attribute}"
        if not hasattr(found, attribute):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module)
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


# pages of commands ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", COMMAND_PAGES)
def test_commands_are_valid(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.project.test_method_pages.ROOT", at_work(tmp_path))
    blocks = re.findall(r"```bash\n(.*?)```", read(page), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in (shlex.split(line, comments=True) for line in lines):
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        elif words[0] == "polyfed":
            check(words)
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file()
        else:
            assert words in (["source", ".venv/bin/activate"], ["pip", "install", "."])


def at_work(folder: Path) -> Path:
    """A folder with the recipes, and the one of compare.md beside them."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    (own,) = re.findall(r"```toml\n(.*?)```", read("compare.md"), flags=re.DOTALL)
    (folder / "mine.toml").write_text(own, encoding="utf-8")
    return folder


_LESS = ["training.rounds=1", "data.limit_train=2000", "data.max_train_per_client=16", "data.num_clients=5"]
FEWER = {
    "run": [word for setting in _LESS for word in ("--set", setting)],
    "plot": ["--inputs", "20"],
}
FEWER["compare"] = FEWER["sweep"] = [*FEWER["run"], "--seeds", "0"]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on a busy machine
@pytest.mark.parametrize("page", ["compare.md", "analysis.md", "resume.md"])
def test_commands_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, as they stand but for fewer rounds and rows; the figures that the page shows are written."""
    monkeypatch.chdir(at_work(tmp_path))
    for words in commands(read(page)):
        fewer = FEWER.get(words[1], [])
        if words[1] == "plot":
            figures = words[words.index("--figures") + 1].split(",") if "--figures" in words else []
            fewer = fewer if {"cka", "tsne"} & {*figures} else []
        assert cli.status([*words[1:], *fewer]) == 0, words
    shown = {Path(name).stem for name in re.findall(r"!\[[^\]]+\]\(analysis/([^)]+)\)", read(page))}
    assert shown <= {path.stem for path in (tmp_path / "runs").rglob("*.png")}
