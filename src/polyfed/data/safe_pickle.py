"""Arrays out of a pickled dictionary, read as data: nothing of it is imported, called or evaluated.

A pickle is a list of instructions, some of which name a function to call with values from the file; that is how a file
runs code. Here `pickletools` takes it apart into opcodes, and a small table knows what the few mean that describe a
dictionary of NumPy's arrays: values, lists, dictionaries, and the three names below, which stand for themselves and are
never looked up. Any other opcode or name ends the reading.
"""

from __future__ import annotations

import enum
import pickletools
import re
import struct
import tokenize
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyfed.errors import ConfigError, first_line

# What NumPy raises over bytes that are no array: headers are Python's own words; a size that is none, a lack of memory.
NO_ARRAY: tuple[type[Exception], ...] = (
    *(ValueError, EOFError, RuntimeError, MemoryError, SyntaxError, TypeError, OverflowError),
    *(tokenize.TokenError, zipfile.BadZipFile),
)


class _Name(enum.Enum):
    """What a file may name."""

    EMPTY = enum.auto()  # makes the array that a state is put into
    ARRAY = enum.auto()
    TYPE = enum.auto()


_NAMES = {
    "numpy.core.multiarray _reconstruct": _Name.EMPTY,
    "numpy._core.multiarray _reconstruct": _Name.EMPTY,
    "numpy ndarray": _Name.ARRAY,
    "numpy dtype": _Name.TYPE,
}
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PASSED_OVER = {"PROTO", "FRAME"}
_NUMBERS = re.compile(r"[biuf][1248]")
_MARK = object()


class _Type:
    """An array's type: numbers, or "O8" for objects; its byte order comes with its state."""

    def __init__(self, code: str) -> None:
        self.code, self.order = code, "|"

    def set(self, state: Any) -> None:
        self.order = {"<": "<", ">": ">"}.get(state[1], "|")

    def numbers(self) -> np.dtype[Any]:
        if not _NUMBERS.fullmatch(self.code):
            raise ValueError(f"an array of type '{str(self.code)[:20]}'")
        return np.dtype(f"{self.order}{self.code}")


class _Array:
    """An array: its numbers, or, of an array of objects, the list of these."""

    def __init__(self) -> None:
        self.content: NDArray[Any] | list[Any] | None = None

    def set(self, state: Any) -> None:
        _, shape, kind, columns_first, content = state
        if isinstance(content, list):
            self.content = content
            return
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"an array of shape {shape!r:.40}")
        flat = np.frombuffer(content, dtype=kind.numbers())
        values = flat.reshape(shape, order="F" if columns_first else "C")
        self.content = values.astype(flat.dtype.newbyteorder("="), order="C")  # also a copy that may be written into


def read_arrays(stream: bytes, where: object) -> dict[str, NDArray[Any] | None]:
    """The one dictionary in an array of objects, as ``numpy.savez(file, data={"x": x, "y": y})`` writes it.

    Its arrays of numbers; None for a value that is something else. where: the stream is from, for the message.
    """
    try:
        kept = _run(stream)
        content = kept.content if isinstance(kept, _Array) else None
        if not isinstance(content, list) or [type(value) for value in content] != [dict]:
            raise ValueError("something else")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, struct.error) as error:
        got = first_line(error) if isinstance(error, ValueError) else "opcodes that do not fit together"
        raise ConfigError(
            f"expected a dictionary of arrays in {where}, which is read without running what it says, got "
            f"{got}; save them there as numpy.savez(file, x=x, y=y)"
        ) from error
    return {
        key: value.content if isinstance(value, _Array) and isinstance(value.content, np.ndarray) else None
        for key, value in content[0].items()
    }


def _run(stream: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name == "STOP":
            return stack.pop()
        if name in _INTEGERS | _STRINGS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if name == "MEMOIZE" else int(str(argument))] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[int(str(argument))])
        elif name not in _PASSED_OVER:
            _build(name, argument, stack)
    raise ValueError("no end")


def _build(name: str, argument: Any, stack: list[Any]) -> None:
    if name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        return
    if name not in _BUILDERS:
        raise ValueError(f"the opcode {name}")
    _BUILDERS[name](stack, argument)


def _append(stack: list[Any], values: list[Any]) -> None:
    _last(stack, list).extend(values)


def _set_items(stack: list[Any], pairs: list[Any]) -> None:
    if not all(isinstance(key, str) for key in pairs[::2]):
        raise ValueError("a key that is no word")
    _last(stack, dict).update(zip(pairs[::2], pairs[1::2], strict=True))


def _pop_pair(stack: list[Any]) -> list[Any]:
    value = stack.pop()
    key = stack.pop()
    return [key, value]


def _look_up(stack: list[Any], name: Any) -> None:
    if name not in _NAMES:
        raise ValueError(f"the name '{str(name).replace(' ', '.')[:60]}'")
    stack.append(_NAMES[name])


def _call(stack: list[Any], _: Any) -> None:
    values = stack.pop()
    function = stack.pop()
    if function not in (_Name.EMPTY, _Name.TYPE):
        raise ValueError("something that is no array")
    stack.append(_Array() if function is _Name.EMPTY else _Type(values[0]))


def _set_state(stack: list[Any], _: Any) -> None:
    state = stack.pop()
    if not isinstance(stack[-1], _Array | _Type):
        raise ValueError("something that is no array")
    stack[-1].set(state)


_BUILDERS: dict[str, Callable[[list[Any], Any], None]] = {  # opcode -> function of the stack and its argument
    "MARK": lambda stack, _: stack.append(_MARK),
    "EMPTY_LIST": lambda stack, _: stack.append([]),
    "EMPTY_DICT": lambda stack, _: stack.append({}),
    "TUPLE": lambda stack, _: stack.append(tuple(_since_mark(stack))),
    "APPEND": lambda stack, _: _append(stack, [stack.pop()]),
    "APPENDS": lambda stack, _: _append(stack, _since_mark(stack)),
    "SETITEM": lambda stack, _: _set_items(stack, _pop_pair(stack)),
    "SETITEMS": lambda stack, _: _set_items(stack, _since_mark(stack)),
    "GLOBAL": _look_up,
    "STACK_GLOBAL": lambda stack, _: _look_up(stack, " ".join(_pop_pair(stack))),
    "REDUCE": _call,
    "BUILD": _set_state,
}


def _since_mark(stack: list[Any]) -> list[Any]:
    """What is above the last mark, which goes, too."""
    place = next((place for place in reversed(range(len(stack))) if stack[place] is _MARK), None)
    if place is None:
        raise ValueError("an end without its mark")
    values = stack[place + 1 :]
    del stack[place:]
    return values


def _last(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise ValueError(f"a {type(stack[-1]).__name__} for a {kind.__name__}")
    return stack[-1]
