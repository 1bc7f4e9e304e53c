"""Passes of clients' networks over public inputs at the server: by itself, or in the workers of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from polyfed.core import inference
from polyfed.core.client import Prepare, PublicData
from polyfed.core.message import Group
from polyfed.core.server import PublicOutputs, PublicPass, Server
from polyfed.errors import RunError


def public_outputs(
    server: Server, models: Mapping[int, Group], outputs: PublicOutputs, rows: Tensor | None = None
) -> list[Tensor]:
    """The outputs of clients' networks on public inputs, on the CPU, in the order of `models`.

    The same bits wherever they are computed. All are in memory at the same time.

    Args:
        models: client number -> weights. outputs, rows: as in `PublicPass`.
    """
    passes = [PublicPass(i, weights, outputs, rows, server.round) for i, weights in models.items()]
    if server.run_passes is not None:
        return server.run_passes(passes)
    return [_run_here(server, each) for each in passes]


def _run_here(server: Server, asked: PublicPass) -> Tensor:
    model = server.model(server.clients[asked.client_id].architecture, asked.weights)
    return run_pass(asked, model, server.public, server.prepare)


def run_pass(asked: PublicPass, model: nn.Module, public: PublicData | None, prepare: Prepare) -> Tensor:
    """The outputs of a pass, on the CPU.

    Args:
        model: holds the weights. prepare: converts the clients' own stored inputs to model inputs.
    """
    if public is None:
        raise RunError("expected data that everybody may see, got none")
    is_scores = asked.outputs == "scores"
    function: Callable[[Tensor], Tensor] = model if is_scores else model.represent  # type: ignore[assignment]
    convert = public.prepare if is_scores else prepare
    if asked.rows is None:
        return inference.map_batches(function, model, public.samples, convert).cpu()
    device = next(iter(model.parameters())).device
    held = public.samples.at(device).x

    def load(rows: Tensor) -> Tensor:
        return convert(held[rows.to(held.device)].to(device))

    return inference.map_batches(function, model, asked.rows, load).cpu()
