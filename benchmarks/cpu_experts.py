"""The experts of one MoE layer on this CPU, against its two ceilings, torch and kt-kernel.

A plan with dummy weights is compiled for each model and dtype, with layers enough that its experts
exceed four times the last-level cache (or what memory allows: the output says so). Steps of random
tokens run through the runtime; the times are those of the instruction trace's expert and
shared_expert records, so routing is the gate's own and every figure is that of the real operators.

On a shared machine the ceilings (ceilings.c) move while one looks, so kernel and ceilings
alternate: a sample of both ceilings, a round of steps, a sample, ... A round counts against the
mean of the samples around it. Before every step the ceilings' region, four last-level caches or
more, is read through, so that no step finds weights in a cache. Peers run in the same rounds, one
at a time, each in its own process.

    python benchmarks/cpu_experts.py [--models qwen3,...] [--dtypes bf16,fp32] [--tokens 1,4,...]
        [--threads N] [--rounds R] [--isa PATH] [--quick] [--no-peers] [--json] [--out FILE.md]
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import (
    COMPUTE_SECONDS,
    Ceilings,
    Sample,
    around,
    available_memory,
    ceilings,
    last_level_cache,
    plan_folder,
    spread,
    usable_cores,
    write_report,
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
    "int8": ("fma", "vnni", "amx8"),
    "int4": ("fma", "vnni", "amx8"),
}
# What a forced kernel path has of them; fma in any case.
PATH_MODES = {"avx512bf16": ("fma", "bf16", "vnni"), "amx": ("fma", "bf16", "vnni", "amx", "amx8")}


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
class Round:
    """Steps between two samples of the ceilings. Times per layer, in seconds."""

    seconds: list[float]
    size: float  # weight bytes per layer that a step read, median
    flop: float
    ceiling: Sample
    peers: dict[str, float]  # their seconds

    @property
    def time(self) -> float:
        return float(np.median(self.seconds))

    def shares(self, ceiling: Sample) -> tuple[float, float]:
        """Of read and of compute."""
        read, compute = ceiling.read * 1e9, ceiling.compute * 1e9
        return self.size / self.time / read, self.flop / self.time / compute


@dataclass
class Row:
    """One line of the table; times per layer, in seconds, over all steps. Shares are those of the
    median time in the best ceilings seen, and those of each round in the ceilings around it."""

    model: str
    dtype: str
    tokens: int
    seconds: dict[str, float]
    gb_per_second: float
    gflop_per_second: float
    of_read: float
    of_compute: float
    of_limit: float  # max(bytes / read, flop / compute) over the time
    read_rounds: dict[str, float]
    compute_rounds: dict[str, float]
    limit_rounds: dict[str, float]
    peers: dict[str, dict[str, float]]  # times of theirs over ours, by round

    @classmethod
    def of(cls, model: str, dtype: str, tokens: int, rounds: list[Round], best: Sample) -> "Row":
        times = spread([t for r in rounds for t in r.seconds])
        size = float(np.median([r.size for r in rounds]))
        gb, gflop = size / times["median"] / 1e9, rounds[0].flop / times["median"] / 1e9
        of_read, of_compute = gb / best.read, gflop / best.compute
        shares = [r.shares(r.ceiling) for r in rounds]
        return cls(
            model,
            dtype,
            tokens,
            times,
            gb,
            gflop,
            of_read,
            of_compute,
            max(of_read, of_compute),
            spread([s[0] for s in shares]),
            spread([s[1] for s in shares]),
            spread([max(s) for s in shares]),
            {p: spread([r.peers[p] / r.time for r in rounds]) for p in rounds[0].peers},
        )


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
    name: str,
    dtype: str,
    asked: argparse.Namespace,
    tools: Ceilings,
    peers: "list[Peer]",
    out: dict[str, Any],
) -> list[Row]:
    shape = Shape.of(CONFIGS[name])
    layers, enough = layers_of(shape, dtype, last_level_cache(), available_memory())
    try:
        plan = make_plan(name, dtype, layers, max(*asked.tokens, 64))
    except PdscopeError as error:
        print(f"{name} {dtype}: {error}", file=sys.stderr)
        return []
    size = int(layers * shape.weights() * WEIGHT_BYTES[dtype])
    out["notes"].append(
        f"{name} {dtype}: rotates over {size / 1e9:.1f} GB of experts in {layers} layers "
        + ("" if enough else "(all that memory holds, less than four last-level caches) ")
        + f"and {tools.region / 1e9:.1f} GB read before each step; last-level cache "
        f"{last_level_cache() / 1e9:.2f} GB"
    )
    rng = np.random.default_rng(0)
    mode = tools.best_of(modes_of(dtype, asked.isa))
    found: dict[int, list[Round]] = {}
    samples, tiles = [], []
    with pdscope.load(plan, threads=asked.threads, isa=asked.isa) as engine:
        out["kernel_path"] = engine.info.isa
        for _ in range(2):  # brings the weights into memory
            expert_times(engine.main, max(asked.tokens), rng)
        for tokens in asked.tokens:
            expert_times(engine.main, tokens, rng)
            samples.append(tools.sample(mode))
            found[tokens] = []
            for _ in range(asked.rounds):
                if mode == "amx":
                    tiles.append(tools.measure("tiles", COMPUTE_SECONDS) or 0)
                steps = []
                for _ in range(steps_of(tokens)):
                    tools.flush()
                    steps.append(expert_times(engine.main, tokens, rng))
                samples.append(tools.sample(mode))
                found[tokens].append(
                    Round(
                        [seconds / n for seconds, _, n in steps],
                        float(np.median([read / n for _, read, n in steps])),
                        shape.flop(tokens),
                        around(*samples[-2:]),
                        {peer.name: peer.seconds(tokens) for peer in peers},
                    )
                )
    best = Sample(max(s.read for s in samples), max(s.compute for s in samples))
    read, compute = spread([s.read for s in samples]), spread([s.compute for s in samples])
    out["ceilings"].append(
        {
            "model": name,
            "dtype": dtype,
            "instruction": mode,
            "read": read,
            "compute": compute,
            "tiles": spread(tiles) if tiles else None,
            "layers": layers,
            "expert_bytes": size,
            "flushed_bytes": tools.region,
            "last_level_cache": last_level_cache(),
        }
    )
    return [Row.of(name, dtype, tokens, rounds, best) for tokens, rounds in found.items()]


def steps_of(tokens: int) -> int:
    """Steps of a round: short ones are repeated."""
    return 8 if tokens <= 4 else 4 if tokens <= 16 else 1


def modes_of(dtype: str, isa: str | None) -> list[str]:
    """The instructions that can do this dtype on a kernel path (None: the best one)."""
    has = PATH_MODES["amx"] if isa is None else PATH_MODES.get(isa, ("fma",))
    return [mode for mode in COMPUTE[dtype] if mode in has]


# --- peers: one routed layer in bf16, each in its own process --------------------------------


class Peer:
    """A process of this script that times a peer's layer when asked."""

    def __init__(self, name: str, model: str, asked: argparse.Namespace) -> None:
        """Raises RuntimeError with the reason if the peer cannot run."""
        self.name = name
        command = [sys.executable, __file__, "--peer", name, "--models", model]
        command += ["--tokens", ",".join(map(str, asked.tokens)), "--threads", str(asked.threads)]
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._answer()

    def _answer(self) -> str:
        """The next line that is an answer: libraries print lines of their own."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        raise RuntimeError(lines[-1][:160] if lines else f"exit status {status}")

    def seconds(self, tokens: int) -> float:
        """Median of a round of steps."""
        assert self._process.stdin
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()


ANSWER = "answer: "


def serve(once: Any, asked: argparse.Namespace) -> None:
    """The other end of Peer: `once(tokens)` gives seconds. Caches are flushed before each step, as
    before ours."""
    import torch

    region = torch.ones(max(2 << 30, 4 * last_level_cache()) // 4, dtype=torch.int32)
    for tokens in asked.tokens:
        once(tokens)
    print(ANSWER, "ready", flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(steps_of(int(line))):
            region.max()
            times.append(once(int(line)))
        print(ANSWER, float(np.median(times)), flush=True)


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


def serve_torch(shape: Shape, asked: argparse.Namespace) -> None:
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
        serve(once, asked)


def serve_kt(shape: Shape, asked: argparse.Namespace) -> None:
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

    serve(once, asked)


PEERS = {"torch": serve_torch, "kt-kernel": serve_kt}


def table(rows: list[Row], out: dict[str, Any]) -> str:
    lines = [f"{out['threads']} threads, kernel path {out['kernel_path']}, {out['rounds']} rounds"]
    for c in out["ceilings"]:
        read, compute = (
            " / ".join(f"{c[key][k]:.{digits}f}" for k in ("min", "median", "max"))
            for key, digits in (("read", 1), ("compute", 0))
        )
        lines.append(
            f"ceilings beside {c['model']} {c['dtype']}, min / median / max: "
            f"read {read} GB/s, {c['instruction']} {compute} GFLOP/s"
        )
        if c["tiles"]:
            loaded = " / ".join(f"{c['tiles'][k]:.0f}" for k in ("min", "median", "max"))
            lines.append(f"amx with tiles loaded from the first-level cache: {loaded} GFLOP/s")
    lines += out["notes"]
    lines.append(f"{'':32}{'ms a layer':>21}{'':32}{'share of best':>9}{'limit, by round':>24}")
    lines.append(
        f"{'model':18}{'dtype':6}{'tokens':>7}{'min':>9}{'median':>9}{'max':>9}{'GB/s':>8}"
        f"{'GFLOP/s':>9}{'read':>7}{'comp':>7}{'limit':>7}{'min':>8}{'median':>7}{'max':>7}"
        + "".join(f"{p:>11}" for p in PEERS)
    )
    for r in rows:
        times = "".join(f"{1e3 * r.seconds[k]:9.2f}" for k in ("min", "median", "max"))
        by_round = "".join(f"{r.limit_rounds[k]:7.0%}" for k in ("min", "median", "max"))
        peers = "".join(
            f"{r.peers[p]['median']:10.2f}x" if p in r.peers else f"{'-':>11}" for p in PEERS
        )
        lines.append(
            f"{r.model:18}{r.dtype:6}{r.tokens:7}{times}{r.gb_per_second:8.1f}"
            f"{r.gflop_per_second:9.0f}{r.of_read:7.0%}{r.of_compute:7.0%}{r.of_limit:7.0%}"
            f" {by_round}{peers}"
        )
    lines += [
        "limit: max(bytes / read, flop / compute) over the time; by round: against the mean of",
        "the ceilings just before and after. Peers: median of their time over ours in a round;",
        "bf16, the routed experts alone and uniform routes.",
    ]
    return "\n".join(lines)


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
    parser.add_argument("--out", type=Path, help="write the table to this markdown file too")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.quick:
        asked.models, asked.dtypes, asked.tokens, asked.rounds = "qwen3", "bf16", "1,64,512", 3
    for option, known in (("models", CONFIGS), ("dtypes", DTYPES)):
        unknown = [name for name in getattr(asked, option).split(",") if name not in known]
        if unknown:
            parser.error(f"--{option}: no '{unknown[0]}': expected of {','.join(known)}")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", asked.tokens):
        parser.error(f"--tokens: expected counts such as 1,64,2048, not '{asked.tokens}'")
    asked.tokens = [int(t) for t in asked.tokens.split(",")]
    return asked


def start_peers(model: str, asked: argparse.Namespace, out: dict[str, Any]) -> list[Peer]:
    started = []
    for name in () if asked.no_peers else PEERS:
        try:
            started.append(Peer(name, model, asked))
        except RuntimeError as error:  # a peer that is absent or fails is a note, not the end
            out["notes"].append(f"{model}: {name} not measured: {error}")
    return started


def main() -> None:
    asked = parse()
    names = asked.models.split(",")
    if asked.peer:
        PEERS[asked.peer](Shape.of(CONFIGS[names[0]]), asked)
        return
    out: dict[str, Any] = {"threads": asked.threads, "rounds": asked.rounds}
    out |= {"kernel_path": None, "ceilings": [], "notes": []}
    rows: list[Row] = []
    with ceilings(asked.threads) as tools:
        for name in names:
            peers = start_peers(name, asked, out)
            for dtype in asked.dtypes.split(","):
                rows += measure(name, dtype, asked, tools, peers, out)
            for peer in peers:
                peer.close()
    text = table(rows, out)
    if asked.out:
        write_report(asked.out, "Experts of one MoE layer", text)
    if asked.json:
        print(json.dumps(out | {"rows": [asdict(r) for r in rows]}, indent=2))
    else:
        print(text)


if __name__ == "__main__":
    main()
