"""FedAvg with pfl-research (the package `pfl`): in one process, or in those of `torchrun`, which share the clients."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from job import LR, SEED, Laps, asked, network, report
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional


class WithLoss(nn.Module):
    """The network with the loss and the scores for which pfl asks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of one batch."""
        self.train()
        return functional.cross_entropy(self.network(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Asked for before and after the first round's training, which does not count."""
        return {"loss": Weighted(float(functional.cross_entropy(self.network(x), y)) * len(x), len(x))}


class Marks(TrainingProcessCallback):
    """Marks the end of every round."""

    def __init__(self, laps: Laps) -> None:
        self._laps = laps

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Go on in any case."""
        self._laps.mark()
        return False, Metrics()


def main() -> None:
    """Do the job."""
    job, _ = asked(__doc__)
    if job.workers > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.workers}"]
        os.execv(sys.executable, [*launcher, *sys.argv])
    np.random.seed(SEED)  # the same in all processes

    def dataset(number: int) -> PyTorchTensorDataset:
        rows = torch.randperm(job.samples)  # pfl goes through them in the order given
        return PyTorchTensorDataset((job.inputs[number][rows], job.labels[number][rows]), user_id=str(number))

    users = FederatedDataset(dataset, get_user_sampler("minimize_reuse", list(range(job.clients))))
    module = WithLoss()
    central = torch.optim.SGD(module.parameters(), lr=1.0)  # the average of the clients' changes, as it is
    model = PyTorchModel(module, local_optimizer_create=torch.optim.SGD, central_optimizer=central)
    training = NNTrainHyperParams(local_batch_size=job.batch_size, local_num_epochs=1, local_learning_rate=LR)
    rounds = 1 + job.rounds
    settings = NNAlgorithmParams(
        central_num_iterations=rounds, evaluation_frequency=rounds, train_cohort_size=job.clients, val_cohort_size=0
    )
    laps = Laps()
    FederatedAveraging().run(settings, SimulatedBackend(users, users), model, training, training, [Marks(laps)])
    if os.environ.get("RANK", "0") == "0":
        report(job, laps, module.network.state_dict())


if __name__ == "__main__":
    main()
