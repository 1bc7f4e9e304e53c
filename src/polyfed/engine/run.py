"""A finished run, as Python has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from polyfed.engine.history import History
from polyfed.engine.notebook import of_run
from polyfed.results.main_score import main_score_of
from polyfed.units import human_count


@dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        result: that of `result.json`. history: the records of `rounds.jsonl`; `history.to_frame()` is a table of them.
        models: one per client, by number. path: the run folder, if there is one.
    """

    result: Mapping[str, Any]
    history: History
    models: Mapping[int, nn.Module]
    path: Path | None

    def __repr__(self) -> str:
        told = self.result
        score = main_score_of(told)
        value = told[score.name]
        scored = "not scored" if value is None else f"{score.title} {value:.4f} ({told['evaluation']['stage']})"
        if told.get("nothing_learnt"):
            scored = f"nothing was learnt, {scored}"
        sent = f"{told['bytes_up']:,} bytes up, {told['bytes_down']:,} down"
        where = "" if self.path is None else f", in {self.path}"
        return f"Run({told['method']}, {human_count(len(self.history), 'round')}: {scored}, {sent}{where})"

    def _repr_html_(self) -> str:
        return of_run(self.result, self.history, self.path)


class PersonalModels(Mapping[int, nn.Module]):
    """Personal models by client number, made when asked for."""

    def __init__(self, export: Callable[[int], nn.Module], present: Sequence[int]) -> None:
        self._export, self._present = export, present

    def __getitem__(self, client_id: int) -> nn.Module:
        if client_id not in self._present:
            raise KeyError(client_id)
        return self._export(client_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self._present)

    def __len__(self) -> int:
        return len(self._present)
