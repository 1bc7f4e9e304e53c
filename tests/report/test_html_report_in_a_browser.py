"""The page in a real browser, from a file URL: it draws, sorts, toggles, tells and switches, and loads nothing.

Skipped where no Chromium is found; `make browser` installs one (Debian) and runs this. The screenshots lie in the
folder that POLYFED_SCREENSHOTS names, else in pytest's own.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyfed.report.comparison import compare_runs
from polyfed.report.html_report import write_page
from polyfed.report.run_records import load_runs
from tests.helpers.browser import Browser, program

EVIL = "</script><img src=x onerror=alert(1)>"
FOUND = program()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason="no chromium on the path; `make browser` installs it"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert FOUND is not None
    with Browser(FOUND, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def opened(browser: Browser, two_by_two: Path, make: Any, tmp_path: Path) -> Browser:
    """A page of three methods, one of them with a name that would be markup; analyses of one."""
    make("odd", "fedavg", 0, (0.2, 0.7, 0.55), label=EVIL)
    table = [{"id": n, "architecture": f"net{1 - n}", "samples": 10 + n, "accuracy": 0.5} for n in (0, 1)]
    for row, labels in zip(table, ({"0": 4, "2": 6}, {"1": 11}), strict=True):
        row.update(parameters=1234, labels=labels)
    path = two_by_two / "local-0" / "result.json"
    about = {"clients_table": table, "class_names": ["cat", "dog", EVIL]}
    path.write_text(json.dumps(json.loads(path.read_text()) | about))
    (two_by_two / "fedgh-0" / "analysis").mkdir()
    content = {"head": {"matrix": [[1, 0.25], [0.25, 1]], "labels": [EVIL, "b"], "row_axis": "client"}}
    (two_by_two / "fedgh-0" / "analysis" / "cka.json").write_text(json.dumps(content))
    runs = load_runs(two_by_two)
    file = write_page(runs, compare_runs(runs), tmp_path)
    browser.complaints.clear()
    browser.requests.clear()
    browser.sized(1200)
    browser.open(file.as_uri())
    return browser


@pytest.fixture
def crowded(browser: Browser, make: Any, tmp_path: Path) -> Browser:
    """A page of twelve methods with long names, twenty clients with networks of their own."""
    networks = [f"timm:a_network_with_a_long_name_{n}.in1k" for n in range(20)]
    scores = [0.3 + 0.02 * n for n in range(20)]
    table = [{"id": n, "architecture": networks[n], "samples": 50 * n, "accuracy": scores[n]} for n in range(20)]
    kept = {"clients_table": table, "accuracy_per_client": scores}
    kept["accuracy_per_architecture"] = {name: {"mean": score} for name, score in zip(networks, scores, strict=True)}
    for number in range(12):
        label = f"fedgh-with-a-header-that-was-trained-for-a-hundred-epochs-{number}" if number else None
        make(str(number), "fedgh" if number else "local", 0, (0.5, 0.5 + 0.01 * number), label=label, **kept)
    runs = load_runs(make.root)
    file = write_page(runs, compare_runs(runs), tmp_path)
    browser.complaints.clear()
    browser.open(file.as_uri())
    return browser


def names(page: Browser) -> list[str]:
    return page.value("[...document.querySelectorAll('table')[0].tBodies[0].rows].map(r => r.cells[0].textContent)")


def text(page: Browser, selector: str) -> str:
    return page.value(f"document.querySelector({json.dumps(selector)}).textContent")


CURVES = 'figure svg[aria-label^="Curves"]'
CLIENTS = 'figure svg[aria-label^="Accuracy of every"]'
TIP = "document.querySelector('.tip:not([hidden])')?.innerText ?? ''"


def choose(page: Browser, label: str, value: str) -> None:
    page.value(
        "(() => { const labels = [...document.querySelectorAll('label')];"
        f" const select = labels.find(l => l.textContent.startsWith('{label}')).querySelector('select');"
        f" select.value = '{value}';"
        " select.dispatchEvent(new Event('change')); })()"
    )


def test_it_opens_without_a_complaint_or_a_request(opened: Browser, tmp_path: Path) -> None:
    folder = Path(os.environ.get("POLYFED_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, dark in (("wide", 1200, False), ("dark", 1200, True), ("narrow", 360, False)):
        opened.sized(width, dark=dark)
        opened.screenshot(folder / f"report-{name}.png")
        assert (folder / f"report-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert opened.value("document.documentElement.scrollWidth <= innerWidth"), f"{name}: the page scrolls sideways"
    assert opened.complaints == []
    assert [url.partition(":")[0] for url in opened.requests] == ["file"]  # the page itself
    assert opened.value("document.querySelectorAll('img, iframe, object').length") == 0
    assert EVIL in names(opened)


# texts that stick out of their figure
CUT = """(() => {
  const found = [];
  for (const text of document.querySelectorAll("svg text")) {
    const [inner, outer] = [text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()];
    const across = Math.max(outer.left - inner.left, inner.right - outer.right);
    const down = Math.max(outer.top - inner.top, inner.bottom - outer.bottom);
    if (inner.width && Math.max(across, down) > 1) found.push(text.textContent);
  }
  return found;
})()"""


def test_no_label_is_cut_off_and_wide_tables_scroll(crowded: Browser) -> None:
    crowded.sized(400)
    crowded.value("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    crowded.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert crowded.value("document.documentElement.scrollWidth") <= 400
    assert crowded.value(CUT) == []
    wider = "document.querySelector('.wide').scrollWidth > document.querySelector('.wide').clientWidth"
    assert crowded.value(wider)
    assert crowded.complaints == []


def choose_a_seed(opened: Browser) -> None:
    """The clients of the first seed, in place of their means over all."""
    found = "[...document.querySelectorAll('select')].find(one => one.options[0].text === 'all, mean')"
    choose = "select.value = select.options[1].value; select.dispatchEvent(new Event('change')); return 0;"
    opened.value(f"(select => {{ {choose} }})({found})")


def test_strips_tell_who_holds_which_classes(opened: Browser) -> None:
    choose_a_seed(opened)
    strips = opened.value("[...document.querySelectorAll('.strip')].map(one => one.getAttribute('aria-label'))")
    assert strips == [f"cat: 4, {EVIL}: 6", "dog: 11"]
    cells = "[...document.querySelectorAll('.strip')].map(one => one.querySelectorAll('.held').length)"
    assert opened.value(cells) == [2, 1]
    opened.click("details thead th:last-child button")
    assert opened.value("document.querySelector('.strip').getAttribute('aria-label')") == f"cat: 4, {EVIL}: 6"
    assert opened.complaints == []


def test_the_table_sorts_by_click_and_by_keyboard(opened: Browser) -> None:
    start = names(opened)
    assert start[0] == "local"
    head = "table thead th:nth-child(3)"
    assert text(opened, head) == "accuracy"
    opened.click(f"{head} button")
    assert names(opened) == ["fedgh", EVIL, "local"]
    assert opened.value(f"document.querySelector('{head}').ariaSort") == "descending"
    opened.press("Enter", 13)
    assert names(opened) == ["local", EVIL, "fedgh"]
    assert opened.value(f"document.querySelector('{head}').ariaSort") == "ascending"
    opened.click("table thead th:nth-child(1) button")
    assert names(opened)[1:] == ["fedgh", "local"]
    assert opened.value(f"document.querySelector('{head}').ariaSort") == "none"


def test_a_line_goes_and_comes_back(opened: Browser) -> None:
    lines = f"[...document.querySelectorAll('{CURVES} g')].map(g => g.dataset.name)"
    button = ".legend button[data-name=fedgh]"
    assert set(opened.value(lines)) == {"local", "fedgh", EVIL}
    opened.click(button)
    assert set(opened.value(lines)) == {"local", EVIL}
    assert opened.value(f"document.querySelector('{button}').ariaPressed") == "false"
    opened.click(button)
    assert set(opened.value(lines)) == {"local", "fedgh", EVIL}
    dashes = f"[...document.querySelectorAll('{CURVES} .line')].map(l => l.getAttribute('stroke-dasharray'))"
    assert len(set(opened.value(dashes))) == 3  # readable without color


def test_hovering_and_arrow_keys_tell_a_point(opened: Browser) -> None:
    assert opened.value(TIP) == ""
    x, y = opened.center(f"{CURVES} g[data-name=fedgh] .mark:last-child")
    opened.hover(x, y)
    assert opened.value(TIP).split("\n") == ["fedgh", "round 3", "65.00 %", "60.00 % to 70.00 % over 2 seeds"]
    opened.value(f"document.querySelector('{CURVES}').focus()")
    opened.press("ArrowLeft", 37)
    assert opened.value(TIP).split("\n")[:3] == ["fedgh", "round 2", "50.00 %"]
    opened.hover(2, 2)
    assert opened.value(TIP) == ""


def test_axes_and_figures_switch(opened: Browser) -> None:
    label = f"{CURVES} [data-label=x]"
    assert text(opened, label) == "round"
    choose(opened, "Axis", "bytes")
    assert text(opened, label) == "bytes sent, both ways [KiB]"
    choose(opened, "Axis", "seconds")
    assert text(opened, label) == "training time [s]"
    assert opened.complaints == []


def test_the_clients_follow_the_order_of_their_table(opened: Browser) -> None:
    choose_a_seed(opened)
    ticks = f"[...document.querySelectorAll('{CLIENTS} text[text-anchor=middle]')].slice(0, -1).map(t => t.textContent)"
    assert opened.value(ticks) == ["0", "1"]
    opened.click("details thead th:nth-child(2) button")
    assert opened.value(ticks) == ["1", "0"]  # by architecture: net0 is client 1's
    x, y = opened.center(f"{CLIENTS} g[data-name=local] .mark")
    opened.hover(x, y)
    assert opened.value(TIP).split("\n") == ["local", "client 1: 60.00 %"]


def test_heat_maps_tell_their_cells(opened: Browser) -> None:
    titles = "[...document.querySelectorAll('.heat td[title]')].map(one => one.title)"
    assert opened.value(titles)[1] == f"0.25: client {EVIL},  b"
    shades = "[...document.querySelectorAll('.heat td[title]')].map(one => getComputedStyle(one).backgroundColor)"
    assert len(set(opened.value(shades))) == 2
    assert opened.complaints == []


def test_paper_is_white_and_has_no_controls(opened: Browser, tmp_path: Path) -> None:
    opened.sized(1200, dark=True)
    opened.printed(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    opened.ask(
        "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert opened.value(style.format(".controls", "display")) == "none"
    assert opened.value(style.format("body", "backgroundColor")) == "rgb(255, 255, 255)"
    assert opened.complaints == []
