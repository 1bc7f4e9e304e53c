"""docs/own-model.md, as a stranger would follow it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polyfed.cli import app as cli

PAGE = (Path(__file__).parents[2] / "docs" / "own-model.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's network and recipe, as working folder."""
    (tmp_path / "mynets.py").write_text(blocks("python")[0], encoding="utf-8")
    (tmp_path / "mine.toml").write_text(blocks("toml")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mynets", raising=False)
    return tmp_path


def test_the_path_through_a_recipe(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [shlex.split(line) for line in blocks("bash")[0].splitlines()]
    for program, *words in commands:
        assert program == "polyfed"
        with pytest.raises(SystemExit) as end:
            cli.main(words)
        assert end.value.code == 0, capsys.readouterr().err
    names: dict[str, Any] = {}
    exec(next(block for block in blocks("python") if "pf.load(" in block), names)
    assert set(names["trained"].network.export()) == set(load_file("runs/mine/models/personal-000.safetensors"))
    (exports,) = (block.splitlines() for block in blocks("bash") if "polyfed export" in block)
    for _, *words in map(shlex.split, exports):
        if words[2].endswith(".onnx"):
            pytest.importorskip("onnxscript", reason="the extra 'onnx' is not installed")
        assert cli.status(words) == 0
        assert (place / words[2]).is_file()


def test_the_path_through_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the block that reads the run of a recipe; at its end there is a program of a client's network."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "own_model"}
    for block in blocks("python")[1:]:
        if "pf.load(" not in block:
            exec(compile(block, "own-model.md", "exec"), names)
    monkeypatch.setitem(sys.modules, "polyfed", None)
    program = torch.export.load("client-0.pt2").module()
    assert torch.equal(program(names["x"][:7]), names["network"](names["x"][:7]))
