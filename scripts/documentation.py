"""What the site of the documentation (mkdocs.yml) needs beside the pages below ``docs/``: the rest of the repository.

Pages link to sources, recipes and pages outside ``docs/`` as they do on any host that shows the repository, by relative
paths. Here every file so linked is brought into the site, below ``repository/``: a Markdown page as it is, any other
text as a page that shows it. Links are turned accordingly, and markers expanded (`page_markers`).

README.md is the front page, and the notebooks of ``examples/`` are the tutorials.

What is made of stored results has its page from `results_pages` and `published_page`: a link to a stored file, or to
its folder, leads to that page, while a host that shows the repository shows the file.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

import published_page  # noqa: E402
import results_pages  # noqa: E402
from page_markers import expanded  # noqa: E402
from results_pages import Page  # noqa: E402

ELSEWHERE = "repository"
# what Markdown takes for code, or a link's target; code comes first, so that nothing within it is taken for a link
_PLACES = re.compile(
    r"(?:^|\n)(?P<fence>`{3,}).*?\n(?P=fence)|`[^`\n]+`|\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)", re.DOTALL
)
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".csv": "text", ".txt": "text"}


@functools.cache
def generated() -> dict[Path, Page]:
    """What a page of results is made of -> the page."""
    published = Page(published_page.PLACE, published_page.page())
    return {**results_pages.pages(), **dict.fromkeys(published_page.SOURCES, published)}


def place(file: Path) -> str:
    """Where a file of the repository lies in the site's sources; a text that is no page has ``.md`` behind its name."""
    if file in generated():
        return generated()[file].place
    if file == ROOT / "README.md":
        return "index.md"
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    if file.suffix == ".ipynb":
        return f"tutorials/{file.stem}.md"
    inside = f"{ELSEWHERE}/{file.relative_to(ROOT).as_posix()}"
    return inside if file.suffix == ".md" else f"{inside}.md"


def target_of(link: str, page: Path) -> Path | None:
    """The file, or folder of results, that a page's relative link leads to; None where there is none."""
    found = (page.parent / link).resolve()
    return found if (found.is_file() and found.is_relative_to(ROOT)) or found in generated() else None


def linked(text: str, page: Path) -> list[Path]:
    """The files that a page links to, in order."""
    targets = [match["target"] for match in _PLACES.finditer(text) if match["target"]]
    return [found for link in targets if (found := target_of(link, page)) is not None]


def turned(text: str, page: Path) -> str:
    """A page's text, with links to files of the repository as the site has them. What leads nowhere stays."""

    def turn(match: re.Match[str]) -> str:
        found = target_of(match["target"], page) if match["target"] else None
        if found is None:
            return match[0]
        return f"]({posixpath.relpath(place(found), posixpath.dirname(place(page)))}{match['anchor'] or ''})"

    return _PLACES.sub(turn, text)


def text_of(file: Path) -> str:
    """What a file says; a notebook as Markdown, with what its cells printed and showed below each."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        return text
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            printed = "".join(output.get("text", data.get("text/plain", ()))).rstrip()
            parts.append("".join(data.get("text/html", ())) or f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n"


def shown(file: Path) -> str:
    """A file as a page: itself if it is one, else its lines under its path."""
    text = text_of(file)
    if file.suffix in (".md", ".ipynb"):
        return turned(text, file)
    title = file.relative_to(ROOT).as_posix()
    return f"# {title}\n\n````{_LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n````\n"


def outside(pages: list[Path]) -> list[Path]:
    """All files outside ``docs/`` that these pages lead to, directly or by way of one another; results have pages."""
    found: dict[Path, None] = {}
    ahead = list(pages)
    while ahead:
        page = ahead.pop()
        files = linked(text_of(page), page)
        new = [file for file in files if not file.is_relative_to(DOCS) and file not in generated()]
        ahead += [file for file in new if file not in found and file.suffix in (".md", ".ipynb")]
        found |= dict.fromkeys(new)
    return sorted(found)


def add_method_pages(navigation: list[dict[str, Any]]) -> None:
    """Put the page of every method below "Methods", under its heading."""
    (methods,) = (part["Methods"] for part in navigation if "Methods" in part)
    for page in sorted((DOCS / "methods").glob("*.md")):
        if page.stem != "README":
            title = page.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
            methods.append({title: place(page)})


# called by MkDocs ---------------------------------------------------------------------------------------------------
def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside ``docs/``, what the navigation names and what pages link to, and the pages of results."""
    from mkdocs.structure.files import File, InclusionLevel

    words = Path(config.config_file_path).read_text(encoding="utf-8")
    named = [ROOT / "README.md", *sorted(ROOT.glob("examples/*.ipynb"))]
    named += [ROOT / name for name in re.findall(rf"{ELSEWHERE}/(\S+\.md)", words)]
    for file in dict.fromkeys([*named, *outside([*DOCS.rglob("*.md"), *named])]):
        level = InclusionLevel.INCLUDED if file in named else InclusionLevel.NOT_IN_NAV
        text = shown(file)
        if file.suffix == ".ipynb":
            files.append(File.generated(config, f"tutorials/{file.name}", abs_src_path=str(file)))
            text = text.replace("\n", f"\n\n{badge(file.name, config.repo_url)}\n", 1)
        files.append(File.generated(config, place(file), content=text, inclusion=level))
    for page in dict.fromkeys(generated().values()):
        level = InclusionLevel.INCLUDED if f": {page.place}\n" in words else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, page.place, content=page.text, inclusion=level))
    return files


def badge(notebook: str, repository: str | None) -> str:
    """The line below a tutorial's title. repository: mkdocs.yml's `repo_url`; None: Colab cannot fetch the notebook."""
    picture, colab = "[![Open in Colab](../assets/colab.svg)]", "https://colab.research.google.com/"
    if not repository:
        return f"[Download the notebook]({notebook}) and upload it: {picture}({colab})"
    path = f"{repository.removeprefix('https://github.com/').strip('/')}/blob/main/examples/{notebook}"
    return f"{picture}({colab}github/{path}) or [download the notebook]({notebook})"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Expand the markers of a page below ``docs/``, and turn its links; those of the others are turned already."""
    from mkdocs.exceptions import PluginError

    if not page.file.abs_src_path:
        return markdown
    file = Path(page.file.abs_src_path)
    try:
        return turned(expanded(markdown, file), file)
    except ValueError as error:
        raise PluginError(str(error)) from None


def on_config(config: Any) -> Any:
    """Headings are called as the usual hosts of repositories call them, so that one link fits both."""
    from pymdownx.slugs import slugify

    add_method_pages(config.nav)
    make: Callable[..., str] = slugify(case="lower")
    config.mdx_configs.setdefault("toc", {})["slugify"] = make
    return config
