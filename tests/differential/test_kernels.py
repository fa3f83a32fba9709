"""Every kernel of every path against numpy, at sizes around each vector and tile edge.

Holds of the issue: kernel paths chosen at load must agree (the scalar twin runs through the same
checks); rows per expert 0, 1, 2, 3, 7, 8, 9 are right on every path; paths that this CPU lacks are
skipped by name.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cc
from support.kernel_calls import ACT, ADD, F32, PATHS, call, ffi, floats, pointer, table
from support.packing import act_array, bf16_bits, bf16_value, from_act, pack

ACTS = ("f32", "bf16")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    if not cc.runnable(request.param):
        pytest.skip(f"kernel path {request.param} is not runnable on this CPU")
    return str(request.param)


def gemm(
    kernel: Any, act: str, x: np.ndarray, w: np.ndarray, y: np.ndarray, cols: int, **more: Any
) -> None:
    """One call of gemm or swiglu on row-major x, packed w and y, which the caller keeps alive."""
    k = x.shape[1]
    call(kernel, x, w, y, cols, k=k, panel=k * 16 * w.itemsize, **more)


ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 127, 128, 129)
KS = (2, 4, 30, 32, 62, 64, 66, 96, 160, 1058)


def sizes() -> Iterator[tuple[int, int, int]]:
    yield from ((rows, 64, 48) for rows in ROWS)
    yield from ((3, k, 20) for k in KS)
    yield from ((67, k, 36) for k in (30, 32, 98, 608, 1058))
    yield from ((200, 6170, 68), (530, 34, 20))  # rows and k that amx takes in parts
    yield from (
        (rows, 32, cols)
        for cols in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 79, 80, 96)
        for rows in (1, 9)
    )


def case(rng: np.random.Generator, act: str, rows: int, k: int, n: int) -> tuple[np.ndarray, ...]:
    """x [rows, k], packed W [n, k], and both as float64."""
    x = act_array(rng.standard_normal((rows, k)), act)
    w = rng.standard_normal((n, k)).astype(np.float32)
    if act == "bf16":
        w = bf16_value(bf16_bits(w))
    return x, pack(w, act, k_align=2), from_act(x, act).astype(np.float64), w.astype(np.float64)


@pytest.mark.parametrize("act", ACTS)
def test_gemm_matches_numpy_at_every_edge(path: str, act: str) -> None:
    kernel = getattr(table(path), act).gemm
    rng = np.random.default_rng(1)
    for rows, k, cols in sizes():
        x, w, x64, w64 = case(rng, act, rows, k, cols)
        bias = rng.standard_normal(cols).astype(np.float32)
        want = x64 @ w64.T + bias
        y = np.full((rows, cols + 3), 7, np.float32)
        gemm(kernel, act, x, w, y, cols, bias=floats(bias), out=F32)
        near = 2e-5 * max(1.0, (k / 64) ** 0.5, k / 100)  # a chain of k rounded sums
        np.testing.assert_allclose(
            y[:, :cols], want, rtol=2e-5, atol=near, err_msg=f"{rows} {k} {cols}"
        )
        assert (y[:, cols:] == 7).all(), "wrote beyond the last column"
        gemm(kernel, act, x, w, y, cols, out=ADD)
        np.testing.assert_allclose(y[:, :cols], 2 * want - bias, rtol=4e-5, atol=2 * near)
        assert (y[:, cols:] == 7).all()
        rounded = act_array(np.full((rows, cols + 9), 7), act)
        gemm(kernel, act, x, w, rounded, cols, out=ACT, pad=cols + 5)
        got = from_act(rounded, act)
        tolerance = 2e-5 if act == "f32" else 2**-8
        np.testing.assert_allclose(
            got[:, :cols], want - bias, rtol=tolerance, atol=2e-3 if act == "bf16" else near
        )
        assert (got[:, cols : cols + 5] == 0).all() and (got[:, cols + 5 :] == 7).all()


@pytest.mark.parametrize("act", ACTS)
def test_gemm_rows_are_independent_of_their_company(path: str, act: str) -> None:
    """One chain over k: a row computed alone, or a panel computed alone, gives the same bits."""
    kernel = getattr(table(path), act).gemm
    rng = np.random.default_rng(2)
    x, w, _, _ = case(rng, act, 19, 160, 112)
    whole = np.zeros((19, 112), np.float32)
    gemm(kernel, act, x, w, whole, 112)
    for rows in (1, 2, 3, 8):
        for first in range(0, 19 - rows, rows):
            part = np.zeros((rows, 112), np.float32)
            gemm(kernel, act, np.ascontiguousarray(x[first : first + rows]), w, part, 112)
            assert (part == whole[first : first + rows]).all()
    per_panel = w.size // 7
    for p in range(7):
        part = np.zeros((19, 16), np.float32)
        gemm(
            kernel,
            act,
            x,
            np.ascontiguousarray(w.reshape(-1)[p * per_panel : (p + 1) * per_panel]),
            part,
            16,
        )
        assert (part == whole[:, 16 * p : 16 * p + 16]).all()


@pytest.mark.parametrize("act", ACTS)
def test_gemm_cut_into_any_rows_and_columns_gives_the_same_bits(path: str, act: str) -> None:
    """As the parallel jobs cut them: rows from index lists, K in several parts, two passes of
    matrix tiles and more."""
    kernels = getattr(table(path), act)
    rng = np.random.default_rng(8)
    x, w, _, _ = case(rng, act, 150, 1100, 80)
    gate_up = pack(rng.standard_normal((2, 40, 1100)).astype(np.float32) * 0.1, act, 2, True)
    index = rng.permutation(150).astype(np.int32)
    whole = np.zeros((150, 80), np.float32)
    gated = act_array(np.zeros((150, 40)), act)
    gemm(kernels.gemm, act, x, w, whole, 80)
    gemm(kernels.swiglu, act, x, gate_up, gated, 40)
    for first, rows in ((0, 1), (7, 15), (20, 16), (33, 17), (40, 47), (0, 129), (21, 128)):
        at = ffi.cast("int32_t *", index[first:].ctypes.data)
        part = np.zeros((150, 80), np.float32)
        gemm(kernels.gemm, act, x, w, part, 80, rows=rows, x_index=at, y_index=at)
        chosen = index[first : first + rows]
        assert (part[chosen] == whole[chosen]).all()
        half = act_array(np.zeros((150, 40)), act)
        gemm(kernels.swiglu, act, x, gate_up, half, 16, rows=rows, x_index=at, y_index=at)
        assert (half[chosen, :16] == gated[chosen, :16]).all()
        assert not half[:, 16:].any()


@pytest.mark.parametrize("act", ACTS)
def test_gemm_gathers_and_scatters_rows(path: str, act: str) -> None:
    kernel = getattr(table(path), act).gemm
    rng = np.random.default_rng(3)
    x, w, x64, w64 = case(rng, act, 7, 64, 32)
    for rows in (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 21):
        index = rng.permutation(21)[:rows].astype(np.int32)
        y = np.full((21, 32), 5, np.float32)
        at = ffi.cast("int32_t *", index.ctypes.data)
        gemm(kernel, act, x, w, y, 32, rows=rows, x_index=at, x_div=3, y_index=at)
        want = np.full((21, 32), 5.0)
        want[index] = x64[index // 3] @ w64.T
        np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("act", ACTS)
def test_a_streamed_output_has_the_same_bits(path: str, act: str) -> None:
    """Issue "CPU expert kernels": outputs that are written past the caches, where rows of y are
    whole cache lines and where they are not."""
    rng = np.random.default_rng(6)
    for rows, cols, offset in ((1, 64, 0), (9, 64, 0), (130, 52, 0), (130, 64, 1)):
        x, w, *_ = case(rng, act, rows, 64, cols)
        buffer = np.zeros(rows * 64 + 32, np.float32)
        first = -buffer.ctypes.data % 64 // 4 + offset
        y = buffer[first : first + rows * 64].reshape(rows, 64)
        want = np.zeros_like(y)
        gemm(getattr(table(path), act).gemm, act, x, w, want, cols, out=F32)
        gemm(getattr(table(path), act).gemm, act, x, w, y, cols, out=F32, stream_y=1)
        np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("act", ACTS)
def test_swiglu_matches_numpy_and_zeroes_its_padding(path: str, act: str) -> None:
    kernel = getattr(table(path), act).swiglu
    rng = np.random.default_rng(4)
    for rows in (1, 2, 3, 4, 7, 8, 9, 17):
        for inter in (1, 15, 16, 17, 32, 33, 48, 80):
            x, _, x64, _ = case(rng, act, rows, 64, 1)
            halves = rng.standard_normal((2, inter, 64)).astype(np.float32) * 0.3
            if act == "bf16":
                halves = bf16_value(bf16_bits(halves))
            w = pack(halves, act, interleave=True)
            y = act_array(np.full((rows, 128), 7), act)
            gemm(kernel, act, x, w, y, inter, pad=96)
            gate, up = (x64 @ h.astype(np.float64).T for h in halves)
            want = gate / (1 + np.exp(-gate)) * up
            got = from_act(y, act)
            tolerance = 1e-4 if act == "f32" else 2**-7
            np.testing.assert_allclose(
                got[:, :inter], want, rtol=tolerance, atol=2e-5 if act == "f32" else 1e-3
            )
            assert (got[:, inter:96] == 0).all() and (got[:, 96:] == 7).all()


@pytest.mark.parametrize("act", ACTS)
def test_nan_and_inf_propagate_in_gemms(path: str, act: str) -> None:
    """As in IEEE arithmetic; rows without them are untouched; padding stays zero."""
    kernels = getattr(table(path), act)
    rng = np.random.default_rng(5)
    x, w, _, _ = case(rng, act, 9, 64, 24)
    clean = np.zeros((9, 24), np.float32)
    gemm(kernels.gemm, act, x, w, clean, 24)
    bad = from_act(x, act).copy()
    bad[2, 5], bad[4, 63], bad[6, 0] = np.nan, np.inf, -np.inf
    y = np.zeros((9, 24), np.float32)
    gemm(kernels.gemm, act, act_array(bad, act), w, y, 24)
    assert np.isnan(y[2]).all() and np.isinf(y[4]).all() and np.isinf(y[6]).all()
    others = [0, 1, 3, 5, 7, 8]
    assert (y[others] == clean[others]).all()
    out = act_array(np.full((9, 32), 7), act)
    gate_up = pack(rng.standard_normal((2, 20, 64)).astype(np.float32), act, interleave=True)
    gemm(kernels.swiglu, act, act_array(bad, act), gate_up, out, 20, pad=32)
    got = from_act(out, act)
    assert np.isnan(got[2, :20]).all() and not np.isfinite(got[4, :20]).any()
    assert np.isfinite(got[others]).all() and (got[:, 20:] == 0).all()


def test_silu_of_infinities_and_extremes(path: str) -> None:
    """silu(-Inf) = NaN (-Inf * 0), silu(Inf) = Inf, and no NaN for large finite inputs."""
    values = np.array(
        [-np.inf, np.inf, np.nan, -1e30, 1e30, -200, -88, 88, 200, 0, -0.0, 1e-30], np.float32
    )
    halves = np.zeros((2, len(values), 2), np.float32)
    halves[1, :, 1] = 1
    x = np.ones((1, 2), np.float32)
    got = np.zeros((1, 32), np.float32)
    with np.errstate(all="ignore"):
        halves[0, :, 0] = values
        gemm(
            table(path).f32.swiglu,
            "f32",
            x,
            pack(halves, "f32", k_align=2, interleave=True),
            got,
            len(values),
        )
        v = values.astype(np.float64)
        want = v / (1 + np.exp(-v))
    assert np.isnan(got[0, 0]) and np.isposinf(got[0, 1]) and np.isnan(got[0, 2])
    np.testing.assert_allclose(got[0, 3 : len(values)], want[3:], rtol=1e-6, atol=1e-36)


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70))
def test_conversion_to_bf16_is_round_to_nearest_even(bits: list[int]) -> None:
    """Bit-exact against integer rounding, NaN made quiet, for any fp32 bits and any length."""
    x = np.array(bits, np.uint32).view(np.float32)
    want = bf16_bits(x)
    for name in PATHS:
        if not cc.runnable(name):
            continue
        y = np.full(len(x) + 2, 77, np.uint16)
        table(name).bf16.convert(floats(x), pointer(y), len(x))
        assert (y[: len(x)] == want).all(), name
        assert (y[len(x) :] == 77).all()


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 100, 384, 2048])
def test_vector_kernels_match_numpy(path: str, n: int) -> None:
    k = table(path)
    rng = np.random.default_rng(n)
    x, w = rng.standard_normal((2, n)).astype(np.float32) * 3
    guard = np.float32(9)

    def run(call: Any, start: np.ndarray) -> np.ndarray:
        y = np.append(start, [guard, guard]).astype(np.float32)
        call(y)
        assert (y[n:] == guard).all(), "wrote beyond the end"
        return y[:n]

    x64 = x.astype(np.float64)
    got = run(lambda y: k.rms_norm(floats(x), floats(w), n, 1e-5, floats(y)), np.zeros(n))
    np.testing.assert_allclose(got, x64 / np.sqrt((x64**2).mean() + 1e-5) * w, rtol=3e-6, atol=1e-7)
    got = run(lambda y: k.rms_norm(floats(y), floats(w), n, 1e-5, floats(y)), x)
    np.testing.assert_allclose(got, x64 / np.sqrt((x64**2).mean() + 1e-5) * w, rtol=3e-6, atol=1e-7)
    e = np.exp(x64 - x64.max())
    np.testing.assert_allclose(
        run(lambda y: k.softmax(floats(y), n), x), e / e.sum(), rtol=3e-6, atol=1e-12
    )
    np.testing.assert_allclose(
        run(lambda y: k.sigmoid(floats(y), n), x), 1 / (1 + np.exp(-x64)), rtol=1e-6
    )
    assert (run(lambda y: k.axpy(1.5, floats(w), floats(y), n), x) == x + np.float32(1.5) * w).all()
    assert (run(lambda y: k.scale(0.3, floats(y), n), x) == x * np.float32(0.3)).all()


def test_exponentials_are_accurate_over_the_whole_range(path: str) -> None:
    """Through softmax_block with one key at the maximum: within 3 ulp or two denormal steps."""
    kernel = table(path).f32.softmax_block
    for start in np.arange(-110, 0, 0.37, np.float32):
        s = np.linspace(start, start + 0.37, 64, dtype=np.float32)
        s = np.minimum(s, 0)
        s[0] = 0
        m, total = ffi.new("float *", -np.inf), ffi.new("float *", 0)
        p = np.zeros(64, np.float32)
        assert kernel(floats(s), 0, 64, 1.0, m, total, pointer(p)) == 0
        assert m[0] == 0
        want = np.exp(s.astype(np.float64))
        assert (
            np.abs(p - want) <= np.maximum(3 * np.spacing(want.astype(np.float32)), 2.9e-45)
        ).all()


@pytest.mark.parametrize("act", ACTS)
def test_softmax_block_streams(path: str, act: str) -> None:
    """Blocks in sequence, with every [lo, hi), equal one softmax; -Inf scores weigh nothing; NaN
    and Inf give NaN."""
    kernel = getattr(table(path), act).softmax_block
    rng = np.random.default_rng(6)
    for lo, hi in [
        (0, 64),
        (0, 1),
        (63, 64),
        (5, 5),
        (15, 17),
        (16, 32),
        (1, 63),
        (0, 0),
        (31, 49),
    ]:
        s = rng.standard_normal((3, 64)).astype(np.float32) * 4
        s[1, 20] = -np.inf
        m, total = ffi.new("float *", -np.inf), ffi.new("float *", 0)
        kept = np.zeros((0,))
        parts = []
        for i, (a, b) in enumerate([(0, 64), (lo, hi), (0, 64)]):
            p = act_array(np.full(64, 3), act)
            factor = kernel(floats(s[i]), a, b, 0.5, m, total, pointer(p))
            got = from_act(p, act)
            assert (got[:a] == 0).all() and (got[b:] == 0).all()
            parts = [q * factor for q in parts] + [got[a:b].astype(np.float64)]
            kept = np.append(kept, s[i, a:b])
        want = np.exp(0.5 * kept.astype(np.float64) - 0.5 * kept.max())
        tolerance = 1e-5 if act == "f32" else 2**-8
        np.testing.assert_allclose(np.concatenate(parts), want, rtol=tolerance, atol=1e-30)
        np.testing.assert_allclose(total[0], want.sum(), rtol=1e-5)
    nothing = np.full(64, -np.inf, np.float32)
    m, total = ffi.new("float *", -np.inf), ffi.new("float *", 0)
    p = act_array(np.full(64, 3), act)
    kernel(floats(nothing), 0, 64, 1.0, m, total, pointer(p))
    assert total[0] == 0 and (from_act(p, act) == 0).all()
    for bad in (np.nan, np.inf):
        s = rng.standard_normal(64).astype(np.float32)
        s[17] = bad
        m, total = ffi.new("float *", -np.inf), ffi.new("float *", 0)
        kernel(floats(s), 0, 64, 1.0, m, total, pointer(p))
        assert np.isnan(total[0])


@pytest.mark.parametrize("act", ACTS)
def test_key_to_value_is_a_transpose(path: str, act: str) -> None:
    kernel = getattr(table(path), act).key_to_value
    rng = np.random.default_rng(7)
    for dims, width in [(16, 18), (17, 18), (31, 31), (32, 34), (48, 56), (64, 72), (512, 576)]:
        keys = rng.standard_normal((64, width)).astype(np.float32)
        stored = act_array(keys, act)
        packed = pack(from_act(stored, act), act, k_align=2)
        stride = packed.nbytes // 4
        for tokens in (1, 2, 15, 16, 17, 33, 63, 64):
            up = -(-dims // 16) * 16
            values = np.zeros(up * 64, packed.dtype)
            kernel(pointer(packed), stride, dims, tokens, pointer(values))
            rows = -(-tokens // 2) if act == "bf16" else tokens
            shape = (up // 16, 32, 16, 2) if act == "bf16" else (up // 16, 64, 16, 1)
            got = values.reshape(shape)[:, :rows].transpose(0, 2, 1, 3).reshape(up, -1)
            want = np.zeros((up, got.shape[1]), stored.dtype)
            want[:dims, :tokens] = stored[:tokens, :dims].T
            assert (got == want).all(), (dims, tokens)


def test_each_path_names_itself(path: str) -> None:
    assert ffi.string(table(path).name) == path.encode()
