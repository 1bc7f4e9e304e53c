"""What each client has of each row of a comparison, over seeds: its score, and the difference to Local.

The score is that of a run's own stage in its reported round, on the client's own test rows. Where the data are dealt
anew by each seed, a client's number stands for other rows each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from polyfed.escaping import client_text, csv_text
from polyfed.records.main_score import MainScore
from polyfed.report.findings import best_by_validation
from polyfed.report.frames import client_frame
from polyfed.report.grouping import Group
from polyfed.report.statistics import SEEDS, Estimate
from polyfed.report.text_tables import NOT_KNOWN, Column, format_mean_std, interval

if TYPE_CHECKING:
    import pandas as pd

ABOUT = "Accuracy in % of each client, mean over seeds, and the difference to Local with its 95 % interval"
_SENTENCES = 20  # clients, at most, that have one each
_NO_SPREAD = 1e-9  # of equal differences, up to rounding
_SCORE = ("score", "score_std", "score_margin")
_DIFFERENCE = ("difference", "difference_std", "difference_margin")


def scores_of_clients(group: Group, local: str | None) -> pd.DataFrame:
    """A line for each client and row; none where no client was scored.

    Columns: client (number), name (of the client), test_rows (fewest to most), method (the row), seeds (that have the
    client), score, difference (to Local's, paired by seed), each with ``_std`` and ``_margin``; None is "not known".

    Args:
        local: the row that others are compared with; None: there is no difference.
    """
    import pandas as pd

    clients = client_frame(group)
    by_seed = _by_seed(clients)
    lines = []
    for number, own in clients.groupby("client"):
        sizes = own["test_samples"].dropna()
        tested = " to ".join(map(str, dict.fromkeys([sizes.min(), sizes.max()]))) if len(sizes) else NOT_KNOWN
        beside = by_seed.get((number, local), {})
        for row in group.rows:
            mine = by_seed.get((number, row), {})
            line = {"client": number, "name": group.runs[0].result.client_name(number), "test_rows": tested}
            line |= {"method": row, "seeds": " ".join(map(str, mine))}
            difference = Estimate.difference(mine, {} if row == local else beside, group.resplit)
            lines.append(line | Estimate.of(mine, group.resplit).named("score") | difference.named("difference"))
    columns = ["client", "name", "test_rows", "method", "seeds", *_SCORE, *_DIFFERENCE]
    return pd.DataFrame(lines, columns=columns, dtype=object)


def _by_seed(clients: pd.DataFrame) -> dict[tuple[int, str | None], dict[int, float | None]]:
    """(client, row) -> seed -> score. clients: see `client_frame`."""
    found: dict[tuple[int, str | None], dict[int, float | None]] = {}
    for number, name, seed, score in zip(*(clients[key] for key in ("client", "name", "seed", "score")), strict=True):
        found.setdefault((number, name), {})[seed] = score
    return found


def client_columns(scores: pd.DataFrame, score: MainScore) -> list[Column]:
    """A line per client; behind each row's mean its difference to Local."""
    first = scores.drop_duplicates("client")
    names = [client_text(*one).removeprefix("client ") for one in zip(first["client"], first["name"], strict=True)]
    columns = [Column("client", names, words=True), Column("test\nrows", list(first["test_rows"]))]
    for row, own in scores.groupby("method", sort=False):
        means, differences = ([Estimate(*one) for one in own[list(key)].to_numpy()] for key in (_SCORE, _DIFFERENCE))
        columns.append(Column(row, format_mean_std(means, score=score)))
        columns.append(Column("minus\nLocal", format_mean_std(differences, "+", score)))
        columns.append(Column("interval", [interval(one, score) for one in differences]))
    return [column for column in columns if not column.is_empty]


def worth_for_clients(group: Group) -> Iterator[str]:
    """A line for each client: what the best row that needs the others is to it, beside the best that needs nobody.

    Both rows are picked by their mean validation score over all clients and seeds, never by test. Nothing without rows
    of both kinds, with too few seeds, or where a number is another client in each seed.
    """
    picked = best_by_validation(group)
    names = group.runs[0].result.client_names
    (together, some), (without, others) = picked["federated"], picked["without"]
    if not some or not others or not names or len(group.seeds) < SEEDS:
        return
    if not together or not without:
        yield "is it worth it, client by client: not said without validation rows in data.split, which pick the rows"
        return
    by_seed = _by_seed(client_frame(group))
    has_models = any(runs[0].control.startswith("own") for runs in group.rows.values())
    yield (
        f"is it worth it, client by client: {together} against {without}, by mean validation score the best of the "
        "rows that need the others, and of those that need nobody; differences on a client's own test rows, with 95 % "
        f"intervals{'' if has_models else '; --controls adds other models on own rows'}"
    )
    for number in sorted({number for number, _ in by_seed})[:_SENTENCES]:
        mine, other = (by_seed.get((number, row), {}) for row in (together, without))
        gain = Estimate.gain(mine, other, group.score, group.resplit)
        yield _sentence(client_text(number, group.runs[0].result.client_name(number)), gain, without, group.score)
    if len(names) > _SENTENCES:
        yield f"and {len(names) - _SENTENCES} clients more"


def _sentence(client: str, gain: Estimate, over: str, score: MainScore) -> str:
    """``"client 0 ('north') gains 3.10 [0.40, 5.80] points over own-boosting"``"""
    if gain.mean is None or gain.margin is None:
        return f"{client}: not known, as it is not scored with every seed"
    is_sure = bool(gain.is_distinguishable) and (gain.std or 0.0) > _NO_SPREAD
    low, high = gain.mean - gain.margin, gain.mean + gain.margin
    unit = "points" if score.is_share else f"in {score.title}"
    if is_sure and gain.mean < 0:
        return f"{client} loses {score.text(-gain.mean)} [{score.text(-high)}, {score.text(-low)}] {unit} to {over}"
    if is_sure:
        return f"{client} gains {score.text(gain.mean)} [{score.text(low)}, {score.text(high)}] {unit} over {over}"
    mean = 0.0 if abs(gain.mean) < _NO_SPREAD else gain.mean  # of -1e-17 the sign would show
    told = f"{score.text(mean, '+')} {interval(gain, score)} {unit}"
    return f"{client}: no gain that can be told from chance, {told} over {over}"


def to_csv(sections: Sequence[tuple[pd.DataFrame, MainScore]]) -> str:
    """A line per table, client and row, exact; None is empty."""
    lines = []
    for number, (scores, score) in enumerate(sections, start=1):
        named = scores.rename(columns={key: key.replace("score", score.name) for key in _SCORE})
        lines += [{"table": number} | line for line in named.to_dict("records")]
    return csv_text(list(dict.fromkeys(head for line in lines for head in line)) or ["table"], lines)
