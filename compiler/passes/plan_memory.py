"""Plan every byte that a load takes: session scratch, worker scratch, KV blocks, arenas, weight
maps.

The one place that knows the sizes of buffers: the runtime takes their offsets from the emitted
plan, and memory.json prints the same numbers. The arena formulas and constants mirror
runtime_c/src/memory.h, and tests/unit/test_memory_exact.py compares the table with what an
interposed mmap sees. May import pdscope.compiler.{lowered,passmanager}.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pdscope.compiler.lowered import (
    K_ALIGN,
    KV_BLOCK,
    MATRIX_FORM,
    PANEL,
    Attention,
    LoweredModel,
    ceil_to,
)
from pdscope.compiler.passmanager import Workspace

# runtime_c/src/memory.h
GRAIN = 65536
ENGINE_HEADER = 16384
SESSION_HEADER = 8192
POOL_BYTES = 2048
WORKER_BYTES = 256
STACK_BYTES = 1114112
HUGE = 2 << 20
FILE_GRAIN = 4096

NET_WIDTH = 1024  # PDS_NET_WIDTH of plan_desc.h
BATCH_ROWS = 16  # steps of at most this many rows split attention over the context, and predict
KV_SPLIT = 512  # context tokens of one split
LOGITS_BYTES = 64 << 20  # aim for the logits buffer
NET_HEADER = 192  # of a net in memory: struct pds_net of net.h, rounded up to CACHE_LINE
NET_SLOT = 16  # struct pds_net_slot of net.h; two a layer
HOLE_BYTES = 16  # struct pds_hole of step.h
CACHE_LINE = 64


@dataclass(frozen=True)
class Buffer:
    """One scratch buffer of a session (enum pds_buffer of plan_desc.h)."""

    name: str
    bytes: int
    offset: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    max_rows: int
    max_logits: int
    kv_block: int
    kv_split: int
    max_context: int
    buffers: tuple[Buffer, ...]
    scratch_bytes: int
    thread_scratch_bytes: int
    kv_block_bytes: int
    weight_files: tuple[tuple[str, int], ...]
    layers: int
    predict_rows: int  # rows of a step that predict, at most
    last_top_k: int  # experts a layer that are remembered of a sequence's last token
    program_bytes: int = 0

    def with_programs(self, program_bytes: int) -> "MemoryPlan":
        return replace(self, program_bytes=program_bytes)

    def engine_bytes(self, threads: int) -> int:
        """One mapping: control blocks, programs, worker scratch, stacks (pds_layout_engine)."""
        fixed = ENGINE_HEADER + POOL_BYTES + ceil_to(8 * len(self.weight_files), CACHE_LINE)
        per_worker = WORKER_BYTES + self.thread_scratch_bytes
        arena = fixed + ceil_to(self.program_bytes, CACHE_LINE) + threads * per_worker
        return ceil_to(arena, GRAIN) + (threads - 1) * STACK_BYTES

    def session_bytes(self, max_seqs: int = 1, kv_tokens: int = 0) -> int:
        """One mapping: scratch, tables, KV (pds_layout_session). kv_tokens 0: max_context."""
        blocks = ceil_to(kv_tokens or self.max_context, self.kv_block) // self.kv_block
        seq_blocks = ceil_to(self.max_context, self.kv_block) // self.kv_block
        tables = (
            ceil_to(4 * max_seqs * seq_blocks, CACHE_LINE)
            + 2 * ceil_to(4 * max_seqs, CACHE_LINE)
            + 2 * ceil_to(4 * blocks, CACHE_LINE)
            + ceil_to(4 * self.max_logits, CACHE_LINE)
            + max_seqs * self.last_bytes
        )
        scratch = ceil_to(self.scratch_bytes, CACHE_LINE)
        return ceil_to(SESSION_HEADER + scratch + tables + blocks * self.kv_block_bytes, GRAIN)

    @property
    def last_bytes(self) -> int:
        """Of what a sequence's last token chose (pds_last_bytes)."""
        if not self.last_top_k:
            return 0
        return ceil_to(4 + 2 * self.layers * self.last_top_k, CACHE_LINE)

    @property
    def weight_bytes(self) -> int:
        return sum(size for _, size in self.weight_files)

    @property
    def weight_copy_bytes(self) -> int:
        """One mapping, where weights are copied rather than mapped (pds_layout_weights)."""
        return ceil_to(sum(ceil_to(size, FILE_GRAIN) for _, size in self.weight_files), HUGE)

    def summary(self) -> dict[str, int]:
        """The `memory` entry of plan.json."""
        return {
            "weights": self.weight_bytes,
            "engine_1_thread": self.engine_bytes(1),
            "engine_per_thread": self.engine_bytes(2) - self.engine_bytes(1),
            "session": self.session_bytes(),
            "kv_per_token": self.kv_block_bytes // self.kv_block,
        }

    def table(self) -> dict[str, Any]:
        """memory.json: what a load allocates, piece by piece, for `threads` workers and one
        session."""
        return {
            "weights": [{"file": path, "bytes": size} for path, size in self.weight_files],
            "weight_bytes": self.weight_bytes,
            "weight_mappings": {
                "mmap": {
                    "kind": "file",
                    "count": len(self.weight_files),
                    "bytes": self.weight_bytes,
                },
                "copy": {"kind": "anonymous", "count": 1, "bytes": self.weight_copy_bytes},
            },
            "engine": {
                "header_bytes": ENGINE_HEADER + POOL_BYTES,
                "program_bytes": self.program_bytes,
                "worker_control_bytes": WORKER_BYTES,
                "worker_scratch_bytes": self.thread_scratch_bytes,
                "worker_stack_bytes": STACK_BYTES,
                "grain_bytes": GRAIN,
                "total_bytes_by_threads": {
                    str(n): self.engine_bytes(n) for n in (1, 2, 4, 8, 16, 32, 64)
                },
            },
            "session": {
                "header_bytes": SESSION_HEADER,
                "scratch_bytes": self.scratch_bytes,
                "buffers": [vars(b) for b in self.buffers],
                "kv_block_tokens": self.kv_block,
                "kv_block_bytes": self.kv_block_bytes,
                "kv_blocks": ceil_to(self.max_context, self.kv_block) // self.kv_block,
                "total_bytes": self.session_bytes(),
            },
            "max_context": self.max_context,
            "max_rows": self.max_rows,
            "max_logits": self.max_logits,
        }


def predictor_table(model: LoweredModel, predictors: Mapping[str, Any]) -> dict[str, Any]:
    """memory.json's `predictors`: what a load takes for them (nets.c). predictors: phaseper.json.

    A net is one mapping, and so is the table of all. Where the next layer's gate predicts there is
    none; a heuristic is a net without hidden units. Programs that predict nothing load none.
    """
    nets = []
    for entry in predictors["layers"] if _predicts(model) else ():
        shape = _net_shape(entry)
        if shape is not None:
            bytes_ = net_bytes(predictors["hidden"], predictors["experts"], *shape)
            nets.append({"layer": entry["layer"], "phase": entry["phase"], "bytes": bytes_})
    table = ceil_to(2 * len(model.layers) * NET_SLOT, GRAIN) if nets else 0
    total = table + sum(int(net["bytes"]) for net in nets)
    return {"table_bytes": table, "nets": nets, "total_bytes": total}


def _net_shape(entry: Mapping[str, Any]) -> tuple[int, bool, int] | None:
    """Hidden units, whether it is deep, and feature blocks of what serves a layer and phase
    (pdscope/predictors.py); None: the next layer's gate."""
    if entry["chosen"] == "phaseper":
        net = entry["net"]
        return int(net["width"]), bool(net["deep"]), len(net["blocks"])
    blocks = {"previous": 1, "frequency": 0, "transition": 1}.get(entry["chosen"])
    return None if blocks is None else (0, False, blocks)


def net_bytes(hidden: int, experts: int, width: int, deep: bool, blocks: int) -> int:
    """One net's mapping (lay_out of net.c)."""

    def panels(n: int, k: int) -> int:
        return 2 * ceil_to(n, PANEL) * ceil_to(k, K_ALIGN) if n and k else 0

    first, second = width + experts, width if deep else 0
    parts = (
        panels(first + second, hidden) if width else 0,
        panels(second, width),
        panels(experts, width),
        4 * (first + second),
        4 * second,
        2 * blocks * experts * first,
    )
    return ceil_to(NET_HEADER + sum(ceil_to(part, CACHE_LINE) for part in parts), GRAIN)


@dataclass(frozen=True)
class PlanMemory:
    """Options: rows of the largest step (prefill chunk), and of it, those that predict."""

    max_rows: int
    predict_rows: int = BATCH_ROWS

    def run(self, model: LoweredModel) -> MemoryPlan:
        rows = min(self.max_rows, model.max_context)
        logits = min(rows, max(BATCH_ROWS, LOGITS_BYTES // (4 * model.vocab)))
        buffers, offset = [], 0
        for b in _buffers(model, rows, logits, self.predict_rows):
            buffers.append(replace(b, offset=offset))
            offset += ceil_to(b.bytes, CACHE_LINE)
        return MemoryPlan(
            max_rows=rows,
            max_logits=logits,
            kv_block=KV_BLOCK,
            kv_split=KV_SPLIT,
            max_context=model.max_context,
            buffers=tuple(buffers),
            scratch_bytes=offset,
            thread_scratch_bytes=_thread_scratch(model),
            kv_block_bytes=sum(_kv_layer(x.attn, model.act_bytes) for x in model.layers),
            weight_files=tuple((f.path, f.bytes) for f in model.files),
            layers=len(model.layers),
            predict_rows=self.predict_rows,
            last_top_k=_top_k(model) if _predicts(model) else 0,
        )


@dataclass(frozen=True)
class WriteMemory:
    """Option: what memory.json is to say."""

    table: Mapping[str, Any]

    name = "plan-memory"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        return {"table": json.dumps(self.table)}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        return {workspace.write("memory.json", json.dumps(self.table, indent=2) + "\n"): None}


@dataclass(frozen=True)
class CountPredictors:
    """memory.json once more, with the predictors that were chosen. `table`: as WriteMemory's."""

    model: LoweredModel
    table: Mapping[str, Any]

    name = "count-predictors"
    reads = ("phaseper.json",)

    def inputs(self) -> Mapping[str, str]:
        return {"table": json.dumps(self.table), "predicts": str(_predicts(self.model))}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        found = json.loads(workspace.read_text("phaseper.json"))
        table = {**self.table, "predictors": predictor_table(self.model, found)}
        return {workspace.write("memory.json", json.dumps(table, indent=2) + "\n"): None}


def _buffers(model: LoweredModel, rows: int, logits: int, predict: int) -> list[Buffer]:
    """Sizes as plan_desc.h states them, buffer by buffer, in the order of enum pds_buffer."""
    act = model.act_bytes
    attn = [x.attn for x in model.layers]
    gates = [x.gate.attrs for x in model.layers if x.gate]
    mla = [a for a in attn if a.kind == "mla"]
    splits = ceil_to(model.max_context, KV_SPLIT) // KV_SPLIT
    few = min(rows, BATCH_ROWS)
    hidden = ceil_to(model.hidden, K_ALIGN)
    top_k = _top_k(model)
    experts = max((g.experts for g in gates), default=0)
    routed = [x.experts.inter for x in model.layers if x.experts]
    shared = [x.shared.inter for x in model.layers if x.shared]
    dense = [x.dense.inter for x in model.layers if x.dense]

    predicts = _predicts(model)
    ahead = min(rows, predict) if predicts else 0

    def most(values: list[int], unit: int = 1) -> int:
        return max((ceil_to(v, unit) for v in values), default=0)

    mid = max(rows * top_k * most(routed, K_ALIGN), rows * most(dense, K_ALIGN))
    return [
        Buffer("HID", 4 * rows * hidden),
        Buffer("XN", 4 * rows * hidden),
        Buffer("XACT", act * rows * hidden),
        Buffer("ROPE", rope_tables(model, rows)[1]),
        Buffer("QKV", 4 * rows * most([a.in_proj.n for a in attn], PANEL)),
        Buffer("QACT", act * rows * most([a.q_lora for a in mla], K_ALIGN)),
        Buffer("QB", 4 * rows * most([a.heads * a.qk_dim for a in mla if a.q_lora], PANEL)),
        Buffer("Q", act * rows * max(a.heads * ceil_to(_qk(a), K_ALIGN) for a in attn)),
        Buffer("QHEAD", act * rows * most([a.heads * ceil_to(a.nope_dim, K_ALIGN) for a in mla])),
        Buffer("CTXACT", act * rows * most([a.heads * ceil_to(a.kv_lora, K_ALIGN) for a in mla])),
        Buffer("OACT", act * rows * most([a.heads * a.v_dim for a in attn], K_ALIGN)),
        Buffer(
            "PARTIAL",
            4 * few * splits * max(a.heads * (ceil_to(_v(a), PANEL) + PANEL) for a in attn),
        ),
        Buffer("GATE", 4 * rows * ceil_to(experts, PANEL)),
        Buffer("ROUTE_ID", 4 * rows * top_k),
        Buffer("ROUTE_W", 4 * rows * top_k),
        Buffer("EXPERT_ROWS", 4 * rows * top_k),
        Buffer("HOLES", HOLE_BYTES * experts),
        Buffer("MID", act * mid),
        Buffer("MID_SHARED", act * rows * most(shared, K_ALIGN)),
        Buffer("EXPERT_OUT", 4 * rows * top_k * hidden),
        Buffer("SHARED_OUT", 4 * rows * hidden if shared else 0),
        Buffer("LOGITS", 4 * logits * model.vocab),
        Buffer("XQ", _quantised(model, rows)),
        Buffer("PREDICT", 4 * ahead * ceil_to(experts, PANEL)),
        Buffer("PREDICT_ID", 4 * ahead * top_k),
        Buffer("PREDICT_W", 4 * ahead * top_k),
        Buffer("LLC_HOLES", 4 * experts if predicts else 0),
        Buffer("NET_X", 2 * ahead * hidden if act == 4 else 0),
        Buffer("NET_U", 4 * ahead * ceil_to(2 * NET_WIDTH + experts, PANEL)),
        Buffer("NET_H", 2 * 2 * ahead * NET_WIDTH),
        Buffer("NET_V", 4 * 2 * ahead * max(NET_WIDTH, ceil_to(experts, PANEL))),
        Buffer("NET_PREV", 4 * ahead * top_k),
        Buffer("NET_NEXT", 4 * ahead * top_k),
    ]


def _top_k(model: LoweredModel) -> int:
    return max((x.gate.attrs.top_k for x in model.layers if x.gate), default=0)


def _predicts(model: LoweredModel) -> bool:
    return any(x.predictor for x in model.layers)


def _quantised(model: LoweredModel, rows: int) -> int:
    """int8 and int4 plans: the quantised inputs of the largest parallel job. One job is both stages
    of an MLP, and the routed and the shared experts: all have room."""
    row = MATRIX_FORM[model.dtype].quant_bytes
    most = row(model.hidden)
    for layer in model.layers:
        a = layer.attn
        most = max(most, row(a.heads * a.v_dim), row(a.q_lora))
        if layer.dense:
            most = max(most, row(model.hidden) + row(layer.dense.inter))
        if layer.gate and layer.experts:
            routed = layer.gate.attrs.top_k * row(layer.experts.inter)
            shared = row(layer.shared.inter) if layer.shared else 0
            most = max(most, row(model.hidden) + routed + shared)
    return rows * most


def _qk(a: Attention) -> int:
    """Width of a query head as attention reads it: MLA attends in the latent space."""
    return a.kv_lora + a.rope.dim if a.kind == "mla" else a.qk_dim


def _v(a: Attention) -> int:
    return a.kv_lora if a.kind == "mla" else a.v_dim


def rope_tables(model: LoweredModel, rows: int) -> tuple[dict[tuple[object, ...], int], int]:
    """Offset of each distinct rope's cos/sin table in ROPE, by (inv_freq, scale), and the bytes of
    all."""
    offsets: dict[tuple[object, ...], int] = {}
    end = 0
    for layer in model.layers:
        rope = layer.attn.rope
        if (rope.inv_freq, rope.scale) not in offsets:
            offsets[rope.inv_freq, rope.scale] = end
            end += ceil_to(4 * rows * rope.dim, CACHE_LINE)
    return offsets, end


def _kv_layer(a: Attention, act: int) -> int:
    """Bytes of one layer in one KV block, in 32-bit words (runtime_c/src/kv_layout.h)."""
    if a.kind == "mla":
        return KV_BLOCK * ceil_to(act * _qk(a), 4)
    return KV_BLOCK * a.kv_heads * (ceil_to(act * a.qk_dim, 4) + act * ceil_to(a.v_dim, PANEL))


def _thread_scratch(model: LoweredModel) -> int:
    """pds_attention_scratch_bytes of kv_layout.h: scores and probabilities, maxima and sums, and
    outputs of a tile of KV_BLOCK queries; MLA also a block of values."""
    fixed = 2 * 4 * KV_BLOCK * KV_BLOCK + 2 * 4 * KV_BLOCK
    act = model.act_bytes
    return max(
        fixed + KV_BLOCK * ceil_to(_v(a), PANEL) * (4 + (act if a.kind == "mla" else 0))
        for a in (x.attn for x in model.layers)
    )
