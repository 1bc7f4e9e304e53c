"""Names to methods, models, data sets and partitions. Knows where things live, imports them only when asked.

Nothing heavy is imported here, so that ``polyfed --help`` stays quick: an entry is a ``"module:attribute"`` string,
resolved on first use, or an object registered by the user.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from polyfed.errors import RequestError
from polyfed.errors import nearest as nearest


def imported(what: str, name: str) -> Any:
    """The object of the user's that is called ``"package.module:attribute"``; `what` it is, for the message.

    Raises:
        RequestError: it cannot be imported, for whatever reason.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's code
        said = str(error).strip().splitlines()
        reason = ": ".join([type(error).__name__, *said[:1]])
        raise RequestError(
            f"cannot import {what} '{name}': {reason}; expected 'package.module:function', importable from here "
            "(is its folder on PYTHONPATH?)"
        ) from error


class Registry(Mapping[str, Any]):
    """A named collection. ``registry["name"]`` imports and returns the object; unknown names suggest the nearest.

    Args:
        kind: what the entries are, in the singular, for messages ("method").
        entries: name -> ``"module:attribute"``.
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = dict(entries)

    def __getitem__(self, name: str) -> Any:
        if name not in self._entries:
            raise RequestError(f"unknown {self.kind} '{name}'{nearest(str(name), self._entries)}")
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(importlib.import_module(module), attribute)
            self._entries[name] = entry
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def add(self, name: str, entry: Any) -> None:
        """Register an object of your own, or a ``"module:attribute"`` string. A name is taken once.

        Raises:
            RequestError: the name is taken by something else.
        """
        if name in self._entries and self._entries[name] is not entry:
            raise RequestError(f"the {self.kind} name '{name}' is taken; choose another")
        self._entries[name] = entry


METHODS = Registry(
    "method",
    {
        "local": "polyfed.methods.local:Local",
        "fedavg": "polyfed.methods.fedavg:FedAvg",
        "fd": "polyfed.methods.fd:FD",
        "feddpa": "polyfed.methods.feddpa:FedDPA",
        "fedet": "polyfed.methods.fedet:FedET",
        "fedfomo": "polyfed.methods.fedfomo:FedFomo",
        "fedgen": "polyfed.methods.fedgen:FedGen",
        "fedgh": "polyfed.methods.fedgh:FedGH",
        "fedhenn": "polyfed.methods.fedhenn:FedHeNN",
        "fedin": "polyfed.methods.fedin:FedIN",
        "fedl2g": "polyfed.methods.fedl2g:FedL2G",
        "fedkd": "polyfed.methods.fedkd:FedKD",
        "fedmd": "polyfed.methods.fedmd:FedMD",
        "fedmrl": "polyfed.methods.fedmrl:FedMRL",
        "fednova": "polyfed.methods.fednova:FedNova",
        "fedproto": "polyfed.methods.fedproto:FedProto",
        "fedprox": "polyfed.methods.fedprox:FedProx",
        "fedrep": "polyfed.methods.fedrep:FedRep",
        "fedrolex": "polyfed.methods.fedrolex:FedRolex",
        "fedselect": "polyfed.methods.fedselect:FedSelect",
        "fedtgp": "polyfed.methods.fedtgp:FedTGP",
        "fjord": "polyfed.methods.fjord:FjORD",
        "fml": "polyfed.methods.fml:FML",
        "heterofl": "polyfed.methods.heterofl:HeteroFL",
        "inclusivefl": "polyfed.methods.inclusivefl:InclusiveFL",
        "incoavg": "polyfed.methods.incoavg:InCoAvg",
        "lgfedavg": "polyfed.methods.lgfedavg:LGFedAvg",
        "moon": "polyfed.methods.moon:MOON",
        "scaffold": "polyfed.methods.scaffold:SCAFFOLD",
        "scalefl": "polyfed.methods.scalefl:ScaleFL",
    },
)

_CNN, _RESNET, _VIT = "polyfed.models.cnn", "polyfed.models.resnet", "polyfed.models.vit"
_LSTM = "polyfed.models.lstm"
MODELS = Registry(
    "model",
    {
        **{f"fedgh-cnn{i}": f"{_CNN}:fedgh_cnn{i}" for i in range(1, 6)},
        **{f"fedhenn-h{i}": f"{_CNN}:fedhenn_h{i}" for i in range(1, 6)},
        "fedhenn-cifar10": f"{_CNN}:fedhenn_cifar10",
        "fedhenn-cifar100": f"{_CNN}:fedhenn_cifar100",
        **{f"fedhenn-lstm{i}": f"{_LSTM}:fedhenn_lstm{i}" for i in (1, 2)},
        **{f"digits-cnn{i}": f"{_CNN}:digits_cnn{i}" for i in range(1, 6)},
        "mlp-64-32": "polyfed.models.mlp:mlp_64_32",
        "mlp-64-64-32": "polyfed.models.mlp:mlp_64_64_32",
        **{f"resnet{d}": f"{_RESNET}:resnet{d}" for d in (10, 14, 18, 22, 26)},
        **{f"resnet{d}-cifar": f"{_RESNET}:resnet{d}_cifar" for d in (10, 14, 18, 22, 26)},
        **{f"resnet{d}-half": f"{_RESNET}:resnet{d}_half" for d in (10, 14, 18, 22, 26)},
        "resnet152-preact": f"{_RESNET}:resnet152_preact",
        "resnet152-preact-1000": f"{_RESNET}:resnet152_preact_1000",
        **{f"vit-s{d}": f"{_VIT}:vit_s{d}" for d in (8, 9, 10, 11, 12)},
        **{f"vit-s{d}-half": f"{_VIT}:vit_s{d}_half" for d in (8, 9, 10, 11, 12)},
    },
)

_SOURCES, _PARTITION = "polyfed.data.sources", "polyfed.data.partition"
DATASETS = Registry(
    "dataset",
    {
        name: f"{_SOURCES}:{name.replace('-', '_')}"
        for name in (
            "digits",
            "cifar10",
            "cifar100",
            "cifar100-coarse",
            "cinic10",
            "fashion_mnist",
            "svhn",
            "sentiment140",
            "parquet",
        )
    },
)
PARTITIONS = Registry(
    "partition", {name: f"{_PARTITION}:{name}" for name in ("iid", "dirichlet", "quantity", "classes", "natural")}
)
EXECUTORS = Registry("executor", {"flower-sim": "polyfed.deploy.simulation:FlowerSim"})  # beside the engine's own
TRACKERS = Registry(
    "tracker",
    {"console": "polyfed.track.console:Console", "tensorboard": "polyfed.track.tensorboard:TensorBoard"},
)
