"""How alike do the clients of a run see the same images? Mean pairwise CKA of their representations.

    python examples/client_similarity.py runs/reference/local/seed-0 runs/reference/fedhenn/seed-0

Reads run folders only: `recipe.toml` and `models/`, each client's personal weights. The images are the last rows of
the data set's official test side, 1000 by default. CKA is linear, centred, in [0, 1]; 1 means alike up to rotation,
scale and shift. Also an example of using exported weights elsewhere: see `load`.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path

import safetensors.torch
import torch

from polyfed.core.passes import represent
from polyfed.data.sources import load as load_source
from polyfed.data.transforms import Prepare
from polyfed.functional.kernels import cka_matrix, mean_pairwise_cka
from polyfed.models.split import SplitModel
from polyfed.models.zoo import build


def load(folder: Path, file: str, in_shape: tuple[int, int, int]) -> SplitModel:
    """One client's personal model from a run folder."""
    entry = json.loads((folder / "models" / "index.json").read_text())[file]
    model = build(entry["architecture"], in_shape, entry["classes"])
    model.load_state_dict(safetensors.torch.load_file(folder / "models" / file))
    return model


def main() -> None:
    """Print one line per run: the mean over all pairs, over pairs of one architecture, and over the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--images", type=int, default=1000)
    arguments = parser.parse_args()
    for run in arguments.runs:
        if not (run / "models" / "index.json").exists():
            parser.error(f"expected the folder of a finished run, came {run}")
    print(f"{'run':50s}  {'all pairs':>9s}  {'same net':>9s}  {'others':>9s}")
    for run in arguments.runs:
        recipe = tomllib.loads((run / "recipe.toml").read_text())
        source = load_source(recipe["data"]["name"], recipe["data"].get("root"))
        side = source.test or source.train
        images, prepare = side.x[-arguments.images :], Prepare(source.mean, source.std)
        index = json.loads((run / "models" / "index.json").read_text())
        views = [represent(load(run, file, tuple(images.shape[1:])), images, prepare) for file in index]
        matrix, nets = cka_matrix(views), [entry["architecture"] for entry in index.values()]
        alike = torch.tensor([[a == b for b in nets] for a in nets])
        other, alike = ~alike, alike & ~torch.eye(len(nets), dtype=torch.bool)
        parts = [float(matrix[mask].mean()) if mask.any() else float("nan") for mask in (alike, other)]
        print(f"{run!s:50s}  {float(mean_pairwise_cka(views)):9.4f}  {parts[0]:9.4f}  {parts[1]:9.4f}")


if __name__ == "__main__":
    main()
