"""The page: that it stands alone, what it says, and that nothing from run folders can become markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from polyfed.escaping import visible
from polyfed.report.comparison import compare_runs
from polyfed.report.html_report import page, write_report
from polyfed.report.run_records import load_runs

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> {{script}} & \u2028"


class Parts(HTMLParser):
    """What a browser would make of a page: its tags, their attributes, and the text inside."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.tags[-1], data))

    def inside(self, tag: str) -> list[str]:
        return [text for where, text in self.texts if where == tag]


def parts_of(root: Path, figures: tuple[Path, ...] = ()) -> Parts:
    runs = load_runs(root)
    return Parts(page(compare_runs(runs), figures))


def rewrite(path: Path, change: Any) -> None:
    """Change every object of a file of JSON lines, or the only one."""
    objects = [json.loads(line) for line in path.read_text().splitlines()]
    for one in objects:
        change(one)
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


def test_the_page_stands_alone_and_its_policy_allows_its_own_style_only(two_by_two: Path) -> None:
    parts = parts_of(two_by_two)
    keys = {key for key, _ in parts.attributes}
    assert not keys & {"srcset", "action", "style", "integrity"}
    assert not [key for key in keys if key.startswith("on")]
    assert [value for key, value in parts.attributes if key in ("href", "src")] == ["data:,"]
    policy = next(value for key, value in parts.attributes if key == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    (style,) = parts.inside("style")
    assert f"style-src 'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in policy
    assert not re.search(r"url\(|@import|https?:", style)


def test_strings_of_run_folders_stay_strings(two_by_two: Path, make: Any) -> None:
    told = {"preset_note": EVIL}
    more = {"versions": {EVIL: EVIL}, "class_names": [EVIL, "b"], "confusion": [[1, 0], [2, 3]]}
    make("evil", "fedavg", 0, label=EVIL, data={"class_assignment": EVIL}, run=told, **more)
    for path in two_by_two.glob("*/result.json"):
        rewrite(path, lambda result: result.update(dataset=EVIL, accuracy_best_by_validation=None))
    (two_by_two / f"{'-' * 3}<img>.png").write_bytes(b"no picture")
    parts = parts_of(two_by_two, tuple(two_by_two.glob("*.png")))
    assert "script" not in parts.tags
    assert parts.tags.count("img") == 1, "the figure"
    assert visible(EVIL) in parts.inside("td")
    assert not [value for key, value in parts.attributes if key.startswith("on")]


def test_it_holds_the_tables_and_the_figures_that_are_written_with_it(two_by_two: Path, tmp_path: Path) -> None:
    runs = load_runs(two_by_two)
    files = write_report(compare_runs(runs), tmp_path / "out")
    drawn = {file.stem for file in files if file.suffix == ".png"}
    assert drawn == {"accuracy-by-round", "accuracy-by-bytes", "accuracy-per-client"}
    parts = Parts((tmp_path / "out" / "report.html").read_text())
    assert sum(value.startswith("data:image/png;base64,") for _, value in parts.attributes) == len(drawn)
    cells = parts.inside("td")
    assert {"local", "fedgh", "52.00 ± 2.83", "65.00 ± 7.07", "6.0 KiB"} <= set(cells)
    assert "42.00 ± 2.83" in cells, "each client's"


def test_what_did_not_count(two_by_two: Path) -> None:
    assert "No upload was refused or late, and nobody dropped out." in parts_of(two_by_two).inside("p")
    reasons = [{"client": 1, "reason": "the loss is not finite"}]
    rewrite(two_by_two / "fedgh-0" / "rounds.jsonl", lambda record: record.update(refused=reasons, dropped=[0, 1]))
    rewrite(two_by_two / "fedgh-1" / "rounds.jsonl", lambda record: record.update(stragglers=[0]))
    parts = parts_of(two_by_two)
    assert "refused 3 times: the loss is not finite" in parts.inside("li")
    text = " ".join(text for _, text in parts.texts)
    assert "method refused dropped out too late local 0 0 0 fedgh 3 6 3" in text


def test_recipes_commands_versions_and_the_confusion(two_by_two: Path) -> None:
    (two_by_two / "command.txt").write_text("polyfed compare mine.toml\n")
    rewrite(two_by_two / "fedgh-1" / "result.json", lambda result: result.update(versions={"torch": "2.6"}))
    more = {"versions": {"torch": "2.13"}, "confusion": [[1, 0], [2, 3]], "class_names": ["cat", "dog"]}
    rewrite(two_by_two / "fedgh-0" / "result.json", lambda result: result.update(more))
    parts = parts_of(two_by_two)
    assert parts.inside("pre") == [
        "polyfed compare mine.toml",
        *((two_by_two / f"{name}-0" / "recipe.toml").read_text() for name in ("local", "fedgh")),
    ]
    assert "torch 2.13 (1 of the runs); 2.6 (1 of the runs)" in parts.inside("li")
    assert "true class cat dog cat 1 0 dog 2 3" in " ".join(text for _, text in parts.texts)
