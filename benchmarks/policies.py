"""AdaptSched and its rivals on the paper's models and platforms, in the simulator.

No weights and no GPU: programs are compiled from published configurations, experts are placed and
times are given by hardware descriptions, and routing is made up, with the skew of small trained
models (docs/routing-traces.md). All policies share programs, copies and memory, and have decoded 32
tokens of another text before, so that caches are warm. Beside the ratios stand the paper's, which
compare whole systems.

    python benchmarks/policies.py [--models A,B] [--platforms A,B] [--prompts N,N] [--tokens N]
        [--gpu-mem BYTES] [--policies A,B] [--skip-ablation] [--skip-accuracy] [--json] [--out FILE]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import names, numbers

from pdscope.cli.format import markdown
from pdscope.compiler.decision import Policy
from pdscope.compiler.passes.hot_experts import uniform
from pdscope.compiler.simulate import synthetic
from pdscope.compiler.simulate.executor import Executor
from pdscope.compiler.simulate.report import Report, simulate
from pdscope.compiler.simulate.study import Study
from pdscope.compiler.simulate.subject import Subject, routing_of
from pdscope.compiler.simulate.timing import Link, Tabled, Timing
from pdscope.costs import Cache, Costs, CostTable, Figure
from pdscope.routing_trace import RoutingTrace

CONFIGS = Path(__file__).resolve().parents[1] / "examples" / "configs"
MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite")
PLATFORMS = ("a100-6230r", "rtx3090-epyc7452", "v100-6230r")
ACCURACY = 0.9
ACCURACIES = (1.0, 0.9, 0.7, 0.6, 0.45)

# The paper: AdaptSched is up to so many times as fast as the system whose policy this is.
PAPER = {
    "fate": ("Fate", 10.3, 6.1),
    "static": ("KTransformers", 8.6, 2.9),
    "fiddler": ("Fiddler", 5.8, 2.9),
    "hybrimoe": ("HybriMoE", 4.4, 2.1),
    "apex": ("MoE-APEX", 2.5, 2.1),
}
# Its table 1: ms of one expert's transfer without AsyncIO on PCIe 4.0 x16, in prefill and decode.
WITHOUT_ASYNC = {
    "deepseek-v2-lite": (2.78, 2.06),
    "qwen3-30b-a3b": (1.88, 1.38),
    "mixtral-8x7b": (51.1, 33.8),
}
# ns of launching an expert: by its table 2, one of one token takes so much longer in the runtime
# than it computes (RTX 3090: 0.11, 0.12 and 0.11 ms for the three models).
LAUNCH = 110_000
GRAPH, CACHE, BOTH = "static graph", "cache prefetch", "static graph and cache prefetch"
PAPER_ABLATION = {
    "hot experts stay": ("1.16-1.39", "1.15-1.46"),
    "AsyncIO": ("1.67-1.88", "1.34-2.24"),
    "prediction and AdaptSched": ("1.39-2.06", "1.17-1.38"),
    BOTH: ("1.10-1.20", "1.13-1.39"),
}


@dataclass(frozen=True)
class OneByOne:
    """Without the static graph, in which all experts that are on the GPU are one submission: each
    of them is launched by itself."""

    timing: Tabled

    @property
    def link(self) -> Link:
        return self.timing.link

    def kernel(self, name: str, tokens: Sequence[int], extra: int) -> int:
        launches = len(tokens) - 1 if name == "experts" else 0
        return self.timing.kernel(name, tokens, extra) + launches * LAUNCH

    def host(self, name: str, tokens: Sequence[int]) -> int:
        return self.timing.host(name, tokens)

    def host_busy(self, name: str, tokens: Sequence[int]) -> int:
        return self.timing.host_busy(name, tokens)


@dataclass(frozen=True)
class Case:
    """A model on a platform, and what is replayed: a prefill by its tokens, and decode."""

    model: str
    platform: str
    study: Study
    known: RoutingTrace  # of the text that experts are placed by
    before: RoutingTrace  # runs first, so that caches are warm
    prefills: dict[int, RoutingTrace]
    decode: RoutingTrace  # behind a short prompt

    def subject(self, policy: str) -> Subject:
        layers = len(self.study.subject.model.layers)
        costs = self.study.table.costs()
        placed = self.study.subject.with_policy(policy, routing_of(self.known, layers), costs)
        return placed.with_hits(ACCURACY)

    def traces(self) -> Iterator[tuple[str, str, RoutingTrace]]:
        """(column, phase that counts, trace)"""
        for n, trace in self.prefills.items():
            yield f"pp{n}", "prefill", trace
        yield "tg", "decode", self.decode

    def warm(
        self,
        subject: Subject,
        timing: Timing,
        costs: Costs,
        policy: str,
        cache: Cache | None = None,
    ) -> Executor:
        executor = Executor(subject, timing, costs, policy, cache=cache)
        for _ in executor.run(self.before):
            pass
        return executor

    def rates(self, policy: str, accuracy: float | None = None, **how: Any) -> dict[str, Report]:
        """By column."""
        subject = how.pop("subject", None) or self.subject(policy)
        timing = how.pop("timing", None) or self.study.timing()
        costs = how.pop("costs", None) or self.study.table.costs()
        warm = self.warm(subject, timing, costs, policy)
        out = {}
        for column, _, trace in self.traces():
            if accuracy is not None:
                trace = synthetic.with_predictions(trace, accuracy, **how)
            out[column] = simulate(subject, timing, costs, policy, trace, after=warm)[0]
        return out


def case(model: str, platform: str, args: argparse.Namespace) -> Case:
    study = Study.of_model(
        CONFIGS / model / "config.json",
        platform,
        "adaptsched",
        gpu_mem=args.gpu_mem,
        max_context=4608,
        max_rows=max(args.prompts),
    )
    skew = synthetic.MEASURED.get(study.subject.model.architecture, synthetic.DEFAULT)
    chunk = study.subject.memory.max_rows

    def made(prompt: int, tokens: int, seed: int) -> RoutingTrace:
        trace = synthetic.made(study.shape(), [prompt], tokens, chunk, skew, seed)
        return synthetic.with_predictions(trace, ACCURACY, seed)

    return Case(
        model,
        platform,
        study,
        made(512, 512, 1000),
        made(64, 32, 1001),
        {n: made(n, 0, n) for n in args.prompts},
        made(64, args.tokens, 7),
    )


def speed(report: Report, column: str) -> float:
    return report.phases["decode" if column == "tg" else "prefill"].tokens_per_second


def above(report: Report, column: str) -> float:
    return report.phases["decode" if column == "tg" else "prefill"].above_bound


# --- tables ---


def compare(c: Case, policies: list[str]) -> dict[str, dict[str, Any]]:
    """By policy: tokens a second and time above the bound, by column."""
    out: dict[str, dict[str, Any]] = {}
    for policy in policies:
        started = time.perf_counter()
        reports = c.rates(policy)
        out[policy] = {
            "resident": next(iter(reports.values())).resident,
            "ring": next(iter(reports.values())).ring,
            "tokens_per_second": {k: speed(r, k) for k, r in reports.items()},
            "above_bound": {k: above(r, k) for k, r in reports.items()},
        }
        took = time.perf_counter() - started
        print(f"{c.model} {c.platform} {policy}: {took:.1f} s", file=sys.stderr)
    return out


def accuracies(c: Case) -> dict[str, dict[str, float]]:
    """AdaptSched's tokens a second with worse predictors."""
    found = {f"{a:.0%}": c.rates("adaptsched", a) for a in ACCURACIES}
    found["adversarial"] = c.rates("adaptsched", 0.0, adversarial=True)
    cpu = replace(c.study.table.cpu, predict=Figure(0))
    timing = _timing(c, replace(c.study.table, cpu=cpu))
    found["90%, predicting takes no time"] = c.rates("adaptsched", timing=timing)
    none = _unpredicted(c)
    return {
        name: {k: speed(r, k) for k, r in reports.items()}
        for name, reports in {**found, "none": none}.items()
    }


def _unpredicted(c: Case) -> dict[str, Report]:
    subject, timing, costs = c.subject("adaptsched"), c.study.timing(), c.study.table.costs()
    warm = c.warm(subject, timing, costs, "adaptsched")
    out = {}
    for column, _, trace in c.traces():
        blind = replace(trace, predicted=np.full_like(trace.predicted, -1))
        out[column] = simulate(subject, timing, costs, "adaptsched", blind, after=warm)[0]
    return out


def ablation(c: Case) -> dict[str, dict[str, float]]:
    """From Fiddler's policy with experts placed as if all were alike, copies as slow as the paper's
    table 1 and each expert on the GPU launched by itself, one part after the other."""
    plain = c.study.subject.placed("fiddler", uniform(c.study.subject.model), c.study.table.costs())
    hot = c.subject("fiddler")
    prefill, decode = (_slow(c, ms) for ms in WITHOUT_ASYNC[c.model])
    out: dict[str, dict[str, float]] = {}
    best = c.subject("adaptsched")
    for name, policy, subject, slow in (
        ("Fiddler's policy alone", "fiddler", plain, True),
        ("hot experts stay", "fiddler", hot, True),
        ("AsyncIO", "fiddler", hot, False),
        ("prediction and AdaptSched", "adaptsched", best, False),
    ):
        out[name] = {}
        for column, phase, trace in c.traces():
            table = (prefill if phase == "prefill" else decode) if slow else c.study.table
            timing, costs = OneByOne(_timing(c, table)), table.costs()
            warm = c.warm(subject, timing, costs, policy)
            report = simulate(subject, timing, costs, policy, trace, after=warm)[0]
            out[name][column] = speed(report, column)
    return out | system_parts(c, out["prediction and AdaptSched"])


def system_parts(c: Case, before: dict[str, float]) -> dict[str, dict[str, float]]:
    """The static graph, and prefetches to the CPU's cache behind it; both again where predicting
    takes no time, as prefetches need predictions that do not pay for themselves everywhere. At last
    what graph and cache are together beside `before`, if that is given."""
    table = c.study.table
    free = replace(
        table,
        cpu=replace(table.cpu, predict=Figure(0)),
        gpu=replace(table.gpu, predict=Figure(0)) if table.gpu else None,
    )
    subject = c.subject("adaptsched")
    out: dict[str, dict[str, float]] = {}
    for name, costs_of, cache in (
        (GRAPH, table, None),
        (CACHE, table, table.cache),
        ("predicting takes no time", free, None),
        ("that, and cache prefetch", free, table.cache),
    ):
        timing, costs = _timing(c, costs_of), costs_of.costs()
        warm = c.warm(subject, timing, costs, "adaptsched", cache)
        out[name] = {
            column: speed(
                simulate(subject, timing, costs, "adaptsched", trace, after=warm)[0], column
            )
            for column, _, trace in c.traces()
        }
    return out | ({BOTH: out[CACHE]} if before else {})


def _slow(c: Case, ms: float) -> CostTable:
    assert c.study.table.link is not None
    expert = Figure(int(ms * 1e6))
    return replace(
        c.study.table, link=replace(c.study.table.link, expert=expert, expert_alone=expert)
    )


def _timing(c: Case, table: CostTable) -> Tabled:
    return replace(c.study, table=table).timing()


# --- printing ---


def report(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model in args.models:
        for platform in args.platforms:
            c = case(model, platform, args)
            part: dict[str, Any] = {"policies": compare(c, args.policies)}
            if platform == args.platforms[0]:
                if not args.skip_accuracy:
                    part["accuracy"] = accuracies(c)
            if not args.skip_ablation:
                if model in WITHOUT_ASYNC and platform == PLATFORMS[0]:
                    part["ablation"] = ablation(c)
                else:
                    part["system"] = system_parts(c, {})
            found[f"{model} on {platform}"] = part
    return found


def lines(found: dict[str, Any], columns: list[str]) -> Iterator[str]:
    for name, part in found.items():
        yield f"\n## {name}\n"
        best = part["policies"]["adaptsched"]["tokens_per_second"]
        head = ["policy", "fixed + ring"]
        for column in columns:
            head += [f"{column} t/s", "AdaptSched is", "above bound"]
        rows = [head]
        for policy, figures in part["policies"].items():
            row = [policy, f"{figures['resident']} + {figures['ring']}"]
            for column in columns:
                rate = figures["tokens_per_second"][column]
                row += [f"{rate:.2f}", f"{best[column] / rate:.2f}x"]
                row.append(f"{figures['above_bound'][column]:.0%}")
            rows.append(row)
        yield markdown(rows)
        for key, title in (
            ("accuracy", "AdaptSched by the accuracy of predictions, t/s"),
            ("ablation", "From Fiddler's policy, one part after the other, t/s and gain"),
            ("system", "AdaptSched with a static graph, then with cache prefetch, t/s and gain"),
        ):
            if key in part:
                yield f"\n{title}\n"
                yield markdown(list(_steps(part[key], columns, key != "accuracy")))
    yield from _against_paper(found, columns)


def _steps(
    part: dict[str, dict[str, float]], columns: list[str], gains: bool
) -> Iterator[list[str]]:
    gains_of_paper = gains and BOTH in part
    yield ["", *columns, *(["paper: prefill, decode"] if gains_of_paper else [])]
    before: dict[str, float] = {}
    best = next(iter(part.values()))
    for name, rates in part.items():
        row = [name]
        if name == BOTH:
            before = part["prediction and AdaptSched"]
        for column in columns:
            rate = rates[column]
            said = f" ({rate / before[column]:.2f}x)" if gains and before else ""
            if not gains:
                said = f" ({rate / best[column] - 1:+.1%})"
            row.append(f"{rate:.2f}{said}")
        if gains_of_paper:
            row.append(", ".join(PAPER_ABLATION.get(name, ())))
        yield row
        before = rates


def _against_paper(found: dict[str, Any], columns: list[str]) -> Iterator[str]:
    yield "\n## Beside the paper\n"
    rows = [["policy", "system", "prefill, up to", "paper", "decode, up to", "paper"]]
    worst: list[tuple[float, str]] = []
    most: dict[str, list[float]] = {}
    for name, part in found.items():
        rates = {p: f["tokens_per_second"] for p, f in part["policies"].items()}
        for policy, values in rates.items():
            for column in columns:
                ratio = rates["adaptsched"][column] / values[column]
                if policy not in ("adaptsched", "pdscope-paper"):
                    worst.append((ratio, f"{name}, {column}: {policy}"))
                pair = most.setdefault(policy, [0.0, 0.0])
                at = int(column == "tg")
                pair[at] = max(pair[at], ratio)
    for policy, (system, prefill, decode) in PAPER.items():
        if policy in most:
            mine = most[policy]
            row = [policy, system, f"{mine[0]:.1f}x", f"{prefill}x", f"{mine[1]:.1f}x"]
            rows.append([*row, f"{decode}x"])
    yield markdown(rows)
    yield "\nAdaptSched is slower than a rival by more than 2 % here:\n"
    behind = [f"- {where}: {1 / ratio - 1:.1%}" for ratio, where in sorted(worst) if ratio < 0.98]
    yield "\n".join(behind) or "- nowhere"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", type=names, default=list(MODELS))
    parser.add_argument("--platforms", type=names, default=list(PLATFORMS))
    parser.add_argument("--policies", type=names, default=[p.value for p in Policy])
    parser.add_argument("--prompts", type=numbers, default=[128, 512, 2048])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--gpu-mem", default="24GiB")
    parser.add_argument("--skip-ablation", action="store_true")
    parser.add_argument("--skip-accuracy", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if "adaptsched" not in args.policies:
        args.policies.insert(0, "adaptsched")
    return args


def main() -> None:
    args = arguments()
    found = report(args)
    columns = [*(f"pp{n}" for n in args.prompts), "tg"]
    text = json.dumps(found, indent=2) if args.json else "\n".join(lines(found, columns))
    print(text)
    if args.out is not None:
        given = [a for a in sys.argv[1:] if a not in ("--out", str(args.out))]
        command = f"`python benchmarks/policies.py {' '.join(given)}`\n"
        args.out.write_text(command + text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
