"""What prefetches to the CPU's last-level cache are worth: of the experts that a layer is predicted
to choose and that stay on the CPU, idle workers pull in the first blocks.

GPU plans' programs have no such instruction (`prefetch ?p -> llc` is the CPU plans'), so this says
what one would save, and nothing of it is in a simulation that does not ask for it. The rules are
those of runtime_c/src/llc.c: steps of up to 16 rows; equal shares of a budget a layer; no more than
an expert's gate and up matrices; nothing once the layer's gate is known. Workers are idle from the
end of one layer's experts on the CPU to the next's, but for predicting; what they pull in then is
bounded by the memory's rate. Only what waits for memory is saved: an expert of so many tokens that
it computes for longer than it reads gets no faster. That link and workers share the memory, and
what a wrong prediction pulls in, cost nothing here.

May import pdscope.costs and pdscope.ir.isa.
"""

from collections.abc import Sequence

from pdscope.costs import Cache, Curve
from pdscope.ir.isa import PHASE_ROWS, Phase

_MOST_ROWS = PHASE_ROWS[Phase.BATCH][1]


class CachePrefetch:
    """Of one run. `saved`: ns, in all."""

    def __init__(self, cache: Cache, expert: Curve) -> None:
        """`expert`: what one expert adds to the CPU's job, by tokens."""
        self.saved = 0
        self._cache, self._expert = cache, expert
        self._next: Sequence[int] = ()  # predicted for the next layer,
        self._there: Sequence[int] = ()  # and for the one that runs
        self._free_at = self._busy = 0

    def decided(self, predicted: Sequence[int], rows: int) -> None:
        """A layer's gate is known. `predicted`: for the next one, and nothing moves them to the
        GPU."""
        self._there, self._next = self._next, predicted if rows <= _MOST_ROWS else ()

    def worked(self, now: int, busy: int) -> None:
        """The layer's experts on the CPU are done; `busy`: ns of host work so far."""
        self._free_at, self._busy = now, busy

    def save(self, experts: Sequence[tuple[int, int]], size: int, now: int, busy: int) -> int:
        """By how many ns the CPU's job of (expert, rows), each of `size` bytes, gets shorter that
        begins now."""
        cache, curve, predicted = self._cache, self._expert, self._there
        if not predicted or not cache.fill.ns:
            return 0
        idle = max(0, now - self._free_at - (busy - self._busy))
        pulled = min(cache.bytes, cache.bytes * idle // cache.fill.ns)
        each = min(pulled // len(predicted), size * 2 // 3)
        worth = each * cache.saves.ns // cache.bytes
        there = set(predicted)
        reads = curve.at(1)
        saved = sum(
            max(0, worth - (curve.at(rows) - reads)) for expert, rows in experts if expert in there
        )
        self.saved += saved
        return saved
