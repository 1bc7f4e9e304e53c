"""The list of pure functions names the files that are there."""

from __future__ import annotations

from pathlib import Path

import polyfed.functional


def test_every_file_is_listed_once_and_in_order() -> None:
    folder = Path(polyfed.functional.__file__).parent
    listed = [line.split()[0] for line in (polyfed.functional.__doc__ or "").splitlines()[2:]]
    assert listed == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
