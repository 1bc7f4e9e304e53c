"""The page without a browser: that it stands alone, what its data say, and that nothing in them can become markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polyfed.errors import ConfigError
from polyfed.escaping import visible, visible_in
from polyfed.report.comparison import compare_runs
from polyfed.report.html_report import page, page_data
from polyfed.report.run_records import load_runs

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{script}} & \u2028"


class Parts(HTMLParser):
    """What a browser would make of a page, as far as it matters here."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.inside: dict[str, str] = {}
        self._now = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]
        self._now = f"{tag} {dict(attrs).get('id', '')}".strip()

    def handle_endtag(self, tag: str) -> None:
        self._now = ""

    def handle_data(self, data: str) -> None:
        self.inside[self._now] = self.inside.get(self._now, "") + data


def shown(root: Path, stage: str | None = None) -> dict[str, Any]:
    runs = load_runs(root)
    return page_data(runs, compare_runs(runs, stage), stage)


def written(root: Path) -> str:
    runs = load_runs(root)
    return page(runs, compare_runs(runs))


def rewrite(path: Path, change: Any) -> None:
    """Change every object of a file of JSON lines, or the only one."""
    objects = [json.loads(line) for line in path.read_text().splitlines()]
    for one in objects:
        change(one)
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


# the file -------------------------------------------------------------------------------------------------------


def test_the_page_stands_alone(two_by_two: Path) -> None:
    text = written(two_by_two)
    parts = Parts(text)
    keys = {key for key, _ in parts.attributes}
    assert not keys & {"src", "srcset", "action", "style", "integrity"}
    assert not [key for key in keys if key.startswith("on")]
    assert [value for key, value in parts.attributes if key == "href"] == ["data:,"]
    style, script = parts.inside["style"], parts.inside["script"]
    assert not re.search(r"url\(|@import|https?:", style)
    assert re.findall(r"https?://[^\"' ]+", script) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert not re.search(
        r"\beval\b|\bFunction\(|innerHTML|outerHTML|insertAdjacent|document\.write|fetch\(|import\(", script
    )
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_its_policy_allows_its_own_style_and_script_and_nothing_else(two_by_two: Path) -> None:
    parts = Parts(written(two_by_two))
    policy = next(value for key, value in parts.attributes if key == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for name in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(parts.inside[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_strings_of_run_folders_stay_strings(two_by_two: Path, make: Any) -> None:
    plain = Parts(written(two_by_two)).tags
    told = {"preset_note": EVIL}
    make("evil", "fedavg", 0, label=EVIL, versions={EVIL: EVIL}, data={"class_assignment": EVIL}, run=told)
    for path in two_by_two.glob("*/result.json"):
        rewrite(path, lambda result: result.update(dataset=EVIL, accuracy_best_by_validation=None))
    text = written(two_by_two)
    parts = Parts(text)
    assert parts.tags == plain
    assert "\u2028" not in text.partition("</style>")[2].partition('id="data"')[2]
    data = json.loads(parts.inside["script data"])
    assert data == json.loads(json.dumps(visible_in(shown(two_by_two))))
    assert visible(EVIL) in [row["name"] for section in data["sections"] for row in section["rows"]]


# what is on it --------------------------------------------------------------------------------------------------


def test_tables_hold_what_the_other_formats_hold(two_by_two: Path) -> None:
    (section,) = shown(two_by_two)["sections"]
    columns = {column["heading"]: column for column in section["tables"][0]["columns"]}
    method = {key: value for key, value in columns["method"].items() if key != "about"}
    assert method == {"heading": "method", "cells": ["local", "fedgh"], "order": None, "bold": []}
    assert columns["accuracy"]["cells"] == ["52.00 ± 2.83", "65.00 ± 7.07"]
    assert columns["accuracy"]["order"] == [52.0, 65.0]
    assert columns["bytes down"]["cells"] == ["6.0 KiB", "6.0 KiB"]
    assert columns["bytes down"]["order"] == [6144, 6144]
    assert columns["best by valid."]["cells"][0] == ""  # not known
    assert columns["best by valid."]["order"] == [None, 55.0]


def test_curves_by_hand(two_by_two: Path) -> None:
    (section,) = shown(two_by_two)["sections"]
    assert section["rows"] == [{"name": "local", "look": -1}, {"name": "fedgh", "look": 0}]
    assert section["curves"]["metrics"] == ["accuracy"]
    assert section["curves"]["note"] == ""
    line = section["curves"]["lines"]["fedgh"]
    assert line["seeds"] == 2
    assert line["axes"] == {"round": [1, 2, 3], "bytes": [3072, 6144, 9216], "seconds": [1.5, 3, 4.5]}
    assert line["metrics"] == {"accuracy": {"mean": [0.4, 0.5, 0.65], "low": [0.3, 0.4, 0.6], "high": [0.5, 0.6, 0.7]}}


def test_a_figure_that_some_rounds_lack_is_left_out(two_by_two: Path) -> None:
    f1, auc = {"f1": {"mean": 0.25}}, {"auc": {"mean": 0.5}}
    for path in two_by_two.glob("*/rounds.jsonl"):
        rewrite(path, lambda one: one.update(metrics={"personal": f1 | (auc if one["round"] > 1 else {})}))
    curves = shown(two_by_two)["sections"][0]["curves"]
    assert curves["metrics"] == ["accuracy", "f1"]
    assert curves["lines"]["local"]["metrics"]["f1"]["mean"] == [0.25] * 3


def test_long_runs_are_thinned_and_the_page_stays_small(make: Any) -> None:
    accuracies = tuple(0.5 + 0.0004 * (number % 997) for number in range(1000))
    for method in ("local", "fedavg", "fedgh"):
        make(method, method, 0, accuracies)
    text = written(make.root)
    assert len(text) < 200_000
    curves = json.loads(Parts(text).inside["script data"])["sections"][0]["curves"]
    assert curves["note"] == "Curves of up to 1000 rounds are drawn through 300 of them."
    rounds = curves["lines"]["fedavg"]["axes"]["round"]
    assert (len(rounds), rounds[0], rounds[-1]) == (300, 1, 1000)
    assert {after - before for before, after in pairwise(rounds)} == {3, 4}
    assert curves["lines"]["fedavg"]["metrics"]["accuracy"]["mean"][-1] == round(accuracies[-1], 5)


def cells(seed: dict[str, Any]) -> dict[str, list[str]]:
    return {column["heading"]: column["cells"] for column in seed["columns"]}


def test_clients_seed_by_seed(two_by_two: Path) -> None:
    table = [
        {"id": n, "architecture": f"net{n}", "samples": 10 + n, "parameters": 1000 + n, "labels": {"1": 4, "2": 6 - n}}
        for n in (1, 0)
    ]
    other = [dict(row, architecture="wide") for row in table]
    rewrite(two_by_two / "local-0" / "result.json", lambda result: result.update(clients_table=table))
    about = {"clients_table": other, "class_names": ["a", "b", "c"]}
    rewrite(two_by_two / "fedgh-0" / "result.json", lambda result: result.update(about))
    clients = shown(two_by_two)["sections"][0]["clients"]
    both, first, second = clients["seeds"]
    assert both["seed"] == "all, mean"
    assert cells(both) == {
        "client": ["0", "1"],
        "local": ["42.00 ± 2.83", "62.00 ± 2.83"],
        "fedgh": ["55.00 ± 7.07", "75.00 ± 7.07"],
        "minus Local": ["+13.00 ± 4.24", "+13.00 ± 4.24"],
    }
    assert both["accuracy"] == {"local": [0.42, 0.62], "fedgh": [0.55, 0.75]}
    assert cells(first) == {
        "client": ["0", "1"],
        "architecture": ["net0 / wide", "net1 / wide"],  # both, where methods give different ones
        "parameters": ["1000", "1001"],
        "samples": ["10", "11"],
        "local": ["40.00", "60.00"],
        "fedgh": ["50.00", "70.00"],
    }
    assert first["accuracy"] == {"local": [0.4, 0.6], "fedgh": [0.5, 0.7]}
    assert first["labels"] == [{"1": 4, "2": 6}, {"1": 4, "2": 5}]
    assert list(cells(second)) == ["client", "local", "fedgh"], "not recorded"
    assert second["labels"] == [None, None]
    assert clients["class_names"] == ["a", "b", "c"]
    assert "stage personal" in clients["about"]
    unlike = [{**row, "labels": {"0": 10}} for row in table]
    rewrite(two_by_two / "fedgh-0" / "result.json", lambda result: result.update(clients_table=unlike))
    assert shown(two_by_two)["sections"][0]["clients"]["seeds"][1]["labels"] == [None, None], "one deal is not another"


def test_stages_and_columns_are_explained(make: Any, two_by_two: Path) -> None:
    make("fedgh-2", "fedgh", 2, (0.5, 0.6, 0.65))  # so that there are intervals
    make("local-2", "local", 2, (0.3, 0.4, 0.52))
    metrics = {"personal": {key: {"mean": 0.1 * n} for n, key in enumerate(("balanced_accuracy", "f1", "auc"), 1)}}
    rounds = {"metrics": metrics, "refused": 3, "simulated_seconds": 7.0, "accuracy_by_predictor": {}}
    rounds["accuracy_by_predictor"] = {"personal": {"head": {"mean": 0.33}}}
    for path in two_by_two.glob("*/result.json"):
        rewrite(path, lambda result: result.update(rounds, epsilon={"client": 1.5, "sample": 2.5}, delta=1e-5))
    runs = load_runs(two_by_two)
    (section,) = page_data(runs, compare_runs(runs, target=0.5))["sections"]
    main, *others = section["tables"]
    headings = [column["heading"] for column in main["columns"]]
    assert headings[:3] == ["method", "accuracy", "vs Local"]
    assert {"macro AUC", "by head", "epsilon client", "epsilon sample", "simulated time", "refused"} <= {*headings}
    assert len(others) == 2, "over seeds, and to the target"
    about = {column["heading"]: column["about"] for sheet in section["tables"] for column in sheet["columns"]}
    assert about["macro AUC"].startswith("Mean area under the ROC curves")
    assert about["by head"].endswith("predicting by head instead; in %.")
    assert [text.partition(":")[0] for text in section["meanings"]][:3] == ["personal", "received", "std clients"]


def test_what_did_not_count(two_by_two: Path) -> None:
    assert shown(two_by_two)["sections"][0]["lost"] == {"columns": [], "reasons": []}
    reasons = [{"client": 1, "reason": "the loss is not finite"}]
    rewrite(two_by_two / "fedgh-0" / "rounds.jsonl", lambda record: record.update(refused=reasons, dropped=[0, 1]))
    rewrite(two_by_two / "fedgh-1" / "rounds.jsonl", lambda record: record.update(late=[0]))
    found = shown(two_by_two)["sections"][0]["lost"]
    assert {column["heading"]: column["cells"] for column in found["columns"]} == {
        "method": ["local", "fedgh"],
        "refused": ["0", "3"],
        "dropped out": ["0", "6"],
        "late": ["0", "3"],
    }
    assert found["reasons"] == ["refused 3 times: the loss is not finite"]


def test_recipes_commands_and_versions(two_by_two: Path) -> None:
    (two_by_two / "compare.json").write_text(json.dumps({"command": "polyfed compare mine.toml", "date": "2026-01-01"}))
    rewrite(two_by_two / "fedgh-1" / "result.json", lambda result: result.update(versions={"torch": "2.6"}))
    rewrite(two_by_two / "fedgh-0" / "result.json", lambda result: result.update(versions={"torch": "2.13"}))
    (section,) = shown(two_by_two)["sections"]
    assert [recipe["name"] for recipe in section["recipes"]] == ["local", "fedgh"]
    assert section["recipes"][1]["text"] == (two_by_two / "fedgh-0" / "recipe.toml").read_text()
    assert section["commands"] == ["polyfed compare mine.toml"]
    assert section["versions"] == [("torch", "2.13 (1 of the runs); 2.6 (1 of the runs)")]
    assert section["scaled"] is False


# heat maps ------------------------------------------------------------------------------------------------------


def analysis(run: Path, name: str, content: Any) -> Path:
    folder = run / "analysis"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_heat_maps_of_analyses_and_of_the_confusion(two_by_two: Path) -> None:
    counts = {"about": "Samples.", "matrix": [[3, 0, 7], [1, 2, 0]], "row_axis": "client", "columns": ["a", "b", "c"]}
    cka = {"head": {"matrix": [[1, 0.12345], [0.12345, None]], "labels": ["0 cnn", "1 mlp"]}, "nothing": {"matrix": []}}
    for run in ("local-0", "fedgh-0"):
        analysis(two_by_two / run, "labels", counts)
    analysis(two_by_two / "fedgh-0", "cka", cka)
    rewrite(two_by_two / "local-1" / "result.json", lambda result: result.update(confusion=[[5, 1], [2, 6]]))
    found = shown(two_by_two)["sections"][0]["heat_maps"]
    assert found["note"] == ""
    labels, head, confusion = found["maps"]
    assert labels["title"] == "labels, seed 0"  # once, as all methods share the deal of a seed
    assert (labels["rows"], labels["columns"]) == (["0", "1"], ["a", "b", "c"])
    assert (labels["low"], labels["high"], labels["row_axis"], labels["about"]) == (0, 7, "client", "Samples.")
    assert head["title"] == "cka head, fedgh, seed 0"
    assert head["values"] == [[1, 0.123], [0.123, None]]
    assert head["rows"] == head["columns"] == ["0 cnn", "1 mlp"]
    assert confusion["title"] == "confusion, local, seed 1"
    assert (confusion["row_axis"], confusion["column_axis"]) == ("true class", "predicted class")


@pytest.mark.parametrize("matrix", [[], [[1, 2], [3]], [[1, "x"]], [[None]], "ab", [[True]]])
def test_what_is_no_matrix_is_no_heat_map(make: Any, matrix: Any) -> None:
    analysis(make("a"), "odd", {"matrix": matrix})
    assert shown(make.root)["sections"][0]["heat_maps"]["maps"] == []


def test_maps_without_room_are_told(make: Any) -> None:
    run = make("a")
    analysis(run, "a", {"matrix": [[0.5] * 250] * 250})  # 62 500 cells; 60 000 have room
    analysis(run, "b", {"matrix": [[0.5] * 2] * 2})
    found = shown(run)["sections"][0]["heat_maps"]
    assert [one["title"] for one in found["maps"]] == ["b, local, seed 0"]
    assert found["note"] == "1 more heat maps have no room on this page."


def test_a_broken_analysis_is_named(make: Any) -> None:
    path = analysis(make("a"), "cka", "{")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        shown(make.root)
