"""What averaging asks of models, what the server begins with, and its steps by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polyfed as pf
from polyfed.core.message import Group, Message, get_group
from polyfed.core.modules import float_state
from polyfed.core.server import Server
from polyfed.methods.building_blocks import weight_averaging as averaging
from polyfed.methods.building_blocks.weight_averaging import Aggregation
from polyfed.testing import ConformanceKit

BOTH: tuple[Aggregation, ...] = ("layer-wise", "same-shape")
WEIGHT, BIAS = "intermediate.project.weight", "head.bias"
DEEPEST = "intermediate.block1.conv.bias"  # of the network with two blocks alone
STATISTIC = "extractor.norm.running_mean"


def server_of_six() -> Server:
    """Six clients with three networks in turn: one block, two and none, with BatchNorm; all names have one shape."""
    kit = ConformanceKit(method=pf.methods.FedAvg())
    server = kit.world(norm=True).federation(kit.method).server
    server.set_available(range(6))
    return server


def begun(aggregation: Aggregation) -> Server:
    server = server_of_six()
    averaging.init(server, aggregation)
    return server


def kept(server: Server, what: str) -> Group:
    return get_group(server.state, what)


def sent_by(server: Server, number: int, value: float) -> dict[str, Tensor]:
    """What a client sends all of whose weights have one value."""
    architecture = server.clients[number].architecture
    return {
        name: torch.full_like(tensor, value) for name, tensor in float_state(server.model(architecture, {})).items()
    }


def test_within_an_architecture_the_server_begins_with_its_initial_weights() -> None:
    server = begun("same-shape")
    assert set(server.state) == {"model net0", "model net1", "model net2"}
    for architecture in server.architectures:
        initial = server.initial_state(architecture)
        shared = averaging.weights_for(server, "same-shape", architecture)
        assert set(shared) == {name for name, tensor in initial.items() if tensor.is_floating_point()}
        assert all(torch.equal(tensor, initial[name]) for name, tensor in shared.items())


def test_of_all_architectures_the_largest_that_has_a_tensor_gives_it() -> None:
    server = begun("layer-wise")
    assert set(server.state) == {"model union", "names net0", "names net1", "names net2"}
    largest, middle = server.initial_state("net1"), server.initial_state("net0")
    union = kept(server, "model union")
    assert set(union) == {name for name, tensor in largest.items() if tensor.is_floating_point()}
    assert all(torch.equal(tensor, largest[name]) for name, tensor in union.items())
    assert not torch.equal(largest[WEIGHT], middle[WEIGHT]), "or the order says nothing"
    assert all(not tensor.numel() for tensor in kept(server, "names net0").values())
    assert set(averaging.weights_for(server, "layer-wise", "net2")) == set(kept(server, "names net2")) < set(union)


@pytest.mark.parametrize("aggregation", BOTH)
def test_of_some_parts_nothing_else_is_shared(aggregation: Aggregation) -> None:
    server = server_of_six()
    averaging.init(server, aggregation, ("extractor",))
    for architecture in server.architectures:
        shared = averaging.weights_for(server, aggregation, architecture)
        assert {name.partition(".")[0] for name in shared} == {"extractor"}


def test_who_shares_a_tensor_is_counted_among_those_present() -> None:
    server = begun("layer-wise")
    server.set_available([0, 1, 2, 4])  # networks 0, 1, 2 and 1
    counts = averaging.holder_counts(server, "layer-wise", "net1")
    assert (counts[WEIGHT], counts["intermediate.block0.conv.bias"], counts[DEEPEST]) == (4, 3, 2)
    within = begun("same-shape")
    within.set_available([0, 1, 2, 4])
    assert set(averaging.holder_counts(within, "same-shape", "net1").values()) == {2}


def step(server: Server, aggregation: Aggregation, sent: dict[int, Group], **how: float) -> None:
    """Towards the uniform mean."""

    def target(base: Group, members: list[int]) -> dict[str, Tensor]:
        names = {name: None for i in members for name in sent[i]}
        means = {name: torch.stack([sent[i][name] for i in members if name in sent[i]]).mean(0) for name in names}
        return {**base, **means}

    averaging.server_step(server, aggregation, sent, target, **how)


def test_a_whole_step_is_the_target_bit_for_bit() -> None:
    server = begun("layer-wise")
    before = kept(server, "model union")
    low, high = -3.1e-3, 5.3e-3  # small beside the weights, so that a detour would be rounded
    step(server, "layer-wise", {0: sent_by(server, 0, low), 2: sent_by(server, 2, high)})
    after = kept(server, "model union")
    assert torch.equal(after[WEIGHT], torch.stack([torch.full((6, 36), low), torch.full((6, 36), high)]).mean(0))
    assert torch.equal(after["intermediate.block0.conv.bias"], torch.full((4,), low)), "of the one client that has it"
    assert torch.equal(after[DEEPEST], before[DEEPEST]), "nobody sent it"


def test_half_a_step_moves_parameters_half_the_way_and_buffers_all_of_it() -> None:
    server = begun("layer-wise")
    before = kept(server, "model union")
    step(server, "layer-wise", {0: sent_by(server, 0, 4.0)}, rate=0.5)
    after = kept(server, "model union")
    assert torch.equal(after[WEIGHT], before[WEIGHT] + 0.5 * (4.0 - before[WEIGHT]))
    assert torch.equal(after[STATISTIC], torch.full((4,), 4.0))
    assert torch.equal(after[DEEPEST], before[DEEPEST])


def test_within_an_architecture_the_others_stay() -> None:
    server = begun("same-shape")
    others = {name: kept(server, name) for name in ("model net0", "model net2")}
    step(server, "same-shape", {1: sent_by(server, 1, 2.0), 4: sent_by(server, 4, 6.0)})
    assert torch.equal(kept(server, "model net1")[STATISTIC], torch.full((4,), 4.0))
    torch.testing.assert_close(kept(server, "model net1")[WEIGHT], torch.full((6, 36), 4.0))
    assert all(kept(server, name) is group for name, group in others.items())


@pytest.mark.parametrize(("aggregation", "other"), [("layer-wise", 3), ("same-shape", 4)])
def test_means_are_weighted_and_rated(aggregation: Aggregation, other: int) -> None:
    """Layer by layer also among different networks: clients 1 and 4 have the same one."""
    server = begun(aggregation)
    before = averaging.weights_for(server, aggregation, "net1")
    sent = {1: sent_by(server, 1, 1.0), other: sent_by(server, other, -7.0)}
    averaging.average(server, aggregation, sent, {1: 3.0, other: 1.0}, 0.25)
    after = averaging.weights_for(server, aggregation, "net1")
    torch.testing.assert_close(after[WEIGHT], before[WEIGHT] + 0.25 * (-1.0 - before[WEIGHT]))
    alone = 1.0 if aggregation == "layer-wise" else -1.0
    torch.testing.assert_close(after[DEEPEST], before[DEEPEST] + 0.25 * (alone - before[DEEPEST]))


@pytest.mark.parametrize("aggregation", BOTH)
def test_what_begins_at_zero_is_of_parameters_and_adds_up(aggregation: Aggregation) -> None:
    server = begun(aggregation)
    averaging.init_zeros(server, aggregation, "c")
    zeros = averaging.weights_for(server, aggregation, "net1", "c")
    assert WEIGHT in zeros
    assert STATISTIC not in zeros
    assert not any(tensor.any() for tensor in zeros.values())
    averaging.accumulate(server, aggregation, "c", {1: sent_by(server, 1, 2.0), 4: {WEIGHT: torch.full((6, 36), -0.5)}})
    averaging.accumulate(server, aggregation, "c", {1: sent_by(server, 1, 1.0)})
    total = averaging.weights_for(server, aggregation, "net1", "c")
    assert set(total) == set(zeros)
    assert torch.equal(total[WEIGHT], torch.full((6, 36), 2.5))
    assert torch.equal(total[BIAS], torch.full((3,), 3.0))


@pytest.mark.parametrize("aggregation", BOTH)
def test_tensors_that_are_set_are_copies_and_all_else_stays(aggregation: Aggregation) -> None:
    server = begun(aggregation)
    before = averaging.weights_for(server, aggregation, "net0")
    others = averaging.weights_for(server, aggregation, "net2")
    given = torch.full((3,), 7.0)
    averaging.set_tensors(server, aggregation, "net0", {BIAS: given})
    after = averaging.weights_for(server, aggregation, "net0")
    assert torch.equal(after[BIAS], given)
    assert after[BIAS] is not given
    assert all(after[name] is before[name] for name in before if name != BIAS)
    elsewhere = averaging.weights_for(server, aggregation, "net2")[BIAS]
    assert torch.equal(elsewhere, given if aggregation == "layer-wise" else others[BIAS])


def test_shares_are_the_samples_or_one() -> None:
    uploads: dict[int, Message] = {3: {"model": {}}, 5: {"model": {}, "n": torch.tensor(7)}}
    server = server_of_six()
    sizes = {3: float(server.clients[3].num_samples), 5: 7.0}  # as sent, or else as introduced
    assert averaging.client_shares(server, uploads, "samples") == sizes
    assert averaging.client_shares(server, uploads, "uniform") == {3: 1.0, 5: 1.0}
    assert averaging.client_weights(uploads) == {3: {}, 5: {}}
