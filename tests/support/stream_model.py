"""When work on a GPU ends, written down a second time: for tests of the mock's virtual clock.

May import nothing of PDScope. The mock steps from event to event; this looks at one instant after
another, and at each instant changes what can change until nothing does. Times are whole
nanoseconds; the progress of a copy is a fraction.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

COPIES = ("h2d", "d2h")


@dataclass
class Link:
    """Of one direction: bytes per second idle, while the host works, and from pageable memory; ns
    of every copy, and more where the link was idle."""

    rate: int
    busy: int
    pageable: int
    latency: int
    start: int


@dataclass(eq=False)
class Op:
    kind: str  # h2d, d2h, fixed (takes `ns`), record (takes `ns`), wait (for `awaited`)
    stream: int
    submitted: int
    ns: int = 0
    bytes: int = 0
    pageable: bool = False
    awaited: "Op | None" = None
    ready: int | None = None
    begun: int | None = None
    end: int | None = None
    moves_from: int = 0


@dataclass
class Model:
    links: dict[str, Link]
    slow_link: int = 1
    slow_from: int = 0
    host_busy: list[tuple[int, int]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def rate(self, op: Op, at: int) -> int:
        link = self.links[op.kind]
        rate = link.rate
        if link.busy and any(a <= at < b for a, b in self.host_busy):
            rate = link.busy
        if op.pageable and link.pageable:
            rate = link.pageable
        if self.slow_link > 1 and at >= self.slow_from:
            rate //= self.slow_link
        return max(rate, 1)

    def copy_end(self, op: Op) -> int:
        """Piece by piece between the times at which rates change."""
        at, left = op.moves_from, Fraction(op.bytes)
        edges = sorted({t for span in self.host_busy for t in span} | {self.slow_from})
        for edge in edges:
            if edge <= at:
                continue
            moved = Fraction(self.rate(op, at) * (edge - at), 10**9)
            if moved >= left:
                break
            at, left = edge, left - moved
        return at + ceil(left * 10**9 / self.rate(op, at))

    def solve(self) -> None:
        """Sets every op's `end`, given all that has been submitted."""
        for op in self.ops:
            op.ready = op.begun = op.end = None
        streams = sorted({op.stream for op in self.ops})
        queues = {s: [op for op in self.ops if op.stream == s] for s in streams}
        last_end: dict[str, int | None] = dict.fromkeys(COPIES)
        running: dict[str, Op | None] = dict.fromkeys(COPIES)
        now = min((op.submitted for op in self.ops), default=0)
        finished: set[int] = set()

        def heads() -> list[Op]:
            return [q[0] for q in queues.values() if q]

        def settle() -> bool:
            for op in heads():  # ends
                if op.end is not None and op.end <= now:
                    queues[op.stream].pop(0)
                    finished.add(id(op))
                    if op.kind in COPIES:
                        running[op.kind], last_end[op.kind] = None, op.end
                    return True
            for op in heads():  # turns come
                if op.ready is None and op.submitted <= now:
                    if op.awaited is None or id(op.awaited) in finished:
                        op.ready = now
            for op in heads():  # what is no copy begins at once
                if op.ready is not None and op.begun is None and op.kind not in COPIES:
                    op.begun, op.end = now, now + op.ns
                    return True
            return False

        def begin_a_copy() -> bool:
            for kind in COPIES:
                waiting = [o for o in heads() if o.kind == kind and o.ready is not None]
                if running[kind] is not None or not waiting:
                    continue
                op = min(waiting, key=lambda o: (o.ready, self.ops.index(o)))
                link, before = self.links[kind], last_end[kind]
                idle = before is None or (op.ready or 0) > before
                op.begun, running[kind] = now, op
                op.moves_from = now + link.latency + (link.start if idle else 0)
                op.end = self.copy_end(op)
                return True
            return False

        while any(queues.values()):
            while settle() or begin_a_copy():
                pass
            later = [op.end for op in heads() if op.end is not None]
            later += [op.submitted for op in heads() if op.submitted > now]
            if not later:
                break
            now = min(t for t in later if t > now)
