"""Recipes: every setting of an experiment, typed and checked; TOML in and out.

``[method]`` holds a method's name and its hyperparameters. ``[methods.NAME]`` holds those that a method takes when it
is asked for by name (``--method NAME``, ``compare --methods NAME,...``), so that one recipe serves many:

    [method]
    name = "fedgh"                   # what plain `polyfed run` runs

    [methods.fedgh]
    header_epochs = 100

    [methods.fedgh-random-header]    # a variant: `name` says whose; the table's own name is its label in tables
    name = "fedgh"
    header_lr = 0.0

The hyperparameters of NAME are those of ``[methods.NAME]``, overlaid by those of ``[method]`` if that has the same
name. What ``[presets.NAME]`` and ``--set`` lay over all of this: `polyfed.config.resolve`.

A setting that does nothing beside the others is an error, unless it has its default. What a run folder keeps is the
resolved recipe: all settings of that run, one ``[method]``, and in ``[run]`` the presets' names and notes, and what
``--set`` has changed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import tomli_w
from pydantic import Field, PrivateAttr, ValidationError

from polyfed.config.resolve import (
    join,
    module_folders,
    preset_names,
    read_recipe,
    recipe_stem,
    resolve,
    without_labels,
)
from polyfed.config.schema import SECTIONS, Data, MethodChoice, Models, PluginChoice, Pretraining, RunSettings
from polyfed.core.settings import Evaluation, Privacy, Settings, Training
from polyfed.data.augmentation import augmentation
from polyfed.engine.method_wrappers import adapted, alone, personalized
from polyfed.engine.plugin import Plugin
from polyfed.engine.uploads import has_upload
from polyfed.errors import ConfigError
from polyfed.own_methods import LABEL, label_of, method_class
from polyfed.places import check_values
from polyfed.plugins.settings import (
    Adversaries,
    Availability,
    Devices,
    RobustAggregation,
    SecureSums,
)
from polyfed.records.read import check_links
from polyfed.registry import PLUGINS, check_trusted, folders_of, import_object, texts
from polyfed.validation.error_lines import WrongSettings, one_line

__all__ = ["Recipe"]


class Recipe(Settings):
    """An experiment. Make one with `load` or `from_dict`, whose errors are one clear line."""

    _place: ClassVar[tuple[str, ...]] = ()

    data: Data
    models: Models
    pretraining: Pretraining = Field(default_factory=Pretraining)
    method: MethodChoice
    methods: dict[str, MethodChoice] = Field(default_factory=dict)
    training: Training = Field(default_factory=Training)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    availability: Availability = Field(default_factory=Availability)
    privacy: Privacy = Field(default_factory=Privacy)
    devices: Devices = Field(default_factory=Devices)
    robust_aggregation: RobustAggregation = Field(default_factory=RobustAggregation)
    adversaries: Adversaries = Field(default_factory=Adversaries)
    secure_sums: SecureSums = Field(default_factory=SecureSums)
    plugins: list[PluginChoice] = Field(default_factory=list)
    run: RunSettings = Field(default_factory=RunSettings)
    _stem: str = PrivateAttr("recipe")
    _beside: tuple[str, ...] = PrivateAttr(())  # where the user's modules are looked for, too
    _own: MethodChoice | None = PrivateAttr(None)  # [method] as the file has it, before `choose`
    _hyperparameters: dict[str, Any] = PrivateAttr(default_factory=dict)  # all of the method's, in TOML's names
    _method: Any = PrivateAttr(None)  # a `polyfed.Method`
    _own_plugins: list[Callable[[], Plugin]] = PrivateAttr(default_factory=list)

    # making -------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        method: str | None = None,
        preset: str | None = None,
        **run: Any,
    ) -> Recipe:
        """Read a recipe file. The user's modules that it names may lie beside it, or in the present folder.

        Args:
            path: the TOML file.
            overrides: ``"data.num_clients=20"``: a dotted key, and a value in TOML's form (bare words are text).
            method: a method's or a variant's name, in place of the recipe's own.
            preset: one of ``[presets]``, or several with commas between; laid over the recipe before all else.
            run: seed, out, device, workers, executor, in place of those of ``[run]``; None: the recipe's.

        Raises:
            ConfigError: no such file, not TOML, an unknown key, a wrong type or value; one line that says where.
        """
        path = Path(path)
        settings = resolve(read_recipe(path), preset, overrides, method)
        given = {key: str(value) if key == "out" else value for key, value in run.items() if value is not None}
        stem = "-".join([recipe_stem(path), *preset_names(preset)])
        return cls._checked(join(settings, {"run": given} if given else {}), stem, module_folders(path))

    @classmethod
    def of_run(cls, folder: str | Path, trust: bool = False) -> Recipe:
        """The recipe that a run folder keeps.

        Args:
            folder: the run's.
            trust: whether the user's modules that it names may be imported; they are looked for where the run found
                them.

        Raises:
            ConfigError: see `load`; or it names such modules and is not trusted; or a part of it is a link.
        """
        check_links(Path(folder))
        path = Path(folder) / "recipe.toml"
        settings = read_recipe(path)
        check_trusted(folder, without_labels(settings), trust)
        return cls.from_dict(settings, recipe_stem(path))

    @classmethod
    def from_dict(
        cls, settings: Mapping[str, Any], stem: str = "recipe", preset: str | None = None, beside: Sequence[str] = ()
    ) -> Recipe:
        """Check settings as a TOML file would give them; ``[method]`` then holds all its hyperparameters.

        Args:
            settings: section -> key -> value.
            stem: what the experiment is called, for the default run folder.
            preset: see `load`.
            beside: folders in which the user's modules are looked for where Python does not find them by itself.

        Raises:
            ConfigError: see `load`.
        """
        return cls._checked(resolve(settings, preset), stem, beside)

    @classmethod
    def _checked(cls, settings: Mapping[str, Any], stem: str, beside: Sequence[str]) -> Recipe:
        check_values(settings)
        variants = settings.get("methods")
        if isinstance(variants, Mapping):
            for label in variants:
                if not LABEL.fullmatch(label):
                    raise ConfigError(f"methods: expected names of letters, digits, '-' and '_', got '{label}'")
            named = {
                label: {"name": label, **table} if isinstance(table, Mapping) else table
                for label, table in variants.items()
            }
            settings = {**settings, "methods": named}
        try:
            recipe = cls.model_validate(settings)
        except ValidationError as error:
            raise ConfigError(one_line(error, cls, sections=SECTIONS)) from None
        recipe._stem, recipe._own = stem, recipe.method
        recipe._beside = tuple(dict.fromkeys([*beside, *recipe.run.modules]))
        try:
            augmentation(recipe.training.augmentation)
        except ConfigError as problem:
            raise ConfigError(f"training.augmentation: {problem}") from None
        recipe._own_plugins = [_plugin_maker(own, recipe._beside) for own in recipe.plugins]
        for label, table in recipe.methods.items():
            recipe._build(table, f"methods.{label}")
        label = recipe.run.label
        recipe = recipe.choose(recipe.method.name)
        return recipe if label is None else recipe._with_label(label)

    def choose(self, name: str) -> Recipe:
        """The same experiment with another method or variant; see the top of this file for its hyperparameters.

        Raises:
            ConfigError: neither a method nor one of ``[methods]``, or hyperparameters that do not fit.
        """
        table = self.methods.get(name, MethodChoice(name=name))
        own = self._own or self.method
        if own.name == name:
            both = join(table.model_dump(exclude_defaults=True), own.model_dump(exclude_defaults=True))
            table = MethodChoice.model_validate({**both, "name": table.name})
        return self._with_method(table, name)

    def choose_alone(self, name: str) -> Recipe:
        """As `choose`, with every client a federation of its own, so that nothing is summed; called NAME-alone.

        Raises:
            ConfigError: as `choose`.
        """
        together = self.choose(name)
        alone = together.method.model_copy(update={"alone": True})
        chosen = self._with_method(alone, name)._with_label(f"{together.name}-alone")
        return chosen.model_copy(update={"secure_sums": SecureSums()})

    def _with_method(self, method: MethodChoice, name: str) -> Recipe:
        chosen = self.model_copy(update={"method": method})
        chosen._method = chosen._build(method, "method")
        hyperparameters = dataclasses.asdict(chosen._method)
        chosen._hyperparameters = {key: value for key, value in hyperparameters.items() if value is not None}
        label = name
        if name == method.name:
            label = label_of(name, self._beside)  # the user's own methods have one, too, as their names have a colon
            label += "-adapters" if method.adapters is not None else ""
            label += f"-{method.personalize}" if method.personalize is not None else ""
            label += "-alone" if method.alone else ""
        return chosen._with_label(None if label == method.name else label)

    def _with_label(self, label: str | None) -> Recipe:
        return self.model_copy(update={"run": self.run.model_copy(update={"label": label})})

    def with_run(self, **changes: Any) -> Recipe:
        """The same recipe with other values in ``[run]``.

        Raises:
            ConfigError: an unknown key, a wrong type or value.
        """
        try:
            run = RunSettings.model_validate({**self.run.model_dump(), **changes})
        except ValidationError as error:
            raise ConfigError(one_line(error, RunSettings, ("run",), sections=SECTIONS)) from None
        return self.model_copy(update={"run": run})

    # using --------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        clients = self.data.client_count
        who = "as many clients as the data name" if clients is None else f"{clients} clients"
        what = f"{self.name} on {self.data.dataset}, {who}, {self.training.rounds} rounds, seed {self.run.seed}"
        return f"Recipe({self.stem}: {what})"

    @property
    def stem(self) -> str:
        """What the experiment is called: the file's name without its ending (its path, below a folder "recipes"),
        and the presets that were laid over it.
        """
        return self._stem

    @property
    def name(self) -> str:
        """The variant's name, or the method's."""
        return self.run.label or self.method.name

    @property
    def folder(self) -> str:
        """The run folder that ``[run]`` names, else ``runs/<recipe>-<method>-seed<seed>``."""
        name = re.sub(r"[^A-Za-z0-9_.+=-]+", "-", self.name)  # a label may hold anything
        return self.run.out or f"runs/{self.stem}-{name}-seed{self.run.seed}"

    @property
    def beside(self) -> tuple[str, ...]:
        """Folders in which the user's modules are looked for where Python does not find them by itself."""
        return self._beside

    def variants(self) -> list[str]:
        """The names that the recipe itself offers to `choose`: its own method, and ``[methods]``."""
        return list(dict.fromkeys([(self._own or self.method).name, *self.methods]))

    def build_plugins(self) -> list[Any]:
        """What `Federation` takes as its plugins: settings of the library's, new objects of the user's own."""
        ours = [
            self.availability,
            self.devices,
            self.robust_aggregation,
            self.adversaries,
            self.privacy,
            self.secure_sums,
        ]
        return [*ours, *(make() for make in self._own_plugins)]

    @property
    def chosen_method(self) -> Any:
        """The method, a `polyfed.Method`, with its hyperparameters: built when the recipe was read, one for all
        federations.
        """
        return self._method

    def _build(self, choice: MethodChoice, place: str) -> Any:
        try:
            kind: Any = method_class(choice.name, self._beside, self.methods)
        except ConfigError as problem:
            raise ConfigError(f"{place}: {problem}" if place != "method" else str(problem)) from problem.__cause__
        known = [field.name for field in dataclasses.fields(kind)]
        try:
            method = kind(**choice.hyperparameters)
        except WrongSettings as problem:
            spelled = ["name", "alone", "adapters", "personalize", *known]
            line = one_line(problem.complaints, kind, (*place.split("."),), spelled, SECTIONS)
            raise ConfigError(line) from None
        try:
            if choice.adapters is not None:
                method = adapted(method, choice.adapters)
            if choice.personalize is not None:
                if self.evaluation.stage is not None:
                    raise ConfigError(
                        f"personalize: expected no evaluation.stage, as '{choice.personalize}' says what is scored, "
                        f"got '{self.evaluation.stage}'"
                    )
                method = personalized(method, choice.personalize)
        except ConfigError as problem:
            raise ConfigError(f"{place}.{problem}") from None
        if choice.alone and not has_upload(method):
            raise ConfigError(f"{place}.alone does nothing with method '{choice.name}', which uploads nothing")
        return alone(method) if choice.alone else method

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings as TOML has them: every hyperparameter, no None, no ``[methods]``, no key without
        effect.
        """
        settings = self.model_dump(exclude={"methods"}, exclude_none=True)
        own = settings["method"]
        further = {key: own[key] for key in ("alone", "personalize", "adapters") if own.get(key)}
        settings["method"] = {"name": self.method.name, **copy.deepcopy(self._hyperparameters), **further}
        settings |= {section: getattr(self, section).effective() for section in SECTIONS if section != "models"}
        settings["run"].pop("modules", None)
        folders = folders_of(texts(settings), self._beside)
        if folders:
            settings["run"]["modules"] = folders
        return {section: table for section, table in settings.items() if table}

    def dumps(self) -> str:
        """The resolved recipe as TOML."""
        return tomli_w.dumps(self.to_dict())


def _plugin_maker(own: PluginChoice, beside: Sequence[str]) -> Callable[[], Plugin]:
    """What makes a plugin of the user's own, anew for each federation, as a plugin may change during a run.

    Raises:
        ConfigError: no such class; it extends no `polyfed.Plugin`, or is called like another; or the settings are not
            its own.
    """
    name = own.name
    if not name:
        raise ConfigError("plugins: expected name = 'package.module:Class' in every [[plugins]], got none")
    kind = import_object("plugin", name, beside)
    if not isinstance(kind, type) or not issubclass(kind, Plugin):
        raise ConfigError(f"plugin '{name}': expected a class that extends polyfed.Plugin, got {kind!r}")
    if not kind.name or kind.name in PLUGINS:
        raise ConfigError(f"plugin '{name}': expected a name of its own as its class's `name`, got '{kind.name}'")
    if kind.settings_class is None:
        if own.settings:
            raise ConfigError(f"plugin '{name}': expected no settings, as its class has no settings_class, got some")
        return kind
    try:
        return functools.partial(kind, kind.settings_class.model_validate(own.settings))
    except ValidationError as error:
        raise ConfigError(one_line(error, kind.settings_class, ("plugins", name))) from None
