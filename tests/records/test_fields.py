"""What values of a run's files may be, and how one that does not fit is told."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from polyfed.records.fields import (
    Count,
    Figure,
    Flag,
    IfPresent,
    Loss,
    Number,
    Record,
    Text,
    count_between,
    number_between,
    validated,
)

INF = float("inf")
NAN = float("nan")


class Everything(Record):
    """A field of each kind."""

    number: IfPresent[Number] = None
    nullable: Number | None = None
    loss: IfPresent[Loss] = None
    figure: IfPresent[Figure] = None
    count: IfPresent[Count] = None
    flag: IfPresent[Flag] = None
    text: IfPresent[Text] = None
    share: IfPresent[Annotated[float, number_between(0, 1)]] = None
    few: IfPresent[Annotated[int, count_between(1, 3)]] = None
    unit: IfPresent[Literal["client", "sample"]] = None
    counts: list[Count] = []
    by_name: dict[str, list[Count]] = {}
    by_unit: dict[Literal["client", "sample"], Number] = {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("number", value) for value in (1, 1.5, -(2**63) + 1, NAN)),
        *(("loss", value) for value in (INF, 1e300, 3)),
        *(("figure", value) for value in (INF, -INF, 0.5, 1e30)),
        *(("count", value) for value in (0, -5, 2**63 - 1)),
        *(("share", value) for value in (0, 1, 0.5)),
        ("nullable", None),
        ("few", 3),
        ("unit", "client"),
        ("by_unit", {"sample": 2.5}),
    ],
)
def test_what_fits_stays_as_it_is(key: str, value: Any) -> None:
    found = getattr(validated(Everything, {key: value}), key)
    assert type(found) is type(value), "an integer does not become a float"
    assert found == value or value != value  # NaN


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"number": True}, "'number': expected a number, got True"),
        ({"number": INF}, "'number': expected a number, got inf"),
        ({"number": 2**63}, "'number': expected a number, got 9223372036854775808"),
        ({"number": None}, "'number': expected a value, got None"),
        ({"figure": 1e300}, "'figure': expected a number, got 1e+300"),
        ({"count": 1.0}, "'count': expected a whole number, got 1.0"),
        ({"flag": 0}, "'flag': expected true or false, got 0"),
        ({"text": 5}, "'text': expected a text, got 5"),
        ({"share": 1.5}, "'share': expected a number from 0 to 1, got 1.5"),
        ({"few": 0}, "'few': expected a whole number from 1 to 3, got 0"),
        ({"unit": "row"}, "'unit': expected 'client' or 'sample', got 'row'"),
        ({"counts": [0, "x"]}, "'counts[1]': expected a whole number, got 'x'"),
        ({"by_name": {"a": [0, None]}}, "'by_name.a[1]': expected a whole number, got None"),
        ({"by_unit": {"row": 1.0}}, "'by_unit': expected 'client' or 'sample', got 'row'"),
        ([1], "expected an object, got [1]"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(value: Any, says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the whole line is compared)
        validated(Everything, value)
    assert str(caught.value) == says


def test_a_long_or_deep_value_is_cut() -> None:
    for value in ("x" * 5000, 10**400, [[[[[[1]]]]]] * 200, {str(i): i for i in range(300)}):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            validated(Everything, {"flag": value})
        assert len(str(caught.value)) < 150
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        validated(Everything, {"by_name": {"n" * 300: 1}})
    assert len(str(caught.value)) < 150


def test_a_place_stands_before_the_key() -> None:
    with pytest.raises(ValueError, match=r"'entry\.count': expected"):
        validated(Everything, {"count": "x"}, "entry")
