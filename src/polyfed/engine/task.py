"""What a federation is about, how its work is done, and what it writes: what `Federation` is given beside its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import Field, field_validator

from polyfed.core.client import Client, Encoder, PublicData
from polyfed.core.settings import Keep, Positive, Settings, Training
from polyfed.data.samples import LabeledSamples, TableColumns
from polyfed.data.text import Vocabulary
from polyfed.errors import described
from polyfed.records.main_score import ACCURACY, RMSE, MainScore
from polyfed.registry import EXECUTORS, is_own, suggest

if TYPE_CHECKING:
    from polyfed.data.dataset import DatasetSource


@dataclass(frozen=True)
class Task:
    """What is predicted: classes, or numbers where the clients' labels are floats (regression).

    Args:
        classes: their number; default: the largest label anywhere plus one; 0: numbers are predicted. class_names:
            what they are called.
        public: hold-out data that everybody may see. test: one test set shared by all clients, in place of their own.
        dataset: name for the records.
        feature_names: of a table's columns, for those who use a model later. vocabulary: likewise, of texts.
        label_column: likewise, where the labels stood in files. columns: likewise, which features of a table are
            categories, and which may be missing.
    """

    classes: int | None = None
    class_names: Sequence[str] | None = None
    public: PublicData | None = None
    test: LabeledSamples | tuple[Any, Any] | None = None
    dataset: str = "own data"
    feature_names: Sequence[str] = ()
    vocabulary: Vocabulary | None = None
    label_column: str | None = None
    columns: TableColumns = field(default_factory=TableColumns)

    @classmethod
    def of_source(cls, source: DatasetSource, **more: Any) -> Task:
        """With all that those who use a model later must know of the data set that it was trained on."""
        return cls(
            dataset=source.name,
            feature_names=source.feature_names,
            vocabulary=source.vocabulary,
            label_column=source.label_column,
            columns=source.columns,
            **more,
        )

    def assign(self, client: Client, number: int, seed: int, training: Training, plugins: Sequence[Encoder]) -> None:
        """Tell a client its number and what all clients share, wherever it works."""
        client.id = number
        client.classes = len(client.class_names) or self.classes or 0
        client.seed = seed
        client.training = training
        client.public = self.public
        client.words = 0 if self.vocabulary is None else self.vocabulary.size
        client.categories = (self.columns if client.columns is None else client.columns.table).counts
        client.plugins = plugins

    @property
    def main_score(self) -> MainScore:
        """The figure by which models, rounds and methods are compared."""
        return RMSE if self.classes == 0 else ACCURACY


class WorkSettings(Settings):
    """Who does the clients' work, and where: keys of ``[run]``."""

    _place: ClassVar[tuple[str, ...]] = ("run",)

    device: str = Field("cpu", description="where networks compute: 'cpu', 'cuda', 'cuda:1'")
    executor: str = Field(
        "auto",
        description="; ".join(f"{name}: {EXECUTORS.summary(name)}" for name in EXECUTORS)
        + "; or 'package.module:Class' of your own",
    )
    workers: Positive | None = Field(
        None, description="most at once: processes (default: the cores), clients vectorized together (32)"
    )

    @field_validator("device", mode="before")
    @classmethod
    def _spelled(cls, given: Any) -> Any:
        return str(given) if isinstance(given, torch.device) else given

    @field_validator("executor")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if isinstance(given, str) and given not in EXECUTORS and not is_own(given):
            raise ValueError(f"unknown executor '{given}'{suggest(given, EXECUTORS)}")
        return given


class OutputSettings(Settings):
    """What a run leaves behind: keys of ``[run]``."""

    _place: ClassVar[tuple[str, ...]] = ("run",)

    checkpoint_every: Positive = Field(5, description="rounds between checkpoints")
    keep: Keep = Field(
        "last",
        description="which round a run reports, and keeps the models of: the last, or the one with the best validation "
        "accuracy, as always with evaluation.patience; nothing: a finished run keeps its records only, no weights",
    )
    label: str | None = Field(None, description="name of the run in tables; default: the method's")


class Execution(WorkSettings):
    """How the clients' work is carried out.

    Args:
        device, executor, workers: see the keys of ``[run]``; the executor may also be the class of one of your own.
        wrap: makes of the executor's `run` the one that is used, say one that listens.
        rebuild: a function of a module that makes the same federation anew, for executors that need it ("ray"). Where
            there is a recipe, there is one.
    """

    executor: str | type[Any] = "auto"  # type: ignore[assignment]  # wider than a recipe's
    wrap: Callable[[Any], Any] | None = None
    rebuild: Callable[[], Any] | None = None


class Output(OutputSettings):
    """What a run leaves behind.

    Args:
        path: run folder; None writes nothing.
        checkpoint_every, keep, label: see the keys of ``[run]``.
        settings: the resolved recipe, if there is one.
    """

    path: Path | str | None = None
    settings: dict[str, Any] | None = None

    @field_validator("path", mode="before")
    @classmethod
    def _is_a_path(cls, given: Any) -> Path | None:
        if given is not None and not isinstance(given, str | os.PathLike):
            raise ValueError(f"expected the path of a folder, got {described(given)}")
        return None if given is None else Path(given)
