"""What the alignment term costs: its value and gradient, as the library takes them from a factor.

    python benchmarks/alignment.py
    python benchmarks/alignment.py --rows 5000 --square-rows 1000 --width 84 --rank 128 --repeats 15

Two comparisons, of one computing thread's own time; all forms take turns, and medians count:

    factor form over one matrix product of as many operations (4 L d (d + r): A^T F, A^T A and their backward passes),
    at L = `--rows`; the norm of F^T F, and centering, are in its time but not among these operations
    L x L form over factor form, at L = `--square-rows`: K = A A^T, each HSIC by H K H and H K_bar H, autograd

A line of JSON each, then a table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from polyfed.functional.kernels import alignment

TURN = 0.02  # seconds of calls in a turn at least


def gradient(loss: Callable[[Tensor], Tensor], a_LD: Tensor) -> Tensor:
    """Of the loss in A; the value is made on the way."""
    leaf = a_LD.detach().requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf), leaf)
    return found


def square_form(kernel_LL: Tensor) -> Callable[[Tensor], Tensor]:
    """1 - CKA with a kernel by the definition, every kernel centered by two products with H wherever it occurs."""
    rows = len(kernel_LL)
    h_LL = torch.eye(rows) - torch.ones(rows, rows) / rows

    def hsic(k_LL: Tensor, m_LL: Tensor) -> Tensor:
        return ((h_LL @ k_LL @ h_LL) * (h_LL @ m_LL @ h_LL)).sum()

    def loss(a_LD: Tensor) -> Tensor:
        own_LL = a_LD @ a_LD.T
        return 1 - hsic(own_LL, kernel_LL) / (hsic(own_LL, own_LL) * hsic(kernel_LL, kernel_LL)).sqrt()

    return loss


def product(operations: float) -> Callable[[], Tensor]:
    """A product of two square matrices with so many operations."""
    side = round((operations / 2) ** (1 / 3))
    left, right = torch.randn(side, side), torch.randn(side, side)
    return lambda: left @ right


def in_turns(forms: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of processor time of a call of each."""
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for form in forms.values():
        form()  # what is done once
    for _ in range(repeats):
        for name, form in forms.items():
            began, calls = time.process_time(), 0
            while (spent := time.process_time() - began) < TURN or not calls:
                form()
                calls += 1
            taken[name].append(spent / calls)
    return {name: median(seconds) for name, seconds in taken.items()}


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000, help="L beside a product [5000]")
    parser.add_argument("--square-rows", type=int, default=1000, help="L beside the L x L form [1000]")
    parser.add_argument("--width", type=int, default=84, help="d of the representation [84]")
    parser.add_argument("--rank", type=int, default=128, help="r of the factor [128]")
    parser.add_argument("--repeats", type=int, default=15, help="turns [15]")
    asked = parser.parse_args()
    if min(asked.rows, asked.square_rows) < 2 or min(asked.width, asked.rank, asked.repeats) < 1:
        parser.error("expected at least 2 rows, and width, rank and repeats of at least 1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    d, r = asked.width, asked.rank
    a, f = (torch.randn(max(asked.rows, asked.square_rows), columns) for columns in (d, r))

    def factor_form(rows: int) -> Callable[[], Tensor]:
        return lambda: gradient(lambda leaf: alignment(leaf, f[:rows]), a[:rows])

    few = asked.square_rows
    by_square = square_form(f[:few] @ f[:few].T)
    off = (gradient(by_square, a[:few]) - factor_form(few)()).norm() / factor_form(few)().norm()
    assert off < 1e-3, "both forms are the same function"
    tall = {"factor form": factor_form(asked.rows), "product": product(4 * asked.rows * d * (d + r))}
    square = {"factor form": factor_form(few), "L x L form": lambda: gradient(by_square, a[:few])}
    rows = []
    for above, below, forms, length, goal in (
        ("factor form", "product", tall, asked.rows, "<= 3"),
        ("L x L form", "factor form", square, few, ">= 200"),
    ):
        taken = in_turns(forms, asked.repeats)
        facts = {"measure": f"{above} / {below}", "rows": length, "width": d, "rank": r}
        figures = {"ms": 1e3 * taken[above], "ms_of_other": 1e3 * taken[below]}
        rows.append({**facts, **figures, "ratio": taken[above] / taken[below], "goal": goal})
        print(json.dumps(rows[-1]), flush=True)
    print(f"\n{'':26}{'L':>6}{'ms':>10}{'ms':>10}{'ratio':>8}  goal")
    for row in rows:
        figures = f"{row['rows']:6}{row['ms']:10.2f}{row['ms_of_other']:10.2f}{row['ratio']:8.1f}"
        print(f"{row['measure']:26}{figures}  {row['goal']}")


if __name__ == "__main__":
    main()
