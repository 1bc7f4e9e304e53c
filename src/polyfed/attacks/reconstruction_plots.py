"""An attack for people: the grid of images, the curves, the table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from polyfed.attacks.reconstruction_runs import AttackResult, ImageQuality, Reconstruction
from polyfed.report.plot_style import canvas, empty_figure, legend, line_style
from polyfed.report.text_tables import Column, render_text, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELL = 0.95  # inches, of one image in the grid
_TEXT_ROW = 0.2  # inches, of the line of numbers below it
_LETTERS = 14  # of a class's name, in a line as wide as an image
_GAP = 0.3  # of an image, between two blocks
_NAMES = 1.45  # inches, left of the images
_ACROSS = 8  # images across, in all blocks; the rest are in attack.json alone
_EVERY = 6  # points of a curve from one marker to the next
_EQUAL = 60  # dB; rounding to bytes alone makes 59


def reconstruction_grid(found: AttackResult) -> Figure:
    """The private images, and below them what was made of each upload; one block of columns for each prior."""
    seen, settings = found.exposure, found.settings
    shown = min(len(found.exposure.targets), max(2, _ACROSS // len(settings.tv)))
    blocks = [[trial for trial in found.trials if trial.tv == weight] for weight in settings.tv]
    names = [_original(found), *(_name(trial, found) for trial in blocks[0])]
    if seen.kind == "prototypes":
        names.insert(1, "its image nearest\nto the first below")
    classes = [_class(found, number) for number in range(shown)]
    title = f"What {_who(found)} uploads, turned back into images"
    left_out = f" The first {shown} of {len(found.exposure.targets)}." if shown < len(found.exposure.targets) else ""
    about = f"{_about(found)} Numbers: PSNR [dB] and SSIM, against {found.against}.{left_out}"
    about += " In brackets: the images behind a mean." if seen.kind == "prototypes" else ""
    height = len(names) * (_CELL + _TEXT_ROW) + _TEXT_ROW * (1 + max(name.count("\n") for name in classes))
    shares = ([1.0] * shown + [_GAP]) * len(blocks)
    width = max(_NAMES + sum(shares) * (_CELL + 0.08), 4.6)
    ratios = {"width_ratios": shares[:-1]}
    figure, axes = canvas(title, about, height, len(names), len(shares) - 1, width=width, gridspec_kw=ratios)
    for line, name in zip(axes, names, strict=True):
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8.5, labelpad=6)
        for between in line[shown :: shown + 1]:
            between.remove()
    for number, trials in enumerate(blocks):
        first = number * (shown + 1)
        cells = [line[first : first + shown] for line in axes]
        cells[0][0].set_title(_prior(trials[0].tv), loc="left", fontsize=9)
        _fill(cells, found, trials, classes)
    return figure


def _class(found: AttackResult, number: int) -> str:
    """What is written below an original: its class, and of a mean how many images are behind it."""
    seen = found.exposure
    count = f" ({len(seen.behind[number])})" if seen.kind == "prototypes" else ""
    return "\n".join(textwrap.wrap(f"{seen.class_names[number]}{count}", _LETTERS))


def _fill(
    cells: Sequence[Sequence[Any]], found: AttackResult, trials: Sequence[Reconstruction], classes: Sequence[str]
) -> None:
    """A block of the grid, column by column."""
    seen = found.exposure
    for number, name in enumerate(classes):
        column = [(seen.targets[number], name)]
        if seen.kind == "prototypes":
            best = trials[0].score
            column.append((trials[0].nearest[number], _pair(best.best_psnr[number], best.best_ssim[number])))
        for trial in trials:
            column.append((trial.images[number], _pair(trial.score.psnr[number], trial.score.ssim[number])))
        for line, (image, text) in zip(cells, column, strict=True):
            cell = line[number]
            _place(cell, image)
            cell.set_xlabel(text, fontsize=8, labelpad=1.5, parse_math=False)


def _pair(psnr: float, ssim: float) -> str:
    return f"{psnr:.1f}, {round(ssim, 2) + 0.0:.2f}"  # never "-0.00"


def _place(axes: Any, image: Tensor) -> None:
    """One image (C, H, W) in [0, 1], without smoothing, framed."""
    pixels = image.detach().cpu()
    if len(pixels) == 3:
        axes.imshow(pixels.permute(1, 2, 0).numpy(), interpolation="nearest")
    else:
        axes.imshow(pixels.mean(dim=0).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_linewidth(0.5)


def _original(found: AttackResult) -> str:
    return "original" if found.exposure.kind == "features" else "mean image\nof the class"


def _name(trial: Reconstruction, found: AttackResult) -> str:
    """What was attacked."""
    plain = "as sent" if found.exposure.treated else "unprotected"
    level = plain if trial.noise == 0 else f"noise {trial.noise:g}"
    return f"{trial.source}, {level}" if len(found.exposure.sent) > 1 else level


def _prior(weight: float) -> str:
    return f"total variation {weight:g}" if weight else "no prior"


def curves(found: AttackResult) -> Figure:
    """PSNR against steps, one line per trial, and the level of the guess that sees nothing."""
    cut = max(max(trial.psnr_by_step) for trial in found.trials) > _EQUAL
    about = f"{_about(found)} Mean PSNR over {_what(found)}, against {found.against}."
    about += f" Cut at {_EQUAL} dB, where images of bytes are equal but for rounding." if cut else ""
    figure, axes = empty_figure(f"Reconstruction from what {_who(found)} uploads, step by step", about)
    handles = []
    names = []
    for number, trial in enumerate(found.trials):
        every = (number % _EVERY, _EVERY)  # markers of neighboring lines do not fall on one another
        (line,) = axes.plot(found.steps, trial.psnr_by_step, **line_style(number), markersize=4.5, markevery=every)
        handles.append(line)
        names.append(f"{_name(trial, found)}, {_prior(trial.tv)}")
    if (level := found.guess.mean("psnr")) is not None:
        handles.append(axes.axhline(level, color="black", linewidth=1.2, linestyle=(0, (1, 1.5))))
        names.append("guess (mean image)")
    axes.set_xlabel("step")
    axes.set_ylabel("PSNR [dB]")
    axes.set_xlim(left=0)
    if cut:
        axes.set_ylim(top=_EQUAL)
    legend(axes, handles, names)
    return figure


def to_text(found: AttackResult, width: int = 100) -> str:
    """Who was attacked and how, the table, and what its numbers are against."""
    classes = found.exposure.kind == "prototypes"
    rows: list[tuple[Sequence[str], float | None, ImageQuality]] = [
        ((trial.source, f"{trial.tv:g}", f"{trial.noise:g}"), sum(trial.loss) / len(trial.loss), trial.score)
        for trial in found.trials
    ]
    rows.append((("guess", "", ""), None, found.guess))
    columns = [
        Column(head, [row[0][n] for row in rows], words=n == 0) for n, head in enumerate(("from", "tv", "noise"))
    ]
    numbers: list[tuple[str, str, int]] = [("PSNR [dB]", "psnr", 2), ("SSIM", "ssim", 3)]
    numbers += [("best\nPSNR", "best_psnr", 2), ("best\nSSIM", "best_ssim", 3)] if classes else []
    numbers += [] if found.lpips_missing else [("LPIPS", "lpips", 3)]
    for heading, key, digits in numbers:
        columns.append(Column(heading, [_number(row[2].mean(key), digits) for row in rows]))
    columns.append(Column("loss", ["" if row[1] is None else f"{row[1]:.2g}" for row in rows]))
    notes = [
        f"PSNR, SSIM: means over {_what(found)}, against {found.against}.",
        *(["best: against the training image of that class that comes nearest, by PSNR."] if classes else []),
        "guess: the mean of all the client's training images, made without anything that was sent.",
        *([f"LPIPS is not computed: {found.lpips_missing}."] if found.lpips_missing else []),
    ]
    return "\n".join(
        [wrapped(_about(found), width), "", render_text(columns, width), "", *(wrapped(n, width) for n in notes)]
    )


def _about(found: AttackResult) -> str:
    """One paragraph: method, data, noise, seeds, the attacker."""
    seen, settings = found.exposure, found.settings
    run = seen.run
    own = f"; the run's own noise: {seen.noise_of_run:g}" if seen.kind == "features" else ""
    treated = f"; on their way {seen.treated}" if seen.treated else ""
    added = "; the noise is the attack's, the method sends none" if seen.kind == "prototypes" and _noisy(found) else ""
    return (
        f"{_who(found)} on {run.result.dataset}, run seed {run.seed}{own}{treated}{added}. Client "
        f"{seen.model.client} ({seen.model.architecture}), its upload of round {seen.round}: "
        f"{len(found.exposure.targets)} of {seen.rows} "
        f"{'pairs' if seen.kind == 'features' else 'prototypes'}. White box: the attacker knows the client's network. "
        f"Adam, {settings.steps} steps, lr {settings.lr:g}, seed {settings.seed}."
    )


def _who(found: AttackResult) -> str:
    """The run's name, and its method's where that is another."""
    run = found.exposure.run
    return run.name if run.name == run.method else f"{run.name} ({run.method})"


def _noisy(found: AttackResult) -> bool:
    return any(trial.noise for trial in found.trials)


def _what(found: AttackResult) -> str:
    count = len(found.exposure.targets)
    one = "image" if found.exposure.kind == "features" else "class"
    plural = {"image": "images", "class": "classes"}[one]
    return f"{count} {one if count == 1 else plural}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
