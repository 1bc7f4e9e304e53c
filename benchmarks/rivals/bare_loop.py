"""FedAvg by hand: the loop that everybody is compared with; one process."""

from __future__ import annotations

import torch
from job import Laps, asked, network, report, train
from torch import Tensor


def main() -> None:
    """Do the job."""
    job, _ = asked(__doc__)
    model = network()
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    laps = Laps()
    for _ in range(1 + job.rounds):
        total: dict[str, Tensor] = {name: torch.zeros_like(tensor) for name, tensor in average.items()}
        for x, y in zip(job.inputs, job.labels, strict=True):
            model.load_state_dict(average)
            train(model, x, y, job.batch_size)
            for name, tensor in model.state_dict().items():
                total[name] += tensor
        average = {name: tensor / job.clients for name, tensor in total.items()}
        laps.mark()
    report(job, laps, average)


if __name__ == "__main__":
    main()
