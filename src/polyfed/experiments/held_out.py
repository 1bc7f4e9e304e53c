"""Clients that are held out of training by the name of their group."""

from __future__ import annotations

from collections.abc import Sequence

from polyfed.core.settings import Evaluation
from polyfed.data.federated_dataset import FederatedDataset
from polyfed.errors import ConfigError
from polyfed.registry import suggest

__all__ = ["with_numbers"]


def with_numbers(evaluation: Evaluation, federated: FederatedDataset) -> Evaluation:
    """The evaluation with the numbers of the clients that hold a group that is held out.

    Raises:
        ConfigError: there is no such group, or its client has others, too.
    """
    asked = evaluation.held_out
    if isinstance(asked, int | str) or all(isinstance(value, int) for value in asked):
        return evaluation
    if not federated.groups:
        named = next(value for value in asked if isinstance(value, str))
        raise ConfigError(
            f"evaluation.held_out: expected numbers of clients, as groups have names with data.partition 'by_group' "
            f"alone, got '{named}'"
        )
    numbers = [value if isinstance(value, int) else _client_of_group(value, federated.groups) for value in asked]
    if len({*numbers}) < len(numbers):
        raise ConfigError(f"evaluation.held_out: expected every client once, got one again in {asked}")
    return evaluation.model_copy(update={"held_out": numbers})


def _client_of_group(name: str, groups: Sequence[Sequence[str]]) -> int:
    """The client that holds a group, and no other."""
    for client, held in enumerate(groups):
        if name in held and len(held) > 1:
            others = ", ".join(f"'{other}'" for other in held if other != name)
            raise ConfigError(
                f"evaluation.held_out: expected a group that is a client of its own, got '{name}', which shares client "
                f"{client} with {others:.200}; leave out data.num_clients"
            )
        if name in held:
            return client
    known = [group for held in groups for group in held]
    raise ConfigError(f"evaluation.held_out: expected a value of data.group_by, got '{name}'{suggest(name, known)}")
