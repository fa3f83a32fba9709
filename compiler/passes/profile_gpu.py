"""Measure what the parts of a model cost on this machine's GPU, and over the link to it.

A plan's own slots and programs follow from its costs, so measurements run through a provisional
plan beside it: the same weights, library and kernels, and programs whose ring has as many slots as
fit. Points, turns and fits are those of profile_costs.py. May import numpy, pdscope.{costs,engine,
errors,ir,native,placement,plan} and pdscope.compiler.{costs,gpu_arch,lowered,passmanager,source,
passes}.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from pdscope.compiler.costs import (
    JSON,
    MAX_NS,
    Bar,
    CostTable,
    Curve,
    Figure,
    Fitted,
    Link,
    ModelKey,
    bar_of,
)
from pdscope.compiler.gpu_arch import present
from pdscope.compiler.lowered import LoweredModel, ceil_to
from pdscope.compiler.passes import profile_costs
from pdscope.compiler.passes.gpu_programs import ExpertSlots, gpu_programs
from pdscope.compiler.passes.hot_experts import JSON as HOT
from pdscope.compiler.passes.hot_experts import PROGRAMS
from pdscope.compiler.passes.plan_gpu import ALIGN, GpuMemory
from pdscope.compiler.passes.plan_memory import MemoryPlan
from pdscope.compiler.passes.profile_costs import Key, PlanClock
from pdscope.compiler.passmanager import sha256_file
from pdscope.compiler.source import Progress
from pdscope.engine import Engine
from pdscope.errors import TargetError
from pdscope.ir.encode import encode
from pdscope.ir.program import Program
from pdscope.native import is_driver_error
from pdscope.placement import kernel_images
from pdscope.plan import Plan

LINK_BYTES = 256 << 20  # that cross the link for one sample, if an expert is not more
LOADS = 8  # experts of such a sample, at most
COPY = 4096  # bytes of a small copy: COPY_BYTES of measure_gpu.c
POLICY = "adaptsched"  # attention is measured as where the next layer is predicted


@dataclass(frozen=True)
class GpuProfile:
    """Adds a GPU's part to a measured table. `plan`: whole but for plan.json and what the GPU's
    programs need; `folder`: where the provisional one may lie, in the workspace; `notes` is told
    why a GPU that is there cannot be used."""

    plan: Plan = field(repr=False)
    lowered: LoweredModel = field(repr=False)
    memory: MemoryPlan = field(repr=False)
    gpu: GpuMemory
    model: ModelKey
    folder: Path
    notes: list[str] = field(repr=False)
    progress: Progress = field(repr=False)

    def identity(self) -> str:
        """The GPU, its driver and the kernels; "": there is no GPU. Raises InputError for kernels
        of PDSCOPE_GPU_KERNELS that are not there."""
        found = present()
        if not found.architectures:
            return ""
        kernels = [sha256_file(path) for path in kernel_images(self.plan)]
        digest = hashlib.sha256(" ".join(kernels).encode()).hexdigest()
        return f"{found.name}; CUDA {found.cuda[0]}.{found.cuda[1]}; kernels {digest}"

    def add(self, table: CostTable) -> CostTable:
        """Raises BudgetError where the GPU's memory is taken, PdscopeError where it fails."""
        ring = self._ring()
        with self._provisional(table, ring) as plan:
            try:
                weights = "dummy" if plan.absent_weights else None
                engine = Engine(plan, device="gpu", predictor="off", weights=weights)
            except TargetError as error:
                if not is_driver_error(error):
                    raise
                self.notes.append(f"costs: the GPU was not measured: {error}")
                return table
            with engine:
                return self._measure(engine, table, ring)

    def _measure(self, engine: Engine, table: CostTable, ring: int) -> CostTable:
        info = engine.gpu()["info"]
        clock = GpuClock(engine, self.model, ring, info["expert_bytes"])
        seconds = profile_costs.SECONDS
        try:
            self.progress.start("measure the GPU", int(1000 * seconds), "ms")
            clock.warm()
            advance = self.progress.advance
            taken = profile_costs.sample(clock, clock.limits, seconds=seconds, advance=advance)
        finally:
            clock.session.close()
        device = replace(
            profile_costs.device_of(taken, clock.limits),
            predict=table.cpu.predict,
            predict_row=table.cpu.predict_row,
        )
        pinned = "pinned" if info["pinned"] else "pageable"
        machine = replace(table.machine, gpu=info["name"], link=f"{pinned} memory to the GPU")
        link = link_of(taken, clock.limits.loads, info["expert_bytes"])
        cpu = replace(table.cpu, expert_busy=busy_of(taken, table.cpu.expert.curve))
        return replace(table, machine=machine, cpu=cpu, gpu=device, link=link)

    # --- the provisional plan ---

    def _session(self) -> int:
        """Bytes on the GPU of a session that measures."""
        memory = self.memory
        _, tokens = profile_costs.room(memory.max_context, memory.max_rows, memory.kv_block)
        blocks = ceil_to(tokens, memory.kv_block) // memory.kv_block
        tables = profile_costs.SEQUENCES * self.gpu.tables
        parts = (self.gpu.scratch, blocks * memory.kv_block_bytes, self.gpu.rows, tables)
        return sum(ceil_to(part, ALIGN) for part in parts)

    def _ring(self) -> int:
        """Slots: enough that no cache holds them, as far as --gpu-mem goes; two at least."""
        gpu = self.gpu
        left = gpu.cap - gpu.reserve - gpu.weights - self._session()
        many = max(LOADS, self.model.top_k, profile_costs.ROTATE // gpu.expert + 1)
        return min(max(2, left // gpu.expert), many, self.model.experts)

    @contextmanager
    def _provisional(self, table: CostTable, ring: int) -> Iterator[Plan]:
        """A directory of links to the plan's files, with programs, and made-up costs to decide
        by: no step is run."""
        folder = self.folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        own: dict[str, bytes] = {
            PROGRAMS: encode(self._programs(ring)),
            HOT: json.dumps({"layers": []}).encode(),
            JSON: _made_up(table).text().encode(),
        }
        try:
            for entry in self.plan.path.iterdir():
                if entry.name not in (*own, "plan.json"):
                    (folder / entry.name).symlink_to(entry.resolve())
            for name, content in own.items():
                (folder / name).write_bytes(content)
            gpu = self.gpu
            need = gpu.reserve + gpu.weights + self._session() + ring * gpu.expert
            described = {"mem": max(gpu.cap, need), "reserve": gpu.reserve, "policy": POLICY}
            described |= {"resident": 0, "ring": ring}
            files = self.plan.files | {
                name: {"bytes": len(content), "sha256": ""} for name, content in own.items()
            }
            yield Plan(folder, self.plan.data | {"files": files, "gpu": described})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _programs(self, ring: int) -> list[Program]:
        slots = ExpertSlots(tuple(() for _ in self.lowered.layers), ring)
        return gpu_programs(self.lowered, slots, self.memory.max_rows)


def _made_up(table: CostTable) -> CostTable:
    return replace(table, gpu=table.cpu, link=Link(Figure(0), Figure(1), Figure(1)))


class GpuClock(PlanClock):
    """Measures the GPU's part through a loaded plan that has a ring and no resident experts; slots
    rotate as layers do."""

    def __init__(self, engine: Engine, model: ModelKey, ring: int, expert_bytes: int) -> None:
        super().__init__(engine, model)
        loads = max(1, min(LOADS, model.experts, LINK_BYTES // expert_bytes))
        self.limits = replace(
            self.limits,
            experts=ring,
            predicts=False,
            loads=loads,
            cpu_experts=model.experts,
        )
        self.ring, self.experts_of_model = ring, model.experts
        # What the CPU computes beside the link: more than its caches hold.
        self._busy = dict.fromkeys(range(min(model.experts, self.limits.expert_tokens)), 1)

    def warm(self) -> None:
        """Every slot has an expert, every kernel has run."""
        for layer in self.layers:
            self.session.measure("link", layer, loads=range(self.ring))
            self.session.measure("gpu_attention", layer, 1)
        self.experts(min(self.ring, self.limits.expert_tokens), 1)

    def experts(self, n: int, tokens: int) -> int:
        given = dict.fromkeys(self._ids(n, self.ring), tokens)
        return self.session.measure("gpu_experts", self._layer(), experts=given)

    def shared(self, rows: int) -> int:
        return self.session.measure("gpu_shared", self._layer(), rows)

    def attention(self, rows: int, context: bool) -> int:
        return self.session.measure("gpu_attention", self._layer(), rows, seq=int(context))

    def link(self, what: str, n: int) -> int:
        loads = self._ids(n, self.experts_of_model)
        busy = self._busy if what == "link_busy" else {}
        return self.session.measure(what, self._layer(), experts=busy, loads=loads)

    def beside(self, moving: bool, n: int, tokens: int) -> int:
        experts = dict.fromkeys(self._ids(n, self.experts_of_model), tokens)
        loads = self._ids(self.limits.loads if moving else 0, self.experts_of_model)
        return self.session.measure("experts_busy", self._layer(), experts=experts, loads=loads)

    def _ids(self, n: int, of: int) -> list[int]:
        """The next n of so many, in turn."""
        first = self._given
        self._given += n
        return [(first + i) % of for i in range(n)]

    _given = 0


def busy_of(taken: Mapping[Key, list[int]], alone: Curve) -> Fitted:
    """The CPU's expert while the link moves others: `alone` times how much longer a job took than
    one right before it, beside an idle link. Nothing gets faster by it."""
    points: list[tuple[int, Bar]] = []
    for (what, n, tokens), ns in taken.items():
        if what != "cpu_busy" or not (idle := taken.get(("cpu_idle", n, tokens))):
            continue
        longer = [b / max(1, a) for a, b in zip(idle, ns, strict=False)]
        points.append((tokens, bar_of([int(alone.at(tokens) * factor) for factor in longer])))
    points.sort(key=lambda point: point[0])
    if not points:
        return Fitted(alone)
    measured = [tokens for tokens, _ in points]
    factors = [max(1.0, bar.median / max(1, alone.at(tokens))) for tokens, bar in points]
    at_knots = np.interp(alone.tokens, measured, factors).tolist()
    ns = [
        min(MAX_NS - 1, int(value * factor))
        for value, factor in zip(alone.ns, at_knots, strict=True)
    ]
    return Fitted(Curve(alone.tokens, tuple(accumulate(ns, max))), tuple(points))


def link_of(taken: Mapping[Key, list[int]], loads: int, expert_bytes: int) -> Link:
    """Of measurements of `loads` experts together, and of a small copy: both have the start of an
    idle link, and bytes at one rate."""
    small, many = bar_of(taken["link_start", 0, 1]), bar_of(taken["link", loads, 1])
    copied = min(COPY, expert_bytes)
    beyond = max(1, loads * expert_bytes - copied)
    own = copied * max(0, many.median - small.median) // beyond
    start = _bar(small, lambda ns: max(0, ns - own))

    def each(what: str) -> Figure:
        taken_ns = bar_of(taken[what, loads, 1])
        bar = _bar(taken_ns, lambda ns: max(1, (ns - start.median) // loads))
        return Figure(bar.median, bar)

    return Link(Figure(start.median, start), each("link_busy"), each("link"))


def _bar(found: Bar, of: Callable[[int], int]) -> Bar:
    return Bar(of(found.min), of(found.median), of(found.max))
