"""The documentation as a site: every page is in the navigation, every link leads somewhere, every name exists.

It is built where the extra `docs` is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
    navigation = settings()["nav"]
    SITE.add_method_pages(navigation)
    pages = list(listed(navigation))
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
