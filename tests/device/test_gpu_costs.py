"""Costs of this machine's GPU and of the link to it, as `--costs auto` measures them.

Holds of the issue "AdaptSched and its lowering": "a pass that measures on the target: expert time
on CPU and on GPU by token count (1 to 4096, monotone piecewise fit with error bars), transfer time
per expert (alone, and while the CPU computes), I/O start-up, attention and gate per phase and
context length, predictor time". Skipped where there is no GPU.
"""

import json
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from support.cuda import Driver, at, ffi
from support.gpu import loaded, model_of
from support.plans import PlanStore
from support.real_gpu import real_gpu

import pdscope
from pdscope import config
from pdscope.compiler.passes import profile_costs
from pdscope.costs import CostTable
from pdscope.plan import Plan

__all__ = ["real_gpu"]

US, MS = 1_000, 1_000_000


@pytest.fixture
def plan(real_gpu: None, plans: PlanStore) -> Plan:
    """Of a model with experts of several megabytes; nothing measured before is used."""

    def make(out: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(profile_costs, "BUSY", 0)  # no table is kept, so none is found either
            pdscope.compile(
                model_of(plans, "wide"), out, dtype="bf16", costs="auto", gpu_mem="3GiB"
            )

    return Plan.open(plans.once("gpu-costs-measured", make))


@pytest.fixture
def table(plan: Plan) -> CostTable:
    found = CostTable.of_plan(plan)
    assert found is not None
    return found


def pinned_copy(size: int, count: int) -> int:
    """ns for each of so many copies from pinned memory, whole, one behind the other."""
    driver = Driver(config.cuda_driver() or "libcuda.so.1")
    driver.open()
    try:
        host = driver.pinned(size // 4 * count)
        host[:] = np.arange(len(host), dtype=np.uint32)
        device, stream = driver.alloc(size // 4 * count), driver.stream()
        begin, end = driver.event(), driver.event()
        found = []
        for _ in range(15):
            driver.ok.cuEventRecord(begin, stream)
            for i in range(count):
                where = at(host, size // 4 * i)
                driver.ok.cuMemcpyHtoDAsync(device + size * i, where, size, stream)
            driver.ok.cuEventRecord(end, stream)
            driver.ok.cuStreamSynchronize(stream)
            found.append(driver.ok.cuEventElapsedTime(begin, end) * 1e6)
        for event in (begin, end):
            driver.ok.cuEventDestroy(event)
        driver.ok.cuStreamDestroy(stream)
        driver.ok.cuMemFree(device)
        driver.ok.cuMemFreeHost(ffi().cast("void *", host.ctypes.data))
    finally:
        driver.close()
    return int(median(found)) // count


def test_the_gpu_is_measured(table: CostTable) -> None:
    gpu = table.gpu
    assert gpu is not None and table.source == "measured" and table.machine.gpu
    for fitted in (gpu.expert, gpu.attention):
        curve = fitted.curve
        assert all(a <= b for a, b in pairwise(curve.ns)), curve
        assert curve.ns[0] < curve.ns[-1] < 100 * MS, curve
        assert all(0 < bar.min <= bar.median <= bar.max for _, bar in fitted.points)
    assert gpu.expert.curve.tokens[-1] == 1024  # 512 rows x top-2
    assert US < gpu.start.ns + gpu.expert.curve.at(1) < MS
    assert 5 * US < gpu.attention.curve.at(1) < 5 * MS
    assert gpu.predict == table.cpu.predict is not None


def test_the_link_is_as_fast_as_a_plain_copy(table: CostTable, plan: Plan) -> None:
    """From pinned memory: within a fifth."""
    link = table.link
    assert link is not None and table.machine.link == "pinned memory to the GPU"
    size = json.loads(plan.read_text("memory.json"))["gpu"]["expert_bytes"]
    plain = pinned_copy(size, 4)
    assert 0.8 * plain <= link.expert_alone.ns <= 1.2 * plain, (link, plain, size)
    assert link.expert.ns >= 0.8 * plain, (link, plain)
    assert link.start.ns < 200 * US, link


def test_the_plan_runs(table: CostTable, plan: Plan) -> None:
    with loaded(plan) as engine:
        first = np.array(engine.prefill([1, 2, 3]))
        assert np.isfinite(first).all()
