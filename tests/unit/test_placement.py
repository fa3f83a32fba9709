"""Threads and weights placed in every way: the same logits, an idle engine that is idle, and one
core or too many threads that make progress.

Holds: "Placement of threads and memory: ... with a sane default, a flag, and a line in --json that
says what was done. No spinning when idle; oversubscribed and 1-core machines do not hang"; "hang on
a 46k-token prompt; 100 % CPU when idle".
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.assets import BUNDLED
from support.plans import PlanStore

import pdscope
from pdscope.errors import InputError, PlanError

LINUX = sys.platform.startswith("linux")


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Path:
    return plans.compile(BUNDLED / "tiny-mixtral", dtype="bf16")


def logits(plan: Path, **options: Any) -> np.ndarray[Any, Any]:
    with pdscope.load(plan, **options) as engine:
        rows = engine.prefill(list(range(3, 43)), all_logits=True).copy()
        return np.vstack([rows, engine.decode(7)[None]])


@pytest.fixture(scope="module")
def expected(plan: Path) -> np.ndarray[Any, Any]:
    return logits(plan, threads=1, weights="mmap", pin="off")


@pytest.mark.parametrize("pin", ["auto", "on", "off"])
@pytest.mark.parametrize("weights", ["auto", "mmap", "copy"])
def test_same_bits(plan: Path, expected: np.ndarray[Any, Any], weights: str, pin: str) -> None:
    assert np.array_equal(logits(plan, threads=2, weights=weights, pin=pin), expected)


@pytest.mark.parametrize("pin", ["on", "off"])
def test_oversubscribed(plan: Path, expected: np.ndarray[Any, Any], pin: str) -> None:
    threads = 4 * (os.cpu_count() or 1)
    assert np.array_equal(logits(plan, threads=threads, pin=pin), expected)


ONE_CORE = r"""
import sys, time, pdscope
with pdscope.load(sys.argv[1], threads=int(sys.argv[2]), pin=sys.argv[3]) as engine:
    engine.prefill(list(range(3, 43)))
    for token in range(20):
        engine.decode(token)
    print(engine.info.threads, engine.info.cores)
"""


@pytest.mark.skipif(not LINUX, reason="affinity")
@pytest.mark.parametrize(("threads", "pin"), [(0, "auto"), (3, "auto"), (3, "on")])
def test_one_core(plan: Path, threads: int, pin: str) -> None:
    """Restricted to one CPU an engine takes one thread, and gets along with more."""
    cpu = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-c", ONE_CORE, str(plan), str(threads), pin],
        preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(threads or 1), "1"]


@pytest.mark.parametrize("threads", [2, 8])
def test_idle_is_idle(plan: Path, threads: int) -> None:
    with pdscope.load(plan, threads=threads) as engine:
        engine.prefill([1, 2, 3])
        # The workers notice that the step is over, on a loaded machine after a while.
        for _ in range(60):
            begin = time.process_time()
            time.sleep(0.25)
            if time.process_time() - begin < 0.005:
                return
        raise AssertionError("an engine that has nothing to do takes processor time")


@pytest.mark.skipif(not LINUX, reason="affinity")
def test_callers_affinity_is_its_own(plan: Path) -> None:
    """A step with pinned workers leaves the calling thread as it was, also where the program has
    pinned that thread itself."""
    whole = os.sched_getaffinity(0)
    with pdscope.load(plan, threads=2, pin="on") as engine:
        engine.prefill([1, 2, 3])
        assert os.sched_getaffinity(0) == whole
        try:
            os.sched_setaffinity(0, {max(whole)})
            engine.decode(4)
            assert os.sched_getaffinity(0) == {max(whole)}
        finally:
            os.sched_setaffinity(0, whole)


def test_info_says_what_was_done(plan: Path) -> None:
    files = sum(f.stat().st_size for f in (plan / "weights").iterdir())
    with pdscope.load(plan, threads=2, weights="mmap", pin="off") as engine:
        assert engine.info.weights == "mmap"
        assert engine.info.weights_copy_bytes == engine.info.weights_huge_bytes == 0
        assert engine.info.weight_bytes == files
        assert engine.info.cpus == ()
    table = json.loads((plan / "memory.json").read_text())
    with pdscope.load(plan, threads=2, weights="copy", pin="on") as engine:
        info = engine.info
        assert info.weights == "copy"
        assert info.weight_bytes == files
        assert info.weights_copy_bytes == table["weight_mappings"]["copy"]["bytes"]
        assert 0 <= info.weights_huge_bytes <= info.weights_copy_bytes
        if LINUX:
            assert len(info.cpus) == 2
            assert set(info.cpus) <= os.sched_getaffinity(0)
            # Whoever wants to see it for himself:
            assert huge_bytes() >= info.weights_huge_bytes
        assert info.weights_why == info.cpus_why == "asked for"
        said = info.placement()
        assert said["pinned_cpus"] == list(info.cpus)
        assert json.loads(json.dumps(said)) == said


def huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(x.split()[1]) * 1024 for x in lines if x.startswith("AnonHugePages:"))


def test_wrong_values(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="pin is 'yes', expected auto, on, off"):
        pdscope.load(plan, pin="yes")
    with pytest.raises(InputError, match="weights is 'ram', expected auto, mmap, copy"):
        pdscope.load(plan, weights="ram")
    monkeypatch.setenv("PDSCOPE_WEIGHTS", "ram")
    with pytest.raises(InputError, match="PDSCOPE_WEIGHTS"):
        pdscope.load(plan)


def test_environment(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSCOPE_WEIGHTS", "mmap")
    monkeypatch.setenv("PDSCOPE_PIN", "off")
    with pdscope.load(plan) as engine:
        assert (engine.info.weights, engine.info.cpus) == ("mmap", ())
    with pdscope.load(plan, weights="copy") as engine:
        assert engine.info.weights == "copy"


@pytest.mark.skipif(not LINUX, reason="RLIMIT_AS")
def test_memory_refused(plan: Path) -> None:
    """Without room for a copy, auto maps and says why; copy is refused."""
    script = (
        "import resource, sys, pdscope\n"
        "from pdscope.errors import PdscopeError\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "pdscope.load(sys.argv[1], weights='mmap', threads=1).close()\n"
        "e = pdscope.load(sys.argv[1], weights='mmap', threads=1)\n"
        "need = e.info.engine_bytes + e.info.weight_bytes + (2 << 20)\n"
        "e.close()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + need, used + need))\n"
        "e = pdscope.load(sys.argv[1], threads=1)\n"
        "print(e.info.weights, e.info.weights_why)\n"
        "e.close()\n"
        "try:\n"
        "    pdscope.load(sys.argv[1], weights='copy', threads=1)\n"
        "except PdscopeError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    auto, asked = done.stdout.splitlines()
    assert auto.startswith("mmap the operating system refused")
    assert asked.startswith("weights: the operating system refused")


def test_copy_of_a_short_file(plan: Path, tmp_path: Path) -> None:
    """Copying checks the files as mapping does."""
    import shutil

    broken = tmp_path / "plan"
    shutil.copytree(plan, broken)
    file = broken / "weights" / "layer000.bin"
    opened = pdscope.plan.Plan.open(broken)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(PlanError, match="layer000.bin"):
        pdscope.load(opened, weights="copy")
