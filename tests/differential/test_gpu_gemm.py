"""The GPU's GEMM kernels, on the emulator of its blocks, against numpy.

Holds of the issue "The GPU runtime": grouped expert GEMMs that read the packed layout in bf16,
int8 and int4, and the dense ones; fp32 kernels for the check against the CPU.

Products of bf16 inputs are exact and sums are fp32, so an element may be off by a few roundings of
the sum of its products' magnitudes, and by a rounding to bf16 where y is bf16.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from support import simt
from support.packing import (
    act_array,
    aligned,
    bf16_bits,
    bf16_value,
    dequantised,
    from_act,
    pack,
    pack_int,
    pack_int_pair,
    quantised,
)

DTYPE = {"f32": 1, "bf16": 2, "i8": 4, "i4": 5}
BITS = {"i8": 8, "i4": 4}
F32, ADD, ACT = 0, 1, 2
SUM_STEP = 2.0**-20  # of the sum of the products' magnitudes


@dataclass(frozen=True)
class Case:
    """rows: of the one matrix or of each head; of each expert if `experts`."""

    w: str = "bf16"
    act: str = "bf16"
    rows: Sequence[int] | int = 1
    k: int = 64
    cols: int = 32
    out: int = F32
    swiglu: bool = False
    bias: bool = False
    heads: int = 1
    experts: bool = False
    gather: int = 0  # x_div; 0: no x_index
    scatter: bool = False
    pad: int = 0
    x_extra: int = 0  # columns of x after k, finite
    y_extra: int = 0  # columns of y after max(cols, pad)
    sms: int = 132
    shared_most: int = 227 << 10
    compute: int = 80
    kernel: str = ""  # what is to be launched: "few", "stream_bf16", ...
    seed: int = field(default=1, compare=False)

    def __str__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if v != Case.__dataclass_fields__[k].default}
        return "-".join(f"{k}={v}" for k, v in shown.items()).replace(" ", "")


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy, aligned, behind which all is NaN: what is read beyond its end shows."""
    after = np.frombuffer(b"\xff" * 4096, array.dtype)
    return aligned(np.concatenate([array.reshape(-1), after]))[: array.size].reshape(array.shape)


def weights(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One matrix as packed bytes, and its values [2 or 1, cols, k] in float64."""
    parts = rng.standard_normal((2 if case.swiglu else 1, case.cols, case.k)).astype(np.float32)
    parts /= np.float32(np.sqrt(case.k))
    if case.w in BITS:
        bits = BITS[case.w]
        if case.swiglu:
            packed, values = pack_int_pair(parts, bits)
        else:
            q, scale = quantised(parts[0], bits)
            packed, values = pack_int(q, scale, bits).reshape(-1), [dequantised(q, scale)]
        return packed.view(np.uint8), np.stack(values)[:, :, : case.k]
    packed = pack(parts if case.swiglu else parts[0], case.w, interleave=case.swiglu)
    values = bf16_value(bf16_bits(parts)) if case.w == "bf16" else parts
    return packed.view(np.uint8), np.asarray(values, np.float64)


def expected(
    case: Case, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, tiled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """float64 x W^T (or SwiGLU) and how far from it an fp32 result may be, both [rows, cols]."""
    if tiled and case.w in BITS:  # which multiply weights rounded to bf16
        w = bf16_value(bf16_bits(w.astype(np.float32))).astype(np.float64)
    sums = [x @ part.T for part in w]
    slack = [np.abs(x) @ np.abs(part).T * SUM_STEP for part in w]
    if case.swiglu:
        gate, up = sums
        sigmoid = 1 / (1 + np.exp(-gate))
        y = gate * sigmoid * up
        return y, 1.1 * slack[0] * np.abs(up) + np.abs(gate * sigmoid) * slack[1] + 1e-6 * np.abs(y)
    if bias is not None:
        return sums[0] + bias, slack[0] + SUM_STEP * np.abs(bias)
    return sums[0], slack[0]


def check(case: Case) -> np.ndarray:
    """Runs what the launcher chooses; returns y as it is afterwards."""
    rng = np.random.default_rng(case.seed)
    rows = [case.rows] if isinstance(case.rows, int) else list(case.rows)
    total = sum(rows)
    count = len(rows) if case.experts else case.heads
    mats = [weights(case, rng) for _ in range(count)]
    panel_bytes = len(mats[0][0]) // (-(-case.cols // 16) * (2 if case.swiglu else 1))
    offset = 192 if case.experts else 0
    step = len(mats[0][0]) + offset
    blob = np.zeros((count, step), np.uint8)
    for i, (packed, _) in enumerate(mats):
        blob[i, offset:] = packed
    blob = guarded(blob)

    # x [rows it has, heads, width]; columns after k are finite, which must not matter
    width = case.k + case.x_extra
    x_rows = total if not case.gather else max(1, total // 2)
    x_values = rng.standard_normal((x_rows, case.heads, width)).astype(np.float32)
    x = guarded(act_array(x_values, case.act))
    x_exact = from_act(x, case.act).astype(np.float64)[..., : case.k]
    x_index = None
    source: np.ndarray = np.arange(total)
    if case.gather:
        x_index = rng.integers(0, x_rows * case.gather, total).astype(np.int32)
        source = x_index // case.gather

    y_act = case.swiglu or case.out == ACT
    y_width = max(case.cols, case.pad) + case.y_extra
    y_rows = total + 3
    y_index = rng.permutation(y_rows)[:total].astype(np.int32) if case.scatter else None
    y = rng.standard_normal((y_rows, case.heads, y_width)).astype(np.float32)
    y = aligned(act_array(y, case.act) if y_act else y)
    before = from_act(y, case.act).copy() if y_act else y.copy()
    bias = rng.standard_normal(case.cols).astype(np.float32) if case.bias else None

    p = simt.params(
        "pds_cu_gemm",
        x=x,
        w=blob,
        y=y,
        panel_bytes=panel_bytes,
        w_step=step if case.heads > 1 else 0,
        x_step=width if case.heads > 1 else 0,
        y_step=y_width if case.heads > 1 else 0,
        w_offset=offset,
        x_stride=case.heads * width,
        y_stride=case.heads * y_width,
        rows=0 if case.experts else total,
        k=case.k,
        k_pad=-(-case.k // 64) * 64 if case.w in BITS else -(-case.k // 32) * 32,
        cols=case.cols,
        pad=case.pad,
        x_div=case.gather,
        count=1 if case.experts else case.heads,
        n_holes=count if case.experts else 0,
        w_dtype=DTYPE[case.w],
        act_dtype=DTYPE[case.act],
        out=case.out,
        swiglu=case.swiglu,
    )
    for name, array in (("bias", bias), ("x_index", x_index), ("y_index", y_index)):
        if array is not None:
            setattr(p, name, simt.ffi().cast("void *", array.ctypes.data))
    first = 0
    for i, n in enumerate(rows if case.experts else []):
        p.holes[i].at = simt.ffi().cast("uint8_t *", blob[i].ctypes.data)
        p.holes[i].first, p.holes[i].rows = first, n
        first += n

    device = simt.device(sms=case.sms, shared_most=case.shared_most, compute=case.compute)
    shape = simt.library().pds_cu_shape_gemm(device, p)
    name = simt.kernels()[int(shape.kernel)].removeprefix("gemm_")
    if case.kernel:
        assert name == case.kernel
    simt.launch_as(shape, p)

    after = from_act(y, case.act) if y_act else y
    target = y_index if y_index is not None else np.arange(total)
    owner = np.repeat(np.arange(count), rows) if case.experts else None
    want, slack = before.astype(np.float64), np.zeros(before.shape)
    tiled = name.rsplit("_", 1)[-1].isdigit()
    for i in range(count):
        mine = owner == i if owner is not None else np.full(total, True)
        head = 0 if case.experts else i
        value, off = expected(case, x_exact[source[mine], head], mats[i][1], bias, tiled)
        at = np.ix_(target[mine], [head], range(case.cols))
        old = want[at][:, 0] if case.out == ADD and not y_act else 0
        want[at], slack[at] = (value + old)[:, None], (off + SUM_STEP * np.abs(old))[:, None]
        if y_act and case.pad > case.cols:
            want[np.ix_(target[mine], [head], range(case.cols, case.pad))] = 0
    if y_act and case.act == "bf16":
        slack = np.where(slack > 0, slack + np.abs(want) * 2.0**-8, 0)
    bad = ~(np.abs(after - want) <= slack)
    assert not bad.any(), f"{name}: {bad.sum()} of {bad.size} off, first at {np.argwhere(bad)[0]}"
    return y


def few() -> Iterator[Case]:
    """Up to 16 rows a matrix."""
    for w in ("bf16", "i8", "i4"):
        kernel = f"stream_{w}"
        for rows in (1, 7, 8, 9, 16):
            yield Case(w, rows=rows, k=96, cols=40, kernel=kernel)
        yield Case(w, rows=3, k=1120, cols=24, kernel=kernel)
        yield Case(w, rows=2, k=40, cols=8, x_extra=24, kernel=kernel)
        yield Case(w, rows=5, k=72, cols=56, out=ACT, bias=True, pad=64, y_extra=8, kernel=kernel)
        yield Case(w, rows=5, k=32, cols=23, out=ADD, bias=True, y_extra=2, kernel=kernel)
        yield Case(w, rows=4, k=64, cols=16, heads=3, out=ACT, kernel=kernel)
        yield Case(w, rows=4, k=96, cols=17, heads=2, kernel=kernel)
        yield Case(
            w, rows=(1, 16, 3), k=64, cols=24, swiglu=True, experts=True, gather=2, pad=32,
            kernel=kernel,
        )  # fmt: skip
        yield Case(w, rows=(2, 0, 9), k=160, cols=72, experts=True, scatter=True, kernel=kernel)
        # blocks with more than one pair of panels: x stays with them, or comes again
        yield Case(w, rows=3, k=320, cols=233, bias=True, sms=1, kernel=kernel)
        yield Case(w, rows=16, k=32, cols=264, sms=1, kernel=kernel)
        yield Case(w, rows=12, k=1088, cols=200, sms=1, shared_most=99 << 10, kernel=kernel)
        yield Case(
            w, rows=(9, 1, 0), k=544, cols=88, swiglu=True, experts=True, gather=2, pad=96, sms=1,
            kernel=kernel,
        )  # fmt: skip
    for w in ("f32", "bf16", "i8", "i4"):
        act = "bf16" if w == "f32" else "f32"
        yield Case(w, act, rows=6, k=72, cols=24, bias=True, kernel="few")
        yield Case(w, "f32", rows=1, k=1000, cols=33, x_extra=24, kernel="few")
        yield Case(
            w, "f32", rows=(5, 0, 1), k=40, cols=20, swiglu=True, experts=True, gather=3,
            scatter=True, pad=32, kernel="few",
        )  # fmt: skip
    yield Case("bf16", rows=3, k=30, cols=18, out=ACT, pad=20, kernel="few")  # odd x_stride
    yield Case("f32", "f32", rows=2, k=36, cols=20, heads=2, out=ADD, kernel="few")
    yield Case("f32", "f32", rows=2, k=36, cols=20, heads=2, out=ACT, pad=32, kernel="few")


def many() -> Iterator[Case]:
    """More rows than that. On one multiprocessor the launcher takes the tiles that waste least."""
    for w in ("bf16", "i8", "i4"):
        yield Case(w, rows=17, k=96, cols=40, kernel=f"{w}_32")
        yield Case(w, rows=32, k=64, cols=264, bias=True, kernel=f"{w}_32")
        yield Case(w, rows=33, k=40, cols=8, x_extra=24, kernel=f"{w}_32")
        yield Case(w, rows=64, k=160, cols=23, out=ADD, y_extra=2, sms=1, kernel=f"{w}_64")
        yield Case(w, rows=63, k=32, cols=24, out=ACT, bias=True, pad=32, sms=1)
        yield Case(w, rows=130, k=352, cols=40, sms=1, kernel=f"{w}_64")
        yield Case(w, rows=128, k=200, cols=40, sms=1, kernel=f"{w}_128")
        yield Case(w, rows=19, k=64, cols=16, heads=3, out=ACT)
        yield Case(w, rows=20, k=288, cols=24, heads=2, shared_most=99 << 10)
        yield Case(
            w, rows=(1, 40, 17), k=64, cols=136, swiglu=True, experts=True, gather=2, pad=160,
        )  # fmt: skip
        yield Case(w, rows=(0, 2, 0, 70, 1, 0), k=96, cols=72, experts=True, scatter=True, sms=1)
        yield Case(
            w, rows=(120, 99), k=64, cols=40, swiglu=True, experts=True, pad=64, sms=1,
            kernel=f"{w}_128",
        )  # fmt: skip
        # Hopper's
        for rows, k, cols in ((128, 64, 256), (100, 40, 24), (257, 352, 264), (300, 128, 40)):
            yield Case(w, rows=rows, k=k, cols=cols, sms=1, compute=90, kernel=f"group_{w}_128")
        yield Case(
            w, rows=120, k=200, cols=23, out=ADD, bias=True, y_extra=2, sms=1, compute=90,
            kernel=f"group_{w}_128",
        )  # fmt: skip
        yield Case(
            w, rows=70, k=32, cols=24, out=ACT, bias=True, pad=32, heads=2, sms=1, compute=90,
            kernel=f"group_{w}_128",
        )  # fmt: skip
        yield Case(
            w, rows=(0, 120, 135), k=608, cols=136, swiglu=True, experts=True, gather=2,
            scatter=True, pad=160, sms=1, compute=90, kernel=f"group_{w}_128",
        )  # fmt: skip
    yield Case(rows=300, k=32, cols=272, sms=1)
    for w in ("f32", "bf16", "i8", "i4"):
        act = "bf16" if w == "f32" else "f32"
        yield Case(w, act, rows=17, k=72, cols=24, bias=True, sms=1, kernel="scalar")
        yield Case(
            w, "f32", rows=(65, 0, 1), k=40, cols=40, swiglu=True, experts=True, gather=3,
            scatter=True, pad=64, sms=1, kernel="scalar",
        )  # fmt: skip
    yield Case("bf16", rows=18, k=30, cols=18, out=ACT, pad=20, sms=1, kernel="scalar")
    # a gate of some rows: few blocks of the scalar kernel would leave a device idle
    yield Case("f32", "f32", rows=37, k=96, cols=20, kernel="few")
    yield Case("f32", "f32", rows=64, k=100, cols=66, out=ADD, x_extra=3, sms=1, kernel="scalar")
    yield Case(
        "f32", "f32", rows=20, k=36, cols=20, heads=2, out=ACT, pad=32, sms=1, kernel="scalar"
    )


@pytest.mark.parametrize("case", list(few()), ids=str)
def test_few_rows(case: Case) -> None:
    """Decode's GEMMs, in every format, kind and mode, are what numpy makes of them."""
    check(case)


@pytest.mark.parametrize("case", list(many()), ids=str)
def test_many_rows(case: Case) -> None:
    """Prefill's GEMMs likewise, around the edges of each tile."""
    check(case)


@pytest.mark.parametrize("rows", [(3, 16), (40, 30)])
def test_neighbours_do_not_matter(rows: tuple[int, int]) -> None:
    """A row of an expert has the same bits whatever other rows and experts a call has, among the
    kernels for few rows and among those for many."""
    both = Case(rows=rows, k=160, cols=40, experts=True)
    y = check(both)
    rng = np.random.default_rng(both.seed)
    blobs = [weights(both, rng)[0] for _ in rows]
    x = aligned(bf16_bits(rng.standard_normal((sum(rows), 1, both.k)).astype(np.float32)))
    alone = aligned(np.zeros((rows[1], both.cols), np.float32))
    x = aligned(x[rows[0] :, 0])
    w = aligned(blobs[1])
    p = simt.params(
        "pds_cu_gemm", x=x, y=alone, panel_bytes=len(w) // 3, x_stride=160, y_stride=40, k=160,
        k_pad=160, cols=40, count=1, n_holes=1, w_dtype=2, act_dtype=2,
    )  # fmt: skip
    p.holes[0].at, p.holes[0].rows = simt.ffi().cast("uint8_t *", w.ctypes.data), rows[1]
    simt.launch_as(simt.library().pds_cu_shape_gemm(simt.device(), p), p)
    assert np.array_equal(alone, y[rows[0] : sum(rows), 0])
