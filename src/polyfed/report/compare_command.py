"""How a comparison was made: ``compare.json`` in its folder, with the command and the day of its last run."""

from __future__ import annotations

import datetime
from pathlib import Path

from polyfed.errors import ConfigError
from polyfed.escaping import json_text
from polyfed.places import without_places
from polyfed.records.read import COMMAND, check_links, parse_json
from polyfed.report.atomic_files import write_whole


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
