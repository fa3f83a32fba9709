"""Random small changes to programs: what an error in a scheduler, or an edited plan, looks like."""

import random
from collections.abc import Callable
from dataclasses import replace

from pdscope.ir.isa import (
    GPU_QUEUES,
    OPS,
    Buffer,
    HoleKind,
    NormSite,
    Opcode,
    Phase,
    Queue,
    SlotKind,
    Tier,
)
from pdscope.ir.program import Event, Hole, HoleRef, Instr, Out, Program
from pdscope.ir.verify import effects

Mutation = Callable[[Program, random.Random], Program]


def _with(p: Program, n: int, instr: Instr) -> Program:
    return replace(p, instrs=p.instrs[:n] + (instr,) + p.instrs[n + 1 :])


def _pick(p: Program, rng: random.Random, keep: Callable[[Instr], object]) -> int | None:
    found = [n for n, i in enumerate(p.instrs) if keep(i)]
    return rng.choice(found) if found else None


def _remap(p: Program, order: list[int]) -> Program:
    """Instructions `order` (old indices) in that order; waits and outs follow, those to dropped
    ones go."""
    new = {old: k for k, old in enumerate(order)}

    def waits(i: Instr) -> tuple[Event, ...]:
        events = (new.get(w) if isinstance(w, int) else w for w in i.waits)
        return tuple(dict.fromkeys(e for e in events if e is not None))

    instrs = tuple(replace(p.instrs[k], waits=waits(p.instrs[k])) for k in order)
    outs = tuple(Out(o.name, new.get(o.event, 0)) for o in p.outs)
    return replace(p, instrs=instrs, outs=outs)


def drop_wait(p: Program, rng: random.Random) -> Program:
    n = _pick(p, rng, lambda i: i.waits)
    if n is None:
        return p
    waits = list(p.instrs[n].waits)
    waits.pop(rng.randrange(len(waits)))
    return _with(p, n, replace(p.instrs[n], waits=tuple(waits)))


def add_wait(p: Program, rng: random.Random) -> Program:
    n = rng.randrange(len(p.instrs))
    events: list[Event] = [*range(n), *p.ins]
    i = p.instrs[n]
    new = [e for e in events if e not in i.waits]
    if not new:
        return p
    return _with(p, n, replace(i, waits=(*i.waits, rng.choice(new))))


def move_wait(p: Program, rng: random.Random) -> Program:
    """Waits for what came one step before the event instead: often the same, sometimes too
    early."""
    n = _pick(p, rng, lambda i: any(isinstance(w, int) for w in i.waits))
    if n is None:
        return p
    i = p.instrs[n]
    w = rng.choice([x for x in i.waits if isinstance(x, int)])
    events = [*(p.instrs[w].waits if w < len(p.instrs) else ()), *range(n)]
    if not events:
        return p
    other = rng.choice(events)
    waits = dict.fromkeys(other if x == w else x for x in i.waits)
    return _with(p, n, replace(i, waits=tuple(waits)))


def any_wait(p: Program, rng: random.Random) -> Program:
    n = rng.randrange(len(p.instrs))
    event: Event = rng.choice([rng.randrange(len(p.instrs) + 2), "hid"])
    i = p.instrs[n]
    waits = (*i.waits[1:], event) if rng.random() < 0.5 else (*i.waits, event)
    return _with(p, n, replace(i, waits=waits))


def swap(p: Program, rng: random.Random) -> Program:
    if len(p.instrs) < 2:
        return p
    k = rng.randrange(len(p.instrs) - 1)
    order = list(range(len(p.instrs)))
    order[k], order[k + 1] = order[k + 1], order[k]
    return _remap(p, order)


def shuffle(p: Program, rng: random.Random) -> Program:
    """Another topological order, if the waits are acyclic."""
    left, order = set(range(len(p.instrs))), list[int]()
    while left:
        able = [n for n in sorted(left) if not any(w in left for w in p.instrs[n].waits)]
        if not able:
            return p
        order.append(rng.choice(able))
        left.remove(order[-1])
    return _remap(p, order)


def delete(p: Program, rng: random.Random) -> Program:
    order = list(range(len(p.instrs)))
    order.pop(rng.randrange(len(order)))
    return _remap(p, order) if order else p


def duplicate(p: Program, rng: random.Random) -> Program:
    n = rng.randrange(len(p.instrs))
    at = rng.randint(n + 1, len(p.instrs))
    order = list(range(len(p.instrs)))
    copy = p.instrs[n]
    p = _remap(p, order)
    instrs = [
        replace(i, waits=tuple(w + 1 if isinstance(w, int) and w >= at else w for w in i.waits))
        for i in p.instrs
    ]
    instrs.insert(at, copy)
    outs = tuple(Out(o.name, o.event + (o.event >= at)) for o in p.outs)
    return replace(p, instrs=tuple(instrs), outs=outs)


def insert_sync(p: Program, rng: random.Random) -> Program:
    at = rng.randint(1, len(p.instrs))
    instrs = [
        replace(i, waits=tuple(w + 1 if isinstance(w, int) and w >= at else w for w in i.waits))
        for i in p.instrs
    ]
    instrs.insert(at, Instr(Opcode.SYNC, Queue.HOST, (rng.randrange(at),)))
    later = range(at + 1, len(instrs))
    if later:
        n = rng.choice(later)
        instrs[n] = replace(instrs[n], waits=(*instrs[n].waits, at))
    outs = tuple(Out(o.name, o.event + (o.event >= at)) for o in p.outs)
    return replace(p, instrs=tuple(instrs), outs=outs)


def change_queue(p: Program, rng: random.Random) -> Program:
    n = rng.randrange(len(p.instrs))
    queues = OPS[p.instrs[n].opcode].queues if rng.random() < 0.8 else tuple(Queue)
    return _with(p, n, replace(p.instrs[n], queue=rng.choice(queues)))


def change_hole(p: Program, rng: random.Random) -> Program:
    n = _pick(p, rng, lambda i: i.hole)
    if n is None:
        return p
    kind = rng.choice(list(HoleKind))
    hole = p.instrs[n].hole
    assert hole is not None
    if rng.random() < 0.5:
        kind = hole.kind
    index = rng.choice([None, 0, 1, 2])
    return _with(p, n, replace(p.instrs[n], hole=HoleRef(kind, index)))


def change_capacity(p: Program, rng: random.Random) -> Program:
    n = _pick(p, rng, lambda i: i.binds)
    if n is None:
        return p
    binds = list(p.instrs[n].binds)
    k = rng.randrange(len(binds))
    h = binds[k]
    binds[k] = Hole(h.kind, max(1, h.capacity + rng.choice((-2, -1, 1, 2, 5))))
    if rng.random() < 0.2:
        binds.pop(k)
    return _with(p, n, replace(p.instrs[n], binds=tuple(binds)))


def add_hole(p: Program, rng: random.Random) -> Program:
    n = _pick(p, rng, lambda i: i.binds)
    if n is None:
        return p
    have = {h.kind: h for h in p.instrs[n].binds}
    kind = rng.choice(list(HoleKind))
    have.setdefault(kind, Hole(kind, rng.randint(1, 4)))
    return _with(p, n, replace(p.instrs[n], binds=tuple(have[k] for k in sorted(have))))


def change_slots(p: Program, rng: random.Random) -> Program:
    n = _pick(p, rng, lambda i: i.slots)
    if n is None:
        return p
    names = [s.name for s in p.slots]
    slots = tuple(rng.sample(names, rng.randint(1, min(2, len(names)))))
    return _with(p, n, replace(p.instrs[n], slots=slots))


def change_flags(p: Program, rng: random.Random) -> Program:
    n = rng.randrange(len(p.instrs))
    i = p.instrs[n]
    options = [replace(i, device=rng.randrange(3)), replace(i, tier=rng.choice(list(Tier)))]
    if i.opcode is Opcode.GATE:
        options += [replace(i, tokens=not i.tokens), replace(i, predict=not i.predict)] * 2
    if i.opcode in (Opcode.LOAD, Opcode.PREFETCH):
        options += [replace(i, stream=not i.stream)] * 2
    if i.opcode is Opcode.NORM:
        options.append(replace(i, site=rng.choice(list(NormSite))))
    if i.opcode is Opcode.EXPERT:
        options.append(replace(i, adapter=3))
    return _with(p, n, rng.choice(options))


def change_out(p: Program, rng: random.Random) -> Program:
    return replace(p, outs=(Out(p.outs[0].name, rng.randrange(len(p.instrs))),)) if p.outs else p


def change_tickets(p: Program, rng: random.Random) -> Program:
    names = [s.name for s in p.slots if s.kind is SlotKind.CACHE]
    some = tuple(n for n in names if rng.random() < 0.6)
    return replace(p, tickets_in=some) if rng.random() < 0.5 else replace(p, tickets_out=some)


def change_slot(p: Program, rng: random.Random) -> Program:
    if not p.slots:
        return p
    k = rng.randrange(len(p.slots))
    s = p.slots[k]
    if s.kind is SlotKind.CACHE:
        new = replace(s, size=max(0, s.size + rng.choice((-2, -1, 1, 2))))
    else:
        new = replace(s, experts=tuple(sorted({rng.randrange(p.experts + 1) for _ in s.experts})))
    if rng.random() < 0.2:
        new = replace(new, device=1 - min(new.device, 1))
    return replace(p, slots=p.slots[:k] + (new,) + p.slots[k + 1 :])


def change_program(p: Program, rng: random.Random) -> Program:
    return rng.choice(
        [
            replace(p, rows_max=max(1, p.rows_max + rng.choice((-3, -1, 1, 4)))),
            replace(p, top_k=max(0, p.top_k + rng.choice((-1, 1)))),
            replace(p, experts=max(0, p.experts + rng.choice((-3, -1, 1, 3)))),
            replace(p, shared=not p.shared),
            replace(p, streams=rng.choice((1, 4, 17))),
            replace(p, budget=max(0, p.budget + rng.choice((-1, 1, 3)))),
            replace(p, phase=rng.choice(list(Phase))),
            replace(p, layer=rng.choice((-1, 0, 5))),
        ]
    )


def relax(p: Program, rng: random.Random) -> Program:
    """Drops a wait that others imply, or that orders nothing: what an optimising scheduler does."""
    n = _pick(p, rng, lambda i: len(i.waits) > 1)
    if n is None:
        return p
    i = p.instrs[n]
    for w in rng.sample(i.waits, len(i.waits)):
        if isinstance(w, str) or w >= len(p.instrs):
            return _with(p, n, replace(i, waits=tuple(x for x in i.waits if x != w)))
        reads, writes = effects(p, i)
        r, _ = effects(p, p.instrs[w])
        if not writes & r & ~(1 << Buffer.HID) and not reads & effects(p, p.instrs[w])[1]:
            return _with(p, n, replace(i, waits=tuple(x for x in i.waits if x != w)))
    return p


def move_to_gpu(p: Program, rng: random.Random) -> Program:
    n = _pick(p, rng, lambda i: OPS[i.opcode].compute and i.opcode is not Opcode.EXPERT)
    if n is None:
        return p
    return _with(p, n, replace(p.instrs[n], queue=rng.choice((Queue.CPU, *GPU_QUEUES))))


MUTATIONS: tuple[Mutation, ...] = (
    drop_wait,
    add_wait,
    move_wait,
    any_wait,
    swap,
    shuffle,
    delete,
    duplicate,
    insert_sync,
    change_queue,
    change_hole,
    change_capacity,
    add_hole,
    change_slots,
    change_flags,
    change_out,
    change_tickets,
    change_slot,
    change_program,
    relax,
    move_to_gpu,
)


def mutate(p: Program, seed: int, times: int) -> Program:
    """`times` random changes, each one of MUTATIONS."""
    rng = random.Random(seed)
    for _ in range(times):
        p = rng.choice(MUTATIONS)(p, rng)
    return p
