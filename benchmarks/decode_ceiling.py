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
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import (
    READ_SECONDS,
    ceilings,
    last_level_cache,
    spread,
    usable_cores,
    write_report,
)
from whole_models import Model

import pdscope

MODEL = Model.of("qwen3")
CONTEXT = 64  # tokens before those that are timed


def decode_rate(engine: pdscope.Engine, tokens: int, rng: np.random.Generator) -> float:
    """Tokens per second of decode steps on random tokens, behind a context."""
    ids = [int(i) for i in rng.integers(0, MODEL.vocab, CONTEXT + tokens)]
    engine.reset()
    engine.prefill(ids[:CONTEXT])
    began = time.perf_counter()
    for token in ids[CONTEXT:]:
        engine.decode(token)
    return tokens / (time.perf_counter() - began)


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
    size = MODEL.bytes_per_token
    rates: list[float] = []
    plan = asked.plan or MODEL.make_plan(CONTEXT + asked.tokens, CONTEXT)
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
        "bytes_per_token": size,
        "expert_bytes": MODEL.expert_bytes,
        "last_level_cache": last_level_cache(),
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
        f"{result['threads']} threads, kernel path {result['kernel_path']}",
        f"a token reads {result['bytes_per_token'] / 1e9:.2f} GB of weights, its experts out of "
        f"{result['expert_bytes'] / 1e9:.1f} GB; last-level cache "
        f"{result['last_level_cache'] / 1e9:.2f} GB",
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
