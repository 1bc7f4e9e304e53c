"""HTML for pages and notebooks: nothing in it comes from a text."""

from html.parser import HTMLParser

from polyfed.report.text_tables import Column, details, html_list, html_table, preformatted

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
    made = [preformatted(EVIL), details(EVIL, ""), html_list([EVIL]), html_table([Column(EVIL, [EVIL])])]
    for markup in made:
        assert not tags(markup) & {"script", "img"}
        assert "alert(1)" in markup
