"""Commands that list what there is: keys of recipes, methods, models, datasets."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.cli import completion
from polyfed.cli.options import AsJson, Overrides
from polyfed.cli.output import announce_imports, print_json, print_text, terminal_width
from polyfed.errors import ConfigError

if TYPE_CHECKING:
    from polyfed.experiments.recipe_reference import Section


def recipe(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Only this section, key or method: training, training.lr, method.fedhenn.",
            autocompletion=completion.recipe_sections,
        ),
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
    elif json_schema:
        from polyfed.experiments.recipe_schema import to_schema

        print_json(to_schema())
    else:
        found = recipe_reference.sections() if name is None else [recipe_reference.find(name, [os.getcwd()])]
        _print_sections(found, json)


def _print_sections(sections: Sequence[Section], as_json: bool) -> None:
    from polyfed.cli.listing import of_section
    from polyfed.experiments.recipe_reference import as_rows

    if as_json:
        print_json({section.name: as_rows(section) for section in sections})
    else:
        print_text("\n\n".join(of_section(section, terminal_width()) for section in sections))


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Only this one, with all that is said of it; also package.module:Class of your own.",
            autocompletion=completion.registered_methods,
        ),
    ] = None,
    fits: Annotated[
        Path | None,
        typer.Option(
            "--compatible-with",
            metavar="RECIPE.toml",
            help="Which of them can run on these models and data, why not the others.",
        ),
    ] = None,
    settings: Overrides = None,
    measure: Annotated[
        bool, typer.Option("--bytes/--no-bytes", help="With --compatible-with: also play two rounds, for the bytes.")
    ] = True,
    json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of docs/methods/README.md.")] = False,
) -> None:
    """List the methods and their hyperparameters; one of them; or which fit a recipe.

    With --compatible-with, two rounds of one batch are played per method and architecture; nothing is written.

    \b
    polyfed methods fedgh
    polyfed methods --compatible-with mine.toml --set models.feature_dim=64
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    _refuse_other_options(name, fits, settings, json, markdown)
    if name is not None:
        _print_method(name, json)
    elif fits is not None:
        _print_fits(fits, settings or (), measure, json)
    else:
        _print_methods(json, markdown)


def _refuse_other_options(
    name: str | None, fits: Path | None, settings: Sequence[str] | None, json: bool, markdown: bool
) -> None:
    """Raises `ConfigError` for options of `polyfed methods` that do not go together."""
    if name is not None and (fits is not None or markdown or settings):
        raise ConfigError("expected the name of a method alone or with --json, got it with other options")
    if fits is None and settings:
        raise ConfigError("expected --set together with --compatible-with RECIPE.toml, which it changes, got it alone")
    if markdown and (json or fits is not None):
        raise ConfigError("expected --markdown alone, got it together with --json or --compatible-with")


def _print_method(name: str, as_json: bool) -> None:
    from polyfed.cli.listing import of_method
    from polyfed.experiments import method_table

    page = method_table.page(name, [os.getcwd()])
    if as_json:
        print_json(page)
    else:
        print_text(of_method(page, terminal_width()))


def _print_fits(recipe: Path, overrides: Sequence[str], measure: bool, as_json: bool) -> None:
    from polyfed.experiments.method_compatibility import check_methods, format_lines

    announce_imports(recipe, overrides)
    found = check_methods(recipe, overrides, measure)
    if as_json:
        print_json([dataclasses.asdict(fit) for fit in found])
        return
    for line in format_lines(found):
        print_text(line)


def _print_methods(as_json: bool, markdown: bool) -> None:
    from polyfed.experiments import method_table

    if markdown:
        print_text(method_table.to_markdown().rstrip("\n"))
    elif as_json:
        print_json(method_table.describe())
    else:
        columns = shutil.get_terminal_size((100, 24)).columns
        print_text(method_table.to_text(method_table.describe(), max(40, columns)))


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Only this one, with its parts.", autocompletion=completion.registered_models
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the models and their sizes; or one of them.

    Numbers of parameters and widths of the representation are those on the data that a model was made for.
    """
    from polyfed.cli.listing import of_model, of_models
    from polyfed.models import zoo

    found = zoo.describe() if name is None else zoo.page(name)
    if json:
        print_json(found)
    elif isinstance(found, list):
        print_text(of_models(found, terminal_width()))
    else:
        print_text(of_model(found, terminal_width()))


def datasets(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Only this one, with all that is said of it.",
            autocompletion=completion.registered_datasets,
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the data sets, and which are here; or one of them.

    Files are looked for below POLYFED_DATA.
    """
    from polyfed.cli.listing import of_dataset, of_datasets
    from polyfed.data.datasets import describe, page

    found = describe() if name is None else page(name)
    if json:
        print_json(found)
    elif isinstance(found, list):
        print_text(of_datasets(found, terminal_width()))
    else:
        print_text(of_dataset(found, terminal_width()))
