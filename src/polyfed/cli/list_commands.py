"""Commands that list what there is: keys of recipes, methods, models, datasets."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from polyfed.cli.options import AsJson
from polyfed.cli.output import print_json, print_text, terminal_width
from polyfed.errors import ConfigError


def recipe(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Only this section, key or method: training, training.lr, method.fedhenn."),
    ] = None,
    json: AsJson = False,
    json_schema: Annotated[
        bool, typer.Option("--json-schema", help="The JSON Schema by which editors check and complete recipes.")
    ] = False,
) -> None:
    """Explain the keys of a recipe: type, default and meaning.

    \b
    polyfed recipe training
    polyfed recipe method.fedhenn
    polyfed recipe --json-schema
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    if json_schema:
        from polyfed.experiments import recipe_reference

        if name is not None or json:
            raise ConfigError("expected NAME and --json, or --json-schema, got both")
        print_json(recipe_reference.to_schema())
        return
    from polyfed.cli import catalog
    from polyfed.cli.listing import of_section

    found = catalog.sections() if name is None else [catalog.find_keys(name, [os.getcwd()])]
    if json:
        print_json({section["name"]: section["keys"] for section in found})
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
    from polyfed.cli import catalog
    from polyfed.cli.listing import of_method, of_methods

    if name is None:
        _show([catalog.row_of(page) for page in catalog.methods()], of_methods, json)
    else:
        _show(catalog.method(name, [os.getcwd()]), of_method, json)


def models(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Only this one, with its parts; or a group's networks.")
    ] = None,
    json: AsJson = False,
) -> None:
    """List the models and their sizes; or one of them, or the networks of a group.

    Numbers of parameters and widths of the representation are those on the data that a model was made for.
    """
    from polyfed.cli import catalog
    from polyfed.cli.listing import of_group, of_model, of_models
    from polyfed.model_groups import GROUPS

    if name is None:
        _show([catalog.row_of(page) for page in catalog.models()], of_models, json)
    elif name in GROUPS:
        _show(catalog.group(name), of_group, json)
    else:
        _show(catalog.model(name), of_model, json)


def datasets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this one, with its whole page.")] = None,
    json: AsJson = False,
) -> None:
    """List the data sets, and which are here; or one of them.

    Files are looked for below POLYFED_DATA.
    """
    from polyfed.cli import catalog
    from polyfed.cli.listing import of_dataset, of_datasets

    if name is None:
        _show(catalog.datasets(), of_datasets, json)
    else:
        _show(catalog.dataset(name), of_dataset, json)


def _show(found: Any, to_text: Callable[[Any, int], str], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print_text(to_text(found, terminal_width()))
