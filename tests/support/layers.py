"""Layers of real models on real machines, at random: what decisions are judged on.

Costs are derived from the paper's tables (an expert over the link with AsyncIO: table 3; one
token on a CPU and on a GPU: table 2) and, for the H200, from measurements: 51 GB/s over the link,
105 GB/s of memory beside it, 13 TFLOP/s of AMX. Many tokens are counted at the rate of the matrix
units.

May import pdscope.compiler and support.decisions.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from support.decisions import Line, Table

from pdscope.compiler.decision import ONE_Q16, Due, Inputs, Policy, ascending
from pdscope.ir.isa import Phase

US, MS = 1_000, 1_000_000


@dataclass(frozen=True)
class Model:
    experts: int
    top_k: int
    mflop: float  # of one expert and token
    parts: int  # of 4 MiB, in which an expert crosses the link


@dataclass(frozen=True)
class Machine:
    """Times of one expert in us: over the link; one token on the CPU and on the GPU. Rates in
    TFLOP/s. attention: us of one row, of each further row."""

    name: str
    model: Model
    io: float
    cpu: float
    cpu_start: float
    gpu: float
    gpu_start: float
    cpu_rate: float
    gpu_rate: float
    attention: tuple[float, float]

    @property
    def table(self) -> Table:
        return Table(
            10 * US,
            round(self.io * US),
            round(self.cpu_start * US),
            round(self.gpu_start * US),
            self._line(self.cpu, self.cpu_rate),
            self._line(self.gpu, self.gpu_rate),
        )

    def _line(self, one: float, rate: float) -> Line:
        """Reading the weights up to where computing takes as long, then computing."""
        each = self.model.mflop / rate  # 1e6 / 1e12 s: us
        even = max(2, round(one / each))
        return Line(
            ((1, round(one * US)), (even, round(one * US)), (2 * even, round(2 * one * US)))
        )


MIXTRAL, QWEN, DEEPSEEK = Model(8, 2, 352.0, 84), Model(128, 8, 9.4, 3), Model(64, 6, 17.3, 5)

MACHINES = (
    Machine("a100 mixtral", MIXTRAL, 13980, 2880, 1370, 230, 60, 1.2, 180, (500, 3.0)),
    Machine("a100 qwen", QWEN, 440, 160, 180, 12, 30, 1.0, 120, (400, 1.0)),
    Machine("a100 deepseek", DEEPSEEK, 760, 210, 220, 16, 30, 1.0, 120, (400, 1.0)),
    Machine("3090 mixtral", MIXTRAL, 13980, 9800, 1400, 450, 100, 0.5, 60, (600, 5.0)),
    Machine("3090 qwen", QWEN, 440, 1200, 440, 130, 110, 0.4, 40, (500, 2.0)),
    Machine("3090 deepseek", DEEPSEEK, 760, 1500, 600, 170, 120, 0.4, 40, (500, 2.0)),
    Machine("v100 mixtral", MIXTRAL, 26700, 2880, 1370, 400, 60, 1.2, 80, (600, 5.0)),
    Machine("v100 qwen", QWEN, 790, 160, 180, 20, 30, 1.0, 60, (500, 2.0)),
    Machine("h200 qwen", QWEN, 185, 89, 15, 2.6, 6, 13, 400, (60, 0.25)),
    Machine("h200 deepseek", DEEPSEEK, 324, 164, 15, 4.5, 6, 13, 400, (60, 0.25)),
    Machine("h200 mixtral", MIXTRAL, 6600, 3350, 15, 90, 6, 13, 400, (80, 0.4)),
)


def routed(r: random.Random, model: Model, rows: int) -> list[Due]:
    """The experts that so many rows activate, popularity skewed as traces are."""
    skew = r.uniform(0.2, 1.0)
    weights = [r.random() ** 2 * skew + (1 - skew) * 0.4 + 0.02 for _ in range(model.experts)]
    counts: dict[int, int] = {}
    for _ in range(min(rows, 256)):
        for expert in _distinct(r, weights, model.top_k):
            counts[expert] = counts.get(expert, 0) + 1
    scale = max(1, rows // 256)
    return [
        Due(e, min(rows, max(1, n * scale + (r.randrange(scale) if scale > 1 else 0))))
        for e, n in counts.items()
    ]


def _distinct(r: random.Random, weights: Sequence[float], n: int) -> list[int]:
    keys = [(r.random() ** (1 / w), e) for e, w in enumerate(weights)]
    return [e for _, e in sorted(keys, reverse=True)[:n]]


def a_layer(
    r: random.Random,
    machine: Machine,
    phase: Phase,
    most: int = 1024,
    hit_q16: int = ONE_Q16,
    policy: Policy = Policy.ADAPTSCHED,
) -> Inputs:
    """A layer of the model in the middle of a step; at most `most` experts due in each list."""
    model, table = machine.model, machine.table
    rows = {Phase.DECODE: 1, Phase.BATCH: r.randint(2, 16), Phase.PREFILL: 2 ** r.randint(5, 12)}
    n = rows[phase]
    on_gpu = r.choice((0.0, 0.1, 0.25, 0.5))

    def split(dues: list[Due]) -> tuple[list[Due], list[Due]]:
        # Residents are the popular ones, more often than not.
        dues = sorted(dues, key=lambda due: due.tokens * r.uniform(0.3, 1.0), reverse=True)
        k = sum(r.random() < on_gpu for _ in dues)
        return dues[:k], dues[k:]

    res, cur = split(routed(r, model, n))
    next_res, following = split(routed(r, model, n))
    attention, row = machine.attention
    late = r.choice((0, 0, min(len(res), 1), min(len(res), 2)))
    backlog = 0
    if late:
        backlog = (late - 1) * table.io_expert + r.randrange(1, table.io_expert + 1)
    shared = table.gpu_start if model is DEEPSEEK else 0
    gpu = sum(table.gpu_expert.at(due.tokens) for due in next_res)
    return Inputs(
        table,
        ascending(r.sample(cur, min(most, len(cur)))),
        tuple(res),
        ascending(r.sample(following, min(most, len(following)))),
        late=late,
        policy=policy,
        phase=phase,
        top_k=model.top_k,
        hit_q16=hit_q16,
        free_slots=r.choice((4, 8, 16, 64)) if model is not MIXTRAL else r.choice((2, 4, 8)),
        stream=phase is Phase.PREFILL,
        attention=round((attention + row * n) * US),
        backlog=backlog,
        gpu_busy=shared,
        next_gpu=shared + (table.gpu_start + gpu if next_res else 0),
    )
