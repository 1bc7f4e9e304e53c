"""The first table of a benchmark's page: in each setting, how many methods gain, and how many by the other clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from polyfed.report.benchmark_gains import Gain, Gains, gain_over, gain_text, gains_of
from polyfed.report.benchmark_results import SettingResult
from polyfed.report.text_tables import Column, markdown_table

__all__ = ["overview"]


def overview(found: Sequence[SettingResult], longer: Mapping[str, str]) -> Iterator[str]:
    """The section, in Markdown; nothing where no method has a gain with an interval.

    Args:
        longer: setting -> its row of a Local for longer.
    """
    gains = {one.setting: gains_of(one) for one in found}
    counted = [one for one in found if any(parts.gain.margin is not None for parts in gains[one.setting].values())]
    if not counted:
        return
    yield "## Overview"
    columns = [
        Column("setting", [one.setting for one in counted], words=True),
        Column("methods", [str(len(gains[one.setting])) for one in counted]),
        Column("above Local", [_count(_over_local(gains[one.setting]), 1) for one in counted]),
        Column("above a longer Local", [_above_longer(one, gains[one.setting], longer) for one in counted]),
        Column("gain by the others", [_count(_by_others(gains[one.setting]), 1) for one in counted]),
        Column("lose by the others", [_count(_by_others(gains[one.setting]), -1) for one in counted]),
        Column("longer Local over Local", [_over(one, longer.get(one.setting, "")) for one in counted]),
        Column("pooled over Local", [_over(one, "pooled") for one in counted]),
    ]
    yield markdown_table([column for column in columns if set(column.cells) != {"-"}])
    has_longer = any(one.row(longer.get(one.setting, "")) is not None for one in counted)
    also = ", and above a Local that trains for longer" if has_longer else ""
    yield (
        f"Of the methods that also ran with each client alone, how many can be told to lie above Local{also}, and how "
        "many to gain or lose by the other clients (together minus alone), by their 95 % intervals. If nothing made a "
        "difference, one in forty would be told on either side."
    )


def _over_local(gains: Mapping[str, Gains]) -> list[Gain]:
    return [parts.gain for parts in gains.values()]


def _by_others(gains: Mapping[str, Gains]) -> list[Gain]:
    return [parts.federated for parts in gains.values()]


def _count(gains: Sequence[Gain], sign: int) -> str:
    """How many can be told to lie above zero, or with a sign of -1 below it."""
    return str(sum(gain.leaves_out_zero and sign * (gain.mean or 0.0) > 0 for gain in gains))


def _above_longer(one: SettingResult, gains: Mapping[str, Gains], longer: Mapping[str, str]) -> str:
    below = one.row(longer.get(one.setting, ""))
    rows = [row for row in one.methods if row.name in gains]
    return "-" if below is None else _count([gain_over(below, row, one.main_score) for row in rows], 1)


def _over(one: SettingResult, name: str) -> str:
    """How far a row lies above Local."""
    local = one.row("local")
    row = one.row(name)
    return "-" if local is None or row is None else gain_text(gain_over(local, row, one.main_score), one.main_score)
