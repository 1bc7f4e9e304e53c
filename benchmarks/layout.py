"""Which memory layout suits an architecture: a training step with channels first against the same with channels last.

    python benchmarks/layout.py
    python benchmarks/layout.py --models fedgh-cnn1,resnet18 --batch-sizes 10,64

Both networks hold the same weights and see the same images; they take turns, with one computing thread. A line of
JSON per architecture and batch size: microseconds of processor time per sample (medians) with either layout, their
ratio, and the layout with which the architecture is registered; then a table. Ratios below 1 speak for channels last.
The builders in `polyfed.models` choose by these figures; differences below 5 % are noise.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn import functional

from polyfed.errors import PolyfedError
from polyfed.models import build, describe
from polyfed.registry import MODELS


def main() -> None:
    """Measure every architecture asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", metavar="A,B,...", help="registered architectures [all but those of 152 layers]")
    parser.add_argument("--batch-sizes", default="10,64", metavar="A,B,...", help="[10,64]")
    parser.add_argument("--samples", type=int, default=256, help="of an epoch [256]")
    parser.add_argument(
        "--repeats", type=int, default=5, help="epochs of either layout, of which the median counts [5]"
    )
    asked = parser.parse_args()
    homes = {row["name"]: row for row in describe()}
    names = asked.models.split(",") if asked.models else [name for name in MODELS if "152" not in name]
    torch.set_num_threads(1)
    rows = []
    try:
        for name in names:
            home = (
                homes[name] if name in homes and homes[name]["in_shape"] else {"in_shape": (3, 32, 32), "classes": 10}
            )
            for batch in map(int, asked.batch_sizes.split(",")):
                rows.append(measured(name, home["in_shape"], home["classes"], batch, asked.samples, asked.repeats))
                print(json.dumps(rows[-1]), flush=True)
    except PolyfedError as error:
        parser.exit(error.exit_status, f"{error}\n")
    print(f"\n{'architecture':24}{'batch':>6}{'first':>9}{'last':>9}{'ratio':>7}  registered")
    for r in rows:
        figures = f"{r['batch_size']:6}{r['channels_first']:9.0f}{r['channels_last']:9.0f}{r['ratio']:7.2f}"
        print(f"{r['model']:24}{figures}  {r['registered']}")


def measured(
    name: str, shape: tuple[int, ...], classes: int, batch: int, samples: int, repeats: int
) -> dict[str, object]:
    """Microseconds per sample with both layouts."""
    torch.manual_seed(0)
    x, y = torch.randn(samples, *shape), torch.randint(classes, (samples,))
    first, last = build(name, shape, classes), build(name, shape, classes)
    kernels = [p for p in first.parameters() if p.dim() == 4 and p.shape[2:].numel() > 1]
    is_last = any(kernel.stride(1) == 1 for kernel in kernels)
    first.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    last.load_state_dict(first.state_dict())
    epochs = {"channels_first": _epoch(first, x, y, batch), "channels_last": _epoch(last, x, y, batch)}
    taken: dict[str, list[float]] = {layout: [] for layout in epochs}
    for turn in range(repeats + 1):
        for layout, epoch in epochs.items():
            began = time.process_time()
            epoch()
            if turn:  # the first is warming up
                taken[layout].append((time.process_time() - began) / samples * 1e6)
    middle = {layout: median(times) for layout, times in taken.items()}
    ratio = middle["channels_last"] / middle["channels_first"]
    registered = "channels_last" if is_last else "channels_first"
    return {"model": name, "batch_size": batch, **middle, "ratio": ratio, "registered": registered}


def _epoch(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> Callable[[], None]:
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, fused=True)

    def epoch() -> None:
        for rows in torch.randperm(len(x)).split(batch):
            grads = torch.autograd.grad(functional.cross_entropy(model(x[rows]), y[rows]), parameters)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            optimizer.step()

    return epoch


if __name__ == "__main__":
    main()
