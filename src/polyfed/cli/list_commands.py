"""Commands that list what there is: keys of recipes, methods, models, datasets."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from polyfed.cli.output import print_text, terminal_width
from polyfed.registry import METHODS, MODELS


def recipe(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this section.")] = None,
) -> None:
    """Explain the keys of a recipe: type, default and meaning; those of a method: polyfed methods NAME.

    \b
    polyfed recipe training
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.cli import listing
    from polyfed.experiments.reference import section_of, sections

    found = sections() if name is None else [section_of(name)]
    print_text("\n\n".join(listing.of_section(section, terminal_width()) for section in found))


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Only this one, with its whole page; also package.module:Class of your own."
        ),
    ] = None,
) -> None:
    """List the methods; or one of them, with its hyperparameters.

    Which of them fit a recipe: polyfed check RECIPE --methods all.

    \b
    polyfed methods fedgh
    """  # noqa: D301  (an escape, which tells the help not to wrap)
    from polyfed.cli.listing import of_method, of_methods

    if name is None:  # imports no PyTorch
        print_text(of_methods({one: METHODS.summary(one) for one in METHODS}, terminal_width()))
        return
    from polyfed.experiments.reference import page

    print_text(of_method(page(name, [os.getcwd()]), terminal_width()))


def models(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only this one; or a group's networks.")] = None,
) -> None:
    """List the models and their sizes; or one of them, or the networks of a group.

    Numbers of parameters and widths of the representation are those on the data that a model was made for.
    """
    from polyfed.cli.listing import of_models, of_some
    from polyfed.model_groups import GROUPS
    from polyfed.models import zoo

    if name is None:
        print_text(of_models([zoo.page(one) for one in MODELS], terminal_width()))
    else:
        print_text(of_some([zoo.page(one) for one in GROUPS.get(name, [name])], terminal_width()))


def datasets() -> None:
    """List the data sets, and which are here.

    Files are looked for below POLYFED_DATA.
    """
    from polyfed.cli.listing import of_datasets
    from polyfed.data.datasets import known_sources

    print_text(of_datasets(known_sources(), terminal_width()))
