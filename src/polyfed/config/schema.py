"""The sections of a recipe that no other part of polyfed has: ``[data]``, ``[models]``, ``[method]`` and ``[run]``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from polyfed.core.model_factory import Precision
from polyfed.core.settings import (
    AdapterSettings,
    Evaluation,
    Keep,
    Personalization,
    Positive,
    Privacy,
    Settings,
    Training,
    problem_of_workers,
)
from polyfed.data.files import CLIENT
from polyfed.data.options import OF_TABLES, PartitionOptions, SourceOptions
from polyfed.data.samples import ONE_LABEL
from polyfed.model_groups import GROUPS
from polyfed.places import LARGEST
from polyfed.plugins.settings import Adversaries, Availability, Compression, Devices, RobustAggregation
from polyfed.registry import CLIENTS, CSV, HUB, MODELS, NPZ, PARTITIONS, PATHS, RDATASETS, suggest
from polyfed.results import paper_tables
from polyfed.validation.effect import ActsWith
from polyfed.validation.error_lines import shown

__all__ = ["SECTIONS", "Control", "Data", "MethodChoice", "Models", "RunSettings"]

Control = Literal["pooled"]

_PACKAGED = ("digits", "heart-disease", "heart-disease-flamby", "watch")  # inside Python packages
_BY_CLIENT = (CLIENTS, NPZ)  # before the path of data that lie there client by client
_OF_TABLES = (CSV, CLIENTS, RDATASETS)  # before the name of a table
_SKEWED = ActsWith("partition", ("dirichlet", "quantity"))
_BY_CLASS = ActsWith("partition", ("by_class",))
_BY_GROUP = ActsWith("partition", ("by_group",))


class Data(Settings):
    """``[data]``: which samples, and how the clients get them."""

    _switches: ClassVar[tuple[str, ...]] = (
        *("label_space", "halved_client_fraction", "train_splits", "missing_values"),
        "decimal",
    )

    dataset: Annotated[str, Field(min_length=1)] = Field(
        description="a data set of `polyfed datasets`, a folder of Parquet files below root, 'hub:owner/name', "
        "'images:PATH' (a folder per class), 'csv:PATH' (a table, or texts), 'clients:PATH' (a folder per client), "
        "'npz:PATH' (a file of arrays per client), 'rdatasets:PACKAGE/ITEM' (a table) or 'package.module:function' of "
        "your own"
    )
    root: str | None = Field(None, description="folder that holds the data sets' folders; default: $POLYFED_DATA")
    image_column: str | None = Field(None, description="Parquet column with images, where it is not clear")
    label_column: str | None = Field(None, description="Parquet or CSV column with labels, where it is not clear")
    feature_columns: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="csv: the columns to learn from; default: all that hold numbers"
    )
    category_columns: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="csv: columns of categories to learn from besides; networks embed them"
    )
    categories: dict[str, Annotated[list[str], Field(min_length=1)]] | None = Field(
        None, description="csv: further ones with all their categories, in order, which nodes' own data need"
    )
    missing_values: Literal["error", "client_mean"] = Field(
        "error",
        description="csv: what becomes of missing numbers: an error, or the mean of the client's own training rows "
        "(of the data set, where [privacy] hides rows), with a column that says so",
    )
    decimal: Literal[".", ","] = Field(".", description="csv: what stands before decimals")
    missing_words: Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="csv: what stands for a missing value besides empty cells, NA, N/A, NaN and ?; case does not count",
    )
    text_column: str | None = Field(
        None, description="column with texts of Parquet or CSV files or of the Hub, which makes them a set of texts"
    )
    vocab_size: Positive | None = Field(None, description="texts: most words with an id of their own; default: 5000")
    max_length: Positive | None = Field(
        None, description="texts: first words that are used of each; default: 25, or 100 characters"
    )
    tokens: Literal["words", "characters", "fedrep"] | None = Field(
        None,
        description="texts: what has an id: words and signs of any script, characters, or, fedrep, words without "
        "combining marks and the signs . , ! ? ; alone; default: words, of sentiment140 fedrep",
    )
    word_vectors: str | None = Field(
        None, description="texts: file of fixed word vectors, a word and its numbers a line; default: learned"
    )
    task: Literal["regression"] | None = Field(
        None,
        description="csv, and clients of CSV files: 'regression' predicts the numbers of label_column; default: labels "
        "are classes. Other data sets say themselves what they are",
    )
    train_splits: Annotated[list[str], Field(min_length=1)] = Field(
        ["train"], description="stored splits that make the training side; cinic10 also has 'validation', svhn 'extra'"
    )
    config: str | None = Field(None, description="hub: which configuration, where there are several")
    revision: str | None = Field(None, description="hub: branch, tag or commit; default: the newest")
    class_names: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="all classes of the task, in order, of which the data have some or all; default: the data's"
    )
    mean: Annotated[list[float], Field(min_length=1)] | None = Field(
        None, description="inputs are normalized by it: per channel, in 0..1, or per feature; default: the data's own"
    )
    std: Annotated[list[float], Field(min_length=1)] | None = Field(None, description="likewise, above 0; with mean")
    limit_train: Positive | None = Field(None, description="use so many rows only of the training side, drawn")
    limit_test: Positive | None = Field(None, description="the same of the official test side")
    image_size: Positive | None = Field(None, description="resize images to so many pixels a side; default: as stored")
    num_clients: Positive = Field(10, description="clients; by_group: default: one for each value of group_by")
    partition: str = Field("iid", description="'iid', 'dirichlet', 'quantity', 'by_class' or 'by_group'")
    dirichlet_alpha: Annotated[float, Field(gt=0, allow_inf_nan=False), _SKEWED] = Field(
        0.5, description="dirichlet, quantity: small is more skewed"
    )
    min_samples: Annotated[Positive, ActsWith("partition", ("dirichlet", "quantity", "by_group"))] = Field(
        10,
        description="dirichlet, quantity: every client gets at least so many rows; by_group: values with fewer rows "
        "are left out, by default none",
    )
    classes_per_client: Annotated[Positive, _BY_CLASS] = Field(2, description="by_class: how many each client holds")
    class_assignment: Annotated[Literal["shards", "shamsian", "round_robin"], _BY_CLASS] = Field(
        "round_robin", description="by_class: how classes go to clients"
    )
    group_by: Annotated[str | None, _BY_GROUP] = Field(
        None, description="by_group: rows that share a value of this column go to one client"
    )
    num_groups: Annotated[Positive | None, _BY_GROUP] = Field(
        None, description="by_group: values are first put into so many groups by their hash; default: each is its own"
    )
    split: str = Field("8:1:1", description="train:validation:test, 'official' or 'official:train:validation'")
    test: Literal["local", "global"] = Field("local", description="whose test rows: each client's own, or one set")
    holdout: Annotated[int, Field(ge=0)] = Field(0, description="rows set aside for the server before the deal")
    max_train_per_client: Positive | Annotated[list[Positive], Field(min_length=1)] | None = Field(
        None, description="cap of training rows per client, which are drawn; a list: clients take its caps in turn"
    )
    max_test_per_client: Positive | None = Field(None, description="cap of test rows per client")
    halved_client_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="share of the clients, drawn, that lose half of their training rows; 0 is off"
    )
    label_space: Literal["shared", "own"] = Field(
        "shared",
        description="own: each client's classes are those of its training rows, and its network has as many outputs",
    )
    public_dataset: str | None = Field(None, description="another data set, whose training inputs everybody may see")
    public_samples: Annotated[Positive | None, ActsWith("public_dataset")] = Field(
        None, description="public_dataset: how many, drawn; default: 5000, or all if fewer"
    )

    @model_validator(mode="before")
    @classmethod
    def _clients_as_they_come(cls, given: Any) -> Any:
        """A folder or a file per client is partitioned so, unless another partition is asked for."""
        if isinstance(given, Mapping) and str(given.get("dataset")).startswith(_BY_CLIENT) and "partition" not in given:
            return {"group_by": CLIENT, **given, "partition": "by_group"}
        return given

    @field_validator("label_column", mode="before")
    @classmethod
    def _one_label(cls, given: Any) -> Any:
        if isinstance(given, list):
            raise ValueError(f"expected one column, got {shown(given)}{ONE_LABEL}")
        return given

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, name: str) -> str:
        if name not in PARTITIONS:
            raise ValueError(f"unknown partition '{name}'{suggest(name, PARTITIONS)}")
        return name

    @model_validator(mode="after")
    def _fits_together(self) -> Data:
        if self.partition == "by_group" and self.group_by is None:
            raise ValueError("partition 'by_group' expects group_by, the column to deal by, got none")
        if (self.config is not None or self.revision is not None) and not self.dataset.startswith(HUB):
            raise ValueError(f"config and revision expect a dataset 'hub:owner/name', got '{self.dataset}'")
        if self.dataset.startswith(_BY_CLIENT) and (self.limit_train or self.limit_test):
            raise ValueError(
                f"limit_train could leave out whole clients of '{self.dataset}'; use max_train_per_client "
                "and max_test_per_client"
            )
        if self.class_names is not None and len({*self.class_names}) < len(self.class_names):
            raise ValueError("class_names expects every name once, got one again")
        if len(self.mean or ()) != len(self.std or ()):
            raise ValueError("mean and std expect as many numbers each, got others")
        if not all(math.isfinite(value) for value in [*(self.mean or ()), *(self.std or ())]):
            raise ValueError("mean and std expect finite numbers, got others")
        if not all(value > 0 for value in self.std or ()):
            raise ValueError(f"std expects numbers above 0, got {self.std}")
        if self.public_dataset is not None and _same_inputs(self.public_dataset, self.dataset):
            raise ValueError(
                f"public_dataset expects another data set than dataset, got '{self.public_dataset}' for both; rows of "
                f"the same one that no client gets are data.holdout"
            )
        return self

    @model_validator(mode="after")
    def _is_table(self) -> Data:
        options = self.source_options(())
        given = options.given
        for name in OF_TABLES:
            if name in given and not self.dataset.startswith(_OF_TABLES):
                raise ValueError(f"{name} expects a dataset 'csv:PATH' or 'clients:PATH', got '{self.dataset}'")
        for column, names in (self.categories or {}).items():
            if len({*names}) < len(names) or any(
                name != name.strip() or options.cells.is_missing(name) for name in names
            ):
                raise ValueError(f"categories.{column} expects every category once, and none that is missing")
        if self.missing_words and self.missing_values == "error" and not (self.category_columns or self.categories):
            raise ValueError("missing_words expects missing_values = 'client_mean', or category_columns, got neither")
        return self

    @model_validator(mode="after")
    def _root_is_read(self) -> Data:
        names = [self.dataset] if self.public_dataset is None else [self.dataset, self.public_dataset]
        if self.root and not any(map(_reads_files, names)):
            raise ValueError(
                f"root = {shown(self.root)} does nothing beside dataset = '{self.dataset}', which reads no files; name "
                "a dataset of files, or leave out root"
            )
        return self

    @property
    def client_count(self) -> int | None:
        """How many clients; None for one per value of `group_by`, which is so unless `num_clients` is set."""
        return None if self.partition == "by_group" and "num_clients" not in self.model_fields_set else self.num_clients

    @property
    def _keeps_small_groups(self) -> bool:
        """Whether values of `group_by` with few rows are clients, too, which is so unless `min_samples` is set."""
        return self.partition == "by_group" and "min_samples" not in self.model_fields_set

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to deal by, besides labels."""
        return () if self.group_by is None else (self.group_by,)

    @property
    def partition_options(self) -> PartitionOptions:
        """How the data set is partitioned, as `polyfed.data` takes it."""
        settings = _fields_of(self, PartitionOptions) | {"num_clients": self.client_count}
        if self._keeps_small_groups:
            settings["min_samples"] = None
        return PartitionOptions(**settings)

    def source_options(self, beside: Sequence[str]) -> SourceOptions:
        """How the data set is read, as `polyfed.data` takes it. beside: where modules of one's own may lie."""
        return SourceOptions(**{**_fields_of(self, SourceOptions), "beside": tuple(beside)})

    def _inactive_keys(self) -> set[str]:
        off = {"num_clients": self.client_count is None, "min_samples": self._keeps_small_groups}
        return super()._inactive_keys() | {key for key, is_off in off.items() if is_off}


def _fields_of(data: Data, kind: type[Any]) -> dict[str, Any]:
    """What a section says of the fields of these options."""
    return {field.name: getattr(data, field.name) for field in dataclasses.fields(kind) if hasattr(data, field.name)}


def _reads_files(name: str) -> bool:
    """Whether a data set of this name is read from files below `root`."""
    return name.startswith(PATHS) or (":" not in name and name not in _PACKAGED)


def _same_inputs(one: str, other: str) -> bool:
    """Whether two names are of the same images; CIFAR-100's do not change with its labels."""
    return one.removesuffix("-coarse") == other.removesuffix("-coarse")


class Models(Settings):
    """``[models]``: which network each client gets."""

    architectures: Annotated[list[str], Field(min_length=1)] = Field(
        description="names from `polyfed models`, 'timm:...', 'torchvision:...', 'hf:owner/name', or "
        "'package.module:function' of your own; '?pretrained' behind a package's network or vit-s8 to vit-s12 begins "
        "with fetched weights, '#512-256' gives its head hidden layers of these widths, '@layer1' behind one with a "
        "colon ends the extractor there; or, in place of the list, the name of a group of networks, such as 'htfe-8'"
    )
    assignment: Annotated[Literal["round_robin", "blocks", "random"], ActsWith("architectures", several=True)] = Field(
        "round_robin", description="client k gets the (k mod A)th; equal blocks in order; or a seeded draw"
    )
    feature_dim: Positive | None = Field(None, description="adds a projection to this width before the head")
    feature_pool: Annotated[bool, ActsWith("feature_dim")] = Field(
        False, description="adaptive average pooling to that width, without weights, in place of the projection"
    )

    @field_validator("architectures", mode="before", json_schema_input_type=list[str] | str)
    @classmethod
    def _of_group(cls, given: Any) -> Any:
        """The networks of a group that is named alone."""
        if not isinstance(given, str):
            return given
        if given not in GROUPS:
            raise ValueError(f"expected a list of networks or a group of them, got '{given}'{suggest(given, GROUPS)}")
        return GROUPS[given]

    @field_validator("architectures")
    @classmethod
    def _known_models(cls, names: list[str]) -> list[str]:
        for name in names:
            if ":" not in name and re.split("[?#]", name)[0] not in MODELS:
                raise ValueError(f"unknown model '{name}'{suggest(name, MODELS)}")
        return names


class Pretraining(Settings):
    """``[pretraining]``: networks begin with weights that were trained on the hold-out rows; off by default."""

    _switches: ClassVar[tuple[str, ...]] = ("epochs",)

    epochs: Annotated[int, Field(ge=0)] = Field(0, description="passes over the hold-out rows; 0: off")
    batch_size: Annotated[Positive, ActsWith("epochs")] = Field(64, description="rows of a batch")
    optimizer: Annotated[Literal["sgd", "adam", "adamw"], ActsWith("epochs")] = Field(
        "adam", description="made afresh every epoch"
    )
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False), ActsWith("epochs")] = Field(
        0.001, description="learning rate at the start; falls to 0 along a cosine"
    )


class MethodChoice(BaseModel):
    """``[method]``: the method; every key but these is one of its hyperparameters."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, defer_build=True)

    name: str = Field(
        description="a method of `polyfed methods`, a name of [methods], or 'package.module:Class' of your own"
    )
    alone: bool = Field(False, description="every client is a federation of its own")
    adapters: AdapterSettings | None = Field(
        None, description="a table with ranks, alpha and layers: clients train adapters and heads of frozen networks"
    )
    personalize: Personalization | None = Field(
        None,
        description="for methods that score what clients receive: what is scored in its place; tuned: the network "
        "after local training on it; shares: its scores, plus the log of the client's class shares over those of all",
    )

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters as the recipe gives them."""
        return dict(self.model_extra or {})


class PluginChoice(BaseModel):
    """``[[plugins]]``: a plugin of your own; every key but its name is one of its settings."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, defer_build=True)

    name: str = Field("", description="'package.module:Class'")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as the recipe gives them."""
        return dict(self.model_extra or {})


class RunSettings(Settings):
    """``[run]``: how, where and with which seed."""

    _place: ClassVar[tuple[str, ...]] = ("run",)
    _switches: ClassVar[tuple[str, ...]] = (
        *("keep", "loggers", "paper_tables", "overrides", "modules", "client_names"),
    )

    seed: Annotated[int, Field(ge=0, lt=LARGEST)] = Field(
        0, description="every random draw of the run is derived from it"
    )
    device: str = Field("cpu", description="where networks compute: 'cpu', 'cuda', 'cuda:1'")
    executor: Literal["auto", "serial", "processes", "vectorized", "ray"] = Field(
        "auto",
        description="serial: one client after the other; processes: worker processes; vectorized: clients of a network "
        "as one; ray: processes of Ray, also on a cluster; auto: processes where it pays, on a GPU vectorized",
    )
    workers: Positive | None = Field(
        None, description="at most so many at once: processes (default: the cores), clients vectorized together (32)"
    )
    precision: Precision = Field(
        "float32", description="what networks train in; bf16: matrix products and convolutions in bfloat16"
    )
    checkpoint_every: Positive = Field(5, description="rounds between checkpoints")
    keep: Keep = Field(
        "last",
        description="which round a run reports, and keeps the models of: the last, or the one with the best validation "
        "accuracy, as always with evaluation.patience; nothing: a finished run keeps its records only, no weights",
    )
    out: str | None = Field(None, description="run folder; default: runs/<recipe>-<method>-seed<seed>")
    label: str | None = Field(None, description="name of the run in tables; default: the method's")
    loggers: list[Literal["tensorboard", "mlflow", "wandb"]] = Field(
        [], description="who shows the run beside the console: curves, in the last two the recipe and report, too"
    )
    paper_tables: list[str] = Field([], description="papers' tables to stand beside the results: ['fedgh/table3']")
    preset: str | None = Field(None, description="kept by a run: the presets that were laid over its recipe")
    preset_note: str | None = Field(None, description="kept by a run: their notes")
    overrides: list[str] = Field([], description="kept by a run: what --set has changed of its recipe")
    control: Control | None = Field(
        None,
        description="pooled: clients of one network share one that learns from all clients' training rows",
    )
    modules: list[str] = Field(
        [], description="kept by a run: folders that hold the modules of one's own that its recipe names"
    )
    client_names: list[str] = Field(
        [], description="kept by a run: what its clients are called in data.group_by; the data must have no others"
    )

    @field_validator("paper_tables")
    @classmethod
    def _known_tables(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in paper_tables.tables():
                raise ValueError(f"unknown table '{name}'{suggest(name, paper_tables.tables())}")
        return names

    @model_validator(mode="after")
    def _workers_fit(self) -> RunSettings:
        if problem := problem_of_workers(self.executor, self.workers):
            raise ValueError(problem)
        return self


SECTIONS: dict[str, type[Settings]] = {  # those whose keys are fixed; a method has its own
    "data": Data,
    "models": Models,
    "training": Training,
    "pretraining": Pretraining,
    "evaluation": Evaluation,
    "availability": Availability,
    "privacy": Privacy,
    "compression": Compression,
    "devices": Devices,
    "robust_aggregation": RobustAggregation,
    "adversaries": Adversaries,
    "run": RunSettings,
}
