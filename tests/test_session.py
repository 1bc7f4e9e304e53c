"""The Python way in: `pf.run` and its choices about folders."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyfed as pf
from polyfed.errors import RequestError

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
BRIEF = ("training.rounds=1", "data.clients=5")


def test_without_a_folder_nothing_is_written_and_it_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = pf.run(QUICKSTART, method="local", overrides=BRIEF)
    seen: list[object] = []
    again = pf.run(QUICKSTART, method="local", overrides=BRIEF, trackers=[seen.append])
    assert seen == again.history
    assert first.path is None
    assert not list(tmp_path.iterdir())
    assert first.result["accuracy_per_client"] == again.result["accuracy_per_client"]
    with pytest.raises(RequestError, match="expected a run folder to resume from"):
        pf.run(QUICKSTART, method="local", overrides=BRIEF, resume=True)


def test_a_folder_named_here_or_in_the_recipe_keeps_the_run(tmp_path: Path) -> None:
    here = pf.run(QUICKSTART, method="local", overrides=BRIEF, out=tmp_path / "here")
    there = pf.run(QUICKSTART, method="local", overrides=[*BRIEF, f"run.out='{tmp_path / 'there'}'"])
    assert here.path == tmp_path / "here"
    assert there.path == tmp_path / "there"
    for path in (here.path, there.path):
        assert {entry.name for entry in path.iterdir()} >= {"recipe.toml", "rounds.jsonl", "result.json", "models"}
    with pytest.raises(RequestError, match="already holds a run"):
        pf.run(QUICKSTART, method="local", overrides=BRIEF, out=tmp_path / "here")
