"""Text from elsewhere (a run folder, a node, a data set), made harmless where it is shown.

A terminal obeys control characters, a spreadsheet computes cells, a browser shows the HTML in a page of Markdown, and
all of them turn text round: none should by what a stranger called a class.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

__all__ = [
    "client_text",
    "clients_text",
    "csv_text",
    "html_text",
    "json_text",
    "markdown_text",
    "one_line",
    "visible",
    "without_passwords",
]

_KEPT = "\n\t"
_LONGEST_NAME = 60  # characters of a client's name beside its number
_BREAKING = "\u2028\u2029"  # ends of lines and paragraphs
_REVERSING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # turn the order of text round
_COMPUTED = ("=", "+", "-", "@")  # what a spreadsheet takes for the beginning of a formula, also behind blanks
# What stands before the last @ of an address, whose password may hold any sign; a port and a path are no password. A
# path has one slash of two left. An address without any has a port behind it.
_PASSWORD = re.compile(
    r"(\w:/{1,2})(?:[^\s/?#]*|[^\s/?#@:]*:(?!\d{1,5}[/?#])\S*)@|(?<![^\s=('\"])()[\w.+-]+:[^\s/]+@(?=[\w.-]+:\d)"
)
_TOKEN = re.compile(
    r"([?&;][\w.-]*(?:token|key|secret|passw|pwd|sig|auth|credential)[\w.-]*=)[^&;#\s'\"]+", re.IGNORECASE
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE | re.ASCII)


def without_passwords(text: str) -> str:
    """The text with addresses in it that anybody may read: no user, no password, no token.

    >>> without_passwords("no answer from http://ana:secret@host:9/?token=secret&page=1")
    'no answer from http://***@host:9/?token=***&page=1'
    """
    if "@" in text:
        text = _PASSWORD.sub(r"\1***@", text)
    return _TOKEN.sub(r"\1***", text) if "=" in text else text


def visible(text: str) -> str:
    r"""The text with all control characters but line ends and tabs written out, and what turns text round.

    Addresses in it are `without_passwords`.

    >>> visible("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    text = without_passwords(text)
    if text.isascii() and text.replace("\n", " ").replace("\t", " ").isprintable():
        return text
    shown = []
    for character in text:
        if _is_control(character):
            number = ord(character)
            shown.append(f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}")
        else:
            shown.append(character)
    return "".join(shown)


def one_line(text: str) -> str:
    r"""The text on one line, visible.

    >>> one_line("north\n  \x1b[2Jwest")
    'north \\x1b[2Jwest'
    """
    return visible(" ".join(text.split()))


def client_text(number: int, name: str = "", network: str = "") -> str:
    """A client in a message: its number, and what is known of it.

    Args:
        name: what it is called, a folder, say; "" for none. network: its architecture, where that matters.

    >>> client_text(3), client_text(3, "north"), client_text(3, "north", "mlp-16-32")
    ('client 3', "client 3 ('north')", "client 3 ('north', 'mlp-16-32')")
    """
    known = ", ".join(f"'{one_line(text):.{_LONGEST_NAME}}'" for text in (name, network) if text)
    return f"client {number} ({known})" if known else f"client {number}"


def clients_text(numbers: Iterable[int], names: Sequence[str] = ()) -> str:
    """Several clients in a message, in order; names: of all clients, or none.

    >>> clients_text({3, 1}), clients_text([0, 1], ["north", ""])
    ('1, 3', "0 ('north'), 1")
    """
    titles = [client_text(number, names[number] if number < len(names) else "") for number in sorted(numbers)]
    return ", ".join(title.removeprefix("client ") for title in titles)


def _is_control(character: str) -> bool:
    if character in _REVERSING or character in _BREAKING:
        return True
    return character not in _KEPT and unicodedata.category(character) in ("Cc", "Cs")


def html_text(text: str) -> str:
    """The text for HTML and SVG, also within quotation marks."""
    return escape(visible(text))


def json_text(value: Any, indent: int | None = None, sort_keys: bool = False) -> str:
    r"""JSON for files that people read: letters as they are, control characters as JSON writes them out.

    >>> json_text(["größer", "a\u202eb"])
    '["größer", "a\\u202eb"]'
    """
    text = json.dumps(value, indent=indent, sort_keys=sort_keys, ensure_ascii=False)
    return "".join(f"\\u{ord(character):04x}" if _is_control(character) else character for character in text)


def markdown_text(text: str) -> str:
    r"""The text on one line, in which nothing is HTML, a cell's end, a link or an image.

    >>> markdown_text("a|b <img src=x>\n![c](d)")
    'a\\|b &lt;img src=x> ![c]\\(d)'
    """
    plain = one_line(text)
    plain = re.sub(r"&(?=#?\w+;)", "&amp;", plain).replace("<", "&lt;")
    return plain.replace("|", "\\|").replace("](", "]\\(").replace("][", "]\\[")


def csv_text(heads: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    r"""Lines under a heading; None and what a row lacks are empty. No cell is computed: an apostrophe marks it as text.

    >>> csv_text(["name", "share"], [{"name": "=1+1", "share": -1.5}, {"name": "-2"}])
    "name,share\n'=1+1,-1.5\n-2,\n"
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(map(_cell, heads))
    writer.writerows([_cell(row.get(head)) for head in heads] for row in rows)
    return stream.getvalue()


def _cell(value: Any) -> Any:
    """A cell's content: numbers stay what they are, also where they come as text."""
    if not isinstance(value, str):
        return value if value is None or isinstance(value, int | float) else _cell(str(value))
    text = visible(value)
    return f"'{text}" if _is_computed(text) and not _NUMBER.fullmatch(text) else text


def _is_computed(text: str) -> bool:
    """Whether a spreadsheet may take a cell for a formula; it may do so behind blanks, and with signs of full width."""
    wide = unicodedata.normalize("NFKC", text)
    shown = itertools.dropwhile(lambda c: c.isspace() or unicodedata.category(c) == "Cf", wide)
    return wide.startswith(tuple(_KEPT)) or next(shown, "") in _COMPUTED
