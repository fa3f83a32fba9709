"""Is a file of the model directory one that can be read? Asked before any is opened: a pipe would
wait for a writer for ever.

May import the standard library and pdscope.errors.
"""

import os
import stat
from pathlib import Path

from pdscope.errors import ModelError

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_file(path: Path) -> None:
    """ModelError for what is there but cannot be read as a file: a directory, a pipe, a device, or
    a link to nothing, as in a download cache whose blobs were deleted. A path where nothing is
    passes."""
    if path.is_symlink() and not path.exists():
        raise ModelError(
            f"{path}: is a symbolic link to {os.readlink(path)}, which does not exist; download "
            "the file again, or correct the link"
        )
    if path.exists() and not path.is_file():
        mode = path.stat().st_mode
        kind = next((name for test, name in _KINDS if test(mode)), "something else")
        raise ModelError(
            f"{path}: is {kind}, expected a regular file; remove it, and download the file"
        )
