"""Recipes: every setting of an experiment, typed and checked; TOML in and out, with ``--set`` on top.

A recipe is one TOML file. ``[data]``, ``[models]``, ``[training]``, ``[evaluation]``, ``[availability]``,
``[privacy]``, ``[compression]``, ``[defence]``, ``[hostile]``, ``[devices]`` and ``[run]`` hold what the classes below
list. ``[method]`` holds a method's name and its knobs. ``[methods.NAME]`` holds the knobs that a method takes when it
is asked for by name (``--method NAME``, ``compare --methods NAME,...``), so that one recipe serves many:

    [method]
    name = "fedgh"                   # what plain `polyfed run` runs

    [methods.fedgh]
    header_epochs = 100

    [methods.fedgh-random-header]    # a variant: `name` says whose; the table's own name is its label in tables
    name = "fedgh"
    header_lr = 0.0

The knobs of NAME are those of ``[methods.NAME]``, overlaid by those of ``[method]`` if that has the same name.

``[profiles.NAME]`` holds settings that ``--profile NAME`` lays over all of this, in sections of the same names. Several
are laid one over the other: ``--profile n50,small``. What ``--set`` gives comes on top.

    [profiles.small]
    note = "scaled down: 20 rounds of 2 epochs, not 200 of 20"   # said wherever results are shown

    [profiles.small.training]
    rounds = 20
    epochs = 2

A setting that does nothing beside the others is an error, unless it has its default. What ``--set`` or a profile
changes takes along what the recipe says of the old value: ``--set data.partition=iid`` needs no word on its ``alpha``.

What a run folder keeps is the resolved recipe: all settings of that run, one ``[method]``, and in ``[run]`` the
profiles' names and notes, and what ``--set`` has changed.
"""

from __future__ import annotations

import copy
import dataclasses
import keyword
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from polyfed.core.acting import ActsWith, idle
from polyfed.core.complaints import WrongSettings, one_line, shown
from polyfed.core.model_factory import Precision
from polyfed.core.settings import (
    Availability,
    Compression,
    Defence,
    Evaluation,
    Hostile,
    Positive,
    Privacy,
    Settings,
    Training,
)
from polyfed.data.bounds import check_file
from polyfed.data.text import Words
from polyfed.data.transforms import augmentation
from polyfed.errors import RequestError
from polyfed.own_methods import label_of, method_class, with_knobs
from polyfed.places import check_characters
from polyfed.plugins.device_profiles import Devices, attendance_in_effect, check_lateness
from polyfed.registry import (
    METHODS,
    MODELS,
    PARTITIONS,
    check_trusted,
    file_of,
    folders_of,
    nearest,
    own_names,
    texts,
)
from polyfed.report import paper_results
from polyfed.results.schema import check_links, parse_toml

__all__ = ["Data", "MethodChoice", "Models", "Recipe", "RunSettings"]

_FLWR = "flwr:"  # before the name of a partitioner of flwr-datasets
_CLIENTS = "clients:"  # before the path of a folder with one folder per client
_BY_CLIENT = (_CLIENTS, "npz:")  # data that lie there client by client
_SKEWED = ActsWith("partition", ("dirichlet", "quantity"))
_CLASSES = ActsWith("partition", ("classes",))
_NATURAL = ActsWith("partition", ("natural",))
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # a variant's name is a folder's name, too


class Data(Settings):
    """``[data]``: which samples, and how they are dealt to the clients."""

    name: Annotated[str, Field(min_length=1)] = Field(
        description="a data set of `polyfed datasets`, a folder of Parquet files below root, 'hub:owner/name', "
        "'images:PATH' (a folder per class), 'csv:PATH' (a table, or texts), 'clients:PATH' (a folder per client), "
        "'npz:PATH' (a file of arrays per client) or 'package.module:function' of your own"
    )
    root: str | None = Field(None, description="folder that holds the data sets' folders; default: $POLYFED_DATA")
    image_column: str | None = Field(None, description="Parquet column with images, where it cannot be told")
    label_column: str | None = Field(None, description="Parquet or CSV column with labels, where it cannot be told")
    feature_columns: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="csv: the columns to learn from; default: all that hold numbers"
    )
    text_column: str | None = Field(
        None, description="column with texts of Parquet or CSV files or of the Hub, which makes them a set of texts"
    )
    vocabulary: Positive | None = Field(None, description="texts: most words with an id of their own; default: 5000")
    length: Positive | None = Field(None, description="texts: first words that are used of each; default: 25")
    vectors: str | None = Field(
        None, description="texts: file of fixed word vectors, a word and its numbers a line; default: learned"
    )
    train_splits: Annotated[list[str], Field(min_length=1)] = Field(
        ["train"], description="stored splits that make the training side; cinic10 also has 'validation', svhn 'extra'"
    )
    subset: str | None = Field(None, description="hub: which configuration, where there are several")
    revision: str | None = Field(None, description="hub: branch, tag or commit; default: the newest")
    class_names: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="all classes of the task, in order, of which the data have some or all; default: the data's"
    )
    mean: Annotated[list[float], Field(min_length=1)] | None = Field(
        None, description="inputs are normalised by it: per channel, in 0..1, or per feature; default: the data's own"
    )
    std: Annotated[list[float], Field(min_length=1)] | None = Field(None, description="likewise, above 0; with mean")
    max_rows: Positive | None = Field(None, description="use the first rows only, of the training side")
    max_test_rows: Positive | None = Field(None, description="the same of the official test side")
    image_size: Positive | None = Field(None, description="resize images to so many pixels a side; default: as stored")
    clients: Positive = 10
    partition: str = Field(
        "iid",
        description="'iid', 'dirichlet', 'quantity', 'classes', 'natural', or 'flwr:' and a partitioner's name",
    )
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False), _SKEWED] = Field(
        0.5, description="dirichlet, quantity: small is more skewed"
    )
    min_size: Annotated[Positive, _SKEWED] = Field(
        10, description="dirichlet, quantity: every client gets at least so many rows"
    )
    classes_per_client: Annotated[Positive, _CLASSES] = Field(2, description="classes: how many each client holds")
    deal: Annotated[Literal["fedrep", "shamsian", "ring"], _CLASSES] = Field(
        "ring", description="classes: how they are dealt"
    )
    natural_column: Annotated[str | None, _NATURAL] = Field(
        None, description="natural: rows that share a value of this column go to one client"
    )
    natural_groups: Annotated[Positive | None, _NATURAL] = Field(
        None, description="natural: values are first put into so many groups by their hash; default: each is its own"
    )
    partitioner: Annotated[dict[str, Any], ActsWith("partition", (_FLWR,))] = Field(
        default_factory=dict, description="flwr: arguments of the partitioner"
    )
    split: str = Field("8:1:1", description="train:validation:test, 'official' or 'official:train:validation'")
    test: Literal["client", "global"] = Field("client", description="whose test rows: each client's own, or one set")
    holdout: Annotated[int, Field(ge=0)] = Field(0, description="rows set aside for the server before the deal")
    max_train: Positive | Annotated[list[Positive], Field(min_length=1)] | None = Field(
        None, description="cap of training rows per client; a list: clients take its caps in turn"
    )
    max_test: Positive | None = Field(None, description="cap of test rows per client")
    halved: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of the clients, drawn, that lose half of their training rows; 0 is off"
    )
    skew: Literal["none", "rotation", "noise", "colour"] = Field(
        "none", description="how clients' images differ, test rows of their own included"
    )
    skew_strength: Annotated[float, Field(ge=0, le=1), ActsWith("skew", ("rotation", "noise", "colour"))] = Field(
        0.25, description="skew: how much; 0 is off"
    )
    public: str | None = Field(None, description="another data set, whose training inputs everybody may see")
    public_rows: Annotated[Positive | None, ActsWith("public")] = Field(
        None, description="public: how many, drawn; default: 5000, or all if fewer"
    )

    @model_validator(mode="before")
    @classmethod
    def _clients_as_they_come(cls, given: Any) -> Any:
        """A folder or a file per client is dealt so, unless another partition is asked for."""
        if isinstance(given, Mapping) and str(given.get("name")).startswith(_BY_CLIENT) and "partition" not in given:
            return {"natural_column": "client", **given, "partition": "natural"}
        return given

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, name: str) -> str:
        if name not in PARTITIONS and not (name.startswith(_FLWR) and name != _FLWR):
            known = [*PARTITIONS, f"{_FLWR}DirichletPartitioner"]
            raise ValueError(f"unknown partition '{name}'{nearest(name, known)}")
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> Data:
        if self.partition == "natural" and self.natural_column is None:
            raise ValueError("partition 'natural' expects natural_column, the column to deal by, came none")
        if (self.subset is not None or self.revision is not None) and not self.name.startswith("hub:"):
            raise ValueError(f"subset and revision expect a name 'hub:owner/name', came '{self.name}'")
        if self.feature_columns is not None and not self.name.startswith(("csv:", _CLIENTS)):
            raise ValueError(f"feature_columns expects a name 'csv:PATH' or 'clients:PATH', came '{self.name}'")
        if self.name.startswith(_BY_CLIENT) and (self.max_rows or self.max_test_rows):
            raise ValueError(f"max_rows would leave out whole clients of '{self.name}'; use max_train and max_test")
        if self.class_names is not None and len({*self.class_names}) < len(self.class_names):
            raise ValueError("class_names expects every name once, came one again")
        if len(self.mean or ()) != len(self.std or ()):
            raise ValueError("mean and std expect as many numbers each, came others")
        if not all(math.isfinite(value) for value in [*(self.mean or ()), *(self.std or ())]):
            raise ValueError("mean and std expect finite numbers, came others")
        if not all(value > 0 for value in self.std or ()):
            raise ValueError(f"std expects numbers above 0, came {self.std}")
        if self.public is not None and _same_inputs(self.public, self.name):
            raise ValueError(
                f"public expects another data set than name, came '{self.public}' for both; rows of the same one that "
                f"no client gets are data.holdout"
            )
        return self

    @property
    def client_count(self) -> int | None:
        """How many clients; None for one per value of `natural_column`, which is so unless `clients` is set."""
        return None if self.partition == "natural" and "clients" not in self.model_fields_set else self.clients

    @property
    def words(self) -> Words:
        """How texts are read."""
        return Words(self.text_column, self.vocabulary, self.length, self.vectors)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to deal by, besides labels."""
        asked = self.partitioner.get("partition_by", []) if self.partition.startswith(_FLWR) else self.natural_column
        names = [asked] if isinstance(asked, str) else asked if isinstance(asked, list) else []
        used = self.partition == "natural" or self.partition.startswith(_FLWR)
        return tuple(str(name) for name in names if name != "label" or self.partition == "natural") if used else ()

    def _idle(self) -> set[str]:
        off = {
            "clients": self.client_count is None,
            "skew": self.skew == "none",
            "halved": not self.halved,
            "train_splits": self.train_splits == ["train"],
            "feature_columns": self.feature_columns is None,
            "partitioner": not self.partitioner,
        }
        return super()._idle() | {key for key, is_off in off.items() if is_off}


def _same_inputs(one: str, other: str) -> bool:
    """Whether two names are of the same images; CIFAR-100's do not change with its labels."""
    return one.removesuffix("-coarse") == other.removesuffix("-coarse")


class Models(Settings):
    """``[models]``: which network each client gets."""

    architectures: Annotated[list[str], Field(min_length=1)] = Field(
        description="names from `polyfed models`, 'timm:...', 'torchvision:...', 'hf:owner/name', or "
        "'package.module:function' of your own; '?pretrained' behind a package's network or vit-s8 to vit-s12 begins "
        "with fetched weights, '@layer1' behind one with a colon ends the extractor there"
    )
    assign: Literal["cycle", "blocks", "random"] = Field(
        "cycle", description="client k gets the (k mod A)th; equal blocks in order; or a seeded draw"
    )
    feature_dim: Positive | None = Field(None, description="adds a projection to this width before the head")

    @field_validator("architectures")
    @classmethod
    def _known_models(cls, names: list[str]) -> list[str]:
        for name in names:
            if ":" not in name and name.partition("?")[0] not in MODELS:
                raise ValueError(f"unknown model '{name}'{nearest(name, MODELS)}")
        return names


class MethodChoice(BaseModel):
    """``[method]``: a method's name; every other key is one of its knobs."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: str

    @property
    def knobs(self) -> dict[str, Any]:
        """The knobs as the recipe gives them."""
        return dict(self.model_extra or {})


class RunSettings(Settings):
    """``[run]``: how, where and with which seed."""

    _place: ClassVar[tuple[str, ...]] = ("run",)

    seed: Annotated[int, Field(ge=0)] = Field(0, description="every random draw of the run is derived from it")
    device: str = Field("cpu", description="where networks compute: 'cpu', 'cuda', 'cuda:1'")
    executor: Literal["auto", "serial", "pool", "cohort", "flower-sim"] = Field(
        "auto",
        description="serial: one client after the other; pool: worker processes; cohort: clients of a network as one; "
        "flower-sim: processes of Ray, also on a cluster; auto: the pool where it pays, on a GPU the cohort",
    )
    workers: Positive | None = Field(
        None, description="at most so many at once: processes (default: the cores), clients of a cohort (32)"
    )
    precision: Precision = Field(
        "float32", description="what networks train in; bf16: matrix products and convolutions in bfloat16"
    )
    checkpoint_every: Positive = Field(5, description="rounds between checkpoints")
    keep: Literal["last", "best"] = Field(
        "last",
        description="whose weights the run's models are: those after the last round, or after that with the best "
        "validation accuracy",
    )
    out: str | None = Field(None, description="run folder; default: runs/<recipe>-<method>-seed<seed>")
    label: str | None = Field(None, description="name of the run in tables; default: the method's")
    track: list[Literal["tensorboard"]] = Field([], description="live curves, written into the run folder")
    published: list[str] = Field([], description="papers' tables to stand beside the results: ['fedgh/table3']")
    profile: str | None = Field(None, description="kept by a run: the profiles that were laid over its recipe")
    profile_note: str | None = Field(None, description="kept by a run: their notes")
    changed: list[str] = Field([], description="kept by a run: what --set has changed of its recipe")
    modules: list[str] = Field(
        [], description="kept by a run: folders that hold the modules of one's own that its recipe names"
    )

    def _idle(self) -> set[str]:
        off = {key for key in ("track", "published", "changed", "modules") if not getattr(self, key)}
        return super()._idle() | off | ({"keep"} if self.keep == "last" else set())

    @field_validator("published")
    @classmethod
    def _known_tables(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in paper_results.tables():
                raise ValueError(f"unknown table '{name}'{nearest(name, paper_results.tables())}")
        return names

    @model_validator(mode="after")
    def _serial_is_one(self) -> RunSettings:
        if self.executor == "serial" and (self.workers or 1) > 1:
            raise ValueError(f"expected workers = 1, as the executor 'serial' has one, came {self.workers}")
        if self.executor == "cohort" and self.workers == 1:
            raise ValueError("expected workers = 2 or more, as the executor 'cohort' trains so many as one, came 1")
        return self


class Recipe(Settings):
    """An experiment. Make one with `load` or `from_dict`, whose errors are one clear line."""

    _place: ClassVar[tuple[str, ...]] = ()

    data: Data
    models: Models
    method: MethodChoice
    methods: dict[str, MethodChoice] = Field(default_factory=dict)
    training: Training = Field(default_factory=Training)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    availability: Availability = Field(default_factory=Availability)
    privacy: Privacy = Field(default_factory=Privacy)
    compression: Compression = Field(default_factory=Compression)
    devices: Devices = Field(default_factory=Devices)
    defence: Defence = Field(default_factory=Defence)
    hostile: Hostile = Field(default_factory=Hostile)
    run: RunSettings = Field(default_factory=RunSettings)
    _stem: str = PrivateAttr("recipe")
    _beside: tuple[str, ...] = PrivateAttr(())  # where modules of one's own are looked for, too
    _own: MethodChoice | None = PrivateAttr(None)  # [method] as the file has it, before `choose`

    # making -------------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        method: str | None = None,
        seed: int | None = None,
        out: str | Path | None = None,
        device: str | None = None,
        workers: int | None = None,
        executor: str | None = None,
        profile: str | None = None,
    ) -> Recipe:
        """Read a recipe file. Modules of one's own that it names may lie beside it, or in the present folder.

        Args:
            path: the TOML file.
            overrides: ``"data.clients=20"``: a dotted key, and a value in TOML's form (bare words are text).
            method: a method's or a variant's name, in place of the recipe's own.
            profile: one of ``[profiles]``, or several with commas between; laid over the recipe before all else.
            seed, out, device, workers, executor: in place of those of ``[run]``.

        Raises:
            RequestError: no such file, not TOML, an unknown key, a wrong type or value; one line that says where.
        """
        path = Path(path)
        settings = _with_overrides(_with_profile(_read(path), profile), overrides, method)
        run = {"seed": seed, "out": None if out is None else str(out), "device": device, "workers": workers}
        run["executor"] = executor
        settings = _merged(settings, {"run": {k: v for k, v in run.items() if v is not None}})
        return cls.from_dict(settings, "-".join([_stem(path), *_names(profile)]), beside=_beside(path))

    @classmethod
    def of_run(cls, folder: str | Path, trust: bool = False) -> Recipe:
        """The recipe that a run folder keeps.

        Args:
            folder: the run's.
            trust: whether modules of one's own that it names may be imported; they are looked for where the run found
                them.

        Raises:
            RequestError: see `load`; or it names such modules and is not trusted; or a part of it is a link.
        """
        check_links(Path(folder))
        path = Path(folder) / "recipe.toml"
        settings = _read(path)
        check_trusted(folder, _building(settings), trust)
        return cls.from_dict(settings, _stem(path))

    @classmethod
    def from_dict(
        cls,
        settings: Mapping[str, Any],
        stem: str = "recipe",
        profile: str | None = None,
        beside: Sequence[str] = (),
    ) -> Recipe:
        """Check settings as a TOML file would give them; ``[method]`` then holds all its knobs.

        Args:
            settings: section -> key -> value.
            stem: what the experiment is called, for the default run folder.
            profile: see `load`.
            beside: folders in which modules of one's own are looked for where Python does not find them by itself.

        Raises:
            RequestError: see `load`.
        """
        check_characters(settings)
        settings = _with_profile(settings, profile)
        given = {key: dict(value) if isinstance(value, Mapping) else value for key, value in settings.items()}
        if isinstance(tables := given.get("methods"), dict):
            for label, table in tables.items():
                if not _LABEL.fullmatch(label):
                    raise RequestError(f"methods: expected names of letters, digits, '-' and '_', came '{label}'")
                tables[label] = {"name": label, **table} if isinstance(table, Mapping) else table
        try:
            recipe = cls.model_validate(given)
        except ValidationError as error:
            raise RequestError(one_line(error, cls, sections=cls.sections())) from None
        recipe._stem, recipe._own = stem, recipe.method
        recipe._beside = tuple(dict.fromkeys([*beside, *recipe.run.modules]))
        check_lateness(recipe.availability, recipe.devices)
        try:
            augmentation(recipe.training.augment)
        except RequestError as problem:
            raise RequestError(f"training.augment: {problem}") from None
        for label in recipe.methods:
            recipe._build(recipe.methods[label], f"methods.{label}")
        label = recipe.run.label
        recipe = recipe.choose(recipe.method.name)
        return recipe if label is None else recipe.with_run(label=label)

    def choose(self, name: str) -> Recipe:
        """The same experiment with another method or variant; see the top of this file for its knobs.

        Raises:
            RequestError: neither a method nor one of ``[methods]``, or knobs that do not fit.
        """
        table = self.methods.get(name)
        knobs = {} if table is None else table.knobs
        method = name if table is None else table.name
        own = self._own or self.method
        if own.name == name:
            knobs |= own.knobs
        chosen = self.model_copy(update={"method": MethodChoice(name=method, **knobs)})
        chosen._build(chosen.method, "method")
        label = label_of(name)  # a method of one's own has one, too, as its name has a colon
        return chosen.with_run(label=None if label == method else label)

    def with_run(self, **changes: Any) -> Recipe:
        """The same recipe with other values in ``[run]``.

        Raises:
            RequestError: an unknown key, a wrong type or value.
        """
        try:
            run = RunSettings.model_validate({**self.run.model_dump(), **changes})
        except ValidationError as error:
            raise RequestError(one_line(error, RunSettings, ("run",), sections=self.sections())) from None
        return self.model_copy(update={"run": run})

    # using --------------------------------------------------------------------------------------------------

    @classmethod
    def sections(cls) -> dict[str, type[Settings]]:
        """The sections whose keys are fixed, by name."""
        kinds = {name: field.annotation for name, field in cls.model_fields.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Settings)}

    def __repr__(self) -> str:
        clients = self.data.client_count
        who = "as many clients as the data name" if clients is None else f"{clients} clients"
        what = f"{self.name} on {self.data.name}, {who}, {self.training.rounds} rounds, seed {self.run.seed}"
        return f"Recipe({self.stem}: {what})"

    @property
    def stem(self) -> str:
        """What the experiment is called: the file's name without its ending (its path, below a folder "recipes"),
        and the profiles that were laid over it.
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
        """Folders in which modules of one's own are looked for where Python does not find them by itself."""
        return self._beside

    def variants(self) -> list[str]:
        """The names that the recipe itself offers to `choose`: its own method, and ``[methods]``."""
        return list(dict.fromkeys([(self._own or self.method).name, *self.methods]))

    @property
    def plugins(self) -> list[Any]:
        """What the sections beside method and data ask for: what `Federation` takes as its plugins."""
        return [self.availability, self.devices, self.defence, self.hostile, self.privacy, self.compression]

    def build_method(self) -> Any:
        """The method, a `polyfed.Method`, with its knobs."""
        return self._build(self.method, "method")

    def _build(self, choice: MethodChoice, place: str) -> Any:
        try:
            kind: Any = with_knobs(choice.name, method_class(choice.name, self._beside, self.methods))
        except RequestError as problem:
            raise RequestError(f"{place}: {problem}" if place != "method" else str(problem)) from problem.__cause__
        known = [field.name for field in dataclasses.fields(kind)]
        # a knob may be a word that Python keeps for itself: the paper's `lambda` is the field `lambda_`
        knobs = {f"{k}_" if keyword.iskeyword(k) and f"{k}_" in known else k: v for k, v in choice.knobs.items()}
        try:
            return kind(**knobs)
        except WrongSettings as problem:
            spelled = ["name", *(name.rstrip("_") for name in known)]
            said = one_line(problem.complaints, kind, (*place.split("."),), spelled, self.sections())
            raise RequestError(said) from None

    def to_dict(self) -> dict[str, Any]:
        """The resolved settings as TOML has them: every knob, no None, no ``[methods]``, no key without effect."""
        settings = self.model_dump(exclude={"methods"}, exclude_none=True)
        knobs = dataclasses.asdict(self.build_method())
        given = {name.rstrip("_"): value for name, value in knobs.items() if value is not None}
        settings["method"] = {"name": self.method.name, **given}
        optional = ("privacy", "compression", "defence", "hostile", "devices")
        for section in ("data", "training", "evaluation", *optional, "run"):
            settings[section] = getattr(self, section).in_effect()
        settings["availability"] = attendance_in_effect(self.availability, self.devices)
        settings["run"].pop("modules", None)
        if folders := folders_of(texts(settings), self._beside):
            settings["run"]["modules"] = folders
        return {section: table for section, table in settings.items() if table}

    def dumps(self) -> str:
        """The resolved recipe as TOML."""
        return tomli_w.dumps(self.to_dict())


# reading ------------------------------------------------------------------------------------------------------


def code_named(path: str | Path, overrides: Sequence[str] = (), names: Sequence[str] = ()) -> list[str]:
    """What `Recipe.load` will import that is not polyfed's: a line for each module, with its file. Nothing is imported.

    Args:
        path: the recipe's file. overrides: see `Recipe.load`. names: of methods that are asked for beside it.

    Raises:
        RequestError: no such file, or not TOML.
    """
    settings = _read(Path(path))
    run = settings.get("run")
    kept = list(texts(run.get("modules", []))) if isinstance(run, Mapping) else []
    beside = [*_beside(Path(path)), *kept]
    asked = [value for keys, value in map(parse_override, overrides) if keys[0] != "run"]
    modules = dict.fromkeys(name.partition(":")[0] for name in own_names([_building(settings), asked, list(names)]))
    files = {module: file_of(module, beside) for module in modules}
    return [f"imports {module}, from {file}" for module, file in files.items() if file is not None]


def _building(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without [run], in which there are only labels and places."""
    return {section: table for section, table in settings.items() if section != "run"}


def _beside(path: Path) -> list[str]:
    """Where modules that a recipe's file names are looked for, too."""
    return [str(path.parent.absolute()), str(Path.cwd())]


def _read(path: Path) -> dict[str, Any]:
    check_file(path)
    try:
        return parse_toml(path.read_bytes())
    except FileNotFoundError:
        near = [str(p) for folder in (path.parent, Path("recipes")) for p in folder.glob("*.toml")]
        hint = nearest(str(path), near)
        hint = hint if "did you mean" in hint else ""
        raise RequestError(f"expected a recipe file, came '{path}', which is not there{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RequestError(f"expected a recipe file, came '{path}': {reason}") from None
    except ValueError as error:
        raise RequestError(f"expected TOML in '{path}', came something else: {error}") from None


def _stem(path: Path) -> str:
    """``recipes/fedgh/table3.toml`` -> "fedgh/table3", so that the default run folders of two papers differ."""
    folders = path.parent.parts
    below = folders[len(folders) - folders[::-1].index("recipes") :] if "recipes" in folders else ()
    return "/".join([*below, path.stem])


# profiles -----------------------------------------------------------------------------------------------------


def _names(profile: str | None) -> list[str]:
    return [] if profile is None else [name.strip() for name in profile.split(",")]


def _with_profile(settings: Mapping[str, Any], profile: str | None) -> dict[str, Any]:
    """The settings without ``[profiles]``, of which those asked for are laid over them; all of them are checked."""
    profiles = settings.get("profiles", {})
    base = {key: value for key, value in settings.items() if key != "profiles"}
    if not isinstance(profiles, Mapping):
        raise RequestError(f"profiles: expected a table, came {shown(profiles)}")
    for name, table in profiles.items():
        _check_profile(base, name, table)
    laid: dict[str, Any] = base
    for name in _names(profile):
        if name not in profiles:
            hint = nearest(name, profiles) if profiles else "; the recipe has none"
            raise RequestError(f"unknown profile '{name}'{hint}")
        laid = _switched(_laid_over(laid, profiles[name]), list(_paths(profiles[name])))
    notes = [profiles[name]["note"] for name in _names(profile) if "note" in profiles[name]]
    told = {"profile": ",".join(_names(profile)), "profile_note": "; ".join(notes)}
    return _merged(laid, {"run": {key: text for key, text in told.items() if text}}) if profile else laid


def _check_profile(base: Mapping[str, Any], name: str, table: Any) -> None:
    """One profile's keys and values, as far as the recipe itself stands."""
    if not _LABEL.fullmatch(name):
        raise RequestError(f"profiles: expected names of letters, digits, '-' and '_', came '{name}'")
    if not isinstance(table, Mapping):
        raise RequestError(f"profiles.{name}: expected a table, came {shown(table)}")
    if not isinstance(note := table.get("note", ""), str):
        raise RequestError(f"profiles.{name}.note: expected text, came {shown(note)}")
    whole = {"method": {"name": "local"}, **base}  # one that is always asked with --method has no [method]
    try:
        Recipe.from_dict(whole)
    except RequestError:
        return  # the recipe's own fault, which is told without a profile's name
    try:
        laid = Recipe.from_dict(_switched(_laid_over(whole, table), list(_paths(table))))
    except RequestError as problem:
        raise RequestError(f"profiles.{name}: {problem}") from None
    if laid.run.profile is not None or laid.run.profile_note is not None:
        raise RequestError("run.profile: expected --profile NAME, which writes it, came it in a recipe with [profiles]")


def _laid_over(own: Any, more: Any, place: tuple[str, ...] = ()) -> Any:
    """Tables are joined key by key; a method's table that names another method is replaced as a whole."""
    if not isinstance(own, Mapping) or not isinstance(more, Mapping):
        return more
    if place and place[0] in ("method", "methods") and more.get("name", own.get("name")) != own.get("name"):
        return more
    joined = {
        key: _laid_over(own.get(key), value, (*place, key)) for key, value in more.items() if place or key != "note"
    }
    return {**own, **joined}


def _paths(table: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The dotted keys of all values in a table of tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _paths(value, (*place, key))
        else:
            yield (*place, key)


def _switched(settings: dict[str, Any], changed: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """The settings without what lost its effect by what was laid over them.

    ``--set data.partition=iid`` takes a recipe's ``alpha`` away, which was said of its own partition; an ``alpha`` that
    was itself laid over them stays, to be refused.

    Args:
        settings: with the changes in them. changed: the dotted keys that were laid over them.
    """
    settings = copy.deepcopy(settings)
    for place in dict.fromkeys(path[:-1] for path in changed):
        fields, tables = _fields_at(settings, place), _tables_at(settings, place)
        keys = {path[-1] for path in changed if path[:-1] == place}
        values = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        for table in tables:
            values |= {name: table[name.rstrip("_")] for name in fields if name.rstrip("_") in table}
        for name, needed in idle(fields, values).items():
            if needed.key in keys and name.rstrip("_") not in keys:
                for table in tables:
                    table.pop(name.rstrip("_"), None)
    return settings


def _tables_at(settings: Mapping[str, Any], place: tuple[str, ...]) -> list[dict[str, Any]]:
    """The tables that hold the keys of a place, the one that counts more behind; a method's knobs may lie in two."""
    places = [place]
    if place == ("method",) and isinstance(own := settings.get("method"), Mapping):
        places = [("methods", str(own.get("name"))), place]
    found = []
    for path in places:
        table: Any = settings
        for key in path:
            table = table.get(key) if isinstance(table, Mapping) else None
        found += [table] if isinstance(table, dict) else []
    return found


def _fields_at(settings: Mapping[str, Any], place: tuple[str, ...]) -> Mapping[str, Any]:
    """The settings that a place may hold: of a section, or of a registered method; none where it is neither."""
    if len(place) == 1 and place[0] in Recipe.sections():
        return Recipe.sections()[place[0]].model_fields
    if place != ("method",) and place[:1] != ("methods",):
        return {}
    name = place[-1]
    for table in _tables_at(settings, place)[::-1]:
        name = str(table.get("name", name))
    fields: Mapping[str, Any] = METHODS[name].__pydantic_fields__ if name in METHODS else {}
    return fields


def _with_overrides(settings: dict[str, Any], overrides: Sequence[str], method: str | None) -> dict[str, Any]:
    """Put `overrides` over the settings, `method` in between, so that ``method.lr=1`` means the method asked for."""
    parsed = [parse_override(text) for text in overrides]
    changed = [f"{'.'.join(keys)}={_plain(value)}" for keys, value in parsed if _changes(settings, keys, value)]
    for keys, value in parsed:
        if keys in (["run", "profile"], ["run", "profile_note"], ["run", "changed"]):
            if keys[1] == "changed":
                raise RequestError("run.changed: expected nothing, as --set itself writes it, came --set")
            raise RequestError(f"{'.'.join(keys)}: expected --profile NAME, which writes it, came --set")
        if keys == ["method", "name"] and method is None:
            method = str(value)
    for keys, value in parsed:
        if keys[0] != "method":
            _assign(settings, keys, value)
    own = settings.get("method")
    if method is not None and (own is None or (isinstance(own, dict) and own.get("name") != method)):
        settings["method"] = {"name": method}
    for keys, value in parsed:
        if keys[0] == "method" and keys != ["method", "name"]:
            _assign(settings, keys, value)
    settings = _switched(settings, [tuple(keys) for keys, _ in parsed])
    if not changed:
        return settings
    before = settings.get("run", {}).get("changed", ()) if isinstance(settings.get("run"), Mapping) else ()
    return _merged(settings, {"run": {"changed": [*before, *changed]}})


def _changes(settings: Mapping[str, Any], keys: Sequence[str], value: Any) -> bool:
    """Whether an override makes it another experiment than the recipe's; not where, how or how often it looks."""
    if keys[0] in ("run", "evaluation") or list(keys) in (["data", "root"], ["method", "name"]):
        return False
    kind = Recipe.model_fields[keys[0]].annotation if keys[0] in Recipe.model_fields else None
    field = getattr(kind, "model_fields", {}).get(keys[1])
    there: Any = settings
    for key in keys:
        there = there.get(key) if isinstance(there, Mapping) else None
    return bool(value != (field.default if there is None and field is not None else there))


def _plain(value: Any) -> str:
    """A value on one line, as --set takes it."""
    return value if isinstance(value, str) else tomli_w.dumps({"value": value}).partition("=")[2].strip()


def parse_override(text: str) -> tuple[list[str], Any]:
    """``"data.clients=20"`` to (["data", "clients"], 20)."""
    key, equals, value = text.partition("=")
    keys = [part.strip() for part in key.split(".")]
    if not equals or len(keys) < 2 or not all(keys):
        raise RequestError(f"expected --set SECTION.KEY=VALUE, for instance --set data.clients=20, came '{text}'")
    value = value.strip()
    try:
        parsed = parse_toml(f"value = {value}".encode())
    except ValueError:
        return keys, value
    return keys, parsed["value"] if parsed.keys() == {"value"} else value


def _assign(settings: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    place = settings
    for depth, key in enumerate(keys[:-1], 1):
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise RequestError(f"unknown key '{'.'.join(keys)}': '{'.'.join(keys[:depth])}' is no table")
    place[keys[-1]] = value


def _merged(settings: Mapping[str, Any], more: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    merged = dict(settings)
    for section, values in more.items():
        own = merged.get(section, {})
        merged[section] = {**own, **values} if isinstance(own, Mapping) else own
    return merged
