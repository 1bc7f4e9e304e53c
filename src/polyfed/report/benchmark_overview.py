"""The first table of a benchmark's page: in each setting, how many methods gain, and how many by the other clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from polyfed.report.benchmark_gains import gain_between, gain_text
from polyfed.report.benchmark_results import SettingResult
from polyfed.report.decomposition import GainParts
from polyfed.report.statistics import Paired, is_distinguishable
from polyfed.report.text_tables import Column, markdown_table

__all__ = ["overview"]

_NOT_KNOWN = "-"


def overview(
    found: Sequence[SettingResult], gains: Mapping[str, Mapping[str, GainParts]], longer: Mapping[str, str]
) -> Iterator[str]:
    """The section, in Markdown; nothing where no method has a gain with an interval.

    Args:
        gains: setting -> method -> its gains. longer: setting -> its row of a Local for longer.
    """
    counted = [one for one in found if any(parts.gain.margin is not None for parts in gains[one.setting].values())]
    if not counted:
        return
    yield "## Overview"
    rows = [_cells(one, gains[one.setting], longer.get(one.setting, "")) for one in counted]
    columns = [Column(title, [row[title] for row in rows]) for title in rows[0]]
    known = [column for column in columns if set(column.cells) != {_NOT_KNOWN}]
    yield markdown_table([Column("setting", [one.setting for one in counted], words=True), *known])
    has_longer = any(one.row(longer.get(one.setting, "")) is not None for one in counted)
    also = ", and above a Local that trains for longer" if has_longer else ""
    yield (
        f"Of the methods that also ran with each client alone, how many can be told to lie above Local{also}, and how "
        "many to gain or lose by the other clients (together minus alone), by their 95 % intervals. If nothing made a "
        "difference, one in forty would be told on either side."
    )


def _cells(one: SettingResult, gains: Mapping[str, GainParts], longer: str) -> dict[str, str]:
    """A setting's cells by column. longer: its row of a Local for longer."""
    score = one.main_score
    above_longer = [gain_between(one, longer, name) for name in gains]
    return {
        "methods": str(len(gains)),
        "above Local": _count(parts.gain for parts in gains.values()),
        "above a longer Local": _NOT_KNOWN if one.row(longer) is None else _count(above_longer),
        "gain by the others": _count(parts.federated for parts in gains.values()),
        "lose by the others": _count((parts.federated for parts in gains.values()), sign=-1),
        "longer Local over Local": gain_text(gain_between(one, "local", longer), score),
        "pooled over Local": gain_text(gain_between(one, "local", "pooled"), score),
    }


def _count(gains: Iterable[Paired | None], sign: int = 1) -> str:
    """How many can be told to lie above zero; with sign -1, below."""
    return str(sum(bool(gain and is_distinguishable(gain) and sign * (gain.mean or 0.0) > 0) for gain in gains))
