"""Properties of a method with every client a federation of its own (`polyfed.engine.method_wrappers`)."""

from __future__ import annotations

from torch import Tensor

from polyfed.engine.federation import Federation
from polyfed.engine.method_wrappers import alone
from polyfed.testing import fixtures as worlds
from polyfed.testing.fixtures import LABELS, SIZES, draw
from polyfed.testing.kit import ConformanceKit

__all__ = ["alone_knows_nobody", "alone_with_one_client"]

_ONE = 1  # the client whose data stay as they are


def alone_with_one_client(kit: ConformanceKit) -> None:
    """Where there is one client, alone is the method, bit for bit."""
    among = kit.world(one=True, sizes=SIZES[:1], labels=LABELS[:1])
    together = kit.runs(among)
    separate = kit.runs(among, alone(kit.method))
    kit.same(
        worlds.state(together) | worlds.predictions(together),
        worlds.state(separate) | worlds.predictions(separate),
        "with one client, alone is not the method",
    )


def alone_knows_nobody(kit: ConformanceKit) -> None:
    """What comes of a client that is alone does not depend on the data of the others, and nothing is sent."""
    train = [draw(size, own, place) for place, (size, own) in enumerate(zip(SIZES, LABELS, strict=True))]
    others = [
        draw(size + 5, sorted({0, *own}), 10 + place)
        for place, (size, own) in enumerate(zip(SIZES, LABELS, strict=True))
    ]
    others[_ONE] = train[_ONE]
    before = kit.runs(kit.world(data=train), alone(kit.method))
    after = kit.runs(kit.world(data=others), alone(kit.method))
    kit.same(_of_one(before), _of_one(after), f"alone, client {_ONE} depends on the others' data")
    for record in before.history:
        sent = record["bytes_up"] + record["bytes_down"] + record["bytes_up_paper"]
        if sent:
            kit.fail(f"alone, {sent} bytes are counted in round {record['round']}, where nothing crosses")


def _of_one(federation: Federation) -> dict[str, Tensor]:
    """Everything of one client: its weights and state, what it would be sent, its server's state, its scores."""
    whole = worlds.state(federation) | worlds.predictions(federation) | worlds.sent(federation)
    marks = (f"client {_ONE}: ", f"to client {_ONE}: ", f"server: client {_ONE}: ")
    return {name: tensor for name, tensor in whole.items() if name.startswith(marks)}
