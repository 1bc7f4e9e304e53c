"""What runs have recorded, as long frames of pandas: a line for each round of each run, or for each client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyfed.report.grouping import Group
from polyfed.report.statistics import finite

if TYPE_CHECKING:
    import pandas as pd

SPREAD = {"mean": "mean", "low": "min", "high": "max", "count": "size"}  # of a figure over seeds or clients


def round_frame(group: Group, stage: str | None = None) -> pd.DataFrame:
    """A line for each round in which the main score is known.

    Columns: name (the row's), seed, round, final_round, value; bytes (both ways), seconds and simulated, which are
    cumulative; simulated is NaN from a round without simulated time on.

    Args:
        stage: whose main score, a mean over clients; by default each run's own.
    """
    import pandas as pd

    columns = ["name", "seed", "round", "final_round", "bytes", "seconds", "simulated", "value"]
    lines: list[tuple[Any, ...]] = []
    for name, of_stage in group.stages(stage).items():
        for run in group.rows[name]:
            sent = seconds = simulated = 0.0
            for record in run.rounds:
                sent += (record.bytes_up or 0) + (record.bytes_down or 0)
                seconds += record.seconds or 0.0
                simulated += float("nan") if record.simulated_seconds is None else record.simulated_seconds
                value = finite(record.mean(of_stage))
                if value is not None:
                    spent = (sent, seconds, simulated)
                    lines.append((name, run.seed, record.round, record.final_round, *spent, value))
    return pd.DataFrame(lines, columns=columns)


def curve_frame(group: Group, stage: str | None = None) -> pd.DataFrame:
    """A line for each point of each row's curve: a round that every seed of the row evaluated.

    Columns: name, round, bytes, seconds, simulated; mean, low and high over seeds, and their count. Where seeds
    stopped early after different rounds, their final rounds are no such point. Arguments as for `round_frame`.
    """
    found = round_frame(group, stage).groupby(["name", "round", "final_round"], sort=False)
    axes = found[["bytes", "seconds", "simulated"]].agg("mean")
    points = axes.join(found["value"].agg(**SPREAD)).reset_index()
    seeds = points["name"].map({name: len(runs) for name, runs in group.rows.items()})
    return points[points["count"] == seeds].sort_values("round", kind="stable")


def client_frame(group: Group) -> pd.DataFrame:
    """A line for each scored client of each run: name (the row's), method, seed, client, architecture, samples and
    test_samples (None: not recorded), accuracy.
    """
    import pandas as pd

    columns = ["name", "method", "seed", "client", "architecture", "samples", "test_samples", "accuracy"]
    lines: list[tuple[Any, ...]] = []
    for name, runs in group.rows.items():
        for run in runs:
            table = run.result.clients_table
            found: list[tuple[Any, ...]] = [
                (row.id, row.architecture, row.samples, row.test_samples, row.accuracy) for row in table or ()
            ]
            if table is None:  # only the accuracies were recorded
                found = [(at, None, None, None, value) for at, value in enumerate(run.result.accuracy_per_client)]
            lines += [(name, run.method, run.seed, *one) for one in found if finite(one[-1]) is not None]
    frame = pd.DataFrame(lines, columns=columns, dtype=object)
    return frame.assign(accuracy=frame["accuracy"].astype(float))


def ranked(clients: pd.DataFrame) -> pd.DataFrame:
    """Of `client_frame` each row's clients from the lowest to the highest score: name, rank, mean, low, high, count.

    Rank k over seeds is the mean of the k-th lowest clients, whichever they are; where seeds scored different numbers
    of clients, as many ranks as all have.
    """
    ranks = clients.groupby(["name", "seed"])["accuracy"].rank(method="first").astype(int)
    found = clients.assign(rank=ranks).groupby(["name", "rank"], sort=False)["accuracy"].agg(**SPREAD).reset_index()
    seeds = found["name"].map(clients.groupby("name")["seed"].nunique())
    return found[found["count"] == seeds].sort_values("rank", kind="stable")


def by_architecture(clients: pd.DataFrame) -> pd.DataFrame:
    """Of `client_frame` every row and architecture: name, architecture, mean, low, high, count."""
    return clients.groupby(["name", "architecture"], sort=False)["accuracy"].agg(**SPREAD).reset_index()
