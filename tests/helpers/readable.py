"""Whether people can read a figure: every text is large enough, whole, and on no other text."""

from __future__ import annotations

import itertools
from typing import Any

SMALLEST = 7.5  # points
ROOM = 1.0  # pixels by which two boxes may touch


def unreadable(figure: Any) -> list[str]:
    """What is wrong with the texts of a figure, one line each, as it is saved; none if all can be read."""
    figure.set_dpi(200)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    texts = [text for text in _texts(figure) if text.get_visible() and text.get_text().strip()]
    found = [
        f"{text.get_text()!r} is of {text.get_fontsize()} points" for text in texts if text.get_fontsize() < SMALLEST
    ]
    boxes = [(text, text.get_window_extent(renderer)) for text in texts]
    for text, box in boxes:  # what is beside the axes is in the file, which is as wide as it
        if box.x1 > 1.1 * figure.bbox.x1:
            found.append(f"{text.get_text()!r} makes the figure wider by {box.x1 - figure.bbox.x1:.0f} pixels")
    upright = [(text, box) for text, box in boxes if text.get_rotation() in (0.0, 90.0)]
    for (one, a), (other, b) in itertools.combinations(upright, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        down = min(a.y1, b.y1) - max(a.y0, b.y0)
        if min(across, down) > ROOM:
            found.append(f"{one.get_text()!r} is on {other.get_text()!r}")
    for axes in figure.axes:  # boxes of aslant names overlap; their feet are as far apart as a line is high
        aslant = [text for text in axes.get_xticklabels() if text.get_rotation() not in (0.0, 90.0)]
        feet = [text.get_transform().transform(text.get_position())[0] for text in aslant]
        for (one, a), (other, b) in itertools.pairwise(zip(aslant, feet, strict=True)):
            if b - a < 1.3 * one.get_fontsize() * figure.dpi / 72:
                found.append(f"{one.get_text()!r} is on {other.get_text()!r}")
    return found


def _texts(figure: Any) -> list[Any]:
    texts = [*figure.texts]
    for legend in figure.legends:
        texts += legend.get_texts()
    for axes in figure.axes:
        if not axes.axison:
            continue
        texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        texts += [axes.title, axes._left_title]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [
                tick.label1
                for tick in axis.get_major_ticks()
                if tick.label1.get_visible() and low <= tick.get_loc() <= high
            ]
    return texts
