"""The other files of run folders: recipe.toml, an entry of models/index.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from polyfed.records.fields import Count, Flag, IfPresent, Number, Record, Text

Section = dict[str, Any]  # settings by name, as the recipe's own model has checked them


class RunSection(Record):
    """What ``[run]`` says of results."""

    paper_tables: list[Text] = Field([], description="the papers' tables that the run is made after: `fedgh/table3`")
    preset: IfPresent[Text] = Field(None, description="the presets that were laid over the recipe")
    preset_note: IfPresent[Text] = Field(None, description="how they make the experiment smaller")
    overrides: list[Text] = Field([], description="what `--set` changed: `training.rounds=5`")
    label: IfPresent[Text] = Field(None, description="the variant's name")
    control: IfPresent[Text] = Field(None, description="what the run is a control for: pooled, own-...")


class _Training(Record):
    rounds: IfPresent[Count] = None


class _Method(Record):
    name: IfPresent[Text] = None
    alone: IfPresent[Flag] = None
    adapters: IfPresent[dict[str, Any]] = None
    personalize: IfPresent[Text] = None


_TYPED_SECTIONS: dict[str, type[Record]] = {"training": _Training, "method": _Method}


class StoredRecipe(Record):
    """The resolved settings of a run, recipe.toml. A section that is not there is empty."""

    data: Section = Field({})
    models: Section = Field({})
    method: Section = Field({})
    training: Section = Field({})
    evaluation: Section = Field({})
    availability: Section = Field({})
    privacy: Section = Field({})
    robust_aggregation: Section = Field({})
    secure_sums: Section = Field({})
    pretraining: Section = Field({})
    adversaries: Section = Field({})
    devices: Section = Field({})
    plugins: list[Section] = Field([])
    run: RunSection = RunSection()

    @field_validator(*_TYPED_SECTIONS)
    @classmethod
    def _check_section(cls, value: Section, info: Any) -> Section:
        """The settings that reports take apart; the section itself stays as it is written, order included."""
        _TYPED_SECTIONS[info.field_name].model_validate(value)
        return value

    @property
    def method_name(self) -> str:
        """The method's name; "" where none is given."""
        return str(self.method.get("name") or "")

    @property
    def rounds(self) -> int | None:
        """How many are asked for."""
        asked: int | None = self.training.get("rounds")
        return asked

    @property
    def is_empty(self) -> bool:
        """Whether there is no recipe, or nothing in it that is known."""
        return not self.model_fields_set


# models/index.json ------------------------------------------------------------------------------------------------


class InputShape(Record):
    """What one input of a network is."""

    shape: list[Count] = Field(description="shape of one stored input")
    type: Text = Field(description="type of its numbers: `uint8`, `float32`")


class TextColumn(Record):
    """Where a run's texts stood."""

    column: Text | None = Field(description="the column that held them")
    sha256: Text = Field(description="checksum of `words.txt`, the words that have ids, in order")
    tokens: IfPresent[Literal["words", "characters", "fedrep"]] = Field(
        None, description="the rule by which texts are cut, `data.tokens`; `fedrep` in folders of earlier versions"
    )


class Normalization(Record):
    """How stored inputs become the network's."""

    mean: list[Number] = Field(description="subtracted from each channel or column; for images in [0, 1]")
    std: list[Number] = Field(description="what each channel or column is then divided by")
    table: IfPresent[Flag] = Field(
        None, description="whether they are those of a table's columns, by which new rows are standardized"
    )


class TargetScaleEntry(Record):
    """What the numbers that a model predicts were standardized with."""

    mean: Number = Field(description="mean of the client's training targets")
    std: Number = Field(description="their standard deviation; 1 if they do not vary")


class TableForm(Record):
    """How the columns of a table became numbers, where not all hold plain numbers, spelt as usual."""

    categories: list[list[Text]] = Field(
        description="per feature, names of its categories, the i-th of which is stored as i + 1; empty for a number"
    )
    flags: list[list[Count]] = Field(description="pairs of features: the second is 1 where the first is missing")
    fill: list[Number] = Field(description="per pair, what stands for the client's missing values")
    spelling: IfPresent[dict[str, Any]] = Field(
        default=None, description="where clients have different columns, of each what data.features says of it"
    )


class ModelFiles(Record):
    """Where a client's network at a stage lies."""

    weights: Text = Field(description="the file of weights; clients whose weights are equal share one")
    state: IfPresent[Text] = Field(
        None, description="only where predictions depend on what a client keeps beside its weights: the file of that"
    )


class FrozenWeights(Record):
    """The auxiliary network of a method of which nobody trains it."""

    seed: int = Field(description="the run's seed, from which weights are drawn that are not fetched")
    sha256: Text = Field(description="checksum of its tensors before the head, `core.frozen_network`")


class ModelEntry(Record):
    """One client's model, an entry of models/index.json."""

    architecture: IfPresent[Text] = Field(
        None, description="name of the architecture: one of the catalog, `timm:...`, or `package.module:function`"
    )
    classes: IfPresent[Count] = Field(None, description="number of classes; 0 where numbers are predicted")
    target: IfPresent[TargetScaleEntry] = Field(
        None, description="only where numbers are predicted: the prediction is mean + std times the network's output"
    )
    class_names: IfPresent[list[Text]] = Field(None, description="names of the classes, in order")
    feature_names: IfPresent[list[Text]] = Field(
        None, description="of tables: names of the columns, in order; empty for other inputs"
    )
    table: IfPresent[TableForm] = Field(
        None, description="only of tables with categories, missing numbers, or a format of their own"
    )
    label_column: Text | None = Field(
        None,
        description="of files: the column that the run read labels from, named in the recipe or found; null for other "
        "data",
    )
    vocabulary: Count | None = Field(None, description="of texts: number of words that the network has vectors for")
    texts: TextColumn | None = Field(None, description="of texts; null for other inputs")
    vectors: Text | None = Field(None, description="of texts: the file that word vectors were read from")
    samples: IfPresent[Count] = Field(None, description="number of training samples of the client")
    name: IfPresent[Text] = Field(None, description="what the client is called, if not by its number alone")
    zoo: IfPresent[Flag] = Field(
        None,
        description="whether the network can be built again from the architecture's name; a module handed over in "
        "Python cannot, and neither can one of a function in `builders`",
    )
    feature_dim: Count | None = Field(None, description="width of the added projection, `models.feature_dim`")
    feature_pool: bool = Field(False, description="whether it is an average instead, `models.feature_pool`")
    input: IfPresent[InputShape] = Field(None, description="one stored input")
    image_size: Count | None = Field(None, description="size that images were resized to, `data.image_size`")
    prepare: Any = Field(
        None,
        description="how stored inputs are normalized; `plain` if bytes become floats in [0, 1] and all else stays, as "
        "for clients made in Python; null for a function of your own",
    )
    method: IfPresent[Text] = Field(None, description="the method whose `build` and `predict` the network went through")
    hyperparameters: IfPresent[dict[str, Any]] = Field(None, description="hyperparameters of the method")
    variant: IfPresent[Text] = Field(None, description="variant of the network, if the method has several")
    adapters: IfPresent[dict[str, Any]] = Field(
        None, description="settings of `method.adapters`, if clients trained adapters of frozen networks"
    )
    auxiliary_model: Text | None = Field(
        None, description="name of the auxiliary network that the method adds; null if there is none"
    )
    frozen: IfPresent[FrozenWeights] = Field(
        None, description="only with an auxiliary network that nobody trains, which is built again from its name"
    )
    personalize: IfPresent[Literal["tuned", "shares"]] = Field(
        None, description="how what it receives becomes its own, `method.personalize`"
    )
    stage: Text = Field(
        description="the stage whose scores the run reports: `received`, `personal`, or `after_training`, whose "
        "networks are not kept"
    )
    stages: dict[str, ModelFiles] = Field(
        description="stage -> its files: `personal`, what the client keeps, and, where it is scored, `received`"
    )
    round: IfPresent[Count] = Field(None, description="the round that the weights are of, as `models_of_round`")
    keeps: dict[str, list[Text]] = Field(
        {}, description="stage -> names of what the method predicts by beside the weights, all of it in `state`"
    )
    modules: IfPresent[list[Text]] = Field(
        None, description="only with code of your own beside the recipe: the folders that hold it"
    )
    sha256: IfPresent[dict[str, Text]] = Field(
        None,
        description="file -> checksum, for each file of the client",
    )
