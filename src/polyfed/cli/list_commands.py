"""Commands that list what there is: keys of recipes, methods, models, datasets."""

from __future__ import annotations

import dataclasses
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
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/reference/recipe.md.")] = False,
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
    from polyfed.experiments import recipe_reference

    if sum([name is not None or json, markdown, json_schema]) > 1:
        raise ConfigError("expected NAME and --json, --markdown or --json-schema, got several of them")
    if markdown:
        print_text(recipe_reference.to_markdown().rstrip("\n"))
        return
    if json_schema:
        print_json(recipe_reference.to_schema())
        return
    from polyfed.cli.listing import of_section

    found = recipe_reference.sections() if name is None else [recipe_reference.find(name, [os.getcwd()])]
    if json:
        print_json({section.name: [dataclasses.asdict(key) for key in section.keys] for section in found})
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
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of docs/methods/README.md.")] = False,
) -> None:
    """List the methods; or one of them, with its hyperparameters.

    Which of them fit a recipe: polyfed check RECIPE --methods all.

    \b
    polyfed methods fedgh
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    if markdown and (json or name is not None):
        raise ConfigError("expected --markdown alone, got it together with --json or the name of a method")
    from polyfed.cli.listing import of_method, of_methods
    from polyfed.experiments import method_table

    if markdown:
        print_text(method_table.to_markdown().rstrip("\n"))
        return
    if name is None:
        _show(method_table.describe(), of_methods, json)
    else:
        _show(method_table.page(name, [os.getcwd()]), of_method, json)


def models(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this one, with its parts.")] = None,
    json: AsJson = False,
) -> None:
    """List the models and their sizes; or one of them.

    Numbers of parameters and widths of the representation are those on the data that a model was made for.
    """
    from polyfed.cli.listing import of_model, of_models
    from polyfed.models import zoo

    if name is None:
        _show(zoo.describe(), of_models, json)
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
    from polyfed.data.datasets import describe, page

    if name is None:
        _show(describe(), of_datasets, json)
    else:
        _show(page(name), of_dataset, json)


def _show(found: Any, to_text: Callable[[Any, int], str], as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        print_text(to_text(found, terminal_width()))
