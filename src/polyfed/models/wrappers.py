"""What PyTorch can put around a network, and polyfed, which runs networks in its own way, does not take."""

from __future__ import annotations

from torch import nn

from polyfed.errors import ConfigError

_AROUND = {  # class -> what it has made of the network
    "OptimizedModule": "in torch.compile",
    "DataParallel": "in DataParallel",
    "DistributedDataParallel": "in DistributedDataParallel",
    "AveragedModel": "in AveragedModel",
    "FullyShardedDataParallel": "that FSDP has sharded",
    "FSDPModule": "that FSDP has sharded",
    "ScriptModule": "that is a program of TorchScript",
}


def check_plain(network: nn.Module, who: str = "") -> None:
    """Whether a network and all its layers are plain modules, whose tensors have their own names.

    Args:
        who: begins messages.

    Raises:
        ConfigError: one is not.
    """
    kinds = {kind.__name__ for layer in network.modules() for kind in type(layer).__mro__}
    for kind, found in _AROUND.items():
        if kind in kinds:
            raise ConfigError(
                f"{who}expected a plain network in Python, got one {found}; give the network itself, as it was before"
            )
