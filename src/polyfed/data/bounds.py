"""What a file may ask for before it is read: that reading it ends, and that what is in it has room.

A pipe may never say anything, a device such as ``/dev/zero`` never stops, and a few packed bytes may stand for more
than the machine has memory for.
"""

from __future__ import annotations

import io
import os
import stat
import warnings
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from polyfed.errors import ConfigError
from polyfed.places import check_name

_UNPACKED = 2**28  # bytes that an archive of any size may hold
_RATIO = 100  # and beyond these so many times its own; arrays of numbers shrink to a tenth or so, zeros to a thousandth


def check_file(path: Path) -> None:
    """Whether a path that is there is a file or a folder, or a link to one.

    Raises:
        ConfigError: it is a pipe, a device or a socket; or there can be no such file.
    """
    check_name(path)
    try:
        mode = path.stat().st_mode
    except OSError:  # the reader tells
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ConfigError(f"expected a file, got a pipe or a device: {path}; write what comes out of it into a file")


def check_unpacked(archive: ZipFile, path: Path) -> None:
    """Whether an archive unpacks to no more than its size allows.

    Raises:
        ConfigError: it does not.
    """
    packed = path.stat().st_size
    size = sum(member.file_size for member in archive.infolist())
    if size > max(_UNPACKED, _RATIO * packed):
        raise ConfigError(
            f"expected at most {max(_UNPACKED, _RATIO * packed)} bytes of arrays in {path}, a file of {packed} bytes, "
            f"got {size}; store them with numpy.savez"
        )


def check_room(size: int, what: str, path: Path) -> None:
    """Whether this machine has so much memory at all.

    Args:
        size: in bytes. what: needs it, and where it comes from, for the message.

    Raises:
        ConfigError: it has less.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ConfigError(
            f"expected {what} for which there is memory, got {size} bytes of them in {path}, where there are {memory}"
        )


def open_image(data: bytes) -> Any:
    """A Pillow image, not decoded yet.

    Raises:
        Exception: nearly any, as Pillow's decoders do; also for an image of more pixels than ``Image.MAX_IMAGE_PIXELS``
            (89 million), of which Pillow by itself only warns.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(data))


def upright(image: Any) -> tuple[Any, bool]:
    """A Pillow image as its EXIF tag says that it is to be shown, and whether that turned it.

    A tag that cannot be read does not count.
    """
    from PIL import ExifTags, ImageOps

    try:
        is_turned = image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
    except Exception:  # Pillow's readers raise nearly anything on foreign bytes
        is_turned = False
    return (ImageOps.exif_transpose(image) if is_turned else image), is_turned
