"""The conformance kit: does a method work with every part of polyfed? For the library's methods and for your own.

In a test file, one line gives one test per property::

    test_mine = polyfed.testing.conformance(MyMethod())

or without pytest: ``polyfed.testing.check(MyMethod())``, which raises `ConformanceError` with everything it found. The
properties are in `polyfed.testing.properties`, one function each. Each repeats, as a question, an error that was found
in published code. The kit makes its own tiny federations and takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyfed.core.method import Method
from polyfed.errors import kind_and_line
from polyfed.testing.kit import ChangedValue, ConformanceKit, NotApplicable, Reduction
from polyfed.testing.observation import ConformanceError
from polyfed.testing.properties import FIRST, PROPERTIES

__all__ = [
    "PROPERTIES",
    "ChangedValue",
    "ConformanceError",
    "ConformanceKit",
    "Reduction",
    "check",
    "conformance",
    "violations",
]


def violations(method: Method, only: Sequence[str] | None = None, **options: Any) -> dict[str, str]:
    """What is wrong with a method: property -> what was found. Empty where all is well.

    Args:
        method: with the hyperparameters that are to be tested.
        only: names of properties; default: all that apply.
        options: see `ConformanceKit`.
    """
    return _violations(ConformanceKit(method=method, **options), only)


def _violations(kit: ConformanceKit, only: Sequence[str] | None = None) -> dict[str, str]:
    found = {}
    asked = applicable(kit) if only is None else only
    asked = sorted(asked, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    for name in asked:
        try:
            PROPERTIES[name](kit)
        except ConformanceError as error:
            found[name] = str(error)
            if name in FIRST:
                break
        except NotApplicable:
            continue
        except Exception as error:  # of a hook, called with what the property makes
            found[name] = f"{kit.name}: {kind_and_line(error)}"
    return found


def check(method: Method, **options: Any) -> None:
    """Check every property that applies; see `ConformanceKit` for the options.

    Raises:
        ConformanceError: names each property that does not hold, and what was found.
    """
    if found := violations(method, **options):
        raise ConformanceError("\n".join(f"{name}: {text}" for name, text in found.items()))


def conformance(method: Method, **options: Any) -> Callable[..., None]:
    """A pytest test with one case per property; see `ConformanceKit` for the options."""
    import pytest

    kit = ConformanceKit(method=method, **options)
    first_violations = functools.cache(lambda: _violations(kit, FIRST))  # asked of pytest's first case only

    @pytest.mark.parametrize("property_", applicable(kit))
    def test(property_: str) -> None:
        unsound = next(iter(first_violations()), property_)
        if unsound != property_:
            pytest.skip(f"not asked before {unsound} holds")
        try:
            PROPERTIES[property_](kit)
        except NotApplicable as reason:
            pytest.skip(f"{kit.name}: {reason}")

    return test


def applicable(kit: ConformanceKit) -> list[str]:
    """The properties that can be asked of this method with what the kit was given."""
    asked: Mapping[str, Any] = {
        "reductions": kit.reductions,
        "expected_bytes": kit.expected_bytes,
        "oracle": kit.reference_loss,
        "samples_counted_once": kit.counted,
        "hyperparameters_matter": kit.hyperparameters,
    }
    return [name for name in PROPERTIES if name not in kit.skip and (name not in asked or asked[name])]
