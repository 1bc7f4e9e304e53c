"""The plain run that most properties read: a `Spy` hands every call on to the method, and lets somebody look on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.core.client import Client, PublicData
from polyfed.core.message import Message, clone, flatten, shallow_copy
from polyfed.core.method import Batch, Context, Method, StepResult
from polyfed.core.randomness import global_draws, keep_global_rng
from polyfed.core.server import Server
from polyfed.engine.federation import Federation
from polyfed.errors import PolyfedError, RunError, kind_and_line
from polyfed.functional.modes import has_batchnorm
from polyfed.testing import fixtures
from polyfed.testing.fixtures import SHORT, TinyFederation

HOOKS = [name for name, hook in vars(Method).items() if isinstance(hook, FunctionType) and not name.startswith("_")]

Around = Callable[..., Any]  # (call, *arguments) -> result; it decides whether to call


class Spy(Method):
    """Passes every hook on to `inner`, through the function given for it, or for `every` hook.

    Args:
        inner: the method.
        every: around all hooks, with the hook's name first: (name, call, *arguments). around: hook -> function.
    """

    def __init__(self, inner: Method, every: Around | None = None, **around: Around) -> None:
        vars(self).update(inner=inner)
        for hook in HOOKS:
            call = getattr(inner, hook)
            if hook in around:
                vars(self)[hook] = _through(around[hook], call)
            elif every is not None:
                vars(self)[hook] = _through(every, hook, call)
            else:
                vars(self)[hook] = call


def _of_inner(name: str) -> property:
    return property(lambda spy: getattr(vars(spy)["inner"], name))


for _name in vars(Method):
    if _name not in HOOKS and not _name.startswith("_"):
        setattr(Spy, _name, _of_inner(_name))


def _through(function: Around, *first: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: function(*first, *arguments, **named)


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


class Observation:
    """The plain run, watched: what a method must not do is noted at every hook.

    Args:
        oracle: the loss again by independent means, if there is one.

    Attributes:
        federation: after its run; None where it could not be made. error: what ended the run.
        scenes: the aggregations, as they were before each.
        sent: client -> what came down to it in each main exchange.
        offenses: (kind, what was seen): "written" into what was given, "draws" from a global generator, "alias" of
            another's memory, "broadcast" that is not repeatable, "state" in the method object; "impure",
            "weights" of rows that do not count and "oracle" of the loss in the second step of each client's second
            round, under torch.func of one client of each network.
    """

    def __init__(
        self, method: Method, clients: TinyFederation, oracle: Callable[[Any, Batch, Context], Any] | None
    ) -> None:
        self.method = method
        self.clients = clients
        self.oracle = oracle
        self.federation: Federation | None = None
        self.error: PolyfedError | None = None
        self.scenes: list[AggregationScene] = []
        self.sent: dict[int, list[dict[str, Tensor]]] = {}
        self.offenses: dict[tuple[str, str], None] = {}
        self._as_sent: list[tuple[str, Tensor, Tensor]] = []
        self._networks: list[nn.Module] = []
        self._architectures: set[str] = set()  # those whose loss has been called under torch.func
        self._client: Client | None = None
        self._step = 0
        self._is_running = False  # properties ask the method again afterwards, which is not watched

    def run(self) -> None:
        """Run, and note what is seen."""
        before = {name: repr(value) for name, value in vars(self.method).items()}
        try:
            self._is_running = True
            self.federation = self.clients.federation(Spy(self.method, self._every), SHORT, loggers=[self])
            self.federation.run()
        except PolyfedError as error:
            self.error = error
        finally:
            self._is_running = False
        for name, value in vars(self.method).items():
            if before.get(name) != repr(value):
                self._note(
                    "state",
                    f"it keeps '{name}' on the method object, which is another one after a resume, in a worker or at a "
                    "node; keep a tensor in client.state or server.state",
                )

    def _note(self, kind: str, text: str) -> None:
        self.offenses[kind, text] = None

    def _every(self, hook: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if not self._is_running:
            return call(*arguments)
        given = [(where, t, t.detach().clone()) for one in arguments for where, t in tensors(one)]
        if hook in ("gradients", "loss", "predict"):
            weights = arguments[0].named_parameters()
            given += [(f" the network's '{name}'", p, p.detach().clone()) for name, p in weights]
        draws = global_draws()
        for one in arguments:
            bound = getattr(one, "bound", None)
            if isinstance(bound, nn.Module) and not any(bound is known for known in self._networks):
                self._networks.append(bound)
        look: Callable[..., Any] | None = getattr(self, f"_{hook}", None)
        result = look(call, *arguments) if look else call(*arguments)
        for where, now, before in given:
            if not _equal(now, before):
                self._note("written", f"{hook} writes into{where or ' a tensor that it was given'}")
        if hook not in ("build", "join_models") and global_draws() != draws:
            self._note(
                "draws",
                f"{hook} draws from a global generator, or seeds it; draw from client.generator, "
                "server.generator, or the generator handed in",
            )
        return result

    def _broadcast(self, call: Callable[..., Message], server: Server, number: int) -> Message:
        before = {name: id(t) for name, t in flatten(server.state).items()}
        first = call(server, number)
        self._all_tensors("broadcast", "a message", first)
        self._all_tensors("the method", "a state", server.state)
        if server.exchange == "train":
            self.sent.setdefault(number, []).append(flatten(first))
        second = call(server, number)
        if {name: id(t) for name, t in flatten(server.state).items()} != before:
            self._note(
                "broadcast",
                "broadcast changes the server's state; it may be called again, for a retry or for scoring: "
                "change the state in start_round or aggregate",
            )
        if found := fixtures.difference(flatten(first), flatten(second)):
            self._note("broadcast", f"broadcast called twice gives two messages: {found}")
        self._as_sent += [
            (f"'{name}' for client {number}", t, t.detach().clone()) for name, t in flatten(second).items()
        ]
        return second

    def _upload(self, call: Callable[..., Message], client: Client, trained: Any) -> Message:
        message = call(client, trained)
        self._all_tensors("upload", "a message", message)
        self._all_tensors("the method", "a state", client.state)
        return message

    def _aggregate(self, call: Callable[..., None], server: Server, uploads: Mapping[int, Message]) -> None:
        assert self.federation is not None
        self.scenes.append(AggregationScene(self.method, server, dict(uploads), self.federation).snapshot())
        call(server, uploads)
        self._all_tensors("aggregate", "the server's state", server.state)

    def _receive(self, call: Callable[..., Context], client: Client, message: Message) -> Context:
        self._client = client
        self._step = 0
        return call(client, message)

    def _gradients(self, call: Callable[..., StepResult], model: Any, batch: Batch, context: Context) -> StepResult:
        self._step += 1
        if self._client is not None and self._client.round == 2 and self._step == 2:
            buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
            with keep_global_rng():
                self._look_at_loss(self._client.architecture, model, batch, context)
            for buffer, before in buffers:
                buffer.copy_(before)  # the statistics of BatchNorm, which a look has moved
        return call(model, batch, context)

    def round(self, record: Mapping[str, Any], remaining_seconds: float) -> None:
        """As a logger, after a round: who shares memory with whom, and whether what was sent is still what it was."""
        assert self.federation is not None
        for where, now, before in self._as_sent:
            if not _equal(now, before):
                self._note("alias", f"the message {where} changed after it was sent")
        self._as_sent = []
        parties = {"the server's state": storages(self.federation.server.state)}
        for client in self.federation.clients:
            parties[f"client {client.id}'s state"] = storages(client.state)
            parties[f"client {client.id}'s weights"] = storages(client.weights or {})
        for count, module in enumerate(self._networks):
            parties[f"a live network ({count})"] = storages(module.state_dict())
        seen: dict[int, str] = {}
        for party, addresses in parties.items():
            for address, name in addresses.items():
                if address in seen:
                    self._note("alias", f"{party} shares memory ('{name}') with {seen[address]}: clone what is kept")
                seen[address] = party

    def _look_at_loss(self, architecture: str, model: Any, batch: Batch, context: Context) -> None:
        looks = [("oracle", self._ask_the_oracle), ("impure", self._ask_again), ("weights", self._ask_without_a_row)]
        if architecture not in self._architectures:
            self._architectures.add(architecture)
            looks.append(("impure", self._ask_torch_func))
        for kind, look in looks:
            try:
                look(model, batch, context)
            except ConformanceError as error:
                self._note(kind, str(error))
            except Exception as error:  # of the loss or the oracle, called with what the property makes
                self._note(kind, f"{self.method.name}: {kind_and_line(error)}")

    def _all_tensors(self, who: str, where: str, message: Message) -> None:
        """Whether a message or a state holds nothing but tensors."""
        try:
            flatten(message)
        except RunError as error:
            self._fail(f"{who} puts something else than tensors into {where}: {error}")

    def _fail(self, text: str) -> NoReturn:
        raise ConformanceError(f"{self.method.name}: {text}")

    def _same(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], text: str) -> None:
        if found := fixtures.difference(a, b, 1e-5):
            self._fail(f"{text}: {found}")

    def _ask_again(self, model: Any, batch: Batch, context: Context) -> None:
        draws = global_draws()
        first, second = (_loss(self.method, model, batch, context) for _ in range(2))
        if not torch.equal(first, second):
            self._fail(f"the loss of one batch is {first.item():.6g} and, asked again, {second.item():.6g}")
        if global_draws() != draws:
            self._fail("the loss draws from a global generator; make all draws in `inputs`")

    def _ask_without_a_row(self, model: Any, batch: Batch, context: Context) -> None:
        if len(batch.y) < 2 or has_batchnorm(model):  # by which rows see one another
            return
        w = batch.w.clone()
        w[-1] = 0
        weightless = _loss(self.method, model, batch._replace(w=w), context)
        shorter = Batch(*(t[:-1] for t in batch if t is not None))
        absent = _loss(self.method, model, shorter, context)
        self._same(
            {"loss": weightless.detach()},
            {"loss": absent.detach()},
            "a row of weight 0 counts in the loss; multiply each row's loss by its batch.w",
        )

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
            first, _, _ = kind_and_line(error).partition(". ")
            self._fail(
                f"the loss does not run under torch.func, which trains several clients as one: {first}; write it with "
                "tensor operations alone: no .item(), no NumPy, no `if` on a value"
            )
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


def _equal(a: Tensor, b: Tensor) -> bool:
    """NaN is as good as NaN."""
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _loss(method: Method, model: nn.Module, batch: Batch, context: Context) -> Tensor:
    outcome = method.loss(model, batch, context)
    return outcome[0] if isinstance(outcome, tuple) else outcome


# what a hook is handed, and what is drawn ----------------------------------------------------------------------------


def tensors(thing: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors that a hook was handed, with their places; of servers and clients, those of their states."""
    if isinstance(thing, Tensor):
        yield place, thing
    elif isinstance(thing, Server):
        yield from tensors(thing.state, " the server's state")
        yield from tensors(_of_public(thing.public), " the public data")
    elif isinstance(thing, Client):
        yield from tensors(thing.state, f" client {thing.id}'s state")
        parts = (thing.data.train, thing.data.validation, thing.data.test)
        yield from tensors([(part.x, part.y) for part in parts], f" client {thing.id}'s data")
        yield from tensors(_of_public(thing.public), " the public data")
    elif isinstance(thing, Mapping):
        for name, value in thing.items():
            yield from tensors(value, f"{place} '{name}'")
    elif isinstance(thing, tuple | list):
        for value in thing:
            yield from tensors(value, place)


def _of_public(public: PublicData | None) -> tuple[Tensor, ...]:
    """The tensors of what everybody may see."""
    return () if public is None else (public.samples.x, public.samples.y)


def storages(message: Mapping[str, Any]) -> dict[int, str]:
    """Address of each tensor's memory -> the tensor's name."""
    return {t.untyped_storage().data_ptr(): name for name, t in flatten(message).items() if t.numel()}


@contextlib.contextmanager
def logged_seeds() -> Iterator[set[int]]:
    """The seeds that generators are given inside the block."""
    seeds: set[int] = set()

    class Logged(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            seeds.add(int(seed))
            return super().manual_seed(seed)

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(seed: Any = None) -> Any:
            if isinstance(seed, int):
                seeds.add(seed)
            return function(seed)

        return call

    with (
        mock.patch("torch.Generator", Logged),
        mock.patch("torch.manual_seed", noting(torch.manual_seed)),
        mock.patch("numpy.random.default_rng", noting(np.random.default_rng)),
    ):
        yield seeds
