"""Commands that list what there is: keys of recipes, methods, models, datasets."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from polyfed.cli.options import AsJson
from polyfed.cli.output import print_json, print_text, terminal_width
from polyfed.errors import ConfigError
from polyfed.registry import METHODS, MODELS, suggest


def recipe(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Only this section, key or method: training, training.lr, method.fedhenn."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Explain the keys of a recipe: type, default and meaning.

    \b
    polyfed recipe training
    polyfed recipe method.fedhenn
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.cli.listing import of_section
    from polyfed.experiments.recipe_reference import find_keys, sections

    found = sections() if name is None else [find_keys(name, [os.getcwd()])]
    if json:
        print_json({section.name: [asdict(key) for key in section.keys] for section in found})
    else:
        print_text("\n\n".join(of_section(section, terminal_width()) for section in found))


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Only this one, with its whole page; also package.module:Class of your own."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the methods; or one of them, with its hyperparameters.

    Which of them fit a recipe: polyfed check RECIPE --methods all.

    \b
    polyfed methods fedgh
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.cli.listing import of_method, of_methods

    if name is None:  # imports no PyTorch
        _show([{"name": one, "summary": METHODS.summary(one)} for one in METHODS], of_methods, json)
        return
    from polyfed.experiments.method_facts import page

    found = page(name, [os.getcwd()])
    if json:
        found["hyperparameters"] = [asdict(key) for key in found["hyperparameters"]]
    _show(found, of_method, json)


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this one, with its parts; or a group's networks.")
    ] = None,
    json: AsJson = False,
) -> None:
    """List the models and their sizes; or one of them, or the networks of a group.

    Numbers of parameters and widths of the representation are those on the data that a model was made for.
    """
    from polyfed.cli.listing import of_group, of_model, of_models
    from polyfed.model_groups import GROUPS
    from polyfed.models import zoo

    if name is None:
        _show([zoo.page(one) for one in MODELS], of_models, json)
    elif name in GROUPS:
        _show([zoo.page(one) for one in GROUPS[name]], of_group, json)
    else:
        _show(zoo.page(name), of_model, json)


def datasets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this one, with its whole page.")] = None,
    json: AsJson = False,
) -> None:
    """List the data sets, and which are here; or one of them.

    Files are looked for below POLYFED_DATA.
    """
    from polyfed.cli.listing import of_dataset, of_datasets
    from polyfed.data.datasets import known_sources

    rows = {
        one.name: {"name": one.name, "here": one.is_here(), "about": one.about, "text": one.text}
        for one in known_sources()
    }
    if name is None:
        _show([*rows.values()], of_datasets, json)
    elif name in rows:
        _show(rows[name], of_dataset, json)
    else:
        raise ConfigError(f"unknown dataset '{name}'{suggest(name, rows)}")


def _show(found: Any, to_text: Callable[[Any, int], str], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print_text(to_text(found, terminal_width()))
