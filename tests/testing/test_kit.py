"""The conformance kit rejects broken methods, each for its own error, and accepts the sound ones behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyfed import testing
from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import (
    Batch,
    Context,
    Method,
    MethodCard,
    Requirements,
    TrainingResult,
    hyperparameters,
    loads_message,
)
from polyfed.core.modules import float_state
from polyfed.core.server import Server
from polyfed.functional.losses import task_loss
from polyfed.methods import FML, FedAvg, FedGH, FedProto, FedProx, Local
from polyfed.testing import Reduction
from tests.helpers import broken_methods as broken
from tests.helpers.quick import others_slow
from tests.testing.test_conformance import averaging_bytes, cross_entropy, proximal

# what each sound method is asked with; its mutants are asked the same
OPTIONS: dict[type[Method], dict[str, Any]] = {
    Local: {"reference_loss": cross_entropy},
    FedAvg: {"counted": "updates", "expected_bytes": averaging_bytes},
    FedGH: {"skip": dict.fromkeys(("order_of_uploads", "client_order_invariant"), "pair by pair")},
    broken.DeadKnob: {"changed_values": {"mu": 0.7}},  # one value, where the kit would try five
    FedProx: {"reference_loss": proximal},
    FedProto: {"counted": "statistics"},
    FML: {"reductions": [Reduction({"alpha": 1.0}, Local(), part="own.")]},
    broken.Drift: {},
}

# the one that is sound and not in the library, whose methods are in test_conformance.py
test_drift = pytest.mark.slow(testing.conformance(broken.Drift()))

REJECTED = {
    "learns": [broken.HeaderInNoOptimizer],
    "nothing_aliased": [broken.HeaderIsClient0s, broken.PreviousIsLive],
    "nothing_written_in_place": [
        broken.ReceivedIsKept,
        broken.StateInPlace,
        broken.NobodyInPlace,
        broken.UploadsInPlace,
        broken.LabelsInPlace,
        broken.ShrinksInTheLoss,
    ],
    "oracle": [broken.LastIsUnbound],
    "row_weights_count": [broken.IgnoresRowWeights],
    "hyperparameters_matter": [broken.DeadKnob],
    "begins_alike": [broken.HeadsBeginApart],
    "samples_counted_once": [broken.UncountedPrototypes],
    "missing_upload_is_not_zero": [broken.AbsentClassesAreZero, broken.DividesByAll],
    "reductions": [broken.UndetachedTeacher],
    "batchnorm": [broken.BuffersStayAtHome, broken.BuffersOfTheFirst],
    "other_seed_other_result": [broken.SeedInConstructor, broken.SeededDraws],
    "global_generators_untouched": [broken.GlobalSeed],
    "loss_is_pure": [broken.DrawsInTheLastLoss, broken.BranchesOnValues],
    "data_are_shuffled": [broken.Unshuffled],
    "degenerate_clients": [broken.DropsTheLastBatch],
    "speaks_in_tensors": [broken.FloatInAMessage, broken.FloatComesDown, broken.FloatInAState],
    "has_hyperparameters": [broken.NoDecorator],
    "state_is_explicit": [broken.HiddenState, broken.StateInTheMethod],
    "broadcast_without_side_effects": [broken.BroadcastCounts],
    "goes_on_after_its_end": [broken.PlansInSilence],
    "any_subset": [broken.CrashesWithoutAnswers, broken.ForgetsWhatNobodySent, broken.NeedsNothing],
    "order_of_uploads": [broken.WeightsByPlace],
    "client_order_invariant": [broken.FirstClientIsSpecial],
    "nan_is_rejected": [broken.SwallowsNaN],
    "expected_bytes": [broken.SendsTheWholeUnion],
    "declared": [broken.UnknownStage],
    "uploads_have_their_form": [broken.SaysHalfOfWhatItSends],
}
CAUGHT_BY = {kind: name for name, kinds in REJECTED.items() for kind in kinds}


def options(kind: type[Method]) -> dict[str, Any]:
    """Those of the sound method that it was made from."""
    return next(OPTIONS[parent] for parent in kind.__mro__ if parent in OPTIONS)


ONE_EACH = [kinds[-1] for kinds in REJECTED.values()]  # one for each property


@pytest.mark.parametrize("kind", others_slow(CAUGHT_BY, quick=ONE_EACH), ids=lambda kind: kind.__name__)
def test_the_mutant_is_rejected(kind: type[Method]) -> None:
    assert kind.__doc__
    name = CAUGHT_BY[kind]
    found = testing.violations(kind(), [name], **options(kind))
    assert name in found, f"{kind.__name__} ({kind.__doc__}) passed '{name}'"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (broken.FloatInAMessage, "upload puts something else than tensors into a message: expected tensors in "),
        (broken.FloatComesDown, "got float as 'rate/of the server'; write torch.tensor(0.5)"),
        (broken.FloatInAState, "aggregate puts something else than tensors into the server's state: "),
        (
            broken.NoDecorator,
            "the field 'strength' is no hyperparameter: write @hyperparameters (of polyfed.core.method) above "
            "the class",
        ),
    ],
)
def test_what_all_else_rests_on_is_one_line_alone(kind: type[Method], says: str) -> None:
    """And not the same error again for every other property."""
    (line,) = testing.violations(kind()).values()
    assert says in line
    assert "\n" not in line


@hyperparameters
class Undeclared(Method):
    """Wants a representation and does not say so; with `split`, it does, but not that all need one width."""

    card = MethodCard(name="undeclared", paper="none")
    split: bool = False

    @property
    def requirements(self) -> Requirements:
        return Requirements(split_model=self.split)

    def loss(self, model: Any, batch: Batch, context: Context) -> Tensor:
        return task_loss(model.head(model.represent(batch.x)), batch.y, batch.w)

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {"weight": client.model.head.weight.detach().clone()}  # type: ignore[union-attr]

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        sum(message["weight"] for message in uploads.values())  # type: ignore[misc]


@pytest.mark.parametrize(("split", "says"), [(False, "no attribute 'head'"), (True, "must match the size")])
def test_needs_that_are_not_declared_are_one_line(split: bool, says: str) -> None:
    found = testing.violations(Undeclared(split=split))
    assert list(found) == ["runs"]
    assert says in found["runs"]
    assert "do these name what it needs (split_model=True for represent and head)" in found["runs"]


@hyperparameters
class SendsAlike(Local):
    """The server sends a mask, which never changes, or numbers that nothing trains."""

    value: float = 1.0

    def broadcast(self, server: Server, client_id: int) -> Message:
        return {"known": torch.tensor([0.0, self.value, self.value])}


@pytest.mark.parametrize(("value", "allowed"), [(1.0, True), (0.5, False), (0.0, False)])
def test_a_mask_or_count_may_be_the_same_in_every_round(value: float, allowed: bool) -> None:
    found = testing.violations(SendsAlike(value=value), ["learns"])
    assert allowed or "the server sends the same 'known'" in found["learns"]
    assert bool(found) != allowed


@hyperparameters
class MeanHead(Local):
    """The mean of heads that were drawn apart."""

    def upload(self, client: Client, trained: TrainingResult) -> Message:
        return {"head": float_state(client.model, parts=("head",))}

    def aggregate(self, server: Server, uploads: Mapping[int, Message]) -> None:
        heads = [message["head"] for message in uploads.values()]
        if heads:
            server.state["head"] = {name: sum(head[name] for head in heads) / len(heads) for name in heads[0]}

    def broadcast(self, server: Server, client_id: int) -> Message:
        return dict(server.state)


@hyperparameters
class MeanCommonHead(MeanHead):
    """The mean of heads that begin alike."""

    card = replace(MeanHead.card, common_start="head")


def test_averaged_weights_begin_alike() -> None:
    (said,) = testing.violations(MeanHead(), ["missing_upload_is_not_zero"]).values()
    assert "set common_start" in said
    assert not testing.violations(MeanCommonHead(), ["missing_upload_is_not_zero"])


def test_nan_is_not_what_the_oracle_says() -> None:
    found = testing.violations(Local(), ["oracle"], reference_loss=lambda model, batch, context: float("nan"))
    assert "the oracle says nan" in found["oracle"]


def test_a_receive_that_is_marked_loads_nothing_of_the_clients_own() -> None:
    class Kept(FedAvg):
        """An odd client's network stays as it is."""

        card = FedAvg.card

        @loads_message
        def receive(self, client: Client, message: Message) -> Context:
            return super().receive(client, message) if client.id % 2 == 0 else {}

    found = testing.violations(Kept(), ["scored_together_alike"])
    assert "marked `loads_message`" in found["scored_together_alike"]


def test_a_class_in_place_of_a_method_is_one_line() -> None:
    assert testing.violations(FedAvg) == {  # type: ignore[arg-type]
        "has_hyperparameters": "FedAvg: expected a method, FedAvg(), got its class"
    }


def test_pytest_asks_nothing_else_either() -> None:
    asked = testing.conformance(broken.FloatInAMessage())
    with pytest.raises(testing.ConformanceError, match="upload puts something else"):
        asked("speaks_in_tensors")
    with pytest.raises(pytest.skip.Exception, match="not asked before speaks_in_tensors holds"):
        asked("learns")
    testing.conformance(FedAvg())("declared")
