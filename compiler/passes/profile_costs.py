"""Measure what the parts of a model cost on this machine, through the plan's own runtime:
costs.json.

A measurement is one job of a step's workers and kernels on made-up rows (pds_measure). Weights
rotate over layers and experts, so that caches hold of them what they hold in a step. Measurements
of all points take turns, so that what else the machine does spreads over them; the medians are
fitted. A table is kept in the cache, for other plans of models with the same dimensions. A GPU's
part is profile_gpu.py's. May import numpy, pdscope.{config,costs,engine,errors,plan,session} and
pdscope.compiler.{cost_source,costs,passmanager,source}.
"""

import contextlib
import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from pdscope import config
from pdscope.compiler.cost_source import CostSource
from pdscope.compiler.costs import (
    JSON,
    Bar,
    CostTable,
    Device,
    Figure,
    Machine,
    ModelKey,
    bar_of,
    expert_bytes,
    fit,
)
from pdscope.compiler.passmanager import Workspace, writing
from pdscope.compiler.source import Progress
from pdscope.engine import Engine
from pdscope.errors import DiskError, PlanError
from pdscope.plan import Plan
from pdscope.routing_records import moe_layers

SECONDS = 6.0  # for measuring, without loading the plan
ROUNDS = 25  # samples of a point, if there is time
LEAST = 3
TOKENS = 4096  # of an expert, at most
LARGE_JOB = 32  # experts of a job, as prefill has many: a few are less than the cores can share,
TOKENS_OF_JOB = 8192  # unless they have so many tokens together
CONTEXT = 4096
SEQUENCES = 2  # of a session that measures
PREFILL_ROWS = 128  # whose time with a context is compared with that without
ROTATE = 1 << 30  # bytes of experts that take turns: more than caches hold
BUSY = 1.5  # what is more than chance, of busy()
_COPIED = 4 << 30  # bytes of weights up to which a plan is loaded as for a run

PREDICTING = 16  # rows, at most, that a CPU plan predicts of: PDS_PREDICT_ROWS of plan_desc.h
BESIDE = (1, 8, 64, 512)  # tokens of the CPU's experts that are measured beside a busy link

_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
GRID = (*_STEPS, 768, 1024, 1536, 2048, 3072, TOKENS)


def busy(table: CostTable) -> float:
    """How many times longer than at best an expert mostly took, over its points: about 1.2 on a
    machine with nothing else to do."""
    ratios = sorted(bar.median / max(1, bar.min) for _, bar in table.cpu.expert.points)
    return ratios[len(ratios) // 2] if ratios else 1.0


class Clock(Protocol):
    """What is measured, each in ns."""

    def experts(self, n: int, tokens: int) -> int:
        """One job of n experts with so many tokens each."""

    def shared(self, rows: int) -> int: ...

    def attention(self, rows: int, context: bool) -> int:
        """Norm, attention, norm and gate; context: of rows behind Limits.context tokens."""

    def predict(self, rows: int) -> int:
        """Of rows that all predict."""

    def link(self, what: str, n: int) -> int:
        """Of n experts, or a small copy, to the GPU: link, link_busy or link_start."""

    def beside(self, moving: bool, n: int, tokens: int) -> int:
        """The CPU's job of n experts while others cross the link, or while that is idle."""


@dataclass(frozen=True)
class Limits:
    """What can be measured of a plan."""

    experts: int
    top_k: int
    max_rows: int
    context: int  # tokens that a sequence is given for attention's time with a context
    shared: bool
    predicts: bool
    loads: int = 0  # experts that cross the link to a GPU together; 0: there is none
    cpu_experts: int = 0  # that the CPU has to compute beside the link

    @property
    def expert_tokens(self) -> int:
        """Of all experts of a job."""
        return self.max_rows * self.top_k

    @property
    def prefill_rows(self) -> int:
        return min(PREFILL_ROWS, self.max_rows)


# what, experts or 0 / 1 for context, tokens or rows (link: 1); cpu_idle, cpu_busy: the CPU's
# experts beside an idle and a busy link
Key = tuple[str, int, int]


def points(limits: Limits) -> list[Key]:
    """What is to be measured, by ascending work within each kind."""
    many = min(limits.experts, max(8, limits.top_k), limits.expert_tokens)
    found: list[Key] = [("experts", n, 1) for n in _below(many)]
    for tokens in (t for t in GRID if 1 < t <= limits.expert_tokens):
        found.append(("experts", _job(limits, limits.experts, many, tokens), tokens))
    rows = [1 << i for i in range(13) if 1 << i <= limits.max_rows]
    found += [("attention", 0, n) for n in rows]
    if limits.prefill_rows not in rows:
        found.append(("attention", 0, limits.prefill_rows))
    found += [("attention", 1, n) for n in sorted({1, limits.prefill_rows})]
    if limits.shared:
        found += [("shared", 0, n) for n in rows]
    if limits.loads:
        found += [("link", limits.loads, 1), ("link_busy", limits.loads, 1), ("link_start", 0, 1)]
        most = limits.cpu_experts
        for tokens in (t for t in BESIDE if t <= limits.expert_tokens):
            n = _job(limits, most, min(most, max(8, limits.top_k)), tokens)
            found += [("cpu_idle", n, tokens), ("cpu_busy", n, tokens)]
    rows = sorted({1, min(PREDICTING, limits.max_rows)}) if limits.predicts else []
    return found + [("predict", 0, n) for n in rows]


def _job(limits: Limits, experts: int, many: int, tokens: int) -> int:
    """Experts of a job that have so many tokens each."""
    n = max(many, min(LARGE_JOB, TOKENS_OF_JOB // tokens)) if tokens > 1 else many
    return min(n, experts, limits.expert_tokens // tokens)


def _below(many: int) -> list[int]:
    """1, 2, 4 ... and `many`: jobs that tell a job's start from an expert's time."""
    return sorted({n for n in (1, 2, 4) if n < many} | {many})


def sample(
    clock: Clock,
    limits: Limits,
    *,
    seconds: float,
    now: Callable[[], float] = time.monotonic,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[Key, list[int]]:
    """LEAST to ROUNDS samples of each point, in about `seconds`.

    Points that a third of it does not reach in the first round are left out: the greatest of their
    kind. `advance` is told milliseconds.
    """
    begin, told = now(), 0
    taken: dict[Key, list[int]] = {}

    def take(key: Key) -> None:
        nonlocal told
        what, n, count = key
        if what == "experts":
            ns = clock.experts(n, count)
        elif what == "attention":
            ns = clock.attention(count, bool(n))
        elif what.startswith("link"):
            ns = clock.link(what, n)
        elif what.startswith("cpu"):
            ns = clock.beside(what == "cpu_busy", n, count)
        else:
            ns = clock.shared(count) if what == "shared" else clock.predict(count)
        taken.setdefault(key, []).append(ns)
        spent = int(1000 * min(now() - begin, seconds))
        advance(spent - told)
        told = spent

    # The lightest of every kind first: a slow machine has something of each.
    for key in sorted(points(limits), key=lambda key: key[2]):
        needed = (
            key[2] <= 2
            or key[:2] == ("attention", 1)
            or key == ("attention", 0, limits.prefill_rows)
        )
        if needed or now() - begin < seconds / LEAST:
            take(key)
    for done in range(1, ROUNDS):
        if done >= LEAST and now() - begin >= seconds:
            break
        for key in taken:
            if done >= LEAST and now() - begin >= seconds:
                break
            take(key)
    return taken


def device_of(taken: Mapping[Key, list[int]], limits: Limits) -> Device:
    """A device's costs of measurements that hold `points`, or the lighter of them."""
    start, each = _start_and_expert(taken)
    experts: dict[int, Bar] = {1: each}
    for what, n, tokens in taken:
        if what == "experts" and tokens > 1:
            experts[tokens] = _bar(taken[what, n, tokens], start.ns, n)
    curves = {
        name: fit(
            [
                (rows, bar_of(taken[what, n, rows]))
                for what, n, rows in taken
                if (what, n) == (name, 0)
            ]
        )
        for name in ("attention", "shared")
        if any(key[:2] == (name, 0) for key in taken)
    }
    predicted = taken.get(("predict", 0, 1))
    return Device(
        start=start,
        expert=fit(sorted(experts.items())),
        attention=curves["attention"],
        context_row=_context_row(taken, 1, limits.context),
        context_row_prefill=_context_row(taken, limits.prefill_rows, limits.context),
        shared=curves.get("shared"),
        predict=_figure(bar_of(predicted)) if predicted else None,
        predict_row=_predict_row(taken) if predicted else None,
    )


def _start_and_expert(taken: Mapping[Key, list[int]]) -> tuple[Figure, Bar]:
    """A job of n experts of one token takes start + n x each: the least squares line through its
    medians. With one expert alone, all of its time is the expert's."""
    jobs = {
        n: bar_of(ns) for (what, n, tokens), ns in taken.items() if (what, tokens) == ("experts", 1)
    }
    if len(jobs) == 1:
        ((n, bar),) = jobs.items()
        return Figure(0, Bar(0, 0, 0)), _divided(bar, n)
    count, total = len(jobs), sum(jobs)
    times = sum(bar.median for bar in jobs.values())
    above = count * sum(n * bar.median for n, bar in jobs.items()) - total * times
    below = count * sum(n * n for n in jobs) - total * total
    each = max(1, above // below)
    start = max(0, (times - each * total) // count)
    one, many = jobs[min(jobs)], jobs[max(jobs)]
    bar = Bar(*(max(0, ns - min(jobs) * each) for ns in (one.min, one.median, one.max)))
    n = max(jobs)
    expert = [max(1, (ns - start) // n) for ns in (many.min, many.median, many.max)]
    # The line's own slope is the fitted value; the bar is that of the largest job.
    return Figure(start, bar), Bar(min(expert[0], each), each, max(expert[2], each))


def _bar(samples: list[int], start: int, n: int) -> Bar:
    return bar_of([max(1, (ns - start) // n) for ns in samples])


def _divided(bar: Bar, n: int) -> Bar:
    return Bar(*(max(1, ns // n) for ns in (bar.min, bar.median, bar.max)))


def _context_row(taken: Mapping[Key, list[int]], rows: int, context: int) -> Figure:
    """ns for each row and 1024 tokens of context; 0 for a context too short to tell."""
    if not context:
        return Figure(0)
    without = bar_of(taken["attention", 0, rows])
    found = taken["attention", 1, rows]
    each = [max(0, ns - without.median) * 1024 // (rows * context) for ns in found]
    return _figure(bar_of(each))


def _predict_row(taken: Mapping[Key, list[int]]) -> Figure:
    """ns for each row behind the first."""
    one, rows = bar_of(taken["predict", 0, 1]).median, 1
    for what, _, n in taken:
        rows = max(rows, n) if what == "predict" else rows
    if rows == 1:
        return Figure(0)
    each = [max(0, ns - one) // (rows - 1) for ns in taken["predict", 0, rows]]
    return _figure(bar_of(each))


def _figure(bar: Bar) -> Figure:
    return Figure(bar.median, bar)


def room(max_context: int, max_rows: int, kv_block: int) -> tuple[int, int]:
    """Tokens of context that attention is measured behind, and those that a session for all
    measurements has place for."""
    context = min(CONTEXT, max_context - min(PREFILL_ROWS, max_rows))
    context = max(0, context) // kv_block * kv_block
    return context, context + 2 * min(max_rows, max_context) + 2 * kv_block


class PlanClock:
    """Measures the CPU's part through a loaded plan; weights rotate."""

    def __init__(self, engine: Engine, model: ModelKey) -> None:
        plan, info = engine.plan, engine.info
        layers = moe_layers(plan)
        layer_bytes = model.experts * expert_bytes(model)
        self.layers = layers[: max(1, -(-ROTATE // layer_bytes))]
        self.predicting = layers[:-1] if plan.data["predictor"] != "none" else []
        self.experts_of_layer = model.experts
        context, kv_tokens = room(info.max_context, info.max_rows, info.kv_block)
        self.limits = Limits(
            experts=model.experts,
            top_k=model.top_k,
            max_rows=info.max_rows,
            context=context,
            shared=model.shared_inter > 0,
            predicts=bool(self.predicting),
        )
        rows = min(info.max_rows, info.max_context)
        self.session = engine.session(max_seqs=SEQUENCES, kv_tokens=kv_tokens)
        left = context
        while left:
            step = min(left, rows)
            self.session.measure("context", self.layers[0], step, seq=1)
            left -= step
        self._turn = 0

    def warm(self) -> None:
        """Reads every weight that is to be measured once."""
        each = min(self.experts_of_layer, self.limits.expert_tokens)
        for layer in self.layers:
            for first in range(0, self.experts_of_layer, each):
                ids = range(first, min(first + each, self.experts_of_layer))
                self.session.measure("experts", layer, experts=dict.fromkeys(ids, 1))
            self.session.measure("attention", layer, 1)

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _layer(self) -> int:
        return self.layers[self._next() % len(self.layers)]

    def experts(self, n: int, tokens: int) -> int:
        layer = self._layer()
        first = self._turn // len(self.layers) * n
        ids = [(first + i) % self.experts_of_layer for i in range(n)]
        return self.session.measure("experts", layer, experts=dict.fromkeys(ids, tokens))

    def shared(self, rows: int) -> int:
        return self.session.measure("shared", self._layer(), rows)

    def attention(self, rows: int, context: bool) -> int:
        return self.session.measure("attention", self._layer(), rows, seq=int(context))

    def predict(self, rows: int) -> int:
        layer = self.predicting[self._next() % len(self.predicting)]
        return self.session.measure("predict", layer, rows)

    def link(self, what: str, n: int) -> int:
        """Raises InputError: of an engine without a GPU."""
        return self.session.measure(what, self._layer(), loads=range(n))

    def beside(self, moving: bool, n: int, tokens: int) -> int:
        """Raises InputError: of an engine without a GPU."""
        return self.session.measure(
            "experts_busy",
            self._layer(),
            experts=dict.fromkeys(range(n), tokens),
            loads=range(n if moving else 0),
        )


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the operating system calls it."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def measure(engine: Engine, model: ModelKey, progress: Progress) -> CostTable:
    """The table of a loaded plan: its CPU's part. About SECONDS, and the time to read 1 GiB of
    weights."""
    clock = PlanClock(engine, model)
    try:
        progress.start("measure costs", int(1000 * SECONDS), "ms")
        clock.warm()
        taken = sample(clock, clock.limits, seconds=SECONDS, advance=progress.advance)
    finally:
        clock.session.close()
    device = device_of(taken, clock.limits)
    return CostTable("measured", machine_of(engine), model, device)


def machine_of(engine: Engine) -> Machine:
    info = engine.info
    return Machine(cpu_name(), info.cores, info.threads, info.isa)


class GpuPart(Protocol):
    """Measures the GPU's part (profile_gpu.GpuProfile)."""

    def identity(self) -> str:
        """What of the GPU decides its times; "": this machine has none."""

    def add(self, table: CostTable) -> CostTable:
        """The table with GPU and link, unless this plan cannot use the GPU."""


@dataclass(frozen=True)
class ProfileCosts:
    """costs.json: measured here, unless the cache has it; or what `source` gives."""

    plan: Plan = field(repr=False)  # whole, but for plan.json
    model: ModelKey
    source: CostSource
    code: str  # identity of the compiler and its runtime
    progress: Progress = field(repr=False)
    gpu: GpuPart | None = None  # of a plan for one

    name = "profile-costs"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        """Of a measurement also the machine: a compile may be resumed on another one."""
        given = self.source.table(self.model)
        return {
            "model": json.dumps(asdict(self.model)),
            "given": "" if given is None else given.text(),
            "measured": f"{cpu_name()} {platform.node()}" if self.source.measured else "",
            "gpu": self.gpu.identity() if self.gpu and self.source.measured else "",
        }

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        if self.source.measured:
            table = self.source.complete(self._measured(), self.model)
        else:
            given = self.source.table(self.model)
            assert given is not None
            table = given
        return {workspace.write(JSON, table.text()): None}

    def _measured(self) -> CostTable:
        table = self._cpu()
        identity = self.gpu.identity() if self.gpu else ""
        if self.gpu is None or not identity:
            return table
        cache = self._cache(table.machine, identity)
        if (kept := self._kept(cache)) is not None:
            return kept
        table = self.gpu.add(table)
        if table.gpu is not None:
            self._keep(cache, table)
        return table

    def _cpu(self) -> CostTable:
        weights = "mmap" if self.plan.bytes_under("weights") > _COPIED else None
        if self.plan.absent_weights:
            weights = "dummy"
        with Engine(self.plan, weights=weights, device="cpu") as engine:
            cache = self._cache(machine_of(engine))
            if (kept := self._kept(cache)) is not None:
                return kept
            table = measure(engine, self.model, self.progress)
        self._keep(cache, table)
        return table

    def _keep(self, cache: Path, table: CostTable) -> None:
        if busy(table) > BUSY:  # another compile may do better
            return
        with contextlib.suppress(OSError, DiskError):
            with writing(cache / f"{self.plan.max_rows}.json") as path:
                path.write_text(table.text(), encoding="utf-8")

    def _cache(self, machine: Machine, gpu: str = "") -> Path:
        """The folder of tables of this machine and model: MAX_ROWS.json each, as the rows of a step
        decide how far curves reach."""
        what = [asdict(machine), asdict(self.model), self.code, *([gpu] if gpu else [])]
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return config.cache_dir() / "costs" / key

    def _kept(self, cache: Path) -> CostTable | None:
        """One that reaches as far as a plan of so many rows, if one is whole."""
        found = [(int(p.stem), p) for p in cache.glob("*.json") if p.stem.isdecimal()]
        for _, path in sorted(pair for pair in found if pair[0] >= self.plan.max_rows):
            with contextlib.suppress(PlanError):  # damaged
                table = CostTable.read(path)
                table.check_model(self.model, str(path))
                return table
        return None
