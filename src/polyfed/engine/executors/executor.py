"""What every executor is: it carries out the jobs of an exchange, and scores clients."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from polyfed.core.client import Client
from polyfed.core.inference import run_pass
from polyfed.core.message import Group
from polyfed.core.method import Method
from polyfed.core.model_factory import ModelFactory
from polyfed.core.server import PublicPass
from polyfed.core.settings import Training
from polyfed.engine.executors.client_scores import score_batch, score_in_batches
from polyfed.engine.executors.jobs import EvalBatch, EvalJob, JobResult, Scores, TrainJob
from polyfed.engine.scoring import ScoreCache
from polyfed.engine.weight_store import WeightStore
from polyfed.functional import fixed_point

Done = Callable[[int], None]  # is told how many jobs are done
RunJobs = Callable[[Sequence[TrainJob], Done], list[JobResult]]  # `Executor.run`


@dataclass
class ExecutorSetup:
    """A federation as executors see it.

    Attributes:
        clients: by number. store: of their weights. figures: scores come with these.
        training: says how much work there is.
        workers: how many were asked for; None: as many as the executor likes.
        say: is given a line for those who watch the run.
        rebuild: makes the same federation in another process or thread; None: nobody has said how.
    """

    method: Method
    model_factory: ModelFactory
    clients: Sequence[Client]
    store: WeightStore
    figures: Sequence[str] = ()
    training: Training = field(default_factory=Training)
    workers: int | None = None
    say: Callable[[str], object] = lambda line: None
    rebuild: Callable[[], Any] | None = None

    @property
    def device(self) -> str:
        """The type of the device where networks compute: "cpu", "cuda"."""
        return self.model_factory.device.type


class Executor(abc.ABC):
    """Carries out the clients' work. One of your own needs `run` alone: docs/own-executor.md.

    Attributes:
        setup: what it works on. workers: how many clients can be at work at the same time.
        in_process: whether all is done in this process, so that uploads may stay on its GPU.

    Raises:
        ConfigError: it is not possible here.
    """

    workers = 1
    in_process: ClassVar[bool] = False
    run_passes: Callable[[Sequence[PublicPass]], list[Tensor]] | None = None  # see `Server.run_passes`

    def __init__(self, setup: ExecutorSetup) -> None:
        self.setup = setup

    @classmethod
    def stack_size(cls, workers: int | None) -> int:
        """How many clients train as one, at most, on which the last bits of a result depend; 1: none."""
        return 1

    @abc.abstractmethod
    def run(self, jobs: Sequence[TrainJob], done: Done) -> list[JobResult]:
        """Carry out jobs of one exchange.

        Args:
            done: to be called with the number of jobs done so far, as they finish.

        Returns:
            The results, in the order of the jobs.

        Raises:
            PolyfedError: a job failed; says for which client, in which round and at which stage.
        """

    def score(self, asked: Sequence[EvalJob]) -> list[Scores]:
        """The scores of clients, in this order; a part of the data that could not be scored is left out."""
        return score_in_batches(asked, self.setup.method, self.setup.model_factory, self.score_batches)

    def score_batches(self, batches: Sequence[EvalBatch]) -> Sequence[list[Scores]]:
        """The scores of each batch's clients, which hold the same model; by default from this process."""
        memory = ScoreCache(self.setup.figures)
        return [score_batch(batch, self.setup.method, self.setup.model_factory, memory) for batch in batches]

    def add_up(self, uploads: Mapping[int, Group]) -> Group | None:
        """The total of clients' addends in fixed point; None: it cannot be opened.

        Args:
            uploads: of the last `run`, by number of client.
        """
        return fixed_point.add_up(uploads.values())

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds (processes, connections); it may be used again."""


def run_public_pass(asked: PublicPass, setup: ExecutorSetup) -> Tensor:
    """What the server's own pass would give (`core.inference.public_outputs`)."""
    architecture = setup.clients[asked.client_id].architecture
    model = setup.model_factory.load(architecture, "", asked.weights, alone=True).eval()
    first = setup.clients[0]  # whose preparation is the server's
    return run_pass(asked, model, first.public, first.prepare).cpu()
