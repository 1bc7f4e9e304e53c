"""The protocol of a suite: settings, methods, what is tuned, seeds. A suite is a folder with one, `protocol.toml`.

docs/benchmark.md has an example.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from polyfed.config.resolve import read_recipe, to_toml
from polyfed.errors import ConfigError
from polyfed.places import check_values
from polyfed.records.read import flat_table
from polyfed.validation.error_lines import one_line, shown

__all__ = ["Protocol", "Setting"]

FILE = "protocol.toml"


def _once(given: list[Any]) -> list[Any]:
    if again := [value for place, value in enumerate(given) if value in given[:place]]:
        raise ValueError(f"expected each once, got {shown(again[0])} again")
    return given


Once = AfterValidator(_once)
Seed = Annotated[int, Field(ge=0)]
Seeds = Annotated[list[Seed], Field(min_length=1), Once]
Names = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), Once]
Values = Annotated[list[Any], Field(min_length=1), Once]
Pair = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2, max_length=2)]
ControlKind = Literal["alone", "own", "pooled"]


_DECIDED = ("run.seed", "method.name")  # by the suite, whatever a setting's overrides say


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Setting(_Table):
    """``[settings.NAME]``: one recipe, and what is changed of it.

    Attributes:
        recipe: its file, relative to the suite's folder.
        lr: learning rates that are tried for every row that is tuned, with each combination of its other values.
        preset: one of its presets, or several with commas between.
        overrides: changes, as ``--set`` takes them: ``"training.rounds=5"``. Finished runs keep no weights but with
            ``"run.keep=last"`` or ``"run.keep=best"``.
        seeds: those that are scored here, in place of the protocol's.
        methods: likewise. tuning: likewise, method by method.
    """

    recipe: Annotated[str, Field(min_length=1)]
    lr: Values | None = None
    preset: str | None = None
    overrides: list[str] = Field(default_factory=list)
    seeds: Seeds | None = None
    methods: Names | None = None
    tuning: dict[str, dict[str, Values]] = Field(default_factory=dict)


class Protocol(_Table):
    """How a suite is run.

    Attributes:
        title: what it is about, in a line.
        methods: names of methods, or of variants in the recipes' ``[methods]``.
        seeds: those that are scored. tuning_seeds: those of the trials, none of them scored.
        controls: which controls of `polyfed compare --controls` run, too.
        primary: pairs of rows, the upper and the lower one: these differences are tested, all others described.
        seen_before: which of these settings and seeds had been seen when the protocol was written, and what of them.
        alone_of: the methods that also run alone, with "alone" among the controls; default: all that send anything.
        tune_alone: methods that are tuned alone, too, over the same values; others have alone what was chosen together.
        variants: method -> what is laid over ``[methods.NAME]`` of every setting's recipe.
        tuning: method -> hyperparameter, or "training.NAME" of the recipe, -> values tried. "pooled" is the control:
            its rows have what validation chooses for the shared network; without, what is chosen for Local.
        settings: name -> its recipe.
    """

    title: Annotated[str, Field(min_length=1)]
    methods: Names
    seeds: Seeds
    tuning_seeds: Annotated[list[Seed], Once] = Field(default_factory=list)
    controls: Annotated[list[ControlKind], Once] = Field(default_factory=list)
    primary: Annotated[list[Pair], Once] = Field(default_factory=list)
    seen_before: Annotated[str, Field(min_length=1)] | None = None
    alone_of: Names | None = None
    tune_alone: Names | None = None
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    tuning: dict[str, dict[str, Values]] = Field(default_factory=dict)
    settings: Annotated[dict[str, Setting], Field(min_length=1)]

    @classmethod
    def load(cls, suite: str | Path) -> Protocol:
        """Read ``protocol.toml`` in a suite's folder.

        Raises:
            ConfigError: no such file, an unknown key, a wrong type or value; seeds that are both tuned with and scored;
                unequal numbers of trials.
        """
        path = Path(suite) / FILE
        if not path.is_file():
            raise ConfigError(f"expected a suite, a folder with a {FILE}, got '{suite}'")
        found = read_recipe(path)
        check_values(found)
        try:
            protocol = cls.model_validate(found)
        except ValidationError as complaints:
            raise ConfigError(f"{path}: {one_line(complaints, cls)}") from None
        for problem in protocol._problems():
            raise ConfigError(f"{path}: {problem}")
        return protocol

    def seeds_of(self, setting: str) -> list[int]:
        """The seeds that are scored in a setting."""
        return self.settings[setting].seeds or self.seeds

    def methods_of(self, setting: str) -> list[str]:
        """The methods that are compared in a setting."""
        return self.settings[setting].methods or self.methods

    def overrides_of(self, setting: str) -> list[str]:
        """All that is laid over a setting's recipe: the variants, and what the setting itself changes."""
        variants = flat_table({"methods": self.variants})
        return [*(f"{key}={to_toml(value)}" for key, value in variants.items()), *self.settings[setting].overrides]

    def tuning_of(self, setting: str) -> dict[str, dict[str, list[Any]]]:
        """Method -> hyperparameter -> the values that are tried in a setting."""
        own = self.settings[setting]
        rates = {} if own.lr is None else {"training.lr": own.lr}
        return {method: {**rates, **grid} for method, grid in {**self.tuning, **own.tuning}.items()}

    def trials(self, setting: str, method: str) -> int:
        """How many combinations of hyperparameters are tried for a method; 0 for one that is not tuned."""
        grid = self.tuning_of(setting).get(method)
        return math.prod(map(len, grid.values())) if grid else 0

    def _problems(self) -> Iterator[str]:
        """What is wrong between settings, tuning and seeds."""
        compared = set(itertools.chain(self.methods, *(setting.methods or () for setting in self.settings.values())))
        tuned = {method for setting in self.settings for method in self.tuning_of(setting)}
        of_controls = {"local", *({"pooled"} & set(self.controls))}
        named = {"variants": set(self.variants), "tuning": tuned - of_controls, "alone_of": set(self.alone_of or ())}
        named["tune_alone"] = set(self.tune_alone or ())
        for place, methods in named.items():
            if strange := sorted(methods - compared):
                known = ", ".join(sorted(compared))
                yield f"{place}: expected methods that are compared ({known}), got {strange[0]}"
        if tuned and not self.tuning_seeds:
            yield "tuning_seeds: expected some beside [tuning], got none"
        if self.tuning_seeds and not tuned:
            yield "tuning_seeds: expected a table [tuning] beside them, got none; leave them out, or say what is tried"
        yield from self._without_effect(tuned)
        if same := next((pair for pair in self.primary if pair[0] == pair[1]), None):
            yield f"primary: expected two rows in each pair, got {same[0]} twice"
        scored = set(itertools.chain(self.seeds, *(setting.seeds or () for setting in self.settings.values())))
        if both := sorted(scored & set(self.tuning_seeds)):
            yield f"tuning_seeds: expected seeds that are not scored, got {', '.join(map(str, both))}"
        for name, setting in self.settings.items():
            for change in setting.overrides:
                if change.partition("=")[0].strip() in _DECIDED:
                    yield f"settings.{name}.overrides: expected none of {', '.join(_DECIDED)}, got {shown(change)}"
            yield from self._unequal_trials(name)

    def _without_effect(self, tuned: Collection[str]) -> Iterator[str]:
        """Settings of tuning that do nothing beside the others. tuned: methods that are tuned somewhere."""
        if self.tune_alone and not tuned:
            yield "tune_alone: expected a table [tuning] beside it, got none"
        for key in ("tune_alone", "alone_of"):
            if getattr(self, key) and "alone" not in self.controls:
                yield f"{key}: expected 'alone' among the controls, got {', '.join(self.controls) or 'none'}"
        for name, setting in self.settings.items():
            if setting.lr is not None and not self.tuning_of(name):
                yield f"settings.{name}.lr: expected a table [tuning] beside it, got none"
        alone = set(self.tune_alone or ())
        if untuned := sorted(alone.difference(tuned)):
            yield f"tune_alone: expected methods of [tuning], got {untuned[0]}"
        if together := sorted(alone - set(self.alone_of or alone)):
            yield f"tune_alone: expected methods of alone_of, got {together[0]}"

    def _unequal_trials(self, setting: str) -> Iterator[str]:
        tuning = self.tuning_of(setting)
        if strange := [key for key in tuning.get("pooled", {}) if not key.startswith("training.")]:
            yield f'tuning.pooled: expected settings of [training], as "training.lr", got {strange[0]}'
        compared = tuning.keys() & {"local", "pooled", *self.methods_of(setting)}
        numbers = {name: self.trials(setting, name) for name in tuning if name in compared}
        if len(set(numbers.values())) > 1:
            listed = ", ".join(f"{name} {number}" for name, number in numbers.items())
            yield f"tuning: expected as many trials for every method, got {listed}"
        if any(number < 2 for number in numbers.values()):
            yield "tuning: expected at least two trials for a method, got one"
        if any("training.rounds" in grid for grid in tuning.values()):
            yield "tuning: expected what all rows of a table need not share, got training.rounds"
