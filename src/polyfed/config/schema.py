"""The sections of a recipe that no other part of polyfed has: ``[data]``, ``[models]``, ``[method]`` and ``[run]``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from polyfed.core.settings import (
    AdapterSettings,
    Evaluation,
    Personalization,
    Positive,
    Privacy,
    Settings,
    Training,
)
from polyfed.data.options import CLIENT, PARTITION, PartitionSettings, SourceOptions, SourceSettings
from polyfed.data.sources import find_source
from polyfed.engine.task import OutputSettings, WorkSettings
from polyfed.model_groups import GROUPS
from polyfed.places import LARGEST
from polyfed.plugins.settings import Adversaries, Availability, Devices, RobustAggregation, SecureSums
from polyfed.records import paper_tables
from polyfed.registry import MODELS, suggest
from polyfed.validation.effect import ActsWith
from polyfed.validation.error_lines import shown

__all__ = ["SECTIONS", "Control", "Data", "MethodChoice", "Models", "RunSettings"]

Control = Literal["pooled", "own-linear", "own-boosting", "own-forest"]


class Data(PartitionSettings, SourceSettings):
    """``[data]``: which samples, and how the clients get them."""

    _switches: ClassVar[tuple[str, ...]] = (*SourceSettings._switches, *PartitionSettings._switches)

    partition: str = Field("iid", description=PARTITION)
    class_names: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="all classes of the task, in order, of which the data have some or all; default: the data's"
    )
    mean: Annotated[list[float], Field(min_length=1)] | None = Field(
        None, description="inputs are normalized by it: per channel, in 0..1, or per feature; default: the data's own"
    )
    std: Annotated[list[float], Field(min_length=1)] | None = Field(None, description="likewise, above 0; with mean")
    limit_train: Positive | None = Field(
        None, description="number of rows of the training side that are used, drawn; default: all"
    )
    limit_test: Positive | None = Field(None, description="the same of the official test side")
    public_dataset: str | None = Field(None, description="another data set, whose training inputs everybody may see")
    public_samples: Annotated[Positive | None, ActsWith("public_dataset")] = Field(
        None, description="public_dataset: how many, drawn; default: 5000, or all if fewer"
    )

    @model_validator(mode="before")
    @classmethod
    def _clients_as_they_come(cls, given: Any) -> Any:
        """A folder or a file per client is partitioned so, unless another partition is asked for."""
        if isinstance(given, Mapping) and _lies_by_client(given.get("dataset")) and "partition" not in given:
            return {"group_by": CLIENT, **given, "partition": "by_group"}
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Data:
        if _lies_by_client(self.dataset) and (self.limit_train or self.limit_test):
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
        if self.features is not None and (self.public_dataset or self.mean):
            raise ValueError(
                "features: expected no public_dataset, mean or std beside it, as no rows have all clients' columns"
            )
        if self.public_dataset == self.dataset:
            raise ValueError(
                f"public_dataset expects another data set than dataset, got '{self.public_dataset}' for both; rows of "
                f"the same one that no client gets are data.holdout"
            )
        return self

    @model_validator(mode="after")
    def _root_is_read(self) -> Data:
        names = [self.dataset] if self.public_dataset is None else [self.dataset, self.public_dataset]
        if self.root and not any(map(_lies_below_root, names)):
            raise ValueError(
                f"root = {shown(self.root)} does nothing beside dataset = '{self.dataset}', which reads no files; name "
                "a dataset of files, or leave out root"
            )
        return self

    def source_options(self, beside: Sequence[str]) -> SourceOptions:
        """How the data set is read, as `polyfed.data` takes it. beside: where the user's modules may lie."""
        settings = {name: getattr(self, name) for name in SourceSettings.model_fields}
        columns = [] if self.group_by is None else [self.group_by]
        return SourceOptions.model_construct(**settings, columns=columns, beside=[*beside])


def _lies_by_client(dataset: object) -> bool:
    """Whether each client has its own folder or file of it."""
    found = find_source(str(dataset))
    return found is not None and found.by_client


def _lies_below_root(dataset: str) -> bool:
    found = find_source(dataset)
    return ":" not in dataset if found is None else found.files


class Models(Settings):
    """``[models]``: which network each client gets."""

    architectures: Annotated[list[str], Field(min_length=1)] = Field(
        description="names from `polyfed models`, 'timm:...', 'torchvision:...', or "
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


class RunSettings(OutputSettings, WorkSettings):
    """``[run]``: how, where and with which seed."""

    _place: ClassVar[tuple[str, ...]] = ("run",)
    _switches: ClassVar[tuple[str, ...]] = (
        *("keep", "loggers", "paper_tables", "overrides", "modules", "client_names"),
    )

    seed: Annotated[int, Field(ge=0, lt=LARGEST)] = Field(
        0, description="every random draw of the run is derived from it"
    )
    out: str | None = Field(None, description="run folder; default: runs/<recipe>-<method>-seed<seed>")
    loggers: list[Literal["tensorboard", "mlflow", "wandb"]] = Field(
        [], description="who shows the run beside the console: curves, in the last two the recipe and report, too"
    )
    paper_tables: list[str] = Field([], description="papers' tables to stand beside the results: ['fedgh/table3']")
    preset: str | None = Field(None, description="kept by a run: the presets that were laid over its recipe")
    preset_note: str | None = Field(None, description="kept by a run: their notes")
    overrides: list[str] = Field([], description="kept by a run: what --set has changed of its recipe")
    control: Control | None = Field(
        None,
        description="pooled: clients of one network share one that learns from all clients' training rows; own-...: a "
        "model of scikit-learn for each client, fitted to its own rows",
    )
    modules: list[str] = Field(
        [], description="kept by a run: folders that hold the user's modules that its recipe names"
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


SECTIONS: dict[str, type[Settings]] = {  # those whose keys are fixed; a method has its own
    "data": Data,
    "models": Models,
    "training": Training,
    "pretraining": Pretraining,
    "evaluation": Evaluation,
    "availability": Availability,
    "privacy": Privacy,
    "devices": Devices,
    "robust_aggregation": RobustAggregation,
    "adversaries": Adversaries,
    "secure_sums": SecureSums,
    "run": RunSettings,
}
