"""The memory of GPU plans, and what crosses the link, by the mock driver's counters.

Holds: "`pdscope-compile --dry-run --json` prints the whole memory table before anything is loaded,
and it equals what a load then measures. A budget that cannot hold the non-expert part is refused
with the smallest that can"; "KV cache for `--max-context`, activations, buffers, predictor and
safety margin all counted"; "A prefetch ledger: useful, wasted and late bytes per layer".
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import run_here
from support.gpu import (
    CONTEXT,
    MOCKS,
    SLOTS,
    Mock,
    engine_run,
    gpu_plan,
    hardware,
    loaded,
    memory_of,
    mock,
    model_of,
    on_cpu,
    same,
    with_room,
)
from support.plans import PlanStore
from support.runs import random_ids

from pdscope.engine import Engine
from pdscope.errors import BudgetError
from pdscope.ir.isa import Opcode, Queue
from pdscope.session import Session

__all__ = ["mock"]

MODEL = "shared"
LIVE = ("device_live", "device_allocations", "pinned_live", "streams", "events", "modules")


def compile_options(plans: PlanStore, *more: Any) -> tuple[Any, ...]:
    options = ("--dtype", "bf16", "--max-context", CONTEXT, "--costs", hardware(plans))
    return (model_of(plans, MODEL), *options, "--gpu-reserve", 0, *more)


def dry_run(plans: PlanStore, mem: int) -> dict[str, Any]:
    ran = run_here(
        "pdscope-compile", *compile_options(plans, "--gpu-mem", mem, "--dry-run", "--json")
    )
    assert ran.status == 0, ran.err
    table: dict[str, Any] = json.loads(ran.out)["memory"]["gpu"]
    return table


@pytest.mark.parametrize("slots", SLOTS)
def test_table_is_what_a_load_measures(plans: PlanStore, mock: Mock, slots: str) -> None:
    """The dry run's table, the plan's, the engine's and the driver's counters are the same; nothing
    that a session does takes more, and closing gives everything back."""
    plan = gpu_plan(plans, MODEL, "bf16", slots)
    table = memory_of(plan)
    assert dry_run(plans, table["cap_bytes"]) == table
    mock.reset(f"memory={table['cap_bytes']}")
    with loaded(plan) as engine:
        loads = table["weight_bytes"] + table["slot_bytes"]
        assert mock.counter("device_live") == loads
        info = engine.gpu()["info"]
        assert info["used"] == loads
        for name in ("weight_bytes", "slot_bytes", "expert_bytes"):
            assert info[name] == table[name]
        assert (info["resident"], info["ring"]) == (table["resident_experts"], table["ring_slots"])
        assert info["cap"] == table["cap_bytes"]
        session = engine.session()
        assert mock.counter("device_live") == table["total_bytes"] == engine.gpu()["info"]["used"]
        session.prefill(random_ids(engine.info.vocab, 300))
        session.decode(1)
        if slots != "all":  # where a compile has given all there is to experts
            with pytest.raises(BudgetError, match="lower --max-context or the sessions' kv_tokens"):
                engine.session()
        session.close()
        assert mock.counter("device_live") == loads
    assert mock.counter("device_peak") == table["total_bytes"] <= table["cap_bytes"]


def test_reserve_is_not_used(plans: PlanStore, mock: Mock) -> None:
    """What the driver takes for itself is counted, and left to it."""
    import pdscope

    table = memory_of(gpu_plan(plans, MODEL, "bf16", 5))
    reserve = 10 << 20
    options = {"dtype": "bf16", "max_context": CONTEXT, "costs": hardware(plans)}
    mem = table["total_bytes"] + reserve
    plan = plans.compile(model_of(plans, MODEL), **options, gpu_mem=mem, gpu_reserve=reserve)
    assert memory_of(plan)["total_bytes"] == mem
    mock.reset(f"memory={mem}; context={reserve}")
    with loaded(plan) as engine, engine.session() as session:
        session.prefill([1, 2, 3])
        assert mock.counter("device_live") == mem - reserve
    mock.reset(f"memory={mem}; context={reserve + 1}")  # another process came first
    with pdscope.load(plan, device="gpu", weights="copy") as engine:
        with pytest.raises(BudgetError, match="the device has no .* left for a session"):
            engine.session()


def test_smallest_budget(plans: PlanStore, mock: Mock, tmp_path: Path) -> None:
    """One byte less than what is no expert takes is refused, naming the smallest, which works."""
    table = memory_of(gpu_plan(plans, MODEL, "bf16", "none"))
    least = table["total_bytes"]
    assert table["resident_experts"] == table["ring_slots"] == 0
    out = tmp_path / "plan"
    line = run_here(
        "pdscope-compile", *compile_options(plans, "--gpu-mem", least - 1, "-o", out)
    ).fault()
    found = re.search(r"raise it to (\d+) bytes at least", line)
    assert found and int(found[1]) == least
    assert not out.exists()
    plan = gpu_plan(plans, MODEL, "bf16", "none")
    with loaded(plan) as engine:
        assert same(engine_run(engine), on_cpu(plans, plan))
        assert engine.gpu()["link"]["loads"] == 0


def test_sessions_share_what_is_there(plans: PlanStore, mock: Mock) -> None:
    """Sessions fit as long as their sum does; what one gives back the next one gets."""
    plan = gpu_plan(plans, MODEL, "bf16", 3)
    with loaded(with_room(plan, 2)) as engine:
        sessions = [engine.session() for _ in range(3)]
        with pytest.raises(BudgetError, match="of the .* MiB allowed"):
            engine.session()
        sessions[1].close()
        smaller = engine.session(kv_tokens=64)
        smaller.prefill([1, 2])
        with pytest.raises(BudgetError):
            engine.session(max_seqs=4, kv_tokens=4096)
        sessions[2].prefill([3, 4])


@pytest.mark.parametrize("timing", ["end", "slow"])
def test_nothing_grows(plans: PlanStore, mock: Mock, timing: str) -> None:
    """200 steps, forks, saves and policies later the driver holds what it held."""
    mock.reset(MOCKS[timing])
    with loaded(gpu_plan(plans, MODEL, "bf16", "few", "lru"), policy="fate") as engine:
        session = engine.session(max_seqs=2)
        session.prefill(random_ids(engine.info.vocab, 30))
        before = mock.state(*LIVE)
        for i in range(200):
            session.decode(i % engine.info.vocab)
            if i % 50 == 20:
                session.fork(0, 1)
                session.restore(session.save(1) or b"", 1)
                session.reset(1)
                engine.set_policy("ondemand" if i % 100 == 20 else "fate")
        assert mock.state(*LIVE) == before


# --- the link ---


class Counted:
    """A session's steps, and what of the bytes to the device is not the driver's small copies."""

    def __init__(self, engine: Engine, session: Session, driver: Mock) -> None:
        self.engine, self.session, self.driver = engine, session, driver
        data = engine.plan.data
        self.top_k = data["model"]["top_k"]
        self.hidden = -(-data["model"]["hidden"] // 32) * 32
        self.blocks = -(-data["max_context"] // data["kv_block"])
        self.max_rows = data["max_rows"]

    def step(self, rows: int, seqs: int = 1) -> int:
        """Bytes of experts that one step sent."""
        before = self.driver.counter("h2d_bytes")
        with self.session.trace() as trace:
            order = np.sort(np.arange(rows) % seqs)
            self.session.step(random_ids(self.engine.info.vocab, rows), seqs=order)
        on_gpu = (Opcode.EXPERT, Queue.GPU0)
        layers = {
            int(r["layer"])
            for r in trace.records
            if (r["opcode"], r["queue"]) == on_gpu and r["experts"]
        }
        small = 16 * self.max_rows + 4 * self.blocks * seqs
        small += 4 * rows * self.hidden + len(layers) * 4 * rows * self.top_k
        return self.driver.counter("h2d_bytes") - before - small


@pytest.mark.parametrize("timing", ["end", "slow"])
@pytest.mark.parametrize("policy", ["ondemand", "fate", "pdscope-paper", "adaptsched"])
@pytest.mark.parametrize("model", [MODEL, "wide"])
def test_ledger_is_what_crossed(
    plans: PlanStore, mock: Mock, model: str, policy: str, timing: str
) -> None:
    """After each step, the bytes of experts that the driver was given are those of the ledger:
    loads, useful prefetches, and what was sent of the others."""
    mock.reset(MOCKS[timing])
    with loaded(gpu_plan(plans, model, "bf16", 4, "lru"), policy=policy) as engine:
        session = engine.session(max_seqs=3)
        counted, sent = Counted(engine, session, mock), 0
        for rows, seqs in ((40, 1), (1, 1), (1, 1), (5, 2), (3, 3), (17, 3), (1, 1)):
            sent += counted.step(rows, seqs)
            link = engine.gpu()["link"]
            assert sent == link["load_bytes"] + link["useful_bytes"] + link["wasted_bytes"]
            assert link["late_bytes"] <= link["useful_bytes"]
        assert link["load_bytes"] == link["loads"] * memory_of(engine.plan.path)["expert_bytes"]
        assert (link["loads"] > 0) or policy != "ondemand"
        assert (link["prefetches"] > 0) or policy != "pdscope-paper"


# Runs with the counting library preloaded: what a GPU plan's library allocates in steps.
PROBE = r"""
import ctypes, pathlib, sys
plan = pathlib.Path(sys.argv[1]).resolve()
count = ctypes.CDLL(None)
class Totals(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in "abcdefgh"]
def read():
    totals = Totals()
    count.count_read(ctypes.byref(totals))
    return [getattr(totals, name) for name, _ in Totals._fields_]  # in count_totals' order
keep = ctypes.CDLL(str(plan / "lib" / "libpdscope.so"))
assert count.count_watch(str(plan / "lib" / "libpdscope.so").encode()) == 1
import pdscope
engine = pdscope.load(plan, device="gpu", threads=2, weights="copy", policy="fate")
session = engine.session(max_seqs=2)
session.prefill([1, 5, 7])
before = read()
for token in range(20):
    session.decode(token)
session.prefill(list(range(20)))
session.fork(0, 1)
session.step([3, 4], seqs=[0, 1])
assert engine.gpu()["link"]["prefetches"] and engine.gpu()["link"]["loads"]
assert read() == before, (before, read())
session.close(); del session
engine.close(); del engine
import gc; gc.collect()
after = read()
assert after[3] == after[5] == 0, after  # no mapping is left
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD")
def test_a_step_allocates_nothing(plans: PlanStore, mock: Mock) -> None:
    """Nor maps, nor reads files: everything is there from the load and the session on."""
    from pdscope.compiler.build import find_compiler

    source = Path(__file__).resolve().parents[1] / "support" / "count_allocations.c"

    def build(out: Path) -> None:
        command = [*find_compiler().command, "-std=gnu11", "-O2", "-fPIC", "-shared"]
        subprocess.run([*command, "-o", out, source, "-ldl"], check=True)

    counter = plans.once("count_allocations.so", build)
    plan = gpu_plan(plans, MODEL, "bf16", "few", "lru")
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(plan)],
        env=os.environ | {"LD_PRELOAD": str(counter)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
