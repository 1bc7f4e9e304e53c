"""What `polyfed compare --controls` runs beside the methods, so that a table can say what federation is worth.

NAME-alone        the method with every client a federation of its own (`polyfed.alone`), if it sends anything
                  and is no control itself (`Method.is_control`)
local-longer-E    Local with E epochs a round: the fewest by which it takes as many steps as a method that takes more
pooled            each network trained on the training rows of all clients (`polyfed.experiments.pooled`); its run also
                  gives the rows pooled-shares and pooled-tuned (`polyfed.report.run_records.rows_of_pooled`)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.method import Exchange, Method
from polyfed.core.settings import Evaluation, Privacy
from polyfed.engine.federation import Federation
from polyfed.engine.local_training import phase_data
from polyfed.engine.uploads import has_upload
from polyfed.errors import ConfigError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.plugins.settings import Availability, Compression, Devices, RobustAggregation

__all__ = ["controls_of", "epochs_of_local", "longer", "pooled", "runs_alone"]


def controls_of(base: Recipe, chosen: Mapping[str, Recipe], data: DataCache) -> dict[str, Recipe]:
    """The controls of the methods that are compared, by name.

    Args:
        base: what they were chosen of. chosen: name -> recipe, as `Recipe.choose` gives it. data: kept between calls.

    Raises:
        ConfigError: a control cannot be made of these settings.
    """
    federated = {name: one for name, one in chosen.items() if not one.method.alone and one.method.name != "local"}
    controls = {f"{name}-alone": base.choose_alone(name) for name, one in chosen.items() if runs_alone(one)}
    same_epochs: dict[int, list[str]] = {}
    for recipe in federated.values():
        epochs = epochs_of_local(build_federation(recipe, data=data, pretrained=False))
        same_epochs.setdefault(epochs, []).append(recipe.name)
    for epochs, names in sorted(same_epochs.items()):
        if epochs > base.training.local_epochs:
            found = longer(base, epochs, names)
            controls[found.name] = found
    controls["pooled"] = pooled(base)
    taken = {one.name for one in chosen.values()}
    return {recipe.name: recipe for recipe in controls.values() if recipe.name not in taken}


def runs_alone(chosen: Recipe) -> bool:
    """Whether a method is also run with each client alone: it sends something, and is no control itself.

    A personal row of a method is not: alone, a client receives its own network, so that it is the method's own row.
    """
    method = chosen.chosen_method
    is_personal = chosen.method.personalize is not None
    return not chosen.method.alone and not is_personal and not method.is_control and has_upload(method)


def longer(base: Recipe, epochs: int, names: Sequence[str]) -> Recipe:
    """Local with so many epochs a round. names: the rows whose methods take as many steps."""
    local = base.choose("local")
    training = local.training.model_copy(update={"local_epochs": epochs})
    found = local.model_copy(update={"training": training})
    return found.with_run(label=f"local-longer-{epochs}", control="longer", control_of=list(names))


def pooled(base: Recipe) -> Recipe:
    """Plain training on the rows of all, by all clients, whatever else the recipe says of them.

    Raises:
        ConfigError: some clients are hostile, who would spoil the rows of all.
    """
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
    plain = {
        "training": local.training.model_copy(update={"client_fraction": 1.0}),
        "evaluation": _without_after_local(local.evaluation),
        "availability": Availability(),
        "privacy": Privacy(),
        "compression": Compression(),
        "robust_aggregation": RobustAggregation(),
        "devices": Devices(),
    }
    executor = "auto" if local.run.executor == "ray" else local.run.executor
    return local.model_copy(update=plain).with_run(label="pooled", control="pooled", executor=executor)


def _without_after_local(evaluation: Evaluation) -> Evaluation:
    """The evaluation without the scores that are taken in the middle of a round, by the client that trains alone."""
    stage = "personal" if evaluation.stage == "after_training" else evaluation.stage
    others = [extra for extra in evaluation.extra_stages if extra != "after_training"]
    return evaluation.model_copy(update={"stage": stage, "extra_stages": others})


def epochs_of_local(federation: Federation) -> int:
    """The fewest epochs a round by which Local takes at least as many steps in all rounds as the federation's method.

    Rows that a phase draws for itself count as all of its data. What is computed outside of phases is not counted.
    """
    training = federation.training
    clients = [client for client in federation.clients if client.id not in federation.held_out]
    drawn = Fraction(training.cohort_size(len(clients)), len(clients))  # of the clients, who take part in a round
    rounds = [federation.method.exchanges(number) for number in range(1, training.rounds + 1)]
    taken = Fraction(0)
    for exchange in itertools.chain(*rounds, federation.method.final_exchanges()):
        if exchange.trains:
            share = Fraction(1) if exchange.who == "all" else drawn
            taken += share * sum(_steps_of(client, federation.method, exchange) for client in clients)
    epoch = sum(_batches(client, len(client.data.train)) for client in clients)
    return math.ceil(taken / (training.rounds * drawn * epoch))


def _steps_of(client: Client, method: Method, exchange: Exchange) -> int:
    """Steps of one client in an exchange that trains."""
    phases = method.phases(client.training) if exchange.phases is None else exchange.phases
    return sum(phase.epochs * _batches(client, len(phase_data(client, phase)[0])) for phase in phases)


def _batches(client: Client, rows: int) -> int:
    return math.ceil(rows / client.training.batch_size)
