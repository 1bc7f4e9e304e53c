"""FedAvg with Flower's simulation (`flwr.simulation.run_simulation`, on Ray), one actor per worker."""

from __future__ import annotations

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Job, Laps, asked, load, network, report, train


def client_app(path: str, batch_size: int) -> ClientApp:
    """A client: trains the weights that it gets on its own images."""
    app = ClientApp()

    @app.train()
    def train_one(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        inputs, labels = load(path)
        number = int(context.node_config["partition-id"])
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(model, inputs[number], labels[number], batch_size)
        examples = MetricRecord({"num-examples": labels.shape[1]})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": examples}
        return Message(content=RecordDict(content), reply_to=message)

    return app


def server_app(job: Job, laps: Laps, averages: list[ArrayRecord]) -> ServerApp:
    """The server: all clients train in every round, nobody evaluates. The last average goes to `averages`."""
    app = ServerApp()

    def mark(number: int, arrays: ArrayRecord) -> None:
        laps.mark()  # called once before the first round, too

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=job.clients)
        start = ArrayRecord(network().state_dict())
        result = strategy.start(grid, start, num_rounds=1 + job.rounds, evaluate_fn=mark)
        averages.append(result.arrays)

    return app


def main() -> None:
    """Do the job."""
    job, path = asked(__doc__)
    laps, averages = Laps(), []
    resources = {"init_args": {"num_cpus": job.workers}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    client = client_app(os.path.abspath(path), job.batch_size)
    run_simulation(server_app(job, laps, averages), client, job.clients, backend_config=resources)
    report(job, laps, averages[-1].to_torch_state_dict())


if __name__ == "__main__":
    main()
