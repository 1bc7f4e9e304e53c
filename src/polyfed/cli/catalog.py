"""What is known of methods, models, data sets and the keys of recipes, for lists that need no PyTorch.

``python scripts/catalog.py`` reads it off the classes and functions themselves and writes catalog.json. What others
have registered since is read off theirs when it is listed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyfed.data.shelves import on_the_shelf, shelf
from polyfed.errors import ConfigError, MissingPackage
from polyfed.experiments.method_table import format_value
from polyfed.model_groups import GROUPS
from polyfed.registry import DATASETS, METHODS, MODELS, suggest

FILE = Path(__file__).with_name("catalog.json")
Page = dict[str, Any]

_OF_A_PAGE = ("kinds", "summary", "text", "deviations", "about", "parts")  # what a row of a list does without


@functools.cache
def _stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def made() -> dict[str, Any]:
    """The catalog anew, of what is registered now."""
    from dataclasses import asdict

    from polyfed.data.datasets import documentation
    from polyfed.experiments import method_facts, recipe_reference
    from polyfed.models import zoo

    return {
        "methods": {name: method_facts.page(name) for name in METHODS},
        "models": {name: zoo.page(name) for name in MODELS},
        "datasets": {name: documentation(name) for name in DATASETS},
        "sections": {section.name: asdict(section) for section in recipe_reference.sections()},
    }


# methods ----------------------------------------------------------------------------------------------------------


def methods() -> list[Page]:
    """The pages of all registered methods."""
    return [method(name) for name in METHODS]


def method(name: str, beside: Sequence[str] = ()) -> Page:
    """A method as `polyfed.experiments.method_facts.page` describes it. The arguments are those of that function."""
    if name in _stored()["methods"]:
        return _page("methods", name)
    from polyfed.experiments import method_facts

    return method_facts.page(name, beside)


def row_of(page: Page) -> Page:
    """A page of a method or a model without what a list has no room for."""
    left_out = _OF_A_PAGE if "parts" in page else _OF_A_PAGE[:4]
    return {key: value for key, value in page.items() if key not in left_out}


def _page(kind: str, name: str) -> Page:
    found: Page = _stored()[kind][name]
    return found


# models and data sets ---------------------------------------------------------------------------------------------


def models() -> list[Page]:
    """The pages of all registered models."""
    return [model(name) for name in MODELS]


def group(name: str) -> list[Page]:
    """The networks of a group as `models` gives them; problem: of one whose package is not installed, whose counts are
    None.
    """
    found = []
    for member in GROUPS[name]:
        try:
            found.append(row_of(model(member)) | {"problem": None})
        except MissingPackage as error:
            found.append({"name": member, "parameters": None, "feature_dim": None, "problem": str(error)})
    return found


def model(name: str) -> Page:
    """A model as `polyfed.models.zoo.page` describes it."""
    if name in _stored()["models"]:
        return _page("models", name)
    from polyfed.models import zoo

    return zoo.page(name)


def datasets() -> list[Page]:
    """The data sets: name, about, here (whether its files are below $POLYFED_DATA; None: it has none)."""
    return [
        {"name": name, "here": here, "about": _documentation(name)["about"]} for name, here in on_the_shelf().items()
    ]


def dataset(name: str) -> Page:
    """One of them, and text (all else that is to be known)."""
    rows = {row["name"]: row for row in datasets()}
    if name not in rows:
        raise ConfigError(f"unknown dataset '{name}'{suggest(name, rows)}")
    return {**rows[name], "text": _documentation(name)["text"]}


def _documentation(name: str) -> Page:
    if name in _stored()["datasets"]:
        return _page("datasets", name)
    if name not in DATASETS:
        return {"about": f"Parquet files in {shelf(None)}/{name}", "text": ""}
    from polyfed.data.datasets import documentation

    return documentation(name)


# keys of recipes --------------------------------------------------------------------------------------------------


def sections() -> list[Page]:
    """The sections of a recipe, in its order: name, about, keys (each with name, type, default, meaning)."""
    return list(_stored()["sections"].values())


def find_keys(name: str, beside: Sequence[str] = ()) -> Page:
    """A section, a method's hyperparameters or a single key, by its dotted name.

    Args:
        name: "training", "training.lr", "method.fedhenn", "method.fedhenn.kernel.rank". beside: folders in which the
            module of a method of one's own is looked for.

    Raises:
        ConfigError: there is none such; tells the nearest.
    """
    known: dict[str, Page] = _stored()["sections"]
    if name in known:
        return known[name]
    place, _, rest = name.partition(".")
    if place == "method" and rest not in [key["name"] for key in known["method"]["keys"]]:
        own, _, key = (rest, "", "") if ":" in rest else rest.partition(".")
        section = _keys_of_method(own, beside)
        if not key:
            return section
    else:
        place, _, key = name.rpartition(".")
        if place not in known:
            raise ConfigError(f"unknown section '{name}'{suggest(name, known)}")
        section = known[place]
    keys = [one for one in section["keys"] if one["name"] == key]
    if not keys:
        raise ConfigError(f"unknown key '{name}'{suggest(key, [one['name'] for one in section['keys']])}")
    return {**section, "keys": keys}


def _keys_of_method(name: str, beside: Sequence[str]) -> Page:
    """The hyperparameters of a method, as keys of ``[method]``."""
    page = method(name, beside)
    keys = [
        {
            "name": key,
            "type": page["kinds"][key].removesuffix(" or none"),
            "default": format_value(default),
            "meaning": page["about"][key],
        }
        for key, default in page["hyperparameters"].items()
    ]
    return {"name": "method", "about": f"the hyperparameters of {name}; also keys of [methods.NAME]", "keys": keys}
