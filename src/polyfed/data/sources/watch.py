"""Exercises with a watch on the wrist, from the package seglearn, which unpickles its own file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from polyfed.data.dataset import DatasetSource, from_tensors
from polyfed.data.options import SourceOptions
from polyfed.data.sources import package_folder, source

_STEPS = 100  # length of a window: two seconds at 50 Hz
_LEARNED = 0.8  # part of a recording's windows for training, the first ones


@source("watch", package="seglearn")
def watch(options: SourceOptions) -> DatasetSource:
    """Shoulder exercises with a watch on the wrist (Burns et al. 2018) from seglearn: (6, 100) windows, 7 classes.

    140 recordings, of 10 people, both arms and 7 exercises: accelerations and rates of turning at 50 Hz, cut into
    windows of two seconds that do not overlap. The first four fifths of each recording's windows are the training side,
    the others the test side. Rates of turning are halved, which brings all six to a deviation of about 1.
    """
    options.check_used("columns")
    package_folder(options)
    from seglearn.datasets import load_watch

    read = load_watch()
    sides: dict[str, dict[str, list[Any]]] = {
        side: {"x": [], "y": [], "person": [], "arm": []} for side in ("train", "test")
    }
    arms = {0: "left", 1: "right"}
    for recording, label, person, arm in zip(read["X"], read["y"], read["subject"], read["side"], strict=True):
        count = len(recording) // _STEPS
        windows = np.asarray(recording[: count * _STEPS], dtype=np.float32).reshape(count, _STEPS, 6).transpose(0, 2, 1)
        learned = round(count * _LEARNED)
        for side, part in (("train", windows[:learned]), ("test", windows[learned:])):
            sides[side]["x"].append(part)
            sides[side]["y"] += [int(label)] * len(part)
            sides[side]["person"] += [int(person)] * len(part)
            sides[side]["arm"] += [arms[int(arm)]] * len(part)
    scale = np.array([1, 1, 1, 2, 2, 2], dtype=np.float32)[:, None]
    pairs = {side: (np.concatenate(found["x"]) / scale, np.array(found["y"])) for side, found in sides.items()}
    further = {side: {name: found[name] for name in ("person", "arm")} for side, found in sides.items()}
    source = from_tensors(
        pairs["train"], pairs["test"], len(read["y_labels"]), "watch", further["train"], further["test"]
    )
    return replace(source, class_names=tuple(read["y_labels"]))
