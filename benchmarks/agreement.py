"""Do simulated times hold on a real clock? A GPU plan is executed, its routing is simulated with
the costs that were measured here, and each layer's times are compared, phase by phase.

Without a real GPU the mock CUDA driver stands in, on its wall clock: kernels take the times that
a hardware description gives, and do nothing else (routing is given); copies move their bytes. The
CPU's part is this machine's, with one core left to the mock. Models are a few layers of published
ones with dummy weights. Costs are measured on weights that no cache holds, so a model should have
more than four last-level caches of experts: else its runs find some of them there.

A layer's time is from when its gate's output is known to the same of the next layer; of the last
one, to the end of the step. Every round runs the same prompt, tokens and batches; the simulator
runs all of them, one after the other, so that its slots hold what the engine's do.

On an idle machine medians tell: the ratio of each round, executed over simulated. On one that is
shared, what others take moves the costs as it moves the runs, each at its moment; there the least
times say more: those of the rounds, over those simulated of the least that each part took when it
was measured ("least / least").

    python benchmarks/agreement.py [--models qwen3,mixtral] [--layers N] [--policies A,B]
        [--prompt N] [--tokens N] [--batch N] [--rounds N] [--threads N] [--share X] [--link BYTES]
        [--hardware NAME] [--driver mock|real] [--json] [--out FILE]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from machine import count, describe, names, run, spread, usable_cores, write_report

import pdscope
from pdscope.cli.format import markdown
from pdscope.compiler.build import mock_driver
from pdscope.compiler.costs import fit
from pdscope.compiler.hardware import Hardware
from pdscope.compiler.passes import profile_costs
from pdscope.compiler.simulate.executor import Executor
from pdscope.compiler.simulate.subject import Subject
from pdscope.compiler.simulate.timing import Tabled, Timing
from pdscope.costs import Bar, Costs, CostTable, Curve, Device, Figure, Fitted, Link
from pdscope.dummy_predictor import DummyPredictor
from pdscope.dummy_routing import DummyRouting
from pdscope.ir.isa import Opcode
from pdscope.placement import decision_costs
from pdscope.plan import Plan
from pdscope.routing_records import moe_layers
from pdscope.routing_trace import Recorder, RoutingTrace
from pdscope.session import Session

CONFIGS = Path(__file__).resolve().parents[1] / "examples" / "configs"
MODELS = {"qwen3": ("qwen3-30b-a3b", 4), "mixtral": ("mixtral-8x7b", 2)}  # and layers
ACCURACY = DummyPredictor(0.9)
BEFORE = "before"  # the row of what comes before the first layer's gate


@dataclass(frozen=True)
class StepTimes:
    """ns. `layers`: by layer, and `BEFORE`; kind: what the round calls the step; parts: of a
    layer's time that the driver's thread spent in each kind of instruction."""

    kind: str
    rows: int
    layers: dict[str, int]
    parts: dict[str, dict[str, int]]


# --- what both are asked ---


@dataclass(frozen=True)
class Workload:
    """One round: a prompt, tokens decoded behind it, and steps of a batch of sequences whose
    lengths differ."""

    prompt: int
    tokens: int
    batch: int
    vocab: int

    def run(self, session: Session) -> Iterator[str]:
        """Executes a round step by step; before each, yields what it is called."""
        rng = np.random.default_rng(3)

        def ids(n: int) -> list[int]:
            return list(rng.integers(0, self.vocab, n).tolist())

        session.reset()
        yield "prefill"
        session.prefill(ids(self.prompt))
        for _ in range(self.tokens):
            yield "decode"
            session.decode(ids(1)[0])
        if not self.batch:
            return
        session.reset()
        seqs = [s for s in range(self.batch) for _ in range(1 + 3 * s)]
        yield "setup"
        session.step(ids(len(seqs)), seqs=seqs)
        for _ in range(max(1, self.tokens // 2)):
            yield "batch"
            session.step(ids(self.batch), seqs=list(range(self.batch)))

    @property
    def positions(self) -> int:
        return max(self.prompt + self.tokens, 1 + 3 * self.batch + self.tokens)


def _times(
    kind: str, rows: int, begin: int, end: int, instrs: Sequence[tuple[int, ...]]
) -> StepTimes:
    """instrs: layer, opcode, begin, end of each instruction of the step."""
    known = [(layer, last) for layer, op, _, last in instrs if op == Opcode.RECOMPILE]
    edges = [(BEFORE, begin), *((str(layer), at) for layer, at in known)]
    ends = [at for _, at in edges[1:]] + [end]
    layers = {name: to - at for (name, at), to in zip(edges, ends, strict=True)}
    parts: dict[str, dict[str, int]] = {}
    for _, op, first, last in instrs:
        name = [n for n, at in edges if at <= first][-1] if first >= begin else BEFORE
        part = parts.setdefault(name, {})
        part[Opcode(op).text] = part.get(Opcode(op).text, 0) + last - first
    return StepTimes(kind, rows, layers, parts)


# --- executed ---


def record(session: Session, workload: Workload) -> tuple[RoutingTrace, list[str]]:
    """A round's routing, and what its steps are called."""
    recorder = Recorder(session.engine.plan.model["experts"])
    with recorder.watch(session):
        kinds = list(workload.run(session))
    return recorder.trace(), kinds


def step_ns(session: Session) -> int:
    """The time that all steps took, on the real clock."""
    return session.stats().step_ns


def execute(
    session: Session, workload: Workload, passed: Callable[[Session], int] = step_ns
) -> list[StepTimes]:
    """A round. `passed`: a clock that stands still between steps, in ns."""
    marks: list[tuple[str, int]] = []
    with session.trace() as trace:
        for kind in workload.run(session):
            marks.append((kind, passed(session)))
        marks.append(("", passed(session)))
    r = trace.records
    rows = list(
        zip(
            *(r[n].tolist() for n in ("layer", "opcode", "begin_ns", "end_ns", "rows")), strict=True
        )
    )
    starts = [i for i, row in enumerate(rows) if row[1] == Opcode.EMBED]
    out = []
    for n, (kind, at) in enumerate(marks[:-1]):
        mine = rows[starts[n] : starts[n + 1] if n + 1 < len(starts) else None]
        begin, took = mine[0][2], marks[n + 1][1] - at
        out.append(_times(kind, mine[0][4], begin, begin + took, [row[:4] for row in mine]))
    return out


# --- simulated ---


def simulate(
    subject: Subject,
    timing: Timing,
    costs: Costs,
    policy: str,
    trace: RoutingTrace,
    kinds: Sequence[str],
    rounds: int,
) -> list[list[StepTimes]]:
    """Each of so many rounds."""
    executor = Executor(subject, timing, costs, policy, keep=True)
    out: list[list[StepTimes]] = []
    for _ in range(rounds):
        steps = []
        for kind, step in zip(kinds, trace.steps(), strict=True):
            assert executor.instrs is not None
            executor.instrs.clear()
            done = executor.run_step(step)
            instrs = [(i.layer, int(i.opcode), i.begin, i.end) for i in executor.instrs]
            steps.append(_times(kind, step.rows, instrs[0][2], done.end, instrs))
        out.append(steps)
    return out


# --- compared ---


@dataclass(frozen=True)
class Row:
    """A layer of a phase; ns of one step; ratio: executed over simulated, of rounds; least: the
    least of the rounds over the least simulated with `quiet` costs."""

    phase: str
    layer: str
    executed: dict[str, float]
    simulated: float
    ratio: dict[str, float]
    least: float
    parts: dict[str, tuple[float, float]]  # executed, simulated: the rounds' least


def compare(
    executed: Sequence[list[StepTimes]],
    simulated: Sequence[list[StepTimes]],
    quiet: Sequence[list[StepTimes]],
) -> list[Row]:
    """By phase and layer, and of whole steps ("all")."""
    rows = []
    kinds = dict.fromkeys(step.kind for step in executed[0] if step.kind != "setup")
    for kind in kinds:
        names = [*next(s for s in executed[0] if s.kind == kind).layers, "all"]
        for name in names:
            ran, said, least = (
                [_mean(r, kind, name) for r in rounds] for rounds in (executed, simulated, quiet)
            )
            ratios = [a / max(1, b) for a, b in zip(ran, said, strict=True)]
            rows.append(
                Row(
                    *(kind, name, spread(ran), statistics.median(said), spread(ratios)),
                    min(ran) / max(1, min(least)),
                    _parts(executed, simulated, kind, name),
                )
            )
    return rows


def _mean(steps: list[StepTimes], kind: str, layer: str) -> float:
    """Of the steps of a round."""
    mine = [
        sum(s.layers.values()) if layer == "all" else s.layers[layer]
        for s in steps
        if s.kind == kind
    ]
    return sum(mine) / len(mine)


def _parts(
    executed: Sequence[list[StepTimes]],
    simulated: Sequence[list[StepTimes]],
    kind: str,
    layer: str,
) -> dict[str, tuple[float, float]]:
    def least(rounds: Sequence[list[StepTimes]]) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for steps in rounds:
            mine = [s.parts.get(layer, {}) for s in steps if s.kind == kind]
            for name in {n for part in mine for n in part}:
                found.setdefault(name, []).append(sum(p.get(name, 0) for p in mine) / len(mine))
        return {name: min(values) for name, values in found.items()}

    ran, said = least(executed), least(simulated)
    return {name: (ran.get(name, 0), said.get(name, 0)) for name in ran | said}


def quiet(table: CostTable) -> CostTable:
    """The least of what was measured; beside the link, as many times as long as before."""

    def least(part: Figure | Fitted | None) -> Any:
        if isinstance(part, Figure):
            return Figure(part.bar.min if part.bar else part.ns)
        if part is None or not part.points:
            return part
        return fit([(t, Bar(bar.min, bar.min, bar.min)) for t, bar in part.points])

    def device(old: Device) -> Device:
        new = Device(**{name: least(part) for name, part in vars(old).items()})
        if old.expert_busy is None:
            return new
        alone = new.expert.curve
        longer = [
            ns * old.expert_busy.curve.at(t) // max(1, old.expert.curve.at(t))
            for t, ns in zip(alone.tokens, alone.ns, strict=True)
        ]
        return replace(new, expert_busy=Fitted(Curve(alone.tokens, tuple(accumulate(longer, max)))))

    assert table.gpu is not None and table.link is not None
    link = Link(**{name: least(part) for name, part in vars(table.link).items()})
    return replace(table, cpu=device(table.cpu), gpu=device(table.gpu), link=link)


# --- the mock as a GPU ---


def mock_settings(table: CostTable, subject: Subject, link: int) -> str:
    """The description's GPU, and a link of so many bytes a second both ways."""
    assert table.gpu is not None and table.link is not None
    model, gpu, start = subject.model, table.gpu, table.gpu.start.ns
    inter = table.model.inter
    dense = max((x.dense.inter for x in model.layers if x.dense), default=0)

    def points(curve: Curve, num: int = 1, den: int = 1) -> str:
        knots = zip(curve.tokens, curve.ns, strict=True)
        return ",".join(f"{t}:{ns * num // den}" for t, ns in knots)

    expert = gpu.expert.curve
    lines = ["reset", "clock=wall", "kernels=none", f"h2d={link}", f"d2h={link}", "memory=200GiB"]
    lines += [f"h2d_start={table.link.start.ns}", f"d2h_start={table.link.start.ns}"]
    lines += [f"kernel.experts.base={start}", f"kernel.experts.curve={points(expert)}"]
    lines += [f"kernel.attention.curve={points(gpu.attention.curve)}"]
    lines += [f"kernel.attention.per_extra={gpu.context_row.ns}"]
    for name, num, den in (("mlp", dense, inter), ("lm_head", model.vocab, 3 * inter)):
        lines += [f"kernel.{name}.base={start}", f"kernel.{name}.curve={points(expert, num, den)}"]
    if gpu.shared:
        lines += [f"kernel.shared.curve={points(gpu.shared.curve)}"]
    return "; ".join(lines)


@contextmanager
def plan_of(name: str, args: argparse.Namespace) -> Iterator[Plan]:
    """A plan of the model's first layers, with costs that are measured here and place for a share
    of the experts. The driver is chosen before."""
    config, layers = MODELS[name]
    data = json.loads((CONFIGS / config / "config.json").read_text(encoding="utf-8"))
    data["num_hidden_layers"] = args.layers or layers
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        model = Path(folder) / name
        model.mkdir()
        (model / "config.json").write_text(json.dumps(data))
        options: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "bf16",
            "max_context": 2048,
            "max_rows": max(args.prompt, 256),
        }
        whole = Subject.of_model(
            model / "config.json",
            "adaptsched",
            gpu_mem="200GiB",
            costs=args.hardware,
            **_of(options),
        )
        gpu = whole.gpu
        experts = int(gpu.experts * args.share)
        mem = gpu.reserve + gpu.weights + 2 * gpu.session + experts * gpu.expert
        if args.driver == "mock":
            table = Hardware.shipped(args.hardware).table(whole.key)
            os.environ["PDS_MOCK_CUDA"] = mock_settings(table, whole, args.link)
            os.environ["PDSCOPE_CUDA_DRIVER"] = str(mock_driver())
            options["gpu_arch"] = "none"
        options |= {"no_weights": True, "gpu_mem": mem, "costs": "auto"}
        options["dummy_predictor"] = ACCURACY.text
        print(f"{name}: measuring costs", file=sys.stderr)
        profile_costs.BUSY = 0  # a table of another moment, in the cache, would not do
        result = pdscope.compile(model, Path(folder) / "plan", **options)
        for note in result.notes:
            print(f"{name}: {note}", file=sys.stderr)
        yield Plan.open(Path(folder) / "plan")


def _of(options: dict[str, Any]) -> dict[str, Any]:
    """Those that Subject.of_model takes besides its own."""
    return {k: v for k, v in options.items() if k != "load_format"}


def measure(plan: Plan, policy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Executes and simulates rounds of one policy."""
    workload = Workload(args.prompt, args.tokens, args.batch, plan.model["vocab"])
    routes = DummyRouting.parse("zipf:0.8").routes(plan, workload.positions)
    chosen = np.full_like(routes, -1)
    chosen[:, moe_layers(plan)] = routes[:, moe_layers(plan)]

    @contextmanager
    def session() -> Iterator[Session]:
        with pdscope.load(
            plan, device="gpu", weights="dummy", policy=policy, threads=args.threads
        ) as engine:
            made = engine.session(max(1, args.batch), plan.max_context)
            made.set_routes(routes)
            made.set_predictions(ACCURACY.predictions(chosen, plan.model["experts"]))
            yield made
            made.close()

    with session() as recorded:
        trace, kinds = record(recorded, workload)
    with session() as fresh:
        executed = [execute(fresh, workload) for _ in range(args.rounds + 1)]
        ledger = _summed(fresh.engine.ledger())
    subject, table = Subject.of_plan(plan), CostTable.of_plan(plan)
    assert table is not None
    dense = max((x.dense.inter for x in subject.model.layers if x.dense), default=0)
    simulated, least = (
        simulate(
            subject,
            Tabled(costs, subject.key, dense, subject.model.vocab),
            decision_costs(plan),
            policy,
            trace,
            kinds,
            args.rounds + 1,
        )
        for costs in (table, quiet(table))
    )
    # The first round touches memory for the first time.
    return {"rows": compare(executed[1:], simulated[1:], least[1:]), "ledger": ledger}


def _summed(layers: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(layer[name] for layer in layers) for name in layers[0]}


# --- printing ---


def lines(rows: Sequence[Row], parts: bool) -> str:
    """ms; the ratio's worst layer in each phase is what counts."""
    head = ["phase", "layer", "executed ms, min", "median", "max", "simulated ms"]
    table = [[*head, "ratio, min", "median", "max", "least / least"]]
    for row in rows:
        ran = [f"{row.executed[k] / 1e6:.3f}" for k in ("min", "median", "max")]
        ratio = [f"{row.ratio[k]:.3f}" for k in ("min", "median", "max")]
        table.append([row.phase, row.layer, *ran, f"{row.simulated / 1e6:.3f}", *ratio])
        table[-1].append(f"{row.least:.3f}")
    out = markdown(table)
    if not parts:
        return out
    more = [["phase", "layer", "instruction", "executed ms", "simulated ms"]]
    for row in rows:
        for name, (ran_ns, said_ns) in row.parts.items():
            if max(ran_ns, said_ns) > 20_000:
                more.append(
                    [row.phase, row.layer, name, f"{ran_ns / 1e6:.3f}", f"{said_ns / 1e6:.3f}"]
                )
    return f"{out}\n\n{markdown(more)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", type=names, default=list(MODELS))
    parser.add_argument("--policies", type=names, default=["adaptsched"])
    parser.add_argument("--layers", type=int, default=0, help="0: those of MODELS")
    parser.add_argument("--prompt", type=count, default=256)
    parser.add_argument("--tokens", type=count, default=8)
    parser.add_argument("--batch", type=count, default=4)
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores, of the mock one less")
    parser.add_argument("--share", type=float, default=0.25, help="of the experts, on the GPU")
    parser.add_argument("--link", type=int, default=3 * 10**9, help="the mock's, bytes a second")
    parser.add_argument("--hardware", default="a100-6230r", help="whose GPU the mock is")
    parser.add_argument("--driver", choices=("mock", "real"), default="mock")
    parser.add_argument("--parts", action="store_true", help="also by kind of instruction")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        parser.error(
            f"--models: {', '.join(sorted(unknown))}: expected some of {', '.join(MODELS)}"
        )
    if not args.threads:
        args.threads = max(1, usable_cores() - (args.driver == "mock"))
    return args


def main() -> None:
    args = arguments()
    os.environ["PDSCOPE_THREADS"] = str(args.threads)  # costs are measured with as many
    found: dict[str, Any] = {}
    for model in args.models:
        with plan_of(model, args) as plan:
            for policy in args.policies:
                print(f"{model}: {policy}", file=sys.stderr)
                found[f"{model}, {policy}"] = measure(plan, policy, args)
    load = (
        f"load average before {describe()['load average before']}, after {os.getloadavg()[0]:.1f}"
    )
    if args.json:
        data = {name: [vars(r) for r in part["rows"]] for name, part in found.items()}
        print(json.dumps({"load": load, **data}, indent=2))
        return
    text = "\n\n".join(
        f"{name}; {part['ledger']['loads']} loads, {part['ledger']['prefetches']} prefetches\n\n"
        f"{lines(part['rows'], args.parts)}"
        for name, part in found.items()
    )
    text = f"{args.threads} threads; {load}\n\n{text}"
    print(text)
    if args.out:
        write_report(args.out, "Executed and simulated times of layers", text)


if __name__ == "__main__":
    run(main)
