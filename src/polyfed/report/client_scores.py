"""What each client has of each row of a comparison, over seeds: its score, and the difference to Local.

The score is that of a run's own stage after its last evaluation, on the client's own test rows. Where the data are
dealt anew by each seed, a client's number stands for other rows each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from polyfed.escaping import client_text, csv_text
from polyfed.report.grouping import Group
from polyfed.report.statistics import Estimate, finite
from polyfed.report.text_tables import Column, format_mean_std, interval
from polyfed.results.main_score import MainScore

ABOUT = "Accuracy in % of each client, mean over seeds, and the difference to Local with its 95 % interval"


_NO_SPREAD = 1e-9  # of equal differences, up to rounding


@dataclass(frozen=True)
class ClientScores:
    """A client's score in each row, and its difference to Local's, paired by seed; over the seeds that have it.

    Attributes:
        number, name: of the client. test_rows: how many it had, fewest and most.
        scores, differences: by row; Local has no difference, and neither has any row where there is no Local.
    """

    number: int
    name: str
    test_rows: tuple[int, ...]
    scores: Mapping[str, Estimate]
    differences: Mapping[str, Estimate]

    @property
    def tested(self) -> str:
        """``"20"``, or ``"18 to 20"`` where it differs between seeds."""
        return " to ".join(map(str, self.test_rows)) or "-"


def scores_of_clients(group: Group, local: str | None) -> tuple[ClientScores, ...]:
    """Every client; none where none was scored. local: the row that others are compared with."""
    by_row = {
        name: {run.seed: list(map(finite, run.result.accuracy_per_client)) for run in runs}
        for name, runs in group.rows.items()
    }
    first = group.runs[0].result
    tested: dict[int, set[int]] = {}
    for run in group.runs:
        for row in run.result.clients_table or ():
            if row.test_samples is not None:
                tested.setdefault(row.id, set()).add(row.test_samples)
    found = []
    for number in range(max((len(one) for seeds in by_row.values() for one in seeds.values()), default=0)):
        known = {name: _of_client(seeds, number) for name, seeds in by_row.items()}
        own = {} if local is None else known[local]
        sizes = sorted(tested.get(number, ()))
        found.append(
            ClientScores(
                number,
                first.client_name(number),
                tuple(dict.fromkeys([*sizes[:1], *sizes[-1:]])),
                {name: Estimate.of(values) for name, values in known.items()},
                {name: Estimate.difference(values, own) for name, values in known.items() if own and name != local},
            )
        )
    return tuple(found)


def _of_client(seeds: Mapping[int, Sequence[float | None]], number: int) -> dict[int, float]:
    """A client's score with each seed that has one."""
    found = {seed: values[number] for seed, values in seeds.items() if number < len(values)}
    return {seed: value for seed, value in found.items() if value is not None}


def client_columns(clients: Sequence[ClientScores], score: MainScore) -> list[Column]:
    """A line per client; behind each row's mean its difference to Local."""
    names = [client_text(one.number, one.name).removeprefix("client ") for one in clients]
    columns = [Column("client", names, words=True), Column("test\nrows", [one.tested for one in clients])]
    for row in clients[0].scores:
        columns.append(Column(row, format_mean_std([one.scores[row] for one in clients], score=score)))
        differences = [one.differences.get(row, Estimate()) for one in clients]
        columns.append(Column("minus\nLocal", format_mean_std(differences, "+", score)))
        columns.append(Column("interval", [interval(one, score) for one in differences]))
    return [column for column in columns if not column.is_empty]


def verdicts(clients: Sequence[ClientScores], score: MainScore, named: bool) -> Iterator[str]:
    """For how many clients a row is better than Local, beyond chance.

    Where all seeds give the same difference, say of a single test row, its spread is not known well enough to tell.

    Args:
        named: whether a client is the same one with every seed.
    """
    lines = []
    for row in dict.fromkeys(name for one in clients for name in one.differences):
        known = [one.differences[row] for one in clients if row in one.differences]
        known = [one for one in known if one.is_distinguishable is not None]
        sure = [one for one in known if one.is_distinguishable and (one.std or 0.0) > _NO_SPREAD]
        better = sum(((one.mean or 0.0) < 0) == score.lower_is_better for one in sure)
        if known:
            undecided = len(known) - len(sure)
            lines.append(f"{row} better for {better}, worse for {len(sure) - better}, undecided for {undecided}")
    if lines:
        which = "" if named else "; each seed deals rows anew, so that a number is another client in each"
        yield f"client by client, by 95 % intervals over seeds of the difference to Local: {'; '.join(lines)}{which}"


def to_csv(sections: Sequence[tuple[Sequence[ClientScores], MainScore]]) -> str:
    """A line per table, client and row, exact; None is empty."""
    lines = [
        {
            "table": number,
            "client": one.number,
            "name": one.name,
            "test_rows": one.tested,
            "method": row,
            "seeds": " ".join(map(str, mean.seeds)),
            score.name: mean.mean,
            f"{score.name}_std": mean.std,
            f"{score.name}_margin": mean.margin,
            "difference": difference.mean,
            "difference_std": difference.std,
            "difference_margin": difference.margin,
        }
        for number, (clients, score) in enumerate(sections, start=1)
        for one in clients
        for row, mean in one.scores.items()
        for difference in [one.differences.get(row, Estimate())]
    ]
    return csv_text(list(dict.fromkeys(head for line in lines for head in line)) or ["table"], lines)
