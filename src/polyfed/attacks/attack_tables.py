"""What a curious server learns, for people: the table (text, Markdown) and the ROC curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyfed.attacks.audit_report import AuditOptions, AuditReport
from polyfed.attacks.membership_inference import FPRS
from polyfed.attacks.reconstruction_results import ReconstructionResult
from polyfed.escaping import markdown_text
from polyfed.functional.membership_scores import Interval, roc
from polyfed.report.grouping import looks_of
from polyfed.report.plot_style import canvas, legend, line_style, style_axes
from polyfed.report.text_tables import Column, markdown_table, render_text, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SERVER, _HOLDER = "server", "holder of the network"
_PANELS = (
    (_SERVER, "loss", "server, loss"),
    (_SERVER, "LiRA online", "server, LiRA online"),
    (_HOLDER, "loss", "holder, loss"),
)
_ABOUT = (
    "Members: rows that a client trained on. Others: test rows that nobody trained on. AUC, and the share of members "
    "found where 1 % and 0.1 % of the others are called members, over the rows of all clients, with 95 % intervals."
)
_HOLDER_IS = "holder: whoever gets hold of the clients' own networks as the run left them, in any way; not the server."


def to_text(found: Sequence[AuditReport], width: int = 100) -> str:
    """All tables, one under the other, and the reasons for what is not in them."""
    parts = [render_text(columns, width) for _, columns in _tables(found)]
    return "\n".join([*("\n".join([part, ""]) for part in parts), *(wrapped(note, width) for note in _notes(found))])


def to_markdown(found: Sequence[AuditReport], options: AuditOptions) -> str:
    """`leakage.md`."""
    parts = ["# What an honest-but-curious server learns", "", _attacker(options), ""]
    for title, columns in _tables(found):
        parts += [f"## {title}", "", markdown_table(columns), ""]
    return "\n".join([*parts, *(f"- {markdown_text(note)}" for note in _notes(found)), ""])


def _attacker(options: AuditOptions) -> str:
    """One paragraph: what the attacker has and does."""
    if not options.shadows:
        return "No shadow models."
    rows = "the other clients' training rows" if options.shadow_data == "others" else "the rows held out for the server"
    return (
        f"LiRA with {options.shadows} shadow models per client; offline they are trained on {rows}, online on halves "
        f"of the rows asked for. Seed {options.seed}."
    )


def _tables(found: Sequence[AuditReport]) -> list[tuple[str, list[Column]]]:
    """Titles and columns: what goes up, which rows were trained on, images."""
    names = [each.record.name for each in found]
    sent = [
        Column("run", names, words=True),
        Column("bytes up\nper client", [f"{each.bytes_up:,.0f}".replace(",", " ") for each in found]),
        Column("goes up", [", ".join(map(str, each.entries)) or "nothing" for each in found], words=True),
        Column("in the clear", [", ".join(each.clear) or "-" for each in found], words=True),
        Column("classes guessed by", [each.classes.how or "-" for each in found], words=True),
        Column("AUC", [_interval(each.classes.auc) for each in found]),
    ]
    tables = [("What goes up", sent), ("Which rows a client trained on", _members(found))]
    if any(each.rebuilt for each in found):
        tables.append(("Images made again", _images(found)))
    return tables


def _members(found: Sequence[AuditReport]) -> list[Column]:
    rows: list[tuple[str, str, Mapping[str, Any] | None]] = []
    for each in found:
        guesses = each.pooled
        rows += [(each.record.name, f"{by}, {how}", guess.summary()) for (by, how), guess in guesses.items()]
        if not any(by == _SERVER for by, _ in guesses):
            rows.append((each.record.name, _SERVER, None))
    columns = [Column("run", [row[0] for row in rows], words=True), Column("by", [row[1] for row in rows], words=True)]
    told = [row[2] for row in rows]
    columns.append(Column("AUC", ["-" if one is None else _interval(Interval(**one["auc"])) for one in told]))
    columns.append(
        Column("balanced\naccuracy", ["-" if one is None else f"{one['balanced_accuracy']:.3f}" for one in told])
    )
    for fpr in FPRS:
        cells = ["-" if one is None else _rate(one["tpr_at_fpr"][f"{fpr:g}"]) for one in told]
        columns.append(Column(f"TPR at\n{100 * fpr:g} %", cells))
    columns.append(
        Column("members\nothers", ["-" if one is None else f"{one['members']} / {one['others']}" for one in told])
    )
    return columns


def _images(found: Sequence[AuditReport]) -> list[Column]:
    rows = [(each.record.name, one) for each in found for one in each.rebuilt]
    numbers: list[ReconstructionResult] = [one for _, one in rows]
    return [
        Column("run", [name for name, _ in rows], words=True),
        Column("made from", [one.what for one in numbers], words=True),
        Column("images", [str(one.images) for one in numbers]),
        Column("PSNR [dB]", [_decibel(one.psnr) for one in numbers]),
        Column("guess", [_decibel(one.guess_psnr) for one in numbers]),
        Column("SSIM", [_share(one.ssim) for one in numbers]),
        Column("guess", [_share(one.guess_ssim) for one in numbers]),
    ]


def _notes(found: Sequence[AuditReport]) -> list[str]:
    """What the numbers are, and why some are missing."""
    notes = [_ABOUT, _HOLDER_IS]
    if any((_SERVER, "distance to the pairs sent") in each.pooled for each in found):
        notes.append("distance to the pairs sent: members are the rows behind the features that the first client sent.")
    if any(each.rebuilt for each in found):
        notes.append(
            "Images: each against the nearest private one behind what was attacked; guess: the mean of all the "
            "client's training images, made without anything that was sent."
        )
    for each in found:
        name = each.record.name
        if each.on_the_way:
            notes.append(f"{name}: uploads on their way: {each.on_the_way}.")
        for what, why in (
            ("classes", each.classes.why_not),
            ("rows", each.why_not_members),
            ("images", each.why_not_images),
        ):
            if why:
                notes.append(f"{name}, {what}: {why}.")
        if not each.equal:
            notes.append(f"{name}: run again on this machine its last losses differ from the records by rounding.")
    return notes


def _interval(value: Interval | None) -> str:
    return "-" if value is None else f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _rate(found: Mapping[str, float] | None) -> str:
    """A share in per cent; "few rows" where there are too few others for such a rate."""
    if found is None:
        return "few rows"
    return f"{100 * found['value']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def _decibel(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# the figure -----------------------------------------------------------------------------------------------------------


def curves(found: Sequence[AuditReport], options: AuditOptions) -> Figure:
    """ROC curves on logarithmic axes: one panel for each attacker, one line for each run."""
    panels = [panel for panel in _PANELS if any(panel[:2] in each.pooled for each in found)]
    about = f"{_ABOUT.split('. AUC')[0]}. Logarithmic; dotted: by chance. {_attacker(options)} {_HOLDER_IS}"
    figure, (axes,) = canvas(
        "Which rows a client trained on", about, 2.8, 1, max(1, len(panels)), width=max(5.6, 2.7 * len(panels))
    )
    looks = looks_of(each.record for each in found)
    lines: dict[str, Any] = {}
    for one, (by, how, title) in zip(axes, panels, strict=False):
        style_axes(one)
        least = 1.0
        for each in found:
            guess = each.pooled.get((by, how))
            if guess is None:
                continue
            alarms, hits = (rates.clamp(min=1e-12) for rates in roc(guess.scores, guess.member))
            least = min(least, 1 / int((~guess.member).sum()))
            name = each.record.name
            (lines[name],) = one.plot(
                alarms.tolist(),
                hits.tolist(),
                **line_style(looks[name]),
                markersize=4,
                markevery=max(1, len(alarms) // 8),
            )
        one.plot([1e-9, 1], [1e-9, 1], color="black", linewidth=1, linestyle=(0, (1, 1.5)))
        one.set_xscale("log")
        one.set_yscale("log")
        one.set_xlim(least, 1)
        one.set_ylim(least, 1.05)
        one.set_title(title, loc="left", fontsize=9)
        one.set_xlabel("false positives")
    axes[0].set_ylabel("true positives")
    if lines:
        legend(axes[0], list(lines.values()), list(lines))
    return figure
