"""The other files of run and sweep folders: recipe.toml, an entry of models/index.json, sweep.json."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from polyfed.results.fields import (
    Count,
    Flag,
    IfPresent,
    Number,
    Record,
    Setting,
    Text,
    check_present,
    validated,
)

Section = dict[str, Any]  # settings by name, as the recipe's own model has checked them


class RunSection(Record):
    """What ``[run]`` says of results."""

    published: list[Text] = Field([], description="the papers' tables that the run is made after: `fedgh/table3`")
    profile: IfPresent[Text] = Field(None, description="the profiles that were laid over the recipe")
    profile_note: IfPresent[Text] = Field(None, description="how they make the experiment smaller")
    changed: list[Text] = Field([], description="what `--set` changed: `training.rounds=5`")
    label: IfPresent[Text] = Field(None, description="the variant's name")


class _Training(Record):
    rounds: IfPresent[Count] = None


class _Models(Record):
    architectures: IfPresent[list[Text]] = None


class _Method(Record):
    name: IfPresent[Text] = None


_TYPED_SECTIONS: dict[str, type[Record]] = {"training": _Training, "models": _Models, "method": _Method}


class StoredRecipe(Record):
    """The resolved settings of a run, recipe.toml. A section that is not there is empty."""

    data: Section = Field({})
    models: Section = Field({})
    method: Section = Field({})
    training: Section = Field({})
    evaluation: Section = Field({})
    availability: Section = Field({})
    privacy: Section = Field({})
    compression: Section = Field({})
    defence: Section = Field({})
    hostile: Section = Field({})
    devices: Section = Field({})
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
    def architectures(self) -> tuple[str, ...]:
        """Of the clients' networks."""
        return tuple(self.models.get("architectures", ()))

    @property
    def is_empty(self) -> bool:
        """Whether there is no recipe, or nothing in it that is known."""
        return not self.model_fields_set

    def section(self, name: str) -> Section:
        """The settings of a section but ``[run]``."""
        found: Section = getattr(self, name)
        return found


# models/index.json ------------------------------------------------------------------------------------------------


class InputShape(Record):
    """What one input of a network is."""

    shape: list[Count] = Field(description="of one stored input")
    type: Text = Field(description="of its numbers: `uint8`, `float32`")


class TextColumn(Record):
    """Where a run's texts stood."""

    column: Text | None = Field(description="that held them")
    sha256: Text = Field(description="checksum of `words.txt`, which has the words with ids, in their order")


class Normalization(Record):
    """How stored inputs become the network's."""

    mean: list[Number] = Field(description="per channel, or column, subtracted; of images in [0, 1]")
    std: list[Number] = Field(description="per channel, or column, divided by")
    table: IfPresent[Flag] = Field(
        None,
        description="whether `mean` and `std` are those of a table's columns, which new rows are standardised by",
    )


class ModelEntry(Record):
    """One client's model, an entry of models/index.json."""

    architecture: IfPresent[Text] = Field(
        None, description="its name, `timm:...` and the like, or `package.module:function` of one's own"
    )
    classes: IfPresent[Count] = Field(None, description="how many")
    class_names: IfPresent[list[Text]] = Field(None, description="what they are called")
    feature_names: IfPresent[list[Text]] = Field(
        None, description="of tables: the columns in order; empty for other inputs"
    )
    label_column: Text | None = Field(
        None,
        description="of files: the column that the run read labels from, named in the recipe or found; null for other "
        "data",
    )
    vocabulary: Count | None = Field(None, description="of texts: how many words networks have vectors for")
    texts: TextColumn | None = Field(None, description="of texts; null for other inputs")
    vectors: Setting | None = Field(None, description="of texts: the file that word vectors were read from")
    samples: Setting | None = Field(None, description="how many the client had to train on")
    zoo: IfPresent[Flag] = Field(
        None,
        description="whether the network can be built again by the architecture's name; a module handed over in Python "
        "cannot, and neither can one of a function in `builders`",
    )
    feature_dim: Count | None = Field(None, description="width of the added projection, `models.feature_dim`")
    input: IfPresent[InputShape] = Field(None, description="one stored input")
    image_size: Setting | None = Field(None, description="to which images were resized, `data.image_size`")
    prepare: Any = Field(
        None,
        description="what stored images are normalised with; `plain` where bytes become floats in [0, 1] and all else "
        "stays, as for clients made in Python; null for a function of one's own",
    )
    method: IfPresent[Text] = Field(None, description="whose `build` and `predict` the network went through")
    knobs: IfPresent[dict[str, Any]] = Field(None, description="the method's")
    variant: IfPresent[Text] = Field(None, description="of the network, where the method has several")
    companion: Text | None = Field(
        None, description="name of the network that stands beside it there; null where none does"
    )
    round: Setting | None = Field(None, description="after which round the weights are, as `models_of_round`")
    modules: IfPresent[list[Text]] = Field(
        None, description="only with code of one's own beside the recipe: the folders that hold it"
    )
    sha256: IfPresent[dict[str, Text]] = Field(
        None,
        description="checksum of each of the client's files; `client-007.state.safetensors` is among them where the "
        "method's scores depend on what a client keeps beside its weights",
    )


class _NodesEntry(ModelEntry):
    """What a node is told of a model that it writes itself."""

    vectors: Text | None = None
    samples: IfPresent[Count] = None
    round: IfPresent[Count] = None


_NODES_KEYS = (
    *("architecture", "companion", "method", "knobs", "variant", "zoo", "classes", "class_names", "feature_names"),
    *("feature_dim", "vocabulary", "texts", "input", "vectors", "samples", "round"),
)


def check_nodes_entry(value: Any) -> None:
    """Whether this is the whole entry of a model that a node is to write, its checksums apart.

    Raises:
        ValueError: it is not; says what is wrong with it.
    """
    entry = validated(_NodesEntry, value)
    check_present(entry, _NODES_KEYS)
    if entry.prepare not in (None, "plain"):
        validated(Normalization, entry.prepare, "prepare")


# sweep.json -------------------------------------------------------------------------------------------------------


class _SweepRun(Record):
    accuracy: Number | None


class StoredSweepRow(Record):
    """One combination of settings; what the fields are is said at `polyfed.report.sweeps.SweepRow`."""

    settings: dict[str, Setting]
    method: Text
    stage: Text
    seeds: tuple[Count, ...]
    validation: Number | None
    validation_std: Number | None
    accuracy: Number | None
    accuracy_std: Number | None
    best: Number | None
    local: Number | None
    difference: Number | None
    difference_std: Number | None
    bytes_up: Number | None
    bytes_down: Number | None
    seconds: Number | None
    refused: Count
    words: tuple[Text, ...]
    runs: tuple[dict[str, Any], ...]
    chosen: Flag = False
    nothing_learnt: Count = 0  # as tables of earlier versions are without

    @field_validator("runs")
    @classmethod
    def _check_runs(cls, value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for run in value:
            _SweepRun.model_validate(run)
        return value


class StoredSweep(Record):
    """A sweep's table, sweep.json."""

    keys: tuple[Text, ...]
    caption: Text
    notes: tuple[Text, ...]
    rows: tuple[StoredSweepRow, ...]

    def check_settings(self) -> None:
        """Whether there are rows, and each that asks for a combination has a value for each swept setting.

        Raises:
            ValueError: not so.
        """
        if not self.rows:
            raise ValueError("expected rows, got none")
        for row in self.rows:
            missing = [key for key in self.keys if key not in row.settings]
            if row.words and missing:
                raise ValueError(f"expected '{missing[0]:.40}' in the settings of each row, got a row without it")
