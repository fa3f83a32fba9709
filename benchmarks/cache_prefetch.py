"""Decode with cache prefetch on and off, in turn in the same run, and how good its predictions are.

Both engines decode the same tokens, behind a context of 64. By default on four layers of
Qwen3-30B-A3B's dimensions with dummy weights (the plan of decode_ceiling.py, 6 GB), whose residual
stream changes less from layer to layer than a trained model's: its hit rate is too good. With
--plan and --text a trained model decodes the tokens of a text, and routing is real.

    python benchmarks/cache_prefetch.py [--plan DIR --text FILE] [--threads N] [--rounds R]
        [--tokens N] [--weights auto|mmap|copy] [--json]
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import available_memory, spread, usable_cores
from whole_models import Model

import pdscope
from pdscope.errors import InputError, PdscopeError
from pdscope.perplexity import read_windows
from pdscope.plan import Plan

BEFORE = 64  # tokens of context
KEYS = ("experts_predicted", "experts_hit", "prefetch_bytes", "prefetch_useful_bytes")


def decode_rate(engine: pdscope.Engine, ids: Sequence[int]) -> float:
    """Tokens per second of decode steps on ids behind the first BEFORE of them."""
    engine.reset()
    engine.prefill(ids[:BEFORE])
    began = time.perf_counter()
    for token in ids[BEFORE:]:
        engine.decode(token)
    return (len(ids) - BEFORE) / (time.perf_counter() - began)


def stretches(engine: pdscope.Engine, text: Path | None, rounds: int, n: int) -> list[list[int]]:
    """`rounds` lists of n token ids: of a text, over again where it ends, or random ones."""
    if text is None:
        ids = np.random.default_rng(0).integers(0, engine.info.vocab, rounds * n)
    else:
        ids = np.concatenate(read_windows(engine, text, rounds * n))
        if len(ids) < n:
            raise InputError(f"{text}: has {len(ids)} tokens: give a text of at least {n}")
        ids = np.resize(ids[: len(ids) // n * n], rounds * n)
    return [[int(i) for i in row] for row in ids.reshape(rounds, n)]


def weights_mode(plan: Path, asked: str) -> str:
    """The same for both engines, which may be two copies."""
    if asked != "auto":
        return asked
    size = int(Plan.open(plan).data["memory"]["weights"])
    return "copy" if available_memory() > 2.5 * size + (4 << 30) else "mmap"


def measure(plan: Path, asked: argparse.Namespace) -> dict[str, Any]:
    weights = weights_mode(plan, asked.weights)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    with (
        pdscope.load(plan, threads=asked.threads, weights=weights, cache_prefetch="off") as off,
        pdscope.load(plan, threads=asked.threads, weights=weights, cache_prefetch="on") as on,
    ):
        engines = {"off": off, "on": on}
        if on.cache_prefetch()["decode"]["state"] != "on":
            raise PdscopeError(f"{plan}: cannot prefetch: {on.cache_prefetch()['why']}")
        ids = stretches(on, asked.text, asked.rounds, BEFORE + asked.tokens)
        for engine in engines.values():
            decode_rate(engine, ids[0])  # brings the weights into memory
        before = on.main.stats()
        for number, row in enumerate(ids):
            for mode in ("off", "on") if number % 2 == 0 else ("on", "off"):
                rates[mode].append(decode_rate(engines[mode], row))
        after = on.main.stats()
        isa = on.info.isa
    ratios = [b / a for a, b in zip(rates["off"], rates["on"], strict=True)]
    counts = {key: getattr(after, key) - getattr(before, key) for key in KEYS}
    decoded = asked.rounds * asked.tokens
    return {
        "plan": plan.name,
        "threads": asked.threads,
        "kernel_path": isa,
        "weights": weights,
        "tokens_per_second_off": spread(rates["off"]),
        "tokens_per_second_on": spread(rates["on"]),
        "ratio": spread(ratios),
        "hit_rate": counts["experts_hit"] / max(counts["experts_predicted"], 1),
        "prefetched_bytes_per_token": counts["prefetch_bytes"] / decoded,
        "useful_share": counts["prefetch_useful_bytes"] / max(counts["prefetch_bytes"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", type=Path, help="by default a dummy one in PDScope's cache")
    parser.add_argument("--text", type=Path, help="a text, or *.jsonl of texts and chats")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--weights", choices=("auto", "mmap", "copy"), default="auto")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    plan = asked.plan or Model.of("qwen3").make_plan(BEFORE + asked.tokens, BEFORE)
    result = measure(plan, asked)
    if asked.json:
        print(json.dumps(result, indent=2))
        return
    print(f"{result['threads']} threads, {result['kernel_path']}, weights: {result['weights']}")
    print(f"{'':24}{'min':>10}{'median':>10}{'max':>10}")
    for key, label in (
        ("tokens_per_second_off", "off, tokens/s"),
        ("tokens_per_second_on", "on, tokens/s"),
        ("ratio", "on / off"),
    ):
        print(f"{label:24}" + "".join(f"{result[key][k]:10.3f}" for k in ("min", "median", "max")))
    print(
        f"predicted experts that were activated: {result['hit_rate']:.1%}; prefetched "
        f"{result['prefetched_bytes_per_token'] / 2**20:.2f} MiB a token, "
        f"{result['useful_share']:.1%} of it of activated experts"
    )


if __name__ == "__main__":
    main()
