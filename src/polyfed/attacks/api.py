"""The two attacks on finished runs, with their files in ``RUN/attack``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from polyfed.attacks.audit import AuditOptions, audit_run, roc_curves, to_markdown
from polyfed.attacks.inference import ShadowData
from polyfed.attacks.reconstruction import AttackResult, collect_target, reconstruction_grid, run_attack
from polyfed.errors import ConfigError
from polyfed.report.atomic_files import make_folder, write_whole
from polyfed.report.plot_style import save
from polyfed.report.run_records import RunRecord, load_runs
from polyfed.results.read import ATTACK, check_links

__all__ = ["attack", "leakage"]

FILES = ("attack.json", "reconstructions.png", "reconstructions.svg")
REPORT_FILES = ("leakage.json", "leakage.md", "membership.png", "membership.svg")


def attack(  # noqa: PLR0913 - what a user may choose, each by its name
    run: str | Path,
    *,
    client: int = 0,
    images: int = 4,
    noise: Sequence[float] | None = None,
    sources: Sequence[str] | None = None,
    steps: int = 1000,
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
        steps: of Adam. seed: of the noise that reconstructions start from, one for each image, alike for all levels.
        device: where networks compute.
        out: folder; None: ``RUN/attack``. overwrite: replace what an earlier attack wrote there.
        trust: whether code that the folder names ("package.module:name") may be imported.

    Returns:
        The result, and the files written.

    Raises:
        ConfigError: the request is wrong; nothing has been written.
        RunError: the loss is not finite.
    """
    for option, value, least in (("images", images, 1), ("steps", steps, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(f"--{option}: expected at least {least}, got {value}")
    if noise is not None and (not noise or not all(0 <= level < math.inf for level in noise)):
        raise ConfigError(f"--noise: expected levels of at least 0, got {list(noise)}")
    check_links(Path(run))
    folder = Path(run) / ATTACK if out is None else Path(out)
    _check_place(folder, overwrite, FILES, "an attack")
    result = run_attack(collect_target(run, client, images, noise, sources, device, trust), steps, seed=seed)
    files = [write_whole(make_folder(folder) / "attack.json", _json(result.content))]
    return result, [*files, *save(reconstruction_grid(result), folder, "reconstructions")]


def leakage(  # noqa: PLR0913 - what a user may choose, each by its name
    runs: str | Path | Sequence[str | Path],
    *,
    shadows: int = 16,
    shadow_data: ShadowData = "others",
    clients: int | None = None,
    images: int = 4,
    steps: int = 300,
    seed: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    trust: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], list[Path]]:
    """What an honest-but-curious server got in finished runs, side by side.

    Args:
        runs: run folders, or folders above them.
        shadows: shadow models of each kind for every client, for LiRA; 0: none.
        shadow_data: what the attacker trains them on where it does not use the tested rows: "others", the other
            clients' training samples, or "holdout", the rows held out for the server.
        clients: the first so many of those who took part; None: all.
        images: how many of the first client's images are made again; 0: none. steps: of Adam for each.
        seed: of all draws.
        out: folder; None: ``attack`` in the run's folder, or in the one above all of them.
        overwrite: replace what an earlier report wrote there. say: receives lines on the progress.
        trust: whether code that the folders name ("package.module:name") may be imported.

    Returns:
        Each run's entry in ``leakage.json``, and the files written.

    Raises:
        ConfigError: the request is wrong, or a run does not come out as recorded; nothing has been written.
    """
    options = AuditOptions(shadows, shadow_data, clients, images, steps, seed)
    paths = [runs] if isinstance(runs, str | Path) else list(runs)
    records = _named_apart([record for record in load_runs(paths, trust) if record.finished])
    if not records:
        raise ConfigError(f"expected folders of finished runs, got {', '.join(map(str, paths))}")
    above = Path(os.path.commonpath([record.path.absolute() for record in records]))
    check_links(above)
    folder = above / ATTACK if out is None else Path(out)
    _check_place(folder, overwrite, REPORT_FILES, "a report of leakage")
    found = [audit_run(record, options, say) for record in records]
    content = {"options": asdict(options), "runs": found}
    files = [write_whole(make_folder(folder) / "leakage.json", _json(content))]
    files.append(write_whole(folder / "leakage.md", to_markdown(found, options).encode()))
    return found, [*files, *save(roc_curves(records, found, options), folder, "membership")]


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def _named_apart(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs, with the seed in the names of those that differ in nothing else."""
    names = [record.name for record in records]
    return [
        replace(record, name=f"{record.name}, seed {record.seed}") if names.count(record.name) > 1 else record
        for record in records
    ]


def _check_place(folder: Path, overwrite: bool, own: Sequence[str], what: str) -> None:
    """Whether the files can be written there without loss."""
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
