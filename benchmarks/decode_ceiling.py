"""Decode speed against what this machine can read, measured in turn in the same run.

A decode step reads every weight it uses once, so it cannot be faster than memory. The model has
four layers of Qwen3-30B-A3B's dimensions with dummy weights (6 GB on disk as a plan). Prints the
bytes a token reads, the read rates of decode and of ceilings.c, and their ratio: of each round to
the mean of the samples of the ceiling just before and after it, and of the median to the best.

    python benchmarks/decode_ceiling.py [--plan DIR] [--threads N] [--rounds R] [--tokens N]
        [--json] [--out FILE.md]
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import (
    READ_SECONDS,
    ceilings,
    last_level_cache,
    plan_folder,
    spread,
    usable_cores,
    write_report,
)

import pdscope

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
CONTEXT = 512


def bytes_per_token() -> int:
    """Weight bytes that one decode step needs, from the dimensions alone: bf16, gates in fp32."""
    c = CONFIG
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    attention = 2 * hidden * c["head_dim"] * (2 * heads + 2 * kv)
    experts = 2 * c["num_experts_per_tok"] * 3 * hidden * c["moe_intermediate_size"]
    gate = 4 * c["num_experts"] * hidden
    head = 2 * c["vocab_size"] * hidden
    return int(c["num_hidden_layers"] * (attention + gate + experts) + head)


def rotation() -> tuple[float, float]:
    """Bytes of all experts, of which a token reads a few, and of the weights that each token reads:
    what lies between two reads of one of these is the bytes of a token."""
    c = CONFIG
    experts = 6.0 * c["num_hidden_layers"] * c["num_experts"] * c["hidden_size"]
    chosen = c["num_experts_per_tok"] / c["num_experts"]
    experts *= c["moe_intermediate_size"]
    return experts, bytes_per_token() - experts * chosen


def rotation_text() -> str:
    experts, always = rotation()
    return (
        f"rotates over {experts / 1e9:.1f} GB of experts; each token reads {always / 1e9:.2f} GB "
        f"of other weights too; last-level cache {last_level_cache() / 1e9:.2f} GB"
    )


def decode_rate(engine: pdscope.Engine, tokens: int, rng: np.random.Generator) -> float:
    """Tokens per second of decode steps on random tokens, behind a context of 64."""
    ids = [int(i) for i in rng.integers(0, CONFIG["vocab_size"], 64 + tokens)]
    engine.reset()
    engine.prefill(ids[:64])
    began = time.perf_counter()
    for token in ids[64:]:
        engine.decode(token)
    return tokens / (time.perf_counter() - began)


def make_plan(plan: Path, context: int = CONTEXT) -> None:
    if (plan / "plan.json").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "qwen3-4-layers"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        print(f"compiling a dummy model into {plan} (6 GB)", file=sys.stderr)
        pdscope.compile(
            model, plan, load_format="dummy", dtype="bf16", max_context=context, max_rows=512
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--plan", type=Path, help="by default one in PDScope's cache, made at first"
    )
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table to this markdown file too")
    asked = parser.parse_args()
    size = bytes_per_token()
    rates: list[float] = []
    plan = asked.plan or plan_folder("bench-qwen3-4-layers")
    make_plan(plan)
    rng = np.random.default_rng(0)
    with (
        ceilings(asked.threads) as tools,
        pdscope.load(plan, threads=asked.threads) as engine,
    ):
        isa = engine.info.isa
        decode_rate(engine, asked.tokens, rng)  # brings the weights into memory
        limits = [tools.measure("read", READ_SECONDS) or 0]
        for _ in range(asked.rounds):
            rates.append(decode_rate(engine, asked.tokens, rng))
            limits.append(tools.measure("read", READ_SECONDS) or 0)
    reads = [rate * size / 1e9 for rate in rates]
    beside = [(a + b) / 2 for a, b in zip(limits, limits[1:], strict=False)]
    result = {
        "threads": asked.threads,
        "kernel_path": isa,
        "rotation": rotation_text(),
        "bytes_per_token": size,
        "tokens_per_second": spread(rates),
        "decode_gb_per_second": spread(reads),
        "ceiling_gb_per_second": spread(limits),
        "ratio": spread([read / ceiling for read, ceiling in zip(reads, beside, strict=True)]),
        "median_of_best_ceiling": spread(reads)["median"] / max(limits),
    }
    text = table(result)
    if asked.out:
        write_report(asked.out, "Decode against the read ceiling", text)
    print(json.dumps(result, indent=2) if asked.json else text)


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['threads']} threads, kernel path {result['kernel_path']}, "
        f"{result['bytes_per_token'] / 1e6:.0f} MB of weights a token",
        result["rotation"],
        f"{'':24}{'min':>10}{'median':>10}{'max':>10}",
    ]
    for key, label in (
        ("tokens_per_second", "decode, tokens/s"),
        ("decode_gb_per_second", "decode, GB/s"),
        ("ceiling_gb_per_second", "read ceiling, GB/s"),
        ("ratio", "decode / ceiling"),
    ):
        row = result[key]
        lines.append(f"{label:24}" + "".join(f"{row[k]:10.2f}" for k in ("min", "median", "max")))
    lines.append(f"median decode / best ceiling {result['median_of_best_ceiling']:15.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
