"""Folders that are for their user alone: others, tried as one of them, get nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polyfed.errors import ConfigError
from polyfed.places import make_private, private_files
from tests.helpers.other_users import NOBODY, needs_root, open_to_nobody, shared_folder


@needs_root
@pytest.mark.parametrize("there", [False, True])
def test_others_do_not_enter_a_private_folder(there: bool) -> None:
    with shared_folder() as shared:
        folder = shared / "mine"
        if there:
            folder.mkdir(mode=0o755)
            (folder / "old").write_text("weights")
            assert open_to_nobody(folder) == [str(folder), str(folder / "old")]
        make_private(folder)
        (folder / "new").write_text("weights")
        assert open_to_nobody(folder, folder / "old", folder / "new") == []


def test_a_folder_that_others_can_have_filled_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    folder.chmod(0o777)
    make_private(folder)  # nothing is in it
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "noise.secret").touch()
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match=r"into which only its user can write, got .*; look at what is in it"):
        make_private(folder)


@needs_root
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=r"expected a folder of this user's own, got .*, which belongs to another"):
        make_private(tmp_path)


def test_within_the_block_and_nowhere_else_all_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with private_files():
            (tmp_path / "inside").touch()
        (tmp_path / "outside").touch()
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("inside", "outside")] == [0o600, 0o644]
