"""Tables from CSV files and frames: columns, labels, categories, missing numbers, whole runs, and every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import polyfed as pf
from polyfed.cli import app as cli
from polyfed.data import inference_inputs
from polyfed.data.dataset import DatasetSource, with_declared
from polyfed.data.datasets import load_dataset
from polyfed.data.samples import LabeledSamples, TableColumns, fill_missing, own_means
from polyfed.errors import ConfigError, ConfigErrors
from polyfed.experiments import prediction
from tests.helpers import regression
from tests.helpers.small_data import put, reading

PEOPLE = """height,name,weight,label,town
1.5,Ann,-3,yes,2
2.5,Bob,5,no,1
2.0,Cem,1,yes,2
"""


read, _refusal = reading("csv")


def table(place: Path, text: str = PEOPLE) -> Path:
    return put(place, text)


def refusal(place: Path, text: str | None = None, **options: object) -> str:
    if text is not None:
        put(place, text)
    return _refusal(place, **options)


def test_all_columns_of_numbers_are_features(tmp_path: Path) -> None:
    source = read(table(tmp_path / "a.csv"))
    assert source.feature_names == ("height", "weight", "town")
    assert source.train.x.tolist() == [[1.5, -3, 2], [2.5, 5, 1], [2, 1, 2]]
    assert source.train.y.tolist() == [1, 0, 1]
    assert (source.class_names, source.test, source.label_column) == (("no", "yes"), None, "label")
    dealt = read(tmp_path / "a.csv", columns=["town", "name"])  # a column to deal by is no feature
    assert dealt.feature_names == ("height", "weight")
    assert dealt.train_columns["town"].tolist() == [2, 1, 2]
    assert dealt.train_columns["name"].tolist() == ["Ann", "Bob", "Cem"]


def test_numbers_with_decimal_commas_are_not_left_out_silently(tmp_path: Path) -> None:
    place = tmp_path / "a.csv"
    place.write_text("weight;height;label\n70,5;1.8;no\n;1.7;yes\n61,0;1.6;no\n")
    report = f"expected a finite number in line 2 of column 'weight' of {place}, got '70,5', the first of 3 such rows; "
    assert _refusal(place).startswith(report + "write decimals with a point: pandas.read_csv")
    assert read(place, feature_columns=["height"]).feature_names == ("height",)


def test_all_that_is_wrong_with_all_files_is_listed_at_once(tmp_path: Path) -> None:
    """By lines of the files; a cell may hold several, and blank ones do not count."""
    first = table(tmp_path / "train-1.csv", 'a,b,note,y\n1,2,"one\ntwo",0\n\nx,inf,,1\n1,?,,1\n')
    second = table(tmp_path / "train-2.csv", "a,y,c\n1,0,5\n2,,6\n")
    test = table(tmp_path / "test.csv", 'a,b,c,y\n1,2,3,0\n"1,5",2,3,0\n')
    with pytest.raises(ConfigErrors) as caught:
        read(tmp_path)
    report = caught.value.problems
    starts = (
        f"feature column 'b' in {second}, got no such; known: a, c, y; 2 others have it",
        f"feature column 'c' in {first}, got no such; known: a, b, note, y; 2 others have it",
        f"a label in line 3 of column 'y' of {second}, got ''",
        f"a finite number in line 5 of column 'a' of {first}, got 'x'",
        f"a finite number in line 5 of column 'b' of {first}, got 'inf', the first of 2 such rows",
        f"a finite number in line 3 of column 'a' of {test}, got '1,5'; write decimals with a point",
    )
    assert len(report) == len(starts)
    assert all(start in line for start, line in zip(starts, report, strict=True))
    table(tmp_path / "train-1.csv", "a,b,y\n1,2,3\n1,2,3,4\n")
    table(tmp_path / "train-2.csv", "a,a,y\n1,0,5\n")
    with pytest.raises(ConfigErrors) as caught:
        read(tmp_path)
    assert "Expected 3 fields in line 3, saw 4" in caught.value.problems[0]
    assert "expected a name of its own for every column" in caught.value.problems[1]


def test_inputs_are_standardized_by_the_training_side(tmp_path: Path) -> None:
    table(tmp_path / "train.csv", "a,b,y\n1,7,0\n3,7,1\n8,7,0\n")
    table(tmp_path / "test-1.csv", "y,b,a\n1,9,-4\n")
    source = read(tmp_path)
    a = np.array([1, 3, 8])
    assert source.mean == pytest.approx((4, 7))
    assert source.std == pytest.approx((a.std(), 1))  # b never varies
    assert source.prepare(source.train.x)[:, 0].tolist() == pytest.approx(((a - 4) / a.std()).tolist(), rel=1e-6)
    assert source.test is not None
    assert source.test.x.tolist() == [[-4, 9]]
    assert source.prepare(source.test.x)[0].tolist() == pytest.approx([-8 / a.std(), 2], rel=1e-6)
    with pytest.raises(ConfigError, match="rows of 2 features"):
        source.prepare(torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [
        ("0 1 2", [0, 1, 2], ("0", "1", "2")),
        ("4 0 4", [1, 0, 1], ("0", "4")),
        ("1.0 2.0 10", [0, 1, 2], ("1", "2", "10")),
        ("a 2 b", [1, 0, 2], ("2", "a", "b")),
    ],
)
def test_labels(tmp_path: Path, labels: str, numbers: list[int], names: tuple[str, ...]) -> None:
    rows = "".join(f"{row},{label}\n" for row, label in enumerate(labels.split()))
    source = read(table(tmp_path / "a.csv", "x,label\n" + rows))
    assert (source.train.y.tolist(), source.class_names) == (numbers, names)


def test_semicolons_quotes_and_empty_lines(tmp_path: Path) -> None:
    source = read(table(tmp_path / "a.csv", '\ufeff"a b"; y\n\n"1"; "one; two"\n2;three\n'))
    assert (source.feature_names, source.class_names) == (("a b",), ("one; two", "three"))


def test_refusals_of_values(tmp_path: Path) -> None:
    place = tmp_path / "a.csv"
    for wrong in ("", "NA", "inf", "1e39", "1_0", "two"):
        message = refusal(place, f"a,y\n1,0\n{wrong},1\n")
        assert f"expected a finite number in line 3 of column 'a' of {place}, got '{wrong}'" in message
    assert "a label in line 3 of column 'y'" in refusal(place, "a,y\n1,0\n2,\n")
    assert "labels of two or more classes" in refusal(place, "a,y\n1,3\n2,3\n")
    assert "expected classes, whole numbers or words, in label column 'y'" in refusal(place, "a,y\n1,0.5\n2,1\n")
    assert "varies too little" in refusal(place, "a,b,y\n1600000000,1,0\n1600000001,2,1\n")


def test_refusals_of_columns(tmp_path: Path) -> None:
    place = tmp_path / "a.csv"
    assert "none among: a, b; name it with label_column" in refusal(place, "a,b\n1,0\n2,1\n")
    assert "several: label, y" in refusal(place, "label,y\n1,0\n2,1\n")
    assert "did you mean 'label'" in refusal(place, PEOPLE, label_column="labels")
    assert "did you mean 'height'" in refusal(place, feature_columns=["heigth"])
    assert "line 2 of column 'name'" in refusal(place, feature_columns=["name"])
    assert "without the label 'label'" in refusal(place, feature_columns=["label", "town"])
    assert "further column 'towns'" in refusal(place, columns=["towns"])
    assert "expected columns of numbers besides 'y'" in refusal(place, "a,y\nu,0\nv,1\n")


def test_refusals_of_files(tmp_path: Path) -> None:
    place = tmp_path / "a.csv"
    assert "got neither" in refusal(place)
    assert "Expected 2 fields in line 3, saw 3" in refusal(place, "a,y\n1,0\n2,1,0\n")
    assert "got 'a' twice" in refusal(place, "a,a,y\n1,1,0\n")
    assert "first line" in refusal(place, "1,0\n2,1\n")
    assert "got none" in refusal(place, "a,y\n")
    assert "first line" in refusal(place, "")
    place.write_bytes(b"a,y\n\xff\xfe,1\n")
    assert "expected a CSV file in UTF-8" in refusal(place)
    place.unlink()
    assert "expected CSV files (train*.csv, test*.csv)" in refusal(tmp_path)


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    """120 rows of three classes far apart, at very different scales."""
    draws = np.random.default_rng(0)
    y = np.arange(120) % 3
    x = (draws.normal(size=(120, 2)) + 6 * np.stack([y == 1, y == 2], axis=1)) * [1000, 0.001] + [-9000, 4]
    rows = "".join(f"{a},{b},{'pqr'[c]}\n" for (a, b), c in zip(x.tolist(), y, strict=True))
    return table(tmp_path / "flowers.csv", "long,short,kind\n" + rows)


RECIPE = {
    "models": {"architectures": ["mlp-64-32", "mlp-64-64-32"]},
    "training": {"rounds": 4, "local_epochs": 3, "batch_size": 8, "lr": 0.1},
}


CLINICS = """weight;color;height;label;clinic
70.5;red;1.8;3.0;a
;blue;1.75;4;a
61;red;1.7;3;a
73;;1.6;4;a
90.5;red;1.8;3;b
?;blue;;4;b
81;red;1.7;3;b
83;;1.6;4;b
"""


def test_a_model_reads_new_rows_as_its_run_read_its_own(tmp_path: Path) -> None:
    """Categories by number; its client's mean stands for what is missing."""
    options = {"missing_values": "client_mean", "category_columns": ["color"]}
    dealt = {"partition": "by_group", "group_by": "clinic", "split": "1:0:1"}
    data = {"dataset": f"csv:{table(tmp_path / 'a.csv', CLINICS)}", **options, **dealt}
    recipe = {**RECIPE, "training": {"rounds": 1}, "method": {"name": "local"}}
    pf.run(pf.Recipe.from_dict({"data": data, **recipe}), out=tmp_path / "run")
    source = load_dataset(data["dataset"], **options, columns=("clinic",))  # type: ignore[arg-type]
    for number, client in enumerate(pf.federate(source, None, **dealt).clients):  # type: ignore[arg-type]
        form = prediction.load(tmp_path / "run", number).form
        rows = "height;weight;color;label\n1.5;NA;red;3.0\n2;7.25;blue;4\n"
        new = inference_inputs.read(table(tmp_path / "new.csv", rows), form)
        known = client.train.x[client.train.x[:, 3] == 0, 0]
        assert new.x.tolist() == [[pytest.approx(float(known.mean())), 1.5, 2, 1, 0], [7.25, 2, 1, 0, 0]]
        assert new.y is not None
        assert new.y.tolist() == [0, 1]


def test_fixed_categories_are_numbered_as_they_stand_and_others_are_errors(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", "size,color,label\n1,red,0\n2,,1\n3,blue,0\n4,red,1\n")
    source = load_dataset(f"csv:{path}", categories={"color": ["blue", "green", "red"]})
    assert source.feature_names == ("size", "color")
    assert source.columns.counts == (0, 4)
    assert source.train.x[:, 1].tolist() == [3, 0, 1, 3]
    with pytest.raises(
        ConfigError, match=r"one of data.categories \(blue, green\) in line 2 of column 'color' of .*a.csv, got 'red'"
    ):
        load_dataset(f"csv:{path}", categories={"color": ["blue", "green"]})
    with pytest.raises(ConfigError, match=r"expected the category column 'shade' in .*a.csv, got no such"):
        load_dataset(f"csv:{path}", categories={"shade": ["blue"]})
    data = {"dataset": f"csv:{path}", "num_clients": 2}
    for names in (["red", "red"], ["red", ""], ["red", "NA"], [" red"]):
        with pytest.raises(ConfigError, match=r"categories.color expects every category once"):
            pf.Recipe.from_dict(
                {"data": {**data, "categories": {"color": names}}, "method": {"name": "local"}, **RECIPE}
            )


def test_two_networks_on_a_table_and_their_use_on_new_rows(
    flowers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"dataset": f"csv:{flowers}", "label_column": "kind", "num_clients": 3}
    done = pf.run(pf.Recipe.from_dict({"data": data, "method": {"name": "fedgh"}, **RECIPE}), out=tmp_path / "run")
    assert done.result["accuracy"] > 0.9
    rows = [line.split(",") for line in flowers.read_text().splitlines()[1:]]
    new = table(tmp_path / "new.csv", "kind,other,short,long\n" + "".join(f"{c},x,{b},{a}\n" for a, b, c in rows))
    found = prediction.predict(tmp_path / "run", 1, new)
    assert found.accuracy is not None
    assert found.accuracy > 0.9
    source = load_dataset(data["dataset"], label_column="kind")  # type: ignore[arg-type]
    with torch.inference_mode():
        expected = done.models[1](source.prepare(source.train.x))
    assert torch.allclose(found.scores, expected, atol=1e-5)
    bare = table(tmp_path / "bare.csv", "long,short\n-3000,4\n")
    assert prediction.predict(tmp_path / "run", 1, bare).labels is None
    assert prediction.predict(tmp_path / "run", 1, bare).rows()[0]["class_name"] == "q"
    for text, words in (
        ("long\n1\n", "feature column 'short'"),
        ("long,short,kind\n1,2,s\n", "got 's'"),
        ("long,short\n1,\n", "finite number in line 2 of column 'short'"),
    ):
        with pytest.raises(ConfigError, match=words):
            prediction.predict(tmp_path / "run", 1, table(tmp_path / "wrong.csv", text))
    wrong = table(tmp_path / "wrong.csv", 'long,kind\n"1,5",q\nNA,\n')
    assert cli.status(["predict", str(tmp_path / "run"), str(wrong), "--client", "1"]) == 2
    problem = capsys.readouterr()
    assert problem.out == ""
    assert [line.partition(",")[0] for line in problem.err.splitlines()] == [
        f"- expected the feature column 'short' in {wrong}",
        f"- expected a finite number in line 2 of column 'long' of {wrong}",
        f"- expected a label in line 3 of column 'kind' of {wrong}",
        "polyfed: 3 things do not fit",
    ]


def frame() -> Any:
    import pandas as pd

    return pd.DataFrame(
        {
            "age": [30, 40, 50, 36],
            "ill": [True, False, True, True],
            "color": pd.Categorical(["red", "blue", "red", None]),
            "weight": [70.25, np.nan, 60, 80],
            "clinic": ["b", "a", "a", "b"],
            "kind": ["yes", "no", "yes", "no"],
        }
    )


def test_a_frame_is_read_as_a_csv_file_of_its_cells(tmp_path: Path) -> None:
    made = pf.from_frame(frame(), "kind", "clinic", frame()[:2], missing_values="client_mean", name="people")
    for side, rows in (("train", frame()), ("test", frame()[:2])):
        rows.assign(ill=rows["ill"].astype(int)).to_csv(tmp_path / f"{side}.csv", index=False)
    read_ = read(
        tmp_path, label_column="kind", category_columns=["color"], columns=["clinic"], missing_values="client_mean"
    )
    assert made.test is not None
    assert read_.test is not None
    assert torch.equal(made.train.x, read_.train.x)
    assert torch.equal(made.test.x, read_.test.x)
    names = ("age", "ill", "weight", "color", *(f"{name} is missing" for name in ("age", "ill", "weight")))
    assert made.feature_names == read_.feature_names == names
    assert (made.mean, made.std, made.columns) == (read_.mean, read_.std, read_.columns)
    assert made.class_names == ("no", "yes")
    assert pf.federate(made, split="1:0:1").names == ("a", "b")
    assert pf.federate(made, None, "by_group", group_by="clinic", split="1:0:1").names == ("a", "b")
    assert len(pf.federate(made, 2, "iid", split="1:0:1").clients) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "expected a finite number in row 1 of column 'weight' of frame, got ''; correct or drop such rows"),
        ({"feature_columns": ["ages"]}, "expected the feature column 'ages' in frame, got no such; did you mean 'age'"),
        ({"missing_values": "mean"}, "missing_values: expected 'error' or 'client_mean', got 'mean'"),
        ({"frame": [1, 2]}, "expected a pandas DataFrame as train side of 'frame', got a list"),
        ({"frame": frame()[:0]}, "expected at least one row in 'frame', got none"),
        ({"frame": frame().rename(columns={"ill": "age"})}, "expected a name of its own for every column"),
    ],
)
def test_frames_that_cannot_be_read(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pf.from_frame(**{"frame": frame(), "label": "kind", **options})
    assert words in str(caught.value)


def test_columns_may_be_numbers() -> None:
    numbered = frame().set_axis(range(6), axis=1)
    made = pf.from_frame(numbered, "5", client=4, feature_columns=[0], category_columns=[2])
    assert (made.feature_names, made.client_column) == (("0", "2"), "4")


def test_columns_with_several_names_or_one_name_twice_are_refused() -> None:
    import pandas as pd

    deep = frame()[["age", "kind"]].set_axis(pd.MultiIndex.from_tuples([("a", "x"), ("a", "y")]), axis=1)
    with pytest.raises(ConfigError, match=r"write frame\.columns = "):
        pf.from_frame(deep, "y")
    for names in (["a", "a", "kind"], [0, "0", "kind"]):
        with pytest.raises(ConfigError, match="twice"):
            pf.from_frame(frame()[["age", "weight", "kind"]].set_axis(names, axis=1), "kind")


@pytest.mark.parametrize("cell", [["a", "b"], {"a"}, np.array(["a"])])
@pytest.mark.parametrize("regression", [False, True])
def test_several_labels_in_a_cell_are_refused(cell: Any, regression: bool) -> None:
    given = frame()
    given["kind"] = [cell, "b", cell, "b"]
    with pytest.raises(ConfigError, match=r"column 'kind' .* row 0, the first of 2 .*an input has one label"):
        pf.from_frame(given, "kind", feature_columns=["age"], regression=regression)
    with pytest.raises(ConfigError, match="an input has one label"):
        pf.from_frame(frame(), ["kind", "ill"])


def test_a_frame_of_numbers_to_predict() -> None:
    made = pf.from_frame(
        frame(), "age", feature_columns=["ill", "clinic"], category_columns=["clinic"], regression=True
    )
    assert made.is_regression
    assert made.train.x.tolist() == [[1, 2], [0, 1], [1, 1], [1, 2]]
    assert made.train.y.tolist() == [30, 40, 50, 36]


PATIENTS = """age,color,weight,clinic,label
30,red,70,a,no
40,blue,,a,yes
50,red,60,a,no
36,,80,a,yes
20,green,NA,b,no
40,blue,?,b,yes
60,blue,nan,b,yes
"""
OPTIONS = {"category_columns": ("color",), "missing_values": "client_mean", "columns": ("clinic",)}


def of_clinics(place: Path, text: str = PATIENTS, declared: dict[str, list[float]] | None = None) -> list[Tensor]:
    """Each clinic's rows, all of its sides: (N, 5)."""
    place.write_text(text)
    source = with_declared(load_dataset(f"csv:{place}", **OPTIONS), None, *(declared or {}).values())  # type: ignore[arg-type]
    data = pf.federate(source, None, "by_group", group_by="clinic", split="1:0:1")
    return [torch.cat([client.train.x, client.test.x]) for client in data.clients]


def test_how_they_are_stored(tmp_path: Path) -> None:
    """Age, weight, color, and two columns that say what is missing; 0 is no color."""
    (tmp_path / "a.csv").write_text(PATIENTS)
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


def test_no_other_clients_row_has_a_say(tmp_path: Path) -> None:
    """Clinic a's inputs stay as they are, bit for bit, whatever clinic b's rows are; its own training rows count."""
    other = PATIENTS.replace("20,green,NA,b", "99,green,5,b").replace("40,blue,?,b", "1,blue,1000,b")
    declared = {"mean": [40.0, 70, 0, 0, 0], "std": [10.0, 10, 1, 1, 1]}
    settings: dict[str, list[float]]
    for settings in ({}, declared):
        assert torch.equal(
            of_clinics(tmp_path / "a.csv", declared=settings)[0], of_clinics(tmp_path / "b.csv", other, settings)[0]
        )
    own = PATIENTS.replace("30,red,70,a", "30,red,10,a").replace("50,red,60,a", "50,red,20,a")
    assert not torch.equal(of_clinics(tmp_path / "a.csv")[0][:, 1], of_clinics(tmp_path / "b.csv", own)[0][:, 1])
    weightless = of_clinics(tmp_path / "a.csv", declared=declared)[1]
    assert weightless[:, 1].tolist() == [70, 70, 70]


def test_missing_values_are_errors_unless_asked_for(tmp_path: Path) -> None:
    """With a hint."""
    (tmp_path / "a.csv").write_text(PATIENTS)
    with pytest.raises(ConfigError, match=r"line 3 of column 'weight' .* set missing_values"):
        load_dataset(f"csv:{tmp_path / 'a.csv'}", columns=("clinic",))
    (tmp_path / "a.csv").write_text(PATIENTS.replace("70,a", "inf,a"))
    with pytest.raises(ConfigError, match="expected a finite number in line 2 of column 'weight'"):
        load_dataset(f"csv:{tmp_path / 'a.csv'}", **OPTIONS)  # type: ignore[arg-type]


def test_folders_of_clients_share_their_categories(tmp_path: Path) -> None:
    """A color that one clinic alone has, has one number at both."""
    for clinic, rows in (("a", "red,1,no\nblue,2,yes\n"), ("b", "blue,3,no\ngreen,,yes\n")):
        (tmp_path / clinic).mkdir()
        (tmp_path / clinic / "train.csv").write_text("color,size,label\n" + rows)
    source = load_dataset(f"clients:{tmp_path}", category_columns=("color",), missing_values="client_mean")
    assert source.train.x[:, 1].tolist() == [3, 1, 1, 2]
    assert source.columns.counts == (0, 4, 0)


def costs(folder: Path) -> DatasetSource:
    path = regression.write_table(folder / "costs.csv")
    return pf.load_dataset(f"csv:{path}", label_column="cost", columns=["site"], task="regression")


def test_each_clients_numbers_are_standardized_by_its_own_training_rows(tmp_path: Path) -> None:
    source = costs(tmp_path)
    federated = pf.federate(source, num_clients=None, partition="by_group", group_by="site", split="6:2:2")
    scales = []
    for client in federated.clients:
        y = client.train.scale.restored(client.train.y)
        assert client.train.scale.mean == pytest.approx(float(y.mean()), rel=1e-5)
        assert client.train.scale.std == pytest.approx(float(y.std(correction=0)), rel=1e-5)
        assert float(client.train.y.mean()) == pytest.approx(0, abs=1e-5)
        assert client.test.scale == client.validation.scale == client.train.scale
        parts = [part.scale.restored(part.y) for part in (client.train, client.validation, client.test)]
        assert all(any(abs(float(value) - known) < 1e-3 for known in source.train.y.tolist()) for value in parts[2])
        scales.append(client.train.scale)
    assert len(set(scales)) == 3
    assert [round(scale.mean / 100) for scale in scales] == [0, 1, 2]


def test_partitions_by_class_are_refused(tmp_path: Path) -> None:
    partition = "by_class"
    with pytest.raises(ConfigError, match=f"partition '{partition}' deals by classes; expected iid, .*by_group"):
        pf.federate(costs(tmp_path), num_clients=2, partition=partition)


def test_what_cannot_be_predicted_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.csv"
    path.write_text("a,cost\n1,2.5\n2,much\n")
    with pytest.raises(ConfigError, match=r"expected a finite number to predict in line 3 of column 'cost' .*'much'"):
        pf.load_dataset(f"csv:{path}", label_column="cost", task="regression")
    path.write_text("a,cost\n1,2.5\n2,3.5\n")
    with pytest.raises(ConfigError, match=r"got '2.5'; data.task = 'regression' predicts numbers"):
        pf.load_dataset(f"csv:{path}", label_column="cost")
    with pytest.raises(ConfigError, match="expected finite numbers to predict, got nan in row 1"):
        LabeledSamples(torch.zeros(2, 1), torch.tensor([1.0, float("nan")]))
    with pytest.raises(ConfigError, match="expected no classes, as labels of 'tensors' are floats"):
        pf.from_tensors((torch.zeros(2, 1), torch.zeros(2)), classes=2)
