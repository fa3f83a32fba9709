"""Call the runtime's operators (pds_op_* of step.h) one by one, on plans of one's own making.

Buffer sizes are computed here a second time, exactly as plan_desc.h states them, and each buffer is
followed by a guard that every call checks. The pool is serial (serial_pool.c).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cffi
import numpy as np
from support import cc
from support.c_headers import declarations, public
from support.packing import (
    act_array,
    aligned,
    from_act,
    pack,
    pack_int,
    pack_int_pair,
    quantised,
)

from pdscope.runtime_c import ROOT

DTYPES = {"f32": 1, "bf16": 2, "i8": 4, "i4": 5}
GUARD = 256

ffi = cffi.FFI()
ffi.cdef(
    "typedef int32_t pds_status;"
    "typedef struct pds_pool { uint32_t threads, backwards; } pds_pool;"
    + declarations("kernels/kernels.h", "src/plan_desc.h", "src/step.h")
    + public("pds_net_desc")
    + declarations("src/net.h")
    + "size_t pds_quant_need(const pds_plan *plan);"
    "void pds_route_row(pds_step_ctx *, uint32_t layer, uint32_t worker, uint32_t row);"
)


def library() -> Any:
    here = Path(__file__).parent
    names = ("gemm", "quantise", "mlp", "dense", "moe", "net", "predict", "attention")
    ops = [ROOT / "src" / f"ops_{name}.c" for name in names]
    ops += [ROOT / "src/status.c", ROOT / "src/net.c"]
    sources: list[tuple[Path, Sequence[str]]] = [(s, ()) for s in (*ops, here / "serial_pool.c")]
    return ffi.dlopen(str(cc.shared_object([*cc.kernel_sources(), *sources])))


def ceil(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def packed(w: np.ndarray, weights: str, interleave: bool = False) -> np.ndarray:
    """Panels of W [n, k], or of gate and up [2, n, k], flat."""
    if weights not in ("i8", "i4"):
        return pack(w, weights, interleave=interleave)
    bits = int(weights[1])
    if interleave:
        return pack_int_pair(w, bits)[0]
    return pack_int(*quantised(w, bits), bits).reshape(-1)


class Model:
    """Weights and plan of a model without programs; fill `plan` and `layers`, then make a Step.

    weights: f32, bf16, or i8 and i4 with bf16 act.
    """

    def __init__(
        self, weights: str, hidden: int, vocab: int = 64, layers: int = 1, **plan: int
    ) -> None:
        self.weights = weights
        self.act = act = "f32" if weights == "f32" else "bf16"
        self.plan = ffi.new("pds_plan *")
        self.layers = ffi.new("pds_layer[]", layers)
        self.keep: list[Any] = []
        self.bases: list[int] = []
        p = self.plan
        p.act_dtype, p.hidden, p.vocab, p.n_layers, p.layers = (
            DTYPES[act],
            hidden,
            vocab,
            layers,
            self.layers,
        )
        p.max_context, p.max_rows, p.max_logits, p.kv_block, p.kv_split = 1024, 128, 8, 64, 128
        p.predict_rows = 16
        for name, value in plan.items():
            setattr(p, name, value)

    def _file(self, data: np.ndarray) -> int:
        self.keep.append(data)
        self.bases.append(data.ctypes.data)
        return len(self.bases) - 1

    def matrix(self, field: Any, w: np.ndarray, act: str | None = None) -> None:
        """Sets a pds_tensor to the packed W [n, k], or to count matrices [count, n, k]."""
        act = act or self.weights
        many = w if w.ndim == 3 else w[None]
        blobs = [packed(m, act) for m in many]
        field.dtype, field.file = DTYPES[act], self._file(aligned(np.concatenate(blobs)))
        field.n, field.k, field.count = many.shape[1], many.shape[2], len(many)
        field.stride = blobs[0].nbytes if len(many) > 1 else 0

    def vector(self, field: Any, x: np.ndarray) -> None:
        field.dtype, field.file, field.n, field.k, field.count = (
            3,
            self._file(aligned(np.float32(x))),
            len(x),
            1,
            1,
        )

    def mlp(
        self,
        field: Any,
        gate: np.ndarray,
        up: np.ndarray,
        down: np.ndarray,
        weights: str | None = None,
    ) -> None:
        """One MLP ([inter, hidden], .., [hidden, inter]), or experts with a leading axis: one blob
        an expert."""
        weights = weights or self.weights
        many = gate.ndim == 3
        gates, ups, downs = (gate, up, down) if many else (gate[None], up[None], down[None])
        blobs = []
        for g, u, d in zip(gates, ups, downs, strict=True):
            first = packed(np.stack([g, u]), weights, interleave=True)
            second = packed(d, weights)
            blob = np.concatenate([first, second])
            blobs.append(
                np.append(blob, np.zeros(-blob.nbytes % 4096 // blob.itemsize, blob.dtype))
            )
        file = self._file(aligned(np.concatenate(blobs), 4096))
        field.inter = gates.shape[1]
        t = field.gate_up
        t.dtype, t.file, t.n, t.k = (
            DTYPES[weights],
            file,
            2 * ceil(field.inter, 16),
            gates.shape[2],
        )
        t.count, t.stride = len(gates), blobs[0].nbytes if many else 0
        t = field.down
        t.dtype, t.file, t.n, t.k = DTYPES[weights], file, downs.shape[1], field.inter
        t.count, t.stride, t.offset = len(gates), blobs[0].nbytes if many else 0, first.nbytes

    def rope(
        self,
        field: Any,
        inv_freq: np.ndarray,
        scale: float,
        interleaved: bool,
        table_offset: int = 0,
    ) -> None:
        table = np.ascontiguousarray(inv_freq, np.float32)
        self.keep.append(table)
        field.inv_freq = ffi.cast("float *", table.ctypes.data)
        field.scale, field.dim, field.interleaved = scale, 2 * len(table), interleaved
        field.table_offset = table_offset


def buffer_sizes(m: Model) -> dict[str, int]:
    p = m.plan
    layers = [m.layers[i] for i in range(p.n_layers)]
    attn = [x.attn for x in layers if x.attn.heads]
    moe = [x for x in layers if x.moe]
    act, r, hidden = (2 if m.act == "bf16" else 4), p.max_rows, ceil(p.hidden, 32)

    def most(values: Sequence[int]) -> int:
        return max(values, default=0)

    def mla(a: Any) -> bool:
        return bool(a.kind)

    def qk(a: Any) -> int:
        return int(a.kv_lora + a.rope.dim if mla(a) else a.qk_dim)

    def v(a: Any) -> int:
        return int(a.kv_lora if mla(a) else a.v_dim)

    splits = ceil(p.max_context, p.kv_split) // p.kv_split
    top_k = most([x.gate.top_k for x in moe])
    ahead = min(r, 16) if any(x.predictor.kind for x in layers) else 0
    return {
        "HID": 4 * r * hidden,
        "XN": 4 * r * hidden,
        "XACT": act * r * hidden,
        "ROPE": most([a.rope.table_offset + ceil(4 * r * a.rope.dim, 64) for a in attn]),
        "QKV": 4 * r * most([ceil(a.in_proj.n, 16) for a in attn]),
        "QACT": act * r * most([ceil(a.q_lora, 32) for a in attn if mla(a)]),
        "QB": 4 * r * most([ceil(a.heads * a.qk_dim, 16) for a in attn if mla(a) and a.q_lora]),
        "Q": act * r * most([a.heads * ceil(qk(a), 32) for a in attn]),
        "QHEAD": act * r * most([a.heads * ceil(a.nope_dim, 32) for a in attn if mla(a)]),
        "CTXACT": act * r * most([a.heads * ceil(a.kv_lora, 32) for a in attn if mla(a)]),
        "OACT": act * r * most([ceil(a.heads * a.v_dim, 32) for a in attn]),
        "PARTIAL": 4 * min(r, 16) * splits * most([a.heads * (ceil(v(a), 16) + 16) for a in attn]),
        "GATE": 4 * r * most([ceil(x.gate.experts, 16) for x in moe]),
        "ROUTE_ID": 4 * r * top_k,
        "ROUTE_W": 4 * r * top_k,
        "EXPERT_ROWS": 4 * r * top_k,
        "HOLES": 16 * most([x.gate.experts for x in moe]),
        "MID": act
        * max(
            most([r * x.gate.top_k * ceil(x.experts.inter, 32) for x in moe]),
            most([r * ceil(x.dense.inter, 32) for x in layers]),
        ),
        "MID_SHARED": act * r * most([ceil(x.shared.inter, 32) for x in layers]),
        "EXPERT_OUT": 4 * r * top_k * hidden,
        "SHARED_OUT": 4 * r * hidden,
        "LOGITS": 4 * p.max_logits * p.vocab,
        "XQ": r * most([quant_bytes(p.lm_head), *map(widest_input, layers)]),
        "PREDICT": 4 * ahead * most([ceil(x.gate.experts, 16) for x in moe]),
        "PREDICT_ID": 4 * ahead * top_k,
        "PREDICT_W": 4 * ahead * top_k,
        "LLC_HOLES": 4 * most([x.gate.experts for x in moe]) if ahead else 0,
        "NET_X": 2 * ahead * hidden if act == 4 else 0,
        "NET_U": 4 * ahead * ceil(2 * 1024 + most([x.gate.experts for x in moe]), 16),
        "NET_H": 4 * ahead * 1024,
        "NET_V": 8 * ahead * max(1024, most([ceil(x.gate.experts, 16) for x in moe])),
        "NET_PREV": 4 * ahead * top_k,
        "NET_NEXT": 4 * ahead * top_k,
    }


def quant_bytes(t: Any) -> int:
    """A row of int8 with a scale and a sum a group, as GEMMs on the tensor read it."""
    group = {DTYPES["i8"]: 64, DTYPES["i4"]: 32}.get(t.dtype)
    return ceil(ceil(t.k, 64) + 8 * (ceil(t.k, 64) // group), 64) if group else 0


def widest_input(layer: Any) -> int:
    """Of the layer's parallel jobs, a row of the step. Both stages of an MLP are one job, as are
    routed and shared experts, which read the same rows if their formats are the same."""
    a, shared, experts = layer.attn, layer.shared, layer.experts
    gate_up = quant_bytes(experts.gate_up)
    if shared.gate_up.dtype != experts.gate_up.dtype:
        gate_up += quant_bytes(shared.gate_up)
    down = layer.gate.top_k * quant_bytes(experts.down) + quant_bytes(shared.down)
    dense = quant_bytes(layer.dense.gate_up) + quant_bytes(layer.dense.down)
    return max(gate_up + down, dense, *map(quant_bytes, (a.in_proj, a.q_b, a.o_proj)))


def kv_bytes(m: Model) -> int:
    """One KV block: 32-bit words of keys, values to 16 dimensions."""
    act, total = (2 if m.act == "bf16" else 4), 0
    for i in range(m.plan.n_layers):
        a = m.layers[i].attn
        if not a.heads:
            continue
        if a.kind:
            total += 64 * ceil(act * (a.kv_lora + a.rope.dim), 4)
        else:
            total += 64 * a.kv_heads * (ceil(act * a.qk_dim, 4) + act * ceil(a.v_dim, 16))
    return total


def worker_bytes(m: Model) -> int:
    act, most = (2 if m.act == "bf16" else 4), 0
    for i in range(m.plan.n_layers):
        a = m.layers[i].attn
        dims = ceil(a.kv_lora if a.kind else a.v_dim, 16)
        most = max(most, 64 * dims * (4 + (act if a.kind else 0)))
    return 2 * 64 * 64 * 4 + 2 * 64 * 4 + most


class Step:
    """The scratch, cache and context of a session on a Model; call() runs an operator and checks
    every guard."""

    def __init__(
        self, model: Model, path: str, threads: int = 1, backwards: bool = False, seqs: int = 1
    ) -> None:
        self.model, self.lib, p = model, library(), model.plan
        sizes = buffer_sizes(model)
        self.offsets, end = {}, 0
        for name, size in sizes.items():
            self.offsets[name] = end
            end += ceil(size, 64) + GUARD
            index = getattr(self.lib, f"PDS_BUF_{name}")
            p.buffer_offset[index], p.buffer_bytes[index] = self.offsets[name], size
        assert self.lib.PDS_BUF_COUNT == len(sizes)
        self.sizes = sizes
        self.scratch = aligned(np.full(end, 0xA5, np.uint8))
        p.thread_scratch_bytes, p.kv_block_bytes = worker_bytes(model), kv_bytes(model)
        self.workers = aligned(np.full(threads * p.thread_scratch_bytes + GUARD, 0xA5, np.uint8))
        blocks = ceil(p.max_context, 64) // 64
        self.table = np.arange(seqs * blocks, dtype=np.uint32)[::-1].reshape(seqs, blocks).copy()
        self.kv = aligned(
            np.full(seqs * blocks * p.kv_block_bytes + GUARD, 0x7F, np.uint8)
        )  # bf16 and fp32 NaN-like
        self.files = ffi.new(
            "unsigned char *[]", [ffi.cast("unsigned char *", b) for b in model.bases]
        )
        self.pool = ffi.new("pds_pool *", {"threads": threads, "backwards": backwards})
        assert self.lib.pds_ops_check(p) == 0
        c = self.ctx = ffi.new("pds_step_ctx *")
        c.plan, c.pool, c.files = p, self.pool, self.files
        c.kernels = getattr(self.lib, f"pds_kernels_{path}")()
        c.scratch = ffi.cast("unsigned char *", self.scratch.ctypes.data)
        c.thread_scratch = ffi.cast("unsigned char *", self.workers.ctypes.data)
        c.kv = ffi.cast("unsigned char *", self.kv.ctypes.data)
        c.table, c.table_stride = ffi.cast("uint32_t *", self.table.ctypes.data), blocks
        c.predict_step = 1
        c.cpu_holes = ffi.cast("pds_hole *", self.scratch.ctypes.data + self.offsets["HOLES"])

    def batch(
        self,
        position: Sequence[int],
        seq: Sequence[int] | None = None,
        token: Sequence[int] | None = None,
        logit_row: Sequence[int] = (),
    ) -> None:
        self.arrays = [
            np.array(x, np.int32)
            for x in (position, seq or [0] * len(position), token or [0] * len(position))
        ]
        at = [ffi.cast("int32_t *", a.ctypes.data) for a in self.arrays]
        self.ctx.position, self.ctx.seq, self.ctx.token = at
        self.logit_row = np.array(logit_row, np.uint32)
        self.ctx.rows, self.ctx.n_logits = len(position), len(logit_row)
        self.ctx.logit_row = ffi.cast("uint32_t *", self.logit_row.ctypes.data)

    def buffer(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """A flat view of a buffer."""
        start = self.offsets[name]
        size = self.sizes[name]
        return self.scratch[start : start + size].view(dtype)

    def rows(self, name: str, stride: int, dtype: Any = np.float32) -> np.ndarray:
        """The running rows of a buffer [rows, stride]."""
        return self.buffer(name, dtype)[: self.ctx.rows * stride].reshape(self.ctx.rows, stride)

    def set_inputs(self, x: np.ndarray) -> None:
        """Rows x [rows, hidden] into XN and XACT, zero padded."""
        stride = ceil(self.model.plan.hidden, 32)
        padded = np.zeros((len(x), stride), np.float32)
        padded[:, : x.shape[1]] = x
        act = act_array(padded, self.model.act)
        self.rows("XN", stride)[...] = padded
        self.rows("XACT", stride, act.dtype)[...] = act

    def act_rows(self, name: str, stride: int) -> np.ndarray:
        act = self.model.act
        return from_act(self.rows(name, stride, np.uint16 if act == "bf16" else np.float32), act)

    def call(self, op: str, *args: Any) -> None:
        getattr(self.lib, f"pds_op_{op}")(self.ctx, *args)
        for name, start in self.offsets.items():
            end = start + self.sizes[name]
            assert (self.scratch[end : end + GUARD] == 0xA5).all(), f"{op} wrote beyond {name}"
        assert (self.workers[-GUARD:] == 0xA5).all(), f"{op} wrote beyond the workers' scratch"
        assert (self.kv[-GUARD:] == 0x7F).all(), f"{op} wrote beyond the cache"
