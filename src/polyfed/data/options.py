"""How a data set is read, and how it is assigned to clients: the keys of a recipe's ``[data]``, stated once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from polyfed.data.federation_columns import Feature
from polyfed.data.samples import ONE_LABEL, is_missing
from polyfed.errors import ConfigError
from polyfed.registry import PARTITIONS, suggest
from polyfed.validation.effect import ActsWith
from polyfed.validation.error_lines import shown
from polyfed.validation.settings import Settings

OF_FILES = ("label_column", "columns")
OF_TEXTS = ("text_column", "vocab_size", "max_length", "word_vectors", "tokens")
OF_TABLES = (*OF_FILES, "feature_columns", "category_columns", "categories", "features", "missing_values")
PARTITION = ", ".join(f"'{name}'" for name in PARTITIONS)
_OF_ANY = ("dataset", "root", "image_size", "task", "beside")  # keys that no data set refuses as such
_SKEWED = ActsWith("partition", ("dirichlet",))
_BY_CLASS = ActsWith("partition", ("by_class",))
_BY_GROUP = ActsWith("partition", ("by_group",))
Positive = Annotated[int, Field(ge=1)]
CLIENT = "client"  # the further column that says whose a row is, where each client has a folder or a file


def as_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values given in Python as a recipe would have them: lists for tuples, plain numbers for NumPy's."""
    settings = {key: [*value] if isinstance(value, tuple) else value for key, value in given.items()}
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in settings.items()}


class SourceSettings(Settings):
    """Which data set, and how it is read: the keys of ``[data]`` that say so."""

    _place: ClassVar[tuple[str, ...]] = ("data",)
    _switches: ClassVar[tuple[str, ...]] = ("missing_values",)

    dataset: Annotated[str, Field(min_length=1)] = Field(
        description="a data set that `polyfed datasets` lists, as 'digits' or 'csv:PATH', or "
        "'package.module:function' of your own"
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
    features: Annotated[dict[str, Feature], Field(min_length=1)] | None = Field(
        None,
        description="csv, where clients' tables differ: the columns to learn from, of which each client has some, "
        "each a table with unit, names, convert and categories",
    )
    missing_values: Literal["error", "client_mean"] = Field(
        "error",
        description="csv: what becomes of missing numbers: an error, or the mean of the client's own training rows "
        "(of the data set, where [privacy] hides rows), with a column that says so",
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
    config: str | None = Field(None, description="hub: which folder of it, where it holds several data sets")
    revision: str | None = Field(None, description="hub: branch, tag or commit; default: the newest")
    image_size: Positive | None = Field(
        None, description="pixels a side to which images are resized; default: as stored"
    )

    @field_validator("label_column", mode="before")
    @classmethod
    def _one_label(cls, given: Any) -> Any:
        if isinstance(given, list):
            raise ValueError(f"expected one column, got {shown(given)}{ONE_LABEL}")
        return given

    @model_validator(mode="after")
    def _categories_are_spelt(self) -> SourceSettings:
        named = {**(self.categories or {})}
        named |= {name: feature.categories for name, feature in (self.features or {}).items() if feature.categories}
        for column, names in named.items():
            if len({*names}) < len(names) or any(n != n.strip() or is_missing(n) for n in names):
                raise ValueError(f"categories.{column} expects every category once, and none that is missing")
        return self

    @model_validator(mode="after")
    def _features_say_it_all(self) -> SourceSettings:
        if self.features is None:
            return self
        for key in ("feature_columns", "category_columns", "categories"):
            if getattr(self, key):
                raise ValueError(f"{key} does nothing beside features, which name all columns; leave it out")
        spelt = [other for name, feature in self.features.items() for other in (name, *feature.names)]
        if twice := sorted({name for name in spelt if spelt.count(name) > 1}):
            raise ValueError(f"features expects every name of a column once, got '{twice[0]}' again")
        return self


class SourceOptions(SourceSettings):
    """What `load_dataset` takes: the keys of ``[data]`` that say how a data set is read, and two more.

    Attributes:
        columns: further columns of whole numbers or strings, for `DatasetSource.train_columns` and `test_columns`.
        beside: folders in which ``package.module`` is looked for where Python does not find it by itself.
    """

    columns: list[str] = Field(default_factory=list)
    beside: list[str] = Field(default_factory=list)

    def check_used(self, *takes: str) -> None:
        """Refuse settings that the data set has no use for. takes: those that it has."""
        beside = " beside text_column" if "text_column" in takes and self.text_column else ""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in _OF_ANY or name in takes or not value or value == field.default:
                continue
            got = ", ".join(value) if isinstance(value, list) else value
            hint = "; text_column names a column of texts" if name in OF_TEXTS else ""
            raise ConfigError(f"dataset '{self.dataset}' has no use for {name}{beside}, got '{got}'{hint}")

    def without_client(self) -> SourceOptions:
        """Without the further column that says whose rows are, which is not looked for in files."""
        return self.model_copy(update={"columns": [column for column in self.columns if column != CLIENT]})


class PartitionSettings(Settings):
    """How a data set is assigned to clients: the keys of ``[data]`` that say so.

    * ``split="a:b:c"``, ``test="local"``: both sides of the source are pooled and assigned; each client's rows are
      split train : validation : test, at random within each class, each class's parts within one row of the ratio.
    * ``split="official"``, ``test="local"``: the training side is assigned, the test side alike (same class shares;
      with "by_group", each row to the client that holds its value, to nobody where none does). ``"official:9:1"`` also
      splits each client's training rows into train : validation.
    * ``test="global"``: one test set for all. It is the official test side if there is one, and then the training side
      alone is assigned and split a : b; otherwise a class-stratified c part of the pool is set aside before dealing.

    In Python `partition` may also be a function: called with labels (N,), clients and generator, it returns the row
    numbers of every client, or a `Partition`.

    Rows of the holdout are equally many of each class as far as they go. Rows under a cap, and of clients that lose
    half, are in the proportions of their classes, and those of a smaller cap are among those of a larger one.
    """

    _place: ClassVar[tuple[str, ...]] = ("data",)
    _switches: ClassVar[tuple[str, ...]] = ("label_space", "halved_client_fraction")

    num_clients: Positive = Field(10, description="clients; by_group: default: one for each value of group_by")
    partition: Any = Field("iid", description=PARTITION)
    dirichlet_alpha: Annotated[float, Field(gt=0, allow_inf_nan=False), _SKEWED] = Field(
        0.5, description="dirichlet: small is more skewed"
    )
    min_samples: Annotated[Positive, ActsWith("partition", ("dirichlet", "by_group"))] = Field(
        10,
        description="dirichlet: least number of rows of a client; by_group: values with fewer rows "
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
        None,
        description="by_group: number of groups into which values are first hashed; default: each value is its own",
    )
    split: str = Field("8:1:1", description="train:validation:test, 'official' or 'official:train:validation'")
    test: Literal["local", "global"] = Field("local", description="whose test rows: each client's own, or one set")
    holdout: Annotated[int, Field(ge=0)] = Field(0, description="rows set aside for the server before the deal")
    max_rows_per_client: Positive | None = Field(
        None, description="cap of training and validation rows together, which are drawn before they are split"
    )
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

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, given: Any) -> Any:
        if not callable(given) and (not isinstance(given, str) or given not in PARTITIONS):
            raise ValueError(f"unknown partition '{given}'{suggest(str(given), PARTITIONS)}")
        return given

    @model_validator(mode="after")
    def _names_a_column(self) -> PartitionSettings:
        if self.is_by_group and self.group_by is None:
            raise ValueError("partition 'by_group' expects group_by, the column to deal by, got none")
        return self

    @property
    def is_by_group(self) -> bool:
        """Whether rows are assigned by the values of a column, which may also say how many clients there are."""
        return isinstance(self.partition, str) and self.partition == "by_group"

    @property
    def client_count(self) -> int | None:
        """How many clients; None for one per value of `group_by`, which is so unless `num_clients` is set."""
        return None if self.is_by_group and "num_clients" not in self.model_fields_set else self.num_clients

    @property
    def least_group(self) -> int | None:
        """Values of `group_by` with fewer rows are left out; None: none is, which is so unless `min_samples` is set."""
        return None if self.is_by_group and "min_samples" not in self.model_fields_set else self.min_samples

    def _inactive_keys(self) -> set[str]:
        off = {"num_clients": self.client_count is None, "min_samples": self.least_group is None}
        return super()._inactive_keys() | {key for key, is_off in off.items() if is_off}
