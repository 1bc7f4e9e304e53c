"""Named groups of networks: those of HtFLlib (Zhang et al., KDD 2025, arXiv 2506.03954), in its order.

``models.architectures = "htfe-8"`` stands for the group's list, so that client k gets the (k mod A)th, as there.

    HtFLlib                       here
    HtFE-img-2 3 4 5 8 9          htfe-2 htfe-3 htfe-4 htfe-5 htfe-8 htfe-9
    HtM-img-10                    htm-10
    HtFE-img-8-HtC-img-4          htfe-8-htc-4
    Res34-HtC-img-4               res34-htc-4
    HtFE-sen-2 3 5 8              htfe-sen-2 htfe-sen-3 htfe-sen-5 htfe-sen-8
    HtFE-txt-2 4                  htfe-txt-2 htfe-txt-4

Heads are linear but in the two groups of HtC, which want ``models.feature_dim = 512``. Of HtFLlib's heads those of its
Vision Transformers have a hidden layer, and those of HtC end with a ReLU behind the scores, which is left out here.
GoogLeNet is without its auxiliary heads, as there.
"""

from __future__ import annotations

_CNN = "fedavg-cnn"
_GOOGLENET = "torchvision:googlenet"
_MOBILENET = "torchvision:mobilenet_v2"
_RESNET18, _RESNET34, *_DEEPER = (f"torchvision:resnet{depth}" for depth in (18, 34, 50, 101, 152))
_HTFE_8 = [_CNN, _GOOGLENET, _MOBILENET, _RESNET18, _RESNET34, *_DEEPER]
_HARCNNS = ["harcnn2-s1", "harcnn2-s2", "harcnn2-s3"]
_HEADS = ["", "#512", "#256", "#128"]

GROUPS: dict[str, list[str]] = {
    "htfe-2": [_CNN, _RESNET18],
    "htfe-3": ["resnet10", _RESNET18, _RESNET34],
    "htfe-4": [_CNN, _GOOGLENET, _MOBILENET, _RESNET18],
    "htfe-5": [_GOOGLENET, _MOBILENET, _RESNET18, _RESNET34, _DEEPER[0]],
    "htfe-8": _HTFE_8,
    "htfe-9": ["resnet4", "resnet6", "resnet8", "resnet10", _RESNET18, _RESNET34, *_DEEPER],
    "htm-10": [*_HTFE_8, "torchvision:vit_b_16", "torchvision:vit_b_32"],
    "htfe-8-htc-4": [name + head for name, head in zip(_HTFE_8, 2 * _HEADS, strict=True)],
    "res34-htc-4": [_RESNET34 + head for head in _HEADS],
    "htfe-sen-2": _HARCNNS[:2],
    "htfe-sen-3": _HARCNNS,
    "htfe-sen-5": [*_HARCNNS, "harcnn1-s1", "harcnn3-s1"],
    "htfe-sen-8": [*_HARCNNS, "harcnn1-s1", "harcnn1-s2", "harcnn1-s3", "harcnn3-s1", "harcnn3-s2"],
    "htfe-txt-2": ["fasttext", "text-linear"],
    "htfe-txt-4": ["fasttext", "text-linear", "text-lstm", "text-bilstm"],
}
