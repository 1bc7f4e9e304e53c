"""`run.compile`: what is compiled, how often, and that it comes to the same. PyTorch's own compiler takes a minute."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method
from polyfed.core.settings import Training
from polyfed.engine.federation import Federation
from polyfed.errors import ConfigError, RunError
from polyfed.methods import SCAFFOLD, FedProx, Local
from polyfed.testing.fixtures import all_state, difference
from tests.helpers import toys
from tests.helpers.flat_options import grouped

CLOSE, CLOSE_BF16 = 1e-5, 0.02  # of the largest entry
SIZES = [24, 20, 16, 17]  # of four clients; in batches of 8


def run(method: Method, net: str = "shallow", sizes: Sequence[int] = SIZES, **more: Any) -> Federation:
    """Clients of one network, vectorized, for three rounds."""
    members = toys.clients(["net"] * len(sizes), list(sizes), test=5)
    given = {"builders": {"net": toys.NETS[net]}, "classes": toys.CLASSES, "executor": "vectorized", **more}
    federation = Federation(members, method, Training(rounds=3, batch_size=8, lr=0.1), **grouped(**given))
    federation.run()
    return federation


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A compiler that changes nothing; for each function that it was given, how often this was called."""
    calls: list[int] = []

    def fake(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        place = len(calls)
        calls.append(0)

        def called(*given: Any) -> Any:
            calls[place] += 1
            return function(*given)

        return called

    monkeypatch.setattr(torch, "compile", fake)
    return calls


def test_full_batches_of_all_are_compiled_once(compiled: list[int]) -> None:
    """Two steps of four clients in three rounds; one of the first client, when the others are through."""
    plain = run(Local(), sizes=[24, 16, 16, 16])
    assert compiled == []
    found = run(Local(), sizes=[24, 16, 16, 16], compile=True)
    assert compiled == [2 * 3, 3]
    assert difference(all_state(plain), all_state(found)) is None


def test_masks_of_dropout_are_not_compiled(compiled: list[int]) -> None:
    run(Local(), "dropout", compile=True)
    assert compiled == []


class Numbered(FedProx):
    """A loss with a number that is another one in every round."""

    def receive(self, client: Client, message: Message) -> Context:
        return {**super().receive(client, message), "round": client.round}

    def loss(self, model: Any, batch: Batch, context: Context) -> Any:
        return super().loss(model, batch, context) * (1 + context["round"])


def test_numbers_in_a_context_are_those_of_the_round(compiled: list[int]) -> None:
    plain = run(Numbered(mu=0.1), sizes=[16] * 4)
    found = run(Numbered(mu=0.1), sizes=[16] * 4, compile=True)
    assert compiled == [2, 2, 2]
    assert difference(all_state(plain), all_state(found)) is None


def test_what_cannot_be_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        raise ValueError("no compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", refuse)
    expected = r"expected a loss that torch.compile takes \(run.compile\), got ValueError: no compiler$"
    with pytest.raises(RunError, match=expected):
        run(Local(), compile=True)


def test_only_what_is_vectorized_can_be_compiled() -> None:
    for executor in ("serial", "auto"):
        with pytest.raises(
            ConfigError, match=f"expected the executor 'vectorized' with compile = true, got '{executor}'"
        ):
            run(Local(), executor=executor, compile=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(
    ("method", "net", "precision", "close"),
    [
        (FedProx(mu=0.1), "bn", "float32", CLOSE),
        (SCAFFOLD(), "deep", "float32", CLOSE),
        (Local(), "shallow", "bf16", CLOSE_BF16),
    ],
)
def test_what_is_compiled_comes_to_the_serial_result(method: Method, net: str, precision: str, close: float) -> None:
    serial = run(method, net, executor="serial", precision=precision)
    plain = run(method, net, precision=precision)
    found = run(method, net, precision=precision, compile=True)
    assert difference(all_state(serial), all_state(found), close) is None
    assert difference(all_state(plain), all_state(found)) is not None, "nothing was compiled"
