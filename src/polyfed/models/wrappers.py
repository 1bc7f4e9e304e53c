"""The network itself, out of what PyTorch can put around it: its tensors then have its own names everywhere."""

from __future__ import annotations

import copy
import warnings

from torch import nn
from torch.optim.swa_utils import AveragedModel

from polyfed.errors import ConfigError

_AROUND = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)  # hold the network as `module`
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")  # classes of torch.distributed.fsdp, which few installs need


def unwrapped(network: nn.Module, who: str = "") -> nn.Module:
    """The network within torch.compile, DataParallel and their like; where a layer is in one, a copy without it.

    Args:
        who: begins messages.

    Raises:
        ConfigError: it is sharded over processes, or a program of TorchScript.
    """
    kinds = {kind.__name__ for layer in network.modules() for kind in type(layer).__mro__}
    if not kinds.isdisjoint((*_SHARDED, "ScriptModule")):
        what = "a program of TorchScript" if "ScriptModule" in kinds else "one that FSDP has sharded"
        raise ConfigError(
            f"{who}expected a network in Python, whole in one process, got {what}; give the network itself"
        )
    inner = network
    while (within := _within(inner)) is not None:
        inner = within
    if any(_within(layer) is not None for layer in inner.modules()):
        inner = copy.deepcopy(inner)
        names = [name for name, _ in inner.named_modules(remove_duplicate=False)]
        for name in sorted(names, reverse=True):  # the inner ones first
            while (within := _within(inner.get_submodule(name))) is not None:
                inner.set_submodule(name, within)
    if inner is not network:
        warnings.warn(
            f"{who}'{type(inner).__name__}' is taken out of torch.compile, DataParallel or the like, as polyfed runs "
            "networks in its own way; its tensors have the network's own names",
            stacklevel=2,
        )
    return inner


def _within(layer: nn.Module) -> nn.Module | None:
    if type(layer).__name__ == "OptimizedModule":
        return layer._modules["_orig_mod"]
    return layer._modules["module"] if isinstance(layer, _AROUND) else None
