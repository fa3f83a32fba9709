"""Quantise weights to int8 and int4 with one bf16 scale a group of inputs, symmetric.

The same values give the same bits, whatever the number of cores. May import numpy and
pdscope.compiler.lowered.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.lowered import Form

Array = NDArray[Any]

BLOCK = 2048  # groups that one call works on: its arrays stay in a core's second-level cache
TINY = 2.0**-100  # groups whose largest value is below this become zero

#: int4: where the group's extreme value would fall, of the scales that are tried. Negative: on
#: the side that reaches -8. Each candidate's values are then given their least-squares scale.
EXTREMES = (-8.4, -7.8, -7.2, 7.3, 6.7)


def quantise(m: Array, form: Form) -> tuple[Array, Array]:
    """Values and scales of a matrix: int8 [n, k] and bf16 bits [n, k / form.group].

    `m` is float32 [n, k], k a multiple of the group; value * scale is close to it. int8 values
    lie in -127..127 of scale max |w| / 127; int4 values in -8..7 of the scale with the least
    squared error among those tried. A group with a NaN or an infinity has a NaN as its scale.
    """
    groups = np.ascontiguousarray(m, np.float32).reshape(-1, form.group)
    values = np.empty(groups.shape, np.int8)
    scales = np.empty(len(groups), np.uint16)
    block = _int8 if form is Form.PACKED_INT8 else _int4

    def run(first: int) -> None:
        part = slice(first, first + BLOCK)
        with np.errstate(all="ignore"):  # of NaN, infinities and groups of zeros
            values[part], scales[part] = block(groups[part])

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for _ in pool.map(run, range(0, len(groups), BLOCK)):
            pass
    return values.reshape(m.shape), scales.reshape(len(m), -1)


def _int8(rows: Array) -> tuple[Array, Array]:
    """One block, [groups, group]."""
    w = np.ascontiguousarray(rows.T)
    most = np.maximum(w.max(0), -w.min(0))
    scale = to_bfloat16(_marked(most, most / np.float32(127)))
    return _values(w, scale, -127, 127).T, scale


def _int4(rows: Array) -> tuple[Array, Array]:
    """One block, [groups, group]: the sum of squared errors of q * s is least for s = wq / qq, and
    then w*w - wq * wq / qq."""
    w = np.ascontiguousarray(rows.T)
    high, low = w.max(0), w.min(0)
    peak = np.where(-low > high, low, high)
    most = np.abs(peak)
    unit = w * (1 / most)  # in -1..1: its squares do not overflow
    sign = np.sign(peak)
    best, scale = np.zeros(len(rows), np.float32), np.zeros(len(rows), np.float32)
    q = np.empty_like(w)
    for extreme in EXTREMES:
        np.multiply(unit, sign * np.float32(extreme), out=q)
        np.rint(q, out=q)
        np.clip(q, -8, 7, out=q)
        wq = np.einsum("ij,ij->j", unit, q)
        fitted = wq / np.einsum("ij,ij->j", q, q)
        gain = wq * fitted
        better = gain > best
        best[better] = gain[better]
        scale[better] = fitted[better]
    bits = to_bfloat16(_marked(most, scale * most))
    return _values(w, bits, -8, 7).T, bits


def _marked(most: Array, scale: Array) -> Array:
    """0 for groups of nothing, NaN for groups that hold a NaN or an infinity."""
    scale = np.where(most < TINY, np.float32(0), scale)
    return np.where(np.isfinite(most), scale, np.float32("nan"))


def _values(w: Array, scale: Array, least: int, most: int) -> Array:
    """The nearest multiples of the scales, [group, groups]; 0 where a scale is 0 or NaN."""
    s = to_float32(scale)
    inverse = np.where(np.abs(s) > 0, 1 / s, np.float32(0))
    q = w * inverse
    q[:, ~np.isfinite(s)] = 0
    np.rint(q, out=q)
    np.clip(q, least, most, out=q)
    return q.astype(np.int8)


def to_float32(a: Array) -> Array:
    """bf16 bits (uint16) or float -> float32, exact."""
    if a.dtype == np.uint16:
        return (a.astype(np.uint32) << 16).view(np.float32)
    return a.astype(np.float32, copy=False)


def to_bfloat16(a: Array) -> Array:
    """float32 -> bf16 bits, to nearest even; NaN stays NaN. bf16 bits pass."""
    if a.dtype == np.uint16:
        return a
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    made = rounded.astype(np.uint16)
    nan = np.isnan(a)
    if nan.any():
        made[nan] = (bits[nan] >> 16) | 0x40
    return made
