"""Fabricated run folders: numbers chosen so that every expected value can be worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

KIB = 1024


class Maker:
    """Writes run folders below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self,
        name: str,
        method: str = "local",
        seed: int = 0,
        accuracies: tuple[float, ...] = (0.5, 0.6),
        hyperparameters: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        run: dict[str, Any] | None = None,
        finished: bool = True,
        **result: Any,
    ) -> Path:
        """One run of two clients whose accuracies lie 0.1 around the mean; 1 KiB up and 2 KiB down a round."""
        folder = self.root / name
        folder.mkdir(parents=True)
        rounds = len(accuracies)
        stages = result.pop("stages", ["personal", "received"])
        stage = result.pop("stage", "personal")

        def scores(mean: float) -> dict[str, Any]:
            spread = {"std": 0.1, "n": 2}
            own = {"mean": mean, "min": mean - 0.1, "max": mean + 0.1, **spread}
            other = {"mean": mean - 0.2, "min": mean - 0.3, "max": mean - 0.1, **spread}
            return {key: own if key == stage else other for key in stages}

        lines = [
            {
                "round": number,
                "seconds": 1.5,
                "processor_seconds": 3.0,
                "clients": [0, 1],
                "bytes_up": KIB,
                "bytes_down": 2 * KIB,
                "train_loss": 1.0 / number,
                "accuracy": scores(mean),
                "validation": None,
                "refused": [],
                "sums": {},
                "evaluated": True,
            }
            for number, mean in enumerate(accuracies, start=1)
        ]
        (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        recipe = {
            "data": {"dataset": "digits", "num_clients": 2, "partition": "dirichlet", "dirichlet_alpha": 0.5}
            | (data or {}),
            "method": {"name": method} | (hyperparameters or {}),
            "training": {"rounds": rounds, "lr": 0.01} | (training or {}),
            "run": run or {},
        }
        (folder / "recipe.toml").write_text(
            "".join(
                f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
                for section, keys in recipe.items()
            )
        )
        if finished:
            evaluation = {"stage": stage, "weighting": "clients", "test": "client", "every_n_rounds": 1}
            found = {
                "method": method,
                "dataset": recipe["data"]["dataset"],
                "clients": recipe["data"]["num_clients"],
                "rounds": rounds,
                "seed": seed,
                "evaluation": evaluation | {"stages": stages},
                "accuracy": accuracies[-1],
                "accuracy_std": 0.1,
                "accuracy_best_by_validation": None,
                "accuracy_by_stage": scores(accuracies[-1]),
                "accuracy_per_client": [accuracies[-1] - 0.1, accuracies[-1] + 0.1],
                "bytes_up": rounds * KIB,
                "bytes_down": 2 * rounds * KIB,
                "seconds": 1.5 * rounds,
                "processor_seconds": 3.0 * rounds,
                "samples_per_second": 10.0,
                "refused": 0,
                "versions": {},
                "hyperparameters": hyperparameters or {},
                "label": None,
            }
            (folder / "result.json").write_text(json.dumps(found | result))
        return folder


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """Writes run folders below ``tmp_path / "runs"``."""
    return Maker(tmp_path / "runs")


@pytest.fixture
def two_by_two(make: Maker) -> Path:
    """Two methods, two seeds, three rounds. Local 0.50, 0.54; FedGH 0.60, 0.70: differences 0.10 and 0.16."""
    make("fedgh-0", "fedgh", 0, (0.3, 0.4, 0.6), accuracy_best_by_validation=0.5)
    make("fedgh-1", "fedgh", 1, (0.5, 0.6, 0.7), accuracy_best_by_validation=0.6)
    make("local-0", "local", 0, (0.3, 0.4, 0.50))
    make("local-1", "local", 1, (0.3, 0.4, 0.54))
    return make.root
