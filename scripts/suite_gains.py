"""Write the section "Gains in the suites" of the method pages: over Local, and the part that needs the other clients.

    python scripts/suite_gains.py            # after docs/results/benchmark-small or benchmark-longer has changed

The figures are those of ``docs/results/benchmark-small`` and ``benchmark-longer``, one file per setting of
``suites/small`` and ``suites/longer``. A method that no setting has gets no section.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from polyfed.config.protocol import Protocol
from polyfed.registry import METHODS
from polyfed.report.benchmark_page import gain_text, gains_of
from polyfed.report.benchmark_results import SettingResult, read_results
from polyfed.report.text_tables import Column, markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "methods"
SUITES = {"small": "", "longer": ", five epochs a round"}  # and what its settings are called
TITLE = "## Gains in the suites"
BEFORE = "## Published results"
NAMES = {
    "digits": "digits",
    "fashion": "Fashion-MNIST",
    "cifar10-two-classes": "CIFAR-10, two classes per client",
    "cifar10-few": "CIFAR-10, 100 images per client",
    "heart": "hospitals",
    "watch": "watch",
    "tweets": "tweets",
}


def settings() -> dict[str, SettingResult]:
    """The settings that were run, in the suites' order, by what they are called."""
    found = {}
    for suite, how in SUITES.items():
        names = list(Protocol.load(ROOT / "suites" / suite).settings)
        for one in read_results(ROOT / "docs" / "results" / f"benchmark-{suite}", names):
            found[NAMES[one.setting] + how] = one
    return found


def section(method: str, found: Mapping[str, SettingResult]) -> str:
    """A method's section, "" where no setting has the method."""
    measured = [(name, one, gains) for name, one in found.items() if (gains := gains_of(one).get(method)) is not None]
    if not measured:
        return ""
    tuned = any(method in one.tuning for _, one, _ in measured)
    how = "tuned by validation with three trials" if tuned else "nothing to tune"
    about = textwrap.fill(
        f"Points of accuracy above Local with the same epochs a round, {how}, and what of them needs the other "
        "clients, with 95 % intervals ([one epoch a round](../results/benchmark-small/benchmark.md), "
        "[five](../results/benchmark-longer/benchmark.md), [controls](../federation-worth.md#controls)):",
        120,
        break_on_hyphens=False,
    )
    table = markdown_table(
        [
            Column("setting", [name for name, _, _ in measured], words=True),
            Column("seeds", [str(_seeds(one, method)) for _, one, _ in measured]),
            Column("over Local", [gain_text(gains.gain, one.main_score) for _, one, gains in measured]),
            Column("of which the others'", [gain_text(gains.federated, one.main_score) for _, one, gains in measured]),
        ]
    )
    return f"{TITLE}\n\n{about}\n\n{table}\n\n"


def _seeds(setting: SettingResult, method: str) -> int:
    row = setting.row(method)
    assert row is not None, "a gain is that of a row"
    return len(row.by_seed)


def with_section(text: str, method: str, found: Mapping[str, SettingResult]) -> str:
    """A page's text with its section as it should be, before "Published results"."""
    rest = re.sub(rf"^{TITLE}\n.*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)
    before, heading, after = rest.partition(BEFORE)
    if not heading:
        raise SystemExit(f"expected a section '{BEFORE}' on the page of {method}")
    return f"{before}{section(method, found)}{heading}{after}"


if __name__ == "__main__":
    measured = settings()
    for name in METHODS:
        page = PAGES / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        if (new := with_section(text, name, measured)) != text:
            page.write_text(new, encoding="utf-8")
