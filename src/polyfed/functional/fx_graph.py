"""Steps of a forward that torch.fx has recorded, run on a module."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn


class GraphSegment:
    """Runs recorded steps on a module: names in them are looked up on the module at the time. Holds no tensors.

    Args:
        nodes: the steps, in order. start: in whose place the input stands. result: the node that is wanted, or a tuple
            of nodes.

    >>> import torch
    >>> graph = fx.Tracer().trace(nn.ReLU())  # x -> relu(x)
    >>> x, relu, _ = graph.nodes
    >>> GraphSegment([relu], x, (x, relu))(nn.ReLU(), torch.tensor([-1.0]))
    (tensor([-1.]), tensor([0.]))
    """

    def __init__(self, nodes: Sequence[fx.Node], start: fx.Node, result: fx.Node | tuple[fx.Node, ...]) -> None:
        self._start, self._result = start, result
        last = {needed: node for node in nodes for needed in node.all_input_nodes}
        last |= {node: node for node in nodes if node not in last}  # nobody needs its value
        results = result if isinstance(result, tuple) else (result,)
        for wanted in results:
            last.pop(wanted, None)
        spent: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
        for value, user in last.items():
            spent[user].append(value)
        self._steps = list(spent.items())

    def __call__(self, module: nn.Module, x: Tensor) -> Any:
        """The result, for `x` in place of the start."""
        values: dict[fx.Node, Any] = {self._start: x}
        for node, spent in self._steps:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            if node.op == "call_module":
                values[node] = module.get_submodule(target)(*args, **kwargs)
            elif node.op == "call_method":
                values[node] = getattr(args[0], target)(*args[1:], **kwargs)
            elif node.op == "call_function":
                values[node] = target(*args, **kwargs)
            else:  # get_attr; a recorded forward has no other kind
                values[node] = functools.reduce(getattr, target.split("."), module)
            for value in spent:
                del values[value]
        return fx.map_arg(self._result, values.__getitem__)
