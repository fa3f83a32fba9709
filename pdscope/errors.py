"""Every error that PDScope raises on purpose: one line that names the cause and the remedy.

The commands print such an error as one line and exit with 1; anything else that escapes is a
defect. Imports nothing of ours.
"""

import errno


class PdscopeError(Exception):
    """Base of all of PDScope's own errors. `status`: the C runtime's code, where it comes from
    there."""

    status = 0


class ModelError(PdscopeError):
    """The model directory is incomplete, inconsistent, damaged, or of an unsupported kind."""


class PlanError(PdscopeError):
    """A plan is missing, cut short, edited or of another version; or a program breaks a rule."""


class TargetError(PdscopeError):
    """The CPU, the C compiler or the operating system cannot do what was asked."""


class BudgetError(PdscopeError):
    """A limit was exceeded: context length, KV capacity, rows of a step, memory, disk."""


class DiskError(BudgetError):
    """A disk is full, or a file may not grow: the same call can succeed later."""


class InputError(PdscopeError):
    """What the caller passed cannot be used: prompt, token id, option, sampling parameter."""


class Cancelled(PdscopeError):
    """Generation was stopped by cancel() from another thread."""


# The remedy of EFBIG, which has nothing to do with the space on the disk.
FILE_LIMIT = "the file-size limit is reached (see ulimit -f); raise it with ulimit -f unlimited"


def disk_fault(error: OSError, full: str) -> str | None:
    """Why the disk took no more, with the remedy: `full`, or that of a file-size limit; None for
    any other error."""
    if error.errno == errno.EFBIG:
        return FILE_LIMIT
    return full if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
