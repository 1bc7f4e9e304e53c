"""HtFLlib's methods for different networks beside polyfed's: accuracies of every round, and processor seconds.

    python benchmarks/htfllib.py ../HtFLlib                                  # a checkout of github.com/TsingZ0/HtFLlib
    python benchmarks/htfllib.py ../HtFLlib --methods fedproto --ways order  # without HtFLlib's other ways

Each method is run three times on the same clients, images, networks and initial weights, in processes of their own with
one computing thread: HtFLlib's own code from the checkout (`htfllib_programs/run_htfllib.py`); polyfed in HtFLlib's
ways, which should give the same accuracies up to rounding; and polyfed in its own. What each way is, the last lines
say. They are in this benchmark alone, not in the library. HtFLlib needs scikit-learn beside PyTorch here, nothing else.

The job: CIFAR-10 (from `POLYFED_DATA`) or random images of its shape, clients with two classes each and one of four
small CNNs. All train in every round, and all are tested after it: HtFLlib takes accuracy and AUC, polyfed accuracy,
balanced accuracy and F1, and FedProto's accuracy by heads, too.

seconds: processor time of a round, training and scoring: the median over the rounds but the first, then over
`--repeats`, in which all take turns. files: those of them that HtFLlib spends on reading and writing, as it keeps
images, networks and messages in files. ratio: HtFLlib's seconds over polyfed's, above 1 where polyfed is faster.
A line of JSON per run, then the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "reference.toml"
SECONDS_ALLOWED = 900  # per run
METHODS = ("fedgh", "fedproto", "lgfedavg", "fd", "fml", "fedkd", "fedtgp")
HTFLLIB, ALIKE, OWN = "HtFLlib", "polyfed, HtFLlib's ways", "polyfed"


@dataclass(frozen=True)
class Way:
    """How HtFLlib does something else than polyfed. methods: whose."""

    methods: tuple[str, ...]
    line: str


WAYS = {
    "order": Way(
        METHODS,
        "HtFLlib never shuffles a client's images, polyfed does in every epoch; in HtFLlib's ways neither shuffles "
        "anything, nor are the batches of FedGH's header",
    ),
    "prototypes": Way(
        ("fedproto",),
        'HtFLlib collects prototypes while weights change and counts clients alike (polyfed: `collected = "during"`, '
        '`weighting = "uniform"`); polyfed\'s default takes a pass after training, and counts images',
    ),
    "targets": Way(
        ("fd",),
        "HtFLlib gives raw scores, averaged over all clients while weights change, to a cross entropy as targets; "
        "polyfed the others' probabilities after training",
    ),
    "divergence": Way(
        ("fml",),
        "HtFLlib divides the divergence by the number of classes, both losses move both networks, and their gradients "
        "are clipped to a norm of 10 each; polyfed does none of it",
    ),
    "compression": Way(
        ("fedkd",),
        "HtFLlib compresses weights, of convolutions kernel by kernel, and sends zeros where all singular values are "
        "needed; it divides the divergence by the number of classes, and both losses move both networks, through what "
        "they are divided by, too; polyfed compresses updates, exactly where that saves nothing. HtFLlib clips the "
        "gradients of each network to a norm of 10, polyfed does not",
    ),
    "late": Way(
        ("fedtgp",),
        "HtFLlib's clients send the class means of their networks before the round's training, as the file has them; "
        "polyfed's after it. HtFLlib predicts also the classes that nobody has, as there are of fewer than nine "
        "clients",
    ),
}


class Failed(Exception):
    """A program did not do the job; the text is one line for its row."""


def cifar10(clients: int, samples: int, part: str = "train") -> tuple[Tensor, Tensor]:
    """Images of the reference job, (clients, samples, 3, 32, 32), normalized, and labels.

    Args:
        clients: how many. samples: of each. part: "train" or "test".

    Raises:
        PolyfedError: there are no data, or not so many.
    """
    settings = ["method.name=fedavg", 'models.architectures=["fedgh-cnn1"]', f"data.num_clients={clients}"]
    recipe = Recipe.load(str(RECIPE), [*settings, f"data.max_{part}_per_client={samples}"])
    given = build_federation(recipe, data=DataCache()).clients
    held = [getattr(client.data, part) for client in given]
    least = min(map(len, held))
    if least < samples:
        raise PolyfedError(f"expected at most {least} images per client, got {samples}")
    inputs = torch.stack([client.prepare(own.x) for client, own in zip(given, held, strict=True)])
    return inputs.contiguous(), torch.stack([own.y for own in held])


def random_images(clients: int, samples: int, part: str = "train") -> tuple[Tensor, Tensor]:
    """The same shapes with two classes per client; an image is its class's mean and noise. part: "train" or "test"."""
    means = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0)) / 2
    drawn = torch.Generator().manual_seed(1 if part == "train" else 2)
    first = torch.arange(clients)[:, None] % 10
    labels = (first + torch.randint(0, 2, (clients, samples), generator=drawn)) % 10
    return means[labels] + torch.randn(clients, samples, 3, 32, 32, generator=drawn), labels


def mixed(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each client's images in a random order, the same for all programs."""
    rows = torch.randperm(inputs.shape[1], generator=torch.Generator().manual_seed(0))
    return inputs[:, rows], labels[:, rows]


def first_seen_in_order(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each client's images, beginning with one of each class in the order of the classes.

    HtFLlib sends class means in the order in which it met the classes, and FedGH's header is trained in that order.
    """
    for x, y in zip(inputs, labels, strict=True):
        first = torch.stack([(y == c).nonzero()[0, 0] for c in y.unique()])
        others = torch.ones(len(y), dtype=torch.bool)
        others[first] = False
        order = torch.cat([first, others.nonzero()[:, 0]])
        x.copy_(x[order])
        y.copy_(y[order])
    return inputs, labels


def programs(asked: argparse.Namespace, file: Path, method: str) -> dict[str, list[str]]:
    """What runs a method, by who is run."""
    words = [str(file), f"--method={method}", f"--batch-size={asked.batch_size}", f"--rounds={asked.rounds}"]
    theirs, ours = (str(HERE / "htfllib_programs" / name) for name in ("run_htfllib.py", "run_methods.py"))
    return {
        HTFLLIB: [sys.executable, theirs, *words, f"--htfllib={asked.htfllib}"],
        ALIKE: [sys.executable, ours, *words, f"--ways={','.join(asked.ways)}"],
        OWN: [sys.executable, ours, *words],
    }


def last_line(text: str) -> str:
    """The last line that is not empty, for a table's cell."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["no output"])[-1].replace("|", "/")[:200]


def done_by(program: Sequence[str], seconds: float = SECONDS_ALLOWED) -> dict[str, Any]:
    """The line of JSON that a program prints.

    Raises:
        Failed: it ended otherwise, or not in time; then it and what it started are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            program,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise Failed(f"failed: not through after {seconds:.0f} s") from error
            raise
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise Failed(f"failed: {last_line(errors or out)}")
    row: dict[str, Any] = json.loads(lines[-1])
    return row


def measured(asked: argparse.Namespace, file: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Everybody's runs by method, in turns; one that fails has `failed`, why, alone."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {m: {HTFLLIB: [], ALIKE: [], OWN: []} for m in asked.methods}
    for _ in range(asked.repeats):
        for method in asked.methods:
            for who, program in programs(asked, file, method).items():
                try:
                    run = done_by(program)
                except Failed as failure:
                    run = {"failed": str(failure)}
                runs[method][who].append(run)
                print(json.dumps({"method": method, "who": who, **run}), flush=True)
    return runs


def accuracy_table(runs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], rounds: int) -> str:
    """Accuracies of every round, in percent."""
    lines = [
        f"| accuracy [%] after round | | {' | '.join(str(i + 1) for i in range(rounds))} |",
        f"| --- | --- |{' ---: |' * rounds}",
    ]
    for method, by_who in runs.items():
        for who, own in by_who.items():
            cells = [f"{100 * accuracy:.2f}" for accuracy in own[0].get("accuracies", [])]
            cells = cells or [own[0]["failed"], *[""] * (rounds - 1)]
            lines.append(f"| {method} | {who} | {' | '.join(cells)} |")
    return "\n".join(lines)


def time_table(runs: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Processor seconds of a round."""
    lines = [
        f"| method | {HTFLLIB}: seconds per round | its files | {ALIKE} | ratio | {OWN} | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, by_who in runs.items():
        theirs = _median(by_who[HTFLLIB], "seconds")
        cells = [f"{theirs:.3f}", f"{_median(by_who[HTFLLIB], 'files'):.3f}"]
        for who in (ALIKE, OWN):
            ours = _median(by_who[who], "seconds")
            cells += [f"{ours:.3f}", f"{theirs / ours:.2f}"]
        lines.append(f"| {method} | {' | '.join(cells)} |".replace("nan", ""))
    return "\n".join(lines)


def _median(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    """NaN where one failed."""
    return math.nan if any("failed" in run for run in runs) else median(run[name] for run in runs)


def names_among(known: Sequence[str], given: str, parser: argparse.ArgumentParser) -> list[str]:
    """The names that a word lists; all of them for "all", none for "none"."""
    if given in ("all", "none"):
        return list(known) if given == "all" else []
    names = given.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"expected names among {', '.join(known)}, got '{unknown[0]}'")
    return names


def parse() -> argparse.Namespace:
    """The command line's words, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("htfllib", metavar="PATH", help="HtFLlib's checkout; its code is run")
    parser.add_argument("--methods", default="all", metavar="A,B,...", help=f"of {', '.join(METHODS)} [all]")
    parser.add_argument("--ways", default="all", metavar="A,B,...", help=f"of HtFLlib's: {', '.join(WAYS)} [all]")
    parser.add_argument("--data", choices=("cifar10", "random"), default="cifar10", help="[cifar10]")
    parser.add_argument("--clients", type=int, default=10, help="[10]")
    parser.add_argument("--samples", type=int, default=300, help="per client; whole batches [300]")
    parser.add_argument("--test-samples", type=int, default=100, help="per client [100]")
    parser.add_argument("--batch-size", type=int, default=10, help="[10]")
    parser.add_argument("--rounds", type=int, default=5, help="[5]")
    parser.add_argument("--repeats", type=int, default=2, help="turns, of which the median counts [2]")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables")
    asked = parser.parse_args()
    asked.htfllib = Path(asked.htfllib).expanduser().resolve()
    if not (asked.htfllib / "system" / "flcore").is_dir():
        parser.error(f"expected HtFLlib's checkout, with a folder system/flcore, got '{asked.htfllib}'")
    if min(asked.clients, asked.test_samples, asked.batch_size, asked.repeats) < 1 or asked.rounds < 2:
        parser.error("expected at least 1 client, test image and repeat, batches of at least 1, and 2 rounds")
    if asked.samples < 1 or asked.samples % asked.batch_size:
        parser.error(f"expected whole batches, as HtFLlib leaves out others, got {asked.samples} samples per client")
    asked.methods = names_among(METHODS, asked.methods, parser)
    asked.ways = names_among(list(WAYS), asked.ways, parser)
    if not asked.methods:
        parser.error("expected at least one method")
    asked.stop = parser.exit
    return asked


def main() -> None:
    """Write the images, run everybody, print the tables."""
    asked = parse()
    make: Callable[..., tuple[Tensor, Tensor]] = cifar10 if asked.data == "cifar10" else random_images
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.pt"
        try:
            inputs, labels = first_seen_in_order(*mixed(*make(asked.clients, asked.samples)))
            test_inputs, test_labels = make(asked.clients, asked.test_samples, "test")
            given = {"inputs": inputs, "labels": labels, "test_inputs": test_inputs, "test_labels": test_labels}
            torch.save(given, file)
            del given, inputs, test_inputs
            runs = measured(asked, file)
        except PolyfedError as error:
            asked.stop(error.exit_status, f"{error}\n")
    told = [f"{name}: {way.line}." for name, way in WAYS.items() if {*way.methods} & {*asked.methods}]
    shown = "\n\n".join([accuracy_table(runs, asked.rounds), time_table(runs), "\n".join(f"- {line}" for line in told)])
    job = {
        name: getattr(asked, name) for name in ("data", "clients", "samples", "test_samples", "batch_size", "rounds")
    }
    job |= {"ways": asked.ways, "python": platform.python_version(), "torch": torch.__version__}
    print(f"\n{json.dumps(job)}\n\n{shown}")
    if asked.markdown:
        Path(asked.markdown).write_text(shown + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
