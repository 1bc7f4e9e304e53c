"""What a suite's protocol may say, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyfed.config.protocol import Protocol
from polyfed.config.recipe import Recipe
from polyfed.errors import ConfigError
from polyfed.experiments.benchmark import key_of
from tests.helpers.refusals import refusal

SUITES = sorted(path.parent for path in (Path(__file__).parents[2] / "suites").glob("*/protocol.toml"))

PROTOCOL = """
title = "Two settings"
methods = ["fedgh", "fedproto"]
seeds = [0, 1]
tuning_seeds = [100]

[tuning.fedgh]
header_lr = [0.01, 0.1]
header_epochs = [1, 10]

[tuning.fedproto]
prototype_weight = [0.1, 1.0, 3.0, 10.0]

[settings.plain]
recipe = "plain.toml"

[settings.more]
recipe = "plain.toml"
seeds = [2, 3, 4]
methods = ["fedgh"]
"""

OVERRIDES = "settings.more.overrides: expected none of run.seed, method.name, got "


def load(folder: Path, text: str) -> Protocol:
    (folder / "protocol.toml").write_text(text)
    return Protocol.load(folder)


def test_a_setting_may_have_seeds_and_methods_of_its_own(tmp_path: Path) -> None:
    protocol = load(tmp_path, PROTOCOL)
    assert protocol.seeds_of("plain") == [0, 1]
    assert protocol.seeds_of("more") == [2, 3, 4]
    assert protocol.methods_of("plain") == ["fedgh", "fedproto"]
    assert protocol.methods_of("more") == ["fedgh"]


def test_learning_rates_are_tried_with_each_combination_of_every_row(tmp_path: Path) -> None:
    protocol = load(tmp_path, PROTOCOL.replace("seeds = [2, 3, 4]", "lr = [0.1, 0.2]\nseeds = [2, 3, 4]"))
    assert protocol.trials("plain", "fedgh") == 4
    assert protocol.trials("more", "fedgh") == 8
    assert protocol.tuning_of("more")["fedproto"]["training.lr"] == [0.1, 0.2]


def test_variants_are_laid_over_every_recipe_before_a_settings_own_changes(tmp_path: Path) -> None:
    text = PROTOCOL.replace("[settings.plain]", '[variants.fedgh]\nkernel = { size = 3 }\nname = "a"\n[settings.plain]')
    protocol = load(tmp_path, text + 'overrides = ["methods.fedgh.name=b"]\n')
    variants = ["methods.fedgh.kernel.size=3", 'methods.fedgh.name="a"']
    assert protocol.overrides_of("plain") == variants
    assert protocol.overrides_of("more") == [*variants, "methods.fedgh.name=b"]


def test_a_setting_may_try_other_values(tmp_path: Path) -> None:
    own = '[settings.more.tuning.fedgh]\n"training.lr" = [0.1, 0.2, 0.3, 0.4]\n'
    protocol = load(tmp_path, PROTOCOL + own)
    assert protocol.tuning_of("plain") == protocol.tuning
    assert protocol.tuning_of("more")["fedgh"] == {"training.lr": [0.1, 0.2, 0.3, 0.4]}
    assert protocol.tuning_of("more")["fedproto"] == protocol.tuning["fedproto"]
    with pytest.raises(ConfigError, match="expected as many trials for every method, got fedgh 3, fedproto 4"):
        load(tmp_path, PROTOCOL + own.replace(", 0.4", "").replace("more", "plain"))
    fewer = load(tmp_path, PROTOCOL + own.replace(", 0.4", ""))  # no other method runs there
    assert fewer.trials("more", "fedgh") == 3
    with pytest.raises(ConfigError, match=r"tuning: expected what .* need not share, got training\.rounds"):
        load(tmp_path, PROTOCOL + own.replace("lr", "rounds"))


ADDED = [  # a line before that of the tuning seeds, and what is said
    ('controls = ["lonely"]', "expected 'alone', 'own' or 'pooled', got 'lonely'"),
    ('controls = ["alone", "alone"]', "controls: expected each once, got 'alone'"),
    ('tune_alone = ["fedgh"]', "tune_alone: expected 'alone' among the controls, got none"),
    (
        'controls = ["alone"]\nalone_of = ["fd"]',
        "alone_of: expected methods that are compared (fedgh, fedproto), got fd",
    ),
    (
        'controls = ["alone"]\nalone_of = ["fedgh"]\ntune_alone = ["fedproto"]',
        "tune_alone: expected methods of alone_of, got fedproto",
    ),
    ('primary = [["fedgh", "fedgh"]]', "two rows in each pair, got fedgh twice"),
]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        *(("tuning_seeds", f"{line}\ntuning_seeds", said) for line, said in ADDED),
        ("header_epochs = [1, 10]", "", "expected as many trials for every method, got fedgh 2, fedproto 4"),
        ("tuning_seeds = [100]", "tuning_seeds = [3]", "tuning_seeds: expected seeds that are not scored, got 3"),
        ("tuning_seeds = [100]", "", "tuning_seeds: expected some beside [tuning], got none"),
        ("[tuning.fedproto]", "[tuning.fd]", "tuning: expected methods that are compared (fedgh, fedproto), got fd"),
        (
            "tuning_seeds = [100]",
            'controls = ["pooled"]\ntuning_seeds = [100]\n[tuning.pooled]\nheader_lr = [1, 2]',
            'tuning.pooled: expected settings of [training], as "training.lr", got header_lr',
        ),
        (
            "[tuning.fedproto]",
            "[tuning.pooled]",
            "tuning: expected methods that are compared (fedgh, fedproto), got pooled",
        ),
        ("seeds = [0, 1]", "seeds = [0, 1, 0]", "seeds: expected each once, got 0 again"),
        ('methods = ["fedgh"]', 'overrides = ["run.seed=3"]', f"{OVERRIDES}'run.seed=3'"),
        ('recipe = "plain.toml"\nseeds', 'recipes = "plain.toml"\nseeds', "unknown key 'settings.more.recipes'"),
        (
            'methods = ["fedgh", "fedproto"]',
            'methods = ["fedgh", "fedproto", "fd"]\ncontrols = ["alone"]\ntune_alone = ["fd"]',
            "tune_alone: expected methods of [tuning], got fd",
        ),
        (
            PROTOCOL[PROTOCOL.index("tuning_seeds") : PROTOCOL.index('methods = ["fedgh"]\n')],
            '[settings.more]\nrecipe = "plain.toml"\nlr = [0.1, 0.2]\n',
            "settings.more.lr: expected a table [tuning] beside it, got none",
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_line(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in PROTOCOL
    line = refusal(lambda: load(tmp_path, PROTOCOL.replace(old, new)))
    assert said in line
    assert "protocol.toml" in line


def test_a_folder_without_a_protocol_is_no_suite(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a suite, a folder with a protocol\.toml, got"):
        Protocol.load(tmp_path)


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_the_suites_recipes_have_all_methods_and_what_is_tuned_of_them(suite: Path) -> None:
    protocol = Protocol.load(suite)
    for name, setting in protocol.settings.items():
        for method in protocol.methods_of(name):
            grid = protocol.tuning_of(name).get(method, {})
            tuned = [f"{key_of(method, key)}={values[-1]}" for key, values in grid.items()]
            path = suite / setting.recipe
            recipe = Recipe.load(path, [*protocol.overrides_of(name), *tuned], preset=setting.preset, method=method)
            assert recipe.name == method
