"""Markup for notebooks: nothing in it comes from a text."""

from html.parser import HTMLParser
from xml.etree import ElementTree

from polyfed.markup import details, notes, paragraph, preformatted, table

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
    ]
    for markup in made:
        assert not tags(markup) & {"script", "img"}
        assert "alert(1)" in markup


def test_a_table_by_hand() -> None:
    root = ElementTree.fromstring(table(["name", "value"], [("a", 1), ("b", 2)], words=(0,), bold=[(1, 1)]))
    assert [cell.text for cell in root.iter("th")] == ["name", "value"]
    cells = [(cell.text, cell.get("style") or "") for cell in root.iter("td")]
    assert [text for text, _ in cells] == ["a", "1", "b", "2"]
    assert ["left" in style for _, style in cells] == [True, False, True, False]
    assert ["bold" in style for _, style in cells] == [False, False, False, True]
