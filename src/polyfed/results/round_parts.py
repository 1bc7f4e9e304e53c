"""The objects in a round's record, a line of rounds.jsonl, besides its scores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from polyfed.results.fields import Count, Flag, IfPresent, Number, Record, Text, count_between, number_between, one_of

Whole = Annotated[int, count_between(0, 2**40)]
Unit = Annotated[str, one_of("client", "sample")]  # what noise hides: whether a client takes part, or one of its rows


class LateUpload(Record):
    """An upload of an earlier round."""

    client: Count = Field(description="the client that sent it")
    sent_in: Count = Field(alias="from", description="the round in which it was sent")


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


class ReleaseRecord(Record):
    """One noised release, the same for all of its `clients`."""

    what: Annotated[Literal["upload", "features", "training"], one_of("upload", "features", "training")] = Field(
        description="what the noise was added to"
    )
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
    clients: list[Whole] = Field(description="the clients that made it")
