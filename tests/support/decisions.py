"""Decisions in C and in Python, side by side: instances, and what runtime_c/src/decide.h says.

May import pdscope.compiler and support.cc.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Any

import cffi
from support.cc import shared_object

from pdscope.compiler.decision import (
    ONE_Q16,
    Cached,
    Decision,
    Due,
    Eq6,
    Inputs,
    Load,
    Mode,
    Policy,
    Why,
    ascending,
)
from pdscope.ir.isa import Phase
from pdscope.runtime_c import DECISION_SOURCES, ROOT

MAX_EXPERTS = 1024


@dataclass(frozen=True)
class Line:
    """A cost curve: knots of (tokens, ns)."""

    knots: tuple[tuple[int, int], ...]

    def at(self, tokens: int, /) -> int:
        if len(self.knots) < 2 or tokens <= self.knots[0][0]:
            return self.knots[0][1] if self.knots else 0
        pieces = list(pairwise(self.knots))
        (t0, n0), (t1, n1) = next((p for p in pieces if tokens <= p[1][0]), pieces[-1])
        return n0 + (n1 - n0) * (tokens - t0) // (t1 - t0)


@dataclass(frozen=True)
class Table:
    """The costs that a decision reads."""

    io_start: int = 0
    io_expert: int = 1
    cpu_start: int = 0
    gpu_start: int = 0
    cpu_expert: Line = Line(())
    gpu_expert: Line = Line(())


class InC:
    """The C function, with one set of arrays."""

    def __init__(self) -> None:
        self.ffi = cffi.FFI()
        for header, name in (("include/pdscope.h", "pdscope"), ("src/decide.h", "decide")):
            text = (ROOT / header).read_text()
            begin, end = f"/* {name}-cdef-begin */", f"/* {name}-cdef-end */"
            self.ffi.cdef(text.split(begin, 1)[1].split(end, 1)[0])
        library = shared_object([(ROOT / source, ()) for source in DECISION_SOURCES])
        self.lib: Any = self.ffi.dlopen(str(library))
        self.costs = self.ffi.new("pds_costs *")
        self.given = self.ffi.new("pds_decision_in *", {"costs": self.costs})
        self.lists = {name: self.ffi.new(f"pds_due[{MAX_EXPERTS}]") for name in LISTS}
        self.made = self.ffi.new("pds_decision *")
        self.on = self.ffi.new(f"pds_load[{MAX_EXPERTS}]")
        self.pre = self.ffi.new(f"pds_load[{MAX_EXPERTS}]")
        self.made.on, self.made.pre = self.on, self.pre
        self.cached = self.ffi.new("pds_cached[]", 4096)

    def set(self, given: Inputs) -> None:
        table = given.costs
        for name in ("io_start", "io_expert", "cpu_start", "gpu_start"):
            setattr(self.costs, name, getattr(table, name))
        for name in ("cpu_expert", "gpu_expert"):
            line, curve = getattr(table, name), getattr(self.costs, name)
            curve.n = len(line.knots)
            for i, (tokens, ns) in enumerate(line.knots):
                curve.tokens[i], curve.ns[i] = tokens, ns
        for name in LISTS:
            dues = getattr(given, name)
            for i, due in enumerate(dues):
                self.lists[name][i] = (due.expert, due.tokens, due.popularity, due.weight)
            setattr(self.given, name, self.lists[name])
            setattr(self.given, f"n_{name}", len(dues))
        self.given.n_late = given.late
        self.given.policy, self.given.phase = given.policy.number, given.phase
        for name in SCALARS:
            setattr(self.given, name, getattr(given, name))

    def decide(self, given: Inputs) -> Decision:
        self.set(given)
        self.lib.pds_decide(self.given, self.made)
        raw = {f.name: getattr(self.made.why, f.name) for f in fields(Why)}
        raw |= {"mode": Mode(raw["mode"]), "eq6": Eq6(raw["eq6"]), "xi": bool(raw["xi"])}
        return Decision(
            self.loads(self.on, self.made.n_on), self.loads(self.pre, self.made.n_pre), Why(**raw)
        )

    def victim(
        self,
        policy: Policy,
        phase: Phase,
        slots: Sequence[Cached],
        layer: int,
        n_layers: int,
        now: int,
    ) -> int | None:
        for i, s in enumerate(slots):
            self.cached[i] = (s.layer, s.expert, s.popularity, s.used, s.score, s.kept)
        asked = self.ffi.new("pds_asked *", (policy.number, phase, layer, n_layers, now))
        found = int(self.lib.pds_victim(asked, self.cached, len(slots)))
        return None if found < 0 else found

    @staticmethod
    def loads(array: Any, n: int) -> tuple[Load, ...]:
        return tuple(Load(array[i].expert, bool(array[i].flags & 1)) for i in range(n))


LISTS = ("cur", "res", "next")
SCALARS = (
    "top_k",
    "hit_q16",
    "free_slots",
    "stream",
    "attention",
    "backlog",
    "gpu_busy",
    "next_gpu",
)


@cache
def in_c() -> InC:
    return InC()


def random_line(r: random.Random, top: int) -> Line:
    n = r.choice((0, 1, 2, 3, 5, 16))
    tokens = sorted(r.sample(range(1, r.choice((20, 5000))), n))
    ns = sorted(r.randrange(top) for _ in range(n))
    return Line(tuple(zip(tokens, ns, strict=True)))


def random_dues(r: random.Random, n: int, first: int, most: int) -> tuple[Due, ...]:
    """n experts from `first` on; many ties when `most` is small."""
    ids = list(range(first, first + n))
    r.shuffle(ids)
    return tuple(
        Due(i, r.randrange(1, most + 1), r.choice((0, 1, r.randrange(1000))), r.randrange(1 << 20))
        for i in ids
    )


def random_instance(r: random.Random, policy: Policy) -> Inputs:
    """Anything a runtime could ask, and a little more: free lists, no slots, costs of zero."""
    phase = r.choice(list(Phase))
    most = {Phase.DECODE: 1, Phase.BATCH: 16, Phase.PREFILL: r.choice((2, 300, 4096))}[phase]
    top = r.choice((3, 10, 64, 10**3, 10**6, 10**9, (1 << 40) + 5))
    size = r.choice((2, 9, 40))
    table = Table(
        r.randrange(top),
        r.randrange(top),
        r.randrange(top),
        r.randrange(top),
        random_line(r, top),
        random_line(r, r.choice((2, top))),
    )
    n_cur, n_res, n_next = (r.choice((0, 1, r.randrange(size))) for _ in range(3))
    res = random_dues(r, n_res, 300, most)
    return Inputs(
        table,
        ascending(random_dues(r, n_cur, 0, most)),
        res,
        ascending(random_dues(r, n_next, r.choice((0, 600)), most)),
        late=r.randrange(n_res + 1),
        policy=policy,
        phase=phase,
        top_k=r.randrange(1, 9),
        hit_q16=r.choice((0, ONE_Q16, ONE_Q16 // 2, r.randrange(ONE_Q16 + 1))),
        free_slots=r.choice((0, 1, 2, r.randrange(80), 1000)),
        stream=r.random() < 0.5,
        attention=r.choice((0, r.randrange(top))),
        backlog=r.choice((0, r.randrange(3 * top))),
        gpu_busy=r.choice((0, r.randrange(top))),
        next_gpu=r.choice((0, r.randrange(top))),
    )
