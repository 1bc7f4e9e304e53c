"""FedAvg with polyfed: in one process, or with workers."""

from __future__ import annotations

from job import LR, Laps, asked, network, report

import polyfed as pf
from polyfed.core.message import get_group
from polyfed.engine.task import Execution


def main() -> None:
    """Do the job."""
    job, _ = asked(__doc__)
    laps = Laps()
    federation = pf.Federation(
        [pf.Client("cnn1", (x, y)) for x, y in zip(job.inputs, job.labels, strict=True)],
        pf.methods.FedAvg(),
        pf.Training(rounds=1 + job.rounds, batch_size=job.batch_size, lr=LR),
        executor=Execution("serial") if job.workers == 1 else Execution("processes", workers=job.workers),
        builders={"cnn1": network},
        loggers=[lambda record: laps.mark()],
    )
    federation.run()
    average = get_group(federation.method.broadcast(federation.server, 0), "model")  # what a client would get next
    report(job, laps, average)


if __name__ == "__main__":
    main()
