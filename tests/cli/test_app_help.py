"""What the command line says of itself: help, examples that run, completion, lists and a method's page."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image

from polyfed.cli import app as cli
from polyfed.deploy.node_registry import EVENT_LOG, EventLog
from polyfed.deploy.protocol import ClientHello
from tests.helpers.processes import forked
from tests.helpers.quick import others_slow
from tests.project.test_method_pages import check
from tests.project.test_site import at_work

ROOT = Path(__file__).resolve().parents[2]
TOP = cli.parser()
COMMANDS = {
    **{name: command for name, command in TOP.commands.items() if not hasattr(command, "commands")},
    **{f"{group} {name}": one for group in ("audit", "deploy") for name, one in TOP.commands[group].commands.items()},
}


def said(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.status(words) == 0
    return capsys.readouterr().out


def examples(name: str) -> list[list[str]]:
    lines = [line.strip() for line in (COMMANDS[name].help or "").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("polyfed ")]


EXAMPLES = [example for name in COMMANDS for example in examples(name)]


# help ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_whole(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    out = said(*name.split(), "--help", capsys=capsys)
    assert "\\" not in out
    assert max(map(len, out.splitlines())) <= 120
    text = " ".join(out.split())
    for parameter in COMMANDS[name].params:
        told = parameter.help if parameter.param_type_name == "option" else parameter.metavar.strip("[]")
        assert " ".join(told.split()) in text


# examples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_an_example_names_recipes_that_are_there(words: list[str]) -> None:
    named = [word for word in words if word.endswith(".toml") and word != "mine.toml"]
    assert all((ROOT / word).is_file() for word in named)
    if words[1] != "deploy" and "mine.toml" not in words:
        check(words)


_LESS = ["--set", "training.rounds=1", "--set", "data.max_train_per_client=12", "--set", "data.max_test_per_client=6"]
FEWER = {
    "run": _LESS,
    "compare": [*_LESS, "--seeds", "0"],
    "sweep": _LESS,
    "plot": ["--inputs", "20", "--points", "40"],
    "audit attack": ["--steps", "2"],
    "audit leakage": ["--shadows", "4", "--clients", "1", "--rows", "4", "--images", "1", "--steps", "2"],
}
PRIVATE = [
    "--set",
    "privacy.upload_clip_norm=1.0",
    "--set",
    "privacy.upload_noise_multiplier=1.0",
    "--set",
    "method.aggregation=same-shape",
]
BENCHMARKED = ["fd", "fedgh"]
BEFORE = [  # what the examples find there, besides what those before them have made
    ["run", "recipes/quickstart.toml", "--method", "fedavg", *PRIVATE, "--out", "runs/fedin-privacy"],
    *(["run", "recipes/quickstart.toml", "--method", m, "--out", f"runs/{m}"] for m in ("fedavg", "fedgh", "fedin")),
    ["compare", "recipes/quickstart.toml", "--methods", "fedgh", "--out", "runs/leakage"],
]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on a busy machine
def test_every_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_root: Path) -> None:
    """As it stands, in the order of the commands, but for fewer rounds and rows."""
    pyarrow = pytest.importorskip("pyarrow")
    monkeypatch.setenv("POLYFED_DATA", str(data_root))
    monkeypatch.chdir(at_work(tmp_path))
    for suite in (ROOT / "suites").iterdir():
        shorten_suite(suite, tmp_path / "suites" / suite.name)
    for words in BEFORE:
        assert cli.status([*words, *FEWER[words[0]], *(["-q"] if words[0] != "check" else [])]) == 0
    (tmp_path / "photos").mkdir()
    pictures = [np.full((8, 8), 30 * k, dtype=np.uint8) for k in range(3)]
    for k, pixels in enumerate(pictures):
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{k}.png")
    rows = [{"image": {"bytes": png(pixels), "path": None}, "label": 0} for pixels in pictures]
    pyarrow.parquet = __import__("pyarrow.parquet").parquet
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "new.parquet")
    deployed(tmp_path / "runs" / "ours")
    for words in EXAMPLES:
        if words[1] == "deploy" and words[2] in ("local", "server", "node"):
            continue  # tests/deploy/test_local_cluster_on_flower.py and test_outsider.py run them
        more = FEWER.get(words[1], FEWER.get(" ".join(words[1:3]), []))
        if "training.rounds=25" in words:
            more = [word.replace("rounds=1", "rounds=2") for word in more]
        if words[1] == "sweep":
            more = [*more, "--seeds", "0"]
        assert cli.status([*words[1:], *more]) == 0, words


def shorten_suite(suite: Path, folder: Path) -> None:
    """The same suite with two methods, one seed, and fewer rounds and rows."""
    shutil.copytree(suite, folder)
    protocol = tomllib.loads((suite / "protocol.toml").read_text(encoding="utf-8"))
    protocol |= {"methods": BENCHMARKED, "seeds": [0]}
    protocol["tuning"] = {name: grid for name, grid in protocol.get("tuning", {}).items() if name in BENCHMARKED}
    for setting in protocol["settings"].values():
        setting["overrides"] = [*setting.get("overrides", []), *_LESS[1::2]]
        setting.pop("methods", None)
        setting.pop("seeds", None)
    (folder / "protocol.toml").write_text(tomli_w.dumps(protocol), encoding="utf-8")


def deployed(folder: Path) -> None:
    """What a deployment keeps of its nodes: client 2 belongs to one."""
    known = ClientHello(
        client=2,
        token="0" * 64,
        dataset="digits",
        train=8,
        validation=1,
        test=1,
        class_names=["0", "1"],
        feature_names=[],
        shape=[1, 8, 8],
        dtype="uint8",
        mean=[0.3],
        std=[0.4],
        table=False,
        words=0,
        architecture="digits-cnn1",
        feature_dim=64,
        head={"weight": [2, 64], "bias": [2]},
        linear=True,
    )
    folder.mkdir(parents=True)
    diary = EventLog(folder / EVENT_LOG, resume=False)
    diary.welcome(known, node=7)
    diary.open()


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


# lists --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", others_slow(["80", "120"], quick=["80"]))
def test_tables_of_models_and_data_sets(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = said("models", capsys=capsys)
    assert max(map(len, out.splitlines())) <= int(columns)
    for row in json.loads(said("models", "--json", capsys=capsys)):
        assert re.search(
            rf"^{re.escape(row['name'])} +{row['parameters']:,} +{row['feature_dim']:,}$", out, re.MULTILINE
        )
        assert row["paper"] in " ".join(out.split())
    assert "sizes with images of 3 x 32 x 32 and 10 classes" in " ".join(out.split())
    monkeypatch.delenv("POLYFED_DATA", raising=False)
    out = said("datasets", capsys=capsys)
    assert max(map(len, out.splitlines())) <= int(columns)
    assert re.search(r"^digits +yes +The 1797", out, re.MULTILINE)
    assert re.search(r"^cifar10 +no +CIFAR-10", out, re.MULTILINE)
    assert re.search(r"^parquet +- +Any images", out, re.MULTILINE)


def test_pages_of_models_and_data_sets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("POLYFED_DATA", str(tmp_path))
    out = " ".join(said("models", "digits-cnn1", capsys=capsys).split())
    assert "digits-cnn1: One block, FC 64." in out
    assert "17,258 (extractor 160, intermediate 16,448, head 650)" in out
    assert "images of 1 x 8 x 8 and 10 classes" in out
    rows = json.loads(said("models", "--json", capsys=capsys))
    page = json.loads(said("models", rows[0]["name"], "--json", capsys=capsys))
    assert {key: page[key] for key in rows[0]} == rows[0]
    out = said("datasets", "svhn", capsys=capsys)
    assert max(map(len, out.splitlines())) <= 80
    assert "here no The folder may be a copy of the Hub's, of which cropped_digits is read." in " ".join(out.split())
    assert "Raises" not in said("datasets", "digits", capsys=capsys)


@pytest.mark.parametrize("name", ["local", "fedgh", "fedhenn"])
def test_the_page_of_a_method_says_all_that_is_said_of_it(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    out = said("methods", name, capsys=capsys)
    assert max(map(len, out.splitlines())) <= 90
    page = json.loads(said("methods", name, "--json", capsys=capsys))
    text = " ".join(out.split())
    assert text.startswith(f"{name}: {page['summary']} paper {page['paper']} may differ {page['differs']} down ")
    for hyperparameter in page["hyperparameters"]:
        assert re.search(rf"^{re.escape(hyperparameter)} +\S", out, re.MULTILINE)
        assert page["kinds"][hyperparameter]
    numbered = re.findall(r"\((\d+)\) ", page["deviations"])
    assert len(numbered) >= (name != "local")
    for number in numbered:
        assert f"({number}) " in text


def test_a_terminal_that_knows_no_lines_gets_hyphens(tmp_path: Path) -> None:
    done = forked(["models"], tmp_path, encoding="ascii")
    assert done.status == 0, done.stderr
    assert "-----" in done.stdout
    assert "?" not in done.stdout
