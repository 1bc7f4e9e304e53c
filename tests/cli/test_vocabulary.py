"""One name for one thing: the options of a command, the parameters of its function, and the keys of a recipe."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polyfed as pf
from polyfed import attacks
from polyfed.cli import app as cli
from polyfed.config.schema import RunSettings
from polyfed.deploy.app_template import create_app
from polyfed.deploy.local_cluster import local
from polyfed.experiments.prediction import predict
from polyfed.experiments.privacy_report import privacy_costs

PAIRS: dict[str, Callable[..., Any]] = {
    "run": pf.run,
    "compare": pf.compare,
    "sweep": pf.sweep,
    "benchmark": pf.benchmark,
    "check": pf.check,
    "predict": predict,
    "plot": pf.plot,
    "audit leakage": attacks.leakage,
    "audit epsilon": privacy_costs,
    "deploy init": create_app,
    "deploy local": local,
}
PRINTED = {  # what a command does with its answer; a function gives it back
    "json": "prints for machines",
    "quiet": "functions show nothing unless progress=True",
    "probabilities": "a method of the answer",
}
ALONE = {  # command -> an option that its function does not have -> why
    "check": {"methods": "a line for each method is experiments.estimate.check_methods"},
    "compare": {"logger": "its names go into every run's recipe, in Python by overrides; objects watch one run"},
    "deploy local": {"logger": "its names go into the server's recipe, in Python by overrides"},
    "predict": {"out": "the answer is written as CSV; a function gives it back"},
}
OTHERS = {  # a function's parameter that is no option -> why
    "progress": "shown by commands unless --quiet",
    "say": "commands print it",
    "failed": "sweep: where a benchmark tunes, which goes on without the runs that failed",
    "local": "sweep: False where a benchmark tunes, which runs Local once for all",
}
TRAINING = ("run", "compare", "sweep", "benchmark", "check")


def options(name: str) -> set[str]:
    command = cli.parser()
    for word in name.split():
        command = command.commands[word]
    spelled = {max(one.opts, key=len).lstrip("-").replace("-", "_") for one in command.params}
    return spelled - {"help"}


def parameters(name: str) -> set[str]:
    return set(inspect.signature(PAIRS[name]).parameters)


@pytest.mark.parametrize("name", PAIRS)
def test_a_command_and_its_function_have_the_same_words(name: str) -> None:
    said = options(name) - PRINTED.keys() - ALONE.get(name, {}).keys()
    if "set" in said:
        said = said - {"set"} | {"grid" if name == "sweep" else "overrides"}
    if "logger" in said:
        said = said - {"logger"} | {"loggers"}
    known = parameters(name) - OTHERS.keys()
    assert said - known == set(), "options without a parameter of this name"
    assert known - said == set(), "parameters without an option of this name"


@pytest.mark.parametrize("name", TRAINING)
def test_whatever_trains_says_where_and_how(name: str) -> None:
    """Not `deploy local`, whose nodes train alone, nor `audit leakage`, which repeats a run as it was."""
    assert {"device", "workers", "executor"} <= options(name)
    assert {"device", "workers", "executor"} <= parameters(name)


def test_the_page_of_loggers_names_the_commands_that_have_them() -> None:
    text = (Path(__file__).parents[2] / "docs" / "loggers.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"`--logger`, which `polyfed (.+?)` take", " ".join(text.split()))
    assert set(re.split(r"`(?:, | and )`", named)) == {name for name in PAIRS if "logger" in options(name)}


def test_what_recipes_say_too_has_their_word() -> None:
    """Options that stand for a key of ``[run]``."""
    keys = RunSettings.model_fields
    for name in ("seed", "out", "device", "workers", "executor", "loggers", "preset"):
        assert name in keys
        assert name in parameters("run")


def test_a_word_means_one_thing_in_every_command() -> None:
    """Options of one name take the same kind of value, but for what is named here."""
    kinds: dict[str, set[str]] = {}
    for name in PAIRS:
        command = cli.parser()
        for word in name.split():
            command = command.commands[word]
        for option in command.params:
            if option.param_type_name == "option":
                kinds.setdefault(max(option.opts, key=len), set()).add(str(option.metavar or option.type))
    several = {name: sorted(found) for name, found in kinds.items() if len(found) > 1}
    assert several == {
        "--out": ["DIR", "FILE.csv"],  # predict writes one file
        "--set": ["KEY=A,B,...", "KEY=VALUE"],  # sweep tries several
    }
