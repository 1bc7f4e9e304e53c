"""Sums of rows: what they add up to, and the closed forms against scikit-learn and PyTorch by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from polyfed.functional import class_statistics
from polyfed.functional.class_statistics import add, are_possible, sum_rows
from polyfed.functional.closed_forms import discriminant, log_posterior, naive_bayes, ridge
from polyfed.functional.noisy_sums import add_noise, are_within, nearest_possible
from polyfed.records.neighbors import neighbors

CLASSES = 4


def rows(count: int = 90, width: int = 6) -> tuple[Tensor, Tensor]:
    """Features of a mean by class, and classes 0, 1 and 3: nobody has a row of class 2."""
    draws = torch.Generator().manual_seed(0)
    y = torch.tensor([0, 1, 3, 3])[torch.randint(4, (count,), generator=draws)]
    means = torch.randn(CLASSES, width, generator=draws)
    return means[y] + torch.randn(count, width, generator=draws), y


def near(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-9)


PHI, Y = rows()


@pytest.mark.parametrize("cuts", [(10, 20, 60), (1, 89), (60, 10, 20)])
def test_any_grouping_and_order_give_one_solution(cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_statistics, "_ROWS", 7)
    whole = sum_rows(PHI, Y, CLASSES)
    order = torch.randperm(len(Y), generator=torch.Generator().manual_seed(1))
    parts = [sum_rows(PHI[some], Y[some], CLASSES) for some in order.split(cuts)]
    total = parts[-1]
    for part in parts[:-1]:
        total = add(total, part)
    near(total, whole)
    torch.testing.assert_close(discriminant(total, 0.1), discriminant(whole, 0.1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shrinkage", [0.01, 0.3])
def test_the_discriminant_is_scikit_learns(shrinkage: float) -> None:
    """Its covariance is shrunk towards tr / D I class by class, which with the rows' own shares is the same."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    weight, bias = discriminant(sum_rows(PHI, Y, CLASSES), shrinkage)
    assert not weight[:, 2].any()
    assert not bias[2]
    counts = Y.bincount(minlength=CLASSES)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(PHI.double().numpy(), Y.numpy())
    found = log_posterior(PHI.double() @ weight + bias, counts, counts)
    assert found[:, [0, 1, 3]].numpy() == pytest.approx(theirs.predict_log_proba(PHI.double().numpy()), abs=1e-8)
    assert bool((found[:, 2] == -torch.inf).all())


def test_few_rows_and_rows_that_do_not_vary() -> None:
    """Fewer rows than features; one row for each class, where means are all that is known."""
    weight, bias = discriminant(sum_rows(PHI[:3], torch.tensor([0, 1, 3]), CLASSES), 0.1)
    scores = PHI[:3].double() @ weight + bias
    assert scores[:, [0, 1, 3]].argmax(dim=1).tolist() == [0, 1, 2]
    assert bool(torch.isfinite(discriminant(sum_rows(PHI[:1], Y[:1], CLASSES), 0.1)[0]).all())


@pytest.mark.parametrize("shrinkage", [0.01, 0.3])
def test_numbers_are_fitted_by_ridge_regression(shrinkage: float) -> None:
    from sklearn.linear_model import Ridge

    y = PHI[:, 0] * 2 - PHI[:, 1] + 3
    centered = (PHI.double() - PHI.double().mean(0)).numpy()
    alpha = shrinkage / (1 - shrinkage) * float(np.square(centered).sum()) / PHI.shape[1]
    theirs = Ridge(alpha=alpha).fit(PHI.double().numpy(), y.double().numpy())
    weight, bias = ridge(add(sum_rows(PHI[:20], y[:20], 0), sum_rows(PHI[20:], y[20:], 0)), shrinkage)
    assert weight[:, 0].numpy() == pytest.approx(theirs.coef_, abs=1e-8)
    assert float(bias) == pytest.approx(theirs.intercept_, abs=1e-8)


@pytest.mark.parametrize("shrinkage", [0.2, 0.5])
def test_counts_of_words_are_scikit_learns_naive_bayes(shrinkage: float) -> None:
    from sklearn.naive_bayes import MultinomialNB

    counts = torch.randint(5, PHI.shape, generator=torch.Generator().manual_seed(2)).float()
    sums = sum_rows(counts, Y, CLASSES, products=False)
    assert "products" not in sums
    weight, bias = naive_bayes(sums, shrinkage)
    theirs = MultinomialNB(alpha=shrinkage / (1 - shrinkage)).fit(counts.numpy(), Y.numpy())
    found = log_posterior(counts.double() @ weight + bias, sums["counts"], sums["counts"])
    assert found[:, [0, 1, 3]].numpy() == pytest.approx(theirs.predict_log_proba(counts.numpy()), abs=1e-8)


def test_shares_of_classes_that_nobody_has_sent_do_not_count() -> None:
    scores = torch.zeros(1, 3)
    sent = torch.tensor([4, 4, 0])
    assert log_posterior(scores, sent, torch.tensor([3, 1, 9])).exp()[0].tolist() == pytest.approx([0.75, 0.25, 0])
    assert log_posterior(scores, sent, torch.tensor([0, 0, 9])).exp()[0].tolist() == pytest.approx([0.5, 0.5, 0])


NO_ROWS = {"counts": torch.zeros(CLASSES, dtype=torch.int64), "sums": torch.zeros(CLASSES, 6, dtype=torch.float64)}


@pytest.mark.parametrize("phi", [PHI, PHI[:1], PHI[:4], 1e6 + PHI, 0 * PHI], ids=["many", "one", "few", "far", "zero"])
def test_sums_of_rows_are_possible(phi: Tensor) -> None:
    y = Y[: len(phi)]
    assert are_possible(sum_rows(phi, y, CLASSES), len(y))
    assert are_possible(sum_rows(phi, phi[:, 0], 0), len(y))
    assert are_possible(sum_rows(phi.abs(), y, CLASSES, products=False), len(y))
    assert not are_possible(sum_rows(phi, y, CLASSES), len(y) + 1)


@pytest.mark.parametrize(
    "change",
    [
        {"products": -sum_rows(PHI, Y, CLASSES)["products"]},
        {"products": torch.zeros(21, dtype=torch.float64)},
        {"sums": 9 * sum_rows(PHI, Y, CLASSES)["sums"]},
        NO_ROWS,
    ],
    ids=["negative squares", "no squares", "far means", "no rows"],
)
def test_other_sums_are_not(change: Mapping[str, Tensor]) -> None:
    assert not are_possible({**sum_rows(PHI, Y, CLASSES), **change}, len(Y))


def test_no_word_occurs_less_than_never() -> None:
    assert not are_possible(sum_rows(PHI, Y, CLASSES, products=False), len(Y))


def deviations(sums: Mapping[str, Tensor], noise: float) -> dict[str, Tensor]:
    """The deviation of the noise on each number: what comes of none with draws that are all one."""
    none = {name: torch.zeros_like(tensor) for name, tensor in sums.items()}
    return add_noise(none, noise, lambda shape: torch.ones(shape, dtype=torch.float64))


@pytest.mark.parametrize("phi", [PHI[:1], torch.eye(6)[:1], torch.ones(1, 6)])
def test_a_row_of_norm_one_changes_all_by_one_over_its_noise(phi: Tensor) -> None:
    row = sum_rows(torch.nn.functional.normalize(phi.double()), Y[:1], CLASSES)
    stds = deviations(row, 2.5)
    effect = sum(float((row[name] / stds[name]).square().sum()) for name in row)
    assert effect**0.5 == pytest.approx(1 / 2.5, rel=1e-3)
    half = sum_rows(torch.nn.functional.normalize(phi.double()) / 2, Y[:1], CLASSES)
    assert sum(float((half[name] / stds[name]).square().sum()) for name in half) < effect


def test_another_row_in_a_rows_place_changes_all_by_up_to_as_much_as_is_said() -> None:
    draws = torch.Generator().manual_seed(0)

    def effect(one: Tensor, other: Tensor, y: tuple[int, int]) -> float:
        first, second = (
            sum_rows(phi, torch.tensor([label]), CLASSES) for phi, label in zip((one, other), y, strict=True)
        )
        stds = deviations(first, 1.0)
        return sum(float(((first[name] - second[name]) / stds[name]).square().sum()) for name in first) ** 0.5

    phi = torch.nn.functional.normalize(torch.randn(30, 6, generator=draws, dtype=torch.float64))
    found = [effect(a[None], b[None], y) for a in phi[:10] for b in phi[10:] for y in ((0, 0), (0, 1))]
    worst = effect(phi[:1], -phi[:1], (0, 0))
    assert max(found) < worst
    assert f"up to {worst:.2f} times" in neighbors(["sums"])


def test_noise_is_of_its_deviation_and_another_on_every_number() -> None:
    sums = sum_rows(torch.zeros(5, 40), torch.arange(5) % CLASSES, CLASSES)
    draws = torch.Generator().manual_seed(0)
    noisy = add_noise(sums, 1.5, lambda shape: torch.randn(shape, generator=draws, dtype=torch.float64))
    stds = deviations(sums, 1.5)
    drawn = torch.cat([((noisy[name] - sums[name]) / stds[name]).flatten() for name in sums])
    assert len(drawn.unique()) > 900  # of 984; they lie on grids
    assert float(drawn.std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.3, 2.0, 50.0])
def test_sums_of_rows_with_noise_are_within_what_such_rows_can_have(noise: float) -> None:
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        phi = torch.nn.functional.normalize(torch.randn(60, 6, generator=draws)) * (1 - 2**-20)  # rounded
        sums = sum_rows(phi if seed else phi[:1].expand(60, 6), torch.arange(60) % CLASSES, CLASSES)
        noisy = add_noise(sums, noise, lambda shape, draws=draws: torch.randn(shape, generator=draws).double())
        assert are_within(noisy if noise else sums, 60, noise)


@pytest.mark.parametrize("change", ["sums", "one class", "products", "trace", "counts", "more rows"])
def test_sums_that_no_rows_of_norm_one_have_are_not_within(change: str) -> None:
    phi = 0.999 * torch.nn.functional.normalize(PHI.double()).repeat(20, 1)
    sums = {name: tensor.double() for name, tensor in sum_rows(phi, Y.repeat(20), CLASSES).items()}
    rows = len(phi)
    wrong = {
        "sums": {"sums": torch.full_like(sums["sums"], float(rows))},
        "one class": {"sums": sums["sums"] * torch.tensor([[30.0], [1], [1], [1]])},
        "products": {"products": torch.full_like(sums["products"], float(rows))},
        "trace": {"products": -sums["products"]},
        "counts": {"counts": -sums["counts"]},
        "more rows": {"counts": sums["counts"] * 2},
    }
    assert are_within(sums, rows, 0.3)
    assert not are_within({**sums, **wrong[change]}, rows, 0.3)


@pytest.mark.parametrize(
    ("name", "share", "most"), [("counts", 0.05, 20), ("sums", 0.7, 12.44), ("products", 0.25, 14.58)]
)
def test_noise_reaches_as_far_as_its_numbers_let_it(name: str, share: float, most: float) -> None:
    """By 10 sqrt(4) deviations for the sum of 4 counts, sqrt(d) + 10 for the norm of d = 6 and 21 other numbers."""
    rows, noise = 60, 0.3
    sums = {key: tensor.double() for key, tensor in sum_rows(torch.zeros(60, 6), Y[:60], CLASSES).items()}
    bound = {"counts": rows, "sums": float(sums["counts"][0]) + 10 * noise / 0.05**0.5, "products": rows}[name]
    for deviations_away, expected in ((most - 0.1, True), (most + 0.1, False)):
        changed = sums[name].clone()
        changed.flatten()[0] = (
            bound + deviations_away * noise / share**0.5 - (sums["counts"][1:].sum() if name == "counts" else 0)
        )
        assert are_within({**sums, name: changed}, rows, noise) is expected


def test_without_noise_equal_rows_of_norm_one_are_just_within() -> None:
    assert are_within(sum_rows(torch.eye(6)[:1].expand(60, 6), torch.zeros(60, dtype=torch.int64), CLASSES), 60, 0.0)


def test_sums_with_noise_have_a_solution_and_exact_ones_stay() -> None:
    sums = sum_rows(PHI, Y, CLASSES)
    near({**nearest_possible(sums), "counts": sums["counts"].double()}, {**sums, "counts": sums["counts"].double()})
    draws = torch.Generator().manual_seed(0)
    noisy = add_noise(sums, 30.0, lambda shape: torch.randn(shape, generator=draws, dtype=torch.float64))
    assert float(class_statistics.unpack(noisy["products"], 6).trace()) < 1e4
    assert not are_possible(noisy, int(noisy["counts"].sum()))
    made = nearest_possible(noisy)
    assert (made["counts"] >= 0).all()
    assert are_possible(made, int(made["counts"].sum()))
    assert all(tensor.isfinite().all() for tensor in discriminant(made, 0.1))


def test_where_no_class_has_a_row_the_largest_is_left() -> None:
    sums = {name: tensor.double() for name, tensor in sum_rows(PHI, Y, CLASSES).items()}
    made = nearest_possible({**sums, "counts": torch.tensor([-3.0, -1.0, -9.0, -2.0]).double()})
    assert made["counts"].tolist() == [0, 1, 0, 0]
    assert all(tensor.isfinite().all() for tensor in discriminant(made, 0.1))
