"""Checks of what callers pass: integers, arrays of them, ranges, sizes, texts, paths, flags.

May import numpy and pdscope.errors. Each function raises InputError, which names the argument.
"""

import operator
import os
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdscope.errors import InputError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def integers(name: str, values: ArrayLike | Iterable[int]) -> NDArray[np.int32]:
    """Of any shape; each fits 32 bits, and none is a boolean."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name}: expected integers in one dimension") from None
    if isinstance(values, list | tuple) and any(isinstance(v, bool | np.bool_) for v in values):
        raise InputError(f"{name}: expected integers, found a boolean")
    if array.size == 0:
        return np.empty(array.shape, np.int32)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, found {array.dtype}")
    if array.min() < -(2**31) or array.max() >= 2**31:
        raise InputError(f"{name}: a number does not fit 32 bits")
    return array.astype(np.int32, copy=False)


def index(name: str, value: object) -> int:
    """A Python or numpy integer, no boolean."""
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InputError(f"{name} is {value!r}, expected an integer")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """An integer from `low` to `high` - 1."""
    value = index(name, value)
    if not low <= value < high:
        raise InputError(f"{name} is {value}, expected {low} to {high - 1}")


def text(name: str, value: object) -> str:
    """A string that UTF-8 can hold."""
    if not isinstance(value, str):
        raise InputError(f"{name} is {value!r}, expected a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} is not valid UTF-8 (at character {error.start}): convert it to UTF-8 first"
        ) from None
    return value


def path(name: str, value: object) -> Path:
    """A string or path object that can name a file: not empty, without a NUL. Its bytes need not
    be UTF-8."""
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise InputError(f"{name} is {value!r}, expected a path: a text or a pathlib.Path")
    if not given or "\0" in given:
        what = "without a NUL character" if given else "that is not empty"
        raise InputError(f"{name} is {given!r}, expected a path {what}")
    return Path(given)


def model_there(given: Path) -> None:
    """Raises InputError where there is nothing."""
    if not given.exists():
        raise InputError(f"{given}: no such file or directory; expected a model directory")


def byte_count(name: str, value: object) -> int:
    """A number of bytes: an integer, or a text such as "4200000", "4.2MB" or "4 MiB"."""
    if not isinstance(value, str):
        return index(name, value)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if found is None or (unit := found[2].upper()) not in _UNITS:
        raise InputError(f"{name} is {value!r}, expected bytes: a number, or e.g. 4.2MB or 4MiB")
    return int(Decimal(found[1]) * _UNITS[unit])


def flag(name: str, value: object) -> bool:
    """True or False, of Python or numpy."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{name} is {value!r}, expected True or False")
    return bool(value)


def share_or_auto(name: str, value: object) -> float | None:
    """A number from 0 to 1; None for "auto"; anything else raises InputError."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{name} is {value!r}, expected auto or a number from 0 to 1")
    return float(value)
