"""Devices: profiles, how they are dealt to clients, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError
from polyfed.plugins.device_simulation import assign_devices
from polyfed.plugins.settings import BUILT_IN, Availability, Devices, Profile, effective_availability

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
RECIPE: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 4},
    "models": {"architectures": ["digits-cnn1"]},
    "method": {"name": "fedgh"},
}
OWN = {"flops": 1e9, "memory_bytes": 1e6, "download_bps": 1e6, "upload_bps": 1e6}


def test_names_are_dealt_like_architectures() -> None:
    two = ["laptop", "gpu"]
    assert assign_devices(Devices(profiles=two), 5, 0) == ["laptop", "gpu", "laptop", "gpu", "laptop"]
    assert assign_devices(Devices(profiles=two, assignment="blocks"), 5, 0) == ["laptop"] * 3 + ["gpu"] * 2
    drawn = [assign_devices(Devices(profiles=two, assignment="random"), 50, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == set(two)


def test_a_profile_of_ones_own_and_a_built_in_one_changed() -> None:
    settings = Devices(profiles=["mine", "gpu"], custom={"mine": Profile(**OWN), "gpu": {"memory_bytes": 5.0}})
    assert settings.profile("mine") == Profile(**OWN)
    assert settings.profile("gpu") == BUILT_IN["gpu"].model_copy(update={"memory_bytes": 5.0})
    assert settings.profile("laptop") == BUILT_IN["laptop"]


def test_off_leaves_nothing_behind() -> None:
    assert Devices().effective() == {} == effective_availability(Availability(), Devices())
    assert not Devices().enabled
    assert "devices" not in Recipe.from_dict(RECIPE).to_dict()


def test_a_recipe_keeps_what_has_an_effect() -> None:
    section = {"profiles": ["mine"], "custom": {"mine": OWN}, "round_timeout": 3.0}
    recipe = Recipe.from_dict({**RECIPE, "devices": section, "availability": {"delay_rounds": 2}})
    kept = recipe.to_dict()
    assert kept["devices"] == {
        **section,
        "on_out_of_memory": "refuse",
        "custom": {"mine": {**OWN, "latency": 0.0, "availability": 1.0}},
    }
    assert kept["availability"] == {"delay_rounds": 2}, "who misses the deadline is late by it"
    assert Recipe.from_dict(kept).to_dict() == kept


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"profiles": ["laptob"]}, r"devices: unknown device 'laptob'; did you mean 'laptop'\?"),
        ({"round_timeout": 3.0}, "devices: round_timeout: expected profiles beside it"),
        ({"profiles": ["laptop"], "round_timeout": 0.0}, r"devices.round_timeout: expected more than 0, got 0\.0"),
        ({"profiles": ["laptop"], "on_out_of_memory": "drop"}, "expected 'refuse' or 'leave out', got 'drop'"),
        ({"profiles": ["x"], "custom": {"x": {"flops": 1.0}}}, "expected the key 'devices.custom.x.memory_bytes'"),
        ({"profiles": ["gpu"], "custom": {"gpu": {"memory_byte": 1.0}}}, "did you mean 'memory_bytes'"),
        ({"profiles": ["gpu"], "custom": {"gpu": {"availability": 0.0}}}, r"availability: expected more than 0"),
        ({"profiles": ["laptop"], "time_jiter": 1.0}, "did you mean 'time_jitter'"),
    ],
)
def test_wrong_settings_are_one_clear_line(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as problem:
        Recipe.from_dict({**RECIPE, "devices": section})
    assert "\n" not in str(problem.value)
    with pytest.raises(ConfigError) as made:
        Devices(**section)
    assert str(made.value) == str(problem.value), "Python says what a recipe says"


def test_the_page_has_the_built_in_profiles() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*?) \|$", PAGE, flags=re.MULTILINE)
    found = {name: [float(cell) for cell in cells.split(" | ")[:5]] for name, cells in rows if name in BUILT_IN}
    assert found == {
        name: [p.flops, p.memory_bytes, p.download_bps, p.upload_bps, p.latency] for name, p in BUILT_IN.items()
    }
