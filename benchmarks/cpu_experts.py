"""The experts of one MoE layer on this CPU, against its two ceilings, torch and kt-kernel.

A plan with dummy weights is compiled for each model and dtype, with layers enough that its experts
exceed four times the last-level cache (or what memory allows: the output says so). Steps of random
tokens run through the runtime; the times are those of the instruction trace's expert and
shared_expert records, so routing is the gate's own and every figure is that of the real operators.
Ceilings are ceilings.c's, measured before and after each block in the same run.

    python benchmarks/cpu_experts.py [--models qwen3,...] [--dtypes bf16,fp32] [--tokens 1,4,...]
        [--threads N] [--rounds R] [--isa PATH] [--quick] [--no-peers] [--json]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from machine import (
    Ceilings,
    available_memory,
    ceilings,
    last_level_cache,
    plan_folder,
    spread,
    usable_cores,
)

import pdscope
from pdscope.errors import PdscopeError

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 2048,  # small: the experts are what is measured
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}
DTYPES = ("bf16", "fp32", "int8", "int4")
WEIGHT_BYTES = {"bf16": 2.0, "fp32": 4.0, "int8": 1.03, "int4": 0.56}
TOKENS = (1, 4, 16, 64, 512, 2048)
COMPUTE = {
    "bf16": ("fma", "bf16", "amx"),
    "fp32": ("fma",),
    "int8": ("vnni", "amx8"),
    "int4": ("vnni", "amx8"),
}
# What a forced kernel path has of them; fma in any case.
PATH_MODES = {"avx512bf16": ("fma", "bf16", "vnni")}


@dataclass(frozen=True)
class Shape:
    """Dimensions of one layer's experts."""

    hidden: int
    inter: int
    experts: int
    top_k: int
    shared: int  # width of the shared expert, 0: none

    @classmethod
    def of(cls, c: dict[str, Any]) -> "Shape":
        inter = c.get("moe_intermediate_size", c["intermediate_size"])
        experts = c.get("num_experts") or c.get("n_routed_experts") or c["num_local_experts"]
        shared = c.get("n_shared_experts", 0) * inter
        return cls(c["hidden_size"], inter, experts, c["num_experts_per_tok"], shared)

    def weights(self) -> int:
        """Of all experts of a layer."""
        return 3 * self.hidden * (self.inter * self.experts + self.shared)

    def flop(self, tokens: int) -> float:
        return 6.0 * self.hidden * tokens * (self.inter * self.top_k + self.shared)


@dataclass
class Row:
    """One line of the table; times per layer, in seconds."""

    model: str
    dtype: str
    tokens: int
    seconds: dict[str, float]
    gb_per_second: float
    gflop_per_second: float
    of_read: float  # shares of the two ceilings
    of_compute: float
    of_limit: float  # max(bytes / read, flop / compute) over the time
    peers: dict[str, float] = field(default_factory=dict)  # times of theirs over ours


def layers_of(shape: Shape, dtype: str, cache: int, memory: int) -> tuple[int, bool]:
    """Layers whose experts exceed four caches, and whether memory holds them."""
    one = int(shape.weights() * WEIGHT_BYTES[dtype])
    wanted = max(1, -(-4 * cache // one))
    most = max(1, int(0.7 * memory) // one)
    return min(wanted, most), wanted <= most


def make_plan(name: str, dtype: str, layers: int, rows: int) -> Path:
    plan = plan_folder(f"bench-experts-{name}-{dtype}-{layers}-{rows}")
    if (plan / "plan.json").exists():
        return plan
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / name
        model.mkdir()
        settings = {**COMMON, **CONFIGS[name], "num_hidden_layers": layers}
        (model / "config.json").write_text(json.dumps(settings))
        print(f"compiling a dummy model into {plan}", file=sys.stderr)
        pdscope.compile(
            model, plan, load_format="dummy", dtype=dtype, max_context=rows, max_rows=rows
        )
    return plan


def expert_times(session: Any, tokens: int, rng: np.random.Generator) -> tuple[float, int, int]:
    """Seconds, weight bytes and layers of one step's experts. A shared and routed pair that ran as
    one job has one interval."""
    ids = rng.integers(0, COMMON["vocab_size"], tokens)
    session.reset()
    with session.trace(1 << 14) as trace:
        session.prefill(ids)
    wanted = [code for code, n in trace.opcode_names().items() if n in ("expert", "shared_expert")]
    records = trace.records[np.isin(trace.records["opcode"], wanted)]
    spans = {(int(r["begin_ns"]), int(r["end_ns"])) for r in records}
    seconds = sum(end - begin for begin, end in spans) / 1e9
    return seconds, int(records["bytes"].sum()), len(set(records["layer"].tolist()))


def measure(
    name: str, dtype: str, asked: argparse.Namespace, tools: Ceilings, out: dict[str, Any]
) -> list[Row]:
    shape = Shape.of(CONFIGS[name])
    rows = max(asked.tokens)
    layers, enough = layers_of(shape, dtype, last_level_cache(), available_memory())
    try:
        plan = make_plan(name, dtype, layers, max(rows, 64))
    except PdscopeError as error:
        print(f"{name} {dtype}: {error}", file=sys.stderr)
        return []
    if not enough:
        out["notes"].append(
            f"{name} {dtype}: memory holds {layers} layers' experts, less than four caches"
        )
    rng = np.random.default_rng(0)
    before = (tools.measure("read") or 0, best(tools, dtype, asked.isa))
    found: dict[int, list[tuple[float, int, int]]] = {}
    with pdscope.load(plan, threads=asked.threads, isa=asked.isa) as engine:
        out["kernel_path"] = engine.info.isa
        session = engine.main
        for _ in range(2):  # brings the weights into memory
            expert_times(session, rows, rng)
        for tokens in asked.tokens:
            repeats = asked.rounds * (4 if tokens <= 16 else 1)
            expert_times(session, tokens, rng)
            found[tokens] = [expert_times(session, tokens, rng) for _ in range(repeats)]
    after = (tools.measure("read") or 0, best(tools, dtype, asked.isa))
    read, compute = max(before[0], after[0]), max(before[1], after[1])
    out["ceilings"].append({"model": name, "dtype": dtype, "read": read, "compute": compute})
    table = []
    for tokens, runs in found.items():
        times = spread([seconds / n for seconds, _, n in runs])
        size = float(np.median([b / n for _, b, n in runs]))
        gb, gflop = size / times["median"] / 1e9, shape.flop(tokens) / times["median"] / 1e9
        limit = max(gb / read, gflop / compute)
        table.append(Row(name, dtype, tokens, times, gb, gflop, gb / read, gflop / compute, limit))
    return table


def best(tools: Ceilings, dtype: str, isa: str | None) -> float:
    """The best rate of the instructions that can do this dtype on a kernel path, GFLOP/s."""
    modes = [m for m in COMPUTE[dtype] if isa in (None, "amx") or m in PATH_MODES.get(isa, ())]
    return max(tools.measure(mode) or 0 for mode in modes or ["fma"])


# --- peers: one routed layer in bf16, each in its own process --------------------------------


def run_peer(peer: str, name: str, asked: argparse.Namespace) -> dict[int, float] | str:
    """Median seconds by tokens, or why there are none."""
    command = [sys.executable, __file__, "--peer", peer, "--models", name]
    command += ["--tokens", ",".join(map(str, asked.tokens)), "--threads", str(asked.threads)]
    command += ["--rounds", str(asked.rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1][:160] if lines else f"exit status {done.returncode}"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {int(tokens): seconds for tokens, seconds in found.items()}


def random_weights(shape: Shape) -> tuple[Any, Any]:
    """gate_up [experts, 2, inter, hidden] and down [experts, hidden, inter], bf16."""
    import torch

    block = torch.randn(1 << 22).mul_(0.02).to(torch.bfloat16)

    def filled(*dims: int) -> Any:
        out = torch.empty(dims, dtype=torch.bfloat16)
        flat = out.view(-1)
        for at in range(0, flat.numel(), block.numel()):
            flat[at : at + block.numel()] = block[: flat.numel() - at]
        return out

    return (
        filled(shape.experts, 2, shape.inter, shape.hidden),
        filled(shape.experts, shape.hidden, shape.inter),
    )


def routes(shape: Shape, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Uniform top-k [tokens, top_k]."""
    return rng.random((tokens, shape.experts)).argsort(1)[:, : shape.top_k]


def torch_times(shape: Shape, asked: argparse.Namespace) -> dict[int, float]:
    import torch

    torch.set_num_threads(asked.threads)
    gate_up, down = random_weights(shape)
    rng = np.random.default_rng(0)

    def layer(x: Any, ids: np.ndarray) -> Any:
        out = torch.zeros_like(x)
        for e in np.unique(ids):
            rows = torch.from_numpy(np.nonzero((ids == e).any(1))[0])
            gate, up = (torch.nn.functional.linear(x[rows], w) for w in gate_up[e])
            y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down[e])
            out.index_add_(0, rows, y)
        return out

    def once(tokens: int) -> float:
        x = torch.randn(tokens, shape.hidden).to(torch.bfloat16)
        ids = routes(shape, tokens, rng)
        began = time.perf_counter()
        layer(x, ids)
        return time.perf_counter() - began

    with torch.inference_mode():
        return peer_rounds(once, asked)


def peer_rounds(once: Any, asked: argparse.Namespace) -> dict[int, float]:
    found = {}
    for tokens in asked.tokens:
        once(tokens)
        repeats = asked.rounds * (4 if tokens <= 16 else 1)
        found[tokens] = float(np.median([once(tokens) for _ in range(repeats)]))
    return found


def kt_times(shape: Shape, asked: argparse.Namespace) -> dict[int, float]:
    """kt-kernel's own bf16 experts (PyPI: kt-kernel), through its documented wrapper."""
    import torch
    from kt_kernel import KTMoEWrapper  # type: ignore[import-not-found,unused-ignore]
    from safetensors.torch import save_file

    gate_up, down = random_weights(shape)
    with tempfile.TemporaryDirectory() as folder:
        tensors = {}
        for e in range(shape.experts):
            prefix = f"model.layers.0.mlp.experts.{e}"
            tensors[f"{prefix}.gate_proj.weight"] = gate_up[e, 0].clone()
            tensors[f"{prefix}.up_proj.weight"] = gate_up[e, 1].clone()
            tensors[f"{prefix}.down_proj.weight"] = down[e].clone()
        save_file(tensors, str(Path(folder) / "model.safetensors"))
        del tensors, gate_up, down
        moe = KTMoEWrapper(
            layer_idx=0,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.inter,
            gpu_experts_mask=torch.zeros(shape.experts, dtype=torch.bool),
            cpuinfer_threads=asked.threads,
            threadpool_count=1,
            weight_path=folder,
            chunked_prefill_size=max(asked.tokens),
            method="BF16",
        )
        moe.load_weights(torch.arange(shape.experts))
    rng = np.random.default_rng(0)

    def once(tokens: int) -> float:
        x = torch.randn(tokens, shape.hidden).to(torch.bfloat16)
        ids = torch.from_numpy(routes(shape, tokens, rng))
        weights = torch.full((tokens, shape.top_k), 1 / shape.top_k, dtype=torch.float32)
        began = time.perf_counter()
        moe.forward(x, ids, weights, 0)
        return time.perf_counter() - began

    return peer_rounds(once, asked)


PEERS = {"torch": torch_times, "kt-kernel": kt_times}


def print_table(rows: list[Row], out: dict[str, Any]) -> None:
    print(f"{out['threads']} threads, kernel path {out['kernel_path']}")
    for c in out["ceilings"]:
        print(
            f"ceilings beside {c['model']} {c['dtype']}: read {c['read']:.1f} GB/s, "
            f"compute {c['compute']:.0f} GFLOP/s"
        )
    for note in out["notes"]:
        print(note)
    print(
        f"{'model':18}{'dtype':6}{'tokens':>7}{'ms min':>9}{'median':>9}{'max':>9}{'GB/s':>8}"
        f"{'GFLOP/s':>9}{'of read':>9}{'of comp':>9}{'limit':>7}"
        + "".join(f"{p:>11}" for p in PEERS)
    )
    for r in rows:
        times = "".join(f"{1e3 * r.seconds[k]:9.2f}" for k in ("min", "median", "max"))
        peers = "".join(f"{r.peers[p]:10.2f}x" if p in r.peers else f"{'-':>11}" for p in PEERS)
        print(
            f"{r.model:18}{r.dtype:6}{r.tokens:7}{times}{r.gb_per_second:8.1f}"
            f"{r.gflop_per_second:9.0f}{r.of_read:9.0%}{r.of_compute:9.0%}{r.of_limit:7.0%}{peers}"
        )
    print("limit: max(bytes / read, flop / compute) over the time. Peers: their time over ours,")
    print("on the routed experts alone and uniform routes.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--isa", help="kernel path; the best one by default")
    parser.add_argument("--quick", action="store_true", help="Qwen3 and bf16, 1, 64 and 512 tokens")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.quick:
        asked.models, asked.dtypes, asked.tokens, asked.rounds = "qwen3", "bf16", "1,64,512", 3
    asked.tokens = [int(t) for t in asked.tokens.split(",")]
    return asked


def main() -> None:
    asked = parse()
    names = asked.models.split(",")
    if asked.peer:
        print(json.dumps(PEERS[asked.peer](Shape.of(CONFIGS[names[0]]), asked)))
        return
    out: dict[str, Any] = {"threads": asked.threads, "ceilings": [], "notes": []}
    out["kernel_path"] = None
    rows: list[Row] = []
    with ceilings(asked.threads, 0.5 if asked.quick else 1.0) as tools:
        for name in names:
            mine = [r for d in asked.dtypes.split(",") for r in measure(name, d, asked, tools, out)]
            rows += mine
            for peer in () if asked.no_peers else PEERS:
                theirs = run_peer(peer, name, asked)
                if isinstance(theirs, str):
                    out["notes"].append(f"{name}: {peer} not measured: {theirs}")
                    continue
                for row in mine:
                    row.peers[peer] = theirs[row.tokens] / row.seconds["median"]
    if asked.json:
        print(json.dumps(out | {"rows": [asdict(r) for r in rows]}, indent=2))
    else:
        print_table(rows, out)


if __name__ == "__main__":
    main()
