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


def test_a_section_a_method_and_a_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = said("recipe", "training", capsys=capsys)
    assert out.startswith("[training]")
    assert max(map(len, out.splitlines())) <= 100
    assert "batch_size" in out
    assert "kernel.rank" in said("recipe", "method.fedhenn", capsys=capsys)
    key = said("recipe", "training.lr", capsys=capsys).splitlines()[-1]
    assert re.split(" {2,}", key) == ["lr", "number >= 0", "0.01", "learning rate of local training"]
    assert "rank" in said("recipe", "method.fedhenn.kernel.rank", capsys=capsys)
    out = said("recipe", capsys=capsys)
    assert all(f"[{section}]  " in out for section in SECTIONS)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trainin"], "unknown section 'trainin'; did you mean 'training'?"),
        (["training.lrr"], "unknown key 'training.lrr'; did you mean 'lr'?"),
        (["method.fedhen"], "unknown method 'fedhen'; did you mean 'fedhenn'?"),
    ],
)
def test_what_is_not_there(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.status(["recipe", *words]) == 2
    assert capsys.readouterr().err.splitlines() == [f"polyfed: {line}"]
