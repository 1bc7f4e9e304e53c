"""The properties, one function each. A function returns where its property holds, else raises `ConformanceError`."""

from __future__ import annotations

import contextlib
import tempfile
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.message import Message, clone, first_nonfinite, flatten
from polyfed.core.method import Context, Method, Requirements
from polyfed.core.randomness import seeded_global_rng
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Stage, Training
from polyfed.core.upload_forms import UploadContext
from polyfed.data.samples import LabeledSamples
from polyfed.engine.executors.client_scores import who_are_alike
from polyfed.engine.executors.jobs import EvalJob
from polyfed.engine.federation import Federation
from polyfed.engine.uploads import find_mismatch
from polyfed.errors import ConfigError, PolyfedError, RunInterrupted, kind_and_line, suggest
from polyfed.own_methods import check_class
from polyfed.testing import fixtures
from polyfed.testing.fixtures import CLASSES, SHORT, SIZES, TinyFederation, draw, received
from polyfed.testing.kit import ChangedValue, ConformanceKit, NotApplicable, is_fixed, others, replaced, subsets
from polyfed.testing.observation import AggregationScene, ConformanceError, Spy, copy_server, logged_seeds
from polyfed.validation.settings import flat_settings

# what a method says of itself: settings, messages of tensors, what it needs -------------------------------------------


def has_hyperparameters(kit: ConformanceKit) -> None:
    """It is an object of a class with `hyperparameters` above it, so that its fields are settings and nothing changes
    them.
    """
    method = kit.method
    kind = type(kit.method)
    if isinstance(method, type):
        raise ConformanceError(f"{method.__name__}: expected a method, {method.__name__}(), got its class")
    try:
        check_class(kind.__name__, kind)
    except ConfigError as error:
        raise ConformanceError(str(error)) from error


def speaks_in_tensors(kit: ConformanceKit) -> None:
    """Messages and states are tensors by name, or groups of them: no plain numbers."""
    error = kit.observed.error
    if error is not None and isinstance(error.__cause__, ConformanceError):
        raise error.__cause__ from None


def runs(kit: ConformanceKit) -> None:
    """It runs with networks as different as its `requirements` allow; with plain ones, where it needs no parts."""
    needs = kit.method.requirements
    try:
        if not (needs.split_model or needs.same_feature_dim or needs.same_head or needs.same_cut_shapes):
            with contextlib.suppress(ConfigError):  # its `build` may refuse them
                fixtures.world([fixtures.plain_model], 2 * needs.public).run(kit.method)
        if kit.observed.error is not None:
            raise kit.observed.error
    except PolyfedError as error:
        kit.fail(f"{error}{_hint(str(error))}")
    for record in kit.base.history:
        for refused in record["refused"]:
            kit.fail(
                f"client {refused['client']} is refused in round {record['round']}: {refused['reason']}; an exchange "
                "in which nobody trains is an Exchange(trains=False)"
            )


def _hint(error: str) -> str:
    """What to do about an error of a hook."""
    if "KeyError" in error:
        return "; is that sent by the other side, by every client and in the first round, too?"
    if "AttributeError" in error or "RuntimeError" in error:
        return (
            "; the kit's networks differ in all that `requirements` leave free: declare what has to be alike, and "
            "split_model=True for represent, extract and head"
        )
    return ""


def declared(kit: ConformanceKit) -> None:
    """Name, paper, docstring, stage and hyperparameters are there; a wrong hyperparameter is refused."""
    method = kit.method
    kind = type(kit.method)
    if not kind.__doc__ or kind.__doc__.startswith(f"{kind.__name__}("):
        kit.fail("expected a docstring that says what it does")
    if any(type(other) is not kind or other == method for other in method.alternative_predictors.values()):
        kit.fail("expected `alternative_predictors` to name this method with another `predict`")
    if method.evaluation_stage not in typing.get_args(Stage) or not isinstance(method.requirements, Requirements):
        kit.fail(
            f"expected a stage of {typing.get_args(Stage)} and Requirements, got {method.evaluation_stage!r}, "
            f"{method.requirements!r}"
        )
    try:
        kind()
    except Exception as error:
        kit.fail(f"expected a default for every hyperparameter: {error}")
    if replaced(method, no_such_hyperparameter=1) is not None:
        kit.fail("a hyperparameter that does not exist is taken without a word")


# a run repeats, and only its own random streams are drawn from --------------------------------------------------------


def same_seed_same_result(kit: ConformanceKit) -> None:
    """A run repeats bit for bit, with the same method object and with a new one."""
    fresh = replaced(kit.method)
    for method, what in ((kit.method, "the same method object again"), (fresh, "a new method object")):
        again = kit.run(method)
        kit.same(fixtures.all_state(kit.base), fixtures.all_state(again), f"one seed gives two results with {what}")
        if fixtures.records(kit.base) != fixtures.records(again):
            kit.fail(f"one seed gives two histories with {what}")


def other_seed_other_result(kit: ConformanceKit) -> None:
    """Another seed changes the result, and no generator is seeded alike under both."""
    kit.needs_training()
    logs = []
    runs = []
    for seed in (0, 1):
        with logged_seeds() as seeds:
            runs.append(kit.run(seed=seed))
        logs.append(seeds)
    if fixtures.difference(fixtures.weights(runs[0]), fixtures.weights(runs[1])) is None:
        kit.fail("two seeds give the same weights")
    if fixed := sorted(logs[0] & logs[1]):
        kit.fail(f"a generator is seeded with {fixed[0]} under every seed of the run; derive it (client.generator)")


def global_generators_untouched(kit: ConformanceKit) -> None:
    """No hook but `build` draws from a global generator or seeds one."""
    kit.no_offense("draws")


# uploads: their form, their order, any subset of them, and who counts how much ----------------------------------------


def uploads_have_their_form(kit: ConformanceKit) -> None:
    """What clients upload is of the `form` that the method declares, if it declares one."""
    method = kit.method
    form = method.upload_form
    uploaded = {name for scene in kit.scenes for message in scene.uploads.values() for name in message}
    for declared in ("delta_entries", "aligned_entries", "unaligned_entries"):
        for name in getattr(method, declared):
            if name not in (uploaded if form is None else form):
                kit.fail(f"{declared} name '{name}', which nobody uploads{suggest(name, uploaded)}")
    if form is None:
        return
    for scene in kit.scenes:
        for number, message in scene.uploads.items():
            sent = kit.method.broadcast(scene.server, number)
            if problem := find_mismatch(form, message, UploadContext(kit.method, scene.server, number, sent)):
                kit.fail(f"client {number} uploads what `upload_form` does not allow: {problem}")


def order_of_uploads(kit: ConformanceKit) -> None:
    """The order in which the uploads lie in their mapping changes nothing (up to rounding)."""
    for scene in kit.scenes:
        backwards = {number: scene.uploads[number] for number in reversed(list(scene.uploads))}
        a = scene.after(scene.uploads)
        b = scene.after(backwards)
        kit.same(flatten(a.state), flatten(b.state), "uploads in another order give another state", 1e-5)


def client_order_invariant(kit: ConformanceKit) -> None:
    """Renumbering the clients renumbers the result: no client is special."""
    for scene in kit.scenes:
        if scene.server.round > 1 or not scene.uploads:
            continue
        last = len(scene.server.clients) - 1
        turned = copy_server(scene.server)
        turned.clients = {last - number: member for number, member in reversed(list(scene.server.clients.items()))}
        moved = {last - number: message for number, message in reversed(list(scene.uploads.items()))}
        a = scene.after(scene.uploads)
        b = scene.after(moved, turned)
        for server in (a, b):
            server.exchange = "train"
        for number in scene.server.clients:
            one = flatten(kit.method.broadcast(a, number))
            other = flatten(kit.method.broadcast(b, last - number))
            kit.same(one, other, f"with the clients renumbered, client {number} gets something else", 1e-5)


def any_subset(kit: ConformanceKit) -> None:
    """With any subset of uploads nothing breaks; with none, what the server sends stays as it is."""
    for scene in kit.scenes:
        for chosen in subsets(sorted(scene.uploads)):
            who = f"when only {chosen} of {sorted(scene.uploads)} answer" if chosen else "when nobody answers"
            try:
                after = scene.after({number: scene.uploads[number] for number in chosen})
                messages = {number: kit.method.broadcast(after, number) for number in after.clients}
            except Exception as error:
                raise ConformanceError(
                    f"{kit.name}: aggregate, or broadcast after it, fails {who}: {kind_and_line(error)}"
                ) from error
            for tensors in (after.state, *messages.values()):
                if name := first_nonfinite(tensors):
                    kit.fail(f"'{name}' is not finite {who}")
            if not chosen:
                _unmoved(kit, scene, after)
    few = SHORT.model_copy(update={"client_fraction": 0.34, "rounds": 3})
    kit.all_finite(kit.run(training=few), "with two of six clients a round")


def _unmoved(kit: ConformanceKit, scene: AggregationScene, after: Server) -> None:
    """What was sent in this round may be gone (it was this round's); what is still there must be the same."""
    for number in after.clients:
        before = flatten(kit.method.broadcast(copy_server(scene.server), number))
        now = flatten(kit.method.broadcast(after, number))
        common = {name for name in now if name in before and now[name].shape == before[name].shape}
        kit.same(
            {name: before[name] for name in sorted(common)},
            {name: now[name] for name in sorted(common)},
            "nobody answered, yet the server sends something else",
        )


def missing_upload_is_not_zero(kit: ConformanceKit) -> None:
    """Who does not answer, or lacks a class, does not count as zeros: nothing shrinks for want of an answer."""
    tiny = kit.world(one=True, sizes=(12,) * 6, labels=((0, 1, 2), *((1, 2),) * 5))

    def look(scene: AggregationScene) -> None:
        if 0 not in scene.uploads:
            return
        alone = scene.after({0: scene.uploads[0]})
        together = scene.after(scene.uploads)
        one, all_ = (flatten(kit.method.broadcast(server, 0)) for server in (alone, together))
        for name in one.keys() & all_.keys():
            if one[name].shape == all_[name].shape and one[name].is_floating_point() and one[name].dim():
                _no_shrinking(kit, name, one[name], all_[name])

    kit.aggregations(tiny, SHORT.model_copy(update={"lr": 0.0, "rounds": 1}), look)


def _no_shrinking(kit: ConformanceKit, name: str, one: Tensor, all_: Tensor) -> None:
    rows = [(f"'{name}'", one, all_)]
    if one.dim() > 1 and len(one) == CLASSES:
        rows += [(f"class {c} of '{name}'", one[c], all_[c]) for c in range(CLASSES)]
    for what, a, b in rows:
        single = float(a.norm())
        whole = float(b.norm())
        if single > 1e-4 and whole < single / 3:
            kit.fail(
                f"{what} shrinks from {single:.3g} to {whole:.3g} when those answer who know nothing of it (averaged "
                "weights do so where clients begin with different ones: declare common_start)"
            )
        if whole > 1e-4 and single < whole / 3:
            kit.fail(
                f"{what} shrinks from {whole:.3g} to {single:.3g} when one client of six answers: divide by those who "
                "answered"
            )


def samples_counted_once(kit: ConformanceKit) -> None:
    """Every sample counts once: splitting a client's data among two clients changes nothing at the server."""
    if kit.counted is None:
        raise NotApplicable("no claim that every sample counts once")
    sizes = (20, 8)
    labels = ((0, 1, 2), (1, 2))
    whole = [draw(size, own, place) for place, (size, own) in enumerate(zip(sizes, labels, strict=True))]
    rows = torch.arange(sizes[0])
    parts = [whole[0].select(rows[:3]), whole[0].select(rows[3:]), whole[1]]
    parts[0] = LabeledSamples(parts[0].x, parts[0].y)
    step = Training(rounds=1, local_epochs=1, batch_size=64, lr=0.0 if kit.counted == "statistics" else 0.05)
    found = []
    for data in (whole, parts):
        kept: list[dict[str, Tensor]] = []

        def look(scene: AggregationScene, kept: list[dict[str, Tensor]] = kept) -> None:
            kept.append(flatten(kit.method.broadcast(scene.after(scene.uploads), 0)))

        tiny = kit.world(one=True, data=data)
        one = tiny.builders["net0"]
        with seeded_global_rng(0):
            start = one()
        for client in tiny.clients:  # all start from the same weights, however many they are
            client.given, client.architecture = start, ""
        kit.aggregations(tiny, step, look)
        found.append(kept[-1])
    common = sorted(name for name in found[0] if name in found[1] and found[0][name].shape == found[1][name].shape)
    first, second = ({name: one[name] for name in common} for one in found)
    kit.same(first, second, "a client's samples count otherwise when they lie at two clients", 1e-4)


# clients with few data, BatchNorm, weights that are no numbers, and clients that are not selected ---------------------


def degenerate_clients(kit: ConformanceKit) -> None:
    """Missing classes, one class, one sample, batches larger than the data: nobody breaks, everybody learns."""
    tiny = kit.world(sizes=(1, 16, 10, 20, 3, 17))
    begun: dict[int, dict[str, Tensor]] = {}
    still: set[int] = set()

    def receive(call: Callable[..., Context], client: Client, message: Message) -> Context:
        context = call(client, message)
        begun[client.id] = {name: p.detach().clone() for name, p in client.model.named_parameters()}
        return context

    def upload(call: Callable[..., Message], client: Client, trained: Any) -> Message:
        now = client.model.named_parameters()
        if trained.steps and all(torch.equal(p, begun[client.id][name]) for name, p in now):
            still.add(client.id)
        return call(client, trained)

    for size in (8, 64, 1):
        still.clear()
        spy = Spy(kit.method, receive=receive, upload=upload)
        federation = kit.runs(tiny, spy, Training(rounds=2, local_epochs=1, batch_size=size, lr=0.01))
        kit.all_finite(federation, f"with awkward clients and batches of {size}")
        for record in federation.history:
            if record["refused"]:
                one = record["refused"][0]
                kit.fail(f"with batches of {size}, client {one['client']} was refused: {one['reason']}")
        if still:
            kit.fail(
                f"with batches of {size}, client {min(still)} ({tiny.clients[min(still)].n} samples) learns nothing"
            )


def batchnorm(kit: ConformanceKit) -> None:
    """A model with BatchNorm works; a method that shares its weights shares its statistics, averaged over all."""
    tiny = kit.world(one=True, norm=True, sizes=(9, *SIZES[1:]))
    scenes: list[AggregationScene] = []
    try:
        kit.aggregations(tiny, SHORT, scenes.append)
    except ConformanceError as error:
        hint = "a network with BatchNorm has statistics, too; polyfed.core.modules.float_state has all that is averaged"
        raise ConformanceError(f"{error}; {hint}") from error
    federation = scenes[-1].federation
    kit.all_finite(federation, "with BatchNorm")
    shared = [name for name in _shared(federation) if name.endswith("running_mean")]
    weights = [name for name in _shared(federation) if name.endswith("norm.weight")]
    if not weights:
        return
    if not shared:
        kit.fail("BatchNorm's weights are shared and its running statistics are not (those of the initial model stay)")
    got = received(federation, 0)
    for name in shared:
        each = [client.weights[name] for client in federation.clients if client.weights is not None]
        if any(torch.equal(got[name], own) for own in each) or not bool(got[name].any()):
            kit.fail(f"'{name}' of the shared model is one client's, or the initial one, not the mean over clients")
        lowest = torch.stack(each).amin(0) - 1e-6
        highest = torch.stack(each).amax(0) + 1e-6
        if not bool(((got[name] >= lowest) & (got[name] <= highest)).all()):
            kit.fail(
                f"'{name}' of the shared model lies outside the clients' own: send the mean of BatchNorm's statistics "
                "as it is, whatever becomes of weights"
            )


def _shared(federation: Federation) -> list[str]:
    """Tensors that are equal in what all clients receive, and have changed since the start."""
    every = [received(federation, client.id) for client in federation.clients]
    start = federation.server.initial_state(federation.clients[0].architecture)
    return [
        name
        for name, tensor in every[0].items()
        if all(name in other and torch.equal(tensor, other[name]) for other in every[1:])
        and not (name in start and torch.equal(tensor, start[name]))
    ]


def begins_alike(kit: ConformanceKit) -> None:
    """What the server sends alike to all in the end it sends alike at first: means of weights drawn apart are noise."""
    assert kit.base
    messages = kit.observed.sent.values()
    for name in set.intersection(*(set(sent[-1]) for sent in messages)):
        begun = [sent[0][name] for sent in messages if name in sent[0]]
        if len(begun) == len(messages) and _all_equal([sent[-1][name] for sent in messages]) and not _all_equal(begun):
            kit.fail(f"'{name}' is one for all after the first round and began otherwise for each")


def _all_equal(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


def initial_weights_are_ignored(kit: ConformanceKit) -> None:
    """Where `ignores_initial_weights` says that nobody reads a client's start, a start makes no difference."""
    kind = type(kit.method)
    if not kind.ignores_initial_weights:
        raise NotApplicable("it reads clients' initial weights")
    drawn: Method = object.__new__(type(kind.__name__, (kind,), {"ignores_initial_weights": False}))
    vars(drawn).update(vars(kit.method))
    half = SHORT.model_copy(update={"client_fraction": 0.5})
    without, other = (fixtures.all_state(kit.run(method, half)) for method in (kit.method, drawn))
    kit.same(without, other, "`ignores_initial_weights` is declared, yet clients' initial weights make a difference")


def nan_is_rejected(kit: ConformanceKit) -> None:
    """A client whose loss is NaN is refused and counted; it stays as it was, and the others go on."""
    kit.needs_training()
    sick = kit.runs(kit.world(prepare={1: lambda x: x * float("nan")}))
    for record in sick.history:
        if [entry["client"] for entry in record["refused"]] != [1]:
            refused = [entry["client"] for entry in record["refused"]]
            kit.fail(f"client 1 sees NaN only; in round {record['round']} the clients {refused} were refused")
    if sick.clients[1].weights is not None or sick.clients[1].state:
        kit.fail("a refused client has kept something of the refused round")
    found = {name: t for name, t in fixtures.state(sick).items() if not name.startswith("client 1:")}
    if bad := first_nonfinite({"all": found}):
        kit.fail(f"one client's NaN reached '{bad}'")
    if any(client.weights is None for client in sick.clients if client.id != 1):
        kit.fail("a healthy client did not learn beside one with NaN")


# what outlives a call is in states, which nothing writes into; what crosses is counted --------------------------------


def nothing_aliased(kit: ConformanceKit) -> None:
    """After a round no tensor of one party shares memory with another's, or with a network that others use."""
    kit.no_offense("alias")


def nothing_written_in_place(kit: ConformanceKit) -> None:
    """Messages, states, contexts and data are replaced and never written into, with any subset of uploads."""
    kit.no_offense("written")

    for scene in kit.scenes:
        for chosen in subsets(sorted(scene.uploads)):
            trial = copy_server(scene.server)
            trial.state = clone(scene.server.state)
            uploads = {number: clone(scene.uploads[number]) for number in chosen}
            given = {"the server's state": trial.state, **{f"the upload of client {i}": m for i, m in uploads.items()}}
            tensors = [(f"{whose}, '{name}'", t) for whose, m in given.items() for name, t in flatten(m).items()]
            before = [tensor.clone() for _, tensor in tensors]
            with contextlib.suppress(Exception):  # `any_subset` tells
                kit.method.aggregate(trial, uploads)
            for (place, now), was in zip(tensors, before, strict=True):
                if fixtures.difference({"": now}, {"": was}) is not None:
                    kit.fail(f"aggregate writes into {place}, when of {sorted(scene.uploads)} only {chosen} answer")


def broadcast_without_side_effects(kit: ConformanceKit) -> None:
    """It may be called again, for a retry or for scoring."""
    kit.no_offense("broadcast")


def state_is_explicit(kit: ConformanceKit) -> None:
    """Two rounds, a checkpoint and two more are four rounds bit for bit; the method object keeps nothing."""
    kit.no_offense("state")
    four = SHORT.model_copy(update={"rounds": 4})
    straight = kit.run(training=four)
    with tempfile.TemporaryDirectory(prefix="polyfed-") as place:
        out = Path(place) / "run"
        stopped = kit.usual.federation(kit.method, four, out=out, loggers=[stop := _Stop(3)])
        stop.federation = stopped
        try:
            stopped.run()
        except RunInterrupted:
            pass
        except PolyfedError as error:
            kit.fail(str(error))
        kit.run(seed=7)  # whatever is hidden in the process is now another run's
        resumed = kit.usual.federation(replaced(kit.method) or kit.method, four, out=out)
        try:
            resumed.run(resume=True)
        except PolyfedError as error:
            kit.fail(f"after a checkpoint: {error}")
    kit.same(
        fixtures.all_state(straight),
        fixtures.all_state(resumed),
        "resumed after two of four rounds it ends otherwise, as something outlives a call and is neither in "
        "client.state nor in server.state",
    )
    if fixtures.records(straight) != fixtures.records(resumed):
        kit.fail("resumed after two of four rounds, its records are others")


def goes_on_after_its_end(kit: ConformanceKit) -> None:
    """Two rounds that were all, and two more after them, are four rounds bit for bit; or `planned` says why not."""
    if kit.method.planned:
        raise NotApplicable(f"{kit.method.planned} depends on the number of rounds")
    four = SHORT.model_copy(update={"rounds": 4})
    with tempfile.TemporaryDirectory(prefix="polyfed-") as place:
        out = Path(place) / "run"
        kit.run(out=out)
        longer = kit.usual.federation(kit.method, four, evaluation=Evaluation(every_n_rounds=SHORT.rounds), out=out)
        try:
            longer.run(resume=True)
        except PolyfedError as error:
            kit.fail(f"after its last round: {error}")
    straight = kit.run(training=four, evaluation=Evaluation(every_n_rounds=SHORT.rounds))
    found = fixtures.difference(fixtures.all_state(straight), fixtures.all_state(longer))
    if found is not None:
        kit.fail(
            f"after the two rounds that were planned, two more end otherwise than four at once: {found}; what depends "
            "on the number of rounds (server.rounds, training.rounds) is declared in `planned`"
        )


class _Stop:
    """A logger that interrupts a round."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.federation = typing.cast(Federation, None)

    def client_done(self, done: int, total: int) -> None:
        """Ctrl-C in the middle of the round."""
        if self.federation.server.round == self.number and done == 2:
            raise KeyboardInterrupt


def scored_together_alike(kit: ConformanceKit) -> None:
    """Clients that are scored together, as `loads_message` allows, hold the same model once they have received."""
    federation = kit.base
    server = federation.server
    asked = [
        EvalJob(
            client,
            kit.method.variant(server, client.id),
            kit.method.broadcast(server, client.id),
            server.round,
            ["test"],
        )
        for client in federation.clients
    ]
    for places in who_are_alike(asked, kit.method, federation.model_factory):
        first, *rest = (received(federation, place) for place in places)
        for other in rest:
            kit.same(first, other, "its `receive` keeps something of a client's own, and is marked `loads_message`")


def expected_bytes(kit: ConformanceKit) -> None:
    """The bytes are those of the paper's formula."""
    if kit.expected_bytes is None:
        raise NotApplicable("no formula given")
    federation = kit.scenes[-1].federation
    for number, found in federation.history[-1]["bytes_by_client"].items():
        down, up = kit.expected_bytes(federation.server, int(number))
        if (found["down"], found["up"]) != (down, up):
            kit.fail(f"client {number}: expected {down} bytes down and {up} up by the formula, got {found}")


# the loss of one batch: a pure function, equal to that of an oracle ---------------------------------------------------


def loss_is_pure(kit: ConformanceKit) -> None:
    """The same again when called again; a function of parameters, batch and context under torch.func, also for many."""
    kit.no_offense("impure")


def row_weights_count(kit: ConformanceKit) -> None:
    """A row of weight 0 in `batch.w` adds nothing to the loss, so that batches may be filled up."""
    kit.no_offense("weights")


def oracle(kit: ConformanceKit) -> None:
    """The loss of a step equals the same by independent means, after a step away from where the client began."""
    if kit.reference_loss is None:
        raise NotApplicable("no oracle given")
    kit.no_offense("oracle")


# what the hyperparameters do, and that the method learns --------------------------------------------------------------


# for hyperparameters slow to act
_LONGER = SHORT.model_copy(update={"rounds": 4, "local_epochs": 2, "client_fraction": 0.5})


def hyperparameters_matter(kit: ConformanceKit) -> None:
    """Another value of any hyperparameter changes weights, messages or scores; a hyperparameter that changes nothing is
    an error.
    """
    for name in (*kit.changed_values, *kit.no_effect):
        if name not in kit.hyperparameters:
            kit.fail(f"it has no hyperparameter '{name}'{suggest(name, kit.hyperparameters)}")
    for hyperparameter in kit.hyperparameters:
        if not is_fixed(kit.method, hyperparameter):
            _matters(kit, hyperparameter)


def _matters(kit: ConformanceKit, hyperparameter: str) -> None:
    change = kit.changed_values.get(hyperparameter)
    if not isinstance(change, ChangedValue):
        change = ChangedValue(change)
    base = replaced(kit.method, **change.given)
    if base is None:
        kit.fail(f"the hyperparameters {change.given} given for '{hyperparameter}' are refused")
    values, each = ([change.value], True) if hyperparameter in kit.changed_values else others(base, hyperparameter)
    tried: dict[Any, bool] = {}  # value -> whether it changes anything
    for value in values:
        changes = _changes(kit, base, hyperparameter, value)
        if changes is not None:
            tried[value] = changes
        if changes and not each:
            break
    if hyperparameter in kit.no_effect:
        if any(tried.values()):
            kit.fail(
                f"the hyperparameter '{hyperparameter}' has `no_effect` ({kit.no_effect[hyperparameter]}), "
                "but changes something"
            )
    elif not tried:
        kit.fail(
            f"no other value of the hyperparameter '{hyperparameter}' could be tried; give one in "
            f"changed_values={{'{hyperparameter}': ...}}"
        )
    elif not any(tried.values()) or (each and not all(tried.values())):
        still = [value for value, changes in tried.items() if not changes]
        kit.fail(
            f"the hyperparameter '{hyperparameter}' changes no weights, messages or scores, from "
            f"{flat_settings(base)[hyperparameter]!r} to {still[0]!r}"
        )


def _changes(kit: ConformanceKit, base: Method, hyperparameter: str, value: Any) -> bool | None:
    """Whether the hyperparameter's value changes anything; None where it cannot be tried."""
    method = replaced(base, **{hyperparameter: value})
    if method is None:
        return None
    tiny = kit.world(base, method)
    try:
        after = tiny.run(method)
    except ConfigError:
        return None
    except PolyfedError as error:
        raise ConformanceError(f"{kit.name} with {hyperparameter}={value!r}: {error}") from error
    trainings = [SHORT] if hyperparameter in kit.no_effect else [SHORT, _LONGER]
    for training in trainings:
        alike = base == kit.method and len(tiny.public or ()) == len(kit.usual.public or ())
        usual = alike and training is SHORT and _networks(tiny) == _networks(kit.usual)
        before = kit.base if usual else kit.runs(tiny, base, training)
        if training is _LONGER:
            after = kit.runs(tiny, method, training)
        rounding = 1e-5 if hyperparameter in kit.no_effect else 0.0
        if fixtures.difference(fixtures.effect(before), fixtures.effect(after), rounding) is not None:
            return True
    return False


def _networks(tiny: TinyFederation) -> list[str]:
    return [repr(build()) for build in tiny.builders.values()]


def reductions(kit: ConformanceKit) -> None:
    """With a hyperparameter switched off it is the simpler method bit for bit."""
    for one in kit.reductions:
        sizes = (16,) * 6 if one.equal_sizes else SIZES
        method = one.method if isinstance(one.method, Method) else replaced(kit.method, **one.method)
        if method is None:
            kit.fail(f"it does not take the hyperparameters {one.method} of a reduction")
        tiny = ConformanceKit(method=method, models=kit.models, device=kit.device).world(
            one.to, one=one.same_architecture, sizes=sizes
        )
        found = _outcome(kit, tiny, method, one.stage)
        expected = _outcome(kit, tiny, one.to, one.stage)
        for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
            if one.part:
                mine = {name[len(one.part) :]: t for name, t in mine.items() if name.startswith(one.part)}
            kit.same(
                mine,
                other,
                f"{method} is not {one.to}: a term that is switched off must leave the loss, the random draws and the "
                f"order of sums as they are; of client {number}",
            )


def _outcome(kit: ConformanceKit, tiny: TinyFederation, method: Method, stage: Stage) -> list[dict[str, Tensor]]:
    """Each client's weights after three rounds, or what it would be sent."""
    federation = kit.runs(tiny, method, SHORT.model_copy(update={"rounds": 3, "client_fraction": 0.7}))
    if stage == "received":
        return [received(federation, client.id) for client in federation.clients]
    return [dict(client.weights or {}) for client in federation.clients]


def learns(kit: ConformanceKit) -> None:
    """Loss falls, accuracy rises, every trainable tensor moves, and what the server sends does not stay the same."""
    kit.needs_training()
    training = Training(rounds=6, local_epochs=2, batch_size=8, lr=0.1)
    start = kit.usual.federation(kit.method, training)
    start.method.init_server(start.server)
    initial = {client.id: start.server.client_weights(client.id) for client in start.clients}
    messages: dict[str, list[Tensor]] = {}

    def broadcast(call: Callable[..., Message], server: Server, number: int) -> Message:
        message = call(server, number)
        for name, tensor in flatten(message).items():
            if number == 0 and tensor.is_floating_point() and tensor.dim():
                messages.setdefault(name, []).append(tensor.clone())
        return message

    federation = kit.runs(kit.usual, Spy(kit.method, broadcast=broadcast), training)
    losses = [record["train_loss"] for record in federation.history if record["train_loss"] is not None]
    if not losses[-1] < losses[1]:  # in the first round what others know may still be missing in the loss
        kit.fail(f"the training loss goes from {losses[1]:.4f} in round 2 to {losses[-1]:.4f}")
    mean = federation.history[-1]["accuracy"][federation.stages[0]]["mean"]
    if mean < 1 / CLASSES + 0.2 and not kit.has_frozen_weights:
        kit.fail(f"on separable data its accuracy is {mean:.3f} ({federation.stages[0]}), little above chance")
    for name in sorted(_trainable(federation)):
        moved = [
            not torch.equal(client.weights[name], initial[client.id][name])
            for client in federation.clients
            if client.weights is not None and name in client.weights and name in initial[client.id]
        ]
        if moved and not any(moved):
            kit.fail(f"the trainable tensor '{name}' never moves")
    for name, values in messages.items() if not kit.has_frozen_weights else ():
        same = len(values) > 2 and all(torch.equal(values[0], later) for later in values[1:])
        whole_numbers = bool(values[0].any()) and torch.equal(values[0], values[0].round())
        if same and not whole_numbers:  # counts and masks may rightly stay the same
            kit.fail(f"the server sends the same '{name}' in every round: nothing trains it")


def _trainable(federation: Federation) -> set[str]:
    """Names of parameters of all clients' networks."""
    found = set()
    for client in federation.clients:
        variant = federation.method.variant(federation.server, client.id)
        network = federation.model_factory.module(client.architecture, variant)
        found |= {name for name, p in network.named_parameters() if p.requires_grad}
    return found


# all of them, the public functions of this module, in the order in which they are asked -----------------------------

PROPERTIES: dict[str, Callable[[ConformanceKit], None]] = {
    name: found
    for name, found in globals().items()
    if isinstance(found, types.FunctionType) and found.__module__ == __name__ and not name.startswith("_")
}
# where one of these does not hold, no other is asked
FIRST = tuple(
    check.__name__
    for check in (
        *(has_hyperparameters, speaks_in_tensors, runs),
        *(nothing_written_in_place, broadcast_without_side_effects, global_generators_untouched),
    )
)
