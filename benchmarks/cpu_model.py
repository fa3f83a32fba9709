"""Decode and prefill of a whole model on this CPU against its ceilings and llama.cpp.

Four layers of Qwen3-30B-A3B's dimensions with random weights: as a PDScope plan (made in the cache
at first, 6 GB) and, where llama-cpp-python and gguf are installed, as a GGUF of the same
dimensions and dtype (written next to it, 6 GB). Both run in turn, several rounds, on the same
number of threads. Residual outputs are scaled by 0.002, or routing would collapse onto a few
experts, which reads less than a real model does.

    python benchmarks/cpu_model.py [--threads N] [--rounds R] [--prompt 512] [--quick] [--json]
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from decode_ceiling import CONFIG, bytes_per_token, make_plan
from machine import ceilings, plan_folder, spread, usable_cores

import pdscope

RESIDUAL_SCALE = 0.002


def flop_per_token() -> float:
    """Multiply-adds of one prompt token, times two; no attention scores, no lm_head."""
    c = CONFIG
    hidden, dim = c["hidden_size"], c["head_dim"]
    projections = 2 * hidden * dim * (c["num_attention_heads"] + c["num_key_value_heads"])
    experts = 3 * hidden * c["moe_intermediate_size"] * c["num_experts_per_tok"]
    return float(2 * c["num_hidden_layers"] * (projections + experts + hidden * c["num_experts"]))


# --- the same model for llama.cpp -------------------------------------------------------------


def tensors() -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, kind) of every tensor of llama.cpp's qwen3moe: kind matrix | small | norm |
    router; small: a residual output."""
    c = CONFIG
    hidden, dim, vocab = c["hidden_size"], c["head_dim"], c["vocab_size"]
    heads, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    experts, inter = c["num_experts"], c["moe_intermediate_size"]
    out: list[tuple[str, tuple[int, ...], str]] = [("token_embd", (vocab, hidden), "matrix")]
    for i in range(c["num_hidden_layers"]):
        layer = [
            ("attn_norm", (hidden,), "norm"),
            ("attn_q", (heads, hidden), "matrix"),
            ("attn_k", (kv, hidden), "matrix"),
            ("attn_v", (kv, hidden), "matrix"),
            ("attn_output", (hidden, heads), "small"),
            ("attn_q_norm", (dim,), "norm"),
            ("attn_k_norm", (dim,), "norm"),
            ("ffn_norm", (hidden,), "norm"),
            ("ffn_gate_inp", (experts, hidden), "router"),
            ("ffn_gate_exps", (experts, inter, hidden), "matrix"),
            ("ffn_up_exps", (experts, inter, hidden), "matrix"),
            ("ffn_down_exps", (experts, hidden, inter), "small"),
        ]
        out += [(f"blk.{i}.{name}", shape, kind) for name, shape, kind in layer]
    return [*out, ("output_norm", (hidden,), "norm"), ("output", (vocab, hidden), "matrix")]


def write_gguf(path: Path) -> None:
    """Streams random bf16 weights to `path`, through a name aside."""
    import gguf

    c, aside = CONFIG, path.with_suffix(".part")
    writer = gguf.GGUFWriter(aside, "qwen3moe")
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_expert_count(c["num_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(c["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    rng = np.random.default_rng(1)
    block = rng.standard_normal(1 << 24, np.float32) * np.float32(0.02)

    def bf16(x: np.ndarray) -> np.ndarray:
        return ((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)

    blocks = {"matrix": bf16(block), "small": bf16(block * np.float32(RESIDUAL_SCALE))}
    for name, shape, kind in tensors():
        plain = kind in ("norm", "router")
        size = int(np.prod(shape)) * (4 if plain else 2)
        dtype = np.dtype(np.float32 if plain else np.uint16)
        raw = gguf.GGMLQuantizationType.F32 if plain else gguf.GGMLQuantizationType.BF16
        writer.add_tensor_info(f"{name}.weight", shape, dtype, size, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _name, shape, kind in tensors():
        count = int(np.prod(shape))
        start = int(rng.integers(1 << 20))
        if kind == "norm":
            data = np.ones(count, np.float32)
        elif kind == "router":
            data = block[start : start + count]
        else:
            data = np.resize(np.roll(blocks[kind], -start), count)
        writer.write_tensor_data(data)
    writer.close()
    os.replace(aside, path)


def llama_rates(path: Path, asked: argparse.Namespace) -> Callable[[], tuple[float, float]]:
    """A function that measures (prefill, decode) of llama.cpp in tokens a second."""
    import ctypes

    import llama_cpp

    model = llama_cpp.Llama(
        model_path=str(path),
        n_ctx=asked.prompt + asked.tokens + 64,
        n_batch=asked.prompt,
        n_ubatch=asked.prompt,
        n_threads=asked.threads,
        n_threads_batch=asked.threads,
        n_gpu_layers=0,
        vocab_only=False,
        verbose=False,
    )
    rng = np.random.default_rng(0)

    def decode(ids: list[int]) -> None:
        array = (ctypes.c_int32 * len(ids))(*ids)
        batch = llama_cpp.llama_batch_get_one(array, len(ids))
        if llama_cpp.llama_decode(model.ctx, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def once() -> tuple[float, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(model.ctx), True)
        ids = [int(i) for i in rng.integers(0, CONFIG["vocab_size"], asked.prompt + asked.tokens)]
        began = time.perf_counter()
        decode(ids[: asked.prompt])
        middle = time.perf_counter()
        for token in ids[asked.prompt :]:
            decode([token])
        end = time.perf_counter()
        return asked.prompt / (middle - began), asked.tokens / (end - middle)

    return once


def pdscope_rates(
    engine: pdscope.Engine, asked: argparse.Namespace
) -> Callable[[], tuple[float, float]]:
    """The same of PDScope."""
    rng = np.random.default_rng(0)

    def once() -> tuple[float, float]:
        ids = [int(i) for i in rng.integers(0, CONFIG["vocab_size"], asked.prompt + asked.tokens)]
        engine.reset()
        began = time.perf_counter()
        engine.prefill(ids[: asked.prompt])
        middle = time.perf_counter()
        for token in ids[asked.prompt :]:
            engine.decode(token)
        end = time.perf_counter()
        return asked.prompt / (middle - began), asked.tokens / (end - middle)

    return once


def llama_or_reason(folder: Path, asked: argparse.Namespace) -> Any:
    """llama_rates of the random GGUF, or why there is none."""
    try:
        path = folder / "bench-qwen3-4-layers.gguf"
        if not path.exists():
            print(f"writing {path} (6 GB)", file=sys.stderr)
            write_gguf(path)
        return llama_rates(path, asked)
    except Exception as error:  # a peer that is absent or fails is a note, not the end
        return f"llama.cpp not measured: {type(error).__name__}: {error}"[:200]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="two rounds of 8 decoded tokens")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.tokens = 2, 8
    plan = plan_folder(f"bench-qwen3-4-layers-{asked.prompt}")
    make_plan(plan, asked.prompt + asked.tokens + 64)
    runs: dict[str, list[tuple[float, float]]] = {"pdscope": []}
    limits: list[tuple[float, float]] = []
    notes: list[str] = []
    with (
        ceilings(asked.threads) as tools,
        pdscope.load(plan, threads=asked.threads) as engine,
    ):
        isa, ours = engine.info.isa, pdscope_rates(engine, asked)
        theirs = "" if asked.no_peers else llama_or_reason(plan.parent, asked)
        if isinstance(theirs, str) and theirs:
            notes.append(theirs)
        ours()  # brings the weights into memory
        if callable(theirs):
            theirs()
            runs["llama.cpp"] = []
        for _ in range(asked.rounds):
            compute = max(tools.measure(mode) or 0 for mode in ("fma", "bf16", "amx"))
            limits.append((tools.measure("read") or 0, compute))
            runs["pdscope"].append(ours())
            if callable(theirs):
                runs["llama.cpp"].append(theirs())
    read, compute = (max(x[i] for x in limits) for i in (0, 1))
    result: dict[str, Any] = {
        "threads": asked.threads,
        "kernel_path": isa,
        "read_gb_per_second": spread([x[0] for x in limits]),
        "compute_gflop_per_second": spread([x[1] for x in limits]),
        "notes": notes,
    }
    for name, pairs in runs.items():
        prefill, decode = (spread([x[i] for x in pairs]) for i in (0, 1))
        result[name] = {
            "prefill_tokens_per_second": prefill,
            "decode_tokens_per_second": decode,
            "decode_of_read": decode["median"] * bytes_per_token() / 1e9 / read,
            "prefill_of_compute": prefill["median"] * flop_per_token() / 1e9 / compute,
        }
    if "llama.cpp" in runs:
        for phase in ("prefill", "decode"):
            key = f"{phase}_tokens_per_second"
            ratio = result["pdscope"][key]["median"] / result["llama.cpp"][key]["median"]
            result[f"{phase}_over_llama"] = ratio
    if asked.json:
        print(json.dumps(result, indent=2))
    else:
        show(result, list(runs), asked)


def show(result: dict[str, Any], names: list[str], asked: argparse.Namespace) -> None:
    print(f"{result['threads']} threads, kernel path {result['kernel_path']}")
    for key in ("read_gb_per_second", "compute_gflop_per_second"):
        print(f"{key:28}" + "".join(f"{result[key][k]:10.1f}" for k in ("min", "median", "max")))
    for name in names:
        mine = result[name]
        for phase, share in (("prefill", "of_compute"), ("decode", "of_read")):
            values = mine[f"{phase}_tokens_per_second"]
            label = f"{name} {phase} {asked.prompt if phase == 'prefill' else asked.tokens}, tok/s"
            print(
                f"{label:28}"
                + "".join(f"{values[k]:10.1f}" for k in ("min", "median", "max"))
                + f"{mine[f'{phase}_{share}']:8.0%} {share.replace('_', ' ')}"
            )
    for phase in ("prefill", "decode"):
        if f"{phase}_over_llama" in result:
            print(f"{phase}: {result[f'{phase}_over_llama']:.2f}x llama.cpp")
    for note in result["notes"]:
        print(note)


if __name__ == "__main__":
    main()
