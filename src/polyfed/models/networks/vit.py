"""Vision Transformers ViT-S of depth 8 to 12 (Dosovitskiy et al., ICLR 2021, arXiv 2010.11929), as FedIN has them.

Width 384, 6 heads, hidden layers of 1536; blocks with LayerNorm first, GELU, no dropout. Extractor = patches, class
token, positions and the first block; intermediate = blocks 2 to depth, and the last LayerNorm of the class token; head
= Linear(384, C). Images of at least 128 pixels a side are cut into patches of 16 x 16 pixels, smaller ones of 4 x 4, so
that s_in is 197 x 384 for 224 x 224 images and 65 x 384 for 32 x 32. Every tensor of a shallower model has the name and
shape it has in the deepest, so layers can be averaged by name.

FedIN's figures (arXiv 2304.00759, Table 2) want weights trained on ImageNet; these start from random ones.
`vit-sN-half` is half as wide (192, 3 heads, 768: the width of DeiT-Ti), for machines that carry no more; `vit-xs` has 4
blocks of width 96 with 3 heads and patches of 8 x 8 (468 778 parameters for 32 x 32 images). Another depth,
width or patch: `vision_transformer`, called from a builder of your own.

Shapes: N images, T tokens (class token first), W width.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.errors import ConfigError
from polyfed.models.networks import Home, ImageShape, check_request, register
from polyfed.models.split import SequentialSplit, SplitModel

DEPTHS = (8, 9, 10, 11, 12)
_WIDTH, _HEADS = 384, 6
_LARGE = 128  # pixels a side; from here on patches are of 16 pixels a side, below of 4
_STD = 0.02  # initial positions, class token and linear layers, as in DeiT (arXiv 2012.12877)


class Attention(nn.Module):
    """Self-attention: softmax(q k' / sqrt(W / heads)) v in every head, then a linear layer.

    Written out, as ``scaled_dot_product_attention`` has no vectorized form on CPUs, which cohorts would want.

    Args:
        width: W. heads: a divisor of it.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor, there: Tensor | None = None) -> Tensor:
        """N x T x W -> N x T x W; where `there` (N x T, bool) is given, no token attends to those that are not."""
        qkv = self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 x N x heads x T x W/heads
        q = qkv[0]
        k = qkv[1]
        v = qkv[2]
        scores = q * self.scale @ k.transpose(2, 3)
        if there is not None:
            scores = scores.masked_fill(~there[:, None, None], -1e9)
        weights = scores.softmax(dim=3)
        out: Tensor = self.out((weights @ v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Two residual steps, each behind a LayerNorm: attention, and two linear layers (4 W between them) around a GELU.

    Args:
        width: W. heads: a divisor of it.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        fc1 = nn.Linear(width, 4 * width)
        fc2 = nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, gelu=nn.GELU(), fc2=fc2))

    def forward(self, tokens: Tensor, there: Tensor | None = None) -> Tensor:
        """N x T x W -> N x T x W; `there`: see `Attention`."""
        tokens = tokens + self.attention(self.norm1(tokens), there)
        out: Tensor = tokens + self.mlp(self.norm2(tokens))
        return out


class Tokens(nn.Module):
    """An input's patches, each through one linear layer, behind the class token; positions, which are learned, added.

    Args:
        patches: the layer, a convolution as wide as its stride. count: of the patches. width: W.
    """

    def __init__(self, patches: nn.Conv1d | nn.Conv2d, count: int, width: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + count, width))
        self.patches = patches

    def forward(self, x: Tensor) -> Tensor:
        """N x channels x h x w, or N x channels x L, -> N x T x W, T = 1 + count."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        first = self.class_token.expand(patches.shape[0], -1, -1)
        out: Tensor = torch.cat([first, patches], dim=1) + self.positions
        return out


class ClassToken(nn.Module):
    """What the head looks at: the first token."""

    def forward(self, tokens: Tensor) -> Tensor:
        """N x T x W -> N x W."""
        return tokens[:, 0]


def vision_transformer(
    in_shape: ImageShape,
    classes: int,
    depth: int,
    patch: int | None = None,
    width: int = _WIDTH,
    heads: int = _HEADS,
    name: str = "vit",
) -> SplitModel:
    """A Vision Transformer, cut behind its first block and before its head.

    Args:
        in_shape: channels, height, width; height and width are multiples of `patch`, and at least two patches.
        classes: C.
        depth: number of blocks, at least 1.
        patch: pixels a side; None: 16 for images of at least 128 pixels a side, 4 for smaller ones.
        width: W = D.
        heads: of attention; a divisor of `width`.
        name: for messages.

    Raises:
        ConfigError: the images do not fit, or these sizes make no network.

    >>> vision_transformer((1, 8, 8), 10, depth=2, width=12, heads=3)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """
    channels, height, breadth = check_request(name, in_shape, classes)
    if patch is None:
        patch = 16 if min(height, breadth) >= _LARGE else 4
    if min(depth, patch, width, heads) < 1 or width % heads:
        raise ConfigError(
            f"{name} needs depth, patch, width and heads of at least 1, and a width that heads divides, got depth "
            f"{depth}, patch {patch}, width {width}, heads {heads}"
        )
    if min(height, breadth) < 2 * patch or height % patch or breadth % patch:
        fits = patch * max(2, round(min(height, breadth) / patch))
        raise ConfigError(
            f"{name} needs images of at least {2 * patch} x {2 * patch} whose sides are multiples of {patch}, "
            f"got {height} x {breadth}: resize them (data.image_size = {fits})"
        )
    tokens = Tokens(nn.Conv2d(channels, width, patch, patch), height // patch * (breadth // patch), width)
    extractor = nn.Sequential(OrderedDict(tokens=tokens, block1=Block(width, heads)))
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(2, depth + 1):
        body[f"block{i}"] = Block(width, heads)
    body["class_token"] = ClassToken()
    body["norm"] = nn.LayerNorm(width, eps=1e-6)
    return _initialized(SequentialSplit(extractor, nn.Sequential(body), nn.Linear(width, classes), architecture=name))


def _initialized(model: SplitModel) -> SplitModel:
    """Normal weights cut at two standard deviations: of 0.02, of 1 / sqrt(fan in) for patches; biases 0."""
    for module in model.modules():  # LayerNorm starts at weight 1, bias 0 by itself
        if isinstance(module, nn.Linear | nn.Conv2d):
            of_patches = isinstance(module, nn.Conv2d)
            _draw(module.weight, 1 / math.sqrt(module.weight[0].numel()) if of_patches else _STD)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Tokens):
            _draw(module.class_token, _STD)
            _draw(module.positions, _STD)
    return model


def _draw(weight: Tensor, std: float) -> None:
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


_FEDIN = Home((3, 224, 224), 10, "FedIN, Chan et al., arXiv 2304.00759")
_HALF = Home((3, 32, 32), 10, "FedIN's, Chan et al., arXiv 2304.00759, half as wide")
_EXTRA_SMALL = Home((3, 32, 32), 10, "polyfed; width 96, 3 heads")


def _register(home: Home, name: str, depth: int, width: int, heads: int, patch: int | None = None) -> None:
    about = f"{depth} blocks of width {width} with {heads} heads."
    register(name, _named, home, about, depth=depth, width=width, heads=heads, patch=patch)


def _named(name: str, in_shape: ImageShape, classes: int, **sizes: Any) -> SplitModel:
    return vision_transformer(in_shape, classes, **sizes, name=name)


for _depth in DEPTHS:
    _register(_FEDIN, f"vit-s{_depth}", _depth, _WIDTH, _HEADS)
for _depth in DEPTHS:
    _register(_HALF, f"vit-s{_depth}-half", _depth, _WIDTH // 2, _HEADS // 2)
_register(_EXTRA_SMALL, "vit-xs", 4, 96, 3, patch=8)
