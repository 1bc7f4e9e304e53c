"""A suite: every method tuned with as many trials, then compared over seeds, in several settings. Python's
`polyfed benchmark`.

What is done is not run again: neither what the figures have, one small JSON file per setting
(`polyfed.report.benchmark_results`), nor finished runs. Runs lie in ``<out>/tuning/SETTING/METHOD`` and
``<out>/SETTING``; a finished one has its records only, no weights, unless the suite says ``run.keep``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyfed.config.protocol import Protocol
from polyfed.engine.arguments import list_of
from polyfed.errors import ConfigError
from polyfed.experiments.benchmark_setting import BenchmarkRequest, BenchmarkSetting, Outcome
from polyfed.registry import suggest
from polyfed.report.atomic_files import make_folder
from polyfed.report.benchmark_page import Ranking, Wanted, ranking, to_text, write_page
from polyfed.report.benchmark_results import SettingResult, read_processor_time

__all__ = ["Benchmark", "benchmark"]


@dataclass(frozen=True)
class Benchmark:
    """What `benchmark` leaves behind.

    Attributes:
        folder: of its runs. table: methods ranked over settings; None where no run was finished.
        settings: the figures of each setting. files: these and the page.
        failures: ``"digits: fedgh, seed 0"`` -> why. unlearnt: likewise, the line on a run that learnt nothing.
    """

    folder: Path
    table: Ranking | None
    settings: tuple[SettingResult, ...] = ()
    files: tuple[Path, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    unlearnt: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "no run was finished" if self.table is None else to_text(self.table)


def benchmark(
    suite: str | Path,
    out: str | Path | None = None,
    *,
    settings: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    results: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
    workers: int | None = None,
    executor: str | None = None,
    device: str | None = None,
) -> Benchmark:
    """Run a suite, or go on with it: tune, compare, write each setting's figures and a page of all.

    Args:
        suite: a folder with a ``protocol.toml`` (`polyfed.config.protocol`) and recipes.
        out: the folder of its runs; default ``runs/<suite>``.
        settings: only these of the suite's; the page has all whose figures are there.
        methods: only these, and Local: one that some of the settings have in these, any other one in all of them.
        results: the folder of figures and page; default ``<out>/results``. Figures that are there are gone on from,
            wherever they were made: what they have is not run again.
        overwrite: run again also what is done, and what the figures have, of these methods in these settings.
        progress: show how it gets on, on standard error. workers, executor, device: as for `polyfed.run`.

    Raises:
        ConfigError: the request is wrong; nothing has been written.
        RunInterrupted: Ctrl-C; call it again to go on.
    """
    protocol = Protocol.load(suite)
    names = tuple(dict.fromkeys(settings or protocol.settings))
    for name in names:
        if name not in protocol.settings:
            raise ConfigError(f"expected a setting of the suite, got '{name}'{suggest(name, protocol.settings)}")
    place = Path(out if out is not None else f"runs/{Path(suite).resolve().name}")
    figures = place / "results" if results is None else Path(results)
    chosen_methods = None if methods is None else tuple(dict.fromkeys(list_of("methods", methods)))
    if chosen_methods == ():
        raise ConfigError("methods: expected at least one, got none")
    request = BenchmarkRequest(
        Path(suite), protocol, names, chosen_methods, place, figures, progress, workers, executor, device, overwrite
    )
    read_processor_time(figures)  # an error of theirs comes before the first run
    asked = [BenchmarkSetting(request, name) for name in names if request.methods_of(name)]
    wanted = _wanted(request, asked)
    make_folder(figures)
    outcome = Outcome()
    for number, setting in enumerate(asked, start=1):
        is_new = setting.run(f"{number} of {len(asked)}", outcome)
        if is_new and number < len(asked):  # the next setting may be interrupted
            write_page(figures, protocol.title, wanted)
    found, files = write_page(figures, protocol.title, wanted)
    return Benchmark(place, ranking(found) if found else None, found, files, outcome.failures, outcome.unlearnt)


def _wanted(request: BenchmarkRequest, asked: Sequence[BenchmarkSetting]) -> dict[str, Wanted]:
    """What the page expects of each setting of the suite."""
    ready = {setting.name: setting for setting in asked}
    every = [ready.get(name) or BenchmarkSetting(request, name) for name in request.protocol.settings]
    return {setting.name: setting.wanted for setting in every}
