"""Networks for series of numbers (N, channels, L), windows of a recording say: 1-D CNNs, a transformer, HARCNNs.

The 1-D CNNs and the transformer end with Linear (to D = 64), ReLU and a linear head, so that methods that compare
representations can mix them. Cuts: extractor = the first layer, intermediate = the rest up to the last ReLU, head = the
last Linear.

The transformer is the Vision Transformer of `polyfed.models.networks.vit` (arXiv 2010.11929) of width 48 with 3 heads
on pieces of the series in place of an image's; the length is a multiple of 10.

The HARCNNs are those that HtFLlib runs (Zhang et al., KDD 2025, arXiv 2506.03954): one to three blocks of
convolution, ReLU and max pooling with 32, 64 and 128 filters, whose outputs are averaged to D = 512. Its files have a
series as (channels, 1, L), as images.

Shapes: N series, L steps, C classes, W width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from polyfed.errors import ConfigError
from polyfed.models.networks import Home, register
from polyfed.models.networks.vit import Block, ClassToken, Tokens
from polyfed.models.split import SequentialSplit

_FEATURES = 64  # D
_PATCH = 10  # steps of a piece that the transformer reads as one
_WIDTH = 48  # the transformer's
_HEADS = 3
_HAR_FEATURES = 512  # D of the HARCNNs


class MeanOverTime(nn.Module):
    """A series (N, W, L) to its mean (N, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=2)


def _cnn(name: str, in_shape: tuple[int, ...], classes: int, width: int) -> SequentialSplit:
    channels = _channels(name, in_shape, least=4)
    first = _layers(conv1=nn.Conv1d(channels, width, 5, padding=2), relu1=nn.ReLU(), pool1=nn.MaxPool1d(2))
    rest = _layers(
        conv2=nn.Conv1d(width, 2 * width, 5, padding=2), relu2=nn.ReLU(), pool2=nn.MaxPool1d(2), mean=MeanOverTime()
    )
    return _split(name, first, rest, 2 * width, classes)


def _transformer(name: str, in_shape: tuple[int, ...], classes: int) -> SequentialSplit:
    channels = _channels(name, in_shape, least=_PATCH)
    if in_shape[-1] % _PATCH:
        raise ConfigError(f"{name} needs series of a length that is a multiple of {_PATCH}, got {in_shape[-1]}")
    tokens = Tokens(nn.Conv1d(channels, _WIDTH, _PATCH, _PATCH), in_shape[-1] // _PATCH, _WIDTH)
    nn.init.trunc_normal_(tokens.class_token, std=0.02)
    nn.init.trunc_normal_(tokens.positions, std=0.02)
    first = _layers(tokens=tokens, block1=Block(_WIDTH, _HEADS))
    rest = _layers(block2=Block(_WIDTH, _HEADS), class_token=ClassToken(), norm=nn.LayerNorm(_WIDTH))
    return _split(name, first, rest, _WIDTH, classes)


def _harcnn(
    name: str, in_shape: tuple[int, ...], classes: int, filters: Sequence[int], kernel: int, stride: int
) -> SequentialSplit:
    """A block for each number of filters. stride: of the convolutions."""
    image = len(in_shape) == 3 and in_shape[1] == 1
    least = _steps_before(len(filters), kernel, stride)
    channels = _channels(name, (in_shape[0], in_shape[2]) if image else in_shape, least)
    first = _layers(series=nn.Flatten(2)) if image else _layers()
    rest = _layers()
    for number, width in enumerate(filters, start=1):
        block = _layers(conv=nn.Conv1d(channels, width, kernel, stride), relu=nn.ReLU(), pool=nn.MaxPool1d(2))
        part = first if number == 1 else rest
        part.update({f"{layer}{number}": module for layer, module in block.items()})
        channels = width
    # `feature_pool` calls its average so, too, and then takes this one's place
    rest |= _layers(flatten=nn.Flatten(), average=nn.AdaptiveAvgPool1d(_HAR_FEATURES))
    return SequentialSplit(nn.Sequential(first), nn.Sequential(rest), nn.Linear(_HAR_FEATURES, classes), name)


def _steps_before(blocks: int, kernel: int, stride: int) -> int:
    """The length of a series of which the blocks leave one step."""
    steps = 1
    for _ in range(blocks):
        steps = (2 * steps - 1) * stride + kernel
    return steps


def _channels(name: str, in_shape: tuple[int, ...], least: int) -> int:
    if len(in_shape) != 2 or in_shape[0] < 1 or in_shape[1] < least:
        raise ConfigError(
            f"{name} needs series (channels, length) of at least {least} steps, got the shape {tuple(in_shape)}"
        )
    return in_shape[0]


def _layers(**modules: nn.Module) -> OrderedDict[str, nn.Module]:
    return OrderedDict(modules)


def _split(
    name: str, first: OrderedDict[str, nn.Module], rest: OrderedDict[str, nn.Module], width: int, classes: int
) -> SequentialSplit:
    """The parts, with Linear and ReLU to D behind `rest`, whose output is (N, width)."""
    rest = rest | _layers(fc=nn.Linear(width, _FEATURES), relu=nn.ReLU())
    return SequentialSplit(nn.Sequential(first), nn.Sequential(rest), nn.Linear(_FEATURES, classes), name)


_WINDOWS = Home((6, 100), 7, "polyfed; for series, here of 6 channels and 100 steps")
_HTFLLIB = Home(
    (9, 128), 6, "HtFLlib, Zhang et al., KDD 2025, arXiv 2506.03954; for series, here of 9 channels and 128 steps"
)

for _width in (16, 32, 64):
    register(f"cnn1d-{_width}", _cnn, _WINDOWS, f"A 1-D CNN with {_width} and {2 * _width} filters.", width=_width)
register("series-transformer", _transformer, _WINDOWS, "A transformer of two blocks on pieces of 10 steps.")
for _filters, _kernel, _strides in (((32,), 9, (1, 2, 3)), ((32, 64), 9, (1, 2, 3)), ((32, 64, 128), 5, (1, 2))):
    for _stride in _strides:
        register(
            f"harcnn{len(_filters)}-s{_stride}",
            _harcnn,
            _HTFLLIB,
            f"HtFLlib's HARCNN: {', '.join(map(str, _filters))} filters of {_kernel} steps, stride {_stride}.",
            filters=_filters,
            kernel=_kernel,
            stride=_stride,
        )
