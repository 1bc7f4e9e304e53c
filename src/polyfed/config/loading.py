"""Recipe files, and which code that is not polyfed's they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyfed.config.resolve import parse_override
from polyfed.data.files import check_file
from polyfed.errors import ConfigError
from polyfed.registry import file_of, own_names, suggest, texts
from polyfed.results.read import parse_toml

__all__ = ["code_named", "module_folders", "read_recipe", "recipe_stem", "without_run"]


def code_named(path: str | Path, overrides: Sequence[str] = (), names: Sequence[str] = ()) -> list[str]:
    """What `Recipe.load` will import that is not polyfed's: a line for each module, with its file. Nothing is imported.

    Args:
        path: the recipe's file. overrides: see `Recipe.load`. names: of methods that are asked for beside it.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    settings = read_recipe(Path(path))
    run = settings.get("run")
    kept = list(texts(run.get("modules", []))) if isinstance(run, Mapping) else []
    beside = [*module_folders(Path(path)), *kept]
    asked = [value for keys, value in map(parse_override, overrides) if keys[0] != "run"]
    modules = dict.fromkeys(name.partition(":")[0] for name in own_names([without_run(settings), asked, list(names)]))
    files = {module: file_of(module, beside) for module in modules}
    return [f"imports {module}, from {file}" for module, file in files.items() if file is not None]


def without_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without [run], in which there are only labels and places."""
    return {section: table for section, table in settings.items() if section != "run"}


def module_folders(path: Path) -> list[str]:
    """Where modules that a recipe's file names are looked for, too."""
    return [str(path.parent.absolute()), str(Path.cwd())]


def read_recipe(path: Path) -> dict[str, Any]:
    check_file(path)
    try:
        return parse_toml(path.read_bytes())
    except FileNotFoundError:
        near = [str(p) for folder in (path.parent, Path("recipes")) for p in folder.glob("*.toml")]
        hint = suggest(str(path), near)
        hint = hint if "did you mean" in hint else ""
        raise ConfigError(f"expected a recipe file, got '{path}', which is not there{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"expected a recipe file, got '{path}': {reason}") from None
    except ValueError as error:
        raise ConfigError(f"expected TOML in '{path}', got something else: {error}") from None


def recipe_stem(path: Path) -> str:
    """``recipes/fedgh/table3.toml`` -> "fedgh/table3", so that the default run folders of two papers differ."""
    folders = path.parent.parts
    below = folders[len(folders) - folders[::-1].index("recipes") :] if "recipes" in folders else ()
    return "/".join([*below, path.stem])
