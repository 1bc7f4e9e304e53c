"""How alike do the clients of a run see the same images? Mean pairwise CKA of their representations.

    python examples/client_similarity.py runs/reference/local/seed-0 runs/reference/fedhenn/seed-0

Reads run folders only: `recipe.toml` and `models/`, each client's personal weights. The images are drawn from the
data set's official test side, 1000 by default. CKA is linear, centered, in [0, 1]; 1 means alike up to rotation,
scale and shift. Also an example of using personal models elsewhere: see `_common.py`.
"""

from __future__ import annotations

import argparse

import torch
from _common import finished_run, personal_models, representations_of

from polyfed.functional.kernel_similarity import cka


def main() -> None:
    """Print one line per run: the mean over all pairs, over pairs of one architecture, and over the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=finished_run)
    parser.add_argument("--images", type=int, default=1000)
    arguments = parser.parse_args()
    print(f"{'run':50s}  {'all pairs':>9s}  {'same net':>9s}  {'others':>9s}")
    for run in arguments.runs:
        views = representations_of(run, arguments.images)
        matrix = torch.tensor([[float(cka(one, other)) for other in views] for one in views])
        nets = [model.architecture for model in personal_models(run)]
        alike = torch.tensor([[a == b for b in nets] for a in nets])
        pair = ~torch.eye(len(nets), dtype=torch.bool)
        kinds = (pair, pair & alike, pair & ~alike)
        means = [float(matrix[mask].mean()) if mask.any() else float("nan") for mask in kinds]
        print(f"{run!s:50s}  {means[0]:9.4f}  {means[1]:9.4f}  {means[2]:9.4f}")


if __name__ == "__main__":
    main()
