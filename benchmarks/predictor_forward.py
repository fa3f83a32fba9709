"""Time of one token's prediction by a net of PhasePer, on one core: microseconds a layer.

Nets have random weights and decode's features, and the widths that training gives them: half of the
size budget is prefill's. Warm: the same net again and again, its weights in the caches; cold: after
256 MiB of other memory have been read, as between two steps of a model that is larger than the
caches. A measurement is a call of pds_predict with one row, which also copies its inputs.

    python benchmarks/predictor_forward.py [--budget BYTES] [--samples N] [--isa NAME] [--json]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import spread

import pdscope
from pdscope.compiler.phaseper.nets import BLOCKS, NetShape
from pdscope.compiler.phaseper.train import TrainOptions, fitting_width
from pdscope.native import ffi
from pdscope.predictors import Net, bf16_bits

ELSEWHERE = 256 << 20
PHASE = "decode"


@dataclass(frozen=True)
class Size:
    """The dimensions of a model that a net's time depends on."""

    hidden: int
    experts: int
    top_k: int

    def plan(self, folder: Path) -> Path:
        """A plan of dummy weights with two small layers."""
        config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_size": self.hidden,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "intermediate_size": 32,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "vocab_size": 256,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "tie_word_embeddings": False,
        }
        model, plan = folder / f"{self.hidden}.model", folder / f"{self.hidden}.plan"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        pdscope.compile(model, plan, load_format="dummy", dtype="bf16")
        return plan


SIZES = {"tiny": Size(256, 32, 4), "paper": Size(2048, 128, 8)}


def random_net(shape: NetShape) -> Net:
    rng = np.random.default_rng(0)
    t = {
        name: np.float32(rng.normal(0, size[-1] ** -0.5, size))
        for name, size in shape.tensors().items()
    }
    gate = (["gate.weight"], ["gate.bias"]) if shape.deep else ([], [])
    return Net(
        hidden=shape.hidden,
        experts=shape.experts,
        width=shape.width,
        blocks=shape.blocks,
        first=bf16_bits(np.concatenate([t[n] for n in ["in.weight", *gate[0]]])),
        bias=np.concatenate([t[n] for n in ["in.bias", *gate[1]]]),
        features=bf16_bits(t["features.weight"]),
        block=bf16_bits(t["block.weight"]) if shape.deep else None,
        block_bias=t.get("block.bias"),
        out=bf16_bits(t["out.weight"]),
    )


def one_token(engine: pdscope.Engine, size: Size) -> Callable[[], None]:
    """The C call alone; what it reads and writes is made once."""
    rng, c = np.random.default_rng(1), ffi()
    a = np.float32(rng.normal(size=size.hidden))
    w = np.full(size.top_k, 1 / size.top_k, np.float32)
    ids = [np.int32(rng.permutation(size.experts)[: size.top_k]) for _ in range(3)]
    out = np.empty(size.experts, np.float32)
    names = ("e", "prev", "prev_next")
    fields: dict[str, Any] = {
        "layer": 0,
        "phase": ("prefill", "decode").index(PHASE),
        "n": 1,
        "a": c.cast("float *", a.ctypes.data),
        "w": c.cast("float *", w.ctypes.data),
    }
    fields |= {
        name: c.cast("int32_t *", array.ctypes.data) for name, array in zip(names, ids, strict=True)
    }
    asked, where = c.new("pds_prediction *", fields), c.cast("float *", out.ctypes.data)
    library, session = engine.handle.library, engine.main
    pointer, keep = session._pointer(), (a, w, ids, out)

    def call() -> None:
        assert keep
        library.check(library.lib.pds_predict(pointer, asked, where))

    return call


def times(call: Callable[[], None], samples: int, before: Callable[[], object]) -> list[float]:
    """Microseconds of each call."""
    found = []
    for _ in range(samples):
        before()
        begin = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - begin) / 1e3)
    return found


def measure(
    name: str, engine: pdscope.Engine, budget: int, samples: int, deep: bool | None
) -> dict[str, Any]:
    """`deep` None: the next layer's gate, without a net."""
    size, blocks = SIZES[name], BLOCKS[PHASE]
    result: dict[str, Any] = {"size": name, "hidden": size.hidden, "experts": size.experts}
    if deep is None:
        result |= {"net": "cross gate", "width": 0, "bytes": 4 * size.hidden * size.experts}
    else:
        # The whole budget for one net has the width that the bytes allow.
        most = TrainOptions().width if budget <= TrainOptions().size_budget // 2 else 1024
        if deep and most < 1024:
            most = most * 3 // 4
        width = fitting_width(size.hidden, size.experts, blocks, deep, budget, most)
        shape = NetShape(size.hidden, size.experts, width, deep, blocks)
        random_net(shape).set(engine.handle, 0, PHASE)
        kind = "deep" if deep else "shallow"
        result |= {"net": kind, "width": width, "bytes": shape.forward_bytes(size.top_k)}
    call = one_token(engine, size)
    elsewhere = np.ones(ELSEWHERE // 8)
    times(call, samples // 10 + 1, lambda: None)
    result["warm_us"] = spread(times(call, samples, lambda: None))
    result["cold_us"] = spread(times(call, samples // 10 + 1, elsewhere.sum))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, default=TrainOptions().size_budget, help="a layer")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--isa")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            plan = size.plan(Path(folder))
            with pdscope.load(plan, threads=1, isa=asked.isa) as engine:
                isa = engine.info.isa
                results.append(measure(name, engine, 0, asked.samples, None))
                for budget in (asked.budget // 2, asked.budget):
                    for deep in (False, True):
                        results.append(measure(name, engine, budget, asked.samples, deep))
    if asked.json:
        print(json.dumps({"kernel_path": isa, "results": results}, indent=2))
        return
    print(f"one core, {isa}; microseconds a layer and token: min, median, max")
    print(
        f"{'hidden':>6}{'experts':>8}  {'net':11}{'width':>5}{'bytes':>9}{'warm':>17}{'cold':>21}"
    )
    for r in results:
        print(
            f"{r['hidden']:6}{r['experts']:8}  {r['net']:11}{r['width']:5}{r['bytes']:9}"
            + "".join(
                "".join(f"{r[key][k]:7.1f}" for k in ("min", "median", "max"))
                for key in ("warm_us", "cold_us")
            )
        )


if __name__ == "__main__":
    main()
