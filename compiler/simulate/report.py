"""What a run came to: speed by phase, layers, utilisation, and the distance from the bound.

May import pdscope.{costs,routing_trace}, pdscope.ir.isa and pdscope.compiler.simulate.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from pdscope.compiler.simulate.bound import step_bound
from pdscope.compiler.simulate.executor import Executor, LayerRecord, StepRecord, check_fits
from pdscope.compiler.simulate.subject import Subject
from pdscope.compiler.simulate.timing import Timing
from pdscope.costs import Costs
from pdscope.ir.isa import Phase
from pdscope.routing_trace import RoutingTrace


@dataclass(frozen=True)
class LayerTime:
    """Mean of the phase's steps, ns: from when the gate's output of the layer is known to the
    same of the next one (of the last one, to the step's end). Experts: mean numbers."""

    layer: int
    ns: int
    ready: float
    late: float
    loads: float
    cpu: float
    prefetches: float


@dataclass(frozen=True)
class PhaseReport:
    """Utilisations: of the phase's time, 0 to 1. above_bound: time over that of the bound, less
    1. step_ns: of each step. modes: decisions by their mode."""

    phase: str
    steps: int
    tokens: int
    ns: int
    bound_ns: int
    tokens_per_second: float
    above_bound: float
    gpu: float
    cpu: float
    link: float
    step_ns: tuple[int, ...]
    layers: tuple[LayerTime, ...]
    modes: dict[str, int]


@dataclass(frozen=True)
class Report:
    """One policy. ledger: bytes over the link, of all layers."""

    policy: str
    resident: int
    ring: int
    phases: dict[str, PhaseReport]
    ledger: dict[str, int]

    def data(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def simulate(
    subject: Subject,
    timing: Timing,
    costs: Costs,
    policy: str,
    trace: RoutingTrace,
    keep: bool = False,
    progress: Callable[[int], None] = lambda _: None,
    before: RoutingTrace | None = None,
) -> tuple[Report, Executor]:
    """Runs the trace; `before`, what is not reported but fills caches first. `progress` is told
    rows done."""
    check_fits(subject, trace)
    executor = Executor(subject, timing, costs, policy, keep)
    if before is not None:
        for _ in executor.run(before):
            pass
    steps: list[StepRecord] = []
    bounds: list[int] = []
    for step in trace.steps():
        bounds.append(step_bound(executor.placement, timing, step))
        steps.append(executor.run_step(step))
        progress(step.rows)
    ledger: Counter[str] = Counter()
    for one in executor.placement.ledger:
        ledger.update(vars(one))
    phases = {
        phase.name.lower(): _phase(phase, steps, bounds)
        for phase in Phase
        if any(s.phase is phase for s in steps)
    }
    report = Report(policy, sum(map(len, subject.resident)), subject.ring, phases, dict(ledger))
    return report, executor


def _phase(phase: Phase, all_steps: Sequence[StepRecord], bounds: Sequence[int]) -> PhaseReport:
    chosen = [(s, b) for s, b in zip(all_steps, bounds, strict=True) if s.phase is phase]
    steps = [s for s, _ in chosen]
    bound = sum(b for _, b in chosen)
    ns = sum(s.end - s.begin for s in steps)
    tokens = sum(s.rows for s in steps)
    layers = [layer for s in steps for layer in s.layers]
    return PhaseReport(
        phase=phase.name.lower(),
        steps=len(steps),
        tokens=tokens,
        ns=ns,
        bound_ns=bound,
        tokens_per_second=tokens * 1e9 / max(1, ns),
        above_bound=ns / max(1, bound) - 1,
        gpu=sum(s.gpu_busy for s in steps) / max(1, ns),
        cpu=sum(s.cpu_busy for s in steps) / max(1, ns),
        link=sum(s.h2d_busy for s in steps) / max(1, ns),
        step_ns=tuple(s.end - s.begin for s in steps),
        layers=tuple(_layers(steps)),
        modes=dict(Counter(layer.mode for layer in layers)),
    )


def _layers(steps: Sequence[StepRecord]) -> Iterator[LayerTime]:
    by_layer: dict[int, list[tuple[int, LayerRecord]]] = {}
    for step in steps:
        ends = [*(layer.known for layer in step.layers[1:]), step.end]
        for layer, end in zip(step.layers, ends, strict=True):
            by_layer.setdefault(layer.layer, []).append((end - layer.known, layer))
    for number, found in sorted(by_layer.items()):
        n = len(found)

        def mean(name: str, found: list[tuple[int, LayerRecord]] = found) -> float:
            return float(sum(getattr(layer, name) for _, layer in found) / len(found))

        names = ("ready", "late", "loads", "cpu", "prefetches")
        yield LayerTime(number, sum(ns for ns, _ in found) // n, *map(mean, names))
