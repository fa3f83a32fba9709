"""The verifier: which programs are right. Each rule has a number; they are checked in numerical
order, and the first broken one is reported as `program:line: Vn: message`, the line being that
of the printed program. The C runtime applies the same rules when it loads a plan
(runtime_c/src/verify.c).

What may be assumed of the order: instruction i runs after the events it waits for, and after
nothing else. Order in the text or in a queue implies nothing about data. "Before" below means
before along waits.

V1   Operands fit the instruction table: opcode in its kind of program and on its queue, the
     operands it needs and no others, numbers in range, slots of the same device and format; no
     adapter. A program imports @hid, a prologue nothing.
V2   Each event is signalled by one instruction; waits name earlier or imported events, each once.
V3   A slot is read only under its ready ticket: ?r reads resident slots, and caches whose tickets
     are imported; ?l reads caches that every load of the same entries fills before.
V4   A slot is filled or given up only under its tickets: load, prefetch and unload need the cache's
     imported.
V5   Resident slots are never written and never given up.
V6   Slots fit: no empty cache, no expert resident twice, on each device no more slots than the
     budget (over all layers of a phase), ?n no larger than the caches it goes to, ?u no larger than
     all caches.
V7   Holes are bound once, before use, with capacity 1 to experts (?n ?p ?u: to 1024), an index
     stays below the capacity, and every entry is used exactly once: ?l by a load and an expert, ?r
     and ?c by an expert, ?n and ?p by a prefetch, ?u by an unload; ?r, ?l, ?n and ?u so for each
     slot that they may be bound to.
V8   Every expert has a place in the worst case: ?c has capacity for min(experts that are not
     resident, top_k * rows), ?r for min(resident experts, top_k * rows).
V9   combine comes after every expert.
V10  What others need reaches `out`: one event (@hid; @logits of an epilogue), not a sync's, that
     comes after all that touches buffers; tickets of every cache that is imported, filled or given
     up. So no sync ends a program.
V11  Nothing reads a slot after unload: every expert and on-demand load of the cache comes before
     it.
V12  Programs fit together: prologue, layers in order, epilogue; what one imports the one before
     exports; ?n is followed by a layer with experts, which reads ?n's caches through ?r; ?p by such
     a layer, with nothing but dense ones between; caches of one name are one cache; the phases are
     of one model and cover all row counts up to the largest.
V13  Of two instructions that use the same buffer, one of them writing, one comes before the other;
     every instruction comes after the imported event. Experts write different parts of expert_out
     (V7).
V14  No buffer is read unless it was written before, imported, or is persistent (kv, draft).
V15  A program has each part of its kind once (norm attn, attention, norm mlp, then mlp, or gate,
     recompile, combine and, if there is one, the shared expert; embed; norm final, lm_head), in the
     model's order.
V16  Tickets cannot deadlock: entries that a stream loads are read as ?l[*], in the order of the
     hole, and what their reader waits for, along waits and queues, is no transfer behind the stream
     in its queue. (An entry is filled when an earlier program, or the reader of an earlier entry of
     the same slot, has freed its slot.)

From this follows that buffers, slots and results do not depend on the order chosen: every read
of a buffer has one last write before it (V13, V14), every read of a slot one fill (V3, V4, V7,
V11), and a program's buffers are untouched by the programs around it (V10, V13). Slot bindings
are disjoint: recompile gives one slot to at most one of ?r, ?l and ?n, except that a stream may
reuse the slot of an earlier ?l entry.

May import pdscope.ir.isa, pdscope.ir.program and pdscope.errors.
"""

import re
from collections.abc import Iterable, Sequence

from pdscope.errors import PlanError
from pdscope.ir.isa import (
    GROUPS,
    MAX_DEVICES,
    MAX_EXPERTS,
    MAX_INSTRS,
    MAX_SLOT_OPERANDS,
    MAX_SLOTS,
    MAX_STREAMS,
    MAX_TOP_K,
    MAX_WAITS,
    NAME_BYTES,
    OPS,
    PERSISTENT,
    PHASE_ROWS,
    Buffer,
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
    mask,
)
from pdscope.ir.program import Instr, Program, Slot, WeightFormat, worst_case_experts

_SLOT_NAME = re.compile(rf"[a-z][a-z0-9_]{{0,{NAME_BYTES - 2}}}")
_TRANSFERS = (Opcode.LOAD, Opcode.PREFETCH, Opcode.UNLOAD)
_EXPERT_HOLES = (HoleKind.R, HoleKind.L, HoleKind.C)
_READS = {op: mask(info.reads) for op, info in OPS.items()}
_WRITES = {op: mask(info.writes) for op, info in OPS.items()}
_PERSISTENT = mask(PERSISTENT)

# Parts of each kind of program, once each. "gate" stands for itself and for the fused gate.
_PARTS: dict[Kind, tuple[tuple[Opcode, NormSite | None], ...]] = {
    Kind.PROLOGUE: ((Opcode.EMBED, None),),
    Kind.DENSE: (
        (Opcode.NORM, NormSite.ATTN),
        (Opcode.ATTENTION, None),
        (Opcode.NORM, NormSite.MLP),
        (Opcode.MLP, None),
    ),
    Kind.MOE: (
        (Opcode.NORM, NormSite.ATTN),
        (Opcode.ATTENTION, None),
        (Opcode.NORM, NormSite.MLP),
        (Opcode.GATE, None),
        (Opcode.RECOMPILE, None),
        (Opcode.COMBINE, None),
    ),
    Kind.EPILOGUE: ((Opcode.NORM, NormSite.FINAL), (Opcode.LM_HEAD, None)),
}


def _format_ok(fmt: WeightFormat | None) -> bool:
    if fmt is None:
        return True
    if fmt.dtype in (WeightDtype.FP32, WeightDtype.BF16):
        return fmt.group == 0 and fmt.scale is ScaleDtype.NONE
    return fmt.group in GROUPS and fmt.scale is not ScaleDtype.NONE


def effects(p: Program, i: Instr) -> tuple[int, int]:
    """Buffers that instruction i of p reads and writes, one bit each."""
    reads, writes = _READS[i.opcode], _WRITES[i.opcode]
    if i.predict:
        reads |= _READS[Opcode.PREDICT]
        writes |= _WRITES[Opcode.PREDICT]
    if i.opcode is Opcode.RECOMPILE and any(h.kind in (HoleKind.N, HoleKind.P) for h in i.binds):
        reads |= 1 << Buffer.PREDICTION
    if i.opcode is Opcode.COMBINE and p.shared:
        reads |= 1 << Buffer.SHARED_OUT
    return reads, writes


def ancestors(p: Program) -> list[int]:
    """For each instruction, those before it along waits: one bit each. Needs V2."""
    found: list[int] = []
    for i in p.instrs:
        bits = 0
        for w in i.waits:
            if isinstance(w, int):
                bits |= found[w] | 1 << w
        found.append(bits)
    return found


class _Verifier:
    def __init__(self, p: Program) -> None:
        self.p = p
        self.before: list[int] = []
        self.slots: dict[str, Slot] = {s.name: s for s in p.slots}
        self.caps: dict[HoleKind, int] = {}  # of the first recompile that binds the hole
        self.binder: dict[HoleKind, int] = {}
        for n, i in enumerate(p.instrs):
            for h in i.binds:
                self.caps.setdefault(h.kind, h.capacity)
                self.binder.setdefault(h.kind, n)

    def fail(self, rule: int, index: int | None, message: str) -> PlanError:
        return self.fail_at(rule, self.p.line_of(index), message)

    def fail_at(self, rule: int, line: int, message: str) -> PlanError:
        return PlanError(f"{self.p.name}:{line}: V{rule}: {message}")

    def run(self) -> None:
        self.v1_program()
        for n, i in enumerate(self.p.instrs):
            self.v1_instr(n, i)
        self.v2()
        self.before = ancestors(self.p)
        self.v3()
        self.v4()
        self.v5()
        self.v6()
        self.v7()
        self.v8()
        self.v9()
        self.v10()
        self.v11()
        self.v13()
        self.v14()
        self.v15()
        self.v16()

    # --- helpers ---

    def is_before(self, a: int, b: int) -> bool:
        return bool(self.before[b] >> a & 1)

    def users(self, op: Opcode, kind: HoleKind, slot: str | None = None) -> list[int]:
        """Instructions with opcode op and operand ?kind; those that name `slot`, if given."""
        return [
            n
            for n, i in enumerate(self.p.instrs)
            if i.opcode is op
            and i.hole is not None
            and i.hole.kind is kind
            and (slot is None or slot in i.slots)
        ]

    def covered_once(self, op: Opcode, kind: HoleKind, slot: str | None) -> bool:
        """Every entry of ?kind, of those bound to `slot`, is an operand of exactly one
        instruction `op`."""
        indices = [i.hole.index for n in self.users(op, kind, slot) if (i := self.p.instrs[n]).hole]
        if None in indices:
            return len(indices) == 1
        return len(indices) == self.caps[kind] and len(set(indices)) == len(indices)

    # --- rules ---

    def v1_program(self) -> None:
        p = self.p
        layered = p.kind in (Kind.DENSE, Kind.MOE)
        if (p.layer < 0) if layered else (p.layer != -1):
            raise self.fail(
                1, None, f"layer is {p.layer}, expected {'0 or more' if layered else '-1'}"
            )
        low, high = PHASE_ROWS[p.phase]
        if not low <= p.rows_min <= p.rows_max <= high:
            raise self.fail(
                1,
                None,
                f"rows are {p.rows_min} to {p.rows_max}, expected within {low} to {high} "
                f"in {p.phase.name.lower()}",
            )
        if p.kind is Kind.MOE:
            if not 1 <= p.experts <= MAX_EXPERTS:
                raise self.fail(1, None, f"experts is {p.experts}, expected 1 to {MAX_EXPERTS}")
            if not 1 <= p.top_k <= min(p.experts, MAX_TOP_K):
                most = min(p.experts, MAX_TOP_K)
                raise self.fail(1, None, f"top_k is {p.top_k}, expected 1 to {most}")
        elif p.experts or p.top_k or p.shared or p.slots or p.budget:
            raise self.fail(1, None, "only a MoE layer has experts, slots and a budget")
        if not 1 <= p.streams <= MAX_STREAMS:
            raise self.fail(1, None, f"streams is {p.streams}, expected 1 to {MAX_STREAMS}")
        if not 1 <= len(p.instrs) <= MAX_INSTRS or len(p.slots) > MAX_SLOTS:
            raise self.fail(
                1, None, f"expected 1 to {MAX_INSTRS} instructions and at most {MAX_SLOTS} slots"
            )
        if p.ins != (() if p.kind is Kind.PROLOGUE else ("hid",)):
            raise self.fail(
                1, None, "a prologue imports no event, every other program imports @hid alone"
            )
        for n, s in enumerate(p.slots):
            self.v1_slot(p.line_of(0) - len(p.slots) + n, n, s)
        for tickets in (p.tickets_in, p.tickets_out):
            if list(tickets) != [s.name for s in p.slots if s.name in tickets]:
                raise self.fail(1, None, "tickets must name slots, once and in the slots' order")
            if any(self.slots[t].kind is SlotKind.RESIDENT for t in tickets):
                raise self.fail(1, None, "a resident slot has no tickets")

    def v1_slot(self, line: int, n: int, s: Slot) -> None:
        if not _SLOT_NAME.fullmatch(s.name) or s.name in [x.name for x in self.p.slots[:n]]:
            raise self.fail_at(1, line, f"slot name %{s.name} is malformed or used twice")
        if not 0 <= s.device < MAX_DEVICES or not _format_ok(s.fmt):
            raise self.fail_at(1, line, f"slot %{s.name} has an unknown device or weight format")
        if s.kind is SlotKind.CACHE:
            return
        e = s.experts
        if (
            not e
            or e[0] < 0
            or e[-1] >= self.p.experts
            or any(a >= b for a, b in zip(e, e[1:], strict=False))
        ):
            raise self.fail_at(
                1, line, f"resident experts must ascend and lie below {self.p.experts}"
            )

    def v1_instr(self, n: int, i: Instr) -> None:
        info = OPS[i.opcode]
        name = i.opcode.text
        if self.p.kind not in info.kinds:
            raise self.fail(1, n, f"{name} does not belong in a {self.p.kind.name.lower()} program")
        if i.queue not in info.queues:
            raise self.fail(1, n, f"{name} cannot run on queue {i.queue.text}")
        final = self.p.kind is Kind.EPILOGUE
        if i.opcode is Opcode.NORM and (i.site is None or (i.site is NormSite.FINAL) != final):
            raise self.fail(1, n, "norm must be attn or mlp in a layer, final in an epilogue")
        if (i.hole.kind if i.hole else None) not in (info.holes or (None,)):
            expected = ", ".join(h.text for h in info.holes) or "none"
            raise self.fail(1, n, f"{name} has the wrong hole operand, expected {expected}")
        kinds = [h.kind for h in i.binds]
        if bool(kinds) != (i.opcode is Opcode.RECOMPILE) or kinds != sorted(set(kinds)):
            raise self.fail(
                1, n, "recompile, and nothing else, binds holes, in the order r l c n p u"
            )
        self.v1_operands(n, i)

    def v1_operands(self, n: int, i: Instr) -> None:
        hole = i.hole.kind if i.hole else None
        whole = i.hole is not None and i.hole.index is None
        stream = llc = False
        least = most = 0
        if i.opcode is Opcode.EXPERT:
            if (hole is HoleKind.C) != (i.queue is Queue.CPU):
                raise self.fail(1, n, "?c runs on queue cpu, ?r and ?l on a GPU's queue")
            if hole is not HoleKind.C:
                least, most = 1, MAX_SLOT_OPERANDS
        elif i.opcode is Opcode.LOAD or hole is HoleKind.N:
            least = most = 1
            stream = whole
        elif hole is HoleKind.P:
            llc = True
        elif i.opcode is Opcode.UNLOAD:
            least, most = 1, MAX_SLOT_OPERANDS
        if i.opcode is Opcode.PREFETCH and (hole is HoleKind.N) != (i.queue is Queue.H2D_SPEC):
            raise self.fail(1, n, "?n goes to a slot on queue h2d.spec, ?p to llc on queue aux")
        if not least <= len(i.slots) <= most:
            raise self.fail(1, n, f"{len(i.slots)} slots named, expected {least} to {most}")
        if i.stream != stream or i.llc != llc:
            raise self.fail(
                1,
                n,
                "a transfer of [*] to a slot is a stream, of one entry is not; only ?p goes to llc",
            )
        if (i.tokens or i.predict) and i.opcode is not Opcode.GATE:
            raise self.fail(1, n, "tokens and predict belong to gate")
        if i.site is not None and i.opcode is not Opcode.NORM:
            raise self.fail(1, n, "a place belongs to norm")
        device = i.device if i.queue.gpu is None else i.queue.gpu
        if i.device and (i.opcode not in _TRANSFERS or not i.slots):
            raise self.fail(1, n, "only a transfer to or from slots has a device attribute")
        for k, name in enumerate(i.slots):
            slot = self.slots.get(name)
            if slot is None or name in i.slots[:k]:
                raise self.fail(1, n, f"slot %{name} is not declared, or named twice")
            if slot.device != device:
                raise self.fail(1, n, f"slot %{name} is on device {slot.device}, not {device}")
            if i.opcode is not Opcode.UNLOAD and slot.fmt != i.fmt:
                raise self.fail(1, n, f"the weight format is not that of slot %{name}")
        moves = i.opcode in (Opcode.LOAD, Opcode.PREFETCH)
        if i.tier is not Tier.HOST and not moves:
            raise self.fail(1, n, "only a load or prefetch has a tier attribute")
        if (i.fmt is not None and not moves and i.opcode is not Opcode.EXPERT) or not _format_ok(
            i.fmt
        ):
            raise self.fail(
                1, n, "a weight format must be known, and belongs to experts and transfers"
            )
        if i.adapter is not None:
            raise self.fail(1, n, f"adapter {i.adapter} is set, but adapters are not supported")

    def v2(self) -> None:
        for n, i in enumerate(self.p.instrs):
            if len(i.waits) > MAX_WAITS or len(set(i.waits)) != len(i.waits):
                raise self.fail(2, n, f"waits must name at most {MAX_WAITS} events, each once")
            for w in i.waits:
                if isinstance(w, str):
                    if w not in self.p.ins:
                        raise self.fail(2, n, f"waits for @{w}, which is not imported")
                elif not 0 <= w < n:
                    raise self.fail(2, n, f"waits for @{w}, which is not an earlier event")

    def v3(self) -> None:
        for n, i in enumerate(self.p.instrs):
            if i.opcode is not Opcode.EXPERT or i.hole is None:
                continue
            for name in i.slots:
                if i.hole.kind is HoleKind.R:
                    if self.slots[name].kind is SlotKind.CACHE and name not in self.p.tickets_in:
                        raise self.fail(3, n, f"reads %{name}, whose tickets are not imported")
                elif not self.filled(n, i.hole.index, name):
                    raise self.fail(
                        3, n, f"reads ?l from %{name} without waiting for the loads that fill it"
                    )

    def filled(self, reader: int, index: int | None, slot: str) -> bool:
        """The loads to `slot` of the entries that `reader` reads exist, and all of them come
        before it."""
        if self.slots[slot].kind is SlotKind.RESIDENT:
            return False
        found: set[int | None] = set()
        for n in self.users(Opcode.LOAD, HoleKind.L, slot):
            hole = self.p.instrs[n].hole
            assert hole is not None
            if index is None or hole.index is None or hole.index == index:
                if not self.is_before(n, reader):
                    return False
                found.add(hole.index)
        if None in found:
            return True
        if index is not None:
            return index in found
        cap = self.caps.get(HoleKind.L, 0)
        return cap > 0 and len([k for k in found if k is not None and k < cap]) == cap

    def v4(self) -> None:
        for n, i in enumerate(self.p.instrs):
            for name in i.slots if i.opcode in _TRANSFERS else ():
                if self.slots[name].kind is SlotKind.CACHE and name not in self.p.tickets_in:
                    raise self.fail(
                        4, n, f"{i.opcode.text} of %{name}, whose tickets are not imported"
                    )

    def v5(self) -> None:
        for n, i in enumerate(self.p.instrs):
            for name in i.slots if i.opcode in _TRANSFERS else ():
                if self.slots[name].kind is SlotKind.RESIDENT:
                    raise self.fail(5, n, f"{i.opcode.text} of the resident slot %{name}")

    def v6(self) -> None:
        p = self.p
        seen: set[int] = set()
        for n, s in enumerate(p.slots):
            line = p.line_of(0) - len(p.slots) + n
            if s.count < 1:
                raise self.fail_at(6, line, f"cache %{s.name} has no slot")
            if seen & set(s.experts):
                raise self.fail_at(6, line, f"e{min(seen & set(s.experts))} is resident twice")
            seen |= set(s.experts)
        for device in range(MAX_DEVICES):
            used = sum(s.count for s in p.slots if s.device == device)
            if used > p.budget:
                raise self.fail(
                    6, None, f"{used} slots on device {device}, the budget is {p.budget}"
                )
        fed = {s for n in self.users(Opcode.PREFETCH, HoleKind.N) for s in p.instrs[n].slots}
        caches = {s.name for s in p.slots if s.kind is SlotKind.CACHE}
        for kind, names in ((HoleKind.N, fed), (HoleKind.U, caches)):
            room = sum(self.slots[s].size for s in names)
            if self.caps.get(kind, 0) > room:
                raise self.fail(
                    6,
                    self.binder[kind],
                    f"{kind.text}[{self.caps[kind]}] exceeds {room} cache slots",
                )

    def v7(self) -> None:
        p = self.p
        for n, i in enumerate(p.instrs):
            for h in i.binds:
                most = p.experts if h.kind in _EXPERT_HOLES else MAX_EXPERTS
                if not 1 <= h.capacity <= most:
                    raise self.fail(
                        7, n, f"capacity of {h.kind.text} is {h.capacity}, expected 1 to {most}"
                    )
                if self.binder[h.kind] != n:
                    raise self.fail(7, n, f"{h.kind.text} is bound twice")
        for n, i in enumerate(p.instrs):
            if i.hole is None:
                continue
            kind = i.hole.kind
            if kind not in self.binder or not self.is_before(self.binder[kind], n):
                raise self.fail(7, n, f"{kind.text} is not bound before this use")
            if i.hole.index is not None and i.hole.index >= self.caps[kind]:
                raise self.fail(
                    7, n, f"{kind.text}[{i.hole.index}] is beyond its capacity {self.caps[kind]}"
                )
        for kind in HoleKind:
            if kind in self.binder:
                self.v7_uses(kind)

    def v7_uses(self, kind: HoleKind) -> None:
        p = self.p
        ops = {
            HoleKind.R: (Opcode.EXPERT,),
            HoleKind.L: (Opcode.LOAD, Opcode.EXPERT),
            HoleKind.C: (Opcode.EXPERT,),
            HoleKind.N: (Opcode.PREFETCH,),
            HoleKind.P: (Opcode.PREFETCH,),
            HoleKind.U: (Opcode.UNLOAD,),
        }[kind]
        users = [n for op in ops for n in self.users(op, kind)]
        named = {s for n in users for s in p.instrs[n].slots}
        if kind is HoleKind.R:
            named |= {s.name for s in p.slots if s.kind is SlotKind.RESIDENT}
        by_slot = kind not in (HoleKind.C, HoleKind.P)
        places: list[str | None] = (
            [s.name for s in p.slots if s.name in named] if by_slot else [None]
        )
        for op in ops:
            for place in places:
                if not self.covered_once(op, kind, place):
                    where = f" of %{place}" if place else ""
                    raise self.fail(
                        7,
                        self.binder[kind],
                        f"not every entry of {kind.text}{where} is used by exactly one {op.text}",
                    )
        if not users:
            raise self.fail(7, self.binder[kind], f"{kind.text} is bound but never used")

    def v8(self) -> None:
        p = self.p
        if p.kind is not Kind.MOE:
            return
        resident = sum(len(s.experts) for s in p.slots if s.kind is SlotKind.RESIDENT)
        for kind, experts in ((HoleKind.C, p.experts - resident), (HoleKind.R, resident)):
            need = worst_case_experts(experts, p.top_k, p.rows_max)
            if self.caps.get(kind, 0) < need:
                raise self.fail(
                    8,
                    self.binder.get(kind),
                    f"capacity of {kind.text} is {self.caps.get(kind, 0)}, "
                    f"the worst case needs {need}",
                )

    def v9(self) -> None:
        experts = [n for n, i in enumerate(self.p.instrs) if i.opcode is Opcode.EXPERT]
        for n, i in enumerate(self.p.instrs):
            for e in experts if i.opcode is Opcode.COMBINE else ():
                if not self.is_before(e, n):
                    raise self.fail(9, n, f"combine does not wait for the experts of @{e}")

    def v10(self) -> None:
        p = self.p
        end = p.line_of(len(p.instrs))
        name = "logits" if p.kind is Kind.EPILOGUE else "hid"
        if len(p.outs) != 1 or p.outs[0].name != name:
            raise self.fail_at(10, end, f"expected one event in `out`: @{name}")
        out = p.outs[0].event
        if not 0 <= out < len(p.instrs) or p.instrs[out].opcode is Opcode.SYNC:
            raise self.fail_at(10, end, f"@{name} = @{out}: no such event, or a sync's")
        for n, i in enumerate(p.instrs):
            if i.opcode in _TRANSFERS:
                for slot in i.slots:
                    if slot not in p.tickets_out:
                        raise self.fail(10, n, f"the tickets of %{slot} do not reach `out`")
            elif n != out and not self.is_before(n, out):
                raise self.fail(10, n, f"@{n} does not reach @{name} = @{out}")
        for slot in p.tickets_in:
            if slot not in p.tickets_out:
                raise self.fail_at(10, end, f"the tickets of %{slot} do not reach `out`")

    def v11(self) -> None:
        for n, u in enumerate(self.p.instrs):
            if u.opcode is not Opcode.UNLOAD:
                continue
            for m, i in enumerate(self.p.instrs):
                if i.opcode in (Opcode.EXPERT, Opcode.LOAD) and set(i.slots) & set(u.slots):
                    if not self.is_before(m, n):
                        raise self.fail(
                            11, n, f"unload does not wait for @{m}, which uses the slots"
                        )

    def v13(self) -> None:
        p = self.p
        after_import: list[bool] = []
        all_effects = [effects(p, i) for i in p.instrs]
        for n, i in enumerate(p.instrs):
            after_import.append(any(isinstance(w, str) or after_import[w] for w in i.waits))
            if p.ins and not after_import[n]:
                raise self.fail(13, n, "nothing makes it wait for @hid")
            reads, writes = all_effects[n]
            for m in range(n):
                r, w = all_effects[m]
                clash = w & (reads | writes) | r & writes
                if i.opcode is Opcode.EXPERT and p.instrs[m].opcode is Opcode.EXPERT:
                    clash &= ~(1 << Buffer.EXPERT_OUT)
                if clash and not self.is_before(m, n):
                    first = Buffer((clash & -clash).bit_length() - 1).name.lower()
                    raise self.fail(13, n, f"uses {first} as @{m} does, without waiting for it")

    def v14(self) -> None:
        p = self.p
        given = _PERSISTENT | (1 << Buffer.HID if p.ins else 0)
        for n, i in enumerate(p.instrs):
            written = given
            for m in range(n):
                if self.is_before(m, n):
                    written |= effects(p, p.instrs[m])[1]
            missing = effects(p, i)[0] & ~written
            if missing:
                first = Buffer((missing & -missing).bit_length() - 1).name.lower()
                raise self.fail(14, n, f"reads {first}, which nothing before it writes")

    def v15(self) -> None:
        p = self.p
        where: dict[tuple[Opcode, NormSite | None], list[int]] = {}
        for n, i in enumerate(p.instrs):
            where.setdefault((i.opcode, i.site), []).append(n)
            if i.predict:
                where.setdefault((Opcode.PREDICT, None), []).append(n)
        shared = (Opcode.SHARED_EXPERT, None)
        limits = [(part, 1, 1) for part in _PARTS[p.kind]]
        limits.append((shared, int(p.shared), int(p.shared)))
        limits.append(((Opcode.PREDICT, None), 0, 1))
        for part, least, most in limits:
            found = where.get(part, [])
            text = part[0].text + (f" {part[1].name.lower()}" if part[1] is not None else "")
            if len(found) < least:
                raise self.fail(15, None, f"{text} is missing")
            if len(found) > most:
                raise self.fail(
                    15, found[most], f"{text} appears {len(found)} times, expected {most}"
                )
        norm_attn, norm_mlp = (Opcode.NORM, NormSite.ATTN), (Opcode.NORM, NormSite.MLP)
        chain = [
            (norm_attn, (Opcode.ATTENTION, None)),
            ((Opcode.ATTENTION, None), norm_mlp),
            (norm_mlp, (Opcode.MLP, None)),
            (norm_mlp, (Opcode.GATE, None)),
            (norm_mlp, (Opcode.PREDICT, None)),
            (norm_mlp, shared),
        ]
        for first, second in chain:
            if first in where and second in where:
                a, b = where[first][0], where[second][0]
                if not self.is_before(a, b):
                    raise self.fail(
                        15, b, f"{second[0].text} must come after {first[0].text} (@{a})"
                    )

    def v16(self) -> None:
        p = self.p
        behind: list[int] = []  # along waits and queues
        last: dict[Queue, int] = {}
        for n, i in enumerate(p.instrs):
            bits = 0
            for w in [*i.waits, *([last[i.queue]] if i.queue in last else [])]:
                if isinstance(w, int):
                    bits |= behind[w] | 1 << w
            behind.append(bits)
            last[i.queue] = n
        for n, load in enumerate(p.instrs):
            if load.opcode is not Opcode.LOAD or not load.stream:
                continue
            for m in self.users(Opcode.EXPERT, HoleKind.L, load.slots[0]):
                hole = p.instrs[m].hole
                if hole is not None and hole.index is not None:
                    raise self.fail(16, m, f"entries of the stream @{n} must be read as ?l[*]")
                for x in range(n + 1, m):
                    if p.instrs[x].queue is load.queue and behind[m] >> x & 1:
                        raise self.fail(
                            16,
                            m,
                            f"waits for @{x}, which stands behind the stream @{n} in its queue",
                        )


def verify(program: Program) -> None:
    """Raises PlanError("program:line: Vn: message") unless the program keeps every rule but V12."""
    _Verifier(program).run()


# --- V12: how programs fit together ---


def _fail(p: Program, rule: int, message: str) -> PlanError:
    return PlanError(f"{p.name}:1: V{rule}: {message}")


def _binds(p: Program, kind: HoleKind) -> int:
    return max((h.capacity for i in p.instrs for h in i.binds if h.kind is kind), default=0)


def _follows(p: Program, q: Program, later: Sequence[Program]) -> None:
    """q comes right after p, and `later` after q."""
    exported = {o.name for o in p.outs}
    if any(name not in exported for name in q.ins):
        raise _fail(q, 12, f"imports an event that {p.name} does not export")
    if (q.rows_min, q.rows_max, q.streams) != (p.rows_min, p.rows_max, p.streams):
        raise _fail(q, 12, f"rows or streams differ from those of {p.name}")
    for kind in (HoleKind.N, HoleKind.P):
        capacity, to = _binds(p, kind), q
        if kind is HoleKind.P:
            to = next((x for x in (q, *later) if x.kind is not Kind.DENSE), q)
        if capacity and (to.kind is not Kind.MOE or capacity > to.experts):
            raise _fail(
                p, 12, f"binds {kind.text}[{capacity}], but {to.name} has {to.experts} experts"
            )
    for i in p.instrs:
        if (
            i.opcode is Opcode.PREFETCH
            and i.slots
            and not any(
                j.opcode is Opcode.EXPERT
                and j.hole is not None
                and j.hole.kind is HoleKind.R
                and i.slots[0] in j.slots
                for j in q.instrs
            )
        ):
            raise _fail(p, 12, f"prefetches into %{i.slots[0]}, which {q.name} does not read as ?r")


def _shape(s: Slot) -> tuple[object, ...]:
    return (s.kind, s.size, s.device, s.fmt)


def verify_sequence(programs: Sequence[Program]) -> None:
    """V12 for the programs of one phase, in order, each of which `verify` accepts; and V6 over
    all layers."""
    if len(programs) < 2:
        raise PlanError("program:1: V12: a phase needs a prologue and an epilogue")
    last = len(programs) - 1
    caches: dict[str, Slot] = {}
    used = [0] * MAX_DEVICES
    budget: int | None = None
    for n, p in enumerate(programs):
        kinds = {0: (Kind.PROLOGUE,), last: (Kind.EPILOGUE,)}.get(n, (Kind.DENSE, Kind.MOE))
        if (
            p.kind not in kinds
            or p.phase is not programs[0].phase
            or (n not in (0, last) and p.layer != n - 1)
        ):
            raise _fail(
                p, 12, "out of order: expected prologue, layers from 0, epilogue of one phase"
            )
        if n:
            _follows(programs[n - 1], p, programs[n + 1 :])
        for s in p.slots:
            if s.kind is SlotKind.RESIDENT:
                used[s.device] += s.count
            elif s.name not in caches:
                caches[s.name] = s
                used[s.device] += s.count
            elif _shape(caches[s.name]) != _shape(s):
                raise _fail(p, 12, f"cache %{s.name} differs from that of an earlier layer")
        if p.kind is Kind.MOE:
            if budget is not None and budget != p.budget:
                raise _fail(p, 12, f"the budget is {p.budget}, that of earlier layers {budget}")
            budget = p.budget
        if max(used) > (budget or 0):
            raise _fail(p, 6, f"{max(used)} slots up to this layer, the budget is {budget or 0}")


def _same_model(p: Program, q: Program) -> None:
    """p and q are the same layer in two phases."""
    if (p.kind, p.layer, p.experts, p.top_k, p.shared, p.streams, p.budget) != (
        (q.kind, q.layer, q.experts, q.top_k, q.shared, q.streams, q.budget)
    ):
        raise _fail(q, 12, f"is of another layer than {p.name}")
    residents = [{(s.device, s.fmt, e) for s in x.slots for e in s.experts} for x in (p, q)]
    if residents[0] != residents[1]:
        raise _fail(q, 12, f"has other resident experts than {p.name}")
    for s in q.slots:
        if s.kind is SlotKind.CACHE:
            for t in p.slots:
                if t.name == s.name and _shape(t) != _shape(s):
                    raise _fail(q, 12, f"cache %{s.name} differs from that of {p.name}")


def verify_programs(programs: Iterable[Program]) -> None:
    """All rules for all programs of a plan, in the order of program.bin."""
    everything = list(programs)
    for p in everything:
        verify(p)
    phases = [[p for p in everything if p.phase is phase] for phase in Phase]
    phases = [x for x in phases if x]
    if not phases:
        raise PlanError("program:1: V12: there is no program")
    rows = 1
    for group in phases:
        verify_sequence(group)
        if group[0].rows_min != rows:
            raise _fail(group[0], 12, f"rows begin at {group[0].rows_min}, expected {rows}")
        rows = group[0].rows_max + 1
        if len(group) != len(phases[0]):
            raise _fail(group[0], 12, "the phases have different numbers of layers")
        for p, q in zip(phases[0], group, strict=True):
            _same_model(p, q)
