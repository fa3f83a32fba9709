"""Time of PhasePer's offline training for a model of given dimensions, on synthetic traces.

The traces are made on the device: gate inputs that drift from layer to layer, and gates that choose
by them, so that there is something to learn; their hit rates mean nothing. Default: Qwen3-30B-A3B's
dimensions, and as many rows a phase as a compile keeps of them. Timed is what the compile's pass
does: groups, search, training, choice and files.

    python benchmarks/predictor_offline.py [--device cuda] [--hidden N] [--experts N] [--layers N]
        [--top-k N] [--records N] [--rows N] [--json]
"""

import argparse
import json
import os
import resource
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdscope.compiler.passes.collect_traces import default_rows
from pdscope.compiler.phaseper.build import build_predictors, pick_device
from pdscope.compiler.phaseper.store import Gate
from pdscope.compiler.phaseper.traces import PHASES, LayerTrace, TraceShape
from pdscope.compiler.phaseper.train import TrainOptions
from pdscope.ir.graph import GateAttrs

DRIFT = 0.5  # of a layer's gate input, against the one before


@dataclass(frozen=True)
class Made:
    """A trace store in memory; the last tenth of the rows is for validation."""

    traces: dict[tuple[str, int], LayerTrace]
    layers: list[int]
    hidden: int
    experts: int
    top_k: int
    phases: tuple[str, ...] = PHASES

    def rows(self, phase: str) -> int:
        return len(self.layer(phase, self.layers[0]).e)

    def layer(self, phase: str, layer: int) -> LayerTrace:
        return self.traces[phase, layer]

    def split(self, phase: str) -> NDArray[np.bool_]:
        rows = self.rows(phase)
        return np.arange(rows) >= rows * 9 // 10


def make(
    hidden: int, experts: int, layers: int, top_k: int, rows: int, device: torch.device
) -> tuple[Made, dict[int, Gate]]:
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    weights = [normal(experts, hidden) * hidden**-0.5 for _ in range(layers)]
    traces = {}
    for phase in PHASES:
        x = normal(rows, hidden)
        for layer, weight in enumerate(weights):
            x = x + DRIFT * normal(rows, hidden)
            a = (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True))).bfloat16()
            score, chosen = (a.float() @ weight.T).softmax(1).topk(top_k, 1)
            e = chosen.int().cpu().numpy()
            first = np.full((1, top_k), -1, np.int32)
            traces[phase, layer] = LayerTrace(
                a.view(torch.int16).cpu().numpy().view(np.uint16),
                (score / score.sum(1, keepdim=True)).cpu().numpy(),
                e,
                np.concatenate([first, e[:-1]]),
            )
    attrs = GateAttrs.softmax(experts, top_k)
    gates = {n: Gate(attrs, weights[n].cpu().numpy(), None) for n in range(1, layers)}
    return Made(traces, list(range(layers)), hidden, experts, top_k), gates


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = pick_device(args.device)
    some = dict.fromkeys(PHASES, 0)
    shape = TraceShape(args.hidden, args.experts, args.top_k, tuple(range(args.layers)), some, some)
    records = args.records or default_rows(shape)
    began = time.perf_counter()
    store, gates = make(args.hidden, args.experts, args.layers, args.top_k, records, device)
    made = time.perf_counter() - began
    options = TrainOptions() if args.rows is None else replace(TrainOptions(), rows=args.rows)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    cores = len(os.sched_getaffinity(0))
    began, spent = time.perf_counter(), time.process_time()
    about, files = build_predictors(store, gates, options, args.device, cores)
    seconds, cpu = time.perf_counter() - began, time.process_time() - spent
    entries = about["layers"]
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {cores} cores",
        "torch": torch.__version__,
        "dimensions": [args.hidden, args.experts, args.layers, args.top_k],
        "records": records,
        "rows_a_net": sorted({e["net"]["rows"] for e in entries}),
        "traces_seconds": made,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "largest_file": max(map(len, files.values())),
        "phaseper": sum(e["chosen"] == "phaseper" for e in entries),
        "hit": float(np.mean([e["hit"] for e in entries])),
        "cross_gate": float(np.mean([e["rivals"]["cross_gate"]["hit"] for e in entries])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    for name, value in (("hidden", 2048), ("experts", 128), ("layers", 48), ("top-k", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--records", type=int, help="rows of traces a phase")
    parser.add_argument("--rows", type=int, help="that a net is trained on, with repetition")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    size = ", ".join(
        f"{n} {w}"
        for n, w in zip(found["dimensions"], ("hidden", "experts", "layers", "top-k"), strict=True)
    )
    print(
        f"{found['device']}, torch {found['torch']}: {size}; {found['records']:,} rows a phase, "
        f"nets trained on up to {max(found['rows_a_net']):,}\n"
        f"training, choice and files: {found['seconds']:.1f} s ({found['cpu_seconds']:.1f} s of "
        f"CPU); traces made in {found['traces_seconds']:.1f} s\n"
        f"memory at most: {found['gpu_peak_bytes'] / 2**30:.1f} GiB of the GPU, "
        f"{found['host_peak_bytes'] / 2**30:.1f} GiB of the host; largest file "
        f"{found['largest_file']:,} bytes\n"
        f"{found['phaseper']} of {2 * (args.layers - 1)} layers and phases served by nets, hit "
        f"rate {found['hit']:.3f}, cross-layer gate {found['cross_gate']:.3f}"
    )


if __name__ == "__main__":
    main()
