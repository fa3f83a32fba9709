"""The GPU's attention and row kernels on a real GPU, beside what its memory and tensor cores do.

For the attention of Qwen3-30B-A3B (32 heads, 4 cached), Mixtral (32, 8) and DeepSeek-V2-Lite (MLA,
16 heads on a latent of 512 + 64): decode of one row and of 16 sequences with contexts of 1k to 32k
tokens, in GB/s of cache read, and prefill of 512 to 4096 rows, in TFLOP/s; then the kernels that
work row by row. Every attention case is checked against torch first; prefill stands beside torch's
own attention. Launches of a decode case go round more cache than the second-level cache holds.

    python benchmarks/gpu_attention.py [--quick] [--models qwen3,mixtral,deepseek] [--json FILE]
"""

import argparse
import ctypes
import json
import sys
from ctypes import c_float, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_driver import Ceilings, Gpu, Head, ceilings, params, seconds_of

BF16 = 2
KV_SPLIT = 512  # of compiler/passes/plan_memory.py
FARTHEST = 32768
STAGES = {"Q_A": 0, "ROWS": 1, "ATTEND": 2, "MERGE": 3}
TOLERANCE = 1e-2  # of the result's norm: probabilities and outputs are rounded to bf16
TURN_BYTES = 256 << 20  # of cache that a decode case goes round, at least


class Attention(ctypes.Structure):
    _fields_ = (
        [("head", Head)]
        + [(n, c_void_p) for n in ("position", "seq", "table", "kv")]
        + [("block_bytes", c_uint64), ("rows", c_uint32), ("table_stride", c_uint32)]
        + [(n, c_uint8) for n in ("mla", "qk_norm", "interleaved", "act_dtype")]
        + [(n, c_uint32) for n in ("heads", "kv_heads", "qk_dim", "v_dim", "nope_dim", "q_lora")]
        + [(n, c_uint32) for n in ("kv_lora", "rope_dim", "window", "key_dims", "value_dims")]
        + [(n, c_uint64) for n in ("key_panel_bytes", "key_bytes", "head_bytes")]
        + [(n, c_float) for n in ("scale", "norm_eps", "clip")]
        + [(n, c_void_p) for n in ("q_norm", "k_norm", "rope", "qkv", "qb", "qact", "q", "qhead")]
        + [(n, c_void_p) for n in ("ctx", "oact", "partial")]
        + [(n, c_uint32) for n in ("qkv_stride", "qb_stride", "qact_stride", "q_stride")]
        + [(n, c_uint32) for n in ("qhead_stride", "ctx_stride", "oact_stride")]
        + [(n, c_uint32) for n in ("split_tokens", "splits", "most_splits")]
    )


class Norm(ctypes.Structure):
    _fields_ = (
        [("head", Head)]
        + [(n, c_void_p) for n in ("x", "weight", "index", "xn", "xact", "host_xn", "host_xact")]
        + [(n, c_uint32) for n in ("rows", "n", "stride")]
        + [("eps", c_float), ("act_dtype", c_uint8)]
    )


class Route(ctypes.Structure):
    _fields_ = (
        [("head", Head)]
        + [(n, c_void_p) for n in ("scores", "bias", "id", "weight", "host_id", "host_weight")]
        + [(n, c_uint32) for n in ("rows", "stride", "experts", "top_k", "groups", "top_groups")]
        + [(n, c_uint8) for n in ("score", "group_score", "normalise", "mask_zero")]
        + [("norm_eps", c_float), ("scaling", c_float)]
    )


class Combine(ctypes.Structure):
    _fields_ = (
        [("head", Head)]
        + [(n, c_void_p) for n in ("hid", "out", "cpu_out", "weight", "shared", "id")]
        + [(n, c_uint32) for n in ("rows", "top_k", "n", "stride")]
        + [("on_gpu", c_uint32 * 32), ("cpu_bf16", c_uint8)]
    )


STRUCTS = {
    "pds_cu_attention": Attention,
    "pds_cu_norm": Norm,
    "pds_cu_route": Route,
    "pds_cu_combine": Combine,
}


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key: int
    value: int
    mla: bool = False

    @property
    def words(self) -> int:
        """32-bit words of one token in the cache."""
        return self.kv_heads * (self.key + (0 if self.mla else self.value)) // 2


MODELS = {
    "qwen3": Shape(32, 4, 128, 128),
    "mixtral": Shape(32, 8, 128, 128),
    "deepseek": Shape(16, 1, 576, 512, mla=True),
}


@dataclass
class Result:
    model: str
    what: str
    rows: int
    context: int
    kernel: str
    parts: int
    microseconds: float
    gigabytes: float
    teraflops: float
    torch_microseconds: float | None
    error: float


class Cache:
    """`copies` caches of `sequences` sequences of `tokens` tokens, equal but for where their blocks
    lie; keys [sequences, tokens, heads, key] and values, fp32."""

    def __init__(self, torch: Any, s: Shape, sequences: int, tokens: int, copies: int) -> None:
        blocks = -(-tokens // 64)
        self.copies, self.stride = copies, blocks
        shape = (sequences, blocks * 64, s.kv_heads)
        keys = torch.randn(*shape, s.key, device="cuda").to(torch.bfloat16)
        values = (
            keys[..., : s.value]
            if s.mla
            else torch.randn(*shape, s.value, device="cuda").to(torch.bfloat16)
        )
        self.keys, self.values = keys[:, :tokens], values[:, :tokens]
        all_blocks = sequences * blocks
        # [block, head, panel, row, column, pair]: columns are tokens, pairs dimensions
        packed = keys.view(all_blocks, 4, 16, s.kv_heads, s.key // 2, 2)
        parts = [packed.permute(0, 3, 1, 4, 2, 5).reshape(all_blocks, s.kv_heads, -1)]
        if not s.mla:  # columns are dimensions, pairs tokens
            packed = values.view(all_blocks, 32, 2, s.kv_heads, s.value // 16, 16)
            parts.append(packed.permute(0, 3, 4, 1, 5, 2).reshape(all_blocks, s.kv_heads, -1))
        one = torch.cat(parts, 2).view(all_blocks, -1)
        places = torch.stack([torch.randperm(all_blocks, device="cuda") for _ in range(copies)])
        self.kv = torch.empty(copies * all_blocks, one.shape[1], device="cuda", dtype=one.dtype)
        self.tables = []
        for i in range(copies):
            self.kv[i * all_blocks + places[i]] = one
            table = (i * all_blocks + places[i]).to(torch.int32).view(sequences, blocks)
            self.tables.append(table.contiguous())


class Bench:
    def __init__(self, torch: Any, gpu: Gpu, ceiling: Ceilings, repeats: int) -> None:
        self.torch, self.gpu, self.ceiling, self.repeats = torch, gpu, ceiling, repeats
        self.results: list[Result] = []

    def params(self, s: Shape, cache: Cache, copy: int, q: Any, position: Any, seq: Any) -> Any:
        torch, rows = self.torch, len(position)
        panel = s.key // 2 * 64
        head = 4 * panel + (0 if s.mla else s.value * 128)
        # As the compiler has it: room for parts of at least KV_SPLIT tokens of the longest context,
        # of 16 rows; where they are fewer, for more parts (launch.h).
        fold = max(1, 16 // rows)
        most = FARTHEST // KV_SPLIT * fold
        partial = torch.empty(16 * s.heads * most // fold * (s.value + 16), device="cuda")
        out = torch.zeros(rows, s.heads, s.value, device="cuda", dtype=torch.bfloat16)
        p = params(
            Attention, position=position, seq=seq, table=cache.tables[copy], kv=cache.kv,
            block_bytes=s.kv_heads * head, rows=rows, table_stride=cache.stride, mla=s.mla,
            act_dtype=BF16, heads=s.heads, kv_heads=s.heads if s.mla else s.kv_heads,
            qk_dim=s.key, v_dim=s.value, kv_lora=s.value if s.mla else 0,
            rope_dim=s.key - s.value if s.mla else s.key, key_dims=s.key, value_dims=s.value,
            key_panel_bytes=panel, key_bytes=4 * panel, head_bytes=head, scale=s.key**-0.5,
            q=q, q_stride=s.key, partial=partial, most_splits=most, ctx_stride=s.value,
            oact_stride=s.heads * s.value, **{"ctx" if s.mla else "oact": out},
        )  # fmt: skip
        p.out = out
        far = int(position.max())
        self.gpu.library.pds_cu_cut_context(
            ctypes.byref(self.gpu.device), ctypes.byref(p), far, max(64, KV_SPLIT // fold)
        )
        return p

    def launches(self, p: Any) -> list[Any]:
        """Shapes of the stages between the query and the output."""
        stages = ["ATTEND", *(["MERGE"] if p.splits > 1 else [])]
        return [
            self.gpu.shape(
                "pds_cu_shape_attention", ctypes.byref(self.gpu.device), ctypes.byref(p), STAGES[n]
            )
            for n in stages
        ]

    def attend(self, p: Any, shapes: list[Any]) -> None:
        for shape in shapes:
            self.gpu.launch(p, shape)

    def reference(self, s: Shape, cache: Cache, q: Any, position: Any, seq: Any) -> Any:
        """fp32, on the rows given."""
        torch = self.torch
        out = torch.empty(len(q), s.heads, s.value, device="cuda")
        step = max(1, (64 << 20) // (cache.keys.shape[1] * s.heads))
        for i in range(0, len(q), step):
            for n in set(seq[i : i + step].tolist()):
                at = i + (seq[i : i + step] == n).nonzero()[:, 0]
                k, v = cache.keys[n].float(), cache.values[n].float()
                group = s.heads // s.kv_heads
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                scores = torch.einsum("rhd,thd->hrt", q[at].float(), k) * s.key**-0.5
                seen = torch.arange(k.shape[0], device="cuda")[None] <= position[at][:, None]
                scores.masked_fill_(~seen[None], float("-inf"))
                out[at] = torch.einsum("hrt,thd->rhd", scores.softmax(2), v)
        return out

    def case(self, model: str, what: str, cache: Cache, position: Any, seq: Any,
             torch_seconds: float | None = None) -> None:  # fmt: skip
        torch, s, rows = self.torch, MODELS[model], len(position)
        q = torch.randn(rows, s.heads, s.key, device="cuda").to(torch.bfloat16)
        all_params = [self.params(s, cache, i, q, position, seq) for i in range(cache.copies)]
        shapes = self.launches(all_params[0])
        self.attend(all_params[0], shapes)
        torch.cuda.synchronize()
        want = self.reference(s, cache, q, position, seq)
        error = float((all_params[0].out.float() - want).norm() / want.norm())
        work = [lambda p=p: self.attend(p, shapes) for p in all_params]
        while len(work) < (2 if what == "prefill" else 16):
            work += work
        seconds = seconds_of(torch, work, self.repeats)
        context = position.double() + 1
        spans = {n: float(context[seq == n].max()) for n in set(seq.tolist())}
        gigabytes = 4 * s.words * sum(spans.values()) / seconds / 1e9
        flops = 2 * s.heads * (s.key + s.value) * float(context.sum())
        self.results.append(
            Result(
                model, what, rows, int(context.max()),
                self.gpu.names[shapes[0].kernel].removeprefix("attend_"), all_params[0].splits,
                seconds * 1e6, gigabytes, flops / seconds / 1e12,
                torch_seconds and torch_seconds * 1e6, error,
            )
        )  # fmt: skip
        self.show(self.results[-1])

    def show(self, r: Result) -> None:
        share = 100 * r.gigabytes / self.ceiling.gigabytes
        rate = (
            f"{r.teraflops:>7.1f} TFLOP/s {100 * r.teraflops / self.ceiling.teraflops:>4.0f} %"
            if r.what == "prefill"
            else f"{r.gigabytes:>7.0f} GB/s    {share:>4.0f} %"
        )
        torch_time = f"  torch {r.torch_microseconds:.1f} us" if r.torch_microseconds else ""
        wrong = "" if r.error <= TOLERANCE else "  WRONG"
        print(
            f"{r.model:<9} {r.what:<8} {r.rows:>5} rows {r.context:>6} tokens  {r.kernel:<9} "
            f"{r.parts:>3} parts {r.microseconds:>9.1f} us {rate}  off {r.error:.1e}"
            f"{torch_time}{wrong}",
            flush=True,
        )

    def decode(self, model: str, rows: int, tokens: int) -> None:
        torch, s = self.torch, MODELS[model]
        once = 4 * s.words * tokens * rows
        cache = Cache(torch, s, rows, tokens, max(1, min(64, -(-TURN_BYTES // once))))
        position = torch.full((rows,), tokens - 1, device="cuda", dtype=torch.int32)
        seq = torch.arange(rows, device="cuda", dtype=torch.int32)
        self.case(model, "decode", cache, position, seq)

    def prefill(self, model: str, rows: int, before: int = 0) -> None:
        torch, s = self.torch, MODELS[model]
        cache = Cache(torch, s, 1, before + rows, 1)
        position = torch.arange(before, before + rows, device="cuda", dtype=torch.int32)
        seconds = None
        if not s.mla and not before:
            q = torch.randn(1, s.heads, rows, s.key, device="cuda").to(torch.bfloat16)
            k, v = (x.transpose(1, 2).contiguous() for x in (cache.keys, cache.values))
            attention = torch.nn.functional.scaled_dot_product_attention
            seconds = seconds_of(
                torch, [lambda: attention(q, k, v, is_causal=True, enable_gqa=True)] * 2,
                self.repeats,
            )  # fmt: skip
        self.case(model, "prefill", cache, position, torch.zeros_like(position), seconds)

    # --- row kernels: Qwen3's ---

    def row_kernel(self, name: str, rows: int, nbytes: float, p: Any, shape: Any) -> None:
        launches = [lambda: self.gpu.launch(p, shape)] * 16
        seconds = seconds_of(self.torch, launches, self.repeats)
        rate = nbytes / seconds / 1e9
        print(f"{name:<16} {rows:>5} rows {seconds * 1e6:>8.1f} us {rate:>7.0f} GB/s")

    def rows(self, rows: int) -> None:
        torch, hidden, experts, top_k = self.torch, 2048, 128, 8
        by = ctypes.byref

        def floats(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda")

        norm = params(
            Norm, x=floats(rows, hidden), weight=floats(hidden), xn=floats(rows, hidden),
            xact=floats(rows, hidden), rows=rows, n=hidden, stride=hidden, eps=1e-6, act_dtype=BF16,
        )  # fmt: skip
        shape = self.gpu.shape("pds_cu_shape_norm", by(norm))
        self.row_kernel("norm", rows, rows * hidden * 10, norm, shape)
        ids = torch.zeros(rows, top_k, device="cuda", dtype=torch.int32)
        route = params(
            Route, scores=floats(rows, experts), id=ids, weight=floats(rows, top_k), rows=rows,
            stride=experts, experts=experts, top_k=top_k, normalise=1, scaling=1.0,
        )  # fmt: skip
        shape = self.gpu.shape("pds_cu_shape_route", by(route))
        self.row_kernel("route", rows, rows * experts * 8, route, shape)
        out = floats(rows * top_k, hidden)
        host = torch.randn(rows * top_k, hidden, pin_memory=True)
        for name, on_gpu in (("combine", 1), ("combine from CPU", 0)):
            flags = (c_uint32 * 32)(*([0xFFFFFFFF * on_gpu] * 32))
            combine = params(
                Combine, hid=floats(rows, hidden), out=out, cpu_out=host, on_gpu=flags,
                weight=floats(rows, top_k), id=ids, rows=rows, top_k=top_k, n=hidden, stride=hidden,
            )  # fmt: skip
            shape = self.gpu.shape("pds_cu_shape_combine", by(combine))
            self.row_kernel(name, rows, rows * hidden * 4 * (top_k + 2), combine, shape)
        for model, s in MODELS.items():
            cache = Cache(torch, s, 1, rows, 1)
            position = torch.arange(rows, device="cuda", dtype=torch.int32)
            q = torch.zeros(rows, s.heads, s.key, device="cuda", dtype=torch.bfloat16)
            p = self.params(s, cache, 0, q, position, torch.zeros_like(position))
            p.qk_norm, p.norm_eps, p.interleaved = (0 if s.mla else 1), 1e-6, s.mla
            if s.mla:
                p.qk_dim, p.nope_dim, p.qhead_stride = 192, 128, 128
            width = s.heads * p.qk_dim + (576 if s.mla else s.kv_heads * 256)
            more = {"qkv": floats(rows, width), "rope": floats(rows, p.rope_dim),
                    "q_norm": floats(128), "k_norm": floats(512),
                    "qhead": torch.zeros_like(q)}  # fmt: skip
            for name, value in more.items():
                setattr(p, name, value.data_ptr())
            p.qkv_stride = width
            stage = self.gpu.shape(
                "pds_cu_shape_attention", by(self.gpu.device), by(p), STAGES["ROWS"]
            )
            self.row_kernel(f"rows {model}", rows, rows * width * 6, p, stage)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Attention kernels on a GPU against its ceilings")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats: a minute")
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=None, help="replays a case (20; quick: 5)")
    parser.add_argument("--json", type=Path, default=None, help="also write the results there")
    asked = parser.parse_args()
    asked.models = asked.models.split(",")
    for name in asked.models:
        if name not in MODELS:
            parser.error(f"--models: '{name}' is none of {', '.join(MODELS)}")
    asked.repeats = asked.repeats or (5 if asked.quick else 20)
    return asked


def main() -> None:
    asked = arguments()
    try:
        import torch
    except ImportError:
        sys.exit("gpu_attention: needs torch: pip install torch")
    if not torch.cuda.is_available():
        sys.exit("gpu_attention: torch finds no GPU")
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    files, launchers = ["attention.cu", "rows.cu"], ["launch_attention.c", "launch_rows.c"]
    gpu = Gpu(torch, files, launchers, STRUCTS)
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {asked.repeats} repeats")
    bench = Bench(torch, gpu, ceilings(torch, asked.repeats), asked.repeats)
    contexts = [1024, 8192, 32768] if asked.quick else [1024, 2048, 4096, 8192, 16384, 32768]
    for model in asked.models:
        for tokens in contexts:
            bench.decode(model, 1, tokens)
        bench.decode(model, 16, 4096)
        for rows in [512, 4096] if asked.quick else [32, 512, 1024, 2048, 4096]:
            bench.prefill(model, rows)
        if not asked.quick:
            bench.prefill(model, 512, 16384)
        torch.cuda.empty_cache()
    for rows in (1, 16, 4096):
        bench.rows(rows)
    if asked.json:
        report = {"ceilings": asdict(bench.ceiling), "results": [asdict(r) for r in bench.results]}
        asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    wrong = sum(not r.error <= TOLERANCE for r in bench.results)
    if wrong:
        sys.exit(f"gpu_attention: {wrong} of {len(bench.results)} cases are wrong")


if __name__ == "__main__":
    main()
