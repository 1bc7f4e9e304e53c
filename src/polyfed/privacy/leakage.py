"""``polyfed attack RUN``: what uploads give away of a client's images (FedIN's figure 10; class means beside it)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from polyfed.errors import RequestError
from polyfed.privacy import pictures
from polyfed.privacy.exposure import expose
from polyfed.privacy.trials import Attack, Settings, carry_out
from polyfed.report.style import save
from polyfed.report.writing import make_folder, write_whole

__all__ = ["attack"]

FILES = ("attack.json", "reconstructions.png", "reconstructions.svg", "psnr-by-step.png", "psnr-by-step.svg")


def attack(
    run: str | Path,
    *,
    client: int = 0,
    images: int = 4,
    noise: Sequence[float] | None = None,
    sources: Sequence[str] | None = None,
    steps: int = 1000,
    lr: float = 0.1,
    tv: Sequence[float] = (0.0, 1.0),
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    force: bool = False,
) -> tuple[Attack, list[Path]]:
    """Reconstruct images of a client from what it sent last in a finished run, and score them.

    Args:
        run: the run's folder.
        client: whose images. images: N, how many: the first pairs of its upload, or the classes it has fewest of.
        noise: levels on what is sent; None: 0, and the run's own level (the paper's 0.8 where it has none).
        sources: "s_in", "s_out" or both for FedIN (None: s_in, as in the paper); "prototypes" otherwise.
        steps, lr: of Adam. tv: weights of the total variation, each a reconstruction; 0 is the paper's objective.
        seed: of the noise that the reconstructions start from, one for each image, alike for all levels.
        device: where networks compute.
        out: folder; None: ``RUN/attack``. force: replace what an earlier attack wrote there.

    Returns:
        What came of it, and the files written.

    Raises:
        RequestError: the request is wrong; nothing has been written.
        RunError: the loss is not finite.
    """
    settings = Settings(steps, lr, tuple(dict.fromkeys(map(float, tv))), seed)
    if images < 1:
        raise RequestError(f"--images: expected at least 1, came {images}")
    if noise is not None and (not noise or not all(0 <= level < math.inf for level in noise)):
        raise RequestError(f"--noise: expected levels of at least 0, came {list(noise)}")
    folder = Path(run) / "attack" if out is None else Path(out)
    _check_place(folder, force)
    exposure = expose(run, client, images, noise, sources, device)
    found = carry_out(exposure, settings)
    return found, _write(found, folder)


# files ------------------------------------------------------------------------------------------------------------


def _check_place(folder: Path, force: bool) -> None:
    """Whether the files can be written there without loss.

    Raises:
        RequestError: an earlier attack or other files lie there, or nothing can.
    """
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise RequestError(
            f"expected a place for the attack's folder {folder}, came {above}, where nothing can be written"
        )
    there = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    if there - set(FILES):
        raise RequestError(f"expected an empty or new folder for the attack, came {folder} with other files in it")
    if there and not force:
        raise RequestError(f"{folder} already holds an attack; replace it with --force or choose another --out")


def _write(found: Attack, folder: Path) -> list[Path]:
    make_folder(folder)
    data = json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n"
    figures = {"reconstructions": pictures.grid(found), "psnr-by-step": pictures.curves(found)}
    files = [write_whole(folder / "attack.json", data.encode())]
    for stem, figure in figures.items():
        files += save(figure, folder, stem)
    return files
