"""What a run folder or a node calls things is shown as text: on the terminal, in spreadsheets, in Markdown."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w

import polyfed as pf
from polyfed.cli import app as cli
from polyfed.errors import ConfigError
from polyfed.escaping import csv_text, markdown_text, visible, without_passwords
from polyfed.loggers.console import Console
from polyfed.places import without_places
from polyfed.records.read import seal, unseal
from tests.helpers.small_recipe import small_recipe

ESC = "\x1b[31m\x1b]0;owned\x07"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
TAG = re.compile(r"<\s*[a-zA-Z/!]")
RECIPE = small_recipe(models={"architectures": ["digits-cnn1"]}, method={"name": "fedavg"})

PASSWORDS = (
    ("http://ana:secret@127.0.0.1:9", "http://***@127.0.0.1:9"),
    ("no answer from 'http://ana:se/cr@secret@h:9/p'", "no answer from 'http://***@h:9/p'"),
    ("postgresql+psycopg2://ana:secret@db/mlflow", "postgresql+psycopg2://***@db/mlflow"),
    ("https://secret@host", "https://***@host"),
    ("no file at https:/ana:secret@host/x.csv", "no file at https:/***@host/x.csv"),
    ("RAY_ADDRESS=ana:secret@head:6379: refused", "RAY_ADDRESS=***@head:6379: refused"),
    ("(Caused by ProxyError('x', http://a:secret@p:1))", "(Caused by ProxyError('x', http://***@p:1))"),
    ("GET /x?access_token=secret&page=2 #1", "GET /x?access_token=***&page=2 #1"),
    ("https://h/x?X-Amz-Signature=secret", "https://h/x?X-Amz-Signature=***"),
)


@pytest.mark.parametrize(("text", "shown"), PASSWORDS)
def test_no_address_shows_a_password_wherever_it_stands(text: str, shown: str) -> None:
    assert without_passwords(text) == visible(text) == str(ConfigError(text)) == shown
    assert without_passwords(shown) == shown
    assert "secret" not in without_places(text)
    assert "secret" not in markdown_text(text)


@pytest.mark.parametrize("text", ["hf://ana/x@v1", "http://host:8080/a@b", "ana@host:22", "timm:a@b", "f(a=1, key=2)"])
def test_other_addresses_stay(text: str) -> None:
    assert without_passwords(text) == text


# one text at a time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, größer ± 3 %\n\tfine", "plain text, größer ± 3 %\n\tfine"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("back\x08\x08", "back\\x08\\x08"),
        ("over\rwritten", "over\\x0dwritten"),
        ("\x9b2J", "\\x9b2J"),
        ("\x00\x7f", "\\x00\\x7f"),
        ("abc\u202edcba", "abc\\u202edcba"),
        ("mark \u061c, line \u2028", "mark \\u061c, line \\u2028"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


@pytest.mark.parametrize(
    "cell",
    [
        *("=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\n=1", "-", "=cmd|'/C calc'!A0", "-2+3"),
        *(" =1+1", "  @SUM(A1)", "\u00a0=1", "\u3000+1+1", "\ufeff=1", "\u200b-1+1", "\uff1d1+1", " \uff20SUM(A1)"),
    ],
)
def test_no_cell_is_computed(cell: str) -> None:
    ((head,), (read,)) = csv.reader(io.StringIO(csv_text([cell], [{cell: cell}])))
    assert head == read == f"'{cell}"


@pytest.mark.parametrize("number", [-1.5, 3, -2, 1e-300, "-1.5", "+3", "-0.000001", "-1e-07", ".5", "-inf", "nan"])
def test_numbers_stay_numbers(number: float | str) -> None:
    (_, (read,)) = csv.reader(io.StringIO(csv_text(["x"], [{"x": number}])))
    assert read == str(number)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("after_training: 75.12 ± 0.40, p > 3 & q", "after_training: 75.12 ± 0.40, p > 3 & q"),
        ("<script>alert(1)</script>", "&lt;script>alert(1)&lt;/script>"),
        ("&lt;b&#62;", "&amp;lt;b&amp;#62;"),
        ("a|b", "a\\|b"),
        ("[click](javascript:x)", "[click]\\(javascript:x)"),
        ("![](http://example.org/seen.png)", "![]\\(http://example.org/seen.png)"),
        ("[a][b]", "[a]\\[b]"),
        ("a\n\n# heading\r\n[b]: c", "a # heading [b]: c"),
        (f"red {ESC}", "red \\x1b[31m\\x1b]0;owned\\x07"),
    ],
)
def test_nothing_in_markdown_is_more_than_text(text: str, shown: str) -> None:
    assert markdown_text(text) == shown


def test_what_is_told_while_a_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A node's reason, a client's refusal, a method's name."""
    stream = io.StringIO()
    console = Console(stream=stream)
    console.start({"method": f"odd{ESC}", "rounds": 1, "clients": 1, "evaluation": {"stage": f"s{ESC}"}})
    console.message(f"client 3: {ESC}")
    refused = [{"client": 0, "reason": f"no\n{ESC}"}]
    console.round({"round": 1, "refused": refused, "accuracy": {}, "bytes_up": 1, "bytes_down": 1}, 0.0)
    console.end({"accuracy": 0.5, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0})
    written = stream.getvalue()
    assert "\\x1b[31m" in written
    assert "\x1b[31m" not in written
    assert "\x1b]0;" not in written
    assert "\x07" not in written


# a whole folder -----------------------------------------------------------------------------------------------------

LABEL = f"=1+1{ESC}\u202e\x9b<img src=x onerror=alert(1)>|a"
CLASS = f"@SUM(A1){ESC}\u2067<b>"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which everything that can have a name has an odd one."""
    place = tmp_path_factory.mktemp("odd")
    (place / "mine.toml").write_text(RECIPE)
    pf.run(place / "mine.toml", out=place / "run")
    run = place / "run"
    result = unseal((run / "result.json").read_bytes())
    result |= {"label": LABEL, "dataset": f"-digits{ESC}<i>", "class_names": [CLASS] * 10}
    for scored in result["metrics"].values():
        scored[f"+mine{ESC}<u>"] = scored["f1"]
    for row in result["clients_table"]:
        row["architecture"] = f"-cnn{ESC}<s>"
    (run / "result.json").write_bytes(seal(result))
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    recipe["run"] |= {"label": LABEL, "preset": "small", "preset_note": f"note{ESC}<p>", "overrides": [f"a={ESC}<q>"]}
    (run / "recipe.toml").write_text(tomli_w.dumps(recipe))
    index = json.loads((run / "models" / "index.json").read_text())
    for entry in index.values():
        entry["class_names"] = [CLASS] * 10
    data = json.dumps(index).encode()
    (run / "models" / "index.json").write_bytes(data)
    (run / "models" / "index.json.sha256").write_text(f"{hashlib.sha256(data).hexdigest()}  index.json\n")
    (run / "command.txt").write_text(f"polyfed\n\n<script>{ESC}")
    np.save(place / "new.npy", np.zeros((1, 1, 8, 8), dtype=np.uint8))
    return place


FORMS = (".md", ".html", ".svg")


def harmless_cells(text: str) -> bool:
    """Whether a spreadsheet would take every cell of a CSV file for a text or a number."""
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    suspicious = [cell for cell in cells if cell[:1] in ("=", "+", "-", "@", "\t", "\r")]
    return bool(cells) and all(re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", cell) for cell in suspicious)


@pytest.mark.parametrize(
    "words",
    [
        ["report", "run"],
        ["predict", "run", "new.npy", "--client", "0"],
        pytest.param(["audit", "leakage", "run", "--images", "0", "--overwrite"], marks=pytest.mark.slow),
        ["predict", f"no{ESC}where", "new.npy", "--client", "0"],
        ["run", f"no{ESC}where.toml"],
        [f"no{ESC}command"],
    ],
    ids=lambda words: visible(" ".join(words[:3])),
)
def test_no_command_lets_a_folder_speak_to_the_terminal(
    words: list[str], odd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(odd)
    cli.status(words)
    said = capsys.readouterr()
    assert said.out or said.err
    for text in (said.out, said.err):
        assert not CONTROLS.search(text)


def test_files_that_are_made_of_a_folder(odd: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(odd)
    assert cli.status(["report", "run", "--out", str(tmp_path)]) == 0
    assert cli.status(["predict", "run", "new.npy", "--client", "0", "--out", str(tmp_path / "new.csv")]) == 0
    made = {
        file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir() if file.suffix in (*FORMS, ".csv")
    }
    assert {Path(name).suffix for name in made} == {*FORMS, ".csv"}
    for name, text in made.items():
        assert not CONTROLS.search(text), name
        if not name.endswith(".svg"):  # which draws its letters
            assert re.search(r"\\x1b|\\u001b|textbackslash\{\}x1b", text), f"nothing odd came into {name}"
        if name.endswith(".csv"):
            assert harmless_cells(text), name
        elif name.endswith(".md"):
            assert not TAG.search(re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)), (
                name
            )  # a block of code is as it is
    assert "'=1+1" in made["comparison.csv"]
    assert "'@SUM(A1)" in made["new.csv"]
