"""Masked sums: against plain sums, and what a server gets that does not keep to the protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cryptography")

from polyfed.config.recipe import Recipe
from polyfed.core.message import flatten, get_group
from polyfed.deploy.answer_limits import AnswerLimits, TooManyAnswers
from polyfed.deploy.masked_sums import MaskOfTotal, Participant
from polyfed.deploy.node_config import NodeConfig
from polyfed.deploy.node_registry import Answer
from polyfed.deploy.protocol import Envelope, NodeError, TaskRequest, read_message, shared_config
from polyfed.deploy.server import serve
from polyfed.engine.run import Run
from polyfed.engine.wire import encode
from polyfed.errors import RunError
from polyfed.experiments.build import build_federation
from polyfed.testing.fixtures import TIMES
from tests.helpers.nearby import DATA, FIRST_NODE, Nearby, recipe_of

# the protocol ---------------------------------------------------------------------------------------------------------

LENGTH = 7
STAGES = ["keys", "shares", "upload", "unmask"]
GONE = {0, 7, 19}
KNOWN = b"unit of 2^-30"


def addends(client: int) -> Tensor:
    return torch.randint(0, 2**40, (LENGTH,), generator=torch.Generator().manual_seed(client))


def member(client: int, name: str = "round 1") -> Participant:
    return Participant(bytes([client]) * 32, client, name)


def masks(
    clients: Collection[int], sharers: Collection[int], survivors: Collection[int], by: Collection[int]
) -> Tensor:
    """What the server takes from the sum; every answer comes from an object of its own, as nodes keep nothing."""
    keys = {client: member(client).keys() for client in clients}
    shares = {client: member(client).shares(keys, 14) for client in sharers}
    answers = {
        client: member(client).unmask(keys, {one: shares[one][client] for one in sharers}, survivors) for client in by
    }
    return MaskOfTotal(keys, sharers, survivors, answers, KNOWN).limbs(LENGTH)


@pytest.mark.parametrize("stage", STAGES)
def test_twenty_clients_of_whom_three_vanish(stage: str) -> None:
    left = [client for client in range(20) if client not in GONE]
    clients, sharers, survivors, helpers = (left if place >= STAGES.index(stage) else range(20) for place in range(4))
    keys = {client: member(client).keys() for client in clients}
    sent = {client: member(client).mask(addends(client), keys, sharers, KNOWN) for client in survivors}
    assert all(not torch.equal(sent[client], addends(client)) for client in sent)
    total = sum(sent.values()) - masks(clients, sharers, survivors, list(helpers)[-14:])
    assert torch.equal(total % 2**40, sum(addends(client) for client in survivors) % 2**40)


def test_masks_of_clients_that_were_told_of_different_sums_do_not_cancel() -> None:
    """Else a server could give one client a finer unit than the others, and read it off the total."""
    keys = {client: member(client).keys() for client in range(20)}
    told = {client: KNOWN if client else b"unit of 2^-60" for client in keys}
    sent = [member(client).mask(addends(client), keys, keys, told[client]) for client in keys]
    total = sum(sent) - masks(keys, keys, keys, by=range(14))
    assert not (total % 2**40 == sum(map(addends, keys)) % 2**40).any()


def test_fewer_shares_than_needed_give_nothing() -> None:
    with pytest.raises(RunError, match="that give"):
        masks(range(20), range(20), range(20), by=range(13))


def test_shares_are_for_one_client_and_one_sum() -> None:
    keys = {client: member(client).keys() for client in range(3)}
    shares = member(0).shares(keys, 2)
    assert member(0).shares(keys, 2) == shares, "a repeated message has the same answer"
    for reader in (member(2), member(1, "round 2")):
        with pytest.raises(RunError, match="expected the shares of client 0 for this client"):
            reader.unmask(keys, {0: shares[1]}, [0])


# nodes ----------------------------------------------------------------------------------------------------------------

SMALL = {"features": 12}


def summing(method: str = "closed-form", **sections: Any) -> Recipe:
    """Six clients."""
    hyperparameters = SMALL if method == "closed-form" else {}
    return recipe_of(
        method,
        hyperparameters=hyperparameters,
        data={"num_clients": 6, "limit_train": 240},
        models={"architectures": ["digits-cnn1"]},
        secure_sums={"enabled": True},
        **sections,
    )


def served(recipe: Recipe, wire: Nearby, **options: Any) -> Run:
    return serve(recipe, wire, out=wire.folder / "out", **{"deadline": 0.05, **options})


def six(recipe: Recipe, folder: Path) -> Nearby:
    return Nearby(recipe, folder, range(6))


def silent(wire: Nearby, clients: Collection[int], kind: str, number: int = 1) -> None:
    """These clients' nodes are off from a kind of request in a round on."""

    def fault(node: int, envelope: Envelope) -> Answer | None:
        if envelope.kind == kind and envelope.facts["round"] == number:
            wire.away |= {FIRST_NODE + client for client in clients}
        return NodeError("off") if node in wire.away else None

    wire.fault = fault


def records(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in TIMES} for record in run.history]


@pytest.mark.parametrize("method", ["closed-form", "fedavg"])
def test_nodes_give_the_numbers_of_one_process_and_send_no_addends_bare(tmp_path: Path, method: str) -> None:
    recipe = summing(method)
    wire = six(recipe, tmp_path)
    uploads: list[Mapping[str, Tensor]] = []

    def watch(node: int, envelope: Envelope) -> Answer | None:
        if envelope.kind != "train":
            return None
        answer = wire.ask(node, envelope)
        assert isinstance(answer, Envelope)
        uploads.append(flatten(read_message(answer.body)))
        return answer

    wire.fault = watch
    run = served(recipe, wire)
    here = build_federation(recipe, data=DATA)
    assert records(run) == records(here.run())
    sums = [upload for upload in uploads if any(name.startswith("addends") for name in upload)]
    assert len(sums) == (6 if method == "closed-form" else 12)
    for upload in sums:
        assert {name.partition("/")[0] for name in upload} <= {"addends", "version"}
        drawn = torch.cat([tensor.reshape(-1) for name, tensor in upload.items() if name != "version"]).double()
        assert 118 < drawn.mean() < 137, "uniform bytes, of which small numbers have few"


class Killed(BaseException):
    """The server's end."""


@pytest.mark.parametrize(("method", "number"), [("closed-form", 1), ("fedavg", 2)])
def test_a_server_that_died_while_a_total_was_opened_resumes(tmp_path: Path, method: str, number: int) -> None:
    """Some nodes have answered: they help to open the total of the same clients once more."""
    recipe = summing(method)
    wire = six(recipe, tmp_path)

    def die(node: int, envelope: Envelope) -> Answer | None:
        if (node, envelope.kind, envelope.facts.get("round")) == (FIRST_NODE + 4, "unmask", number):
            raise Killed
        return None

    wire.fault = die
    with pytest.raises(Killed):
        served(recipe, wire)
    wire.fault = lambda node, envelope: None
    assert records(served(recipe, wire, resume=True)) == records(build_federation(recipe, data=DATA).run())


@pytest.mark.parametrize("kind", ["keys", "shares", "train", "unmask"])
def test_a_third_may_vanish_at_any_stage(tmp_path: Path, kind: str) -> None:
    recipe = summing()
    wire = six(recipe, tmp_path)
    silent(wire, (1, 4), kind)
    first, second = served(recipe, wire).history
    everybody, left = list(range(6)), [0, 2, 3, 5]
    assert first["secure_sums"] == {"asked": everybody, "summed": everybody if kind == "unmask" else left}
    assert first["accuracy"]["received"]["mean"] > 0.5
    assert "secure_sums" not in second, "the others are too few for a sum of their own"


@pytest.mark.parametrize("kind", ["keys", "shares", "train", "unmask"])
def test_below_the_threshold_nothing_is_opened(tmp_path: Path, kind: str) -> None:
    recipe = summing("fedavg")
    wire = six(recipe, tmp_path)
    silent(wire, (1, 3, 4), kind, number=2)
    first, second = served(recipe, wire).history
    assert first["secure_sums"]["summed"] == list(range(6))
    assert second["secure_sums"]["summed"] == []


def test_a_client_that_is_sent_other_weights_spoils_the_total(tmp_path: Path) -> None:
    """Else its own would stand out of a total of others that a server knows (Pasquini et al., CCS 2022)."""
    wire = six(summing("fedavg"), tmp_path)

    def fault(node: int, envelope: Envelope) -> Answer | None:
        if node != FIRST_NODE or envelope.kind != "train" or envelope.facts["round"] != 2:
            return None
        weights = {name: 2 * tensor for name, tensor in get_group(read_message(envelope.body), "model").items()}
        return wire.ask(node, Envelope("train", envelope.facts, encode({"model": weights})))

    wire.fault = fault
    first, second = served(wire.recipe, wire).history
    assert "sums_left_out" not in first["server"]
    assert second["server"]["sums_left_out"] == 6


@pytest.mark.parametrize("kind", ["shares", "unmask"])
def test_one_who_spoils_sums_does_not_end_the_run(tmp_path: Path, kind: str) -> None:
    wire = six(summing(), tmp_path)

    def fault(node: int, envelope: Envelope) -> Answer | None:
        if node != FIRST_NODE or envelope.kind != kind:
            return None
        return Envelope(envelope.kind, {"keys": "", "shares": ["ff" * 17] * 6})

    wire.fault = fault
    first, second = served(wire.recipe, wire).history
    assert first["secure_sums"]["summed"] == second["secure_sums"]["summed"] == []


# a server that does not keep to it ------------------------------------------------------------------------------------


class Asked:
    """What one server asked of one client's node in a run, to be asked again in another way."""

    def __init__(self, folder: Path, method: str = "closed-form", **config: Any) -> None:
        self.recipe = summing(method)
        self.wire = Nearby(self.recipe, folder, range(6), {0: config})
        self.envelopes: dict[str, Envelope] = {}

        def note(node: int, envelope: Envelope) -> Answer | None:
            if node == FIRST_NODE:
                self.envelopes.setdefault(envelope.kind, envelope)
            return None

        self.wire.fault = note
        served(self.recipe, self.wire)

    def again(self, kind: str, change: Callable[[dict[str, Any]], None] = lambda asked: None, **facts: Any) -> Answer:
        envelope = self.envelopes[kind]
        asked = {name: value[:] if isinstance(value, list) else value for name, value in envelope.facts["sum"].items()}
        change(asked)
        return self.wire.ask(FIRST_NODE, Envelope(kind, {**envelope.facts, **facts, "sum": asked}, envelope.body))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(tmp_path_factory.mktemp("asked"))


@pytest.mark.parametrize("kind", ["keys", "shares", "train", "unmask"])
def test_a_repeated_request_has_the_same_answer(asked: Asked, kind: str) -> None:
    first, second = asked.again(kind), asked.again(kind)
    assert isinstance(first, Envelope)
    assert first == second


def drop(name: str, count: int = 1) -> Callable[[dict[str, Any]], None]:
    """The last of a list leave it, of clients with their keys."""

    def change(sums: dict[str, Any]) -> None:
        for one in {"clients": ("clients", "keys"), "sharers": ("sharers", "shares")}.get(name, (name,)):
            sums[one] = sums[one][:-count]

    return change


def foreign_key(sums: dict[str, Any]) -> None:
    sums["keys"] = ["ab" * 64, *sums["keys"][1:]]


def without_itself(sums: dict[str, Any]) -> None:
    sums["survivors"] = sums["survivors"][1:]


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("shares", drop("clients"), "at most 1 different requests for clients of the sum"),
        ("shares", drop("clients", 4), "expected the keys of 3 to 4096 different clients, got 2"),
        ("shares", foreign_key, "expected the keys of client 0 among those of the sum"),
        ("train", drop("sharers"), "at most 1 different requests for sharers of the sum"),
        ("train", drop("sharers", 3), "expected at least 4 of the sum's clients as sharers"),
        ("unmask", drop("survivors"), "at most 1 different requests for survivors of the sum"),
        ("unmask", drop("survivors", 3), "expected at least 4 of the sum's clients as survivors"),
        ("unmask", without_itself, "as survivors, this one among them"),
    ],
)
def test_a_node_answers_one_list_of_each_kind(
    asked: Asked, kind: str, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    answer = asked.again(kind, change)
    assert isinstance(answer, NodeError)
    assert told in answer


@pytest.mark.parametrize(("answers", "opened"), [(1, False), (2, True)])
@pytest.mark.parametrize("method", ["closed-form", "fedavg"])
def test_another_total_of_the_same_addends_is_opened_if_the_operator_allows_it(
    tmp_path: Path, method: str, answers: int, opened: bool
) -> None:
    """Of two totals that differ by one client the difference would be its addends."""
    once = Asked(tmp_path, method, answers=answers)
    other = {"round": 2, "experiment": once.envelopes["keys"].facts["experiment"]} if method == "closed-form" else {}

    def ask(kind: str, node: int, **sums: Any) -> Answer:
        envelope = once.envelopes[kind]
        facts = {**envelope.facts, **other, "base": "", "best": ""}
        return once.wire.ask(FIRST_NODE + node, Envelope(kind, {**facts, "sum": sums}, envelope.body))  # type: ignore[arg-type]

    def told(answer: Answer) -> Mapping[str, Any]:
        assert isinstance(answer, Envelope)
        return answer.facts

    name, clients = {"name": "0123456789abcdef", "all_rows": 240}, [0, 1, 2, 3, 4]
    keys = {client: told(ask("keys", client, **name))["keys"] for client in clients}
    lists = {**name, "clients": clients, "keys": [*keys.values()]}
    shares = {client: told(ask("shares", client, **lists))["shares"] for client in clients}
    lists |= {"sharers": clients, "shares": [shares[one][0] for one in clients], "survivors": clients}
    answer = ask("unmask", 0, **lists)
    assert isinstance(answer, Envelope if opened else NodeError)
    assert opened or "at most 1 different requests for totals in" in str(answer)


def test_a_server_begins_so_many_sums_and_no_more(tmp_path: Path, asked: Asked) -> None:
    """One for each time that it is started again in the round; of another round others."""
    wire = Nearby(asked.recipe, tmp_path)
    facts = {key: value for key, value in asked.envelopes["keys"].facts.items() if key != "sum"}

    def begin(number: int, **other: Any) -> Answer:
        return wire.ask(FIRST_NODE, Envelope("keys", {**facts, **other, "sum": {"name": f"{number:016x}"}}))

    assert all(isinstance(begin(number), Envelope) for number in range(10))
    for more in (begin(10), begin(3, experiment="f" * 16)):
        assert "at most 10 different requests for sums in round 1, exchange 0" in str(more)
    assert isinstance(begin(3), Envelope)
    assert isinstance(begin(10, round=2), Envelope)


def test_addends_do_not_leave_without_a_sum(asked: Asked) -> None:
    answer = asked.again("train", lambda sums: sums.update(name="", clients=[], keys=[], sharers=[]), round=2, base="")
    assert isinstance(answer, Envelope)
    assert read_message(answer.body).keys() == {"version"}


def test_a_node_whose_recipe_has_no_sums_answers_none_of_it(tmp_path: Path, asked: Asked) -> None:
    recipe = recipe_of("closed-form", hyperparameters=SMALL)
    envelope = asked.envelopes["keys"]
    answer = Nearby(recipe, tmp_path).ask(
        FIRST_NODE, Envelope("keys", {**envelope.facts, "settings": shared_config(recipe)})
    )
    assert isinstance(answer, NodeError)
    assert "expected secure_sums.enabled = true in this node's recipe" in answer


@pytest.mark.parametrize(
    ("method", "first", "same"),
    [
        ("closed-form", {"round": 1}, {"round": 2}),
        ("own-plus-common", {"round": 1}, {"round": 3, "is_final": True}),
        ("closed-form-columns", {"round": 1, "exchange_index": 1}, {"round": 2}),
    ],
)
def test_totals_are_counted_by_what_they_are_of(
    tmp_path: Path, method: str, first: Mapping[str, Any], same: Mapping[str, Any]
) -> None:
    limits = AnswerLimits(recipe_of(method), NodeConfig(**{"client-id": 0, "state-dir": str(tmp_path)}), rows=10)
    limits.count_total(TaskRequest(**first), "of six clients")
    limits.count_total(TaskRequest(**same), "of six clients")
    with pytest.raises(TooManyAnswers):
        limits.count_total(TaskRequest(**same), "of five clients")
    if method == "closed-form-columns":
        limits.count_total(TaskRequest(round=1, exchange_index=0), "of means, by five clients")
