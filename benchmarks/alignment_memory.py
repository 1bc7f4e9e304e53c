"""Peak memory of one alignment gradient with all rows of the RAD, by rows whose graph is kept at a time.

    python benchmarks/alignment_memory.py --model resnet18 --rows 5000 --chunks 256 5000

Each measurement runs in a process of its own, on one thread; a line of JSON per chunk size: seconds, MiB at the peak
and before the gradient, and the gradient's norm, which must not depend on the chunk.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

from polyfed.core.inference import chunked_gradients
from polyfed.functional.kernel_similarity import kernel_distance
from polyfed.models.zoo import build


def peak() -> float:
    """MiB of memory at the process's peak."""
    unit = 1024 if sys.platform != "darwin" else 1024**2
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(model: str, rows: int, chunk: int) -> dict[str, float | int | str]:
    """One gradient of the distance between a fresh network's representation and a random factor of rank 128."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = build(model, (3, 32, 32), 10)
    x, factor = torch.randn(rows, 3, 32, 32), torch.randn(rows, 128)
    before, began = peak(), time.perf_counter()
    _, grads = chunked_gradients(network, x, lambda z: kernel_distance("linear", z, factor, factor=True), chunk)
    norm = sum(float(grad.square().sum()) for grad in grads.values() if grad is not None) ** 0.5
    seconds = time.perf_counter() - began
    facts = {"model": model, "rows": rows, "chunk": chunk}
    return {**facts, "seconds": round(seconds, 1), "before": round(before), "peak": round(peak()), "norm": norm}


def main() -> None:
    """Measure every chunk size asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 5000])
    asked = parser.parse_args()
    if len(asked.chunks) == 1:
        print(json.dumps(measure(asked.model, asked.rows, asked.chunks[0])))
        return
    for chunk in asked.chunks:
        words = ["--model", asked.model, "--rows", str(asked.rows), "--chunks", str(chunk)]
        subprocess.run([sys.executable, __file__, *words], check=True)


if __name__ == "__main__":
    main()
