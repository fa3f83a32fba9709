"""The GPU's kernels that work row by row, on the emulator of its blocks, against the CPU.

Holds of the issue: a GPU's operators compute what the CPU's compute, on the same buffers: norm,
rope table, routing by every rule, combine of outputs on the GPU and in pinned memory.
"""

from typing import Any

import numpy as np
import pytest
from support import simt
from support.operators import Model, Step, ceil, ffi
from support.packing import act_array, aligned, from_act


def launch(stage: str, p: Any) -> None:
    simt.launch_as(getattr(simt.library(), f"pds_cu_shape_{stage}")(p), p)


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize("hidden", [32, 72, 131, 2048, 5003])
def test_norm(hidden: int, act: str) -> None:
    """Rows by an index, padding zero; a row with NaN is NaN and no other is."""
    rng, stride = np.random.default_rng(0), ceil(hidden, 32)
    m = Model(act, hidden)
    m.plan.final_norm_eps = 1e-6
    weight = aligned(rng.standard_normal(hidden).astype(np.float32))
    m.vector(m.plan.final_norm, weight)
    step = Step(m, "scalar")
    step.batch([0] * 5, logit_row=[4, 0, 2])
    hid = step.rows("HID", stride)
    hid[...] = rng.standard_normal(hid.shape)
    hid[2, hidden // 2] = np.nan
    x = aligned(hid)
    step.call("norm", 0, step.lib.PDS_NORM_FINAL)
    kind = np.uint16 if act == "bf16" else np.float32
    xn, xact = aligned(np.full((3, stride), 7, np.float32)), aligned(np.full((3, stride), 7, kind))
    p = simt.params(
        "pds_cu_norm", x=x, weight=weight, index=np.array([4, 0, 2], np.uint32), xn=xn, xact=xact,
        rows=3, n=hidden, stride=stride, eps=1e-6, act_dtype=2 if act == "bf16" else 1,
    )  # fmt: skip
    launch("norm", p)
    want = step.buffer("XN")[: 3 * stride].reshape(3, stride)
    np.testing.assert_allclose(xn, want, rtol=2e-6)
    np.testing.assert_array_equal(from_act(xact, act), from_act(act_array(xn, act), act))
    assert np.isnan(xn[2, :hidden]).all() and (xn[:, hidden:] == 0).all()


@pytest.mark.parametrize("dim", [2, 64, 128])
def test_rope_table(dim: int) -> None:
    """Positions up to a million: the angle is fp32 before cos and sin."""
    position = np.array([0, 1, 77, 4095, 131071, 1000000], np.int32)
    freq = np.float32(1e4) ** -(np.arange(dim // 2, dtype=np.float32) / (dim / 2))
    table = aligned(np.zeros((6, 2, dim // 2), np.float32))
    p = simt.params("pds_cu_rope", position=position, table=table, rows=6, dim=dim, scale=1.5)
    for i, f in enumerate(freq):
        p.inv_freq[i] = f
    launch("rope", p)
    angle = (position[:, None].astype(np.float32) * freq).astype(np.float64)
    np.testing.assert_allclose(table, 1.5 * np.stack([np.cos(angle), np.sin(angle)], 1), atol=3e-7)


GATES: dict[str, dict[str, Any]] = {
    "softmax": {"normalise": 1},
    "softmax_plain": {"scaling": 2.5},
    "sigmoid_bias": {"score": 1, "bias": True, "normalise": 1, "norm_eps": 1e-20, "scaling": 2.5},
    "best_group": {"group_score": 1, "groups": 8, "top_groups": 3, "mask_zero": 1, "scaling": 16.0},
    "two_of_a_group": {
        "score": 1, "bias": True, "group_score": 2, "groups": 4, "top_groups": 2, "normalise": 1,
    },
}  # fmt: skip


def route(
    gate: dict[str, Any], scores: np.ndarray, top_k: int, bias: np.ndarray | None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Scores, ids and weights, of the kernel and of the CPU's pds_op_gate: its GEMM multiplies the
    scores by one."""
    rows, experts = scores.shape
    m = Model("f32", experts, max_rows=rows)
    g, layer = m.layers[0].gate, m.layers[0]
    layer.moe, layer.experts.inter = 1, 1
    g.experts, g.top_k, g.scaling = experts, top_k, 1.0
    fields = {name: value for name, value in gate.items() if name != "bias"}
    for name, value in fields.items():
        setattr(g, name, value)
    m.matrix(g.weight, np.eye(experts, dtype=np.float32), "f32")
    if bias is not None:
        m.vector(g.bias, bias)
    step = Step(m, "scalar")
    step.batch([0] * rows)
    stride = ceil(experts, 16)
    mine = aligned(np.zeros((rows, stride), np.float32))
    mine[:, :experts] = scores
    ids = aligned(np.full((rows, top_k), -1, np.int32))
    weights = aligned(np.zeros((rows, top_k), np.float32))
    more = {} if bias is None else {"bias": aligned(bias)}
    p = simt.params(
        "pds_cu_route", scores=mine, id=ids, weight=weights, rows=rows, stride=stride,
        experts=experts, top_k=top_k, **{"scaling": 1.0, **fields}, **more,
    )  # fmt: skip
    launch("route", p)
    want = step.rows("GATE", stride)
    want[:, :experts] = scores
    for row in range(rows):
        step.lib.pds_route_row(step.ctx, 0, 0, row)
    return [mine[:, :experts], ids, weights], [
        want[:, :experts],
        step.rows("ROUTE_ID", top_k, np.int32),
        step.rows("ROUTE_W", top_k),
    ]


@pytest.mark.parametrize("rows", [1, 70, 300])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 8), (256, 8), (520, 18)])
@pytest.mark.parametrize("case", GATES)
def test_route(case: str, experts: int, top_k: int, rows: int) -> None:
    """Equal ids, in order, and weights close to the CPU's."""
    if rows > 70 and experts > 64:
        rows = 3
    gate, rng = GATES[case], np.random.default_rng(experts)
    if gate.get("groups", 1) > 1 and experts // gate["groups"] * gate["top_groups"] < top_k:
        gate = {**gate, "top_groups": gate["groups"]}
    scores = rng.standard_normal((rows, experts)).astype(np.float32)
    bias = rng.standard_normal(experts).astype(np.float32) if gate.get("bias") else None
    mine, want = route(gate, scores, top_k, bias)
    np.testing.assert_array_equal(mine[1], want[1])
    for a, b in zip(mine, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)


@pytest.mark.parametrize("case", GATES)
def test_route_of_ties_and_of_what_is_not_finite(case: str) -> None:
    """The lowest index wins a tie, zeros of both signs are equal, NaN is the greatest; rows with
    NaN or Inf give what the CPU's give."""
    rng = np.random.default_rng(1)
    scores = np.zeros((12, 16), np.float32)
    scores[1:6] = rng.integers(-1, 2, (5, 16))
    scores[6, 5] = scores[7, 3:9] = np.nan
    scores[8, 2], scores[9, 2], scores[10] = np.inf, -np.inf, -np.inf
    scores[11, ::2] = -0.0
    bias = np.zeros(16, np.float32) if GATES[case].get("bias") else None
    with np.errstate(all="ignore"):
        mine, want = route(GATES[case], scores, 4, bias)
    np.testing.assert_array_equal(mine[1], want[1])
    for a, b in zip(mine, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)


def test_route_with_a_bias_that_is_not_finite() -> None:
    bias = np.zeros(16, np.float32)
    bias[[3, 7, 9]] = np.nan, np.inf, -np.inf
    scores = np.random.default_rng(2).standard_normal((3, 16)).astype(np.float32)
    mine, want = route(GATES["sigmoid_bias"], scores, 6, bias)
    np.testing.assert_array_equal(mine[1], want[1])
    assert (mine[1][:, :2] == [3, 7]).all()


def bits(flags: np.ndarray) -> list[int]:
    """Of bytes, 32 to a word."""
    padded = np.zeros(1024, np.uint8)
    padded[: len(flags)] = flags
    return list(np.packbits(padded, bitorder="little").view(np.uint32).tolist())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("hidden", "top_k"), [(32, 1), (131, 2), (2048, 8), (1100, 17)])
def test_combine(hidden: int, top_k: int, shared: bool) -> None:
    """The same bits as the CPU: in rank order, each product rounded. Some experts' outputs are in
    pinned memory."""
    rng, rows, experts, stride = np.random.default_rng(0), 5, 40, ceil(hidden, 32)
    m = Model("f32", hidden)
    layer = m.layers[0]
    layer.moe, layer.gate.experts, layer.gate.top_k, layer.experts.inter = 1, experts, top_k, 1
    step = Step(m, "scalar")
    step.batch([0] * rows)

    def values(n: int) -> np.ndarray:
        return aligned(rng.standard_normal((n, stride)).astype(np.float32))

    hid, extra = values(rows), values(rows)
    out, cpu_out = values(rows * top_k), values(rows * top_k)
    weight = rng.standard_normal((rows, top_k)).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int32)
    on_gpu = np.array(rng.integers(0, 2, experts), np.uint8)
    step.rows("HID", stride)[...] = hid
    step.rows("SHARED_OUT", stride)[...] = extra
    step.buffer("EXPERT_OUT")[: out.size] = out.ravel()
    step.rows("ROUTE_W", top_k)[...] = weight
    step.rows("ROUTE_ID", top_k, np.int32)[...] = ids
    step.ctx.cpu_out = ffi.cast("float *", cpu_out.ctypes.data)
    step.ctx.on_gpu = ffi.cast("uint8_t *", on_gpu.ctypes.data)
    step.call("combine", 0, shared)
    more = {"shared": extra} if shared else {}
    p = simt.params(
        "pds_cu_combine", hid=hid, out=out, cpu_out=cpu_out, on_gpu=bits(on_gpu), weight=weight,
        id=ids, rows=rows, top_k=top_k, n=hidden, stride=stride, **more,
    )  # fmt: skip
    launch("combine", p)
    np.testing.assert_array_equal(hid, step.rows("HID", stride))


def test_combine_of_rounded_outputs() -> None:
    """bf16 from pinned memory, fp32 from the GPU's own."""
    rng, rows, top_k, n = np.random.default_rng(1), 3, 4, 96
    out = aligned(rng.standard_normal((rows * top_k, n)).astype(np.float32))
    exact = rng.standard_normal((rows * top_k, n)).astype(np.float32)
    cpu = aligned((exact.view(np.uint32) >> 16).astype(np.uint16))
    weight = rng.standard_normal((rows, top_k)).astype(np.float32)
    ids = np.stack([rng.permutation(8)[:top_k] for _ in range(rows)]).astype(np.int32)
    on_gpu = np.array([1, 0, 1, 0, 0, 1, 1, 0], np.uint8)
    hid = aligned(np.zeros((rows, n), np.float32))
    p = simt.params(
        "pds_cu_combine", hid=hid, out=out, cpu_out=cpu, on_gpu=bits(on_gpu), weight=weight,
        id=ids, rows=rows, top_k=top_k, n=n, stride=n, cpu_bf16=1,
    )  # fmt: skip
    launch("combine", p)
    wide = (cpu.astype(np.uint32) << 16).view(np.float32)
    both = np.where(on_gpu[ids].reshape(-1, 1), out, wide).reshape(rows, top_k, n)
    want = np.zeros((rows, n), np.float32)
    for r in range(top_k):
        want += weight[:, r : r + 1] * both[:, r]
    np.testing.assert_array_equal(hid, want)
