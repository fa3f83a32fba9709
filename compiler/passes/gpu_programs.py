"""GPU programs: attention, gate and shared experts on a GPU, routed experts where recompile puts
them: resident on the GPU, loaded or prefetched into a ring of slots, or on the CPU.

Only what may move is a hole; which experts are resident is fixed, as `slot %hot`. May import
pdscope.ir and pdscope.compiler.lowered.
"""

from dataclasses import dataclass

from pdscope.compiler.lowered import Layer, LoweredModel
from pdscope.ir.isa import PHASE_ROWS, HoleKind, Kind, NormSite, Opcode, Phase, Queue, SlotKind
from pdscope.ir.program import (
    Event,
    Hole,
    HoleRef,
    Instr,
    Out,
    Program,
    Slot,
    worst_case_experts,
)
from pdscope.ir.verify import verify_programs

HID = "hid"
HOT, RING = "hot", "ring"


@dataclass(frozen=True)
class ExpertSlots:
    """Who has a place on the GPU: `resident[l]`, ascending ids of layer l's experts that stay
    there (empty for a dense layer), and a ring of `ring` slots that all layers share."""

    resident: tuple[tuple[int, ...], ...]
    ring: int

    @property
    def count(self) -> int:
        """Expert slots in all."""
        return sum(len(r) for r in self.resident) + self.ring


def gpu_programs(model: LoweredModel, slots: ExpertSlots, max_rows: int) -> list[Program]:
    """Programs for steps of 1 to `max_rows` rows, in the order of program.bin, verified.

    Raises PlanError if one of them breaks a rule of the verifier.
    """
    out: list[Program] = []
    for phase, (first, last) in PHASE_ROWS.items():
        if first <= max_rows:
            out += _phase(model, slots, phase, first, min(last, max_rows))
    verify_programs(out)
    return out


def _phase(
    model: LoweredModel, slots: ExpertSlots, phase: Phase, first: int, last: int
) -> list[Program]:
    prologue = Program(
        Kind.PROLOGUE, phase, first, last, (Instr(Opcode.EMBED, Queue.CPU),), outs=(Out(HID, 0),)
    )
    layers = [
        _LayerProgram(model, slots, i, phase, first, last).program()
        for i in range(len(model.layers))
    ]
    head = (
        Instr(Opcode.NORM, Queue.GPU0, (HID,), site=NormSite.FINAL),
        Instr(Opcode.LM_HEAD, Queue.GPU0, (0,)),
    )
    epilogue = Program(
        Kind.EPILOGUE, phase, first, last, head, ins=(HID,), outs=(Out("logits", 1),)
    )
    return [prologue, *layers, epilogue]


class _LayerProgram:
    def __init__(
        self,
        model: LoweredModel,
        slots: ExpertSlots,
        index: int,
        phase: Phase,
        first: int,
        last: int,
    ) -> None:
        self.model, self.slots, self.index = model, slots, index
        self.phase, self.first, self.last = phase, first, last
        self.layer: Layer = model.layers[index]
        self.instrs: list[Instr] = []

    def add(
        self, opcode: Opcode, *waits: Event, queue: Queue = Queue.GPU0, **fields: object
    ) -> int:
        self.instrs.append(Instr(opcode, queue, waits, **fields))  # type: ignore[arg-type]
        return len(self.instrs) - 1

    def program(self) -> Program:
        normed = self.add(Opcode.NORM, HID, site=NormSite.ATTN)
        attention = self.add(Opcode.ATTENTION, normed)
        normed = self.add(Opcode.NORM, attention, site=NormSite.MLP)
        if self.layer.gate is None:
            done = self.add(Opcode.MLP, normed)
            return self._of(Kind.DENSE, done)
        return self._moe(normed)

    def _moe(self, normed: int) -> Program:
        assert self.layer.gate is not None
        experts, top_k = self.layer.gate.attrs.experts, self.layer.gate.attrs.top_k
        resident, ring = self.slots.resident[self.index], self.slots.ring
        host_only = worst_case_experts(experts - len(resident), top_k, self.last)
        ahead = min(ring, self._predicted())

        gate = self.add(Opcode.GATE, normed)
        known = [gate]
        if ahead:
            known.append(self.add(Opcode.PREDICT, gate, queue=Queue.CPU))  # nets read routes too
        holes = []
        on_gpu = worst_case_experts(min(experts, len(resident) + ring), top_k, self.last)
        if on_gpu:
            holes.append(Hole(HoleKind.R, on_gpu))
        if ring and host_only:
            holes.append(Hole(HoleKind.L, host_only))
        if host_only:
            holes.append(Hole(HoleKind.C, host_only))
        if ahead:
            holes.append(Hole(HoleKind.N, ahead))
        if ring:
            holes.append(Hole(HoleKind.U, min(ring, experts)))
        bound = self.add(Opcode.RECOMPILE, *known, queue=Queue.HOST, binds=tuple(holes))

        # What the GPU and the link do is issued first: the CPU's experts keep the driver busy.
        ready: list[Event] = []
        places = ((HOT,) if resident else ()) + ((RING,) if ring else ())
        loads = bool(ring and host_only)
        if loads:
            load = self.add(
                Opcode.LOAD,
                bound,
                queue=Queue.H2D_DEMAND,
                hole=HoleRef(HoleKind.L),
                slots=(RING,),
                stream=True,
            )
        if ahead:
            self.add(
                Opcode.PREFETCH,
                bound,
                queue=Queue.H2D_SPEC,
                hole=HoleRef(HoleKind.N),
                slots=(RING,),
                stream=True,
            )
        if on_gpu:
            ready.append(self.add(Opcode.EXPERT, bound, hole=HoleRef(HoleKind.R), slots=places))
        if loads:
            ready.append(self.add(Opcode.EXPERT, load, hole=HoleRef(HoleKind.L), slots=(RING,)))
        if self.layer.shared is not None:
            ready.append(self.add(Opcode.SHARED_EXPERT, normed))
        if host_only:
            ready.append(self.add(Opcode.EXPERT, bound, queue=Queue.CPU, hole=HoleRef(HoleKind.C)))
        done = self.add(Opcode.COMBINE, *ready)
        if ring:
            self.add(Opcode.UNLOAD, done, queue=Queue.HOST, hole=HoleRef(HoleKind.U), slots=(RING,))
        return self._of(Kind.MOE, done, experts, top_k)

    def _predicted(self) -> int:
        """Experts of the layer right behind this one, if this one predicts them."""
        predictor = self.layer.predictor
        if predictor is None or predictor.target != self.index + 1:
            return 0
        gate = self.model.layers[predictor.target].gate
        assert gate is not None
        return gate.attrs.experts

    def _of(self, kind: Kind, done: int, experts: int = 0, top_k: int = 0) -> Program:
        slots: tuple[Slot, ...] = ()
        tickets: tuple[str, ...] = ()
        if kind is Kind.MOE:
            resident = self.slots.resident[self.index]
            if resident:
                slots += (Slot(HOT, SlotKind.RESIDENT, experts=resident),)
            if self.slots.ring:
                slots += (Slot(RING, SlotKind.CACHE, size=self.slots.ring),)
                tickets = (RING,)
        return Program(
            kind,
            self.phase,
            self.first,
            self.last,
            tuple(self.instrs),
            layer=self.index,
            experts=experts,
            top_k=top_k,
            shared=kind is Kind.MOE and self.layer.shared is not None,
            budget=self.slots.count if kind is Kind.MOE else 0,
            ins=(HID,),
            tickets_in=tickets,
            slots=slots,
            outs=(Out(HID, done),),
            tickets_out=tickets,
        )
