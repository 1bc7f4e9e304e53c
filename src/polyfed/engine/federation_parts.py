"""What a federation is made of, for the files that run it or tell of it, and which it knows itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from polyfed.core.client import Client
from polyfed.core.method import Method
from polyfed.core.model_factory import ModelFactory
from polyfed.core.server import Server
from polyfed.core.settings import Evaluation, Stage, Training
from polyfed.engine.checkpoint import Checkpointer
from polyfed.engine.evaluation import Measure
from polyfed.engine.executors.base import Executor
from polyfed.engine.plugin import Plugin, Setup
from polyfed.engine.round import RoundRunner
from polyfed.engine.run_folder import RunFolder
from polyfed.engine.task import Execution, Output, Task
from polyfed.engine.transaction import Transaction
from polyfed.engine.weight_store import WeightStore


class FederationParts(Protocol):
    """A `polyfed.engine.federation.Federation`, in which each of these is explained."""

    clients: list[Client]
    method: Method
    metrics: dict[str, Measure]
    training: Training
    evaluation: Evaluation
    plugins: Sequence[Plugin]
    execution: Execution
    output: Output
    seed: int
    stages: list[Stage]
    task: Task
    server: Server
    model_factory: ModelFactory
    history: list[dict[str, Any]]
    setup: Setup
    folder: RunFolder | None
    store: WeightStore
    executor: Executor
    facts: dict[str, Any]
    transaction: Transaction
    checkpointer: Checkpointer
    runner: RoundRunner

    @property
    def classes(self) -> int:
        """The number of classes of the task."""
        ...

    @property
    def class_names(self) -> list[str]:
        """What the classes are called."""
        ...

    def plugin(self, name: str) -> Any:
        """The plugin of that name."""
        ...

    def present(self, number: int) -> list[int]:
        """Who is in the federation in round `number`."""
        ...

    def is_last(self, number: int) -> bool:
        """Whether no regular round comes after this one."""
        ...

    def why_not(self, rounds: Sequence[int], final: bool = False) -> str | None:
        """Why these rounds may not begin; None: they may."""
        ...

    def remarks(self) -> list[str]:
        """What a user should know before round 1."""
        ...

    def write_result(self) -> dict[str, Any]:
        """Write the run's result, and return it."""
        ...

    def tell(self, event: str, *what: Any) -> None:
        """Tell whoever watches."""
        ...
