"""What a federation is about, how its work is done, and what it writes: what `Federation` is given beside its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polyfed.core.client import Client, Encoder, PublicData
from polyfed.core.settings import Keep, Training
from polyfed.data.samples import LabeledSamples, TableColumns
from polyfed.data.text import Vocabulary
from polyfed.records.main_score import ACCURACY, RMSE, MainScore

if TYPE_CHECKING:
    from polyfed.data.dataset import DatasetSource
    from polyfed.engine.executors.executor import Executor, RunJobs


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
        client.categories = self.columns.counts
        client.plugins = plugins

    @property
    def main_score(self) -> MainScore:
        """The figure by which models, rounds and methods are compared."""
        return RMSE if self.classes == 0 else ACCURACY


@dataclass(frozen=True)
class Execution:
    """How the clients' work is carried out.

    Args:
        executor: "serial", one after the other in this process; "processes", by worker processes (Linux, device "cpu"),
            with the same result bit for bit; "vectorized": clients of one network as one, with the same result up to
            rounding; "auto": "processes" where it pays, on other devices "vectorized"; "ray": processes of Ray, also on
            a cluster, with the result of "serial" bit for bit; or the class of an executor of your own.
        workers: at most so many work at the same time; default: as many processes as this one may use cores, or stacks
            of 32 clients. On a cluster of Ray's there is no default.
        device: where networks compute ("cpu", "cuda", "cuda:1").
        wrap: makes of the executor's `run` the one that is used, say one that listens.
        rebuild: a function of a module that makes the same federation anew, for executors that need it ("ray"). Where
            there is a recipe, there is one.
    """

    executor: str | type[Executor] = "auto"
    workers: int | None = None
    device: str | torch.device = "cpu"
    wrap: Callable[[RunJobs], RunJobs] | None = None
    rebuild: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Output:
    """What a run leaves behind.

    Args:
        path: run folder; None writes nothing. checkpoint_every: rounds between checkpoints.
        keep: which round the run reports, and whose weights are its models: "last"; "best", the one with the best
            validation score of the main stage (the first, where several are equal), as always with
            `Evaluation.patience`; "nothing": a finished run has its records only, no models and no checkpoints.
        label: name of the run in tables. settings: the resolved recipe, if there is one.
    """

    path: Path | str | None = None
    checkpoint_every: int = 5
    keep: Keep = "last"
    label: str | None = None
    settings: Mapping[str, Any] | None = None
