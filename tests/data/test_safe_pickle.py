"""Pickled dictionaries of arrays, read as data: what comes back, and that nothing of a hostile file is run."""

from __future__ import annotations

import contextlib
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyfed.data import safe_pickle
from polyfed.errors import ConfigError
from tests.helpers.refusals import refusal


def pickled(value: Any, protocol: int = 4) -> bytes:
    """What `numpy.savez(file, data=value)` writes behind the header of "data.npy", in a protocol of ours."""
    return pickle.dumps(np.array(value, dtype=object), protocol=protocol)


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12.0).reshape(3, 4).T,  # columns first
        np.arange(6, dtype=">i4"),
        np.array([True, False]),
        np.zeros((0, 5), dtype=np.float16),
        np.array(7),
        np.arange(300, dtype=np.int64),  # more than 255 bytes
    ],
    ids=lambda a: f"{a.dtype}-{a.shape}",
)
def test_arrays_come_back_as_they_were(array: np.ndarray, protocol: int) -> None:
    found = safe_pickle.read_arrays(pickled({"x": array, "again": array, "n": 3}, protocol), "a file")
    assert list(found) == ["x", "again", "n"]
    assert found["n"] is None
    for name in ("x", "again"):
        found_array = found[name]
        assert found_array is not None
        assert found_array.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found_array, array)
        assert found_array.flags.writeable


class Runs:
    """What pickle calls when it loads this."""

    def __init__(self, function: Any, *values: Any) -> None:
        self.made = function, values

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_file_that_runs_code_runs_nothing(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = pickled({"x": Runs(Path.touch, mark), "y": Runs(exec, f"open({str(mark)!r}, 'w')")}, protocol)
    with pytest.raises(ConfigError, match=r"read without running what it says, got .*numpy.savez\(file, x=x, y=y\)"):
        safe_pickle.read_arrays(hostile, "a file")
    assert not mark.exists()
    pickle.loads(hostile)  # the same bytes, where they are trusted
    assert mark.exists()


def of(*opcodes: tuple[str, bytes]) -> bytes:
    """A stream by hand."""
    codes = {opcode.name: opcode.code.encode("latin-1") for opcode in pickletools.opcodes}
    return b"\x80\x04" + b"".join(codes[name] + rest for name, rest in opcodes)


def word(text: str) -> tuple[str, bytes]:
    return "SHORT_BINUNICODE", bytes([len(text)]) + text.encode()


ARRAY = (word("numpy._core.multiarray"), word("_reconstruct"), ("STACK_GLOBAL", b""))
EMPTY_ARRAY = (*ARRAY, ("EMPTY_TUPLE", b""), ("REDUCE", b""))


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (b"", "pickle exhausted before seeing STOP"),
        (b"no pickle", "got "),
        (pickled([1, 2]), "something else"),
        (pickled({1: np.arange(3)}), "a key that is no word"),
        (pickled({"x": np.array(["a"])}), "an array of type 'U1'"),
        (pickled({"x": 1.5}), "the opcode BINFLOAT"),
        (of(word("os"), word("system"), ("STACK_GLOBAL", b"")), "the name 'os.system'"),
        (of(("GLOBAL", b"builtins\neval\n")), "the name 'builtins.eval'"),
        (of(("INST", b"os\nsystem\n")), "the opcode INST"),
        (of(word("x"), ("EMPTY_TUPLE", b""), ("REDUCE", b"")), "something that is no array"),
        (of(*EMPTY_ARRAY, ("EMPTY_TUPLE", b""), ("BUILD", b"")), "not enough values"),
        (of(("BINGET", b"\x07"), ("STOP", b"")), "opcodes that do not fit together"),
        (of(("TUPLE", b"")), "an end without its mark"),
        (of(("BININT1", b"\x01"), ("BININT1", b"\x01"), ("APPEND", b"")), "a int for a list"),
    ],
)
def test_anything_else_is_one_line(stream: bytes, problem: str) -> None:
    assert problem in refusal(lambda: safe_pickle.read_arrays(stream, "a file"))


@pytest.mark.parametrize(
    ("shape", "problem"), [((-1,), "an array of shape (-1,)"), ((9,), "cannot reshape"), (("a",), "of shape ('a',)")]
)
def test_a_shape_that_is_not_the_contents(shape: tuple[Any, ...], problem: str) -> None:
    state = (1, shape, np.dtype("i8"), False, bytes(16))
    inner = pickle.dumps(state, protocol=4)[2:-1]  # without its first and last opcode
    frame = inner[9:] if inner[:1] == b"\x95" else inner
    with pytest.raises(ConfigError, match="got") as caught:
        safe_pickle.read_arrays(of(*EMPTY_ARRAY) + frame + b"b.", "a file")
    assert problem in str(caught.value)


def test_every_altered_byte_is_read_or_refused() -> None:
    stream = bytearray(pickled({"x": np.arange(3, dtype=np.int16), "y": np.array([1])}))
    for place in range(len(stream)):
        for value in (0, 98):
            altered = bytes([*stream[:place], value, *stream[place + 1 :]])
            with contextlib.suppress(ConfigError):  # and no other error
                found = safe_pickle.read_arrays(altered, "a file")
                assert all(array is None or isinstance(array, np.ndarray) for array in found.values())
