"""A text model out of a run folder: raw texts by the run's own words, whatever the defaults are by then."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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


def test_scores_are_those_of_the_model_in_memory(done: Run, tmp_path: Path) -> None:
    pq.write_table(pa.table({"said": NEW}), tmp_path / "new.parquet")
    found = prediction.predict(folder(done), 1, tmp_path / "new.parquet")
    with torch.inference_mode():
        assert torch.equal(found.scores, done.models[1](by_hand(NEW, folder(done))))
    assert found.model.form.class_names == ("no", "yes")


def test_every_form_of_texts_is_read_by_the_runs_words(
    done: Run, model: prediction.ClientModel, tmp_path: Path
) -> None:
    ids = by_hand(NEW, folder(done))
    assert ids.tolist()[0][2:] == [1, 0, 0, 0]
    np.save(tmp_path / "ids.npy", ids.numpy())
    (tmp_path / "new.csv").write_text("\n".join(["id,said", *(f'{n},"{words}"' for n, words in enumerate(NEW))]))
    pq.write_table(pa.table({"said": NEW, "text": ["", "", ""]}), tmp_path / "new.parquet")
    (tmp_path / "many").mkdir()
    for number, words in enumerate(NEW):
        pq.write_table(pa.table({"sentence": [words]}), tmp_path / "many" / f"{number}.parquet")
    for name in ("ids.npy", "new.csv", "new.parquet", "many"):
        found = read(tmp_path / name, model.form)
        assert torch.equal(found.x, ids), name
        assert found.names == (tuple(f"{n}.parquet:0" for n in range(3)) if name == "many" else ("0", "1", "2"))
        assert found.y is None


def test_what_cannot_be_read_is_one_line(model: prediction.ClientModel, tmp_path: Path) -> None:
    cases = {
        "a.csv": ("id,words\n1,good\n", "expected one text column"),
        "b.csv": ("id,said\n1,\n", "a text in line 2 of column 'said'"),
        "e.csv": ("liked,said\nmaybe,good\n", "among the run's classes (no, yes), got 'maybe' in line 2"),
        "a.png": ("", "expected a .csv or .parquet file of texts"),
    }
    for name, (content, said) in cases.items():
        (tmp_path / name).write_text(content)
        assert said in refusal(partial(read, tmp_path / name, model.form)), name
    pq.write_table(pa.table({"said": ["good", None]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="expected a text, got none in row 1 of"):
        read(tmp_path / "a.parquet", model.form)
    with pytest.raises(ConfigError, match="which is not there"):
        read(tmp_path / "none.csv", model.form)


def test_texts_without_a_known_word_are_told(done: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = ["zebra zebra", "good", "   ...zebra", "so", "?", "zebra zebra zebra zebra zebra zebra good"]
    pq.write_table(pa.table({"said": strange}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("\n".join(["said,liked", *(f"{words},yes" for words in strange)]))
    for kind in ("parquet", "csv"):
        assert prediction.predict(folder(done), 0, tmp_path / f"a.{kind}").unknown == ("0", "4", "5"), kind
        words = ["predict", str(folder(done)), str(tmp_path / f"a.{kind}"), "--client", "0"]
        assert cli.status(words) == 0
        said = capsys.readouterr()
        assert "3 of 6 texts have no word that the run knows: rows 0, 4, 5\n" in said.err
        assert "no word" not in said.out
    pq.write_table(pa.table({"said": ["zebra"] * 12}), tmp_path / "b.parquet")
    assert cli.status(["predict", str(folder(done)), str(tmp_path / "b.parquet"), "--client", "0"]) == 0
    assert "12 of 12 texts have no word that the run knows: rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...\n" in (
        capsys.readouterr().err
    )
    assert prediction.predict(folder(done), 0, torch.ones(2, 6, dtype=torch.int64)).unknown == ()
