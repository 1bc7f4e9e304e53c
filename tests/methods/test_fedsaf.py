"""FedSAF's own properties against NumPy by hand; its loss is in tests/testing/test_conformance.py."""

from __future__ import annotations

import functools

from polyfed.methods import FedSAF, Local
from tests.helpers import few_classes
from tests.helpers.toys import rounds, same

members = functools.partial(few_classes.members, architectures=few_classes.WITHOUT_NORM)


def test_one_class_has_no_structure() -> None:
    people = members(((0,), (1,), (2,), (2,)))
    ours, local = (rounds(m, people, rounds=3)[-1] for m in (FedSAF(structure_weight=2.5), Local()))
    assert all(same(ours.trained[i], local.trained[i]) for i in range(4))
    expected = "no batch held two classes that have a prototype, so that clients train as in local"
    assert FedSAF().remark(ours.record) == expected
