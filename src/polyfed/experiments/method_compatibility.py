"""Which methods a recipe's models and data carry, and what they send there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyfed.config.recipe import Recipe
from polyfed.errors import MissingPackage, PolyfedError
from polyfed.experiments import estimate
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.registry import METHODS
from polyfed.units import human_bytes, human_seconds

__all__ = ["Compatibility", "check_methods", "format_lines"]

_TIMED_BATCHES = 5  # of each network and method; recipes of FedHeNN align in every fifth step
_SIZES = len("1023.9 KiB to 1023.9 KiB")


@dataclass(frozen=True)
class Compatibility:
    """Whether a recipe can run a method.

    Attributes:
        method: its name, or a variant's of the recipe. why: what does not fit; None where all does.
        down, up: network -> bytes to and from one client in round 2; empty where it does not fit.
        seconds: of a round on average, where that was asked for.
    """

    method: str
    why: str | None
    down: Mapping[str, int] = field(default_factory=dict)
    up: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None


def check_methods(
    recipe: str | Path | Recipe,
    overrides: Sequence[str] = (),
    measure: bool = True,
    *,
    methods: Sequence[str] | None = None,
    timed: bool = False,
) -> Iterator[Compatibility]:
    """For every method, and every variant in the recipe's ``[methods]``: does it run on these models and data?

    With the hyperparameters that the recipe gives to a method; the others have their defaults. Bytes are those of
    messages, from two rounds of one batch each with one client of every network. Nothing is written.

    Args:
        recipe: a TOML file, or a `Recipe`. overrides: ``"data.num_clients=20"``, as ``--set`` on the command line.
        measure: play the rounds; False: only ask whether models and data fit, and tell no bytes.
        methods: only these methods and variants. timed: play them with some batches more, and all of the clients' data,
            for the seconds of a round.

    Raises:
        ConfigError: the recipe is wrong, a method is not known, or the data are not there.
    """
    base = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe, overrides)
    names = list(dict.fromkeys([*METHODS, *base.variants()]))
    if methods is not None:
        names = list(dict.fromkeys(methods))
        for name in names:
            base.choose(name)  # one that is not known is an error before the first line
    data = DataCache()
    data.federated(base)
    for name in names:
        try:
            yield _fit(name, base, data, measure, timed)
        except MissingPackage:
            raise
        except PolyfedError as error:
            yield Compatibility(name, str(error))


def _fit(name: str, base: Recipe, data: DataCache, measure: bool, timed: bool) -> Compatibility:
    federation = build_federation(base.choose(name), data=data, pretrained=False)
    if timed:
        found = estimate.estimate_costs(federation, batches=_TIMED_BATCHES)
        down = {kind.name: kind.down[1] for kind in found.architectures}
        up = {kind.name: kind.up[1] for kind in found.architectures}
        return Compatibility(name, None, down, up, found.seconds_round)
    down, up = estimate.message_bytes(federation) if measure else ({}, {})
    return Compatibility(name, None, down, up)


def format_lines(found: Iterable[Compatibility], timed: bool = False) -> Iterator[str]:
    """The answers of `check_methods` for a terminal, each as it comes: bytes per client, least to most, or why not.

    timed: with the seconds of a round.
    """
    column = max(map(len, METHODS))
    up = f"{'up, per client':<{_SIZES}}  a round" if timed else "up, per client"
    yield f"{'method':<{column}}  runs  {'down, per client':<{_SIZES}}  {up}"
    for one in found:
        why = None if one.why is None else " ".join(one.why.removeprefix(one.method).split())
        last = "" if one.seconds is None else _short(one.seconds)
        answer = (
            f"yes   {_range(one.down):<{_SIZES}}  {_range(one.up):<{_SIZES}}  {last}" if why is None else f"no    {why}"
        )
        yield f"{one.method:<{column}}  {answer}".rstrip()


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else human_seconds(seconds)


def _range(sizes: Mapping[str, int]) -> str:
    if not sizes:
        return ""
    low = human_bytes(min(sizes.values()))
    high = human_bytes(max(sizes.values()))
    return low if low == high else f"{low} to {high}"
