"""Recorded steps, run on a module."""

from __future__ import annotations

import copy
import weakref

import torch
from torch import fx, nn

from polyfed.functional.fx_graph import GraphSegment


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x) * self.scale
        h.add_(1)  # nobody takes what this gives, and yet it counts
        return h.flatten(1) - h.mean()


def test_all_kinds_of_steps_run_in_order():
    net, x = Net(), torch.randn(5, 3)
    start, *nodes, output = fx.Tracer().trace(net).nodes
    assert {node.op for node in nodes} == {"call_module", "call_function", "call_method", "get_attr"}
    assert torch.equal(GraphSegment(nodes, start, output.args[0])(net, x), net(x))


def test_several_results_and_parts_and_another_module_of_the_same_names():
    net, x = Net(), torch.randn(5, 3)
    start, *nodes, output = fx.Tracer().trace(net).nodes
    hidden = next(node for node in nodes if node.target == "inner.0")
    steps = GraphSegment(nodes, start, (start, hidden, output.args[0]))
    for one in (net, copy.deepcopy(net).requires_grad_(False), Net()):
        found = steps(one, x)
        assert all(torch.equal(a, b) for a, b in zip(found, (x, one.inner[0](x), one(x)), strict=True))
    rest = nodes[nodes.index(hidden) + 1 :]
    assert torch.equal(GraphSegment(rest, hidden, output.args[0])(net, net.inner[0](x)), net(x))
    assert GraphSegment([], start, start)(net, x) is x


def test_what_is_needed_no_more_is_let_go():
    seen = []

    class Probe(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len([t for t in alive if t() is not None]))
            return x + 1

    alive: list[weakref.ref[torch.Tensor]] = []
    net = nn.Sequential(*(Probe() for _ in range(6)))
    for layer in net:
        layer.register_forward_hook(lambda m, args, out: alive.append(weakref.ref(out)))

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, Probe)

    start, *nodes, output = Leaves().trace(net).nodes
    GraphSegment(nodes, start, output.args[0])(net, torch.zeros(1))
    assert seen == [0, 1, 1, 1, 1, 1]
