"""What a run writes: a `RoundRecord` for each line of rounds.jsonl, a `RunResult` as result.json.

The engine checks what it writes by these models, reports read it by them, and docs/records.md is made of their
descriptions by ``scripts/records_page.py``. Fields stand in the order of the file. A key that an older version, or a
run without the feature, does not write is None, or empty, when it is read.

Accuracies and other figures are shares in [0, 1], bytes are exact sizes of tensors, times are in seconds. Clients are
numbered from 0, rounds from 1.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from polyfed.results.fields import (
    Count,
    Figure,
    Flag,
    IfPresent,
    Loss,
    NullIsEmptyDict,
    NullIsEmptyList,
    Number,
    Record,
    Text,
    check_present,
    count_between,
    number_between,
    one_of,
)

Whole = Annotated[int, count_between(0, 2**40)]


class Summary(Record):
    """A figure over clients. Keys that are not known are missing."""

    mean: IfPresent[Number] = Field(
        None,
        description='with `mean = "clients"` every client counts once; with `"samples"` as often as it has test '
        "samples. For the accuracy the latter is the accuracy over all samples; for the other figures it is the "
        "weighted mean of the clients' own",
    )
    std: IfPresent[Number] = Field(None, description="standard deviation over clients (population), each counting once")
    min: IfPresent[Number] = Field(None, description="of the lowest client")
    max: IfPresent[Number] = Field(None, description="of the highest client")
    worst_tenth: IfPresent[Number] = Field(
        None, description="accuracy only: mean of the lowest tenth of the clients, rounded up"
    )
    n: IfPresent[Number] = Field(
        None, description="clients in it: those with test data, for whom the figure is defined"
    )


class FigureSummary(Record):
    """A `Summary` of a figure other than the accuracy, which may be the user's own and have another range."""

    mean: IfPresent[Figure] = None
    std: IfPresent[Figure] = None
    min: IfPresent[Figure] = None
    max: IfPresent[Figure] = None
    n: IfPresent[Figure] = None


class LateUpload(Record):
    """An upload of an earlier round."""

    client: Count = Field(description="who sent it")
    sent_in: Count = Field(alias="from", description="the round in which it was sent")


class Refusal(Record):
    """An upload that counted for nothing."""

    client: Count = Field(description="whose")
    reason: Text = Field(description="why")


class Traffic(Record):
    """What one client sent and was sent, in bytes."""

    up: Count = Field(description="sent by the client")
    down: Count = Field(description="sent to it")


class SimulatedEffort(Record):
    """What a round would have been for one client's device."""

    down: Number = Field(description="seconds to receive")
    train: Number = Field(description="seconds to compute")
    up: Number = Field(description="seconds to send")
    operations: Count = Field(description="that it computed")


class DefenseRecord(Record):
    """What the rule of `[defence]` did in a round."""

    left_out: list[Count] = Field([], description="clients that Krum left out")
    shortened: IfPresent[Count] = Field(None, description="how many vectors and tensors were cut to the longest norm")
    few: IfPresent[Count] = Field(None, description="how many parts fewer than three clients sent")


class ReleaseRecord(Record):
    """What clients released with noise, the same for all of `clients`."""

    what: Annotated[Literal["upload", "features", "training"], one_of("upload", "features", "training")] = Field(
        description="what is hidden by the noise"
    )
    unit: Annotated[Literal["client", "sample"], one_of("client", "sample")] = Field(
        description="whether a client takes part, or what one of its rows holds"
    )
    noise: Annotated[float, number_between(1e-9, 1e18)] = Field(
        description="its standard deviation over the most that it can change"
    )
    drawn: Whole = Field(description="rows that it is about; 0: about all")
    held: Whole = Field(description="rows that these are drawn of")
    poisson: Flag = Field(description="whether each row was drawn by itself")
    times: Annotated[int, count_between(1, 2**40)] = Field(description="how often")
    clients: list[Whole] = Field(description="whose")


class RoundRecord(Record):
    """One round, a line of rounds.jsonl."""

    round: Count = Field(description="counted from 1; a closing round has the number after the last one")
    seconds: IfPresent[Number] = Field(None, description="of the whole round, scoring included")
    closing: Flag = Field(False, description="true for the closing round, which some methods have after the last one")
    clients: list[Count] = Field([], description="who was asked to take part, and reached")
    lr: IfPresent[Number] = Field(None, description="the round's learning rate, under the schedule")
    dropped: list[Count] = Field(
        [],
        description="who was asked, and dropped out; also who was lost, as two workers in turn died of its work",
    )
    late: list[Count] = Field([], description="who sent something that did not arrive in this round")
    arrived: list[LateUpload] = Field([], description="what of earlier rounds was taken in")
    discarded: list[LateUpload] = Field(
        [], description="what came too late, or was overtaken by a newer one of the same client, and was thrown away"
    )
    bytes_up: IfPresent[Count] = Field(None, description="sent by the clients; also what was refused or lost")
    bytes_down: IfPresent[Count] = Field(None, description="sent by the server")
    bytes_up_uncompressed: IfPresent[Count] = Field(
        None, description="only with `[compression]`: what would have gone up"
    )
    bytes_up_as_in_paper: IfPresent[Count] = Field(
        None, description="`bytes_up`, not compressed, counted as the method's paper counts"
    )
    bytes_down_as_in_paper: IfPresent[Count] = Field(None, description="`bytes_down`, likewise")
    bytes_by_client: dict[str, Traffic] = Field({}, description="client -> what it sent and was sent")
    train_loss: Loss | None = Field(
        None, description="mean over the training samples processed; null where nothing was trained"
    )
    samples: IfPresent[Count] = Field(None, description="training samples processed, all epochs counted")
    refused: list[Refusal] = Field([], description="uploads that counted for nothing")
    sums: dict[str, Any] = Field({}, description="the method's own figures, per training step")
    simulated_seconds: IfPresent[Number] = Field(
        None, description="only with `[devices]`: what the round would have taken on the clients' [devices](devices.md)"
    )
    simulated_by_client: IfPresent[dict[str, SimulatedEffort]] = Field(
        None, description="only with `[devices]`: client -> its part of it"
    )
    stragglers: IfPresent[list[Count]] = Field(
        None, description="only with a deadline: whose upload came behind it; they are among `late`, too"
    )
    epsilon: dict[str, Loss] = Field(
        {},
        description="only where noise hides something ([privacy](privacy.md)): of all that has been released up to "
        "here, of the client that has released most; by unit: `client` (whether it takes part), `sample` (what one of "
        "its rows holds)",
    )
    delta: IfPresent[Number] = Field(None, description="with `epsilon`: at which")
    releases: list[ReleaseRecord] = Field([], description="with `epsilon`: what was released in this round")
    defence: IfPresent[DefenseRecord] = Field(
        None, description="only with a rule of `[defence]`: what it did ([robustness.md](robustness.md))"
    )
    hostile: IfPresent[list[Count]] = Field(None, description="only with `[hostile]`: who of those asked plays false")
    server: dict[str, Any] = Field({}, description="the server half's own figures")
    evaluated: Flag = Field(False, description="whether this round was scored; if not, what follows is empty")
    accuracy: dict[str, Summary] = Field({}, description="stage -> accuracy over clients")
    accuracy_by_predictor: NullIsEmptyDict[dict[str, Summary]] = Field(
        {},
        description="stage -> predictor -> the accuracy if the method predicted in another of its ways (by `head` "
        "where it predicts by `prototype`, or the reverse); empty for methods with one way",
    )
    accuracy_per_client: NullIsEmptyList[Number | None] = Field(
        [], description="of the main stage, in order; null for who was not scored"
    )
    accuracy_per_architecture: NullIsEmptyDict[Summary] = Field(
        {}, description="of the main stage: architecture -> accuracy over its clients"
    )
    metrics: NullIsEmptyDict[dict[str, FigureSummary]] = Field(
        {}, description="stage -> figure -> summary, for the figures asked for"
    )
    confusion: list[list[Count]] | None = Field(
        None, description="the counts of the main stage, summed over clients; null unless asked for"
    )
    validation: Number | None = Field(
        None,
        description="mean accuracy of the main stage on the clients' validation data (of `personal` where that is "
        "`after_local`)",
    )
    timings: IfPresent[dict[str, Number]] = Field(
        None, description="only with `--timings`: where the round's time went, in seconds by section, as below"
    )

    def mean_accuracy(self, stage: str) -> float | None:
        """The accuracy over clients in a stage; None where it was not scored."""
        scored = self.accuracy.get(stage)
        return None if scored is None else scored.mean


class EvaluationFacts(Record):
    """How a run was scored."""

    stage: Text = Field(description="the main one")
    mean: IfPresent[Text] = Field(None, description="`clients` or `samples`, as for [summaries](#figures)")
    test: IfPresent[Text] = Field(None, description="`client`: everybody's own test data; `global`: one set")
    every: IfPresent[Count] = Field(None, description="rounds from one scoring to the next")
    stages: list[Text] = Field([], description="all that were scored")
    patience: IfPresent[Count] = Field(None, description="scorings without a better one that end the run; 0: never")
    min_delta: IfPresent[Number] = Field(None, description="by how much a better one is better")
    clients: IfPresent[Text] = Field(None, description="only with `[hostile]`: `honest`, as only they are scored")


class ClientRow(Record):
    """One client of a run. A deployed run has neither `parameters` nor `labels`, which are with the nodes."""

    id: Count = Field(description="its number")
    architecture: Text = Field(description="of its network")
    samples: Count = Field(description="that it had to train on")
    parameters: IfPresent[Count] = Field(None, description="of its own network, those that are trained")
    labels: IfPresent[dict[str, Count]] = Field(
        None,
        description="class -> how many of these samples; of a client with turned labels as it trains on them",
    )
    device: IfPresent[Text] = Field(None, description="only with `[devices]`")
    accuracy: Number | None = Field(None, description="main stage, last")
    bytes_up: IfPresent[Count] = Field(None, description="whole run")
    bytes_down: IfPresent[Count] = Field(None, description="whole run")
    simulated_seconds: IfPresent[Number] = Field(
        None, description="only with `[devices]`: for how long its device was busy"
    )


class RunResult(Record):
    """A finished run, result.json: first the run's facts, then what its records add up to."""

    method: Text = Field(description="its name")
    knobs: IfPresent[dict[str, Any]] = Field(None, description="all of the method's knobs")
    label: Text | None = Field(None, description="the variant's name, if it has one")
    dataset: Text = Field(description="as asked for")
    class_names: IfPresent[list[Text]] = Field(None, description="what the classes are called, in order")
    clients: Count = Field(description="how many")
    rounds: Count = Field(description="how many were asked for")
    seed: Count = Field(description="that every random draw is derived from")
    workers: IfPresent[Count] = Field(
        None, description="among how many processes the clients' work was dealt, when the run ended; 1: one did it all"
    )
    precision: IfPresent[Text] = Field(None, description="what networks trained in: `float32`, or `bf16`")
    evaluation: EvaluationFacts = Field(description="how it was scored")
    availability: dict[str, Any] = Field({}, description="settings of this section that are on; absent where none is")
    privacy: dict[str, Any] = Field({}, description="likewise")
    compression: dict[str, Any] = Field({}, description="likewise")
    defence: dict[str, Any] = Field({}, description="likewise")
    hostile: dict[str, Any] = Field({}, description="likewise")
    devices: dict[str, Any] = Field({}, description="likewise")
    left_out: list[Count] = Field(
        [],
        description="only with `[devices]`: clients whose network does not fit their device; scored with the network "
        "that they begin with",
    )
    hostile_clients: IfPresent[dict[str, Text]] = Field(
        None, description="only with `[hostile]`: client -> what it does, `label_flip` or `sign_flip`"
    )
    accuracy: Number | None = Field(description="of the main stage: mean over clients, last")
    accuracy_std: Number | None = Field(None, description="its standard deviation over clients")
    accuracy_worst_tenth: Number | None = Field(None, description="the mean of the lowest tenth of the clients")
    accuracy_before_closing: Number | None = Field(
        None, description="the same mean before the closing round, where there was one"
    )
    accuracy_best_by_validation: Number | None = Field(
        None, description="test accuracy of the round with the best validation accuracy"
    )
    accuracy_by_stage: NullIsEmptyDict[Summary] = Field({}, description="stage -> accuracy over clients, last")
    accuracy_by_predictor: NullIsEmptyDict[dict[str, Summary]] = Field(
        {}, description="the same by the method's other predictors, if it has any"
    )
    accuracy_per_client: NullIsEmptyList[Number | None] = Field([], description="that of the last record")
    accuracy_per_architecture: NullIsEmptyDict[Summary] = Field({}, description="that of the last record")
    metrics: NullIsEmptyDict[dict[str, FigureSummary]] = Field({}, description="those of the last record")
    confusion: list[list[Count]] | None = Field(None, description="that of the last record")
    validation: Number | None = Field(None, description="that of the last record")
    clients_table: IfPresent[list[ClientRow]] = Field(None, description="one row per client")
    bytes_up: IfPresent[Count] = Field(None, description="of the whole run, as in the records")
    bytes_down: IfPresent[Count] = Field(None, description="likewise")
    bytes_up_uncompressed: IfPresent[Count] = Field(None, description="likewise; only with `[compression]`")
    bytes_up_as_in_paper: IfPresent[Count] = Field(None, description="likewise")
    bytes_down_as_in_paper: IfPresent[Count] = Field(None, description="likewise")
    epsilon: dict[str, Loss] = Field({}, description="only where noise hides something: as in the last record")
    delta: IfPresent[Annotated[float, number_between(1e-300, 1.0)]] = Field(
        None, description="with `epsilon`: at which"
    )
    epsilon_of: dict[str, list[Text]] = Field({}, description="with `epsilon`: by unit of what that is")
    stopped_after: Count | None = Field(
        None, description="the round after which the run ended early; null where it ran to its end"
    )
    stopped_by: Text | None = Field(None, description="why it did: `patience` or `budget`")
    closed: Flag = Field(False, description="whether there was a closing round")
    refused: IfPresent[Count] = Field(None, description="how many uploads counted for nothing")
    nothing_learnt: Text | None = Field(
        None,
        description="null, or a line that says why and what to try: something was refused, and in every round either "
        "nobody's training counted, or that of less than half of those asked, with a mean training loss beyond 1000",
    )
    samples: IfPresent[Count] = Field(None, description="training samples processed")
    seconds: IfPresent[Number] = Field(None, description="time of all rounds")
    samples_per_second: Number | None = Field(None, description="their ratio")
    simulated_seconds: IfPresent[Number] = Field(None, description="only with `[devices]`: the sum of the records'")
    stragglers: IfPresent[Count] = Field(None, description="only with a deadline: how many in all")
    timings: IfPresent[dict[str, Number]] = Field(None, description="only with `--timings`: the sums of the records'")
    versions: dict[str, Text] = Field({}, description="`polyfed`, `python`, `torch`, `numpy`, `platform`")
    models_of_round: IfPresent[Count] = Field(
        None,
        description='after which round `models/` are: the last one, a closing one included; with `run.keep = "best"` '
        "the (first) one with the best validation accuracy",
    )

    def mean_accuracy(self, stage: str) -> float | None:
        """The accuracy over clients in a stage, after the last scored round; None where it was not scored."""
        if stage == self.evaluation.stage:
            return self.accuracy
        scored = self.accuracy_by_stage.get(stage)
        return None if scored is None else scored.mean


# all that a result is made of
_NEEDED_TO_GO_ON = (
    "seconds",
    "closing",
    "clients",
    "lr",
    "train_loss",
    "refused",
    "evaluated",
    "validation",
    "bytes_up",
    "bytes_down",
    "bytes_up_as_in_paper",
    "bytes_down_as_in_paper",
    "bytes_by_client",
    "samples",
    "accuracy",
)


def check_complete(record: RoundRecord) -> None:
    """Whether a run can go on from a record: it is of this version, with all that a result is made of.

    Raises:
        ValueError: something is missing.
    """
    check_present(record, _NEEDED_TO_GO_ON)
    for stage, summary in record.accuracy.items():
        if summary.mean is None:
            raise ValueError(f"'accuracy.{stage:.60}': expected the key 'mean', got none")
