"""Calls of single kernels (runtime_c/kernels/kernels.h) on numpy arrays.

Arrays are passed by address: the caller keeps them alive.
"""

from functools import cache
from typing import Any

import numpy as np
from support import cc
from support.c_headers import interface
from support.packing import GROUP, aligned

PATHS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")
F32, ADD, ACT = 0, 1, 2  # pds_gemm_out

ffi = interface("kernels/kernels.h")


@cache
def library() -> Any:
    """Every kernel path that this machine's compiler can build."""
    return ffi.dlopen(str(cc.shared_object(cc.kernel_sources())))


def table(path: str) -> Any:
    """The pds_kernels of a path."""
    return getattr(library(), f"pds_kernels_{path}")()


def pointer(array: np.ndarray) -> Any:
    return ffi.cast("void *", array.ctypes.data)


def floats(array: np.ndarray) -> Any:
    return ffi.cast("float *", array.ctypes.data)


def call(
    kernel: Any,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    cols: int,
    *,
    k: int,
    panel: int,
    **more: Any,
) -> None:
    """One call of gemm or swiglu on x [rows, stride], packed w with `panel` bytes a panel, and y
    [rows, stride]. more: other fields of pds_gemm."""
    g = ffi.new("pds_gemm *")
    g.x, g.x_stride, g.x_div = pointer(x), x.shape[1], 1
    g.w, g.panel_stride = pointer(w), panel
    g.y, g.y_stride = pointer(y), y.shape[1]
    g.rows, g.k, g.cols = more.pop("rows", x.shape[0]), k, cols
    for name, value in more.items():
        setattr(g, name, value)
    kernel(g)


def quantise(kernels: Any, x: np.ndarray, bits: int) -> np.ndarray:
    """bf16 bits [rows, n] -> rows of quantise [rows, bytes]."""
    rows, n = x.shape
    k = -(-n // 64) * 64
    y = aligned(np.full((rows, k + 8 * (k // GROUP[bits])), 99, np.uint8))
    for i in range(rows):
        row = np.ascontiguousarray(x[i])
        kernels.quantise(ffi.cast("uint16_t *", row.ctypes.data), n, k, pointer(y[i]))
    return y
