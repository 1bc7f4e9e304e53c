"""FedAvg with BlazeFL's own classes for it: one by one, in its pool of processes with shared memory, or of threads."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from blazefl.contrib import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgPartitionType,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode
from job import LR, SEED, Job, Laps, asked, network, report
from torch import Generator, Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


class Network:
    """The model selector: there is one network."""

    def select_model(self, model_name: str) -> nn.Module:
        """With its initial weights."""
        return network()


class Images:
    """The partitioned dataset, in memory that the workers share."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs, self.labels = inputs.clone().share_memory_(), labels.clone().share_memory_()

    def get_dataset(self, type_: FedAvgPartitionType, cid: int) -> TensorDataset:
        """A client's images."""
        return TensorDataset(self.inputs[cid], self.labels[cid])

    def set_dataset(self, type_: FedAvgPartitionType, cid: int, dataset: TensorDataset) -> None:
        """They stay as they are."""

    def get_dataloader(
        self, type_: FedAvgPartitionType, cid: int, batch_size: int, generator: Generator | None = None
    ) -> DataLoader:
        """Whole batches in random order, each taken at once: faster than sample by sample."""
        images = self.get_dataset(type_, cid)
        batches = BatchSampler(RandomSampler(images, generator=generator), batch_size, drop_last=False)
        return DataLoader(images, sampler=batches, batch_size=None)


Trainer = FedAvgBaseClientTrainer | FedAvgProcessPoolClientTrainer | FedAvgThreadPoolClientTrainer


def trainer_for(job: Job, images: Images, folder: Path) -> Trainer:
    """Who trains the clients; `folder`: for what the pool of processes writes."""
    common = {
        "model_selector": Network(),
        "model_name": "cnn1",
        "dataset": images,
        "device": "cpu",
        "num_clients": job.clients,
        "epochs": 1,
        "batch_size": job.batch_size,
        "lr": LR,
        "seed": SEED,
    }
    if job.workers == 1:
        return FedAvgBaseClientTrainer(**common)
    if job.pool == "threads":
        return FedAvgThreadPoolClientTrainer(**common, num_parallels=job.workers)
    return FedAvgProcessPoolClientTrainer(
        **common,
        share_dir=folder / "shared",
        state_dir=folder / "state",
        num_parallels=job.workers,
        ipc_mode=IPCMode.SHARED_MEMORY,
    )


def main() -> None:
    """Do the job."""
    job, _ = asked(__doc__)
    torch.optim.SGD(network().parameters(), lr=LR)  # loads what else every round's new processes would each load
    images = Images(job.inputs, job.labels)
    server = FedAvgBaseServerHandler(
        model_selector=Network(),
        model_name="cnn1",
        dataset=images,
        global_round=1 + job.rounds,
        num_clients=job.clients,
        sample_ratio=1.0,
        device="cpu",
        batch_size=job.batch_size,
        seed=SEED,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(job, images, Path(folder))
        laps = Laps()
        while not server.if_stop():
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for package in trainer.uplink_package():
                server.load(package)
            laps.mark()
    report(job, laps, server.model.state_dict())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
