"""A table of three hospitals' rows, dealt by hospital."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GROUPS = ("north", "south", "west")


def hospitals(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Settings of a recipe whose table lies in the folder; sections are laid over them key by key."""
    rows = [f"{x},{(x * 7) % 5},{'ab'[(x // 3) % 2]},{GROUPS[x % 3]}" for x in range(90)]
    table = folder / "table.csv"
    table.write_text("\n".join(["x,z,label,hospital", *rows]) + "\n", encoding="utf-8")
    settings: dict[str, Any] = {
        "data": {"dataset": f"csv:{table}", "partition": "by_group", "group_by": "hospital", "split": "8:0:2"},
        "models": {"architectures": ["mlp-64-32"]},
        "method": {"name": "fedavg"},
        "training": {"rounds": 1, "batch_size": 10},
    }
    return {name: {**settings.get(name, {}), **sections.get(name, {})} for name in {**settings, **sections}}
