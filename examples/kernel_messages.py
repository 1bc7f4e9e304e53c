"""How small may FedHeNN's kernel message be? The mean kernel's factor at several ranks.

    python examples/kernel_messages.py runs/reference/local/seed-0 --images 1000

Reads a run folder only: `recipe.toml` and `models/`, each client's personal weights. Rows drawn from the official test
side, 1000 by default, stand for the common inputs. For each factor F of the clients' mean kernel K_bar:

    bytes      of the message that carries F; K_bar itself is 4 L^2
    tau        the part of K_bar's norm that F leaves out
    bound      sqrt(2 - 2 sqrt(1 - tau^2)): no client's CKA can be off by more
    error      max over the clients of |CKA(K_i, F F^T) - CKA(K_i, K_bar)|

CKA(K_i, K_bar) is computed from whole L x L kernels in float64 (at L = 5000 they take 1 GB and some minutes).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _common import finished_run, representations_of
from torch import Tensor

from polyfed.functional.centering import center
from polyfed.functional.kernel_similarity import cka
from polyfed.functional.mean_kernel_factor import Factor, MeanKernelFactor


@dataclass(frozen=True)
class Row:
    """One line of the table; see the top of this file."""

    rank: int
    exact: bool
    bytes: int
    tau: float
    bound: float
    error: float


def exact_ckas(views: list[Tensor], norm: str) -> Tensor:
    """CKA(K_i, K_bar) from the definition: (N,), float64."""

    def kernel(a_LD: Tensor) -> Tensor:
        wide = center(a_LD.double())
        return wide @ wide.mT

    k_bar_LL = torch.zeros(len(views[0]), len(views[0]), dtype=torch.float64)
    for view in views:
        k_LL = kernel(view)
        k_bar_LL += k_LL / (k_LL.norm() if norm == "fro" else 1)
    return torch.stack([(k * k_bar_LL).sum() / (k.norm() * k_bar_LL.norm()) for k in map(kernel, views)])


def table(views: list[Tensor], ranks: list[int], norm: str) -> list[Row]:
    """A row for every rank; of an exact factor, whatever the rank asked for, only once."""
    expected_N = exact_ckas(views, norm)
    factors: dict[int, Factor] = {}
    for rank in ranks:
        stream = MeanKernelFactor(rank=rank, norm=norm)
        for view in views:
            stream.add(view)
        factor = stream.result()
        factors[factor.rank] = factor
    rows = []
    for factor in factors.values():
        bound = math.sqrt(2 - 2 * math.sqrt(1 - factor.truncation_error**2))
        error = float((ckas(views, factor.matrix) - expected_N).abs().max())
        tau = factor.truncation_error
        rows.append(Row(factor.rank, tau == 0, factor.matrix.nbytes, tau, bound, error))
    return rows


def ckas(views: list[Tensor], factor_Lr: Tensor) -> Tensor:
    """CKA(K_i, F F^T) as the clients compute it: (N,), float64."""
    return torch.stack([cka(view, factor_Lr).double() for view in views])


def main() -> None:
    """Print the table, or its rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=finished_run)
    parser.add_argument("--images", type=int, default=1000, help="L, at least 2")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--norm", choices=("none", "fro"), default="none", help="as FedHeNN's kernel.norm")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.images < 2 or min(arguments.ranks) < 1:
        parser.error("expected at least 2 images and ranks of at least 1")
    run: Path = arguments.run
    views = representations_of(run, arguments.images)
    rows = table(views, arguments.ranks, arguments.norm)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{run}: L = {len(views[0])}, {len(views)} clients, {sum(view.shape[1] for view in views)} columns in all")
    print(f"{'rank':>10s}  {'bytes':>10s}  {'tau':>7s}  {'bound':>7s}  {'error':>7s}")
    for row in rows:
        shown = f"{row.rank} exact" if row.exact else f"{row.rank}"
        print(f"{shown:>10s}  {row.bytes:10d}  {row.tau:7.1e}  {row.bound:7.1e}  {row.error:7.1e}")


if __name__ == "__main__":
    main()
