"""Checks of what callers of a session pass: integers, arrays of them, ranges.

May import numpy and pdscope.errors. Each function raises InputError, which names the argument.
"""

import operator
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdscope.errors import InputError


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
