"""The plain convolutional networks of FedGH, FedHeNN and HtFLlib, and five small ones for the bundled 8 x 8 digits.

All are conv blocks (conv, ReLU, 2 x 2 max pool), flatten, hidden layers (Linear, ReLU), and a linear head. Cuts:
extractor = the first block, intermediate = the rest up to the last hidden ReLU, head = the last Linear. No activation
on the logits. Layer sizes follow from the image size and the class count.

FedGH, Table 2 (Yi et al., ACM MM 2023, doi:10.1145/3581783.3611781), 3 x 32 x 32; conv 5 x 5 without padding, D = 500,
s_in = 16 x 14 x 14. In float32 and with 10 classes they
have 10.00, 6.92, 5.04, 4.04 (the paper's 3.81 fits no reading of its row) and 2.56 MiB.

FedHeNN (Makhija et al., ICML 2022), 3 x 32 x 32; conv 5 x 5 without padding (H5: 3 x 3, padding 1). The ends of the set
H1..H5 are the paper's, the middle three take the code's sizes. From 100 classes on H3 and H4 are wider, as the code's
network for CIFAR-100 is; the others only get the larger head.

HtFLlib's FedAvgCNN (Zhang et al., KDD 2025, arXiv 2506.03954): conv 5 x 5 without padding, D = 512.

Digits, 1 x 8 x 8, 10 classes; conv 3 x 3, padding 1, the same first block of 16 (s_in = 16 x 4 x 4), D = 64. They
differ in the intermediate part, in depth and width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from polyfed.errors import ConfigError
from polyfed.models.networks import Home, ImageShape, check_request, register
from polyfed.models.split import SequentialSplit, SplitModel, channels_last

_MANY_CLASSES = 100  # from here on FedHeNN's H3 and H4 take the sizes of its CIFAR-100 networks


def _cnn(
    name: str,
    in_shape: ImageShape,
    classes: int,
    convs: Sequence[int],
    hidden: Sequence[int],
    kernel: int = 5,
    padding: int = 0,
    unpooled: Sequence[int] = (),
    many: Sequence[Sequence[int]] = (),
) -> SplitModel:
    """Blocks of `convs` filters, then `hidden` layers, then the head.

    unpooled: indices of blocks without pooling. many: convs and hidden from 100 classes on, where they differ.
    """
    if many and classes >= _MANY_CLASSES:
        convs, hidden = many
    channels, height, width = check_request(name, in_shape, classes)

    def after_blocks(size: int) -> int:
        for i in range(len(convs)):
            size = size + 2 * padding - kernel + 1
            size = size if i in unpooled else size // 2
            if size < 1:
                return 0
        return size

    if after_blocks(min(height, width)) < 1:
        least = next(size for size in range(1, 1000) if after_blocks(size))
        raise ConfigError(
            f"{name} needs images of at least {least} x {least}, got {height} x {width}: "
            "resize the images, or choose a network for small ones (digits-cnn1..5 take 8 x 8)"
        )

    blocks: list[OrderedDict[str, nn.Module]] = []
    for i, filters in enumerate(convs, start=1):
        block: OrderedDict[str, nn.Module] = OrderedDict()
        block[f"conv{i}"] = nn.Conv2d(channels, filters, kernel, padding=padding)
        block[f"relu{i}"] = nn.ReLU()
        if i - 1 not in unpooled:
            block[f"pool{i}"] = nn.MaxPool2d(2)
        blocks.append(block)
        channels = filters
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for block in blocks[1:]:
        body.update(block)
    body["flatten"] = nn.Flatten()
    features = channels * after_blocks(height) * after_blocks(width)
    for i, units in enumerate(hidden, start=1):
        body[f"fc{i}"] = nn.Linear(features, units)
        body[f"fc{i}_relu"] = nn.ReLU()
        features = units
    model = SequentialSplit(
        nn.Sequential(blocks[0]), nn.Sequential(body), nn.Linear(features, classes), architecture=name
    )
    return channels_last(model)  # 0.75 to 1.01 of the time of channels first


def _spelled(convs: Sequence[int], hidden: Sequence[int]) -> str:
    layers = f", FC {'-'.join(map(str, hidden))}" if hidden else " and the head"
    return f"conv {', '.join(map(str, convs))}{layers}"


def _register(
    home: Home, name: str, convs: Sequence[int], hidden: Sequence[int], many: Sequence[Sequence[int]] = (), **more: Any
) -> None:
    about = f"{_spelled(convs, hidden)}{f'; from 100 classes on {_spelled(*many)}' if many else ''}."
    register(name, _cnn, home, about, convs=convs, hidden=hidden, many=many, **more)


_IMAGES = (3, 32, 32)
_FEDGH = Home(_IMAGES, 10, "FedGH, Yi et al., ACM MM 2023, doi:10.1145/3581783.3611781")
_FEDHENN = Home(_IMAGES, 10, "FedHeNN, Makhija et al., ICML 2022")
_HTFLLIB = Home(_IMAGES, 10, "HtFLlib, Zhang et al., KDD 2025, arXiv 2506.03954")
_DIGITS = Home((1, 8, 8), 10, "polyfed")
_SMALL: dict[str, Any] = {"kernel": 3, "padding": 1}

_register(_FEDGH, "fedgh-cnn1", (16, 32), (2000, 500))
_register(_FEDGH, "fedgh-cnn2", (16, 16), (2000, 500))
_register(_FEDGH, "fedgh-cnn3", (16, 32), (1000, 500))
_register(_FEDGH, "fedgh-cnn4", (16, 32), (800, 500))
_register(_FEDGH, "fedgh-cnn5", (16, 32), (500, 500))

_register(_FEDHENN, "fedhenn-h1", (32,), ())
_register(_FEDHENN, "fedhenn-h2", (32,), (64,))
_register(_FEDHENN, "fedhenn-h3", (64, 64), (120,), many=((64, 128), (256,)))
_register(_FEDHENN, "fedhenn-h4", (64, 64), (120, 64), many=((64, 128), (256, 128)))
_register(_FEDHENN, "fedhenn-h5", (64, 128, 128), (256, 128), **_SMALL)
_register(_FEDHENN, "fedhenn-cifar10", (64, 64), (120, 64))
_register(replace(_FEDHENN, classes=100), "fedhenn-cifar100", (64, 128), (256, 128))

_register(_HTFLLIB, "fedavg-cnn", (32, 64), (512,))

_register(_DIGITS, "digits-cnn1", (16,), (64,), **_SMALL)
_register(_DIGITS, "digits-cnn2", (16,), (128, 64), **_SMALL)
_register(_DIGITS, "digits-cnn3", (16, 32), (64,), **_SMALL)
_register(_DIGITS, "digits-cnn4", (16, 32, 32), (64,), unpooled=(1,), **_SMALL)
_register(_DIGITS, "digits-cnn5", (16, 32, 64), (64,), unpooled=(2,), **_SMALL)
