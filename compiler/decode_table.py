"""The decisions of decode as a table over (N, M, backlog, free slots): what `--explain` prints, and
what the runtime can look up instead of deciding (pds_look_up of runtime_c/src/decide.h).

In decode every expert has one token, so a layer's decision depends on counts: N experts due in this
layer, the other top_k - N on the GPU or on their way; M predicted for the next one. The lists are
then the hottest of each. Marks of the apex policy depend on routing weights and are not in it.

May import pdscope.compiler.{decision,passes.schedule}.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pdscope.compiler.decision import Costs, Decision, Due, Inputs, Policy, clamp
from pdscope.compiler.passes.schedule import decide
from pdscope.ir.isa import Phase

BUCKETS = 17  # of backlog: none, then half a transfer each; the last holds all that is more
MOST_TOP_K = 16


@dataclass(frozen=True)
class DecodeTable:
    """Of one policy and one kind of layer. attention, shared (the shared expert on the GPU): ns.

    Raises ValueError when a token activates more than 16 experts: the table would not be small.
    """

    costs: Costs
    top_k: int
    policy: Policy = Policy.ADAPTSCHED
    attention: int = 0
    shared: int = 0
    hit_q16: int = 1 << 16

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= MOST_TOP_K:
            raise ValueError(f"top_k {self.top_k}, expected 1 to {MOST_TOP_K}")

    @property
    def step(self) -> int:
        """ns of backlog in a bucket."""
        return max(1, clamp(self.costs.io_expert) // 2)

    @property
    def slots(self) -> int:
        """Of free slots; more than both layers can fill change nothing."""
        return 2 * self.top_k + 1

    def points(self) -> Iterator[tuple[int, int, int, int]]:
        """(N, M, bucket, free slots) in the order of the entries."""
        counts = range(self.top_k + 1)
        for n in counts:
            for m in counts:
                for bucket in range(BUCKETS):
                    for slots in range(self.slots):
                        yield n, m, bucket, slots

    def inputs(self, n: int, m: int, bucket: int, slots: int) -> Inputs:
        """The layer that stands for all of an entry: of backlogs, the longest of its bucket."""
        backlog = bucket * self.step
        others = self.top_k - n
        there = self.top_k - m
        one = clamp(self.costs.gpu_expert.at(1))
        return Inputs(
            self.costs,
            tuple(Due(i, 1) for i in range(n)),
            tuple(Due(n + i, 1) for i in range(others)),
            tuple(Due(i, 1) for i in range(m)),
            late=min(others, -(-backlog // max(1, clamp(self.costs.io_expert)))),
            policy=self.policy,
            phase=Phase.DECODE,
            top_k=self.top_k,
            hit_q16=self.hit_q16,
            free_slots=slots,
            attention=self.attention,
            backlog=backlog,
            gpu_busy=self.shared,
            next_gpu=self.shared + (clamp(self.costs.gpu_start) + there * one if there else 0),
        )

    def decision(self, n: int, m: int, bucket: int, slots: int) -> Decision:
        """In full, with all that was compared."""
        return decide(self.inputs(n, m, bucket, slots))

    @cached_property
    def entries(self) -> bytes:
        """Two bytes for each point: experts loaded on demand, experts prefetched."""
        out = bytearray()
        for point in self.points():
            made = self.decision(*point)
            out += bytes((len(made.on), len(made.pre)))
        return bytes(out)

    def look_up(self, n: int, m: int, backlog: int, free_slots: int) -> tuple[int, int]:
        """(on-demand loads, prefetches)."""
        bucket = min(-(-max(0, backlog) // self.step), BUCKETS - 1)
        slots = min(free_slots, self.slots - 1)
        at = ((n * (self.top_k + 1) + m) * BUCKETS + bucket) * self.slots + slots
        return self.entries[2 * at], self.entries[2 * at + 1]

    def text(self, backlog: int = 0, free_slots: int = 1 << 30) -> str:
        """One page of it: a row for each N, a column for each M, "loads+prefetches" in each."""
        counts = range(self.top_k + 1)
        rows = ["N \\ M " + "".join(f"{m:>6}" for m in counts)]
        for n in counts:
            cells = (self.look_up(n, m, backlog, free_slots) for m in counts)
            rows.append(f"{n:>5} " + "".join(f"{f'{on}+{pre}':>6}" for on, pre in cells))
        return "\n".join(rows) + "\n"
