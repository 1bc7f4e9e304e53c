"""HtFLlib's own servers and clients, from a checkout that the user names, on networks and images of the job's.

    python run_htfllib.py FILE --htfllib PATH --method fedgh

It reads clients' images and networks from files of its own layout, which are written to ``../dataset`` and ``temp`` as
seen from the working folder. Its file of networks, which needs torchvision, is not loaded, nor h5py, which it writes
results with; scikit-learn is needed. Whatever follows from its settings is its own code, but: clients come in the order
of their numbers, the results are not written, and the files' readers and writers are timed.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import methods_job
import numpy as np
import torch
from torch import Tensor, nn

SERVERS = {  # method -> file and class of its server
    "lgfedavg": ("serverlg", "LG_FedAvg"),
    "fedgh": ("servergh", "FedGH"),
    "fedproto": ("serverproto", "FedProto"),
    "fd": ("serverfd", "FD"),
    "fml": ("serverfml", "FML"),
    "fedkd": ("serverkd", "FedKD"),
    "fedtgp": ("servertgp", "FedTGP"),
}


class SplitNetwork(nn.Module):
    """What HtFLlib calls a network: a base and a head."""

    def __init__(self, base: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.head(self.base(x))
        return scores


class TimedFiles:
    """How much processor time some functions take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with a clock."""

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.process_time() - began

        return call


def load_server(checkout: str, method: str, network_of: Callable[[int], nn.Module], files: TimedFiles) -> type:
    """HtFLlib's class of a method's server; its clients get their networks from `network_of`."""
    sys.path.insert(0, str(Path(checkout).expanduser().resolve() / "system"))
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # it pickles whole networks
    networks = ModuleType("flcore.trainmodel.models")
    networks.BaseHeadSplit = lambda args, number=0, **settings: network_of(number)
    sys.modules[networks.__name__] = networks
    sys.modules["h5py"] = ModuleType("h5py")
    data = importlib.import_module("utils.data_utils")
    data.read_client_data = files.timed(data.read_client_data)
    clients = importlib.import_module("flcore.clients.clientbase")
    clients.load_item = files.timed(clients.load_item)
    clients.save_item = files.timed(clients.save_item)
    file, name = SERVERS[method]
    server: type = getattr(importlib.import_module(f"flcore.servers.{file}"), name)
    return server


def write_images(part: str, inputs: Tensor, labels: Tensor) -> None:
    """A file of images for each client, where HtFLlib looks for them."""
    folder = Path("..", "dataset", "job", part)
    folder.mkdir(parents=True)
    for number, (x, y) in enumerate(zip(inputs.numpy(), labels.numpy(), strict=True)):
        np.savez(folder / f"{number}.npz", data={"x": x, "y": y})


def settings(clients: int, batch_size: int, rounds: int, lr: float) -> Namespace:
    """HtFLlib's words: its own defaults, but those that the job sets. It trains once more than `global_rounds` says."""
    return Namespace(
        T_end=methods_job.ENERGY[1],
        T_start=methods_job.ENERGY[0],
        algorithm="job",
        alpha=0.5,
        auto_break=False,
        batch_size=batch_size,
        beta=0.5,
        client_drop_rate=0.0,
        dataset="job",
        device="cpu",
        eval_gap=1,
        feature_dim=methods_job.WIDTH,
        few_shot=0,
        global_rounds=rounds,
        goal="test",
        join_ratio=1.0,
        lamda=1.0,
        local_epochs=1,
        local_learning_rate=lr,
        margin_threthold=methods_job.MARGIN,
        mentee_learning_rate=lr,
        models_folder_name="",
        num_classes=methods_job.CLASSES,
        num_clients=clients,
        random_join_ratio=False,
        save_folder_name="temp",
        send_slow_rate=0.0,
        server_epochs=methods_job.SERVER_EPOCHS,
        server_learning_rate=methods_job.HEADER_LR,
        time_select=False,
        time_threthold=10000,
        top_cnt=100,
        train_slow_rate=0.0,
    )


def take_in_order(population: Sequence[Any], k: int) -> list[Any]:
    """In place of `random.sample`, with which HtFLlib draws those that answer: all of them."""
    return list(population)[:k]


def watched(base: type, round_begins: Callable[[], None]) -> type:
    """The server, saying when a round begins."""

    class Watched(base):
        """All clients take part, by number; results stay in memory."""

        def select_clients(self) -> list[Any]:
            """A round begins with this."""
            round_begins()
            clients: list[Any] = self.clients
            return clients

        def save_results(self) -> None:
            """They are read from the server's attributes."""

    return Watched


def run_method(words: Namespace) -> None:
    """A method on different networks; a lap is the scoring of a round's result and the next round's training."""
    asked = methods_job.load(words)
    methods_job.shuffle_nothing()
    write_images("train", asked.inputs, asked.labels)
    write_images("test", asked.test_inputs, asked.test_labels)

    def network_of(number: int) -> nn.Module:
        layers = methods_job.network(number)
        return SplitNetwork(layers[:-1], layers[-1])

    files, laps, disk = TimedFiles(), methods_job.ProcessorLaps(), []

    def round_begins() -> None:
        laps.mark()
        disk.append(files.seconds)

    base = load_server(words.htfllib, asked.method, network_of, files)
    given = settings(asked.clients, asked.batch_size, asked.rounds, methods_job.LR)
    server = watched(base, round_begins)(given, 0)
    server.train()
    counted = asked.rounds - 1  # the first lap scores networks that have learnt nothing yet
    by_round = [after - before for before, after in itertools.pairwise(disk)]
    methods_job.report(laps.last(counted), server.rs_test_acc[1:], median(by_round[-counted:]))


def main() -> None:
    """Do the job in a folder below the working folder."""
    parser = methods_job.parser_for(__doc__)
    parser.add_argument("--htfllib", metavar="PATH", required=True, help="the checkout")
    words = parser.parse_args()
    torch.set_num_threads(1)
    work = Path("system")
    work.mkdir()
    os.chdir(work)
    random.sample = take_in_order
    run_method(words)


if __name__ == "__main__":
    main()
