"""The methods, one file each; ``polyfed.methods.FedGH`` imports the file on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyfed.errors import suggest
from polyfed.registry import METHODS

if TYPE_CHECKING:
    from polyfed.methods.depthfl import DepthFL
    from polyfed.methods.fd import FD
    from polyfed.methods.fedavg import FedAvg
    from polyfed.methods.feddf import FedDF
    from polyfed.methods.feddpa import FedDPA
    from polyfed.methods.fedet import FedET
    from polyfed.methods.fedfomo import FedFomo
    from polyfed.methods.fedgen import FedGen
    from polyfed.methods.fedgh import FedGH
    from polyfed.methods.fedhenn import FedHeNN
    from polyfed.methods.fedin import FedIN
    from polyfed.methods.fedkd import FedKD
    from polyfed.methods.fedkwaz import FedKWAZ
    from polyfed.methods.fedl2g import FedL2G
    from polyfed.methods.fedlora import FedLoRA
    from polyfed.methods.fedmd import FedMD
    from polyfed.methods.fedmrl import FedMRL
    from polyfed.methods.fednova import FedNova
    from polyfed.methods.fedopt import FedOpt
    from polyfed.methods.fedorgp import FedORGP
    from polyfed.methods.fedproto import FedProto
    from polyfed.methods.fedprox import FedProx
    from polyfed.methods.fedre import FedRE
    from polyfed.methods.fedrep import FedRep
    from polyfed.methods.fedrolex import FedRolex
    from polyfed.methods.fedsa import FedSA
    from polyfed.methods.fedsaf import FedSAF
    from polyfed.methods.fedselect import FedSelect
    from polyfed.methods.fedtgp import FedTGP
    from polyfed.methods.fiarse import FIARSE
    from polyfed.methods.fjord import FjORD
    from polyfed.methods.fml import FML
    from polyfed.methods.heterofl import HeteroFL
    from polyfed.methods.inclusivefl import InclusiveFL
    from polyfed.methods.incoavg import InCoAvg
    from polyfed.methods.lgfedavg import LGFedAvg
    from polyfed.methods.local import Local
    from polyfed.methods.local_mutual import LocalMutual
    from polyfed.methods.moon import MOON
    from polyfed.methods.scaffold import SCAFFOLD
    from polyfed.methods.scalefl import ScaleFL

__all__ = [
    "FD",
    "FIARSE",
    "FML",
    "MOON",
    "SCAFFOLD",
    "DepthFL",
    "FedAvg",
    "FedDF",
    "FedDPA",
    "FedET",
    "FedFomo",
    "FedGH",
    "FedGen",
    "FedHeNN",
    "FedIN",
    "FedKD",
    "FedKWAZ",
    "FedL2G",
    "FedLoRA",
    "FedMD",
    "FedMRL",
    "FedNova",
    "FedORGP",
    "FedOpt",
    "FedProto",
    "FedProx",
    "FedRE",
    "FedRep",
    "FedRolex",
    "FedSA",
    "FedSAF",
    "FedSelect",
    "FedTGP",
    "FjORD",
    "HeteroFL",
    "InCoAvg",
    "InclusiveFL",
    "LGFedAvg",
    "Local",
    "LocalMutual",
    "ScaleFL",
]

_SPELLED = {"LocalMutual": "local-mutual"}  # registered names that are not the class's in lower case


def __getattr__(name: str) -> Any:
    if name not in __all__:
        like = next((known for known in __all__ if known.lower() == name.lower()), None)
        near = suggest(name, __all__) if like is None else f"; did you mean '{like}'?"
        raise AttributeError(f"polyfed.methods has no method class '{name}'{near}")
    return METHODS[_SPELLED.get(name, name.lower())]


def __dir__() -> list[str]:
    return sorted(__all__)
