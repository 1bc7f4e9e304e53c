"""What PyTorch can put around a network, and polyfed does not take: it runs networks in its own way."""

from __future__ import annotations

from torch import nn

from polyfed.errors import ConfigError

_AROUND = {  # names of classes -> what they are of; some of them few installs of PyTorch have
    "OptimizedModule": "torch.compile",
    "DataParallel": "DataParallel",
    "DistributedDataParallel": "DistributedDataParallel",
    "AveragedModel": "AveragedModel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP",
    "ScriptModule": "TorchScript",
}


def refuse_wrapped(network: nn.Module, who: str = "") -> None:
    """Refuse a network that is, or has a layer that is, in torch.compile, DataParallel, TorchScript or their like.

    Args:
        who: begins the message.
    """
    kinds = {kind.__name__ for layer in network.modules() for kind in type(layer).__mro__}
    if found := [what for name, what in _AROUND.items() if name in kinds]:
        raise ConfigError(
            f"{who}expected a network in Python, whole in one process, got one in {found[0]}; give the network itself"
        )
