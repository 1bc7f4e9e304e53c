"""Columns of a federation whose files differ: names, units, and which client has which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import polyfed as pf
from polyfed.data.federation_columns import with_all_columns
from polyfed.errors import PolyfedError

FEATURES = {
    "age": {"unit": "years"},
    "weight": {"unit": "kg", "names": ["body mass"], "convert": {"lb": 0.45359237}},
    "heat": {"unit": "C", "convert": {"F": [5 / 9, -160 / 9]}},
    "sex": {"categories": ["f", "m"]},
}
NORTH = "age,body mass [lb],sex,y\n30,100,f,0\n40,200,m,1\n50,300,f,1\n60,400,m,0\n"
SOUTH = "heat [F],weight [kg],other,y\n32,70,1,0\n212,80,1,1\n122,90,1,0\n50,,1,1\n"


def read(folder: Path, north: str = NORTH, south: str = SOUTH, **settings: Any) -> pf.FederatedDataset:
    for name, text in (("north", north), ("south", south)):
        (folder / name).mkdir()
        (folder / name / "train.csv").write_text(text)
    given = {"features": FEATURES, "missing_values": "client_mean", **settings}
    source = pf.load_dataset(f"clients:{folder}", columns=["client"], **given)
    return pf.federate(source, partition="by_group", group_by="client", split="1:0:1")


def test_each_client_has_its_own_columns_in_the_federations_units(tmp_path: Path) -> None:
    data = read(tmp_path)
    north, south = data.clients
    assert north.columns is not None
    assert south.columns is not None
    assert north.columns.names == ("age", "weight", "sex", "age is missing", "weight is missing")
    assert (north.columns.places, south.columns.places) == ((0, 1, 3), (1, 2))
    rows = torch.cat([north.train.x, north.test.x])
    np.testing.assert_allclose(rows[:, 1].sort().values, np.array([100, 200, 300, 400]) * 0.45359237, rtol=1e-6)
    heat = torch.cat([south.train.x, south.test.x])[:, 1].sort().values
    np.testing.assert_allclose(heat, [0, 10, 50, 100], atol=1e-4)
    assert north.columns.table.counts == (0, 0, 3, 0, 0)
    assert any("'heat' (1)" in line for line in data.remarks)
    assert any("'other'" in line for line in data.remarks)


def test_rows_with_all_columns_say_what_is_missing(tmp_path: Path) -> None:
    data = read(tmp_path)
    names = data.source.feature_names
    whole = with_all_columns(data.clients[0].train, data.clients[0].columns, names).x
    assert whole[:, names.index("heat is missing")].tolist() == [1.0] * len(whole)
    assert whole[:, names.index("weight is missing")].tolist() == [0.0] * len(whole)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"north": NORTH.replace("lb", "stone")}, "'weight' in 'kg' or 'lb' in"),
        ({"north": NORTH.replace("age", "weight")}, "expected one column 'weight' in"),
        ({"south": "a,y\n1,0\n2,1\n"}, "expected one of the columns of data.features in"),
        ({"missing_values": "error"}, "expected a number in line 5 of column 'weight' of"),
        ({"feature_columns": ["age"]}, "feature_columns does nothing beside features"),
        ({"features": {**FEATURES, "body mass": {}}}, "expects every name of a column once, got 'body mass'"),
        ({"features": {"sex": {"categories": ["f", "m"], "unit": "kg"}}}, "got both"),
        ({"features": {"age": {"unit": "a", "convert": {"d": 0.0}}}}, "expects factors other than 0, got 0"),
        ({"north": NORTH.replace("sex", "sex [code]")}, "expected column 'sex' without a unit in"),
        ({"north": NORTH.replace("60,400,m", "60,400,x")}, "expected one of data.categories (f, m)"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    with pytest.raises(PolyfedError) as caught:
        read(tmp_path, **change)
    assert expected in str(caught.value)


def test_a_frame_of_all_clients_lacks_what_a_client_has_no_value_of() -> None:
    frame = pd.DataFrame({"age": [1, 2, 3, None, None, None], "dose": [None, 5, 1, 2, 3, 4], "y": [0, 1] * 3})
    frame["who"] = list("aaabbb")
    source = pf.from_frame(frame, "y", "who", features={"age": {}, "dose": {}}, missing_values="client_mean")
    data = pf.federate(source, split="2:0:1", seed=1)
    assert [client.columns.places for client in data.clients if client.columns] == [(0, 1), (1,)]


def test_settings_that_need_rows_with_all_columns_are_refused(tmp_path: Path) -> None:
    source = read(tmp_path).source
    with pytest.raises(PolyfedError, match="expected test = 'local'"):
        pf.federate(source, 2, test="global", split="1:0:1")
