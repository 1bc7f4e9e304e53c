"""The plain run that most properties read: what was sent and aggregated on the way, and the loss of single batches."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from polyfed.core.client import Client
from polyfed.core.message import Message, clone, flatten, shallow_copy
from polyfed.core.method import Batch, Context, Method, StepResult
from polyfed.core.randomness import keep_global_rng
from polyfed.core.server import Server
from polyfed.engine.federation import Federation
from polyfed.errors import PolyfedError, RunError, kind_and_line
from polyfed.testing import fixtures as worlds
from polyfed.testing.fixtures import SHORT, TinyFederation
from polyfed.testing.spy import Spy, global_draws


class ConformanceError(AssertionError):
    """A property does not hold."""


@dataclass(frozen=True)
class AggregationScene:
    """The server with all uploads before it."""

    method: Method
    server: Server
    uploads: Mapping[int, Message]
    federation: Federation

    def snapshot(self) -> AggregationScene:
        """The same in memory of its own."""
        server = copy_server(self.server)
        server.state = clone(self.server.state)
        uploads = {number: clone(message) for number, message in self.uploads.items()}
        return dataclasses.replace(self, server=server, uploads=uploads)

    def after(self, uploads: Mapping[int, Message], server: Server | None = None) -> Server:
        """A copy of the server after aggregating `uploads`; the real one stays as it is."""
        trial = copy_server(self.server if server is None else server)
        self.method.aggregate(trial, {number: clone(message) for number, message in uploads.items()})
        return trial


def copy_server(server: Server) -> Server:
    """A copy of the server with a state of its own."""
    trial = copy.copy(server)
    trial.state = shallow_copy(server.state)
    trial.log = dict(server.log)
    return trial


@dataclass
class Observation:
    """A run, watched.

    Args:
        method: what runs. among: whose clients. oracle: the loss again by independent means, if there is any.

    Attributes:
        federation: after its run; None where it could not be made. error: what ended the run.
        scenes: the aggregations, as they were before each.
        first_weights: all clients' weights after the first round.
        impure, off: what is wrong with the loss in the second step of a client in the second round; under torch.func
            it is asked of one client of each architecture, else of all.
    """

    method: Method
    among: TinyFederation
    oracle: Callable[[Any, Batch, Context], Any] | None
    federation: Federation | None = None
    error: PolyfedError | None = None
    scenes: list[AggregationScene] = field(default_factory=list)
    first_weights: dict[str, Tensor] = field(default_factory=dict)
    impure: str = ""
    off: str = ""
    looked_at: set[str] = field(default_factory=set)
    client: Client | None = None
    step: int = 0

    def run(self) -> None:
        """Run, and note what is seen."""
        hooks = {name: getattr(self, name) for name in ("receive", "gradients", "aggregate")}
        speech = {name: functools.partial(self.speak, name) for name in ("broadcast", "upload")}
        try:
            self.federation = self.among.federation(Spy(self.method, **hooks, **speech), SHORT)
            self.federation.run()
        except PolyfedError as error:
            self.error = error

    def speak(self, hook: str, call: Callable[..., Message], first: Any, second: Any) -> Message:
        """Around broadcast and upload."""
        if hook == "broadcast" and first.round == 2 and not self.first_weights and self.federation is not None:
            self.first_weights = {name: t.clone() for name, t in worlds.weights(self.federation).items()}
        message = call(first, second)
        self._all_tensors(hook, "a message", message)
        self._all_tensors("the method", "a state", first.state)
        return message

    def aggregate(self, call: Callable[..., None], server: Server, uploads: Mapping[int, Message]) -> None:
        """Around the hook of that name."""
        assert self.federation is not None
        self.scenes.append(AggregationScene(self.method, server, dict(uploads), self.federation).snapshot())
        call(server, uploads)
        self._all_tensors("aggregate", "the server's state", server.state)

    def receive(self, call: Callable[..., Context], client: Client, message: Message) -> Context:
        """Around the hook of that name."""
        self.client = client
        self.step = 0
        return call(client, message)

    def gradients(self, call: Callable[..., StepResult], model: Any, batch: Batch, context: Context) -> StepResult:
        """Around the hook of that name."""
        self.step += 1
        if self.client is not None and self.client.round == 2 and self.step == 2:
            buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
            with keep_global_rng():
                self._look(self.client.architecture, model, batch, context)
            for buffer, before in buffers:
                buffer.copy_(before)  # the statistics of BatchNorm, which a look has moved
        return call(model, batch, context)

    def _look(self, architecture: str, model: Any, batch: Batch, context: Context) -> None:
        self.off = self.off or self._fault(self._ask_the_oracle, model, batch, context)
        self.impure = self.impure or self._fault(self._ask_again, model, batch, context)
        if architecture not in self.looked_at:
            self.looked_at.add(architecture)
            self.impure = self.impure or self._fault(self._ask_torch_func, model, batch, context)

    def _all_tensors(self, who: str, where: str, message: Message) -> None:
        """Whether a message or a state holds nothing but tensors."""
        try:
            flatten(message)
        except RunError as error:
            self._fail(f"{who} puts something else than tensors into {where}: {error}")

    def _fault(self, look: Callable[..., None], *arguments: Any) -> str:
        """What a look finds; "" where all is well."""
        try:
            look(*arguments)
        except ConformanceError as error:
            return str(error)
        except Exception as error:  # of the loss or the oracle, called with what the property makes
            return f"{self.method.name}: {kind_and_line(error)}"
        return ""

    def _fail(self, text: str) -> NoReturn:
        raise ConformanceError(f"{self.method.name}: {text}")

    def _same(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], text: str) -> None:
        if found := worlds.difference(a, b, 1e-5):
            self._fail(f"{text}: {found}")

    def _ask_again(self, model: Any, batch: Batch, context: Context) -> None:
        draws = global_draws()
        first, second = (_loss(self.method, model, batch, context) for _ in range(2))
        if not torch.equal(first, second):
            self._fail(f"the loss of one batch is {first.item():.6g} and, asked again, {second.item():.6g}")
        if global_draws() != draws:
            self._fail("the loss draws from a global generator; make all draws in `inputs`")

    def _ask_torch_func(self, model: Any, batch: Batch, context: Context) -> None:
        whole = _Whole(self.method, model)
        parameters = {name: p.detach().clone() for name, p in whole.named_parameters() if p.requires_grad}

        def value(weights: Mapping[str, Tensor]) -> Tensor:
            result: Tensor = torch.func.functional_call(whole, dict(weights), (batch, context))
            return result

        leaves = {name: p for name, p in whole.named_parameters() if p.requires_grad}
        loss = _loss(self.method, model, batch, context)
        plain = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        expected = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(leaves.items(), plain, strict=True)}
        try:
            self._same(torch.func.grad(value)(parameters), expected, "torch.func.grad gives another gradient")
            two = {name: torch.stack([p, 0.9 * p]) for name, p in parameters.items()}
            found = torch.func.vmap(value)(two)
        except ConformanceError:
            raise
        except Exception as error:
            self._fail(f"the loss does not run under torch.func: {kind_and_line(error)}")
        each = torch.stack([value({name: p[i] for name, p in two.items()}) for i in range(2)])
        self._same({"loss": found}, {"loss": each}, "the loss of two clients at once is another than one by one")

    def _ask_the_oracle(self, model: Any, batch: Batch, context: Context) -> None:
        if self.oracle is None:
            return
        found = float(self.method.gradients(model, batch, context).loss)
        expected = float(self.oracle(model, batch, context))
        if not math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-5):  # nor is NaN close to NaN
            self._fail(f"the loss is {found:.7g}, the oracle says {expected:.7g}")


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
