"""Seconds per round of other frameworks of federated learning, beside a bare PyTorch loop, all in one run.

    python benchmarks/rivals.py --into build/rivals                     # installs the others there, then measures
    python benchmarks/rivals.py --into build/rivals --batch-size 64 --json rivals.json --markdown rivals.md
    python benchmarks/rivals.py --only polyfed --clients 5 --rounds 1   # nothing to install

The job is plain FedAvg as in `recipes/reference.toml`: CIFAR-10 (from `POLYFED_DATA`) or random images of its shape
(`--data random`), 20 clients of 500 images with two classes each, CNN-1 for all, one pass of SGD per round, no tests.
`benchmarks/rivals/` has a file per framework that does it through that framework's public interface, on the same
images and with the same initial weights; `job.py` is what they share. HtFLlib, which is no package, runs from a
checkout (`--htfllib`) as its LG-FedAvg with whole networks for heads; `benchmarks/htfllib.py` has its methods for
different networks. Everybody gets the plain network, polyfed as well, whose own `fedgh-cnn1` is laid out otherwise in
memory.

Each framework is installed by pip into a virtual environment of its own below `--into`, at the versions below, with
this Python or, where it needs another one, the first that fits among `python3.X` on the path. PyTorch goes first, at
this environment's version; a configuration of pip that finds its CPU wheels saves gigabytes. What is installed stays
and is used again. Who cannot be installed or fails has a row that says why.

All take turns, one process (with its workers) at a time and one computing thread each: the bare loop, everybody with
1 worker, everybody with 2; then again, `--repeats` times. A round before those that count does what is done once, such
as starting workers. `ratio`: seconds of a round over the bare loop's in the same turn, which is one process always;
medians over rounds, then over turns. `moved`: how far the last average is from the initial weights, over the bare
loop's; orders of samples differ, so it comes out near 1 for who took as many of the same steps.
A line of JSON per run, then the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from polyfed.config.recipe import Recipe
from polyfed.errors import PolyfedError
from polyfed.experiments.build import build_federation
from polyfed.experiments.data_cache import DataCache
from polyfed.version import __version__

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "reference.toml"
BARE = "bare PyTorch loop"
SAME_WORK = 0.05  # `moved` differs from 1 by no more
SECONDS_ALLOWED = 900  # per run
NO_PACKAGE = "not measured: no package of this name; its repository would have to be cloned"
NO_CHECKOUT = "not measured: no package of this name; --htfllib names a checkout"
BLAZEFL = ("blazefl[contrib,reproducibility]==2.0.3",)
Python = tuple[int, int]


class Failed(Exception):
    """A framework could not be installed or did not do the job; the text is one line for its row."""


@dataclass(frozen=True)
class Framework:
    """Who takes part.

    Attributes:
        program: below benchmarks/rivals/; None: there is nothing to run, and `note` says why.
        packages: what pip installs into the framework's own environment; none: runs in this one.
        least, below: the versions of Python that it takes, the second excluded.
        version: for the table.
        least_workers, most_workers: with which it is measured.
        words: of its program, beside those of the job.
    """

    name: str
    program: str | None
    version: str = ""
    packages: tuple[str, ...] = ()
    least: Python = (3, 11)
    below: Python = (4, 0)
    least_workers: int = 1
    most_workers: int = 1000
    words: tuple[str, ...] = ()
    note: str = ""


FRAMEWORKS = (
    Framework(BARE, "bare_loop.py", f"PyTorch {torch.__version__.partition('+')[0]}", most_workers=1),
    Framework("polyfed", "run_polyfed.py", __version__),
    Framework("Flower's simulation", "run_flower.py", "flwr 1.41.0", ("flwr[simulation]==1.41.0",)),
    Framework("pfl-research", "run_pfl.py", "pfl 0.6.0", ("pfl==0.6.0",), below=(3, 13)),
    Framework("BlazeFL, processes", "run_blazefl.py", "2.0.3", BLAZEFL, least=(3, 12)),
    Framework(
        "BlazeFL, threads",
        "run_blazefl.py",
        "2.0.3",
        BLAZEFL,
        least=(3, 12),
        least_workers=2,
        words=("--pool=threads",),
    ),
    Framework("HtFLlib", None, note=NO_CHECKOUT),
    Framework("PFLlib", None, note=NO_PACKAGE),
)


def with_checkout(framework: Framework, checkout: str) -> Framework:
    """HtFLlib, as it runs from a checkout."""
    words = ("--method=fedavg", f"--htfllib={Path(checkout).expanduser().resolve()}")
    return replace(framework, program="run_htfllib.py", most_workers=1, words=words, note="")


def last_line(text: str, start: str = "") -> str:
    """The last line that is not empty, of those with this start if there are any; for a table's cell."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    chosen = [line for line in lines if line.startswith(start)] or lines or ["no output"]
    return chosen[-1].replace("|", "/")[:200]


def python_for(framework: Framework) -> str:
    """A Python that the framework takes: this one, or the first on the path.

    Raises:
        Failed: there is none.
    """
    if framework.least <= sys.version_info[:2] < framework.below:
        return sys.executable
    for minor in range(framework.least[1], 20):
        program = shutil.which(f"python3.{minor}")
        if program is None or not framework.least <= (3, minor) < framework.below:
            continue
        if subprocess.run([program, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode == 0:
            return program
    needed = f"needs Python {'.'.join(map(str, framework.least))} or newer"
    if framework.below[0] == 3:
        needed += f", older than {'.'.join(map(str, framework.below))}"
    raise Failed(f"not measured: {needed}; none on the path")


def installed(framework: Framework, into: Path) -> str:
    """The Python that runs the framework; its environment is made if it is not there yet.

    Raises:
        Failed: no such Python, or pip's last word.
    """
    if not framework.packages:
        return sys.executable
    folder = into / framework.packages[0].partition("=")[0].partition("[")[0]
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = [f"torch=={torch.__version__.partition('+')[0]}", *framework.packages]
    if done.exists() and done.read_text(encoding="utf-8").split() == wanted:
        return str(python)
    base = python_for(framework)
    print(f"installing {', '.join(wanted)} into {folder}", file=sys.stderr, flush=True)
    steps = [[base, "-m", "venv", "--clear", str(folder)]]
    steps += [[str(python), "-m", "pip", "install", "--quiet", package] for package in wanted]
    for step in steps:
        ended = subprocess.run(step, capture_output=True, text=True, check=False, env=environment(own=True))
        if ended.returncode:
            raise Failed(f"not installed: {last_line(ended.stderr or ended.stdout, 'ERROR')}")
    done.write_text("\n".join(wanted) + "\n", encoding="utf-8")
    return str(python)


def environment(own: bool) -> dict[str, str]:
    """Of a framework's process: one thread each; with `own` packages it sees none of this environment's."""
    left_out = {"PYTHONPATH", "VIRTUAL_ENV"} if own else set()
    given = {name: value for name, value in os.environ.items() if name not in left_out}
    return given | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def done_by(program: Sequence[str], own: bool, seconds: float = SECONDS_ALLOWED) -> dict[str, Any]:
    """The line of JSON that a framework's program prints.

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
            env=environment(own),
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
    """Each client's images in a random order, the same for all frameworks."""
    rows = torch.randperm(inputs.shape[1], generator=torch.Generator().manual_seed(0))
    return inputs[:, rows], labels[:, rows]


def summary(framework: Framework, runs: Sequence[Mapping[str, Any]], note: str) -> dict[str, Any]:
    """A framework's row: medians over its runs by number of workers.

    Args:
        framework: whose.
        runs: what `done_by` returned, with `ratio` and `moved_ratio` to the bare loop of the same turn.
        note: why there are none, or not all.
    """
    by_workers: dict[int, dict[str, float]] = {}
    for workers in sorted({run["workers"] for run in runs}):
        own = [run for run in runs if run["workers"] == workers]
        by_workers[workers] = {
            "seconds_per_round": median(median(run["round_s"]) for run in own),
            "ratio": median(run["ratio"] for run in own),
            "moved": median(run["moved_ratio"] for run in own),
            "loss": median(run["loss"] for run in own),
        }
    if any(abs(found["moved"] - 1) > SAME_WORK for found in by_workers.values()):
        note = "; ".join(filter(None, [note, "not the same work: see `moved`"]))
    return {"framework": framework.name, "version": framework.version, "workers": by_workers, "note": note}


def table(rows: Sequence[Mapping[str, Any]], workers: Sequence[int]) -> str:
    """The rows in Markdown; what has not been measured stays empty."""
    heads = [f"{count} worker{'s' if count > 1 else ''}: s per round | ratio" for count in workers]
    lines = [
        f"| framework | version | {' | '.join(heads)} | moved | note |",
        f"| --- | --- |{' ---: |' * (2 * len(workers) + 1)} --- |",
    ]
    for row in rows:
        cells = [row["framework"], row["version"]]
        for count in workers:
            found = row["workers"].get(count)
            cells += ["", ""] if found is None else [f"{found['seconds_per_round']:.3g}", f"{found['ratio']:.2f}"]
        moved = [found["moved"] for found in row["workers"].values()]
        cells += [f"{moved[0]:.2f}" if moved else "", row["note"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def take_turns(
    chosen: Sequence[Framework],
    pythons: Mapping[str, str],
    words: Callable[[int], list[str]],
    workers: Sequence[int],
    repeats: int,
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Everybody's runs, in turns; a framework that fails with some workers does not try so again.

    Args:
        chosen: frameworks with a program; the bare loop first.
        pythons: who runs them, by name.
        words: the program's words for a number of workers.
        workers: the numbers of workers.
        repeats: turns.

    Returns:
        runs and, of who failed, why, by name.

    Raises:
        Failed: the bare loop failed.
    """
    runs: dict[str, list[dict[str, Any]]] = {framework.name: [] for framework in chosen}
    failures: dict[str, str] = {}
    given_up: set[tuple[str, int]] = set()
    for _ in range(repeats):
        bare: dict[str, Any] = {}
        for count in workers:
            for framework in chosen:
                fits = framework.least_workers <= count <= framework.most_workers
                if not fits or (framework.name, count) in given_up:
                    continue
                script = str(HERE / "rivals" / str(framework.program))
                program = [pythons[framework.name], script, *words(count), *framework.words]
                try:
                    run = done_by(program, own=bool(framework.packages))
                except Failed as failure:
                    if framework.name == BARE:
                        raise
                    given_up.add((framework.name, count))
                    failures[framework.name] = f"{count} worker{'s' if count > 1 else ''} {failure}"
                    print(f"{framework.name}: {failures[framework.name]}", file=sys.stderr, flush=True)
                    continue
                bare = bare or run
                run["ratio"] = median(run["round_s"]) / median(bare["round_s"])
                run["moved_ratio"] = run["moved"] / bare["moved"]
                runs[framework.name].append(run)
                print(json.dumps({"framework": framework.name, **run}), flush=True)
    return runs, failures


def parse() -> argparse.Namespace:
    """The command line's words, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", metavar="FOLDER", default="build/rivals", help="the environments [build/rivals]")
    parser.add_argument("--only", metavar="A,B,...", help="frameworks beside the bare loop, by first words [all]")
    parser.add_argument("--htfllib", metavar="PATH", help="a checkout of github.com/TsingZ0/HtFLlib, which runs, too")
    parser.add_argument("--data", choices=("cifar10", "random"), default="cifar10", help="[cifar10]")
    parser.add_argument("--clients", type=int, default=20, help="[20]")
    parser.add_argument("--samples", type=int, default=500, help="per client [500]")
    parser.add_argument("--batch-size", type=int, default=10, help="[10]")
    parser.add_argument("--workers", default="1,2", metavar="N,M,...", help="beginning with 1 [1,2]")
    parser.add_argument("--rounds", type=int, default=1, help="that count, in each run [1]")
    parser.add_argument("--repeats", type=int, default=2, help="turns, of which the median counts [2]")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--markdown", metavar="FILE", help="write the table")
    asked = parser.parse_args()
    if min(asked.clients, asked.samples, asked.batch_size, asked.rounds, asked.repeats) < 1:
        parser.error("expected at least 1 client, sample, round and repeat, and batches of at least 1")
    try:
        asked.workers = [int(count) for count in asked.workers.split(",")]
    except ValueError:
        parser.error(f"expected numbers of workers, got '{asked.workers}'")
    if asked.workers[0] != 1 or min(asked.workers) < 1:
        parser.error(f"expected numbers of workers that begin with 1, got {asked.workers}")
    names = asked.only.lower().split(",") if asked.only else [""]
    if unknown := [name for name in names if not any(f.name.lower().startswith(name) for f in FRAMEWORKS)]:
        parser.error(f"expected names among {', '.join(f.name for f in FRAMEWORKS)}, got '{unknown[0]}'")
    known = [with_checkout(f, asked.htfllib) if f.name == "HtFLlib" and asked.htfllib else f for f in FRAMEWORKS]
    asked.chosen = [f for f in known if f.name == BARE or f.name.lower().startswith(tuple(names))]
    asked.stop = parser.exit
    return asked


def main() -> None:
    """Install, measure, print the table."""
    asked = parse()
    notes = {framework.name: framework.note for framework in asked.chosen}
    pythons: dict[str, str] = {}
    for framework in asked.chosen:
        if framework.program is None:
            continue
        try:
            pythons[framework.name] = installed(framework, Path(asked.into).resolve())
        except Failed as failure:
            notes[framework.name] = str(failure)
            print(f"{framework.name}: {failure}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.pt"
        try:
            make = cifar10 if asked.data == "cifar10" else random_images
            inputs, labels = mixed(*make(asked.clients, asked.samples))
            torch.save({"inputs": inputs, "labels": labels}, file)
            del inputs, labels
            fixed = [str(file), f"--batch-size={asked.batch_size}", f"--rounds={asked.rounds}"]
            ready = [framework for framework in asked.chosen if framework.name in pythons]
            runs, failures = take_turns(
                ready, pythons, lambda count: [*fixed, f"--workers={count}"], asked.workers, asked.repeats
            )
        except PolyfedError as error:
            asked.stop(error.exit_status, f"{error}\n")
        except Failed as failure:
            asked.stop(1, f"{BARE}: {failure}\n")
    notes |= failures
    rows = [summary(framework, runs.get(framework.name, []), notes[framework.name]) for framework in asked.chosen]
    shown = table(rows, asked.workers)
    job = {name: getattr(asked, name) for name in ("data", "clients", "samples", "batch_size", "rounds", "repeats")}
    job |= {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    print(f"\n{json.dumps(job)}\n\n{shown}")
    if asked.json:
        Path(asked.json).write_text(json.dumps({"job": job, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    if asked.markdown:
        Path(asked.markdown).write_text(shown + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
