"""A text model out of a run folder: raw texts by the run's own words, whatever the defaults are by then."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.cli import app as cli
from polyfed.data import text
from polyfed.data.inference_inputs import read
from polyfed.engine.federation import Run
from polyfed.errors import ConfigError
from polyfed.experiments import prediction
from tests.helpers.refusals import refusal

GOOD, BAD = ("so good a day", "what a good film", "good, good!"), ("a bad day", "so bad", "what a bad film ...")
NEW = ["a good zebra", "bad, bad zebra!", "so"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run on 24 texts of a CSV file; tests must not write into its folder."""
    place = tmp_path_factory.mktemp("texts")
    rows = [f'"{words}",{name}' for _ in range(4) for name, side in (("yes", GOOD), ("no", BAD)) for words in side]
    (place / "films.csv").write_text("\n".join(["said,liked", *rows]) + "\n")
    recipe = {
        "data": {"dataset": "csv:films.csv", "root": str(place), "text_column": "said", "label_column": "liked"}
        | {"num_clients": 2, "max_length": 6},
        "models": {"architectures": ["fedhenn-lstm1", "fedhenn-lstm2"]},
        "method": {"name": "fedproto"},
        "training": {"rounds": 1, "batch_size": 4, "lr": 0.1},
    }
    return pf.run(pf.Recipe.from_dict(recipe), out=place / "run")


@pytest.fixture(scope="module")
def model(done: Run) -> prediction.ClientModel:
    """The second client's, out of the folder."""
    return prediction.load(folder(done), 1)


def folder(done: Run) -> Path:
    assert done.path is not None
    return done.path


def index(run: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads((run / "models" / "index.json").read_text()))


def by_hand(texts: list[str], run: Path) -> torch.Tensor:
    """Ids by the file of words."""
    words = (run / "models" / "words.txt").read_text().splitlines()
    rows = [[words.index(w) + 2 if w in words else 1 for w in text.tokenize(said)[:6]] for said in texts]
    return torch.tensor([row + [0] * (6 - len(row)) for row in rows])


def csv_of(said: list[str], place: Path, label: str = "") -> Path:
    """A file of texts, all of which have the label."""
    lines = [f'"{words}"{label and f",{label}"}' for words in said]
    (place / "new.csv").write_text("\n".join([f"said{label and ',liked'}", *lines]))
    return place / "new.csv"


def test_scores_are_those_of_the_model_in_memory(done: Run, tmp_path: Path) -> None:
    found = prediction.predict(folder(done), 1, csv_of(NEW, tmp_path))
    with torch.inference_mode():
        assert torch.equal(found.scores, done.models[1](by_hand(NEW, folder(done))))
    assert found.model.form.class_names == ("no", "yes")


def test_every_form_of_texts_is_read_by_the_runs_words(
    done: Run, model: prediction.ClientModel, tmp_path: Path
) -> None:
    ids = by_hand(NEW, folder(done))
    assert ids.tolist()[0][2:] == [1, 0, 0, 0]
    np.save(tmp_path / "ids.npy", ids.numpy())
    for file in (tmp_path / "ids.npy", csv_of(NEW, tmp_path)):
        found = read(file, model.form)
        assert torch.equal(found.x, ids), file
        assert found.names == ("0", "1", "2")
        assert found.y is None


def test_what_cannot_be_read_is_one_line(model: prediction.ClientModel, tmp_path: Path) -> None:
    cases = {
        "a.csv": ("id,words\n1,good\n", "expected one text column"),
        "b.csv": ("id,said\n1,\n", "a text in line 2 of column 'said'"),
        "e.csv": ("liked,said\nmaybe,good\n", "one of the run's classes (no, yes) in line 2 of column 'liked'"),
        "a.png": ("", "expected a .csv file of texts"),
    }
    for name, (content, said) in cases.items():
        (tmp_path / name).write_text(content)
        assert said in refusal(partial(read, tmp_path / name, model.form)), name
    with pytest.raises(ConfigError, match="which is not there"):
        read(tmp_path / "none.csv", model.form)


def test_texts_without_a_known_word_are_told(done: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = ["zebra zebra", "good", "   ...zebra", "so", "?", "zebra zebra zebra zebra zebra zebra good"]
    file = csv_of(strange, tmp_path, label="yes")
    found = prediction.predict(folder(done), 0, file)
    assert found.unknown == ("0", "4", "5")
    assert cli.status(["predict", str(folder(done)), str(file), "--client", "0"]) == 0
    said = capsys.readouterr()
    assert "3 of 6 texts have no word that the run knows: rows 0, 4, 5\n" in said.err
    accuracy = float((found.scores.argmax(dim=1) == 1).double().mean())
    assert f"accuracy {100 * accuracy:.2f} % of 6 inputs with labels" in said.err
    assert "no word" not in said.out
    file = csv_of(["zebra"] * 12, tmp_path)
    assert cli.status(["predict", str(folder(done)), str(file), "--client", "0"]) == 0
    assert "12 of 12 texts have no word that the run knows: rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...\n" in (
        capsys.readouterr().err
    )
    assert prediction.predict(folder(done), 0, torch.ones(2, 6, dtype=torch.int64)).unknown == ()
