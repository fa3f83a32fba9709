"""How much better predictors could be: PhasePer's nets beside nets of ten times their size, trained
on the same rows, judged on text that neither has seen.

A model directory is compiled, its routing of both texts is traced, and for each layer and phase two
nets are trained: that of the default options (without the search: the loss that it ends in), and a
deep one of at least ten times its bytes, whatever the size budget says. Printed for each phase: the
mean hit rate of both and of the best rival, the share of that rival's misses that each removes, and
the gap between them.

    python benchmarks/predictor_bound.py MODEL --calibration FILE --on FILE [--work DIR] [--rows N]
        [--trace-records N] [--phases decode] [--device cuda] [--json]

--work keeps plan, traces and finished nets: the same command goes on there.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pdscope
from pdscope.compiler.passes.collect_traces import ROWS, collect
from pdscope.compiler.phaseper import train
from pdscope.compiler.phaseper.build import pick_device, product_type
from pdscope.compiler.phaseper.checkpoints import Checkpoints
from pdscope.compiler.phaseper.corpus import PHASES, Corpus
from pdscope.compiler.phaseper.evaluate import plan_gates
from pdscope.compiler.phaseper.groups import find_groups
from pdscope.compiler.phaseper.losses import DISTILL, LossSpec
from pdscope.compiler.phaseper.metrics import hit_rate
from pdscope.compiler.phaseper.nets import NetShape
from pdscope.compiler.phaseper.rows import PhaseRows
from pdscope.compiler.phaseper.traces import TraceStore
from pdscope.documents import read_documents
from pdscope.plan import Plan

TIMES = 10
JUDGED = 65536  # rows of the other text


@dataclass(frozen=True)
class Found:
    """Of one layer and phase: hit rates on the other text, and bytes of the nets."""

    layer: int
    phase: str
    rival: float
    default: float
    large: float
    default_bytes: int
    large_bytes: int


def traces(plan: Plan, text: Path, folder: Path, records: int) -> TraceStore:
    with pdscope.load(plan, weights="mmap", predictor="off") as engine:
        corpus = Corpus.write(folder.with_suffix(".text"), read_documents(engine.tokenizer, text))
        key = json.dumps([plan.plan_hash, str(text.resolve()), text.stat().st_size, records])
        return collect(engine, corpus, folder, key, rows=records)


def default_shape(rows: PhaseRows, group: str, options: train.TrainOptions) -> NetShape:
    """The wide one among the default's candidates."""
    shapes = [c.shape for c in train.candidates(rows, group, options)]
    return max(shapes, key=lambda s: s.bytes())


def large_shape(small: NetShape) -> NetShape:
    width = 16
    while True:
        shape = NetShape(small.hidden, small.experts, width, True, small.blocks)
        if shape.bytes() >= TIMES * small.bytes():
            return shape
        width += 16


def measure(
    rows: PhaseRows,
    other: PhaseRows,
    names: tuple[str, ...],
    options: train.TrainOptions,
    saved: Checkpoints,
) -> list[Found]:
    small = [default_shape(rows, names[pair], options) for pair in rows.pairs]
    ids = train.some(np.arange(other.rows), JUDGED)
    hits: list[dict[str, float]] = [{} for _ in rows.pairs]
    for size, shapes in (("default", small), ("large", [large_shape(s) for s in small])):
        jobs = [
            train.Job(pair, train.Candidate(LossSpec(DISTILL), shape))
            for pair, shape in zip(rows.pairs, shapes, strict=True)
        ]
        stage = train.Stage(saved, f"{rows.phase}-{size}", keep=True)
        trained = train.train_jobs(rows, jobs, options.rows, options, stage=stage)
        for one in trained:
            pair, shape = one.job.pair, one.job.candidate.shape
            scores = train.logits(other, shape, one.parameters, [pair], ids)[0]
            hits[pair][size] = hit_rate(scores, other.chosen(pair, ids))
    found = []
    for pair in rows.pairs:
        scores_of = other.rival_scores(pair, ids, rows.tables(pair))
        chosen = other.chosen(pair, ids)
        rival = max(hit_rate(scores, chosen) for scores in scores_of.values())
        shape = small[pair]
        large = large_shape(shape).bytes()
        found.append(
            Found(
                rows.layers[pair], rows.phase, rival, **hits[pair],
                default_bytes=shape.bytes(), large_bytes=large,
            )
        )  # fmt: skip
    return found


def summary(found: list[Found]) -> dict[str, Any]:
    rival, default, large = (
        float(np.mean([getattr(f, name) for f in found])) for name in ("rival", "default", "large")
    )
    return {
        "phase": found[0].phase,
        "best_rival": rival,
        "default": default,
        "large": large,
        "default_removes": 1 - (1 - default) / (1 - rival),
        "large_removes": 1 - (1 - large) / (1 - rival),
        "gap_points": 100 * (large - default),
        "layers": [vars(f) for f in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--on", type=Path, required=True, help="text to judge on")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--rows", type=int, default=train.TrainOptions.rows)
    parser.add_argument("--trace-records", type=int, default=ROWS)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        path = work / "plan"
        if not path.exists():
            pdscope.compile(args.model, path, dtype="bf16", predictor="off")
        plan = Plan.open(path)
        store = traces(plan, args.calibration, work / "calibration", args.trace_records)
        judge = traces(plan, args.on, work / "on", args.trace_records)
        gates, device = plan_gates(plan), pick_device(args.device)
        options = train.TrainOptions(rows=args.rows)
        names = find_groups(store).names
        saved = Checkpoints(work / "training", json.dumps([store.key, vars(options), str(device)]))
        reports = []
        with train.one_thread_each():
            for phase in args.phases.split(","):
                rows, other = (
                    PhaseRows(s, phase, gates, device, product_type(device)) for s in (store, judge)
                )
                rows.load()
                reports.append(summary(measure(rows, other, names, options, saved)))
                rows.release()
    if args.json:
        print(json.dumps(reports, indent=2))
        return
    for report in reports:
        print(
            f"{report['phase']}: hit rate {report['default']:.4f} (removes "
            f"{report['default_removes']:.1%} of the misses of the best rival, "
            f"{report['best_rival']:.4f}), "
            f"{TIMES}x the size {report['large']:.4f} ({report['large_removes']:.1%}): "
            f"{report['gap_points']:.2f} points apart"
        )
        for f in report["layers"]:
            print(
                f"  layer {f['layer']:2}: rival {f['rival']:.4f}, default {f['default']:.4f} in "
                f"{f['default_bytes']:,} B, large {f['large']:.4f} in {f['large_bytes']:,} B"
            )


if __name__ == "__main__":
    main()
