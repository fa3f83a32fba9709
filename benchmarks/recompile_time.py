"""Microseconds that recompile takes for a layer, by rows of the step and by slots of the ring.

A model of 16 layers of 128 experts, top-8, whose experts are so small that a CPU computes them in
no time, and a cost table in which they take what Qwen3-30B-A3B's take on an H200 and its host: so
decisions are that model's, and the time of making them is this machine's. Routing is made up
(zipf:0.8), and so are predictions (9 of 10 are right). The GPU is the mock CUDA driver.

Times are the runtime's own (pds_gpu_info.recompile): from when a layer's routes are known until
experts are bound, slots are given and transfers are queued, the driver's calls in between included.
The last columns are the part within these calls; here that is the mock's, not a GPU's.

    python benchmarks/recompile_time.py [--rings N,N] [--rows N,N] [--policy NAME] [--threads N]
        [--rounds N] [--tokens N] [--json] [--out FILE.md]
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from machine import count, numbers, run, write_report

import pdscope
from pdscope.cli.format import markdown
from pdscope.compiler.build import mock_driver
from pdscope.compiler.driver import compile_model
from pdscope.dummy_predictor import DummyPredictor
from pdscope.dummy_routing import DummyRouting
from pdscope.hardware import file as hardware_file
from pdscope.plan import PHASES

LAYERS, EXPERTS, TOP_K, HIDDEN, INTER = 16, 128, 8, 64, 32
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "moe_intermediate_size": INTER,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "vocab_size": 128,
    "torch_dtype": "bfloat16",
}
SCALE = 2048 * 768 / (HIDDEN * INTER)  # Qwen3-30B-A3B's experts are so much larger
PREDICTED = "accuracy:0.9"
CONTEXT = 1024  # tokens before those that are decoded
COLUMNS = ("min", "median", "mean", "max")


def scaled_machine() -> dict[str, Any]:
    """An H200 and its host, that much slower at everything but what takes a fixed time."""
    machine: dict[str, Any] = json.loads(hardware_file("h200-emr16").read_text(encoding="utf-8"))
    machine["name"] = f"{machine['name']}, {SCALE:.0f} times slower"
    for part in ("cpu", "gpu", "link"):
        rates = [machine[part]["bytes_per_s"], *machine[part].get("flops", {}).values()]
        rates += [machine[part]["alone_bytes_per_s"]] if part == "link" else []
        for rate in rates:
            rate["value"] = round(rate["value"] / SCALE)
    return machine


def make_plan(folder: Path, ring: int, rows: int, policy: str) -> Path:
    """A plan for a GPU whose memory has room for a ring of so many slots, or nearly."""
    model, costs = folder / "config.json", folder / "machine.json"
    model.write_text(json.dumps(CONFIG), encoding="utf-8")
    costs.write_text(json.dumps(scaled_machine()), encoding="utf-8")
    options: dict[str, Any] = {
        "load_format": "dummy",
        "no_weights": True,
        "max_context": CONFIG["max_position_embeddings"],
        "max_rows": rows,
        "costs": str(costs),
        "gpu_reserve": 0,
        "gpu_arch": "none",
        "dummy_predictor": PREDICTED,
        "policy": policy,
    }
    whole = compile_model(model, None, dry_run=True, gpu_mem="8GiB", **options).memory["gpu"]
    slots = ring + (ring // 3 if policy == "adaptsched" else 0)  # a quarter is for those that stay
    mem = whole["weight_bytes"] + whole["session"]["total_bytes"] + slots * whole["expert_bytes"]
    out = folder / f"ring{ring}.plan"
    compile_model(model, out, gpu_mem=mem, **options)
    return out


def measure(plan: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One result for each number of rows; 1: decode."""
    results = []
    longest = max(*asked.rows, CONTEXT + asked.tokens)
    with pdscope.load(plan, device="gpu", threads=asked.threads, weights="dummy") as engine:
        session = engine.main
        ids = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], longest).tolist()
        routes = DummyRouting.parse("zipf:0.8").routes(engine.plan, longest)
        session.set_routes(routes)
        session.set_predictions(DummyPredictor.parse(PREDICTED).predictions(routes, EXPERTS))
        session.prefill(ids[: max(asked.rows)])  # memory is there from now on
        for rows in asked.rows:
            engine.set_policy(asked.policy)  # counts anew
            for _ in range(asked.rounds if rows > 1 else 1):
                session.reset()
                session.prefill(ids[: rows if rows > 1 else CONTEXT])
            for token in ids[CONTEXT : CONTEXT + asked.tokens] if rows == 1 else ():
                session.decode(token)
            found = engine.gpu()
            phase = PHASES[0 if rows == 1 else 1 if rows <= 16 else 2]
            results.append(
                {
                    "ring": found["info"]["ring"],
                    "rows": rows,
                    "threads": engine.info.threads,
                    "us": found["info"]["recompile_us"][phase],
                    "driver_us": found["info"]["recompile_driver_us"][phase],
                }
            )
    return results


def table(results: list[dict[str, Any]]) -> str:
    rows = [("ring", "rows", "layers", *(f"{c} us" for c in COLUMNS), "driver: median", "mean")]
    for r in results:
        us = [f"{r['us'][c]:.1f}" for c in COLUMNS]
        driver = [f"{r['driver_us'][c]:.1f}" for c in ("median", "mean")]
        rows.append((str(r["ring"]), str(r["rows"]), str(r["us"]["n"]), *us, *driver))
    about = f"{EXPERTS} experts, top-{TOP_K}, {results[0]['threads']} threads"
    return f"recompile, microseconds a layer: {about}\n\n{markdown(rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rings", type=numbers, default=[16, 256, 1024], help="slots")
    parser.add_argument("--rows", type=numbers, default=[1, 512, 4096], help="1: decode")
    parser.add_argument("--policy", default="adaptsched")
    parser.add_argument("--threads", type=int, default=0, help="0: one a core")
    parser.add_argument("--rounds", type=count, default=5, help="prefills of each kind")
    parser.add_argument("--tokens", type=count, default=256, help="decoded")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table to this markdown file too")
    asked = parser.parse_args()
    os.environ["PDSCOPE_CUDA_DRIVER"] = str(mock_driver())
    os.environ["PDS_MOCK_CUDA"] = "memory=16GiB"
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for ring in asked.rings:
            plan = make_plan(Path(folder), ring, max(*asked.rows, CONTEXT), asked.policy)
            results += measure(plan, asked)
    if asked.out:
        write_report(asked.out, "Time of recompile", table(results))
    print(json.dumps(results, indent=2) if asked.json else table(results))


if __name__ == "__main__":
    run(main)
