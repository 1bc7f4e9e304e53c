"""Make docs/reference/command-line.md of the commands: ``python -m polyfed.cli.command_reference``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from click import Context

from polyfed.cli.app import parser

__all__ = ["to_markdown"]

_INTRODUCTION = """# Command line

Made by `python -m polyfed.cli.command_reference` of what every command says of itself: `polyfed run --help`.

## Shell completion

bash, zsh, fish and PowerShell complete commands and options:

```bash
polyfed --install-completion
```

writes the completion of the present shell into its start-up files; a new shell then has it.
`polyfed --show-completion` prints it instead, for who keeps such files by hand.
"""


def to_markdown() -> str:
    """The page."""
    return "\n".join([_INTRODUCTION, *_sections(parser(), "polyfed")])


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
    yield "| argument or option | what it says |\n| --- | --- |"
    for name, text in command.help_records(context):
        if not name.endswith("--help"):
            yield f"| `{name}` | {_cell(text)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(to_markdown().rstrip("\n"))
