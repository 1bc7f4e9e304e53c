"""What a run writes: a `RoundRecord` for each line of rounds.jsonl, a `RunResult` as result.json.

The engine checks what it writes by these models, reports read it by them, and docs/records.md is made of their
descriptions when the site is built. A key that an older version, or a run without the feature, does not write
is None, or empty, when it is read.

Where numbers are predicted, keys that begin with "accuracy" begin with "rmse"; reports read them under one name.
Accuracies and other figures are shares in [0, 1], bytes are exact sizes of tensors, times are in seconds. Clients are
numbered from 0, rounds from 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from polyfed.escaping import one_line
from polyfed.records.fields import (
    Count,
    Figure,
    Flag,
    IfPresent,
    Loss,
    Number,
    Record,
    Score,
    ScoredRecord,
    Text,
    count_between,
    number_between,
)
from polyfed.records.main_score import ACCURACY, RMSE, MainScore, as_accuracy

Whole = Annotated[int, count_between(0, 2**40)]
Unit = Literal["client", "sample"]  # what noise hides: whether a client takes part, or one of its rows


class BufferedUpload(Record):
    """An upload that filled the buffer of a server that does not wait for all."""

    client: Count = Field(description="the client that sent it")
    begun_in: Count = Field(alias="from", description="the round in which it began to train")


class Refusal(Record):
    """An upload that was rejected and not aggregated."""

    client: Count = Field(description="the client that sent it")
    reason: Text = Field(description="why it was rejected")


class Traffic(Record):
    """What one client sent and was sent, in bytes."""

    down: Count = Field(description="sent to the client")
    up: Count = Field(description="sent by the client")


class SimulatedEffort(Record):
    """What a round would have taken on one client's device."""

    down: Number = Field(description="seconds to receive")
    train: Number = Field(description="seconds to compute")
    up: Number = Field(description="seconds to send")
    operations: Count = Field(description="floating-point operations computed")


class DefenseRecord(Record):
    """What the aggregator of `[robust_aggregation]` did in a round."""

    left_out: list[Count] = Field([], description="clients whose uploads Krum left out")
    shortened: IfPresent[Count] = Field(
        None, description="number of vectors and tensors that were shortened to the norm bound"
    )
    few: IfPresent[Count] = Field(
        None, description="number of parts that fewer than three clients sent, so that nobody can be outvoted"
    )


class SumRecord(Record):
    """A sum of which the server learns the total alone."""

    asked: list[Count] = Field([], description="clients that it was to be of")
    summed: list[Count] = Field([], description="clients that are in its total; none where it was not opened")


class ReleaseRecord(Record):
    """One noised release, the same for all of its `clients`."""

    what: Literal["upload", "features", "training", "sums"] = Field(description="what the noise was added to")
    unit: Unit = Field(description="what the noise hides: whether a client takes part, or what one of its rows holds")
    noise: Annotated[float, number_between(1e-9, 1e18)] = Field(
        description="standard deviation of the noise, divided by the sensitivity"
    )
    drawn: Whole = Field(description="number of rows in it; 0: all")
    held: Whole = Field(description="number of rows that these were drawn from")
    poisson: Flag = Field(
        description="whether each row was drawn independently; else exactly `drawn` without replacement"
    )
    times: Annotated[int, count_between(1, 2**40)] = Field(description="how often it was made")
    once: Flag = Field(description="whether it is the same numbers each time, so that it counts once in a run")
    clients: list[Whole] = Field(description="the clients that made it")


class Summary(Record):
    """A figure over clients. Keys that are not known are missing."""

    mean: IfPresent[Score] = Field(
        None,
        description='mean over clients: with `weighting = "clients"` each counts once, with `"samples"` as often as it '
        "has test samples (for the accuracy this is the accuracy over all samples)",
    )
    std: IfPresent[Score] = Field(None, description="population standard deviation over clients, each counting once")
    min: IfPresent[Score] = Field(None, description="the lowest client")
    max: IfPresent[Score] = Field(None, description="the highest client")
    bottom_decile: IfPresent[Score] = Field(
        None, description="main score only: mean of the worst tenth of the clients, rounded up"
    )
    n: IfPresent[Score] = Field(None, description="number of clients with test data for which the figure is defined")


class FigureSummary(Record):
    """A `Summary` of a figure other than the accuracy, which may be the user's own and have another range."""

    mean: IfPresent[Figure] = None
    std: IfPresent[Figure] = None
    min: IfPresent[Figure] = None
    max: IfPresent[Figure] = None
    n: IfPresent[Figure] = None


class RoundRecord(ScoredRecord):
    """One round, a line of rounds.jsonl."""

    round: Count = Field(description="counted from 1; a final round has the number after the last one")
    seconds: IfPresent[Number] = Field(
        None,
        description="wall-clock time of the round, evaluation included",
    )
    processor_seconds: IfPresent[Number] = Field(
        None,
        description="processor time of the round, of the run's process and its workers; in a deployment of the server",
    )
    final_round: Flag = Field(
        False, description="whether this is the final round that some methods have after the last one"
    )
    clients: list[Count] = Field([], description="clients that were selected and reached")
    lr: IfPresent[Number] = Field(None, description="learning rate of the round, as the schedule has it")
    dropped: list[Count] = Field(
        [], description="selected clients that dropped out; also those whose work killed two workers in turn"
    )
    bytes_up: IfPresent[Count] = Field(
        None, description="bytes sent by all clients, rejected and lost uploads included"
    )
    bytes_down: IfPresent[Count] = Field(None, description="bytes sent by the server")
    bytes_up_paper: IfPresent[Count] = Field(None, description="`bytes_up`, counted as the method's paper counts")
    bytes_down_paper: IfPresent[Count] = Field(None, description="`bytes_down`, counted as the method's paper counts")
    bytes_by_client: dict[str, Traffic] = Field({}, description="client -> bytes it sent and received")
    train_loss: Loss | None = Field(
        None, description="mean over the training samples processed; null if nothing was trained"
    )
    samples: IfPresent[Count] = Field(None, description="training samples processed, each epoch counted")
    refused: list[Refusal] = Field([], description="uploads that were rejected")
    sums: dict[str, Any] = Field({}, description="the method's own metrics, mean over training steps")
    simulated_seconds: IfPresent[Number] = Field(
        None,
        description="only with `[devices]`: time that the round would have taken on the clients' [devices](devices.md)",
    )
    simulated_by_client: IfPresent[dict[str, SimulatedEffort]] = Field(
        None, description="only with `[devices]`: client -> its share of that time"
    )
    stragglers: IfPresent[list[Count]] = Field(None, description="only with a deadline: clients whose upload missed it")
    aggregated: IfPresent[list[BufferedUpload]] = Field(
        None,
        description="only with `devices.buffer_size`: the uploads that were aggregated, each with its `client` "
        "and the round in which that began, `from`",
    )
    epsilon: dict[Unit, Loss] = Field(
        {},
        description="only with noise ([privacy](privacy.md)): unit -> epsilon of all releases so far, of the client "
        "that has released most. Units: `client` (whether it takes part), `sample` (what one of its rows holds)",
    )
    delta: IfPresent[Number] = Field(None, description="with `epsilon`: the delta that it holds at")
    releases: list[ReleaseRecord] = Field([], description="with `epsilon`: the noised releases of this round")
    robust_aggregation: IfPresent[DefenseRecord] = Field(
        None, description="only with an aggregator of `[robust_aggregation]`: what it did ([robustness](robustness.md))"
    )
    secure_sums: IfPresent[SumRecord] = Field(
        None, description="only with `[secure_sums]`: of the round's last sum ([secure sums](secure-sums.md))"
    )
    adversaries: IfPresent[list[Count]] = Field(
        None, description="only with `[adversaries]`: selected clients that are malicious"
    )
    plugins: dict[str, Any] = Field({}, description="only with plugins of your own: name -> what it records")
    server: dict[str, Any] = Field({}, description="the server's own metrics")
    evaluated: Flag = Field(False, description="whether this round was evaluated; if not, what follows is empty")
    accuracy: dict[str, Summary] = Field({}, description="stage -> accuracy over clients")
    accuracy_by_predictor: dict[str, dict[str, Summary]] = Field(
        {},
        description="stage -> predictor -> accuracy with the method's other predictor (by `head` where it predicts by "
        "`prototype`, or the reverse); empty for methods with one predictor",
    )
    accuracy_per_client: list[Score | None] = Field(
        [],
        description="accuracy of each client in the main stage; null for clients that were not evaluated: those "
        "without test data, those that have not joined yet or have left, and nodes that did not answer",
    )
    accuracy_per_architecture: dict[str, Summary] = Field(
        {}, description="architecture -> accuracy over its clients in the main stage"
    )
    metrics: dict[str, dict[str, FigureSummary]] = Field(
        {}, description="stage -> metric -> summary over clients, for `[evaluation] metrics`"
    )
    confusion: list[list[Count]] | None = Field(
        None, description="counts of the main stage, summed over clients (rows: true class); null unless asked for"
    )
    validation: Score | None = Field(
        None,
        description="mean accuracy on the clients' validation data in the main stage (in `personal` if that is "
        "`after_training`)",
    )
    accuracy_by_classes: dict[str, dict[str, Summary]] = Field(
        {},
        description="only with `missing_classes`: stage -> `own` -> accuracy on the classes that each client has "
        "training rows of; `missing` -> on those that it has none of, with the test rows of all clients",
    )
    held_out: dict[str, Summary] = Field(
        {},
        description="only with `held_out`: `received` -> accuracy of the clients that are held out, each with what it "
        "would receive if it joined now; `after_training`, with `held_out_epochs` -> after local training on it",
    )
    held_out_per_client: dict[str, dict[str, Score]] = Field(
        {}, description="only with `held_out`: the same stages -> client -> its accuracy"
    )


class EvaluationFacts(Record):
    """How a run was scored."""

    stage: Text = Field(description="the main stage")
    weighting: IfPresent[Text] = Field(
        None, description="how clients are averaged: `clients` or `samples`, as [above](#figures)"
    )
    test: IfPresent[Text] = Field(
        None, description="`client`: each client's own test data; `global`: one shared test set"
    )
    every_n_rounds: IfPresent[Count] = Field(None, description="every how many rounds clients are evaluated")
    stages: list[Text] = Field([], description="all stages that were evaluated")
    patience: IfPresent[Count] = Field(
        None, description="evaluations without an improvement that end the run; 0: never"
    )
    min_delta: IfPresent[Number] = Field(
        None, description="smallest gain in validation accuracy that counts as an improvement"
    )
    round: Literal["last", "best"] = Field(
        "last",
        description="whose scores the result holds: those after the last round, or, with `evaluation.patience` and "
        'with `run.keep = "best"`, after the round with the best validation score',
    )
    clients: IfPresent[Text] = Field(
        None, description="only with `[adversaries]`: `honest`, the clients that are evaluated"
    )
    held_out: IfPresent[list[Count]] = Field(None, description="only with `held_out`: clients that are in no round")
    held_out_epochs: IfPresent[Count] = Field(
        None, description="with `held_out`: local epochs after which they are scored again; 0: they are not"
    )

    @property
    def when(self) -> str:
        """After which round the reported scores are, in words."""
        return "after the best round by validation" if self.round == "best" else "after the last round"


class ClientRow(ScoredRecord):
    """One client of a run. A deployed run has neither `parameters` nor `labels`, which are with the nodes."""

    id: Count = Field(description="number of the client")
    architecture: Text = Field(description="architecture of its network")
    samples: Count = Field(description="number of training samples")
    validation_samples: IfPresent[Count] = Field(None, description="number of validation samples")
    test_samples: IfPresent[Count] = Field(None, description="number of test samples")
    parameters: IfPresent[Count] = Field(None, description="number of trained parameters of its own network")
    labels: IfPresent[dict[str, Count]] = Field(
        None, description="class -> number of training samples; with flipped labels as the client trains on them"
    )
    class_names: IfPresent[list[Text]] = Field(None, description="only with a label space of its own: its classes")
    device: IfPresent[Text] = Field(None, description="only with `[devices]`: name of its device profile")
    held_out: IfPresent[Flag] = Field(None, description="only with `held_out`: it is in no round")
    accuracy: Score | None = Field(
        None, description="accuracy in the main stage, reported round; null for clients that were not evaluated then"
    )
    last_evaluated: IfPresent[Count] = Field(
        None,
        description="only where the reported round is without the client: the last round in which it was evaluated",
    )
    bytes_up: IfPresent[Count] = Field(None, description="bytes sent in the whole run")
    bytes_down: IfPresent[Count] = Field(None, description="bytes received in the whole run")
    simulated_seconds: IfPresent[Number] = Field(
        None, description="only with `[devices]`: time that its device was busy"
    )


class MadeOf(Record):
    """What a run is made of beside its recipe: SHA-256 checksums."""

    data: IfPresent[Text] = Field(
        None,
        description="of all clients' rows as assigned, of public ones, and of names of classes, features and words; "
        "absent from deployed runs, whose rows are with the nodes",
    )
    code: dict[str, Text] = Field(
        {}, description="only with code of your own: module -> of its file, for those beside the recipe that it uses"
    )


class RunResult(ScoredRecord):
    """A finished run, result.json: first the run's facts, then what its records add up to."""

    method: Text = Field(description="name of the method")
    hyperparameters: IfPresent[dict[str, Any]] = Field(None, description="all hyperparameters of the method")
    label: Text | None = Field(None, description="name of the variant, if it has one")
    dataset: Text = Field(description="name of the data set")
    score: Literal["accuracy", "rmse"] = Field(
        "accuracy",
        description="only where numbers are predicted: `rmse`, the main score, which all keys below and in "
        "`rounds.jsonl` have in place of `accuracy`",
    )
    class_names: IfPresent[list[Text]] = Field(None, description="names of the classes, in order; empty: numbers")
    clients: Count = Field(description="number of clients")
    client_names: list[Text] = Field(
        [],
        description="what clients are called, in the order of their numbers: their folder or value of `data.group_by`; "
        "absent where that is the number",
    )
    rounds: Count = Field(description="number of rounds that were asked for")
    seed: Count = Field(description="seed of every random draw")
    workers: IfPresent[Count] = Field(
        None, description="number of processes that trained clients when the run ended; 1: the run's own"
    )
    evaluation: EvaluationFacts = Field(description="how clients were evaluated")
    pretraining: dict[str, Any] = Field(
        {},
        description="only with `[pretraining]`: its settings, `rows` trained on and `seconds` of training; else absent",
    )
    availability: dict[str, Any] = Field(
        {}, description="settings of the section `[availability]` that are on; absent if none is"
    )
    privacy: dict[str, Any] = Field({}, description="settings of `[privacy]`, likewise")
    robust_aggregation: dict[str, Any] = Field({}, description="settings of `[robust_aggregation]`, likewise")
    adversaries: dict[str, Any] = Field({}, description="settings of `[adversaries]`, likewise")
    secure_sums: dict[str, Any] = Field({}, description="settings of `[secure_sums]`, likewise")
    devices: dict[str, Any] = Field({}, description="settings of `[devices]`, likewise")
    left_out: list[Count] = Field(
        [],
        description="only with `[devices]`: clients whose network does not fit their device; evaluated with the "
        "network that they begin with",
    )
    adversarial_clients: IfPresent[dict[str, Text]] = Field(
        None, description="only with `[adversaries]`: client -> its attack, `label_flip` or `sign_flip`"
    )
    accuracy: Score | None = Field(description="mean over clients in the main stage, reported round")
    accuracy_std: Score | None = Field(None, description="standard deviation over clients")
    accuracy_bottom_decile: Score | None = Field(None, description="mean of the lowest tenth of the clients")
    accuracy_before_final_round: Score | None = Field(
        None, description="`accuracy` of the round that the final one began from, if there was one"
    )
    accuracy_last_round: Score | None = Field(
        None, description="`accuracy` after the last regular round, also where the best one is reported"
    )
    accuracy_best_by_validation: Score | None = Field(
        None, description="test accuracy of the round with the best validation accuracy"
    )
    accuracy_best_test_round: Score | None = Field(
        None,
        description="the best test accuracy over rounds, as PFLlib and HtFLlib report it: chosen on test data, so only "
        "for a comparison with their figures",
    )
    accuracy_by_stage: dict[str, Summary] = Field({}, description="stage -> accuracy over clients, reported round")
    accuracy_by_predictor: dict[str, dict[str, Summary]] = Field(
        {}, description="stage -> predictor -> accuracy, reported round"
    )
    accuracy_per_client: list[Score | None] = Field([], description="as in the reported round")
    accuracy_per_architecture: dict[str, Summary] = Field({}, description="as in the reported round")
    metrics: dict[str, dict[str, FigureSummary]] = Field({}, description="as in the reported round")
    confusion: list[list[Count]] | None = Field(None, description="as in the reported round")
    validation: Score | None = Field(None, description="as in the reported round")
    accuracy_by_classes: dict[str, dict[str, Summary]] = Field(
        {}, description="only with `missing_classes`: as in the reported round"
    )
    held_out: dict[str, Summary] = Field({}, description="only with `held_out`: as in the reported round")
    held_out_per_client: dict[str, dict[str, Score]] = Field(
        {}, description="only with `held_out`: as in the reported round"
    )
    clients_table: IfPresent[list[ClientRow]] = Field(None, description="one row per client")
    bytes_up: IfPresent[Count] = Field(None, description="sum over the rounds")
    bytes_down: IfPresent[Count] = Field(None, description="sum over the rounds")
    bytes_up_paper: IfPresent[Count] = Field(None, description="sum over the rounds")
    bytes_down_paper: IfPresent[Count] = Field(None, description="sum over the rounds")
    epsilon: dict[Unit, Loss] = Field({}, description="only with noise: as in the last round")
    delta: IfPresent[Annotated[float, number_between(1e-300, 1.0)]] = Field(
        None, description="with `epsilon`: the delta that it holds at"
    )
    epsilon_of: dict[str, list[Text]] = Field(
        {}, description="with `epsilon`: unit -> kinds of releases that it counts"
    )
    stopped_after: Count | None = Field(
        None, description="the round after which the run ended early; null if it ran to its end"
    )
    best_round: Count | None = Field(
        None,
        description="with `evaluation.round` = `best`: the first regular round with the best validation score, which "
        "is reported, or which the final round began from",
    )
    final_round: Flag = Field(False, description="whether there was a final round")
    refused: IfPresent[Count] = Field(None, description="number of rejected uploads")
    nothing_learnt: Text | None = Field(
        None,
        description="null, or a line that says why and what to try: uploads were rejected, and in most rounds either "
        "no client's training counted, or most clients were rejected and the others' mean training loss was beyond "
        "1000; or all dropped out in every round",
    )
    samples: IfPresent[Count] = Field(None, description="training samples processed")
    seconds: IfPresent[Number] = Field(None, description="wall-clock time of all rounds")
    processor_seconds: IfPresent[Number] = Field(None, description="processor time of all rounds")
    samples_per_second: Number | None = Field(None, description="`samples` over `seconds`")
    simulated_seconds: IfPresent[Number] = Field(None, description="only with `[devices]`: sum over the rounds")
    stragglers: IfPresent[Count] = Field(None, description="only with a deadline: number of uploads that missed it")
    versions: dict[str, Text] = Field(
        {},
        description="versions of `polyfed`, `python`, `torch` and `numpy`, the `platform`, and the `device` unless it "
        "is a CPU",
    )
    made_of: MadeOf = Field(MadeOf(), description="checksums of the data and of your own code")
    models_of_round: IfPresent[Count] = Field(
        None,
        description="the reported round, whose scores stand above and whose models are kept: the final one, if there "
        "was one, else `best_round`, else the last one",
    )

    @property
    def main_score(self) -> MainScore:
        """What the attributes of the accuracy hold."""
        return RMSE if self.score == RMSE.name else ACCURACY

    def client_name(self, number: int) -> str:
        """What a client is called beside its number; "" for nothing."""
        return one_line(self.client_names[number]) if number < len(self.client_names) else ""


# all that a result is made of
_NEEDED_TO_GO_ON = (
    *("seconds", "processor_seconds", "final_round", "clients", "lr", "train_loss", "refused", "evaluated"),
    *("validation", "bytes_up", "bytes_down", "bytes_up_paper", "bytes_down_paper", "bytes_by_client", "samples"),
    *("accuracy", "accuracy_per_client", "accuracy_per_architecture", "metrics", "confusion"),
)


def in_order(entries: Mapping[str, Any], kind: type[Record]) -> dict[str, Any]:
    """The entries in the order of a model's fields; what the model does not know stands behind them."""
    places = {name: place for place, name in enumerate(kind.model_fields)}
    order = {name: places.get(fields, len(places)) for name, fields in zip(entries, as_accuracy(entries), strict=True)}
    return {name: entries[name] for name in sorted(entries, key=lambda name: order[name])}


def check_complete(record: RoundRecord) -> None:
    """Whether a run can go on from a record: it is of this version, with all that a result is made of.

    Raises:
        ValueError: something is missing.
    """
    missing = [name for name in _NEEDED_TO_GO_ON if name not in record.model_fields_set]
    if missing:
        raise ValueError(f"expected the key '{missing[0]}', got none")
    for stage, summary in record.accuracy.items():
        if summary.mean is None:
            raise ValueError(f"'accuracy.{stage:.60}': expected the key 'mean', got none")
