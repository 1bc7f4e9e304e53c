"""Markup for notebooks: nothing in it comes from a text, and curves are where their values are."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from polyfed.markup import Line, curves, cut, details, notes, paragraph, preformatted, table

EVIL = '</td><script>alert(1)</script><img src=x onerror="alert(2)" \'&'


def tags(markup: str) -> set[str]:
    found: set[str] = set()

    class Parts(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.add(tag)
            assert not [key for key, _ in attrs if key.startswith("on")]

    Parts().feed(markup)
    return found


def test_texts_stay_texts() -> None:
    made = [
        paragraph(EVIL),
        paragraph(EVIL, strong=True),
        preformatted(EVIL),
        details(EVIL, ""),
        notes([EVIL]),
        table([EVIL, "b"], [(EVIL, 1)]),
        curves([Line(EVIL, [1, 2], [3, 4])], EVIL, EVIL),
    ]
    for markup in made:
        assert not tags(markup) & {"script", "img"}
        assert "alert(1)" in markup


def test_a_table_by_hand() -> None:
    markup = table(["name", "value"], [("a", 1), ("b", 2)], words=(0,), bold=[(1, 1)])
    root = ElementTree.fromstring(markup)
    assert [cell.text for cell in root.iter("th")] == ["name", "value"]
    cells = [(cell.text, cell.get("style") or "") for cell in root.iter("td")]
    assert [text for text, _ in cells] == ["a", "1", "b", "2"]
    assert ["left" in style for _, style in cells] == [True, False, True, False]
    assert ["bold" in style for _, style in cells] == [False, False, False, True]


def test_long_tables_are_cut_in_the_middle() -> None:
    assert cut([1, 2, 3, 4], 0, 2, 1) == [1, 2, 3, 4]
    assert cut([1, 2, 3, 4, 5], 0, 2, 1) == [1, 2, 0, 5]
    assert cut([], 0, 2, 1) == []


def test_curves_by_hand() -> None:
    root = ElementTree.fromstring(curves([Line("a", [1, 3], [40, 60]), Line("b", [2], [50])], "round", "accuracy"))
    first, second = root.iter("polyline")
    (x1, y1), (x2, y2) = (tuple(map(float, place.split(","))) for place in (first.get("points") or "").split())
    assert (x1, x2) == (40, 510), "from the left end to the right"
    middle = (second.get("points") or "").split(",")
    assert float(middle[0]) == (x1 + x2) / 2
    assert float(middle[1]) == (y1 + y2) / 2
    assert y1 > y2, "higher is above"
    numbers = [text.text for text in root.iter("text")]
    assert numbers == ["40", "45", "50", "55", "60", "1", "2", "3", "round"]
    assert len(list(root.iter("circle"))) == 1, "a single point is a dot"
    looks = [(line.get("stroke"), line.get("stroke-dasharray")) for line in root.iter("polyline")]
    assert len(set(looks)) == 2
    assert "a" in "".join(root.itertext())


@pytest.mark.parametrize("values", [[0.0, 0.0], [100.0], [0.1, 99.9], [50.0, 50.0001], [3.0, 4.0, 5.0]])
def test_every_curve_lies_inside_and_has_few_ticks(values: list[float]) -> None:
    markup = curves([Line("a", list(range(1, len(values) + 1)), values)], "round", "accuracy")
    root = ElementTree.fromstring(markup)
    places = [tuple(map(float, place.split(","))) for place in re.findall(r'points="([^"]*)"', markup)[0].split()]
    assert all(0 <= x <= 520 and 0 <= y <= 220 for x, y in places)
    assert 2 <= len(list(root.iter("text"))) <= 18


def test_nothing_to_draw() -> None:
    assert curves([], "round", "accuracy") == ""
    assert curves([Line("a", [], [])], "round", "accuracy") == ""
    assert notes([]) == ""
