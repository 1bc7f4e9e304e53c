"""The plain convolutional networks of FedGH and FedHeNN, and five small ones for the bundled 8 x 8 digits.

All are conv blocks (conv, ReLU, 2 x 2 max pool), flatten, hidden layers (Linear, ReLU), and a linear head. Cuts:
extractor = the first block, intermediate = the rest up to the last hidden ReLU, head = the last Linear. No activation
on the logits. Layer sizes follow from the image size and the class count.

FedGH, Table 2 (Yi et al., ACM MM 2023, doi:10.1145/3581783.3611781), 3 x 32 x 32; conv 5 x 5 without padding, D = 500,
s_in = 16 x 14 x 14. Sizes are float32, 10 classes:

    name        conv    fc1   10 classes   100 classes   MiB
    fedgh-cnn1  16, 32  2000  2 621 558    2 666 648     10.0005
    fedgh-cnn2  16, 16  2000  1 815 142    1 860 232     6.9242
    fedgh-cnn3  16, 32  1000  1 320 558    1 365 648     5.0375
    fedgh-cnn4  16, 32  800   1 060 358    1 105 448     4.0449  (the paper's 3.81 fits no reading of its row)
    fedgh-cnn5  16, 32  500   670 058      715 148       2.5561

FedHeNN (Makhija et al., ICML 2022), 3 x 32 x 32; conv 5 x 5 without padding (H5: 3 x 3, padding 1). The ends of the set
H1..H5 are the paper's, the middle three take the code's sizes. From 100 classes on H3 and H4 are wider, as the code's
network for CIFAR-100 is; the others only get the larger head:

    name              10 classes                  D     parameters   100 classes
    fedhenn-h1        conv 32                     6272  65 162       629 732, the same otherwise
    fedhenn-h2        conv 32, FC 64              64    404 554      410 404, the same otherwise
    fedhenn-h3        conv 64, 64, FC 120         120   300 658      1 054 948, conv 64, 128, FC 256, D = 256
    fedhenn-h4        conv 64, 64, FC 120-64      64    307 842      1 075 044, conv 64, 128, FC 256-128, D = 128
    fedhenn-h5        conv 64, 128, 128, 256-128  128   781 962      793 572, the same otherwise
    fedhenn-cifar10   conv 64, 64, FC 120-64      64    307 842      313 692, the same otherwise
    fedhenn-cifar100  conv 64, 128, FC 256-128    128   1 063 434    1 075 044, the same otherwise

Digits, 1 x 8 x 8, 10 classes; conv 3 x 3, padding 1, the same first block of 16 (s_in = 16 x 4 x 4), D = 64. They
differ in the intermediate part, in depth and width (a bar marks a block without pooling):

    name         after the first block     parameters
    digits-cnn1  FC 64                     17 258
    digits-cnn2  FC 128-64                 41 962
    digits-cnn3  conv 32, FC 64            13 706
    digits-cnn4  conv 32|, conv 32, FC 64  22 954
    digits-cnn5  conv 32, conv 64|, FC 64  40 394
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from polyfed.errors import ConfigError
from polyfed.models.split import SequentialSplit, SplitModel, channels_last, check_request

ImageShape = tuple[int, int, int]  # channels, height, width
Builder = Callable[[ImageShape, int], SplitModel]


def _cnn(
    name: str,
    in_shape: ImageShape,
    classes: int,
    convs: Sequence[int],
    hidden: Sequence[int],
    kernel: int = 5,
    padding: int = 0,
    unpooled: Sequence[int] = (),
) -> SplitModel:
    """Blocks of `convs` filters (`unpooled`: indices of those without pooling), then `hidden` layers, then the head."""
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


def _builder(
    name: str, about: str, convs: Sequence[int], hidden: Sequence[int], many: Sequence[Sequence[int]] = (), **more: Any
) -> Builder:
    """`about` is shown by `polyfed models`; many: convs and hidden layers from 100 classes on, where they differ."""

    def build(in_shape: ImageShape, classes: int) -> SplitModel:
        filters, units = many if many and classes >= _MANY_CLASSES else (convs, hidden)
        return _cnn(name, in_shape, classes, filters, units, **more)

    build.__name__ = name.replace("-", "_")
    build.__doc__ = about
    return build


_MANY_CLASSES = 100  # from here on FedHeNN's H3 and H4 take the sizes of its CIFAR-100 networks
_SMALL: dict[str, Any] = {"kernel": 3, "padding": 1}

fedgh_cnn1 = _builder("fedgh-cnn1", "FedGH's CNN-1: conv 16, 32, FC 2000-500.", (16, 32), (2000, 500))
fedgh_cnn2 = _builder("fedgh-cnn2", "FedGH's CNN-2: conv 16, 16, FC 2000-500.", (16, 16), (2000, 500))
fedgh_cnn3 = _builder("fedgh-cnn3", "FedGH's CNN-3: conv 16, 32, FC 1000-500.", (16, 32), (1000, 500))
fedgh_cnn4 = _builder("fedgh-cnn4", "FedGH's CNN-4: conv 16, 32, FC 800-500.", (16, 32), (800, 500))
fedgh_cnn5 = _builder("fedgh-cnn5", "FedGH's CNN-5: conv 16, 32, FC 500-500.", (16, 32), (500, 500))

fedhenn_h1 = _builder(
    "fedhenn-h1", "FedHeNN's smallest: conv 32 and the head; its representation is the flattened block.", (32,), ()
)
fedhenn_h2 = _builder("fedhenn-h2", "FedHeNN's H2: conv 32, FC 64.", (32,), (64,))
fedhenn_h3 = _builder(
    "fedhenn-h3",
    "FedHeNN's H3: conv 64, 64, FC 120; from 100 classes on conv 64, 128, FC 256.",
    (64, 64),
    (120,),
    many=((64, 128), (256,)),
)
fedhenn_h4 = _builder(
    "fedhenn-h4",
    "FedHeNN's H4: conv 64, 64, FC 120-64; from 100 classes on conv 64, 128, FC 256-128.",
    (64, 64),
    (120, 64),
    many=((64, 128), (256, 128)),
)
fedhenn_h5 = _builder(
    "fedhenn-h5",
    "FedHeNN's largest: conv 64, 128, 128 (3 x 3, padding 1), FC 256-128.",
    (64, 128, 128),
    (256, 128),
    **_SMALL,
)
fedhenn_cifar10 = _builder(
    "fedhenn-cifar10", "FedHeNN's homogeneous network for CIFAR-10: conv 64, 64, FC 120-64.", (64, 64), (120, 64)
)
fedhenn_cifar100 = _builder(
    "fedhenn-cifar100", "FedHeNN's homogeneous network for CIFAR-100: conv 64, 128, FC 256-128.", (64, 128), (256, 128)
)

digits_cnn1 = _builder("digits-cnn1", "One block, FC 64.", (16,), (64,), **_SMALL)
digits_cnn2 = _builder("digits-cnn2", "One block, FC 128-64.", (16,), (128, 64), **_SMALL)
digits_cnn3 = _builder("digits-cnn3", "Two blocks (16, 32), FC 64.", (16, 32), (64,), **_SMALL)
digits_cnn4 = _builder(
    "digits-cnn4", "Three blocks (16, 32 without pooling, 32), FC 64.", (16, 32, 32), (64,), unpooled=(1,), **_SMALL
)
digits_cnn5 = _builder(
    "digits-cnn5", "Three blocks (16, 32, 64 without pooling), FC 64.", (16, 32, 64), (64,), unpooled=(2,), **_SMALL
)
