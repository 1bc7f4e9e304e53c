"""report.html: one page that holds everything a comparison has to tell, from run folders and the figures beside it.

Styles and figures are inline: the page is one file, works without network, and its content policy forbids it to
load or to run anything. Text from run folders is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from polyfed.escaping import html_text, one_line
from polyfed.places import without_places
from polyfed.records.read import COMMAND, check_links, make_folder, write_whole
from polyfed.report.client_scores import ABOUT, client_columns
from polyfed.report.comparison_tables import (
    ComparisonGroup,
    Table,
    sub_tables,
    write,
)
from polyfed.report.figures import draw
from polyfed.report.grouping import Group
from polyfed.report.plot_style import save
from polyfed.report.run_records import LOST
from polyfed.report.text_tables import Column, details, html_list, html_table, image, preformatted
from polyfed.version import __version__

_REASONS = 5  # reasons of refusals that are given, the most frequent ones


def write_report(table: Table, folder: str | Path) -> list[Path]:
    """Write the tables, the figures and the page of a comparison into the folder (made if missing).

    Raises:
        ConfigError: a file that cannot be read or written.
    """
    figures = draw([section.group for section in table.sections])
    drawn = [file for stem, figure in figures.items() for file in save(figure, folder, stem)]
    whole = page(table, drawn).encode("utf-8")
    return [*drawn, *write(table, folder), write_whole(make_folder(folder) / "report.html", whole)]


def page(table: Table, figures: Sequence[Path] = ()) -> str:
    """The page as text. figures: files; those that are PNG are put into it."""
    title = table.sections[0].group.about if len(table.sections) == 1 else f"{len(table.sections)} comparisons"
    body = [html_list(table.notes), *map(_section, table.sections)]
    drawn = [file for file in figures if file.suffix == ".png"]
    if drawn:
        body.append(f"<section><h2>Figures</h2>{''.join(map(image, drawn))}</section>")
    parts = {"title": html_text(title), "body": "\n".join(body), "version": __version__}
    style = _part("page.css")
    digest = hashlib.sha256(style.encode("utf-8")).digest()  # by which the page's policy knows its own style
    parts |= {"style": style, "style_hash": f"sha256-{base64.b64encode(digest).decode('ascii')}"}
    return re.sub(
        r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _part("page.html")
    )  # once: texts hold what they like


def _part(name: str) -> str:
    return resources.files("polyfed.report").joinpath(name).read_text(encoding="utf-8")


# a set of comparable runs -----------------------------------------------------------------------------------------


def _section(section: ComparisonGroup) -> str:
    group = section.group
    look = ' class="scaled"' if any(run.scaled_down for run in group.runs) else ""
    parts = [
        f"<h2>{html_text(group.about)}</h2>",
        f"<p{look}>{html_text(section.caption)}</p>",
        *(
            (f"<h3>{html_text(title)}</h3>" if title else "") + html_table(columns)
            for title, columns in sub_tables(section)
        ),
        html_list(section.notes),
    ]
    if len(section.clients):
        columns = client_columns(section.clients, section.score)
        parts.append(details(section.score.of_it(ABOUT), html_table(columns)))
    parts += _confusions(group)
    parts += ["<h3>Rejected and lost work</h3>", _lost(group)]
    parts += ["<h3>Recipes, versions, commands</h3>", *_origin(group)]
    return f"<article>{''.join(parts)}</article>"


def _confusions(group: Group) -> Iterator[str]:
    """Test samples by true and predicted class, of the runs that recorded them."""
    for name, runs in group.rows.items():
        for run in runs:
            counts = run.result.confusion
            if counts is not None:
                names = run.result.class_names or list(map(str, range(len(counts))))
                columns = [Column("true class", list(names), words=True)]
                columns += [Column(to, [str(row[at]) for row in counts]) for at, to in enumerate(names[: len(counts)])]
                yield details(
                    f"Confusion of {name}, seed {run.seed}: test samples, by predicted class", html_table(columns)
                )


def _lost(group: Group) -> str:
    """Uploads refused or too late, and clients dropped out, over all rounds and seeds; with the reasons."""
    frame = group.frame
    sums = frame[frame["round"].notna()].groupby(["name", "metric"])["value"].sum().unstack(fill_value=0)
    counts = sums.reindex(index=list(group.rows), columns=list(LOST), fill_value=0).astype(int)
    if not counts.any(axis=None):
        return "<p>No upload was refused or late, and nobody dropped out.</p>"
    columns = [Column("method", list(group.rows), words=True)]
    columns += [Column(LOST[key], list(map(str, found))) for key, found in counts.items() if found.any()]
    reasons: Counter[str] = Counter()
    for run in group.runs:
        reasons.update(run.refusals)
    lines = [f"refused {count} times: {reason}" for reason, count in reasons.most_common(_REASONS)]
    if len(reasons) > _REASONS:
        lines.append(f"refused for {len(reasons) - _REASONS} other reasons")
    return html_table(columns) + html_list(lines)


def _origin(group: Group) -> Iterator[str]:
    """The comparisons that the runs are of, each row's recipe as its first seed has it, and all versions."""
    above = dict.fromkeys(folder for run in group.runs for folder in run.path.parents[:2])
    commands = dict.fromkeys(command for folder in above if (command := read_command(folder)))
    yield from (preformatted(command) for command in commands)
    for name, runs in group.rows.items():
        if not runs[0].recipe.is_empty:
            text = without_places((runs[0].path / "recipe.toml").read_text(encoding="utf-8"))
            yield details(f"Recipe of {name}", preformatted(text))
    versions: dict[str, Counter[str]] = {}
    for run in group.runs:
        for key, value in run.result.versions.items():
            versions.setdefault(key, Counter())[value] += 1
    lines = []
    for key, found in versions.items():
        each = [f"{value} ({count} of the runs)" if len(found) > 1 else value for value, count in found.items()]
        lines.append(f"{key} {'; '.join(each)}")
    yield html_list(lines)


# how a comparison was made ----------------------------------------------------------------------------------------


def save_command(folder: Path, command: str) -> Path:
    """Note in a comparison's folder, as ``command.txt``, how it was made. command: as typed."""
    return write_whole(folder / COMMAND, f"{without_places(command)}\n".encode())


def read_command(folder: Path) -> str:
    """The command of a comparison's folder; "" where it has none.

    Raises:
        ConfigError: it is a link.
    """
    check_links(folder)
    file = folder / COMMAND
    return one_line(file.read_text(encoding="utf-8", errors="replace")) if file.exists() else ""
