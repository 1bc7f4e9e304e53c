"""The one frame that tables, figures and pages are made of: a line for each figure that runs have recorded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.errors import ConfigError
from polyfed.records.fields import validated
from polyfed.records.schema import RoundRecord
from polyfed.report.run_records import frame_of, load_runs, run_in_memory

if TYPE_CHECKING:
    import pandas as pd

    from polyfed.report.grouping import Group

SPREAD = {"mean": "mean", "low": "min", "high": "max", "count": "size"}  # of a figure over seeds or clients


def results(source: str | Path | Iterable[str | Path] | Any) -> pd.DataFrame:
    """What finished runs have recorded, as one long frame: a line for each figure.

    Columns:
        run: the folder; "" for a run without one. name: as tables have it: its label or method, with the settings that
            tell it from the other runs found with it. method: its registered name. control: what the run is a control
            for; "" for a method itself. seed. main_stage: the stage that its own evaluation scores.
        round: counted from 1; NA for a figure of the whole run: a total, or a score that it reports.
        stage: of a score; "" for what has none, such as bytes. predictor: "" for the method's own, else the further
            one that a score is of. client: its number; NA for a figure over all clients. architecture: of the client,
            or of the clients of a score "by_architecture"; else "".
        metric: as columns of comparison.csv, else keys of the records, are called: "accuracy" (or "rmse"),
            "std_clients", "metric_f1", "bytes_up", "train_loss". value: scores in [0, 1], times in seconds.

    What is not known has no line.

    Args:
        source: run folders, or folders above them; or what `Federation.run` has given.

    Raises:
        ConfigError: no finished run was found, or a file is broken.
    """
    run: Any = source
    if hasattr(source, "history"):
        records = [validated(RoundRecord, record) for record in run.history]
        runs = [run_in_memory(run.path, run.result, records)]
    else:
        runs = [run for run in load_runs(source) if run.finished]
    if not runs:
        raise ConfigError(f"expected finished runs, got none in {source}")
    return frame_of(runs)


# views of the frame ---------------------------------------------------------------------------------------------------


def round_frame(group: Group, stage: str | None = None) -> pd.DataFrame:
    """A line for each round: name (the row's), seed, round; every figure without a stage; value, the main score;
    paper_up and paper_down, bytes as the method's paper counts them, as they were sent where that was not recorded.

    What a round has not recorded is NaN.

    Args:
        stage: whose main score, a mean over clients; None: each run's own.
    """
    frame = group.frame
    lines = frame[frame["round"].notna() & (frame["predictor"] == "")]
    own = (lines["metric"] == group.score.name) & (lines["stage"] == (stage or lines["name"].map(group.stages)))
    lines = lines.assign(metric=lines["metric"].mask(own, "value"))[own | (lines["stage"] == "")]
    found = lines.pivot(index=["name", "seed", "round"], columns="metric", values="value").reset_index()
    found = found.reindex(columns=list(dict.fromkeys([*found, *_NEEDED])))
    for way in ("up", "down"):
        found[f"paper_{way}"] = found[f"bytes_{way}_paper"].fillna(found[f"bytes_{way}"])
    return found.sort_values("name", key=lambda names: names.map(list(group.rows).index), kind="stable")


_NEEDED = ("value", "final_round", "clients", "seconds", "simulated_seconds", "bytes_up", "bytes_down",
           "bytes_up_paper", "bytes_down_paper")  # fmt: skip


def curve_frame(group: Group) -> pd.DataFrame:
    """A line for each point of each row's curve: a round that every seed of the row evaluated.

    Columns: name, round; bytes (both ways) and simulated, which are cumulative and means over seeds; mean, low and high
    of the main score over seeds, and their count. Where seeds stopped early after different rounds, their final rounds
    are no such point.
    """
    rounds = round_frame(group)
    spent = {
        "bytes": rounds["bytes_up"].fillna(0) + rounds["bytes_down"].fillna(0),
        "simulated": rounds["simulated_seconds"],
    }
    for axis, costs in spent.items():
        rounds[axis] = costs.groupby([rounds["name"], rounds["seed"]]).cumsum(skipna=False)
    found = rounds.dropna(subset="value").groupby(["name", "round", "final_round"], sort=False)
    points = found[list(spent)].agg("mean").join(found["value"].agg(**SPREAD)).reset_index()
    seeds = points["name"].map({name: len(runs) for name, runs in group.rows.items()})
    return points[points["count"] == seeds].sort_values("round", kind="stable")


def client_frame(group: Group) -> pd.DataFrame:
    """A line for each scored client of each run: name (the row's), method, seed, client, architecture ("": not
    recorded), samples and test_samples (None: not recorded), score.
    """
    frame = group.frame
    lines = frame[frame["round"].isna() & frame["client"].notna()]
    index = ["name", "method", "seed", "client", "architecture"]
    found = lines.pivot(index=index, columns="metric", values="value").reset_index()
    found = found.rename(columns={group.score.name: "score"})
    found = found.reindex(columns=[*index, "samples", "test_samples", "score"]).dropna(subset="score")
    for key in ("samples", "test_samples"):
        found[key] = found[key].astype("Int64").astype(object).where(found[key].notna(), None)
    return found.sort_values("name", key=lambda names: names.map(list(group.rows).index), kind="stable")


def ranked(clients: pd.DataFrame) -> pd.DataFrame:
    """Of `client_frame` each row's clients from the lowest to the highest score: name, rank, mean, low, high, count.

    Rank k over seeds is the mean of the k-th lowest clients, whichever they are; where seeds scored different numbers
    of clients, as many ranks as all have.
    """
    ranks = clients.groupby(["name", "seed"])["score"].rank(method="first").astype(int)
    found = clients.assign(rank=ranks).groupby(["name", "rank"], sort=False)["score"].agg(**SPREAD).reset_index()
    seeds = found["name"].map(clients.groupby("name")["seed"].nunique())
    return found[found["count"] == seeds].sort_values("rank", kind="stable")
