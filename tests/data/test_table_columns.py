"""Categories and missing numbers of tables: how they are stored, and whose rows say what stands for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import polyfed as pf
from polyfed.data.dataset import with_declared
from polyfed.data.datasets import load_dataset
from polyfed.data.samples import LabeledSamples
from polyfed.data.table_columns import TableColumns, fill_missing, own_means
from polyfed.errors import ConfigError
from polyfed.experiments import prediction

PEOPLE = """age,color,weight,clinic,label
30,red,70,a,no
40,blue,,a,yes
50,red,60,a,no
36,,80,a,yes
20,green,NA,b,no
40,blue,?,b,yes
60,blue,nan,b,yes
"""
OPTIONS = {"category_columns": ("color",), "may_be_missing": True, "columns": ("clinic",)}


def dealt(place: Path, text: str = PEOPLE, declared: dict[str, list[float]] | None = None) -> list[Tensor]:
    """Each clinic's rows, all of its sides: (N, 5)."""
    place.write_text(text)
    source = with_declared(load_dataset(f"csv:{place}", **OPTIONS), None, *(declared or {}).values())  # type: ignore[arg-type]
    data = pf.federate(source, None, "by_group", group_by="clinic", split="1:0:1")
    return [torch.cat([client.train.x, client.test.x]) for client in data.clients]


def test_how_they_are_stored(tmp_path: Path) -> None:
    """Age, weight, color, and two columns that say what is missing; 0 is no color."""
    (tmp_path / "a.csv").write_text(PEOPLE)
    source = load_dataset(f"csv:{tmp_path / 'a.csv'}", **OPTIONS)  # type: ignore[arg-type]
    assert source.feature_names == ("age", "weight", "color", "age is missing", "weight is missing")
    assert source.train.x[:, 2].tolist() == [3, 1, 3, 0, 2, 1, 1]
    assert source.train.x[:, 4].tolist() == [0, 1, 0, 0, 1, 1, 1]
    assert source.columns == TableColumns(((), (), ("blue", "green", "red"), (), ()), ((0, 3), (1, 4)))
    assert source.columns.counts == (0, 0, 4, 0, 0)
    known = torch.tensor([70.0, 60, 80], dtype=torch.float64)
    assert source.mean == pytest.approx((276 / 7, 70, 0, 0, 0))
    assert source.std[1] == pytest.approx(float(known.std(correction=0)))
    assert source.std[2:] == (1, 1, 1)


def test_a_client_fills_with_the_mean_of_its_own_training_rows() -> None:
    """By hand; a feature without any value gets the center of all, which a network reads as 0."""
    columns = TableColumns((), ((0, 2), (1, 3)))
    train = torch.tensor([[1.0, 9, 0, 1], [3, 9, 0, 1], [9, 9, 1, 1]])
    values = own_means(train, columns, (50.0, 70.0, 0.0, 0.0))
    assert values == [2, 70]
    test = LabeledSamples(torch.tensor([[5.0, 6, 1, 0], [7, 8, 0, 1]]), torch.tensor([0, 1]))
    assert fill_missing(test, columns, values).x.tolist() == [[2, 6, 1, 0], [7, 70, 0, 1]]
    assert test.x[0, 0] == 5


def test_no_other_clients_row_has_a_say(tmp_path: Path) -> None:
    """Clinic a's inputs stay as they are, bit for bit, whatever clinic b's rows are; its own training rows count."""
    other = PEOPLE.replace("20,green,NA,b", "99,green,5,b").replace("40,blue,?,b", "1,blue,1000,b")
    declared = {"mean": [40.0, 70, 0, 0, 0], "std": [10.0, 10, 1, 1, 1]}
    settings: dict[str, list[float]]
    for settings in ({}, declared):
        assert torch.equal(
            dealt(tmp_path / "a.csv", declared=settings)[0], dealt(tmp_path / "b.csv", other, settings)[0]
        )
    own = PEOPLE.replace("30,red,70,a", "30,red,10,a").replace("50,red,60,a", "50,red,20,a")
    assert not torch.equal(dealt(tmp_path / "a.csv")[0][:, 1], dealt(tmp_path / "b.csv", own)[0][:, 1])
    weightless = dealt(tmp_path / "a.csv", declared=declared)[1]
    assert weightless[:, 1].tolist() == [70, 70, 70]


def test_test_rows_have_no_say(tmp_path: Path) -> None:
    """What stands for missing values is the mean over training rows alone."""
    place = tmp_path / "a.csv"
    place.write_text(PEOPLE.replace("36,,80,a", "36,,81,a").replace("50,red,60,a", "50,red,45,a"))
    source = load_dataset(f"csv:{place}", **OPTIONS)  # type: ignore[arg-type]
    client = pf.federate(source, None, "by_group", group_by="clinic", split="1:0:1").clients[0]
    known = client.train.x[client.train.x[:, 4] == 0, 1]
    filled = torch.cat([part.x[part.x[:, 4] == 1, 1] for part in (client.train, client.test)])
    everywhere = torch.cat([part.x[part.x[:, 4] == 0, 1] for part in (client.train, client.test)])
    assert filled.tolist() == [pytest.approx(float(known.mean()))]
    assert float(known.mean()) != pytest.approx(float(everywhere.mean()))


def test_missing_values_are_errors_unless_asked_for(tmp_path: Path) -> None:
    """With a hint."""
    (tmp_path / "a.csv").write_text(PEOPLE)
    with pytest.raises(ConfigError, match=r"line 3 of column 'weight' .* set missing_values"):
        load_dataset(f"csv:{tmp_path / 'a.csv'}", columns=("clinic",))
    (tmp_path / "a.csv").write_text(PEOPLE.replace("70,a", "inf,a"))
    with pytest.raises(ConfigError, match="expected a finite number in line 2 of column 'weight'"):
        load_dataset(f"csv:{tmp_path / 'a.csv'}", **OPTIONS)  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", [{"category_columns": ["color"]}, {"missing_values": "client_mean"}])
def test_they_are_settings_of_tables(setting: dict[str, object]) -> None:
    """Elsewhere they would do nothing."""
    with pytest.raises(ConfigError, match="expects a dataset 'csv:PATH'"):
        pf.Recipe.from_dict(
            {
                "data": {"dataset": "digits", **setting},
                "models": {"architectures": ["digits-cnn1"]},
                "method": {"name": "local"},
            }
        )


def test_folders_of_clients_share_their_categories(tmp_path: Path) -> None:
    """A color that one clinic alone has, has one number at both."""
    for clinic, rows in (("a", "red,1,no\nblue,2,yes\n"), ("b", "blue,3,no\ngreen,,yes\n")):
        (tmp_path / clinic).mkdir()
        (tmp_path / clinic / "train.csv").write_text("color,size,label\n" + rows)
    source = load_dataset(f"clients:{tmp_path}", category_columns=("color",), may_be_missing=True)
    assert source.train.x[:, 1].tolist() == [3, 1, 1, 2]
    assert source.columns.counts == (0, 4, 0)


def test_a_run_and_what_its_models_say_of_new_rows(tmp_path: Path) -> None:
    """A stored model reads categories and missing values as its client did."""
    place = tmp_path / "a.csv"
    place.write_text(PEOPLE)
    recipe = pf.Recipe.from_dict(
        {
            "data": {
                "dataset": f"csv:{place}",
                "partition": "by_group",
                "group_by": "clinic",
                "category_columns": ["color"],
                "missing_values": "client_mean",
                "split": "1:0:1",
            },
            "models": {"architectures": ["mlp-16-32", "mlp-64-32"]},
            "method": {"name": "local"},
            "training": {"rounds": 1, "lr": 0.1},
        }
    )
    pf.run(recipe, out=tmp_path / "run")
    data = pf.federate(load_dataset(f"csv:{place}", **OPTIONS), None, "by_group", group_by="clinic", split="1:0:1")  # type: ignore[arg-type]
    for client in (0, 1):
        model = prediction.load_model(tmp_path / "run", client)
        scores = prediction.predict(tmp_path / "run", client, place).scores
        own = data.clients[client]
        rows = torch.cat([own.train.x, own.test.x])
        expected = model.network(model.prepare(rows)).detach()
        of_client = scores[:4] if client == 0 else scores[4:]
        ages = torch.tensor(
            [30.0, 40, 50, 36] if client == 0 else [20.0, 40, 60]
        )  # which tell the rows of a clinic apart
        assert torch.allclose(expected[rows[:, 0].argsort()], of_client[ages.argsort()], atol=1e-6)
