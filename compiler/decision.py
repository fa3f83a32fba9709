"""What a decision reads and says: which experts of a layer cross the link, and in what order.

The same as runtime_c/src/decide.h, field by field. Times are ns, probabilities in 1/65536, all of
them integers; divisions are of non-negative numbers and round down.

May import pdscope.ir.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from typing import Protocol

from pdscope.ir.isa import Phase

ONE_Q16 = 1 << 16
TIME_MAX = (1 << 40) - 1  # 18 minutes: longer times count as that
MAX_LOAD_SLOTS = 2  # that a stream of on-demand loads holds in the end


class Policy(Enum):
    """Names are those of --policy; `number` is pds_policy's."""

    ADAPTSCHED = "adaptsched"
    PAPER = "pdscope-paper"
    STATIC = "static"
    ONDEMAND = "ondemand"
    FATE = "fate"
    FIDDLER = "fiddler"
    HYBRIMOE = "hybrimoe"
    LRU = "lru"
    APEX = "apex"

    @property
    def number(self) -> int:
        return list(Policy).index(self)

    @property
    def predictor(self) -> str | None:
        """Whose prediction its `next` is: PhasePer's, or the next layer's gate on this layer's
        input; None: it never prefetches."""
        if self in (Policy.ADAPTSCHED, Policy.PAPER):
            return "phaseper"
        return "gate" if self in (Policy.FATE, Policy.HYBRIMOE, Policy.APEX) else None

    @property
    def keeps(self) -> bool:
        """What was loaded stays in its slot until another expert takes it; otherwise the slot is
        empty when the layer is over."""
        return self not in (Policy.STATIC, Policy.ONDEMAND, Policy.FIDDLER)


class Mode(IntEnum):
    """Of Algorithm 1. NONE: the policy has no modes."""

    NONE = 0
    LOAD = 1
    PREFETCH = 2
    UNLOAD = 3
    CROSS = 4
    PREFILL = 5


class Eq6(IntEnum):
    NOT_ASKED = 0
    HOLDS = 1
    FAILS = 2


class Curve(Protocol):
    def at(self, tokens: int, /) -> int:
        """ns at so many tokens."""


class Costs(Protocol):
    """The times that a decision reads (pdscope.compiler.costs has them all)."""

    @property
    def io_start(self) -> int: ...
    @property
    def io_expert(self) -> int: ...
    @property
    def cpu_start(self) -> int: ...
    @property
    def gpu_start(self) -> int: ...
    @property
    def cpu_expert(self) -> Curve: ...
    @property
    def gpu_expert(self) -> Curve: ...


@dataclass(frozen=True)
class Due:
    """An expert with work: `tokens` pending (of the next layer: predicted), `popularity`: how
    often it is activated, of the rows of its phase, `weight`: the sum of its routing weights; both
    in 1/65536."""

    expert: int
    tokens: int
    popularity: int = 0
    weight: int = 0

    @property
    def rank(self) -> tuple[int, int, int]:
        """Ascending lists are in this order: coldest first."""
        return self.tokens, self.popularity, self.expert


def ascending(dues: Sequence[Due]) -> tuple[Due, ...]:
    return tuple(sorted(dues, key=lambda due: due.rank))


@dataclass(frozen=True)
class Inputs:
    """One layer when its gate's output is known. Lists and numbers as pds_decision_in's.

    cur:  activated, and neither on the GPU nor on its way; ascending.
    res:  activated and on the GPU; the last `late` of them on their way, in order of arrival.
    next: predicted for the next layer, and neither on the GPU nor on its way; ascending.
    """

    costs: Costs
    cur: tuple[Due, ...]
    res: tuple[Due, ...] = ()
    next: tuple[Due, ...] = ()
    late: int = 0
    policy: Policy = Policy.ADAPTSCHED
    phase: Phase = Phase.DECODE
    top_k: int = 1
    hit_q16: int = ONE_Q16
    free_slots: int = 1024
    stream: bool = False
    attention: int = 0
    backlog: int = 0
    gpu_busy: int = 0
    next_gpu: int = 0

    @cached_property
    def io_start(self) -> int:
        return clamp(self.costs.io_start)

    @cached_property
    def io_expert(self) -> int:
        return max(1, clamp(self.costs.io_expert))

    @cached_property
    def cpu_start(self) -> int:
        return clamp(self.costs.cpu_start)

    @cached_property
    def gpu_start(self) -> int:
        return clamp(self.costs.gpu_start)

    @cached_property
    def attention_ns(self) -> int:
        return clamp(self.attention)

    @cached_property
    def backlog_ns(self) -> int:
        return clamp(self.backlog)

    @cached_property
    def gpu_busy_ns(self) -> int:
        return clamp(self.gpu_busy)

    @cached_property
    def next_gpu_ns(self) -> int:
        return clamp(self.next_gpu)

    def cpu(self, due: Due) -> int:
        """What the expert adds to the CPU's job."""
        return clamp(self.costs.cpu_expert.at(due.tokens))

    def gpu(self, due: Due) -> int:
        """And to a submission on the GPU."""
        return clamp(self.costs.gpu_expert.at(due.tokens))

    def room_on(self) -> int:
        """On-demand loads that the slots allow: a stream of them passes through any number."""
        if not self.free_slots:
            return 0
        return len(self.cur) if self.stream else min(len(self.cur), self.free_slots)

    def room_pre(self, on: int) -> int:
        """Prefetches that they allow behind so many on-demand loads."""
        held = min(on, MAX_LOAD_SLOTS) if self.stream else on
        return min(max(self.free_slots - held, 0), len(self.next))


@dataclass(frozen=True)
class Cached:
    """An expert in a slot, as pds_cached; layer -1: the slot is empty."""

    layer: int
    expert: int = 0
    popularity: int = 0
    used: int = 0
    score: int = 0
    kept: bool = False


def clamp(ns: int) -> int:
    return min(max(ns, 0), TIME_MAX)


@dataclass
class Why:
    """What was compared: pds_decision_why, field by field. -1: nothing found, or nothing asked."""

    mode: Mode = Mode.NONE
    n_c: int = 0
    global_i: int = -1
    local_i: int = -1
    global_gpu: int = 0
    global_cpu: int = 0
    local_gpu: int = 0
    local_cpu: int = 0
    hidden: int = 0
    ceil_f: int = 0
    xi: bool = False
    late: int = 0
    eq6: Eq6 = Eq6.NOT_ASKED
    eq6_gpu: int = 0
    eq6_cpu: int = 0
    layer_end: int = 0
    next_end: int = 0


@dataclass(frozen=True)
class Load:
    """`low`: the expert matters little, its smaller format will do if there is one."""

    expert: int
    low: bool = False


@dataclass(frozen=True)
class Decision:
    """To load for this layer and to prefetch for the next one, in the order of their transfers.
    What of `cur` is not loaded runs on the CPU."""

    on: tuple[Load, ...] = ()
    pre: tuple[Load, ...] = ()
    why: Why = field(default_factory=Why)


def t_c(given: Inputs, experts: Sequence[Due]) -> int:
    """A set of experts on the CPU."""
    return given.cpu_start + sum(map(given.cpu, experts)) if experts else 0


def t_g(given: Inputs, expert: Due) -> int:
    """One expert on the GPU."""
    return given.gpu_start + given.gpu(expert)


def hottest(dues: Sequence[Due], n: int) -> tuple[Load, ...]:
    """Loads of the last n of an ascending list, hottest first."""
    return tuple(Load(due.expert) for due in reversed(dues[len(dues) - n :]))
