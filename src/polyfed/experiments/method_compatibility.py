"""Which methods a recipe's models and data carry, and what they send there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
        seconds: of a round on average.
    """

    method: str
    why: str | None
    down: Mapping[str, int] = field(default_factory=dict)
    up: Mapping[str, int] = field(default_factory=dict)
    seconds: float | None = None


def check_methods(base: Recipe, methods: Sequence[str] | None = None) -> Iterator[Compatibility]:
    """For every method, and every variant in the recipe's ``[methods]``: does it run on these models and data?

    With the hyperparameters that the recipe gives to a method; the others have their defaults. Two rounds are played
    with one client of every network. Nothing is written.

    Args:
        methods: only these methods and variants.

    Raises:
        ConfigError: a method is not known, or the data are not there.
    """
    names = list(dict.fromkeys([*METHODS, *base.variants()]))
    if methods is not None:
        names = list(dict.fromkeys(methods))
        for name in names:
            base.choose(name)  # one that is not known is an error before the first line
    data = DataCache()
    data.federated(base)
    for name in names:
        try:
            yield _fit(name, base, data)
        except MissingPackage:
            raise
        except PolyfedError as error:
            yield Compatibility(name, str(error))


def _fit(name: str, base: Recipe, data: DataCache) -> Compatibility:
    federation = build_federation(base.choose(name), data=data, pretrained=False)
    found = estimate.estimate_costs(federation, batches=_TIMED_BATCHES)
    down = {kind.name: kind.down[1] for kind in found.architectures}
    up = {kind.name: kind.up[1] for kind in found.architectures}
    return Compatibility(name, None, down, up, found.seconds_round)


def format_lines(found: Iterable[Compatibility]) -> Iterator[str]:
    """The answers of `check_methods` for a terminal, one by one: bytes per client, least to most, or why not."""
    column = max(map(len, METHODS))
    yield f"{'method':<{column}}  runs  {'down, per client':<{_SIZES}}  {'up, per client':<{_SIZES}}  a round"
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
