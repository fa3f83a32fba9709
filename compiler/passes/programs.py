"""Programs: one program per layer, phase and row bucket. With no GPU every expert is a ?c hole on
the CPU.

May import pdscope.ir and pdscope.compiler.{lowered,passmanager}.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pdscope.compiler.lowered import Layer, LoweredModel
from pdscope.compiler.passmanager import Workspace
from pdscope.ir.encode import encode
from pdscope.ir.graph import GateAttrs
from pdscope.ir.isa import PHASE_ROWS, HoleKind, Kind, NormSite, Opcode, Phase, Queue
from pdscope.ir.program import Event, Hole, HoleRef, Instr, Out, Program, worst_case_experts
from pdscope.ir.text import print_program
from pdscope.ir.verify import verify, verify_sequence

HID = "hid"
MOST_AHEAD = 64  # experts whose blocks are prefetched (PDS_AHEAD_RANGES of runtime_c/src/pool.h)


@dataclass(frozen=True)
class Schedule:
    """Programs of a CPU-only plan for steps of 1 to `max_rows` rows, verified and encoded."""

    model: LoweredModel
    max_rows: int

    name = "schedule"
    reads = ("graph.txt",)

    def inputs(self) -> Mapping[str, str]:
        return {"max_rows": str(self.max_rows)}

    def programs(self) -> list[Program]:
        """In execution order: for each phase the prologue, the layers, the epilogue."""
        out = []
        for phase, (first, last) in PHASE_ROWS.items():
            if first <= self.max_rows:
                out += self._phase(phase, first, min(last, self.max_rows))
        return out

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        """Writes programs/*.plan and program.bin. Raises PlanError if a program breaks a rule."""
        programs = self.programs()
        for p in programs:
            verify(p)
        for phase in Phase:
            sequence = [p for p in programs if p.phase is phase]
            if sequence:
                verify_sequence(sequence)
        written = [
            workspace.write(f"programs/{p.file_stem}.plan", print_program(p)) for p in programs
        ]
        written.append(workspace.write("program.bin", encode(programs)))
        return dict.fromkeys(written)

    def _phase(self, phase: Phase, first: int, last: int) -> list[Program]:
        embed = Instr(Opcode.EMBED, Queue.CPU)
        prologue = Program(Kind.PROLOGUE, phase, first, last, (embed,), outs=(Out(HID, 0),))
        layers = [
            _layer(i, layer, self._target(layer, phase), phase, first, last)
            for i, layer in enumerate(self.model.layers)
        ]
        head = (
            Instr(Opcode.NORM, Queue.CPU, (HID,), site=NormSite.FINAL),
            Instr(Opcode.LM_HEAD, Queue.CPU, (0,)),
        )
        epilogue = Program(
            Kind.EPILOGUE, phase, first, last, head, ins=(HID,), outs=(Out("logits", 1),)
        )
        return [prologue, *layers, epilogue]

    def _target(self, layer: Layer, phase: Phase) -> GateAttrs | None:
        """The gate of the layer whose experts `layer` predicts; in prefill, where every expert is
        hot, it does not."""
        if layer.predictor is None or phase is Phase.PREFILL:
            return None
        gate = self.model.layers[layer.predictor.target].gate
        assert gate is not None
        return gate.attrs


def _layer(
    index: int, layer: Layer, target: GateAttrs | None, phase: Phase, first: int, last: int
) -> Program:
    """`target`: the gate of the layer whose experts this one predicts."""
    instrs: list[Instr] = []

    def add(opcode: Opcode, *waits: Event, queue: Queue = Queue.CPU, **fields: object) -> int:
        instrs.append(Instr(opcode, queue, waits, **fields))  # type: ignore[arg-type]
        return len(instrs) - 1

    normed = add(Opcode.NORM, HID, site=NormSite.ATTN)
    attention = add(Opcode.ATTENTION, normed)
    normed = add(Opcode.NORM, attention, site=NormSite.MLP)
    if layer.gate is None:
        done = add(Opcode.MLP, normed)
        kind, experts, top_k = Kind.DENSE, 0, 0
    else:
        experts, top_k = layer.gate.attrs.experts, layer.gate.attrs.top_k
        gate = add(Opcode.GATE, normed, predict=target is not None)
        holes = [Hole(HoleKind.C, worst_case_experts(experts, top_k, last))]
        if target is not None:
            predicted = worst_case_experts(target.experts, target.top_k, last)
            holes.append(Hole(HoleKind.P, min(predicted, MOST_AHEAD)))
        bound = add(Opcode.RECOMPILE, gate, queue=Queue.HOST, binds=tuple(holes))
        ready: list[Event] = []
        if layer.shared is not None:
            ready.append(add(Opcode.SHARED_EXPERT, normed))
        computed = add(Opcode.EXPERT, bound, hole=HoleRef(HoleKind.C))
        ready.append(computed)
        if target is not None:  # behind the experts, which need the memory's bandwidth now
            add(
                Opcode.PREFETCH,
                computed,
                queue=Queue.AUX,
                hole=HoleRef(HoleKind.P),
                llc=True,
            )
        done = add(Opcode.COMBINE, *ready)
        kind = Kind.MOE
    return Program(
        kind,
        phase,
        first,
        last,
        tuple(instrs),
        layer=index,
        experts=experts,
        top_k=top_k,
        shared=layer.shared is not None,
        ins=(HID,),
        outs=(Out(HID, done),),
    )
