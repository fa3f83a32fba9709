"""How long things take: kernels, copies, the CPU's work. All times are whole nanoseconds.

May import pdscope.costs, pdscope.compiler.costs and the constants of passes.plan_gpu.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdscope.compiler.costs import ModelKey, expert_bytes
from pdscope.compiler.passes.plan_gpu import PREDICT_ROWS
from pdscope.costs import Costs, CostTable, Device

SECOND = 10**9
_AT_ONCE = 1 << 60  # bytes a second: less than a nanosecond for any copy


@dataclass(frozen=True)
class Link:
    """Both directions of the link: bytes a second, also while the CPU computes (0: the same), and
    what a copy takes before its first byte moves: `start` only where the link was idle."""

    h2d: int
    d2h: int
    h2d_busy: int = 0
    d2h_busy: int = 0
    h2d_start: int = 0
    d2h_start: int = 0
    h2d_latency: int = 0
    d2h_latency: int = 0
    enqueue: int = 0  # of the host, for each piece of work that it submits


class Timing(Protocol):
    """What the executor asks. Names of kernels and of host work are the runtime's
    (runtime_c/src/gpu.h, gpu_step.c); `tokens`: of each piece of the work; `extra`: of attention,
    thousands of (row, token of context) pairs."""

    @property
    def link(self) -> Link: ...

    def kernel(self, name: str, tokens: Sequence[int], extra: int) -> int: ...

    def host(self, name: str, tokens: Sequence[int]) -> int: ...

    def host_busy(self, name: str, tokens: Sequence[int]) -> int:
        """The same if the link moves bytes to the GPU all the time: no less."""
        ...


@dataclass(frozen=True)
class Work:
    """One kind of work: `base`, a piecewise linear curve over the tokens of each piece (the first
    knot's value below it, the last two knots' slope beyond; rounded down), `extra_num` /
    `extra_den` for each unit of extra work."""

    base: int = 0
    knots: tuple[tuple[int, int], ...] = ()  # (tokens, ns), ascending tokens
    extra_num: int = 0
    extra_den: int = 1

    def ns(self, tokens: Sequence[int], extra: int) -> int:
        total = self.base + extra * self.extra_num // self.extra_den
        return max(0, total + sum(map(self.one, tokens)))

    def one(self, tokens: int) -> int:
        knots = self.knots
        if not knots or not tokens:
            return 0
        if len(knots) == 1 or tokens <= knots[0][0]:
            return knots[0][1]
        right = next((k for k in range(1, len(knots) - 1) if tokens <= knots[k][0]), len(knots) - 1)
        (x0, y0), (x1, y1) = knots[right - 1], knots[right]
        return y0 + (y1 - y0) * (tokens - x0) // (x1 - x0)


@dataclass(frozen=True)
class Given:
    """Times by name, whatever they are of; work without a name here takes no time."""

    link: Link
    kernels: dict[str, Work] = field(default_factory=dict)
    hosts: dict[str, Work] = field(default_factory=dict)

    def kernel(self, name: str, tokens: Sequence[int], extra: int) -> int:
        work = self.kernels.get(name)
        return work.ns(tokens, extra) if work else 0

    def host(self, name: str, tokens: Sequence[int]) -> int:
        work = self.hosts.get(name)
        return work.ns(tokens, 0) if work else 0

    def host_busy(self, name: str, tokens: Sequence[int]) -> int:
        return self.host(name, tokens)


class Tabled:
    """Times of a cost table.

    Attention's curve holds its norms and the gate, so these take nothing by themselves; neither do
    rope, combine and the final norm, which the table does not have. It also holds the copies to the
    host behind the gate, and the head's time its logits: copies to the host take nothing by
    themselves. The head and the dense layers take what the table says of as many bytes of an
    expert. A chunk of an expert moves at the expert's rate.
    """

    def __init__(self, table: CostTable, model: ModelKey, dense_inter: int, vocab: int) -> None:
        """Raises PlanError for a table without a GPU and its link."""
        self.costs: Costs = table.costs()
        assert table.gpu is not None and table.link is not None
        self.gpu: Device = table.gpu
        self.cpu: Device = table.cpu
        size = expert_bytes(model)
        alone, busy = (max(1, f.ns) for f in (table.link.expert_alone, table.link.expert))
        start = table.link.start.ns
        fast, slow = size * SECOND // alone, size * SECOND // busy
        self.link = Link(
            h2d=max(1, fast),
            d2h=_AT_ONCE,
            h2d_busy=max(1, slow),
            h2d_start=start,
        )
        # Of an expert: its three matrices are hidden x inter each.
        self._dense = dense_inter, model.inter
        self._head = vocab, 3 * model.inter
        self._logits = 4 * vocab * alone // size  # of a row, to the host
        self._seen: dict[tuple[str, tuple[int, ...], int], int] = {}

    def kernel(self, name: str, tokens: Sequence[int], extra: int) -> int:
        key = name, tuple(tokens), extra
        if key not in self._seen:
            self._seen[key] = self._kernel(*key)
        return self._seen[key]

    def _kernel(self, name: str, tokens: tuple[int, ...], extra: int) -> int:
        costs = self.costs
        expert = costs.gpu_expert
        match name:
            case "attention":
                (rows,) = tokens
                each = self.gpu.context_row_prefill if rows > 16 else self.gpu.context_row
                return costs.attention.at(rows) + each.ns * extra
            case "experts":
                return costs.gpu_start + sum(map(expert.at, tokens))
            case "shared":
                return sum(map(costs.shared.at, tokens))
            case "mlp":
                return costs.gpu_start + expert.at(tokens[0]) * self._dense[0] // self._dense[1]
            case "lm_head":
                head = costs.gpu_start + expert.at(tokens[0]) * self._head[0] // self._head[1]
                return head + tokens[0] * self._logits
            case _:
                return 0

    def host(self, name: str, tokens: Sequence[int]) -> int:
        costs = self.costs
        match name:
            case "cpu.experts":
                return costs.cpu_start + sum(map(costs.cpu_expert.at, tokens))
            case "cpu.predict":
                return self._predict(tokens[0])
            case _:
                return 0

    def _predict(self, rows: int) -> int:
        """Of a step's rows at most PREDICT_ROWS predict, evenly spaced ones."""
        cpu, each = self.cpu, -(-rows // PREDICT_ROWS)
        first = cpu.predict.ns if cpu.predict else 0
        return first + (-(-rows // each) - 1) * (cpu.predict_row.ns if cpu.predict_row else 0)

    def host_busy(self, name: str, tokens: Sequence[int]) -> int:
        alone = self.host(name, tokens)
        if name != "cpu.experts" or self.cpu.expert_busy is None:
            return alone
        each = self.cpu.expert_busy.curve
        return max(alone, self.costs.cpu_start + sum(map(each.at, tokens)))
