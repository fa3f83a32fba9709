"""AMX kernels against their scalar twin at random sizes and at those of a published model.

Holds of the issue "CPU expert kernels": "AMX bf16 (and int8)", "each with its scalar twin and a
differential test", and "its tests live in tests/device". Where the CPU has AMX, tests/differential
runs its own edges and values on this path too. Skipped by name where it has not.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cc
from support.kernel_calls import ACT, ADD, F32, call, ffi, quantise, table
from support.packing import (
    GROUP,
    aligned,
    bf16_bits,
    bf16_value,
    pack,
    pack_int,
    pack_int_pair,
)

pytestmark = pytest.mark.skipif(not cc.runnable("amx"), reason="needs a CPU with AMX")

# Around tiles of 16 rows, pairs of them, and the row blocks of prefill.
ROWS = st.one_of(st.integers(1, 70), st.sampled_from((127, 128, 129, 255, 256, 257, 511, 600)))
COLS = st.one_of(st.integers(1, 100), st.sampled_from((127, 128, 129, 255, 257)))
SEEDS = st.integers(0, 2**32 - 1)
QWEN3 = (2048, 768)  # hidden size and one expert's width of Qwen3-30B-A3B
PREFILL = 2048  # rows
LOOKED_AT = 24  # of them, by the scalar twin, which is slow: rows do not depend on each other


def index(values: np.ndarray) -> Any:
    return ffi.cast("int32_t *", values.ctypes.data)


def bf16_rows(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    return bf16_bits(rng.standard_normal((rows, k)).astype(np.float32))


def bf16_weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Rounded to bf16, so that a product with them is exact in float32."""
    return bf16_value(bf16_bits(rng.standard_normal(shape).astype(np.float32)))


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, half_k=st.integers(1, 700), cols=COLS, seed=SEEDS)
def test_bf16_gemm_is_near_its_twin(rows: int, half_k: int, cols: int, seed: int) -> None:
    """Same products, sums in another order: within a few roundings of the largest partial sum.
    Rows come through an index, and nothing is written beyond the last column."""
    rng = np.random.default_rng(seed)
    k = 2 * half_k
    x, w = bf16_rows(rng, rows, k), bf16_weights(rng, cols, k)
    packed = pack(w, "bf16", k_align=2)
    at = rng.permutation(rows).astype(np.int32)
    got, want = np.full((2, rows, cols + 3), 7, np.float32)
    shape = {"k": k, "panel": k * 32, "x_index": index(at), "y_index": index(at)}
    for path, y in (("amx", got), ("scalar", want)):
        call(table(path).bf16.gemm, x, packed, y, cols, out=F32, **shape)
        call(table(path).bf16.gemm, x, packed, y, cols, out=ADD, **shape)
    room = 2 * np.abs(bf16_value(x)) @ np.abs(w).T * 2**-20
    assert (np.abs(got - want)[:, :cols] <= room + 1e-6).all()
    assert (got[:, cols:] == 7).all()


@settings(max_examples=40, deadline=None)
@given(rows=ROWS, half_k=st.integers(1, 400), inter=COLS, seed=SEEDS)
def test_bf16_swiglu_is_near_its_twin(rows: int, half_k: int, inter: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = 2 * half_k
    x = bf16_rows(rng, rows, k)
    pair = pack(bf16_weights(rng, 2, inter, k) / k**0.5, "bf16", k_align=2, interleave=True)
    got, want = np.full((2, rows, inter + 40), 7, np.uint16)
    for path, y in (("amx", got), ("scalar", want)):
        kernel = table(path).bf16.swiglu
        call(kernel, x, pair, y, inter, k=k, panel=k * 32, out=ACT, pad=inter + 32)
    np.testing.assert_allclose(
        bf16_value(got)[:, :inter], bf16_value(want)[:, :inter], rtol=2**-7, atol=1e-4
    )
    assert (got[:, inter : inter + 32] == 0).all() and (got[:, inter + 32 :] == 7).all()


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, k=st.integers(1, 40), cols=COLS, bits=st.sampled_from((8, 4)), seed=SEEDS)
def test_integer_gemm_is_its_twin(rows: int, k: int, cols: int, bits: int, seed: int) -> None:
    """Bit for bit, on weights of any byte."""
    rng = np.random.default_rng(seed)
    k *= 64
    q = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (cols, k)).astype(np.int8)
    scale = bf16_bits(rng.standard_normal((cols, k // GROUP[bits])).astype(np.float32))
    w = aligned(pack_int(q, scale, bits))
    got, want = np.full((2, rows, cols + 3), 7, np.float32)
    twin = getattr(table("scalar"), f"i{bits}")
    x = quantise(twin, bf16_rows(rng, rows, k), bits)
    at = rng.permutation(rows).astype(np.int32)
    for kernels, y in ((getattr(table("amx"), f"i{bits}"), got), (twin, want)):
        shape = {"k": k, "panel": w.shape[1], "x_index": index(at), "y_index": index(at)}
        call(kernels.gemm, x, w, y, cols, out=F32, **shape)
    assert (got == want).all()


@pytest.mark.parametrize("l2_bytes", [0, 2 << 20])
def test_an_expert_of_qwen3_in_bf16(l2_bytes: int) -> None:
    """Both matrices of one expert on 2048 rows, for two sizes of second-level cache."""
    rng = np.random.default_rng(1)
    hidden, inter = QWEN3
    looked = np.sort(rng.choice(PREFILL, LOOKED_AT, replace=False))
    x = bf16_rows(rng, PREFILL, hidden)
    pair = pack(bf16_weights(rng, 2, inter, hidden) / 45, "bf16", interleave=True)
    gated, want = (np.zeros((n, inter), np.uint16) for n in (PREFILL, LOOKED_AT))
    for path, rows, y in (("amx", x, gated), ("scalar", x[looked], want)):
        call(
            table(path).bf16.swiglu,
            rows,
            pair,
            y,
            inter,
            k=hidden,
            panel=hidden * 32,
            out=ACT,
            l2_bytes=l2_bytes,
        )
    np.testing.assert_allclose(bf16_value(gated[looked]), bf16_value(want), rtol=2**-7, atol=1e-4)
    w = bf16_weights(rng, hidden, inter)
    down = pack(w, "bf16")
    got, sums = (np.zeros((n, hidden), np.float32) for n in (PREFILL, LOOKED_AT))
    for path, rows, total in (("amx", gated, got), ("scalar", gated[looked], sums)):
        more = {"k": inter, "panel": inter * 32, "out": F32, "l2_bytes": l2_bytes}
        call(table(path).bf16.gemm, rows, down, total, hidden, **more)
    room = np.abs(bf16_value(gated[looked])) @ np.abs(w).T * 2**-20
    assert (np.abs(got[looked] - sums) <= room + 1e-6).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_an_expert_of_qwen3_in_integers(bits: int) -> None:
    """As in bf16; bit for bit."""
    rng = np.random.default_rng(2)
    hidden, inter = QWEN3
    looked = np.sort(rng.choice(PREFILL, LOOKED_AT, replace=False))
    kernels, twin = (getattr(table(path), f"i{bits}") for path in ("amx", "scalar"))
    pair, _ = pack_int_pair(rng.standard_normal((2, inter, hidden)).astype(np.float32) / 45, bits)
    x = quantise(twin, bf16_rows(rng, PREFILL, hidden), bits)
    gated, want = np.zeros((PREFILL, inter), np.uint16), np.zeros((LOOKED_AT, inter), np.uint16)
    shape = {"k": hidden, "panel": pair.size // (2 * -(-inter // 16)), "out": ACT}
    call(kernels.swiglu, x, pair, gated, inter, **shape)
    call(twin.swiglu, aligned(x[looked]), pair, want, inter, **shape)
    assert (gated[looked] == want).all()
    q = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (hidden, inter)).astype(np.int8)
    scale = bf16_bits(rng.standard_normal((hidden, inter // GROUP[bits])).astype(np.float32))
    down = aligned(pack_int(q, scale, bits))
    rows = quantise(twin, gated, bits)
    got, sums = np.zeros((PREFILL, hidden), np.float32), np.zeros((LOOKED_AT, hidden), np.float32)
    shape = {"k": inter, "panel": down.shape[1], "out": F32}
    call(kernels.gemm, rows, down, got, hidden, **shape)
    call(twin.gemm, aligned(rows[looked]), down, sums, hidden, **shape)
    assert (got[looked] == sums).all()
