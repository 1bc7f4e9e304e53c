"""The loss of one batch: a pure function, equal to that of an oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message
from polyfed.core.method import Batch, Context, Method, StepResult
from polyfed.errors import PolyfedError, kind_and_line
from polyfed.testing.fixtures import SHORT
from polyfed.testing.kit import ConformanceError, ConformanceKit, NotApplicable
from polyfed.testing.spy import Spy, global_draws


class _Whole(nn.Module):
    """A network and its loss as one module, for `torch.func`."""

    def __init__(self, method: Method, model: nn.Module) -> None:
        super().__init__()
        self.method = method
        self.model = model

    def forward(self, batch: Batch, context: Context) -> Tensor:
        return _loss(self.method, self.model, batch, context)


def _loss(method: Method, model: nn.Module, batch: Batch, context: Context) -> Tensor:
    outcome = method.loss(model, batch, context)
    return outcome[0] if isinstance(outcome, tuple) else outcome


def _look_at_steps(kit: ConformanceKit) -> dict[str, str]:
    """What is wrong with the loss, by property; in the second step of every client in the second round."""
    found: dict[str, str] = {}
    place = {"step": 0, "round": 0}

    def receive(call: Callable[..., Context], client: Client, message: Message) -> Context:
        place.update(step=0, round=client.round)
        return call(client, message)

    def gradients(call: Callable[..., StepResult], model: Any, batch: Batch, context: Context) -> StepResult:
        place["step"] += 1
        if place["step"] == 2 and place["round"] == 2:
            for look in (_look_whether_pure, _ask_the_oracle):
                try:
                    look(kit, model, batch, context)
                except ConformanceError as error:
                    found.setdefault(look.__name__, str(error))
        return call(model, batch, context)

    federation = kit.usual.federation(Spy(kit.method, receive=receive, gradients=gradients), SHORT)
    try:
        federation.run()
    except PolyfedError as error:
        raise ConformanceError(f"{kit.name}: {error}") from error
    return found


def _raise_what_was_seen(kit: ConformanceKit, look: Callable[..., None]) -> None:
    if "steps" not in kit.seen:
        kit.seen["steps"] = _look_at_steps(kit)
    if look.__name__ in kit.seen["steps"]:
        raise ConformanceError(kit.seen["steps"][look.__name__])


def loss_is_pure(kit: ConformanceKit) -> None:
    """The same again when called again; a function of parameters, batch and context under torch.func, also for many."""
    _raise_what_was_seen(kit, _look_whether_pure)


def oracle(kit: ConformanceKit) -> None:
    """The loss equals the same by independent means, after a step away from where the client began."""
    if kit.reference_loss is None:
        raise NotApplicable("no oracle given")
    _raise_what_was_seen(kit, _ask_the_oracle)


def _look_whether_pure(kit: ConformanceKit, model: Any, batch: Batch, context: Context) -> None:
    draws = global_draws()
    first, second = (_loss(kit.method, model, batch, context) for _ in range(2))
    if not torch.equal(first, second):
        kit.fail(f"the loss of one batch is {first.item():.6g} and, asked again, {second.item():.6g}")
    if global_draws() != draws:
        kit.fail("the loss draws from a global generator; make all draws in `inputs`")
    whole = _Whole(kit.method, model)
    parameters = {name: p.detach().clone() for name, p in whole.named_parameters() if p.requires_grad}

    def value(weights: Mapping[str, Tensor]) -> Tensor:
        result: Tensor = torch.func.functional_call(whole, dict(weights), (batch, context))
        return result

    leaves = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    plain = torch.autograd.grad(first, list(leaves.values()), allow_unused=True)
    expected = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(leaves.items(), plain, strict=True)}
    try:
        kit.same(torch.func.grad(value)(parameters), expected, "torch.func.grad gives another gradient", 1e-5)
        two = {name: torch.stack([p, 0.9 * p]) for name, p in parameters.items()}
        found = torch.func.vmap(value)(two)
    except ConformanceError:
        raise
    except Exception as error:
        kit.fail(f"the loss does not run under torch.func: {kind_and_line(error)}")
    each = torch.stack([value({name: p[i] for name, p in two.items()}) for i in range(2)])
    kit.same({"loss": found}, {"loss": each}, "the loss of two clients at once is another than one by one", 1e-5)


def _ask_the_oracle(kit: ConformanceKit, model: Any, batch: Batch, context: Context) -> None:
    if kit.reference_loss is None:
        return
    found = float(_loss(kit.method, model, batch, context).detach())
    expected = float(kit.reference_loss(model, batch, context))
    if abs(found - expected) > 1e-5 * max(1.0, abs(expected)):
        kit.fail(f"the loss is {found:.7g}, the oracle says {expected:.7g}")
