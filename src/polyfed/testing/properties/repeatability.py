"""A run repeats, and only its own random streams are drawn from."""

from __future__ import annotations

import torch

from polyfed.core.randomness import seeded_global_rng
from polyfed.testing import fixtures as worlds
from polyfed.testing.kit import ConformanceKit, replaced
from polyfed.testing.spy import logged_seeds


def same_seed_same_result(kit: ConformanceKit) -> None:
    """A run repeats bit for bit, with the same method object and with a new one."""
    fresh = replaced(kit.method)
    for method, what in ((kit.method, "the same method object again"), (fresh, "a new method object")):
        again = kit.run(method)
        kit.same(worlds.all_state(kit.base), worlds.all_state(again), f"one seed gives two results with {what}")
        if worlds.records(kit.base) != worlds.records(again):
            kit.fail(f"one seed gives two histories with {what}")


def other_seed_other_result(kit: ConformanceKit) -> None:
    """Another seed changes the result, and no generator is seeded alike under both."""
    logs = []
    runs = []
    for seed in (0, 1):
        with logged_seeds() as seeds:
            runs.append(kit.run(seed=seed))
        logs.append(seeds)
    if worlds.difference(worlds.weights(runs[0]), worlds.weights(runs[1])) is None:
        kit.fail("two seeds give the same weights")
    if fixed := sorted(logs[0] & logs[1]):
        kit.fail(f"a generator is seeded with {fixed[0]} under every seed of the run; derive it (client.generator)")
    ends = []
    for seed in (0, 1):
        with seeded_global_rng(seed):
            kit.method.build(kit.usual.builders["net0"](), "")
            ends.append(torch.get_rng_state())
    if torch.equal(*ends):
        kit.fail("build seeds the global generator, so that all seeds give one network")


def global_generators_untouched(kit: ConformanceKit) -> None:
    """No hook but `build` draws from a global generator or seeds one."""
    kit.no_offence("draws")


def data_are_shuffled(kit: ConformanceKit) -> None:
    """The order of the batches shows in the weights: the batch that comes is the batch that is learnt from."""
    kind = worlds.ReorderedClient
    other = kit.runs(kit.world(kind=kind))
    same = worlds.difference(worlds.weights(kit.base), worlds.weights(other))
    if same is None:
        kit.fail("another order of the training data gives the same weights: the batches handed in are not used")
