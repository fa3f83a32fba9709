"""Reference executor: runs a program over abstract buffers and slots, in a random order that its
waits allow.

It is what the verifier promises something about: for a program that `verify` accepts, `run`
gives the same outcome whatever `order` is. Values are fingerprints of what they were computed
from, so two different histories give different values. What must not be read is NaN: scratch
that nothing has written, a buffer while an instruction writes it, free and unloaded slots, slots
being filled.

Each instruction reads when it begins and writes when it ends; others run between. A transfer
moves one entry after the other, each under the free ticket of its slot; an expert instruction
computes one entry after the other, each under the ready ticket. A stream signals its event once
its bindings are fixed, a plain load when the copy is done. The program before is still running
until @hid is signalled, and the one after starts when the exported event is: both spoil every
buffer that is not handed over.

May import pdscope.ir.isa, pdscope.ir.program and pdscope.ir.verify (for `effects` alone).
"""

import math
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pdscope.ir.isa import Buffer, HoleKind, Kind, Opcode, SlotKind
from pdscope.ir.program import Event, Instr, Program
from pdscope.ir.verify import effects

NAN = math.nan
_SPOILT = 7.0  # what the next program leaves in a buffer
_MOST_ROWS = 48  # a scenario's rows are cut to this: more adds time, not cases

_Condition = Callable[[], bool]
_Task = Iterator[_Condition]  # yields what it waits for before it goes on


class Deadlock(Exception):
    """Some instructions can never run."""


@dataclass(frozen=True)
class Outcome:
    """What a run left behind: equal for equal results. `finite`: no NaN in what the program
    hands on."""

    state: str
    finite: bool


@dataclass
class _Slot:
    content: float  # NaN: free, or being filled
    ready: int  # tickets: number of the last fill that is done,
    free: int  # and of the last fill whose reader is done
    bound: int  # number of the last fill that was bound; logical, known ahead of its completion
    holds: tuple[str, int] | None  # logical: ("own" | "next" | "other", expert)


@dataclass
class _Entry:
    """One bound hole."""

    expert: int
    routes: list[tuple[int, int]] = field(default_factory=list)  # (row, rank)
    slot: tuple[str, int] | None = None
    fill: int = 0  # number of the fill that it reads or makes
    release: bool = False  # its slot is filled again by a later entry: free it after use
    whose: str = "own"


def _mix(*parts: object) -> float:
    """A fingerprint in (0, 1); NaN if any part is."""
    if any(isinstance(x, float) and math.isnan(x) for x in parts):
        return NAN
    return (zlib.crc32(repr(parts).encode()) + 1) / (2**32 + 2)


def _always() -> bool:
    return True


def _reached(slot: _Slot, ready: int, free: int = 0) -> _Condition:
    return lambda: slot.ready >= ready and slot.free >= free


class _Run:
    def __init__(self, program: Program, scenario: int, order: int, queues: bool) -> None:
        self.p = program
        self.seed = scenario
        self.order = random.Random(order)
        self.queues = queues
        rng = random.Random(scenario)
        most = min(program.rows_max, max(program.rows_min, _MOST_ROWS))
        self.rows = rng.choice((program.rows_min, most, rng.randint(program.rows_min, most)))
        self.keep_on_gpu = rng.choice((0.0, 0.5, 1.0))  # chance to use a cached expert
        self.load_chance = rng.choice((0.0, 0.5, 1.0))
        self.given = {b: _mix("before", b.name, scenario) for b in Buffer}
        self.buffers = dict.fromkeys(Buffer, NAN)
        for b in (Buffer.KV, Buffer.DRAFT):
            self.buffers[b] = self.given[b]
        self.expert_out: dict[tuple[int, int], float] = {}
        self.holes: dict[HoleKind, list[_Entry]] = {}
        self.slots: dict[tuple[str, int], _Slot] = {}
        self.fired: set[Event] = set()
        self.finished: set[int] = set()
        self.snapshot: str | None = None
        self.finite = False
        self.tasks: list[_Task] = []
        self.fill_slots(rng)

    def weight(self, whose: str, expert: int) -> float:
        return _mix("weight", whose, expert)

    # --- the state that earlier programs left ---

    def fill_slots(self, rng: random.Random) -> None:
        for s in self.p.slots:
            if s.kind is SlotKind.RESIDENT:
                for k, e in enumerate(s.experts):
                    self.slots[s.name, k] = _Slot(self.weight("own", e), 1, 0, 1, ("own", e))
                continue
            own = rng.sample(range(max(self.p.experts, s.size)), s.size)
            resident = {e for r in self.p.slots for e in r.experts}
            for k in range(s.size):
                n = rng.randint(1, 9)
                # a slot of another cache may hold the same expert: the policy takes the first
                useful = own[k] < self.p.experts and own[k] not in resident
                whose = rng.choice(("own", "other")) if useful else "other"
                content = self.weight(whose, own[k])
                match rng.choice(("free", "freeing", "held", "filling")):
                    case "free":
                        slot = _Slot(NAN, n, n, n, None)
                    case "freeing":
                        slot = _Slot(content, n, n - 1, n, None)
                        self.tasks.append(self.release_later(slot, n))
                    case "held":
                        slot = _Slot(content, n, n - 1, n, (whose, own[k]))
                    case _:
                        slot = _Slot(NAN, n - 1, n - 1, n, (whose, own[k]))
                        self.tasks.append(self.fill_later(slot, n, content))
                self.slots[s.name, k] = slot

    def release_later(self, slot: _Slot, n: int) -> _Task:
        yield _always
        slot.free, slot.content = n, NAN

    def fill_later(self, slot: _Slot, n: int, content: float) -> _Task:
        yield _always
        slot.ready = n
        if slot.free < n:  # else it was given up meanwhile
            slot.content = content

    # --- buffers ---

    def fire(self, event: Event) -> None:
        self.fired.add(event)
        if self.p.outs and event == self.p.outs[0].event:
            handed = [Buffer.LOGITS] if self.p.kind is Kind.EPILOGUE else [Buffer.HID]
            if self.p.kind in (Kind.DENSE, Kind.MOE):
                handed += [Buffer.KV, Buffer.DRAFT]
            values = [self.buffers[b] for b in handed]
            self.snapshot = repr(values)
            self.finite = not any(math.isnan(v) for v in values)
            for b in Buffer:
                if b not in (Buffer.KV, Buffer.DRAFT):
                    self.buffers[b] = _SPOILT
            self.expert_out.clear()

    def import_hid(self) -> _Task:
        yield _always
        for b in Buffer:
            if b not in (Buffer.KV, Buffer.DRAFT):
                self.buffers[b] = NAN
        self.buffers[Buffer.HID] = self.given[Buffer.HID]
        self.expert_out.clear()
        self.fired.add("hid")

    def routing(self, route: float) -> list[list[int]]:
        """Expert ids of each row: what the true gate output says."""
        rng = random.Random(repr((self.seed, route)))
        experts = list(range(self.p.experts))
        spread = rng.random() < 0.5  # rows that share no expert, as far as that goes
        rows: list[list[int]] = []
        for _ in range(self.rows):
            if spread and len(experts) >= self.p.top_k:
                chosen = rng.sample(experts, self.p.top_k)
                experts = [e for e in experts if e not in chosen]
            else:
                chosen = rng.sample(range(self.p.experts), self.p.top_k)
            rows.append(chosen)
        return rows

    # --- recompile ---

    def bind(self, binds: dict[HoleKind, int], route: float, rng: random.Random) -> None:
        """Fills the hole tables. The rules that it keeps are those that pdscope.ir.verify states
        of bindings."""
        holes: dict[HoleKind, list[_Entry]] = {k: [] for k in binds}
        self.holes.update(holes)
        routes: dict[int, list[tuple[int, int]]] = {}
        for row, chosen in enumerate(self.routing(route)):
            for rank, e in enumerate(chosen):
                routes.setdefault(e, []).append((row, rank))
        readable = self.named(Opcode.EXPERT, HoleKind.R, None)
        where: dict[int, tuple[str, int]] = {}
        resident = {s.name for s in self.p.slots if s.kind is SlotKind.RESIDENT}
        for key, slot in self.slots.items():
            if slot.holds is not None and slot.holds[0] == "own" and key[0] in readable | resident:
                where.setdefault(slot.holds[1], key)
        free = [key for key, slot in self.slots.items() if slot.holds is None]
        used: list[tuple[str, int]] = []
        for e in sorted(routes):
            entry = _Entry(e, routes[e])
            at = where.get(e)
            fixed = at is not None and at[0] in resident
            if at is not None and (fixed or rng.random() < self.keep_on_gpu):
                if len(holes.get(HoleKind.R, [])) < binds.get(HoleKind.R, 0):
                    entry.slot, entry.fill = at, self.slots[at].bound
                    holes[HoleKind.R].append(entry)
                    if not fixed:
                        used.append(at)
                    continue
            elif at is None and rng.random() < self.load_chance:
                if self.bind_fill(HoleKind.L, binds, entry, free):
                    assert entry.slot is not None
                    used.append(entry.slot)
                    continue
            if not fixed and len(holes.get(HoleKind.C, [])) < binds.get(HoleKind.C, 0):
                holes[HoleKind.C].append(entry)
        for e in rng.sample(range(max(self.p.experts, 1)), min(self.p.experts, rng.randint(0, 4))):
            self.bind_fill(HoleKind.N, binds, _Entry(e, whose="next"), free)
        for e in range(rng.randint(0, binds.get(HoleKind.P, 0))):
            holes[HoleKind.P].append(_Entry(e))
        kept = [k for k, s in self.slots.items() if s.holds is not None and s.holds[0] == "own"]
        for key in dict.fromkeys(used + [k for k in kept if k[0] not in resident]):
            index = len(holes.get(HoleKind.U, []))
            if index >= binds.get(HoleKind.U, 0) or rng.random() < 0.5:
                continue
            if key[0] in self.named(Opcode.UNLOAD, HoleKind.U, index):
                slot = self.slots[key]
                holes[HoleKind.U].append(_Entry(0, slot=key, fill=slot.bound))
                slot.holds = None

    def named(self, op: Opcode, kind: HoleKind, index: int | None) -> set[str]:
        """Slots that instructions `op` of ?kind name, for entry `index` (any entry, if None)."""
        return {
            s
            for i in self.p.instrs
            if i.opcode is op and i.hole is not None and i.hole.kind is kind
            for s in i.slots
            if index is None or i.hole.index in (None, index)
        }

    def bind_fill(
        self,
        kind: HoleKind,
        binds: dict[HoleKind, int],
        entry: _Entry,
        free: list[tuple[str, int]],
    ) -> bool:
        """Binds a load or prefetch to a free slot; a stream of ?l may take an earlier entry's
        slot again."""
        entries = self.holes.get(kind, [])
        if len(entries) >= binds.get(kind, 0):
            return False
        op = Opcode.LOAD if kind is HoleKind.L else Opcode.PREFETCH
        caches = self.named(op, kind, len(entries))
        key = next((k for k in free if k[0] in caches), None)
        if key is not None:
            free.remove(key)
        elif kind is HoleKind.L:
            streams = {i.slots[0] for i in self.p.instrs if i.opcode is op and i.stream}
            again = [x for x in entries if x.slot is not None and x.slot[0] in streams & caches]
            old = next((x for x in again if not x.release), None)
            if old is not None:
                old.release, key = True, old.slot
        if key is None:
            return False
        slot = self.slots[key]
        slot.bound += 1
        slot.holds = (entry.whose, entry.expert)
        entry.slot, entry.fill = key, slot.bound
        entries.append(entry)
        return True

    def entries(self, i: Instr) -> list[_Entry]:
        """The bound entries that instruction i is for."""
        assert i.hole is not None
        table = self.holes.get(i.hole.kind, [])
        index = i.hole.index
        mine = table if index is None else table[index : index + 1]
        return [e for e in mine if e.slot is None or e.slot[0] in i.slots]

    # --- instructions ---

    def task(self, n: int) -> _Task:
        i = self.p.instrs[n]
        before = [m for m in range(n) if self.p.instrs[m].queue is i.queue] if self.queues else []
        yield (
            lambda: (
                all(w in self.fired for w in i.waits) and all(m in self.finished for m in before)
            )
        )
        if i.opcode is Opcode.EXPERT:
            yield from self.experts(i)
        elif i.opcode in (Opcode.LOAD, Opcode.PREFETCH):
            yield from self.fills(n, i)
        elif i.opcode is Opcode.UNLOAD:
            for e in self.entries(i):
                assert e.slot is not None
                self.slots[e.slot].free, self.slots[e.slot].content = e.fill, NAN
        elif i.opcode is not Opcode.SYNC:
            yield from self.compute(i)
        self.finished.add(n)
        if n not in self.fired:
            self.fire(n)

    def compute(self, i: Instr) -> _Task:
        reads, writes = effects(self.p, i)
        inputs = [self.buffers[b] for b in Buffer if reads >> b & 1]
        outs: list[float] = []
        if i.opcode is Opcode.COMBINE:
            route = self.buffers[Buffer.ROUTE]
            rows = [] if math.isnan(route) else self.routing(route)
            keys = [(r, k) for r, row in enumerate(rows) for k in range(len(row))]
            outs = [self.expert_out.get(key, NAN) for key in keys]
            inputs = [
                self.buffers[b] for b in Buffer if reads >> b & 1 and b is not Buffer.EXPERT_OUT
            ]
        elif i.opcode is Opcode.RECOMPILE:
            self.holes = {}
        for b in Buffer:
            if writes >> b & 1:
                self.buffers[b] = NAN
        yield _always
        value = _mix(i.opcode.name, i.site, i.tokens, i.predict, *inputs, *outs)
        if i.opcode is Opcode.RECOMPILE and not math.isnan(value):
            route, draft = inputs[0], value
            rng = random.Random(repr((self.seed, draft)))
            self.bind({h.kind: h.capacity for h in i.binds}, route, rng)
        for b in Buffer:
            if writes >> b & 1:
                self.buffers[b] = _mix(b.name, value)

    def experts(self, i: Instr) -> _Task:
        xn = self.buffers[Buffer.XN]
        mine = self.entries(i)
        for e in mine:
            for key in e.routes:
                self.expert_out[key] = NAN
        yield _always
        for e in mine:
            weight = self.weight("own", e.expert)
            if e.slot is not None:
                slot, fill = self.slots[e.slot], e.fill
                yield _reached(slot, ready=fill)
                first = slot.content
                yield _always
                weight = slot.content if slot.content == first else NAN
            for key in e.routes:
                self.expert_out[key] = _mix("expert", e.expert, key, xn, weight)
            if e.release and e.slot is not None:
                slot.free, slot.content = e.fill, NAN

    def fills(self, n: int, i: Instr) -> _Task:
        mine = self.entries(i)
        if i.stream:
            self.fire(n)
        for e in mine:
            if e.slot is None:
                continue  # -> llc
            slot, last = self.slots[e.slot], e.fill - 1
            yield _reached(slot, ready=last, free=last)
            slot.content = NAN
            yield _always
            slot.ready = e.fill
            slot.content = self.weight(e.whose, e.expert)

    def run(self) -> Outcome:
        if self.p.ins:
            self.tasks.append(self.import_hid())
        self.tasks += [self.task(n) for n in range(len(self.p.instrs))]
        waiting = [(t, next(t)) for t in self.tasks]
        while waiting:
            able = [k for k, (_, ready) in enumerate(waiting) if ready()]
            if not able:
                raise Deadlock(f"{self.p.name}: {len(waiting)} tasks can never go on")
            k = self.order.choice(able)
            task, _ = waiting[k]
            following = next(task, None)
            if following is None:
                waiting.pop(k)
            else:
                waiting[k] = (task, following)
        slots = [(key, s.content, s.ready, s.free) for key, s in self.slots.items()]
        state = repr((self.snapshot, self.buffers, sorted(self.expert_out.items()), slots))
        return Outcome(state, self.finite)


def run(program: Program, scenario: int, order: int, queues: bool = False) -> Outcome:
    """Runs a program that keeps V1 and V2. `scenario` seeds what the run is given (rows,
    routing, residency, choices of recompile), `order` the linearisation. With `queues`, each
    queue runs its instructions one after the other, as hardware does; without, waits alone hold
    an instruction back. Raises Deadlock."""
    return _Run(program, scenario, order, queues).run()
