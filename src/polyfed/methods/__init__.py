"""The methods, one file each; ``polyfed.methods.FedGH`` imports the file on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyfed.errors import suggest
from polyfed.registry import METHODS

if TYPE_CHECKING:
    from polyfed.methods.closed_form import ClosedForm as ClosedForm
    from polyfed.methods.depthfl import DepthFL as DepthFL
    from polyfed.methods.fd import FD as FD
    from polyfed.methods.fedavg import FedAvg as FedAvg
    from polyfed.methods.feddf import FedDF as FedDF
    from polyfed.methods.feddpa import FedDPA as FedDPA
    from polyfed.methods.fedet import FedET as FedET
    from polyfed.methods.fedfomo import FedFomo as FedFomo
    from polyfed.methods.fedgen import FedGen as FedGen
    from polyfed.methods.fedgh import FedGH as FedGH
    from polyfed.methods.fedhenn import FedHeNN as FedHeNN
    from polyfed.methods.fedhenn_homogeneous import HomogeneousFedHeNN as HomogeneousFedHeNN
    from polyfed.methods.fedin import FedIN as FedIN
    from polyfed.methods.fedkd import FedKD as FedKD
    from polyfed.methods.fedkwaz import FedKWAZ as FedKWAZ
    from polyfed.methods.fedl2g import FedL2G as FedL2G
    from polyfed.methods.fedlora import FedLoRA as FedLoRA
    from polyfed.methods.fedmd import FedMD as FedMD
    from polyfed.methods.fedmrl import FedMRL as FedMRL
    from polyfed.methods.fednova import FedNova as FedNova
    from polyfed.methods.fedopt import FedOpt as FedOpt
    from polyfed.methods.fedorgp import FedORGP as FedORGP
    from polyfed.methods.fedproto import FedProto as FedProto
    from polyfed.methods.fedprox import FedProx as FedProx
    from polyfed.methods.fedre import FedRE as FedRE
    from polyfed.methods.fedrep import FedRep as FedRep
    from polyfed.methods.fedrolex import FedRolex as FedRolex
    from polyfed.methods.fedsa import FedSA as FedSA
    from polyfed.methods.fedselect import FedSelect as FedSelect
    from polyfed.methods.fedtgp import FedTGP as FedTGP
    from polyfed.methods.fiarse import FIARSE as FIARSE
    from polyfed.methods.fjord import FjORD as FjORD
    from polyfed.methods.fml import FML as FML
    from polyfed.methods.heterofl import HeteroFL as HeteroFL
    from polyfed.methods.inclusivefl import InclusiveFL as InclusiveFL
    from polyfed.methods.incoavg import InCoAvg as InCoAvg
    from polyfed.methods.lgfedavg import LGFedAvg as LGFedAvg
    from polyfed.methods.local import Local as Local
    from polyfed.methods.moon import MOON as MOON
    from polyfed.methods.own_plus_common import OwnPlusCommon as OwnPlusCommon
    from polyfed.methods.protonorm import ProtoNorm as ProtoNorm
    from polyfed.methods.scaffold import SCAFFOLD as SCAFFOLD
    from polyfed.methods.scalefl import ScaleFL as ScaleFL

_NAMES = {  # class -> registered name; when this is imported, no entry has been yet
    entry.partition(":")[2]: name
    for name, entry in METHODS.entries.items()
    if isinstance(entry, str) and entry.startswith(f"{__name__}.")
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        like = next((known for known in _NAMES if known.lower() == name.lower()), None)
        near = suggest(name, _NAMES) if like is None else f"; did you mean '{like}'?"
        raise AttributeError(f"polyfed.methods has no method class '{name}'{near}")
    return METHODS[_NAMES[name]]


def __dir__() -> list[str]:
    return sorted(_NAMES)
