"""FedIN's five ResNets (He et al., arXiv 1512.03385, basic blocks of widths 64-128-256-512), four small ones with
GroupNorm, and a ResNet152 to be cut.

The five: extractor = stem (conv, BN, ReLU, max pool); intermediate = four stages, average pool, flatten; head =
Linear(512, C). Every tensor of a smaller model has the name and shape it has in ResNet26, so layers can be averaged by
name.

With 10 classes they have 12 288 023 parameters on average, the 12.28 M of FedIN (arXiv 2304.00759). Stem: 7 x 7 stride
2, 3 x 3 pool stride 2; with 32 x 32 images s_in is 64 x 8 x 8. `resnetNN_cifar` has a 3 x 3 stride 1 stem without pool
(s_in 64 x 32 x 32), `resnetNN_half` half as many channels everywhere, for machines that carry no more.
FedGH's network for CIFAR-100 (11 475 432 parameters) is ``build("resnet18-cifar", (3, 32, 32), 100, feature_dim=500)``.

`resnet4`, `resnet6` and `resnet8` are those of HtFLlib (Zhang et al., KDD 2025, arXiv 2506.03954): the ResNet10 above,
ended after its first, second or third stage.

`resnetNN_gn` are for small images and clients with few of them: that stem, three stages of a quarter of the width,
16-32-64, as He et al. have on CIFAR-10 (8 and 14 layers are their n = 1 and 2), and in place of BatchNorm, whose
statistics clients would have to agree on, GroupNorm (Wu and He, ECCV 2018) of four groups. s_in is 16 x 32 x 32, D is
64; with 10 classes they have 78 042, 152 026, 170 586 and 175 258 parameters.

`resnet152_preact` is the large network that HeteroFL and FedRolex cut by width (He et al., arXiv 1603.05027: bottleneck
blocks 3 8 36 3 with BatchNorm first, 3 x 3 stride 1 stem without pool; s_in 64 x 32 x 32, D = 2048). At the rates 1,
1/2, 1/4, 1/8, 1/16 it has 58 148 938, 14 578 730, 3 665 434, 926 738, 236 878 parameters with 10 classes and
60 177 448, 15 593 480, 4 173 304, 1 181 168, 364 588 with 1000. The mean of the latter, 16 297 997.6, is FedIN's 16.29
M: its networks have 1000 rows in the head whatever the number of classes, as `resnet152_preact_1000` has.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.errors import ConfigError
from polyfed.models.networks import Home, ImageShape, check_request, register
from polyfed.models.split import SequentialSplit, SplitModel, channels_last

BLOCKS = {10: (1, 1, 1, 1), 14: (1, 1, 2, 2), 18: (2, 2, 2, 2), 22: (2, 2, 3, 3), 26: (3, 3, 3, 3)}
WIDTHS = (64, 128, 256, 512)
_HALVES = tuple(width // 2 for width in WIDTHS)
_SMALL_BLOCKS = {8: (1, 1, 1), 10: (1, 1, 2), 12: (1, 2, 2), 14: (2, 2, 2)}
_SMALL_WIDTHS = (16, 32, 64)
_BLOCKS_152 = (3, 8, 36, 3)
_IMAGENET_CLASSES = 1000
_GROUPS = 4
_LEAST = 8  # pixels a side; below it the last stages would see nothing but padding


Norm = Callable[[int], nn.Module]  # number of channels -> layer


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut: relu(BN(conv(relu(BN(conv(x))))) + shortcut(x)).

    Args:
        c_in: channels in.
        c_out: channels out.
        stride: s, of the first convolution; the shortcut is a strided 1 x 1 convolution where a shape changes.
        norm: in the place of BatchNorm; its tensors keep the names.
    """

    def __init__(self, c_in: int, c_out: int, stride: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.bn1 = norm(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = norm(c_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            conv = nn.Conv2d(c_in, c_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, bn=norm(c_out)))

    def forward(self, x: Tensor) -> Tensor:
        """N x c_in x h x w -> N x c_out x h/s x w/s."""
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class PreActBottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, each behind BatchNorm and ReLU, around a shortcut.

    Args:
        c_in: channels in.
        planes: channels inside; four times as many go out.
        stride: s, of the 3 x 3 convolution; the shortcut is a strided 1 x 1 convolution of what the first BatchNorm
            and ReLU give where a shape changes, and what comes in otherwise.
    """

    def __init__(self, c_in: int, planes: int, stride: int) -> None:
        super().__init__()
        c_out = 4 * planes
        self.bn1 = nn.BatchNorm2d(c_in)
        self.conv1 = nn.Conv2d(c_in, planes, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, c_out, 1, bias=False)
        changes = stride != 1 or c_in != c_out
        self.shortcut = nn.Conv2d(c_in, c_out, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """N x c_in x h x w -> N x 4 planes x h/s x w/s."""
        first = F.relu(self.bn1(x))
        inner = self.conv2(F.relu(self.bn2(self.conv1(first))))
        out: Tensor = self.conv3(F.relu(self.bn3(inner)))
        return out + (x if self.shortcut is None else self.shortcut(first))


def _preact(name: str, in_shape: ImageShape, classes: int, least_classes: int = 1) -> SplitModel:
    channels = _image_channels(name, in_shape, classes)
    stem: OrderedDict[str, nn.Module] = OrderedDict(conv1=nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False))
    body: OrderedDict[str, nn.Module] = OrderedDict()
    c_in = WIDTHS[0]
    for s, (planes, count) in enumerate(zip(WIDTHS, _BLOCKS_152, strict=True), start=1):
        first = PreActBottleneck(c_in, planes, stride=1 if s == 1 else 2)
        c_in = 4 * planes
        body[f"stage{s}"] = nn.Sequential(first, *(PreActBottleneck(c_in, planes, stride=1) for _ in range(count - 1)))
    body["bn"] = nn.BatchNorm2d(c_in)
    body["relu"] = nn.ReLU()
    body["pool"] = nn.AdaptiveAvgPool2d(1)
    body["flatten"] = nn.Flatten()
    head = nn.Linear(c_in, max(classes, least_classes))
    return _initialized(SequentialSplit(nn.Sequential(stem), nn.Sequential(body), head, architecture=name))


def _image_channels(name: str, in_shape: ImageShape, classes: int) -> int:
    channels, height, width = check_request(name, in_shape, classes)
    if min(height, width) < _LEAST:
        raise ConfigError(f"{name} needs images of at least {_LEAST} x {_LEAST}, got {height} x {width}: resize them")
    return channels


def _initialized(model: SplitModel) -> SplitModel:
    for module in model.modules():  # BatchNorm starts at weight 1, bias 0 by itself
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _resnet(
    name: str,
    in_shape: ImageShape,
    classes: int,
    blocks: tuple[int, ...],
    cifar: bool,
    widths: tuple[int, ...],
    norm: Norm = nn.BatchNorm2d,
) -> SplitModel:
    channels = _image_channels(name, in_shape, classes)
    stem: OrderedDict[str, nn.Module] = OrderedDict()
    kernel, stride = (3, 1) if cifar else (7, 2)
    stem["conv1"] = nn.Conv2d(channels, widths[0], kernel, stride, padding=kernel // 2, bias=False)
    stem["bn1"] = norm(widths[0])
    stem["relu"] = nn.ReLU()
    if not cifar:
        stem["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    body: OrderedDict[str, nn.Module] = OrderedDict()
    c_in = widths[0]
    for s, (c_out, count) in enumerate(zip(widths, blocks, strict=True), start=1):
        first = BasicBlock(c_in, c_out, 1 if s == 1 else 2, norm)
        body[f"stage{s}"] = nn.Sequential(first, *(BasicBlock(c_out, c_out, 1, norm) for _ in range(count - 1)))
        c_in = c_out
    body["pool"] = nn.AdaptiveAvgPool2d(1)
    body["flatten"] = nn.Flatten()
    model = SequentialSplit(nn.Sequential(stem), nn.Sequential(body), nn.Linear(c_in, classes), architecture=name)
    return channels_last(_initialized(model)) if cifar else _initialized(model)  # what is faster, as measured


_HTFLLIB = Home((3, 32, 32), 10, "HtFLlib, Zhang et al., KDD 2025, arXiv 2506.03954")
_FEDIN = Home((3, 32, 32), 10, "FedIN, Chan et al., arXiv 2304.00759")
_FEDIN_HALF = replace(_FEDIN, paper="FedIN's, Chan et al., arXiv 2304.00759, half as wide")
_CIFAR = replace(_FEDIN, paper="He et al., CVPR 2016, arXiv 1512.03385; stem for 32 x 32 images")
_GROUP_NORM = replace(_FEDIN, paper="He et al., CVPR 2016, arXiv 1512.03385; with GroupNorm")
_PREACT = replace(_FEDIN, paper="He et al., ECCV 2016, arXiv 1603.05027; as HeteroFL and FedRolex cut it")


def _register(
    home: Home,
    name: str,
    blocks: tuple[int, ...],
    widths: tuple[int, ...] = WIDTHS,
    cifar: bool = False,
    norm: Norm = nn.BatchNorm2d,
) -> None:
    """A network of basic blocks. cifar: whether its stem is that for small images."""
    stem = "3 x 3 stem without pool" if cifar else "7 x 7 stem"
    normalized = "" if norm is nn.BatchNorm2d else " with GroupNorm"
    about = f"Blocks {' '.join(map(str, blocks))}{normalized}, {stem}, widths {' '.join(map(str, widths))}."
    register(name, _resnet, home, about, blocks=blocks, cifar=cifar, widths=widths, norm=norm)


for _stages in (1, 2, 3):
    _register(_HTFLLIB, f"resnet{2 + 2 * _stages}", (1,) * _stages, WIDTHS[:_stages])
for _depth, _blocks in BLOCKS.items():
    _register(_FEDIN, f"resnet{_depth}", _blocks)
for _depth, _blocks in BLOCKS.items():
    _register(_CIFAR, f"resnet{_depth}-cifar", _blocks, cifar=True)
for _depth, _blocks in BLOCKS.items():
    _register(_FEDIN_HALF, f"resnet{_depth}-half", _blocks, _HALVES)
for _depth, _few in _SMALL_BLOCKS.items():
    _register(
        _GROUP_NORM,
        f"resnet{_depth}-gn",
        _few,
        _SMALL_WIDTHS,
        cifar=True,
        norm=functools.partial(nn.GroupNorm, _GROUPS),
    )
register(
    "resnet152-preact", _preact, _PREACT, "Bottleneck blocks 3 8 36 3 with BatchNorm first, 3 x 3 stem without pool."
)
register(
    "resnet152-preact-1000",
    _preact,
    replace(_PREACT, classes=_IMAGENET_CLASSES),
    f"The same with at least {_IMAGENET_CLASSES} rows in the head, of which a task uses the first.",
    least_classes=_IMAGENET_CLASSES,
)
