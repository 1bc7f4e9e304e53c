"""Hypothesis strategies for damaged and hostile input: bytes with faults, structures with odd keys and values."""

from __future__ import annotations

import copy
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

ODD_NUMBERS = [0, 1, -1, 255, 2**31, 2**53 + 1, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e308]
ODD_NUMBERS += [float("nan"), float("inf"), float("-inf")]
ODD_TEXTS = ["", " ", "0", "-1", "nan", "local", "é\u2028", "a\x00b", "../outside", "/", "\ud83d\ude00", "9" * 5000]
ODD_TEXTS += ["n/" * 3000, "\x1b[31m", "csv:/dev/zero", "npz:" + "n" * 300, "$\\frac{", "os:system"]
PIECES = [b"\x00", b"\xff" * 8, b"\n", b'"', b"'", b",", b"{", b"]", b"=", b"\\u0000", b"1e999", b"NaN", b"null"]
PIECES += [b"99999999999999999999", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[" * 20000, b"../", b"PAR1", b"PK\x03\x04"]
PICKLES = [
    b"cposix\nsystem\n(S'touch EXECUTED'\ntR.",
    b"\x80\x04\x95\x26\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x0etouch EXECUTED\x85R.",
]

plain = st.none() | st.booleans() | st.sampled_from(ODD_NUMBERS) | st.sampled_from(ODD_TEXTS)
odd_values = plain | st.lists(plain, max_size=3) | st.dictionaries(st.sampled_from(ODD_TEXTS), plain, max_size=2)


@st.composite
def damaged(draw: st.DrawFn, data: bytes, times: int = 4) -> bytes:
    """The bytes with one to `times` faults: a changed byte, a cut end, a piece left out, doubled or put in."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, times))):
        place = draw(st.integers(0, len(out)))
        length = draw(st.integers(1, 32))
        kind = draw(st.sampled_from(["byte", "cut", "gap", "double", "piece"]))
        if kind == "byte" and place < len(out):
            out[place] = draw(st.integers(0, 255))
        elif kind == "cut":
            del out[place:]
        elif kind == "gap":
            del out[place : place + length]
        elif kind == "double":
            out[place:place] = out[place : place + length]
        else:
            out[place:place] = draw(st.sampled_from(PIECES))
    return bytes(out)


@st.composite
def altered(draw: st.DrawFn, value: Any, times: int = 3) -> Any:
    """A JSON structure with one to `times` changes: a value replaced, gone, nested, or under another key."""
    root = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, times))):
        parent, key = draw(st.sampled_from(_spots(root)))
        kind = draw(st.sampled_from(["replace", "remove", "nest", "rename"]))
        if kind == "replace" or parent is root:
            parent[key] = draw(odd_values)
        elif kind == "remove":
            del parent[key]
        elif kind == "nest":
            parent[key] = [parent[key]]
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(ODD_TEXTS))] = parent.pop(key)
    return root[""]


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below the value."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return []
    return [spot for key in keys for spot in [(value, key), *_spots(value[key])]]


@st.composite
def altered_head(draw: st.DrawFn, data: bytes) -> bytes:
    """Safetensors whose JSON header is altered; its length is right."""
    end = 8 + int.from_bytes(data[:8], "little")
    head = json.dumps(draw(altered(json.loads(data[8:end])))).encode()
    return len(head).to_bytes(8, "little") + head + data[end:]


def array_file(shape: str, kind: str, body: bytes) -> bytes:
    """A .npy file that claims this shape and type."""
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + body


array_files = st.builds(
    array_file,
    st.lists(st.sampled_from([0, 1, 2, 5, 2**20, 2**40]), max_size=4).map(lambda shape: str(tuple(shape)))
    | st.sampled_from(["((2, 5)", "(" * 300, "(2, 5'", "(-1,)"]),
    st.sampled_from(["<f4", "<i8", "|u1", "|O", "<U9", "<c8", "<M8[s]"]),
    st.binary(max_size=200) | st.sampled_from(PICKLES),
)


def archive(members: Mapping[str, bytes]) -> bytes:
    """A zip file, as of `numpy.savez`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return out.getvalue()
