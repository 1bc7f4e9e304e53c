"""What is said of recipes' keys."""

from __future__ import annotations

import re

import pytest

from polyfed.cli import app as cli
from polyfed.config.schema import SECTIONS
from polyfed.experiments import reference


def said(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.status(words) == 0
    return capsys.readouterr().out


# the keys -----------------------------------------------------------------------------------------------------------


def test_every_key_is_described() -> None:
    found = {section.name: section for section in reference.sections()}
    assert set(SECTIONS) <= set(found)
    for section in found.values():
        assert section.about
        for key in section.keys:
            assert key.type
            assert key.default
            assert len(key.meaning) > 5, f"nothing is said of {section.name}.{key.name}"
    for name, kind in SECTIONS.items():
        assert [key.name for key in found[name].keys] == list(kind.model_fields)


def test_a_section(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = said("recipe", "training", capsys=capsys)
    assert out.startswith("[training]")
    assert max(map(len, out.splitlines())) <= 100
    assert "batch_size" in out
    (key,) = [line for line in out.splitlines() if line.startswith("lr ")]
    assert re.split(" {2,}", key) == ["lr", "number >= 0", "0.01", "learning rate of local training"]
    out = said("recipe", capsys=capsys)
    assert all(f"[{section}]  " in out for section in SECTIONS)


def test_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.status(["recipe", "trainin"]) == 2
    assert capsys.readouterr().err == "polyfed: unknown section 'trainin'; did you mean 'training'?\n"
