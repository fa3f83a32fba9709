"""Executes the programs of a plan step by step: what the driver thread does, instruction by
instruction, on a simulated GPU. docs/gpu-plans.md has the rules.

May import pdscope.{errors,routing_trace}, pdscope.ir and pdscope.compiler.{costs,decision,
simulate}.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pdscope.compiler.decision import Policy
from pdscope.compiler.simulate.cache import CachePrefetch
from pdscope.compiler.simulate.device import COMPUTE, COPIES, D2H, H2D, Gpu, Op
from pdscope.compiler.simulate.placing import Bound, Hole, Placement, Transfer
from pdscope.compiler.simulate.subject import Subject
from pdscope.compiler.simulate.timing import Timing
from pdscope.costs import Cache, Costs
from pdscope.errors import InputError
from pdscope.ir.isa import HoleKind, Opcode, Phase, Queue
from pdscope.ir.program import Instr, Program
from pdscope.routing_trace import RoutingTrace, Step

CHUNK = 4 << 20  # bytes
IN_FLIGHT = 2  # chunks


@dataclass(frozen=True)
class InstrRecord:
    """An instruction of the driver: when it was begun and when the driver went on, ns. `decision`:
    of recompile, what was decided."""

    layer: int
    index: int
    opcode: Opcode
    queue: Queue
    begin: int
    end: int
    rows: int
    experts: int
    decision: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerRecord:
    """A MoE layer of a step: experts on the GPU already, loaded, on the CPU and prefetched for the
    next layer; `mode` of the decision; `known`: ns, when its gate's output was."""

    layer: int
    begin: int
    known: int
    end: int
    ready: int
    late: int
    loads: int
    cpu: int
    prefetches: int
    mode: str


@dataclass(frozen=True)
class StepRecord:
    """ns; busy times are those within the step."""

    phase: Phase
    rows: int
    begin: int
    end: int
    gpu_busy: int
    cpu_busy: int
    h2d_busy: int
    layers: tuple[LayerRecord, ...]


class Executor:
    """One engine with one session. Times are ns since it began. `keep`: instructions and spans,
    for timelines."""

    def __init__(
        self,
        subject: Subject,
        timing: Timing,
        costs: Costs,
        policy: str,
        keep: bool = False,
        cache: Cache | None = None,
    ) -> None:
        """`costs`: what decisions are made of; `cache`: as if experts were prefetched to it (see
        cache.py). Raises InputError for an unknown policy."""
        if policy not in (known := [p.value for p in Policy]):
            raise InputError(f"policy is {policy!r}, expected one of {', '.join(known)}")
        self.subject, self.timing = subject, timing
        self.gpu = Gpu(timing.link, keep)
        self.placement = Placement(subject, costs, Policy(policy))
        self.link = LinkQueue(self)
        self.cache = CachePrefetch(cache, costs.cpu_expert) if cache else None
        self.instrs: list[InstrRecord] | None = [] if keep else None
        self.step: Step
        self.layer = -1  # that runs
        self.wants_routes: Op | None = None  # behind the copies that recompile reads
        self.bound: Bound | None = None
        self.launches = False  # what is sent from now on is launched as it is sent

    def run(self, trace: RoutingTrace) -> Iterator[StepRecord]:
        """All steps, one after the other. Raises InputError for a trace of another model."""
        check_fits(self.subject, trace)
        for step in trace.steps():
            yield self.run_step(step)

    def run_step(self, step: Step) -> StepRecord:
        self.step = step
        phase = self.subject.phase_of(step.rows)
        begin, busy = self.gpu.now, self._busy()
        self._begin()
        prologue, *programs, epilogue = self.subject.sequences[phase]
        self._program(prologue)
        layers = [r for p in programs if (r := self._program(p)) is not None]
        if step.logits:
            self._program(epilogue)
        self.placement.end_step(self.link.end_step())
        self.gpu.drain()
        gpu, cpu, h2d = (after - before for before, after in zip(busy, self._busy(), strict=True))
        return StepRecord(phase, step.rows, begin, self.gpu.now, gpu, cpu, h2d, tuple(layers))

    def _busy(self) -> tuple[int, int, int]:
        return self.gpu.busy_ns[0], self.gpu.busy_ns[1], self.gpu.engines[H2D].busy

    def _begin(self) -> None:
        self.placement.begin_step()
        subject, step = self.subject, self.step
        self._small(H2D, 16 * subject.memory.max_rows, "rows")
        seqs = step.seq.tolist()
        for i, seq in enumerate(seqs):
            if not i or seq != seqs[i - 1]:
                self._small(H2D, subject.table_bytes, "block table")
        self._launch("rope", [step.rows], -1)

    def _program(self, program: Program) -> LayerRecord | None:
        begin = self.gpu.now
        known = begin
        self.layer, self.bound = program.layer, None
        for index, instr in enumerate(program.instrs):
            before = self.gpu.now
            experts = self._instr(program, instr)
            self.link.pump()
            if instr.opcode is Opcode.RECOMPILE:
                known = self.gpu.now
            if self.instrs is not None:
                self.instrs.append(
                    InstrRecord(
                        *(program.layer, index, instr.opcode, instr.queue),
                        *(before, self.gpu.now, self.step.rows, experts),
                        self._decided() if instr.opcode is Opcode.RECOMPILE else {},
                    )
                )
        if self.bound is None:
            return None
        return self._layer(program.layer, self.bound, begin, known)

    def _layer(self, layer: int, bound: Bound, begin: int, known: int) -> LayerRecord:
        loads = self._loads(bound)
        late = len(bound.gpu) - bound.ready - loads
        return LayerRecord(
            *(layer, begin, known, self.gpu.now, bound.ready, late, loads, len(bound.cpu)),
            *(len(self.placement.ahead), bound.decision.why.mode.name.lower()),
        )

    def _decided(self) -> dict[str, int | str]:
        bound = self.bound
        assert bound is not None
        loads = self._loads(bound)
        return {
            "mode": bound.decision.why.mode.name.lower(),
            "on the GPU": bound.ready,
            "arriving": len(bound.gpu) - bound.ready - loads,
            "loaded": " ".join(f"e{load.expert}" for load in bound.decision.on[:loads]),
            "on the CPU": len(bound.cpu),
            "prefetched": " ".join(f"e{e}" for e in self.placement.ahead),
        }

    @staticmethod
    def _loads(bound: Bound) -> int:
        """On-demand loads that found a slot."""
        return min(len(bound.decision.on), len(bound.gpu) - bound.ready)

    # --- instructions ---

    def _instr(self, program: Program, instr: Instr) -> int:
        """Returns the experts that it names."""
        step, layer = self.step, program.layer
        match instr.opcode:
            case Opcode.RECOMPILE:
                self._wait_for_routes()
                self._recompile(program, instr)
            case Opcode.LOAD | Opcode.PREFETCH | Opcode.SYNC:
                pass  # recompile has queued what there is to send
            case Opcode.UNLOAD:
                return self.placement.unload(layer)
            case Opcode.EMBED:
                self._host_work("cpu.embed", [step.rows])
                self._small(H2D, 4 * step.rows * self.subject.hidden, "hidden")
            case Opcode.PREDICT:
                if not self.placement.prediction_pays(layer, program.phase):
                    return 0
                self._wait_for_routes()
                self._host_work("cpu.predict", [step.rows])
            case Opcode.EXPERT if instr.queue is Queue.CPU:
                assert self.bound is not None
                self._cpu_experts(self.bound.cpu, layer)
                return len(self.bound.cpu)
            case Opcode.EXPERT:
                assert instr.hole is not None
                return self._ready() if instr.hole.kind is HoleKind.R else self._late()
            case Opcode.GATE:
                self._launch("gate", [step.rows], layer)
                self._fetch_routes(program)
            case Opcode.COMBINE:
                self.link.flush()
                self._launch("combine", [step.rows], layer)
            case Opcode.LM_HEAD:
                self._launch("lm_head", [step.logits], layer)
                self._small(D2H, 4 * step.logits * self.subject.model.vocab, "logits")
            case Opcode.ATTENTION:
                context = int(step.position.sum()) // 1024
                self._launch("attention", [step.rows], layer, context)
            case Opcode.SHARED_EXPERT:
                self._launch("shared", [step.rows], layer)
            case other:
                self._launch(other.text, [step.rows], layer)
        return 0

    def _launch(self, name: str, tokens: list[int], layer: int, extra: int = 0) -> None:
        self.gpu.launch(self.timing.kernel(name, tokens, extra), name, layer)

    def _small(self, kind: int, size: int, name: str) -> None:
        """A copy in between kernels."""
        self.gpu.copy(kind, COMPUTE, size, name)

    def _cpu_experts(self, experts: Sequence[tuple[int, int]], layer: int) -> None:
        gpu, cache, saved = self.gpu, self.cache, 0
        if cache is not None:
            size = self.subject.expert_bytes[layer]
            saved = cache.save(experts, size, gpu.now, gpu.busy_ns[1])
        if experts:
            self._host_work("cpu.experts", [rows for _, rows in experts], saved)
        if cache is not None:
            cache.worked(gpu.now, gpu.busy_ns[1])

    def _host_work(self, name: str, tokens: list[int], saved: int = 0) -> None:
        timing = self.timing
        alone, busy = timing.host(name, tokens), timing.host_busy(name, tokens)
        self.gpu.begin_host_work(alone - saved, busy - saved)
        while (end := self.gpu.host_end) is not None:
            self.gpu.pass_time(end)
            self.link.pump()

    def _fetch_routes(self, program: Program) -> None:
        subject, rows = self.subject, self.step.rows
        for _ in ("experts", "weights"):
            self._small(D2H, 4 * rows * program.top_k, "routes")
        self._small(D2H, subject.act_bytes * rows * subject.hidden, "rows of experts")
        if self.placement.predicts:
            self._small(D2H, 4 * rows * subject.hidden, "rows of predict")
        self.wants_routes = self.gpu.record(COMPUTE)

    def _wait_for_routes(self) -> None:
        if self.wants_routes is not None:
            routed, self.wants_routes = self.wants_routes, None
            self.wait(routed)

    def wait(self, record: Op) -> None:
        """Meanwhile copies go on."""
        while not record.done:
            self.link.pump()
            self.gpu.pass_time()

    def _recompile(self, program: Program, instr: Instr) -> None:
        ahead = next((h.capacity for h in instr.binds if h.kind is HoleKind.N), 0)
        self.launches = False
        self.bound = self.placement.recompile(
            program.layer, program.phase, self.step, ahead, self.link
        )
        if self.cache is not None:
            self.cache.decided(self.placement.left, self.step.rows)
        if self.bound.gpu:
            self._small(H2D, 4 * self.step.rows * program.top_k, "rows by expert")

    # --- experts on the GPU ---

    def _ready(self) -> int:
        """Those that are there, in one submission."""
        assert self.bound is not None
        holes = self.bound.gpu[: self.bound.ready]
        self._submit(holes)
        return len(holes)

    def _late(self) -> int:
        """Those on their way: each behind its copy, now or when that is sent."""
        bound = self.bound
        assert bound is not None
        late = bound.gpu[bound.ready :]
        for hole in late[: bound.sent]:
            self._launch_late(hole)
        self.launches = True
        return len(late)

    def _launch_late(self, hole: Hole) -> None:
        assert hole.slot is not None
        self.gpu.wait_event(COMPUTE, self.link.ready.get(hole.slot))
        self._submit([hole])

    def _submit(self, holes: list[Hole]) -> None:
        if not holes:
            return
        self._launch("experts", [h.rows for h in holes], self.layer)
        for hole in holes:
            if hole.slot is not None:
                self.link.freed[hole.slot] = self.gpu.record(COMPUTE)

    def sent(self, hole: Hole) -> None:
        """Its copy is queued: it is computed behind it."""
        if self.launches:
            self._launch_late(hole)
        else:
            assert self.bound is not None
            self.bound.sent += 1  # what is there already goes first


class LinkQueue:
    """Copies of experts in chunks, few at a time: those on demand first; what is not out yet can be
    cancelled."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.gpu = executor, executor.gpu
        self.sizes = executor.subject.expert_bytes
        self.demand: deque[Transfer] = deque()
        self.spec: deque[Transfer] = deque()
        self.chunks: deque[Op] = deque()  # behind each chunk that is out
        self.ready: dict[int, Op] = {}  # by slot: behind the last chunk of its copy
        self.freed: dict[int, Op] = {}  # and behind the last kernel that reads it

    def recall(self) -> list[Transfer]:
        out = list(self.spec)
        self.spec.clear()
        return out

    def load(self, transfer: Transfer) -> None:
        self.demand.append(transfer)

    def prefetch(self, transfer: Transfer) -> None:
        self.spec.append(transfer)

    def arrived(self, slot: int) -> bool:
        record = self.ready.get(slot)
        return record is None or record.done

    def pump(self) -> None:
        while self.chunks and self.chunks[0].done:
            self.chunks.popleft()
        while len(self.chunks) < IN_FLIGHT and (self.demand or self.spec):
            if self.demand and self.demand[0].again and not self.executor.launches:
                return  # what was in the slot is launched before its next copy waits for it
            self._send(self.demand or self.spec)

    def _send(self, queue: deque[Transfer]) -> None:
        t = queue[0]
        size = self.sizes[t.layer]
        n = min(size - t.issued, CHUNK)
        if not t.issued:
            self.gpu.wait_event(COPIES, self.freed.get(t.slot))
        what = "load" if queue is self.demand else "prefetch"
        self.gpu.copy(H2D, COPIES, n, f"{what} e{t.expert}", t.layer)
        self.chunks.append(self.gpu.record(COPIES))
        t.issued += n
        if t.issued < size:
            return
        self.ready[t.slot] = self.gpu.record(COPIES)
        queue.popleft()
        if t.hole is not None:
            self.executor.sent(t.hole)

    def flush(self) -> None:
        """Sends all that was asked for on demand."""
        while True:
            self.pump()
            if not self.demand:
                return
            self.executor.wait(self.chunks[0])

    def end_step(self) -> list[Transfer]:
        """Returns the prefetches that were not sent whole; no chunk is waited for any more."""
        self.demand.clear()
        self.chunks.clear()
        return self.recall()


def check_fits(subject: Subject, trace: RoutingTrace, where: str = "routing trace") -> None:
    """InputError, naming the field, unless the trace is of a model with the plan's routing and of
    steps that it can take. `where`: its file."""
    gates = {i: x.gate.attrs for i, x in enumerate(subject.model.layers) if x.gate}
    layers = trace.layers.tolist()
    made = "record one with this model, or scale it (docs/routing-traces.md)"
    if layers != list(gates):
        raise InputError(
            f"{where}: layers: {len(layers)} of them, numbers {layers[0]} to {layers[-1]}, "
            f"but the plan has {len(gates)} MoE layers: {made}"
        )
    for number, gate in gates.items():
        if (trace.experts, trace.top_k) != (gate.experts, gate.top_k):
            raise InputError(
                f"{where}: pdscope_routing, ids: {trace.experts} experts, top-{trace.top_k}, but "
                f"layer {number} of the plan has {gate.experts}, top-{gate.top_k}: {made}"
            )
    most = subject.memory.max_rows
    if (largest := int(trace.rows.max())) > most:
        raise InputError(
            f"{where}: rows: a step of {largest} rows, but the plan takes at most {most}: record "
            "it with this plan, or recompile with a larger --max-rows"
        )
