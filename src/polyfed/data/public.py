"""Inputs of another data set in the shape of the task's, for everybody to see.

Shapes: N samples, C channels (1 gray, 3 RGB), H x W pixels.
"""

from __future__ import annotations

import numpy as np
import torch

from polyfed.data.datasets import DatasetSource
from polyfed.data.partition import check_integer
from polyfed.data.samples import LabeledSamples
from polyfed.data.transforms import convert_channels, resize
from polyfed.errors import ConfigError

_USUAL = 5000  # rows; FedHeNN's number of alignment inputs


def public_inputs(
    other: DatasetSource, task: DatasetSource, rows: int | None, rng: np.random.Generator
) -> LabeledSamples:
    """Training inputs of `other` as images like the task's, in the order of their file.

    Args:
        other: whose inputs. Its labels mean other classes and are not handed out: all are 0.
        task: whose channels, height and width the images get, bilinear.
        rows: how many, drawn without replacement; None for 5000, or all where there are fewer.
        rng: of the draw.

    Returns:
        `LabeledSamples` of uint8 images (rows, C, H, W).

    Raises:
        ConfigError: either set has no uint8 images, or fewer rows than were asked for.
    """
    for source in (task, other):
        x = source.train.x
        if x.dtype != torch.uint8 or x.dim() != 4:
            raise ConfigError(
                f"data.public_dataset expects images stored as uint8, '{source.name}' has {tuple(x.shape[1:])} of "
                f"{x.dtype}"
            )
    count = min(_USUAL, len(other.train)) if rows is None else check_integer("public_samples", rows, 1)
    if count > len(other.train):
        raise ConfigError(
            f"expected public_samples of at most the {len(other.train)} training rows of '{other.name}', got {count}"
        )
    drawn = np.sort(rng.choice(len(other.train), count, replace=False))
    channels, height, width = task.train.x.shape[1:]
    chosen = other.train.select(torch.from_numpy(drawn))
    return resize(LabeledSamples(convert_channels(chosen.x, channels), torch.zeros_like(chosen.y)), (height, width))
