"""Decode and prefill of whole models on this CPU against its ceilings and llama.cpp.

Four layers of Qwen3-30B-A3B's dimensions, or two of Mixtral-8x7B's, with random weights: as a
PDScope plan (made in the cache at first, 6 GB) and, where llama-cpp-python is installed, as a GGUF
of the same dimensions and dtype (written next to it, 6 GB). Ceilings, PDScope and llama.cpp run in
turn, several rounds, on the same number of threads: a round's ratio is that of neighbours in time.
Residual outputs are scaled by 0.002, or routing would collapse onto a few experts, which reads less
than a real model does.

    python benchmarks/cpu_model.py [--models qwen3,mixtral] [--threads N] [--rounds R]
        [--prompt 512] [--tokens 32] [--isa PATH] [--quick] [--no-peers] [--json] [--out FILE.md]
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_file
import numpy as np
from machine import (
    Ceilings,
    Sample,
    around,
    available_memory,
    ceilings,
    last_level_cache,
    spread,
    usable_cores,
    write_report,
)
from whole_models import CONFIGS, Model

import pdscope
from pdscope import config

RESIDUAL_SCALE = 0.002
PHASES = ("prefill", "decode")
COMPUTE = ("fma", "bf16", "amx")  # what can multiply bf16 weights
PATH_MODES = {"amx": COMPUTE, "avx512bf16": ("fma", "bf16")}

#: One measurement: (prefill, decode) in tokens a second.
Rates = Callable[[], tuple[float, float]]


def timed(
    ids: list[int], prompt: int, prefill: Callable[[list[int]], Any], decode: Callable[[int], Any]
) -> tuple[float, float]:
    began = time.perf_counter()
    prefill(ids[:prompt])
    middle = time.perf_counter()
    for token in ids[prompt:]:
        decode(token)
    end = time.perf_counter()
    return prompt / (middle - began), (len(ids) - prompt) / (end - middle)


def random_ids(model: Model, asked: argparse.Namespace) -> Callable[[], list[int]]:
    rng = np.random.default_rng(0)
    count = asked.prompt + asked.tokens
    return lambda: [int(i) for i in rng.integers(0, model.vocab, count)]


def pdscope_rates(engine: pdscope.Engine, model: Model, asked: argparse.Namespace) -> Rates:
    ids = random_ids(model, asked)

    def once() -> tuple[float, float]:
        engine.reset()
        return timed(ids(), asked.prompt, engine.prefill, engine.decode)

    return once


# --- the same model for llama.cpp -------------------------------------------------------------


def gguf_tensors(m: Model) -> list[gguf_file.Tensor]:
    """Every tensor of llama.cpp's qwen3moe and llama (Mixtral) architectures."""
    heads, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    out: list[gguf_file.Tensor] = [("token_embd", (m.vocab, m.hidden), "matrix")]
    for i in range(m.layers):
        layer: list[gguf_file.Tensor] = [
            ("attn_norm", (m.hidden,), "norm"),
            ("attn_q", (heads, m.hidden), "matrix"),
            ("attn_k", (kv, m.hidden), "matrix"),
            ("attn_v", (kv, m.hidden), "matrix"),
            ("attn_output", (m.hidden, heads), "residual"),
            ("ffn_norm", (m.hidden,), "norm"),
            ("ffn_gate_inp", (m.experts, m.hidden), "router"),
            ("ffn_gate_exps", (m.experts, m.inter, m.hidden), "matrix"),
            ("ffn_up_exps", (m.experts, m.inter, m.hidden), "matrix"),
            ("ffn_down_exps", (m.experts, m.hidden, m.inter), "residual"),
        ]
        if m.name == "qwen3":
            layer += [(f"attn_{x}_norm", (m.head_dim,), "norm") for x in "qk"]
        out += [(f"blk.{i}.{name}", shape, kind) for name, shape, kind in layer]
    out += [("output_norm", (m.hidden,), "norm"), ("output", (m.vocab, m.hidden), "matrix")]
    return [(f"{name}.weight", shape, kind) for name, shape, kind in out]


def gguf_settings(m: Model) -> dict[str, int | float | str]:
    c = CONFIGS[m.name]
    arch = {"qwen3": "qwen3moe", "mixtral": "llama"}[m.name]
    settings: dict[str, int | float | str] = {
        "block_count": m.layers,
        "context_length": c["max_position_embeddings"],
        "embedding_length": m.hidden,
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": m.heads,
        "attention.head_count_kv": m.kv_heads,
        "attention.key_length": m.head_dim,
        "attention.value_length": m.head_dim,
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "rope.dimension_count": m.head_dim,
        "rope.freq_base": c["rope_theta"],
        "expert_count": m.experts,
        "expert_used_count": m.top_k,
        "vocab_size": m.vocab,
    }
    if m.name == "qwen3":
        settings["expert_feed_forward_length"] = m.inter
    general: dict[str, int | float | str] = {
        "general.architecture": arch,
        "general.file_type": 32,  # mostly bf16
        "tokenizer.ggml.model": "no_vocab",
    }
    return general | {f"{arch}.{key}": value for key, value in settings.items()}


def llama_rates(path: Path, model: Model, asked: argparse.Namespace) -> Rates:
    import llama_cpp  # type: ignore[import-not-found,unused-ignore]

    quiet = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    loaded = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not loaded:
        raise RuntimeError(f"{path} cannot be loaded")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = asked.prompt + asked.tokens + 64
    options.n_batch = options.n_ubatch = asked.prompt
    options.n_threads = options.n_threads_batch = asked.threads
    context = llama_cpp.llama_init_from_model(loaded, options)
    if not context:
        raise RuntimeError(f"no context for {path}")
    ids = random_ids(model, asked)

    def step(tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_get_logits_ith(context, -1)  # waits for them

    def once() -> tuple[float, float]:
        assert quiet  # kept alive as long as llama.cpp may log
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        return timed(ids(), asked.prompt, step, lambda token: step([token]))

    return once


def llama_or_reason(model: Model, asked: argparse.Namespace) -> Rates | str:
    """llama_rates of the random GGUF, or why there is none."""
    try:
        import llama_cpp  # noqa: F401

        path = config.cache_dir() / f"bench-{model.name}-{model.layers}-layers-bf16.gguf"
        if not path.exists():
            print(f"writing {path} (6 GB)", file=sys.stderr)
            gguf_file.write(path, gguf_settings(model), gguf_tensors(model), RESIDUAL_SCALE)
        rates = llama_rates(path, model, asked)
        rates()  # brings the weights into memory
        return rates
    except Exception as error:  # a peer that is absent or fails is a note, not the end
        return f"{model.name}: llama.cpp not measured: {type(error).__name__}: {error}"[:200]


# --- one run ----------------------------------------------------------------------------------


def measure(name: str, asked: argparse.Namespace, tools: Ceilings) -> dict[str, Any]:
    model = Model.of(name)
    plan = model.make_plan(asked.prompt + asked.tokens + 64, asked.prompt)
    has = PATH_MODES["amx"] if asked.isa is None else PATH_MODES.get(asked.isa, ("fma",))
    mode = tools.best_of(has)
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    notes = []
    with pdscope.load(plan, threads=asked.threads, isa=asked.isa) as engine:
        isa, rates = engine.info.isa, pdscope_rates(engine, model, asked)
        rates()  # brings the weights into memory
        llama: Rates | str = "" if asked.no_peers else llama_or_reason(model, asked)
        if isinstance(llama, str) and llama:
            notes.append(llama)
        samples = [tools.sample(mode)]
        beside = []
        for _ in range(asked.rounds):
            ours.append(rates())
            samples.append(tools.sample(mode))
            beside.append(around(*samples[-2:]))
            if not isinstance(llama, str):
                theirs.append(llama())
                samples.append(tools.sample(mode))
    if available_memory() < 1 << 30:
        notes.append(f"{name}: less than 1 GB of memory was left: figures may be those of the disk")
    best = Sample(max(s.read for s in samples), max(s.compute for s in samples))
    result: dict[str, Any] = {
        "model": name,
        "layers": model.layers,
        "kernel_path": isa,
        "bytes_per_token": model.bytes_per_token,
        "expert_bytes": model.expert_bytes,
        "instruction": mode,
        "read_gb_per_second": spread([s.read for s in samples]),
        "compute_gflop_per_second": spread([s.compute for s in samples]),
        "notes": notes,
    }
    for i, phase in enumerate(PHASES):
        mine = [x[i] for x in ours]
        need = model.flop_per_token if phase == "prefill" else model.bytes_per_token
        limits = [(s.compute if phase == "prefill" else s.read) * 1e9 / need for s in beside]
        top = (best.compute if phase == "prefill" else best.read) * 1e9 / need
        result[phase] = {
            "pdscope_tokens_per_second": spread(mine),
            "median_of_best_ceiling": spread(mine)["median"] / top,
            "of_ceiling": spread([a / b for a, b in zip(mine, limits, strict=True)]),
        }
        if theirs:
            other = [x[i] for x in theirs]
            result[phase]["llama_tokens_per_second"] = spread(other)
            result[phase]["over_llama"] = spread([a / b for a, b in zip(mine, other, strict=True)])
    return result


def table(results: list[dict[str, Any]], asked: argparse.Namespace) -> str:
    lines = [
        f"{asked.threads} threads, {asked.rounds} rounds; prefill of {asked.prompt} tokens, "
        f"then decode of {asked.tokens}; bf16"
    ]

    def line(label: str, values: dict[str, float], form: str, more: str = "") -> None:
        numbers = "".join(f"{values[k]:{form}}" for k in ("min", "median", "max"))
        lines.append(f"{label:38}{numbers}{more}")

    for r in results:
        lines.append("")
        lines.append(
            f"{r['model']}, {r['layers']} layers, kernel path {r['kernel_path']}: a token reads "
            f"{r['bytes_per_token'] / 1e9:.2f} GB, its experts out of "
            f"{r['expert_bytes'] / 1e9:.1f} GB; last-level cache {last_level_cache() / 1e9:.2f} GB"
        )
        lines.append(f"{'':38}{'min':>10}{'median':>10}{'max':>10}")
        line("read ceiling, GB/s", r["read_gb_per_second"], "10.1f")
        line(f"{r['instruction']} ceiling, GFLOP/s", r["compute_gflop_per_second"], "10.0f")
        for phase in PHASES:
            p = r[phase]
            ceiling = "compute" if phase == "prefill" else "read"
            best = f"   median of the best ceiling: {p['median_of_best_ceiling']:.0%}"
            line(f"{phase}, PDScope, tok/s", p["pdscope_tokens_per_second"], "10.1f")
            line(f"{phase} / {ceiling} ceiling, by round", p["of_ceiling"], "10.0%", best)
            if "over_llama" in p:
                line(f"{phase}, llama.cpp, tok/s", p["llama_tokens_per_second"], "10.1f")
                line(f"{phase}, PDScope / llama.cpp, by round", p["over_llama"], "9.2f", " x")
        lines += r["notes"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="qwen3", help=f"of {','.join(CONFIGS)}")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--isa", help="PDScope's kernel path; the best one by default")
    parser.add_argument("--quick", action="store_true", help="two rounds of 8 decoded tokens")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table to this markdown file too")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds, asked.tokens = 2, 8
    unknown = [name for name in asked.models.split(",") if name not in CONFIGS]
    if unknown:
        parser.error(f"--models: no '{unknown[0]}': expected of {','.join(CONFIGS)}")
    with ceilings(asked.threads) as tools:
        results = [measure(name, asked, tools) for name in asked.models.split(",")]
    text = table(results, asked)
    if asked.out:
        write_report(asked.out, "Whole models, decode and prefill", text)
    out = {"threads": asked.threads, "rounds": asked.rounds, "results": results}
    print(json.dumps(out, indent=2) if asked.json else text)


if __name__ == "__main__":
    main()
