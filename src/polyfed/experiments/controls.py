"""What `polyfed compare --controls` runs beside the methods, so that a table can say what federation is worth.

NAME-alone        the method with every client a federation of its own (`polyfed.alone`), if it sends anything
                  and is no control itself (`Method.is_control`)
own-...           a model of scikit-learn for each client, fitted to its own rows (`polyfed.experiments.own_rows`)
pooled            each network trained on the training rows of all clients (`polyfed.experiments.pooled`); its run also
                  gives the rows pooled-shares and pooled-tuned (`polyfed.report.run_records.rows_of_pooled`)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyfed.config.recipe import Recipe
from polyfed.data.dataset import DatasetSource
from polyfed.engine.uploads import has_upload
from polyfed.errors import ConfigError
from polyfed.experiments.own_rows import rows_of_data
from polyfed.experiments.pooled import OTHER_SECTIONS

__all__ = ["controls_of", "own", "pooled", "runs_alone"]


def controls_of(base: Recipe, chosen: Mapping[str, Recipe], source: DatasetSource) -> dict[str, Recipe]:
    """The controls of the methods that are compared, by name.

    Args:
        base: what they were chosen of. chosen: name -> recipe, as `Recipe.choose` gives it. source: the recipe's data.

    Raises:
        ConfigError: a control cannot be made of these settings.
    """
    controls = {f"{name}-alone": base.choose_alone(name) for name, one in chosen.items() if runs_alone(one)}
    together = () if source.columns_differ else (pooled(base),)  # no network reads all clients' rows
    controls |= {recipe.name: recipe for recipe in (*own(base, source), *together)}
    taken = {one.name for one in chosen.values()}
    return {recipe.name: recipe for recipe in controls.values() if recipe.name not in taken}


def runs_alone(chosen: Recipe) -> bool:
    """Whether a method is also run with each client alone: it sends something, and is no control itself.

    A personal row of a method is not: alone, a client receives its own network, so that it is the method's own row.
    """
    method = chosen.chosen_method
    is_personal = chosen.method.personalize is not None
    return not chosen.method.alone and not is_personal and not method.is_control and has_upload(method)


def own(base: Recipe, source: DatasetSource) -> list[Recipe]:
    """Each of the models of scikit-learn that there are for such data, on clients' own rows.

    Raises:
        ConfigError: some clients are hostile, or are held out.
    """
    # no weights are kept, as those are of networks that nobody trained; but a table is of rows of the same round
    keep = "best" if base.run.keep == "best" else "nothing"
    return [_plain(base, control).with_run(keep=keep) for control in rows_of_data(source)]


def pooled(base: Recipe) -> Recipe:
    """Plain training on the rows of all, by all clients, whatever else the recipe says of them.

    Raises:
        ConfigError: some clients are hostile, who would spoil the rows of all; or are held out.
    """
    return _plain(base, "pooled")


def _plain(base: Recipe, control: str) -> Recipe:
    """A control in which all clients take part, and nothing else happens."""
    if base.adversaries.effective():
        raise ConfigError(
            "controls: expected no [adversaries], whose wrong labels would be among the rows of all, got one"
        )
    if base.evaluation.held_out:
        raise ConfigError(
            "controls: expected no evaluation.held_out, as who trains on the rows of all sends nothing to newcomers, "
            "got some"
        )
    local = base.choose("local")
    scored = local.evaluation
    stages = {  # without those of the middle of a round, which the client that trains for all alone is scored in
        "stage": "personal" if scored.stage == "after_training" else scored.stage,
        "extra_stages": [extra for extra in scored.extra_stages if extra != "after_training"],
    }
    plain: dict[str, Any] = {section: type(getattr(local, section))() for section in OTHER_SECTIONS}
    plain["training"] = local.training.model_copy(update={"client_fraction": 1.0})
    plain["evaluation"] = scored.model_copy(update=stages)
    return local.model_copy(update=plain).with_run(label=control, control=control)
