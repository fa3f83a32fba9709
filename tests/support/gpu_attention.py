"""Attention on the CPU and on the GPU's kernels, side by side: the same plan, batch, buffers and KV
blocks, compared after each stage.

Projections are identities or pick single values, so that both sides begin with the same bits:
in_proj and q_b are the identity, and `uk` copies chosen dimensions. uv and o_proj are zero: what
they read is compared instead.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from support import simt
from support.operators import Model, Step, ceil
from support.packing import act_array, aligned, from_act

CLOSE = {"f32": (2e-5, 2e-5), "bf16": (1.6e-2, 4e-3)}  # relative, absolute


def gqa(
    act: str,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    v_dim: int = 0,
    rope: int = 0,
    interleaved: bool = False,
    qk_norm: int = 0,
    clip: float = 0,
    window: int = 0,
    **plan: int,
) -> Model:
    """A layer of grouped-query attention; v_dim and rope are `dim` if not given."""
    v_dim = v_dim or dim
    m = Model(act, (heads + kv_heads) * dim + kv_heads * v_dim, **plan)
    rng, a = np.random.default_rng(3), m.layers[0].attn
    a.heads, a.kv_heads, a.qk_dim, a.v_dim, a.qk_norm = heads, kv_heads, dim, v_dim, qk_norm
    a.clip, a.window, a.norm_eps, a.scale = clip, window, 1e-6, dim**-0.5
    m.matrix(a.in_proj, np.eye(m.plan.hidden, dtype=np.float32))
    if qk_norm:
        for field, n in ((a.q_norm, heads), (a.k_norm, kv_heads)):
            m.vector(field, 1 + 0.2 * rng.standard_normal(dim * (n if qk_norm == 2 else 1)))
    half = (rope or dim) // 2
    m.rope(a.rope, 1e4 ** -(np.arange(half) / half), 1.0, interleaved)
    m.matrix(a.o_proj, np.zeros((16, heads * v_dim), np.float32))
    return m


def mla(
    act: str,
    heads: int,
    nope: int,
    rope: int,
    latent: int,
    *,
    q_lora: bool = False,
    v_dim: int = 16,
    **plan: int,
) -> Model:
    """A layer of latent attention."""
    queries = heads * (nope + rope)
    m = Model(act, queries + latent + rope, **plan)
    rng, a = np.random.default_rng(3), m.layers[0].attn
    a.kind, a.heads, a.kv_heads, a.qk_dim, a.v_dim = 1, heads, heads, nope + rope, v_dim
    a.nope_dim, a.kv_lora, a.q_lora = nope, latent, queries if q_lora else 0
    a.norm_eps, a.scale = 1e-6, (nope + rope) ** -0.5
    m.matrix(a.in_proj, np.eye(m.plan.hidden, dtype=np.float32))
    if q_lora:
        m.vector(a.q_norm, 1 + 0.2 * rng.standard_normal(queries))
        m.matrix(a.q_b, np.eye(queries, dtype=np.float32))
    m.vector(a.k_norm, 1 + 0.2 * rng.standard_normal(latent))
    m.rope(a.rope, 1e4 ** -(np.arange(rope // 2) / (rope // 2)), 1.3, True)
    uk = np.zeros((heads, latent, nope), np.float32)
    uk[:, np.arange(latent), np.arange(latent) % nope] = 1
    m.matrix(a.uk, uk)
    m.matrix(a.uv, np.zeros((heads, v_dim, latent), np.float32))
    m.matrix(a.o_proj, np.zeros((16, heads * v_dim), np.float32))
    return m


class Twin:
    """Runs steps on both. `kernels` collects the names of what was launched. A device of one
    processor is always full, and has no use for a context in parts."""

    def __init__(
        self, model: Model, seqs: int = 1, sms: int = 1, shared_most: int = 227 << 10
    ) -> None:
        self.model, self.step = model, Step(model, "scalar", seqs=seqs)
        self.device = simt.device(sms=sms, shared_most=shared_most, compute=90)
        self.a = model.layers[0].attn
        self.mla = bool(self.a.kind)
        self.elt = 2 if model.act == "bf16" else 4
        self.scratch = aligned(self.step.scratch)
        self.kv = aligned(self.step.kv)
        self.kernels: list[str] = []

    def buffer(self, name: str) -> np.ndarray:
        start = self.step.offsets[name]
        return self.scratch[start : start + self.step.sizes[name]]

    def _weights(self, field: Any) -> np.ndarray:
        """A vector of the plan."""
        at = self.model.bases[field.file]
        return next(x for x in self.model.keep if x.ctypes.data == at)

    def params(self) -> Any:
        """What the launcher would say of the running step."""
        a, m, s = self.a, self.model, self.step
        values = a.kv_lora if self.mla else a.v_dim
        keys = a.kv_lora + a.rope.dim if self.mla else a.qk_dim
        panel = ceil(keys * self.elt, 4) // 4 * 64
        stored = 0 if self.mla else ceil(values, 16) * 64 * self.elt
        queries = a.heads * a.qk_dim
        arrays = {
            field: self.buffer(name)
            for field, name in {
                "rope": "ROPE", "qkv": "QKV", "qb": "QB", "qact": "QACT", "q": "Q",
                "qhead": "QHEAD", "ctx": "CTXACT", "oact": "OACT", "partial": "PARTIAL",
            }.items()
            if s.sizes[name]
        }  # fmt: skip
        for field in ("q_norm", "k_norm"):
            if getattr(a, field).dtype:
                arrays[field] = self._weights(getattr(a, field))
        return simt.params(
            "pds_cu_attention",
            **arrays,
            position=s.arrays[0], seq=s.arrays[1], table=s.table, kv=self.kv,
            block_bytes=m.plan.kv_block_bytes, rows=s.ctx.rows, table_stride=s.table.shape[1],
            mla=self.mla, qk_norm=a.qk_norm, interleaved=a.rope.interleaved,
            act_dtype=m.plan.act_dtype, heads=a.heads, kv_heads=a.kv_heads, qk_dim=a.qk_dim,
            v_dim=a.v_dim, nope_dim=a.nope_dim, q_lora=a.q_lora, kv_lora=a.kv_lora,
            rope_dim=a.rope.dim, window=a.window, key_dims=keys, value_dims=values,
            key_panel_bytes=panel, key_bytes=4 * panel, head_bytes=4 * panel + stored,
            scale=a.scale, norm_eps=a.norm_eps, clip=a.clip,
            qkv_stride=ceil(a.in_proj.n, 16), qb_stride=ceil(queries, 16),
            qact_stride=ceil(a.q_lora, 32), q_stride=ceil(keys, 32),
            qhead_stride=ceil(a.nope_dim, 32), ctx_stride=ceil(a.kv_lora, 32),
            oact_stride=ceil(a.heads * a.v_dim, 32),
            most_splits=ceil(m.plan.max_context, m.plan.kv_split) // m.plan.kv_split,
        )  # fmt: skip

    def launch(self, p: Any, stage: str) -> None:
        number = getattr(simt.library(), f"PDS_CU_STAGE_{stage}")
        shape = simt.library().pds_cu_shape_attention(self.device, p, number)
        self.kernels.append(simt.kernels()[int(shape.kernel)])
        simt.launch_as(shape, p)

    def run(
        self,
        x: np.ndarray,
        position: Sequence[int],
        seq: Sequence[int] | None = None,
        part: int = 0,
    ) -> Any:
        """One step of rows x [rows, hidden] on both, with the context in parts of `part` tokens, or
        as pds_cu_cut_context has it; returns the kernels' output [rows, ..] and what it was
        launched with."""
        step, a, act = self.step, self.a, self.model.act
        x = from_act(act_array(x, act), act)
        step.batch(list(position), seq)
        step.set_inputs(x)
        step.rows("HID", ceil(self.model.plan.hidden, 32))[...] = 0
        step.call("rope_table")
        step.call("attention", 0)

        p = self.params()
        self._rope()
        rows, stride = len(x), ceil(a.in_proj.n, 16)
        qkv = self.buffer("QKV").view(np.float32)[: rows * stride].reshape(rows, stride)
        qkv[:, : x.shape[1]] = x
        if self.mla and a.q_lora:
            self.launch(p, "Q_A")
            self.same("QACT", rows * ceil(a.q_lora, 32))
            qact = self.act("QACT", rows * ceil(a.q_lora, 32)).reshape(rows, -1)
            qb = self.buffer("QB").view(np.float32)[: rows * ceil(a.q_lora, 16)].reshape(rows, -1)
            qb[:, : a.q_lora] = qact[:, : a.q_lora]
        self.launch(p, "ROWS")
        if self.mla:
            self._uk(rows, p)
        self.same("Q", rows * a.heads * p.q_stride)
        np.testing.assert_allclose(
            self._cache(self.kv), self._cache(step.kv), *CLOSE[act], err_msg="cache"
        )
        # From here on both attend to the same.
        self.buffer("Q")[...] = step.buffer("Q", np.uint8)
        self.kv[...] = step.kv
        far = max(position)
        simt.library().pds_cu_cut_context(self.device, p, far, self.model.plan.kv_split)
        if part:
            p.split_tokens, p.splits = part, far // part + 1
        assert p.splits <= p.most_splits and p.split_tokens % 64 == 0
        assert p.splits == 1 or p.split_tokens >= self.model.plan.kv_split
        self.launch(p, "ATTEND")
        if p.splits > 1:
            self.launch(p, "MERGE")
        name, each = ("CTXACT", a.heads * p.ctx_stride) if self.mla else ("OACT", p.oact_stride)
        self.same(name, rows * each)
        self.guards()
        return self.act(name, rows * each).reshape(rows, each), p

    def _uk(self, rows: int, p: Any) -> None:
        a, act = self.a, self.model.act
        qhead = self.act("QHEAD", rows * a.heads * p.qhead_stride).reshape(rows, a.heads, -1)
        assert (qhead[:, :, a.nope_dim :] == 0).all()
        taken = act_array(qhead[:, :, np.arange(a.kv_lora) % a.nope_dim], act)
        q = self.buffer("Q").view(taken.dtype)[: rows * a.heads * p.q_stride]
        q.reshape(rows, a.heads, -1)[:, :, : a.kv_lora] = taken

    def _rope(self) -> None:
        a, s = self.a, self.step
        p = simt.params(
            "pds_cu_rope", position=s.arrays[0], table=self.buffer("ROPE"), rows=s.ctx.rows,
            dim=a.rope.dim, scale=a.rope.scale,
        )  # fmt: skip
        for i in range(a.rope.dim // 2):
            p.inv_freq[i] = a.rope.inv_freq[i]
        simt.launch_as(simt.library().pds_cu_shape_rope(p), p)
        n = 4 * s.ctx.rows * a.rope.dim
        mine, theirs = self.buffer("ROPE")[:n], s.buffer("ROPE", np.uint8)[:n]
        np.testing.assert_allclose(mine.view(np.float32), theirs.view(np.float32), atol=1e-6)

    def act(self, name: str, n: int) -> np.ndarray:
        """The first n values of a buffer of act, as fp32."""
        kind = np.uint16 if self.elt == 2 else np.float32
        return from_act(self.buffer(name).view(kind)[:n], self.model.act)

    def same(self, name: str, n: int) -> None:
        kind: Any = np.uint16 if self.elt == 2 else np.float32
        want = from_act(self.step.buffer(name, kind)[:n], self.model.act)
        np.testing.assert_allclose(self.act(name, n), want, *CLOSE[self.model.act], err_msg=name)

    def _cache(self, kv: np.ndarray) -> np.ndarray:
        return from_act(kv.view(np.uint16 if self.elt == 2 else np.float32), self.model.act)

    def guards(self) -> None:
        for name, start in self.step.offsets.items():
            end = start + self.step.sizes[name]
            assert (self.scratch[end : end + 256] == 0xA5).all(), f"wrote beyond {name}"
