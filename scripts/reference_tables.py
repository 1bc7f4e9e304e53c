"""Tables of what a recipe can say: every command of the command line, every key of a recipe, every data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from click import Context

from polyfed.cli.app import parser
from polyfed.data.sources import find_source
from polyfed.experiments.reference import sections
from polyfed.registry import DATASETS


def commands() -> str:
    """A section for every command, as it describes itself."""
    return "\n".join(_sections(parser(), "polyfed")).rstrip("\n")


def _sections(group: Any, path: str) -> Iterator[str]:
    """A section for every command of a group, those of its groups after them."""
    context = Context(group, info_name=path)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _sections(command, f"{path} {name}")
        else:
            yield from _section(command, Context(command, info_name=name, parent=context), f"{path} {name}")


def _section(command: Any, context: Context, title: str) -> Iterator[str]:
    """A command: what it does, its examples, its arguments and options."""
    about, _, examples = (command.help or "").partition("\b\n")
    yield f"## {title}\n"
    yield " ".join(about.split()) + "\n"
    if examples:
        yield f"```bash\n{examples.strip()}\n```\n"
    yield "| argument or option | meaning |\n| --- | --- |"
    for name, text in command.help_records(context):
        if not name.endswith("--help"):
            yield f"| `{name}` | {_cell(text)} |"
    yield ""


def recipe_keys() -> str:
    """A table for every section of a recipe."""
    lines: list[str] = []
    for section in sections():
        brackets = f"[[{section.name}]]" if section.name == "plugins" else f"[{section.name}]"
        about = f"{section.about[:1].upper()}{section.about[1:]}."
        lines += [f"## `{brackets}`", "", about, "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key in section.keys:
            default = key.default if key.default in ("required", "none", "NAME") else f"`{key.default}`"
            lines.append(f"| `{key.name}` | {_cell(key.type)} | {_cell(default)} | {_cell(key.meaning)} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def datasets() -> str:
    """A table of the data sets, those with a path last."""
    found = [source for name in DATASETS if (source := find_source(name)) is not None]
    lines = ["| `dataset` | what it is |", "| --- | --- |"]
    lines += [f"| `{one.name}` | {_cell(one.about)} |" for one in sorted(found, key=lambda one: ":" in one.name)]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
