"""memory.json against what an interposed allocator and mmap see, to the byte.

Holds: "the memory table exact to the byte against a real load of a cut-down depth, as seen by an
interposed allocator and mmap, not by our own counters", and "No malloc or file I/O in a step".
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.assets import BUNDLED
from support.plans import PlanStore
from support.predictors import with_predictors
from support.published_configs import PUBLISHED, cut_down

from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.passes.plan_memory import predictor_table
from pdscope.ir.graph_text import parse_graph

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="LD_PRELOAD")

SOURCE = Path(__file__).resolve().parents[1] / "support" / "count_allocations.c"

# Runs with the counting library preloaded: prints the counters at each stage of a plan's life.
PROBE = r"""
import ctypes, json, pathlib, sys
plan, threads, weights = sys.argv[1], int(sys.argv[2]), sys.argv[3]
count = ctypes.CDLL(None)
FIELDS = "mallocs malloc_bytes anon_maps anon_bytes file_maps file_bytes map_calls io_calls".split()
class Totals(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in FIELDS]
def read():
    totals = Totals()
    count.count_read(ctypes.byref(totals))
    return {name: getattr(totals, name) for name in FIELDS}
library = pathlib.Path(plan).resolve() / "lib" / "libpdscope.so"
keep = ctypes.CDLL(str(library))
assert count.count_watch(str(library).encode()) == 1, "the plan's library is not loaded"
import pdscope
seen = {"start": read()}
engine = pdscope.load(plan, threads=threads, weights=weights, cache_prefetch="on")
engine.prefill([1, 5, 7])
seen["loaded"] = read()
engine.decode(9)
engine.prefill(list(range(20)))
engine.decode(3)
seen["stepped"] = read()
session = engine.session(max_seqs=3, kv_tokens=100)
session.prefill([2, 4], seq=2)
seen["two sessions"] = read() | {"said": session.stats().session_bytes}
session.close(); del session
engine.close(); del engine
import gc; gc.collect()
seen["closed"] = read()
print(json.dumps(seen))
"""


@pytest.fixture(scope="session")
def counter(plans: PlanStore) -> Path:
    from pdscope.compiler.build import find_compiler

    def build(out: Path) -> None:
        command = [*find_compiler().command, "-std=gnu11", "-O2", "-fPIC", "-shared"]
        subprocess.run([*command, "-o", out, SOURCE, "-ldl"], check=True)

    return plans.once("count_allocations.so", build)


def observe(plan: Path, counter: Path, threads: int, weights: str) -> dict[str, Any]:
    env = os.environ | {"LD_PRELOAD": str(counter)}
    command = [sys.executable, "-c", PROBE, str(plan), str(threads), weights]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def check(plan: Path, counter: Path, threads: int, weights: str = "mmap") -> None:
    table = json.loads((plan / "memory.json").read_text(encoding="utf-8"))
    engine = table["engine"]["total_bytes_by_threads"][str(threads)]
    session = table["session"]["total_bytes"]
    row = table["weight_mappings"][weights]
    maps = {"anonymous": 0, "file": 0, row["kind"]: row["bytes"]}
    nets = table.get("predictors", {"total_bytes": 0})["total_bytes"]
    seen = observe(plan, counter, threads, weights)
    assert seen["start"]["anon_bytes"] == seen["start"]["file_bytes"] == 0
    loaded = seen["loaded"]
    assert loaded["anon_bytes"] == engine + session + maps["anonymous"] + nets
    assert loaded["file_bytes"] == maps["file"]
    assert loaded["file_maps"] == (row["count"] if row["kind"] == "file" else 0)
    assert table["weight_bytes"] == sum(f.stat().st_size for f in (plan / "weights").iterdir())
    for counted in ("mallocs", "map_calls", "io_calls"):
        assert seen["stepped"][counted] == loaded[counted], f"{counted} within a step"
    two = seen["two sessions"]
    assert two["anon_bytes"] == loaded["anon_bytes"] + two["said"]
    closed = seen["closed"]
    assert closed["anon_bytes"] == closed["file_bytes"] == 0, "the library kept a mapping"
    assert closed["malloc_bytes"] == 0, "the library used malloc, which memory.json does not count"


@pytest.mark.parametrize("weights", ["mmap", "copy"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_demo_model(
    plans: PlanStore, counter: Path, dtype: str, threads: int, weights: str
) -> None:
    check(plans.compile(BUNDLED / "tiny-mixtral", dtype=dtype), counter, threads, weights)


@pytest.mark.parametrize("width", [16, 200])
@pytest.mark.parametrize("name", ["phaseper", "cross_gate", "all"])
def test_predictors(plans: PlanStore, counter: Path, tmp_path: Path, name: str, width: int) -> None:
    """Nets, shallow and deep, and each rival."""
    kinds = ("phaseper", "previous", "frequency", "transition", "cross_gate")

    def chosen(layer: int, phase: str) -> str:
        return kinds[(layer + (phase == "decode")) % len(kinds)] if name == "all" else name

    plan = with_predictors(
        plans.compile(BUNDLED / "tiny-mixtral"), tmp_path / "plan", chosen, width=width
    )
    data = json.loads((plan / "plan.json").read_text(encoding="utf-8"))
    model = Lower(data["dtype"], data["max_context"], data["predictor"]).run(
        parse_graph((plan / "graph.txt").read_text(encoding="utf-8"))
    )
    predictors = json.loads((plan / "phaseper.json").read_text(encoding="utf-8"))
    table = json.loads((plan / "memory.json").read_text(encoding="utf-8"))
    table["predictors"] = predictor_table(model, predictors)
    assert bool(table["predictors"]["nets"]) == (name != "cross_gate")
    # As long as plan.json says it is.
    text = json.dumps(table).ljust(data["files"]["memory.json"]["bytes"])
    (plan / "memory.json").write_text(text, encoding="utf-8")
    check(plan, counter, 2)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_shrunk_published(tmp_path: Path, counter: Path, name: str) -> None:
    """The published configurations' structure, with fewer experts and a small vocabulary."""
    import pdscope

    model = write_config(tmp_path / name, cut_down(name, small=True))
    plan = tmp_path / "plan"
    pdscope.compile(model, plan, load_format="dummy", dtype="bf16", max_context=1000)
    check(plan, counter, 2, "mmap")
    check(plan, counter, 2, "copy")


@pytest.mark.verify
@pytest.mark.parametrize("name", PUBLISHED)
def test_cut_down_published(tmp_path: Path, counter: Path, name: str) -> None:
    """The published configurations at their full width, cut to one MoE layer (and a dense one)."""
    import pdscope

    model = write_config(tmp_path / name, cut_down(name))
    plan = tmp_path / "plan"
    pdscope.compile(model, plan, load_format="dummy", dtype="bf16")
    check(plan, counter, 2)
