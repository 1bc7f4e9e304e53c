"""A page of results, in Markdown, from the folders of comparisons: every table under what was run, with what, and how.

A comparison leaves ``compare.json`` in its folder: the command that made it and the day of its last run. Folders
without one are shown with the day that their results were written.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyfed.errors import ConfigError
from polyfed.escaping import json_text, markdown_text, visible
from polyfed.places import without_places
from polyfed.records.read import COMMAND, check_links, parse_json
from polyfed.report.atomic_files import write_whole
from polyfed.report.comparison import compare_runs
from polyfed.report.comparison_tables import ComparisonGroup, markdown_body
from polyfed.report.run_records import RunRecord, load_runs
from polyfed.report.statistics import parse_target

_VERSIONS = ("polyfed", "python", "torch", "numpy")
_HEAD = """# Results

Generated from run folders by `polyfed report RUNS... --results {name}`; do not edit.
"""


def save_command(folder: Path, command: str, ran: bool) -> Path:
    """Note in a comparison's folder how it was made.

    Args:
        folder: where ``compare.json`` goes. command: as typed. ran: whether there was anything left to run; if not,
            the day that is noted already stays.
    """
    kept = "" if ran else read_command(folder)["date"]
    made = {"command": without_places(command), "date": kept or datetime.datetime.now(datetime.UTC).date().isoformat()}
    return write_whole(folder / COMMAND, (json_text(made, indent=2) + "\n").encode())


def read_command(folder: Path) -> dict[str, str]:
    """The command and the date of ``compare.json``; "" where it has none.

    Raises:
        ConfigError: it cannot be read, or is a link.
    """
    check_links(folder)
    try:
        found = parse_json((folder / COMMAND).read_bytes())
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / COMMAND} cannot be read: {' '.join(str(error).split())}") from None
    known = found if isinstance(found, dict) else {}
    return {key: str(known.get(key) or "") for key in ("command", "date")}


def write_results(
    folders: Sequence[str | Path], file: str | Path, stage: str | None = None, target: str | float | None = None
) -> Path:
    """Write the page, whole or not at all: one part per folder, in the order given, with the papers' numbers.

    Args:
        folders: of comparisons, or any folders above runs.
        file: where the page will lie.
        stage, target: as for `polyfed.report.comparison.compare_runs`.

    Raises:
        ConfigError: no finished run in a folder, a stage that was not scored, or a target that is none; or the file
            cannot be written.
    """
    path = Path(file)
    if target is not None:
        parse_target(target)
    parts = [_HEAD.format(name=path.name)]
    for folder in map(Path, folders):
        runs = load_runs(folder)
        table = compare_runs(runs, stage, target)
        made = read_command(folder)
        titles = [_title(section, folder) for section in table.sections]
        for number, (title, section) in enumerate(zip(titles, table.sections, strict=True), start=1):
            several = f" ({number})" if titles.count(title) > 1 else ""
            about = _about(section, made, runs)
            parts.append(f"## {markdown_text(title)}{several}\n\n{about}\n{markdown_body(section)}")
        if table.notes:
            parts.append("\n".join(f"- {markdown_text(note)}" for note in table.notes) + "\n")
    return write_whole(path, "\n".join(parts).encode("utf-8"))


def _title(section: ComparisonGroup, folder: Path) -> str:
    facts = section.facts
    places = ", ".join(section.published)
    return f"{places or folder.resolve().name}: {facts['dataset']}, {facts['clients']} clients"


def _about(section: ComparisonGroup, made: Mapping[str, str], runs: Sequence[RunRecord]) -> str:
    versions = ", ".join(f"{name} {section.versions[name]}" for name in _VERSIONS if section.versions.get(name))
    day = made["date"]
    if not day:  # the day on which the last of the results was written
        last = max((run.path / "result.json").stat().st_mtime for run in runs if run.finished)
        day = datetime.datetime.fromtimestamp(last, datetime.UTC).date().isoformat()
    models = [f"Models: {', '.join(section.models)}."] if section.models else []
    lines = [section.caption, *models, f"Run on {day}{f' with {versions}' if versions else ''}."]
    command = f"\n    {visible(' '.join(made['command'].split()))}\n" if made["command"] else ""
    return "\n".join(map(markdown_text, lines)) + "\n" + command
