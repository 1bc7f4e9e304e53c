"""``polyfed audit attack RUN``: what uploads give away of a client's images (FedIN's figure 10; class means beside it).

``polyfed audit leakage RUN ...``: all that a server can read from them, guess or make again, method by method.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from polyfed.attacks import attack_tables, reconstruction_plots
from polyfed.attacks.attack_target import collect_target
from polyfed.attacks.audit_report import AuditOptions, AuditReport, audit_run
from polyfed.attacks.membership_inference import ShadowData
from polyfed.attacks.reconstruction_runs import AttackConfig, AttackResult, run_attack
from polyfed.errors import ConfigError
from polyfed.report.atomic_files import make_folder, write_whole
from polyfed.report.plot_style import save
from polyfed.report.run_records import RunRecord, load_runs
from polyfed.results.read import ATTACK, check_links

__all__ = ["attack", "leakage"]

FILES = ("attack.json", "reconstructions.png", "reconstructions.svg", "psnr-by-step.png", "psnr-by-step.svg")
REPORT_FILES = ("leakage.json", "leakage.md", "membership.png", "membership.svg")


def attack(  # noqa: PLR0913 - what a user may choose, each by its name
    run: str | Path,
    *,
    client: int = 0,
    images: int = 4,
    noise: Sequence[float] | None = None,
    sources: Sequence[str] | None = None,
    steps: int = 1000,
    lr: float = 0.1,
    tv_weights: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    overwrite: bool = False,
    trust: bool = False,
) -> tuple[AttackResult, list[Path]]:
    """Reconstruct images of a client from what it sent last in a finished run, and score them.

    Args:
        run: the run's folder.
        client: whose images. images: N, how many: the first pairs of its upload, or the classes it has fewest of.
        noise: levels on what is sent; None: 0, and the run's own level (the paper's 0.8 where it has none).
        sources: "s_in", "s_out" or both for FedIN (None: s_in, as in the paper); "prototypes" otherwise.
        steps, lr: of Adam. tv_weights: of the total variation, each a reconstruction; 0 is the paper's objective.
        seed: of the noise that the reconstructions start from, one for each image, alike for all levels.
        device: where networks compute.
        out: folder; None: ``RUN/attack``. overwrite: replace what an earlier attack wrote there.
        trust: whether code that the folder names ("package.module:name") may be imported.

    Returns:
        What came of it, and the files written.

    Raises:
        ConfigError: the request is wrong; nothing has been written.
        RunError: the loss is not finite.
    """
    settings = AttackConfig(steps, lr, tuple(dict.fromkeys(map(float, tv_weights))), seed)
    if images < 1:
        raise ConfigError(f"--images: expected at least 1, got {images}")
    if noise is not None and (not noise or not all(0 <= level < math.inf for level in noise)):
        raise ConfigError(f"--noise: expected levels of at least 0, got {list(noise)}")
    check_links(Path(run))
    folder = Path(run) / ATTACK if out is None else Path(out)
    _check_place(folder, overwrite, FILES, "an attack")
    exposure = collect_target(run, client, images, noise, sources, device, trust)
    found = run_attack(exposure, settings)
    return found, _write(found, folder)


def leakage(  # noqa: PLR0913 - what a user may choose, each by its name
    runs: str | Path | Sequence[str | Path],
    *,
    shadows: int = 16,
    shadow_data: ShadowData = "others",
    rows: int | None = None,
    clients: int | None = None,
    images: int = 4,
    steps: int = 300,
    seed: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    trust: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[AuditReport], list[Path]]:
    """What an honest-but-curious server got in finished runs, side by side.

    Args:
        runs: run folders, or folders above them.
        shadows: shadow models of each kind for every client, for LiRA; 0: none.
        shadow_data: what the attacker trains them on where it does not use the rows asked for: "others", the other
            clients' training samples, or "holdout", the rows held out for the server.
        rows: at most so many members and as many others of every client; None: all.
        clients: the first so many of those who took part; None: all.
        images: how many of the first client's images are made again; 0: none. steps: of Adam for each.
        seed: of all draws.
        out: folder; None: ``attack`` in the run's folder, or in the one above all of them.
        overwrite: replace what an earlier report wrote there. say: told what is being done.
        trust: whether code that the folders name ("package.module:name") may be imported.

    Returns:
        What was found, run by run, and the files written.

    Raises:
        ConfigError: the request is wrong, or a run does not come out as recorded; nothing has been written.
    """
    options = AuditOptions(shadows, shadow_data, rows, clients, images, steps, seed)
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    records = _told_apart([record for record in load_runs(paths, trust) if record.finished])
    if not records:
        raise ConfigError(f"expected folders of finished runs, got {', '.join(map(str, paths))}")
    above = Path(os.path.commonpath([record.path.absolute() for record in records]))
    check_links(above)
    folder = above / ATTACK if out is None else Path(out)
    _check_place(folder, overwrite, REPORT_FILES, "a report of leakage")
    found = [audit_run(record, options, say) for record in records]
    make_folder(folder)
    told = {"options": asdict(options), "runs": [each.to_dict() for each in found]}
    data = json.dumps(told, indent=2, allow_nan=False) + "\n"
    files = [write_whole(folder / "leakage.json", data.encode())]
    files.append(write_whole(folder / "leakage.md", attack_tables.to_markdown(found, options).encode()))
    return found, [*files, *save(attack_tables.curves(found, options), folder, "membership")]


def _told_apart(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs, with the seed in the names of those that differ in nothing else."""
    names = [record.name for record in records]
    return [
        replace(record, name=f"{record.name}, seed {record.seed}") if names.count(record.name) > 1 else record
        for record in records
    ]


# files ------------------------------------------------------------------------------------------------------------


def _check_place(folder: Path, overwrite: bool, own: Sequence[str], what: str) -> None:
    """Whether the files can be written there without loss.

    Raises:
        ConfigError: an earlier one or other files lie there, or nothing can.
    """
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"expected a place for the attack's folder {folder}, got {above}, where nothing can be written"
        )
    there = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    if there - {*FILES, *REPORT_FILES}:
        raise ConfigError(f"expected an empty or new folder for the attack, got {folder} with other files in it")
    if there & set(own) and not overwrite:
        raise ConfigError(f"{folder} already holds {what}; replace it with --overwrite or choose another --out")


def _write(found: AttackResult, folder: Path) -> list[Path]:
    make_folder(folder)
    data = json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n"
    figures = {
        "reconstructions": reconstruction_plots.reconstruction_grid(found),
        "psnr-by-step": reconstruction_plots.curves(found),
    }
    files = [write_whole(folder / "attack.json", data.encode())]
    for stem, figure in figures.items():
        files += save(figure, folder, stem)
    return files
