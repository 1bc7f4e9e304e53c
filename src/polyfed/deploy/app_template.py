"""A folder for several machines: a recipe as a Flower app, and the commands of its server and nodes.

The recipe is copied as it is; with a method, seed, preset or settings given beside it, what they make of it is written.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import tomli_w

from polyfed.config.recipe import Recipe
from polyfed.deploy.flower_transport import RunConfig
from polyfed.deploy.tls import AUTHORITY
from polyfed.errors import ConfigError
from polyfed.records.read import atomic_write
from polyfed.version import __version__

__all__ = ["create_app"]

_FILES = (
    *("federated_app.py", "pyproject.toml", "README.md", "config.toml", "nginx.conf"),
    *("superlink.service", "supernode.service", "Dockerfile", ".gitignore"),
)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?")
_LONGEST_NAME = 32  # characters, in Flower


def create_app(
    folder: str | Path,
    recipe: str | Path,
    *,
    method: str | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    preset: str | None = None,
    host: str = "localhost",
    overwrite: bool = False,
) -> list[Path]:
    """Write the folder.

    Args:
        folder: made if missing; its name is the app's.
        recipe: the TOML file.
        method, overrides, seed, preset: as for `polyfed.run`.
        host: the name or address by which nodes call the server, for the commands in the README and the examples.
        overwrite: replace files that are there; others in the folder stay.

    Returns:
        The files written.

    Raises:
        ConfigError: the recipe is wrong, or a file is there already; nothing has been written.
    """
    app = Path(folder)
    source = Path(recipe)
    chosen = Recipe.load(source, overrides, method=method, seed=seed, preset=preset)
    if not _HOST.fullmatch(host):
        raise ConfigError(f"expected --host as a name (fl.example.org) or an address, without a port, got '{host}'")
    if app.exists() and not app.is_dir():
        raise ConfigError(f"expected a folder for the app, got the file {app}")
    templates = resources.files("polyfed.deploy") / "template"
    variables = _variables(app, chosen, host)
    files = {}
    for name in _FILES:
        template = (templates / f"{name.removeprefix('.')}.template").read_text(encoding="utf-8")
        files[app / name] = string.Template(template).substitute(variables)
    text = source.read_text(encoding="utf-8")
    is_changed = bool(overrides) or any(given is not None for given in (method, seed, preset))
    if is_changed:
        settings = chosen.to_dict()
        settings.get("run", {}).pop("modules", None)  # folders of this machine
        text = tomli_w.dumps(settings)
    files[app / "recipe.toml"] = text
    taken = [path for path in files if path.exists() and (is_changed or not path.samefile(source))]
    if taken and not overwrite:
        raise ConfigError(f"{taken[0]} is there already; replace it with --overwrite, or choose another folder")
    try:
        app.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            atomic_write(path, text.encode())
    except OSError as error:
        raise ConfigError(f"expected a folder that can be written, got {app}: {error.strerror}") from None
    return sorted(files)


def _variables(app: Path, recipe: Recipe, host: str) -> dict[str, str]:
    clients = recipe.data.client_count
    count = "as many as the data name" if clients is None else str(clients)
    last = "one less than there are" if clients is None else str(clients - 1)
    words = re.sub(r"[^A-Za-z0-9]+", "-", app.absolute().name).strip("-")
    name = words if words[:1].isalpha() else f"federation-{words}".rstrip("-")  # Flower wants a letter first
    return {
        "name": name[:_LONGEST_NAME].rstrip("-"),
        "method": recipe.name,
        "clients": count,
        "last": last,
        "host": host,
        "authority": json.dumps(str(app.absolute() / "keys" / AUTHORITY)),
        "version": __version__,
        "config": tomli_w.dumps({"tool": {"flwr": {"app": {"config": RunConfig().model_dump(by_alias=True)}}}}),
    }
