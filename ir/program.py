"""Programs: what one layer does in one phase, as instructions with holes, slots and events.

Plain data: pdscope.ir.verify says which programs are right, pdscope.ir.text prints and parses them,
pdscope.ir.encode gives their binary form. May import nothing but pdscope.ir.isa.
"""

from dataclasses import dataclass
from typing import TypeAlias

from pdscope.ir.isa import (
    HoleKind,
    Kind,
    NormSite,
    Opcode,
    Phase,
    Queue,
    ScaleDtype,
    SlotKind,
    Tier,
    WeightDtype,
)

# What an instruction waits for: i is the event of instruction i, a string an imported one ("hid").
Event: TypeAlias = int | str


@dataclass(frozen=True)
class WeightFormat:
    """Format of an expert's packed weights: element type, elements of K per scale (0: none),
    scale type."""

    dtype: WeightDtype
    group: int = 0
    scale: ScaleDtype = ScaleDtype.NONE


@dataclass(frozen=True)
class Hole:
    """Result of recompile: `?kind[capacity]`."""

    kind: HoleKind
    capacity: int


@dataclass(frozen=True)
class HoleRef:
    """Operand: entry `index` of a hole, or all of them (None, printed as [*])."""

    kind: HoleKind
    index: int | None = None


@dataclass(frozen=True)
class Slot:
    """Expert slots on a GPU: `resident` holds fixed experts (ascending ids), `cache` is a ring
    of `size` slots that all layers share by name."""

    name: str
    kind: SlotKind
    experts: tuple[int, ...] = ()  # resident
    size: int = 0  # cache
    device: int = 0
    fmt: WeightFormat | None = None  # None: the plan's own

    @property
    def count(self) -> int:
        """Expert slots that it takes."""
        return len(self.experts) if self.kind is SlotKind.RESIDENT else self.size


@dataclass(frozen=True)
class Instr:
    """One instruction. Only the fields that its opcode uses may differ from their defaults (rule
    V1)."""

    opcode: Opcode
    queue: Queue
    waits: tuple[Event, ...] = ()
    site: NormSite | None = None  # norm
    tokens: bool = False  # gate: reads token ids too
    predict: bool = False  # gate: predict is fused into it
    hole: HoleRef | None = None  # expert, load, prefetch, unload
    binds: tuple[Hole, ...] = ()  # recompile
    slots: tuple[str, ...] = ()  # expert, unload: from; load, prefetch: to
    stream: bool = False  # load, prefetch: one record for all entries
    llc: bool = False  # prefetch: to the CPU's last-level cache
    tier: Tier = Tier.HOST  # load, prefetch: where the expert is read
    device: int = 0  # load, prefetch, unload: GPU of the slots (gpuN queues name it themselves)
    fmt: WeightFormat | None = None  # expert, load, prefetch
    adapter: int | None = None  # expert; refused for now


@dataclass(frozen=True)
class Out:
    """Exported event: `@name = @event`."""

    name: str
    event: int


@dataclass(frozen=True)
class Program:
    """One layer (or prologue, epilogue) in one phase. rows_min..rows_max are the row counts it
    may run with."""

    kind: Kind
    phase: Phase
    rows_min: int
    rows_max: int
    instrs: tuple[Instr, ...]
    layer: int = -1  # -1: prologue, epilogue
    experts: int = 0  # routed experts of the layer; 0: no MoE layer
    top_k: int = 0
    shared: bool = False  # the layer has a shared expert
    streams: int = 1  # hyper-connection streams of the hidden state
    budget: int = 0  # expert slots of each GPU, over all layers
    ins: tuple[str, ...] = ()  # imported events
    tickets_in: tuple[str, ...] = ()  # caches whose tickets are imported, in the order of `slots`
    slots: tuple[Slot, ...] = ()
    outs: tuple[Out, ...] = ()
    tickets_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """ "prologue.decode", "l7.batch", "epilogue.prefill"."""
        phase = self.phase.name.lower()
        if self.kind in (Kind.PROLOGUE, Kind.EPILOGUE):
            return f"{self.kind.name.lower()}.{phase}"
        return f"l{self.layer}.{phase}"

    @property
    def file_stem(self) -> str:
        """Name of its text file in a plan: "prologue.decode", "layer007.batch"."""
        if self.kind in (Kind.PROLOGUE, Kind.EPILOGUE):
            return self.name
        return f"layer{self.layer:03d}.{self.phase.name.lower()}"

    def slot(self, name: str) -> Slot | None:
        for s in self.slots:
            if s.name == name:
                return s
        return None

    def line_of(self, index: int | None) -> int:
        """Line of instruction `index` in the printed text; the header's (1) for None."""
        if index is None:
            return 1
        return 2 + bool(self.ins or self.tickets_in) + len(self.slots) + index


def worst_case_experts(experts: int, top_k: int, rows: int) -> int:
    """Distinct experts that `rows` rows can activate."""
    return min(experts, top_k * rows)
