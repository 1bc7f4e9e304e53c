"""What is averaged with whom, where networks differ: told before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from polyfed.core.method import Method
from polyfed.core.modules import float_state
from polyfed.models.split import Part, SplitModel

__all__ = ["averaged", "listed", "only_heads_shared"]

_NAMED = 2  # tensors that are told by name
_SHOWN = 4  # architectures, or sets of tensors, that are told one by one


def averaged(method: Method, owners: Sequence[str], templates: Mapping[str, nn.Module]) -> str:
    """One line: whose networks a method averages whole, and what across architectures.

    Args:
        method: has a hyperparameter `aggregation`. owners: every client's architecture.
        templates: architecture -> its network.

    Example: ``averaged: 5 clients of cnn1 whole, 5 of mlp whole; head.weight (640 weights) across all 10``
    """
    aggregation = getattr(method, "aggregation", "same-shape")
    counts = Counter(owners)
    parts = method.requirements.shared_parts
    what = "whole" if parts is None else "in " + " and ".join(parts)
    each = [f"{count} of {architecture} {what}" for architecture, count in counts.items()]
    if len(each) > _SHOWN:
        each = [f"the clients of each of the {len(each)} architectures {what}"]
    else:
        each[0] = each[0].replace(" of", " client of" if counts[owners[0]] == 1 else " clients of", 1)
    told = ["averaged: " + ", ".join(each)]
    if aggregation != "same-shape":
        groups = _common({architecture: templates[architecture] for architecture in counts}, parts)
        for architectures, tensors in list(groups.items())[:_SHOWN]:
            number = sum(counts[architecture] for architecture in architectures)
            who = f"all {number}" if number == len(owners) else f"{number} of {', '.join(architectures)}"
            told.append(f"{listed(tensors)} across {who}")
        if len(groups) > _SHOWN:
            told.append(f"{len(groups) - _SHOWN} further sets of tensors across others")
        if not groups and len(counts) > 1:
            told.append("nothing across architectures")
    return "; ".join(told)


def only_heads_shared(templates: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """The architectures that have something in common with others, and nothing but tensors of the head: these, by name.

    Args:
        templates: architecture -> its network, in which tensors of one name have one shape.
    """
    found: dict[str, dict[str, Tensor]] = {}
    common = _common(templates, None)
    for architecture, module in templates.items():
        mine = {name: t for owners, tensors in common.items() if architecture in owners for name, t in tensors.items()}
        if mine and mine.keys() <= _head(module):
            found[architecture] = mine
    return found


def listed(tensors: Mapping[str, Tensor]) -> str:
    """The names of a few tensors, or how many there are; and of how many weights."""
    names = ", ".join(tensors) if len(tensors) <= _NAMED else f"{len(tensors)} tensors"
    return f"{names} ({sum(tensor.numel() for tensor in tensors.values()):,} weights)"


def _common(
    templates: Mapping[str, nn.Module], parts: Collection[Part] | None
) -> dict[tuple[str, ...], dict[str, Tensor]]:
    """Architectures, at least two, -> what all of these and no others have; most weights first."""
    held = {architecture: float_state(module, parts=parts) for architecture, module in templates.items()}
    groups: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for name, tensor in {name: t for tensors in held.values() for name, t in tensors.items()}.items():
        owners = tuple(architecture for architecture, tensors in held.items() if name in tensors)
        if len(owners) > 1:
            groups.setdefault(owners, {})[name] = tensor
    return dict(sorted(groups.items(), key=lambda group: -sum(t.numel() for t in group[1].values())))


def _head(module: nn.Module) -> set[str]:
    """Names of the head's tensors; of a network that is not split, of its last layer's."""
    names = list(float_state(module))
    if isinstance(module, SplitModel):
        return {name for name in names if module.part_of(name) == "head"}
    last = names[-1].rpartition(".")[0] if names else ""
    return {name for name in names if name.rpartition(".")[0] == last}
