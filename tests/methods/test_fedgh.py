"""FedGH's own properties against NumPy by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import polyfed
from polyfed.config.recipe import Recipe
from polyfed.core.client import Client
from polyfed.core.message import nbytes
from polyfed.core.method import TrainingResult
from polyfed.core.randomness import generator
from polyfed.core.settings import Training
from polyfed.engine.federation import Federation
from polyfed.engine.task import Execution, Task
from polyfed.errors import ConfigError
from polyfed.methods import FedGH, Local
from polyfed.models import zoo
from polyfed.plugins.settings import Availability
from tests.helpers.toys import (
    CLASSES,
    NETS,
    Watch,
    clients,
    federation,
    model_with,
    moved,
    rounds,
    same,
    samples,
    worker,
)

MIXED = ["shallow", "deep", "wide"]  # different extractors, one feature width


def header(state):
    return state["header"]


# ---- bytes (8.7)  ----


def cnn_round(count, classes, present, architectures):
    """One round of real FedGH networks on random images; client i holds `present` classes from i * present on."""
    g = torch.Generator().manual_seed(0)
    members = []
    for i in range(count):
        y = (torch.arange(present) + i * present) % classes
        images = torch.randint(0, 256, (present, 3, 32, 32), dtype=torch.uint8, generator=g)
        members.append(Client(architectures[i % len(architectures)], (images, y)))
    builders = {name: lambda name=name: zoo.build(name, (3, 32, 32), classes) for name in architectures}
    (round,) = rounds(FedGH(), members, builders, classes=classes, rounds=1, batch_size=present, lr=0.01)
    return round


def test_bytes_on_ten_classes_and_the_totals_of_table_3():
    round = cnn_round(10, 10, 2, [f"fedgh-cnn{i}" for i in range(1, 6)])
    for i in range(10):
        assert (nbytes(round.down[i]), nbytes(round.up[i])) == (20_040, 4_008)
        assert FedGH().nbytes_in_paper(round.down[i]) + FedGH().nbytes_in_paper(round.up[i]) == 24_008
    record = round.record
    assert record["bytes_down"] + record["bytes_up"] == 10 * 24_048
    paper = record["bytes_down_paper"] + record["bytes_up_paper"]
    assert paper == 10 * 24_008
    assert f"{paper / 10 / 1024:.2f}" == "23.45"  # KiB per client and round
    assert f"{2 * paper / 1024:.2f}" == "468.91"  # KiB over the 2 rounds to 90 %
    assert f"{(record['bytes_down'] + record['bytes_up']) / 10 / 1024:.2f}" == "23.48"


def test_bytes_on_a_hundred_classes_and_the_totals_of_table_3():
    round = cnn_round(2, 100, 10, ["fedgh-cnn5", "fedgh-cnn4"])
    for i in range(2):
        assert (nbytes(round.down[i]), nbytes(round.up[i])) == (200_400, 20_040)
    record = round.record
    assert record["bytes_down"] + record["bytes_up"] == 2 * 220_440
    paper = (record["bytes_down_paper"] + record["bytes_up_paper"]) / 2
    assert paper == 220_040
    assert f"{paper / 1024:.2f}" == "214.88"
    assert f"{7 * 10 * paper / 2**20:.2f}" == "14.69"  # MiB over the 7 rounds of 10 clients to 70 %


# ---- the header against NumPy  ----


def numpy_header(theta, bias, batches, lr, clip=50.0):
    """Gradient steps on the mean cross entropy of each batch [(vector, class, factor)]."""
    theta, bias = theta.astype(np.float64), bias.astype(np.float64)
    for pairs in batches:
        g_theta, g_bias = np.zeros_like(theta), np.zeros_like(bias)
        for vector, label, factor in pairs:
            logits = theta @ vector + bias
            p = np.exp(logits - logits.max())
            p = factor * (p / p.sum() - np.eye(len(bias))[label])
            g_theta += np.outer(p, vector) / len(pairs)
            g_bias += p / len(pairs)
        norm = np.sqrt((g_theta**2).sum() + (g_bias**2).sum())
        shrink = min(1.0, clip / norm) if clip and norm > 0 else 1.0
        theta, bias = theta - lr * shrink * g_theta, bias - lr * shrink * g_bias
    return theta, bias


def pairs_of(round):
    """Per client the pairs it sent: clients ascending, classes ascending."""
    return [
        [(v, int(s)) for v, s in zip(m["lars"].double().numpy(), m["labels"], strict=True)]
        for _, m in sorted(round.up.items())
    ]


def batches_of(mode, per_client, epochs, round):
    flat = [(v, s, 1.0) for pairs in per_client for v, s in pairs]
    draws = generator(0, "server header", round)
    for _ in range(epochs):
        if mode == "lar":
            yield from ([pair] for pair in flat)
        elif mode == "client":
            yield from ([(v, s, 1.0) for v, s in pairs] for pairs in per_client)
        elif mode == "round":
            yield flat
        else:
            order = torch.randperm(len(flat), generator=draws).tolist()
            yield from ([flat[i] for i in order[start : start + mode]] for start in range(0, len(flat), mode))


@pytest.mark.parametrize(
    ("mode", "epochs", "lr"), [("lar", 1, 0.5), ("lar", 3, 0.1), ("client", 2, 0.5), ("round", 2, 0.5), (10, 100, 0.05)]
)
def test_the_header_against_numpy(mode, epochs, lr):
    method = FedGH(header_batch=mode, header_epochs=epochs, header_lr=lr)
    members = clients([*MIXED, "deep", "shallow"], sizes=[12, 9, 15, 3, 8])
    history = rounds(method, members, rounds=3, client_fraction=0.8)
    for number, round in enumerate(history, 1):
        before, after = header(round.before), header(round.after)
        batches = batches_of(mode, pairs_of(round), epochs, number)
        theta, bias = numpy_header(before["weight"].numpy(), before["bias"].numpy(), batches, lr)
        np.testing.assert_allclose(after["weight"].numpy(), theta, atol=2e-5 if epochs == 100 else 2e-6)
        np.testing.assert_allclose(after["bias"].numpy(), bias, atol=2e-5 if epochs == 100 else 2e-6)
        assert moved(before, after) > 1e-3, "the header must really change (8.13)"


def aggregated(method, uploads, theta=None):
    """The header after one aggregation of hand-made uploads, from `theta` or the drawn one; and the one before."""
    fed, _ = federation(method, clients(MIXED))
    method.init_server(fed.server)
    if theta is not None:
        fed.server.state["header"] = theta
    before = dict(header(fed.server.state))
    fed.server.round = 1
    method.aggregate(fed.server, uploads)
    return before, header(fed.server.state)


def lars(labels, vectors):
    return {
        "labels": torch.tensor(labels, dtype=torch.int32),
        "lars": torch.as_tensor(vectors).float().reshape(-1, 5),
    }


HAND = {
    0: lars([0, 2], [[1.0, 0, 0, 2, 0], [0, -1, 0, 0, 1]]),
    2: lars([1, 2], [[0, 0, 3.0, 0, 0], [0.5, 0.5, 0, 0, 0]]),
}


def test_clip_bites():
    big = {0: lars([1], [[300.0, 0, 0, 0, 0]])}
    zero = {"weight": torch.zeros(CLASSES, 5), "bias": torch.zeros(CLASSES)}
    for clip, expected in ((50.0, 50.0), (2.0, 2.0), (0.0, np.sqrt(2 / 3) * np.sqrt(300**2 + 1))):
        _, after = aggregated(FedGH(max_grad_norm=clip, header_lr=0.1), big, zero)
        length = torch.sqrt(sum(t.square().sum() for t in after.values())) / 0.1
        np.testing.assert_allclose(float(length), expected, rtol=1e-5)


def test_header_lr_0_keeps_the_header_for_ever():
    history = rounds(FedGH(header_lr=0.0), clients(MIXED), rounds=4)
    for round in history:
        assert same(header(round.after), header(history[0].before))
        assert all(same(header(m), header(history[0].before)) for m in round.down.values())


def test_orthogonal_lars_are_separated():
    """Clients with disjoint classes; after enough steps the header tells all LARs apart (8.11)."""
    method = FedGH(header_lr=0.5)
    fed, _ = federation(method, clients(MIXED))
    method.init_server(fed.server)
    fed.server.round = 1
    vectors = 3 * torch.eye(5)[:3]
    uploads = {i: lars([i], vectors[i : i + 1]) for i in range(3)}
    for _ in range(30):
        method.aggregate(fed.server, uploads)
    theta = header(fed.server.state)
    probabilities = torch.softmax(vectors @ theta["weight"].T + theta["bias"], dim=1)
    assert bool((probabilities.diagonal() > 0.9).all())


def test_a_class_without_lar_is_only_pushed_down():
    before, after = aggregated(FedGH(header_lr=0.2), {1: lars([0], [[1.0, 2, 0, 0, 0]])})
    r = torch.tensor([1.0, 2, 0, 0, 0])
    p = torch.softmax(before["weight"] @ r + before["bias"], dim=0)
    for absent in (1, 2):
        torch.testing.assert_close(after["weight"][absent], before["weight"][absent] - 0.2 * p[absent] * r)
        torch.testing.assert_close(after["bias"][absent], before["bias"][absent] - 0.2 * p[absent])


def test_the_order_of_clients_matters_only_pair_by_pair():
    swapped = {0: HAND[2], 2: HAND[0]}
    by_round = [aggregated(FedGH(header_batch="round", header_lr=0.5), u)[1] for u in (HAND, swapped)]
    by_lar = [aggregated(FedGH(header_batch="lar", header_lr=0.5), u)[1] for u in (HAND, swapped)]
    assert moved(*by_round) < 1e-6
    assert moved(*by_lar) > 1e-3


# ---- LARs (8.1, 8.2, 8.6)  ----


@pytest.mark.parametrize("architecture", ["deep", "bn", "dropout"])
def test_lars_are_taken_after_training_in_eval_mode(architecture):
    members = clients([architecture, architecture], sizes=[12, 25])
    (round,) = rounds(FedGH(), members, rounds=1, local_epochs=3, lr=0.3)
    for i, client in enumerate(members):
        data = client.data.train
        z = model_with(NETS[architecture], round.weights[i]).represent(data.x).detach().double().numpy()
        labels = sorted(set(data.y.tolist()))
        expected = np.stack([z[data.y.numpy() == s].mean(0) for s in labels])
        assert round.up[i]["labels"].tolist() == labels
        np.testing.assert_allclose(round.up[i]["lars"].numpy(), expected, atol=1e-6)
        training = NETS[architecture]()
        training.load_state_dict(round.weights[i])
        torch.manual_seed(0)
        if architecture != "deep":
            in_train_mode = training.train().represent(data.x).detach().double().numpy()
            assert np.abs(in_train_mode[data.y.numpy() == labels[0]].mean(0) - expected[0]).max() > 1e-3


def test_a_class_with_one_sample_sends_that_samples_representation():
    data = samples(9, 4, (0, 1))
    data.y[4] = 2
    (round,) = rounds(FedGH(), [Client("deep", data)], rounds=1)
    z = model_with(NETS["deep"], round.weights[0]).represent(data.x).detach()
    assert torch.equal(round.up[0]["lars"][2], z[4])


@pytest.mark.parametrize("architecture", ["bn", "dropout"])
def test_the_pass_over_the_data_leaves_no_trace(architecture):
    fed, _ = federation(FedGH(), clients([architecture]))
    at = worker(fed, 0)
    at.model.intermediate.eval()
    before = {name: t.clone() for name, t in at.model.state_dict().items()}
    flags, state = [m.training for m in at.model.modules()], torch.get_rng_state()
    first = FedGH().upload(at, TrainingResult())
    assert same(before, at.model.state_dict())
    assert [m.training for m in at.model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in at.model.parameters())
    assert same(first, FedGH().upload(at, TrainingResult()))


def test_identical_clients_send_identical_lars():
    torch.manual_seed(1)
    model, data = NETS["deep"](), samples(12, 0)
    (round,) = rounds(FedGH(), [Client(model, data) for _ in range(3)], rounds=1, batch_size=12, local_epochs=3)
    for i in (1, 2):  # only the order of rows within the one full batch differs
        torch.testing.assert_close(round.up[i]["lars"], round.up[0]["lars"], atol=1e-6, rtol=0)


# ---- bytes  ----


# ---- the network for CIFAR-100  ----

RESNET = Path(__file__).parents[2] / "recipes" / "fedgh" / "table1-cifar100.toml"


def test_the_recipe_for_cifar_100_has_the_papers_network():
    recipe = Recipe.load(RESNET)
    (name,), width = recipe.models.architectures, recipe.models.feature_dim
    with torch.device("meta"):
        model = zoo.build(name, (3, 32, 32), 100, width)
    assert sum(p.numel() for p in model.parameters()) == 11_475_432
    *_, pool, flatten, projection, relu = model.intermediate
    kinds = (torch.nn.AdaptiveAvgPool2d, torch.nn.Flatten, torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear)
    assert [type(m) for m in (pool, flatten, projection, relu, model.head)] == list(kinds)
    assert (projection.in_features, projection.out_features) == (512, 500)
    assert (model.head.in_features, model.head.out_features) == (500, 100)
    assert recipe.chosen_method == FedGH()


@pytest.mark.slow
def test_the_recipe_for_cifar_100_runs_on_real_images(data_root):
    """On CIFAR-10's images, two classes each: the network is the same but for the header's outputs."""
    brief = [
        "data.dataset=cifar10",
        "data.label_column=label",
        "data.classes_per_client=2",
        "data.class_assignment=round_robin",
    ]
    brief += [
        "data.limit_train=3000",
        "data.limit_test=1000",
        "data.max_train_per_client=64",
        "data.max_test_per_client=50",
    ]
    brief += ["data.num_clients=2", "training.rounds=3", "training.local_epochs=2", f"data.root='{data_root}'"]
    run = polyfed.run(RESNET, overrides=[*brief, "training.batch_size=16"])
    assert run.result["bytes_up"] == 3 * 2 * 4_008
    assert run.result["bytes_down"] == 3 * 2 * 20_040
    assert run.models[0].feature_dim == 500
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]
    assert run.result["accuracy"] > 0.6  # of two classes each


# ---- who gets and keeps what (8.3, 8.9, 8.10, 8.12)  ----


def test_extractors_stay_at_home_and_headers_are_alike():
    fed, watch = federation(FedGH(), clients([*MIXED, "deep"]), rounds=3, client_fraction=0.75)
    fed.run()
    for round in watch.rounds:
        for i, message in round.up.items():
            assert set(message) == {"labels", "lars"}
            own = {name: t for name, t in round.weights[i].items() if not name.startswith("head.")}
            sizes = {t.numel() * t.element_size() for t in own.values()}
            assert message["lars"].shape == (len(message["labels"]), 5)
            assert not {tuple(t.shape) for t in message.values()} & {tuple(t.shape) for t in own.values()}
            assert nbytes(message) not in sizes
        assert len(round.down) == 3
        for message in round.down.values():
            assert set(message) == {"header"}
            assert same(header(message), header(round.before))
    for i in range(4):  # and what is sent is what the client starts with, its extractor is its own
        at = worker(fed, i, round=4)
        fed.method.receive(at, fed.method.broadcast(fed.server, i))
        assert same(at.model.head.state_dict(), header(fed.server.state))
        for part in ("extractor", "intermediate"):
            assert all(
                torch.equal(t, fed.clients[i].weights[n])
                for n, t in at.model.state_dict().items()
                if n.startswith(part)
            )


def test_the_whole_network_trains_and_the_header_is_replaced_at_the_next_start():
    history = rounds(FedGH(), clients(MIXED), rounds=2)
    for i in range(3):
        for part in ("extractor", "intermediate", "head"):
            old, new = history[0].weights[i], history[1].weights[i]
            assert any(not torch.equal(old[n], new[n]) for n in old if n.startswith(part))
        own = {n.removeprefix("head."): t for n, t in history[0].weights[i].items() if n.startswith("head.")}
        assert moved(own, header(history[1].down[i])) > 1e-3


def test_lost_uploads():
    history = rounds(FedGH(), clients(MIXED), rounds=3, lose=lambda r, i: r == 2 or (r == 3 and i == 1))
    assert same(header(history[1].before), header(history[1].after))
    third = history[2]
    theta, bias = (header(third.before)[name].numpy() for name in ("weight", "bias"))
    answered = [[(v, s, 1.0)] for k in (0, 2) for v, s in pairs_of(third)[k]]
    expected = numpy_header(theta, bias, answered, 0.01)
    np.testing.assert_allclose(header(third.after)["weight"].numpy(), expected[0], atol=1e-6)


def test_a_late_upload_trains_the_header_of_a_later_round():
    settings, late = Training(rounds=2, batch_size=4, lr=0.1), Availability(delay_rate=1.0)
    watch = Watch()
    fed = watch.federation = Federation(
        clients(MIXED),
        FedGH(header_lr=0.5),
        settings,
        plugins=[late],
        task=Task(classes=CLASSES),
        executor=Execution(wrap=watch.around),
        builders=NETS,
        loggers=[watch],
    )
    fed.run()
    first, second = watch.rounds
    assert same(header(first.before), header(first.after))
    assert [upload["from"] for upload in second.record["arrived"]] == [1, 1, 1]
    batches = [[(v, s, 1.0)] for pairs in pairs_of(first) for v, s in pairs]
    theta, _ = numpy_header(*(header(second.before)[name].numpy() for name in ("weight", "bias")), batches, 0.5)
    np.testing.assert_allclose(header(second.after)["weight"].numpy(), theta, atol=2e-6)


def test_unequal_feature_widths_are_refused_before_round_1():
    with pytest.raises(ConfigError, match=r"client 2 \('broad'\) gives 8, client 0 \('shallow'\) gives 5.*feature_dim"):
        federation(FedGH(), clients(["shallow", "deep", "broad"]))


@pytest.mark.slow
def test_helps_where_classes_are_rare():
    """Each client has two of three classes and is tested on all: Local can know two at most, the header knows three."""
    members = [Client(a, samples(60, i, (i, (i + 1) % 3)), samples(150, 70 + i)) for i, a in enumerate(MIXED)]
    method = FedGH(header_lr=0.1, header_batch=10, header_epochs=100)
    received = {"extra_stages": ["received"]}
    from polyfed.core.settings import Evaluation

    result = federation(method, members, rounds=6, lr=0.1, evaluation=Evaluation(**received))[0].run().result
    local = federation(Local(), members, rounds=6, lr=0.1)[0].run().result
    assert result["accuracy_by_stage"]["received"]["mean"] > local["accuracy"] + 0.05
