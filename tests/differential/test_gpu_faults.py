"""Faults of the device, injected into the mock driver at every call of a load and of some steps.

Holds: "under injected faults (copy error, out of memory at the k-th allocation, slow link, late
events, lost context) ends in a clear error or a documented fallback, never wrong tokens, never a
hang (watchdog)".
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.gpu import Floats, Mock, gpu_plan, loaded, mock
from support.plans import PlanStore
from support.runs import random_ids

import pdscope
from pdscope.errors import BudgetError, PdscopeError, TargetError

__all__ = ["mock"]

# Of each fault: how many calls it counts in a run, and what the error is and says.
GPU = "load the plan again, or run it on the CPU"
FAULTS: dict[str, tuple[str | None, type[PdscopeError], str]] = {
    "fail_copy": (None, TargetError, f"CUDA_ERROR_ECC_UNCORRECTABLE.*fault fail_copy.*{GPU}"),
    "refuse_copy": (None, TargetError, f"CUDA_ERROR_OPERATING_SYSTEM.*fault refuse_copy.*{GPU}"),
    "fail_alloc": ("device_allocations", BudgetError, "GPU memory: the device has no .* MiB left"),
    "fail_pin": (None, BudgetError, "pin.*CUDA_ERROR_OUT_OF_MEMORY.*run the plan on the CPU"),
    "fail_launch": ("launches", TargetError, f"CUDA_ERROR_LAUNCH_FAILED.*fail_launch.*{GPU}"),
    "refuse_launch": ("launches", TargetError, f"CUDA_ERROR_LAUNCH_OUT_OF.*refuse_launch.*{GPU}"),
    "lose_context": ("calls", TargetError, f"CUDA_ERROR_UNKNOWN.*fault lose_context.*{GPU}"),
    "stop_record": (None, TargetError, f"the GPU has stopped: .* does not end.*{GPU}"),
}
PINNED = 3  # the weights; of a session its buffers and what is laid out for the device
TIMING = "h2d=1GB/s; kernel.*.base=2us; host.cpu.experts.base=5us"


def steps(plan: Path, device: str = "gpu") -> Iterator[Floats]:
    """A load, a session, a prefill, two steps of decode and a fork: logits as they come."""
    with loaded(
        plan, device=device, threads=1, policy="fate" if device == "gpu" else None
    ) as engine:
        ids = random_ids(engine.info.vocab, 24)
        session = engine.session(max_seqs=2)
        try:
            yield np.array(session.prefill(ids[:20]))
            yield np.array(session.decode(ids[20]))
            session.fork(0, 1)
            yield np.array(session.decode(ids[21], 1))
        except PdscopeError as error:
            if error.status == 403:  # whoever goes on is told so, each time
                for _ in range(2):
                    with pytest.raises(TargetError, match=f"the GPU failed before: .*{GPU}"):
                        session.decode(ids[22])
                with pytest.raises(TargetError, match="the GPU failed before"):
                    engine.session()
            raise


def struck(driver: Mock, plan: Path, expected: list[Floats], fault: str, k: int) -> bool:
    """Runs into the k-th of a fault; False: the run has fewer. What came before it is right, the
    error is clear, and nothing is left."""
    _, kind, text = FAULTS[fault]
    driver.reset(f"{TIMING}; {fault}={k}")
    found: list[Floats] = []
    try:
        for logits in steps(plan):
            found.append(logits)
    except PdscopeError as error:
        assert type(error) is kind, (k, error)
        assert "\n" not in str(error)
        assert re.search(text, str(error)), (k, str(error))
    good = all(np.array_equal(a, b) for a, b in zip(found, expected, strict=False))
    assert good, f"wrong logits after {fault} at {k}"
    driver.nothing_left()
    return len(found) < len(expected)


def sweep(driver: Mock, plans: PlanStore, fault: str, stride: int) -> None:
    plan = gpu_plan(plans, "shared", "bf16", "few", "lru")
    expected = list(steps(plan, "cpu"))
    driver.reset(TIMING)
    assert all(np.array_equal(a, b) for a, b in zip(steps(plan), expected, strict=True))
    k = 1
    while struck(driver, plan, expected, fault, k):
        k += 1 if k < 8 else stride
    assert k > (PINNED if fault in ("fail_alloc", "fail_pin") else 20)
    # A load after all that is a load like the first.
    driver.reset(TIMING)
    assert all(np.array_equal(a, b) for a, b in zip(steps(plan), expected, strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(plans: PlanStore, mock: Mock, fault: str) -> None:
    """At the first few calls, and at some of all others."""
    sweep(mock, plans, fault, 53 if fault == "lose_context" else 13)


@pytest.mark.verify
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_every_call(plans: PlanStore, mock: Mock, fault: str) -> None:
    sweep(mock, plans, fault, 1)


@pytest.mark.parametrize("k", [1, 7, 40])
@pytest.mark.parametrize("fault", ["fail_copy", "fail_launch", "lose_context"])
def test_fault_on_the_wall_clock(plans: PlanStore, mock: Mock, fault: str, k: int) -> None:
    """The same while the driver's threads work on."""
    plan = gpu_plan(plans, "shared", "bf16", "few", "lru")
    expected = list(steps(plan, "cpu"))
    mock.reset(f"clock=wall; h2d=1GB/s; kernel.*.base=20us; {fault}={k}")
    found: list[Floats] = []
    with pytest.raises(FAULTS[fault][1], match=FAULTS[fault][2]):
        for logits in steps(plan):
            found.append(logits)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=False))


def test_out_of_memory_of_a_session(plans: PlanStore, mock: Mock) -> None:
    """An engine whose session found no memory goes on, with the sessions that it has."""
    plan = gpu_plan(plans, "shared", "bf16", "few", "lru")
    with loaded(plan) as engine:
        for fault in ("fail_alloc", "fail_pin"):
            mock.configure(f"{fault}=1")
            with pytest.raises(BudgetError, match=FAULTS[fault][2]):
                engine.session()
        mock.configure("fail_pin=2")
        with pytest.raises(BudgetError, match="pinning a session's buffers"):
            engine.session()
        with engine.session() as session:
            ids = random_ids(engine.info.vocab, 24)
            assert np.array_equal(session.prefill(ids[:20]), next(steps(plan, "cpu")))


def test_slow_link(plans: PlanStore, mock: Mock) -> None:
    """A link that becomes slow changes times, and no decision: the same experts cross it."""
    plan = gpu_plan(plans, "shared", "bf16", "few", "lru")
    links = []
    for slow in ("", "; slow_link=1000; slow_from=20us", "; late_events=1ms", "; h2d_latency=1ms"):
        mock.reset(TIMING + slow)
        with loaded(plan, policy="fate") as engine, engine.session() as session:
            ids = random_ids(engine.info.vocab, 24)
            assert np.array_equal(session.prefill(ids[:20]), next(steps(plan, "cpu")))
            session.decode(ids[20])
            links.append(engine.gpu()["link"])
    # What of a useless prefetch was sent depends on the time that it had.
    assert all(x | {"wasted_bytes": 0} == links[0] | {"wasted_bytes": 0} for x in links)


STOPPED = r"""
import sys, time, pdscope
from pdscope.errors import PdscopeError
options = {"device": "gpu", "threads": 1, "weights": sys.argv[2], "policy": "fate"}
with pdscope.load(sys.argv[1], **options) as engine:
    session = engine.session(max_seqs=2)
    try:
        session.prefill([1, 2, 3])
        for token in range(50):
            session.decode(token)
        session.save(0)
    except PdscopeError as error:
        print(error)
    session.close()
print("closed")
"""


@pytest.mark.parametrize(("k", "weights"), [(2, "copy"), (5, "mmap"), (40, "copy")])
def test_watchdog(plans: PlanStore, mock: Mock, k: int, weights: str) -> None:
    """On the real clock an event that never comes ends the step after PDSCOPE_GPU_PATIENCE, and
    closing waits for nothing."""
    plan = gpu_plan(plans, "shared", "bf16", "few", "lru")
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(plan), weights],
        env=os.environ
        | {"PDS_MOCK_CUDA": f"clock=wall; stop_record={k}", "PDSCOPE_GPU_PATIENCE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    error, closed = done.stdout.splitlines()
    assert re.fullmatch(FAULTS["stop_record"][2] + ".*", error)
    assert closed == "closed"


def test_patience_is_a_number(
    plans: PlanStore, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSCOPE_GPU_PATIENCE", "long")
    with pytest.raises(PdscopeError, match="PDSCOPE_GPU_PATIENCE: expected a whole number"):
        pdscope.load(gpu_plan(plans, "shared", "bf16", "few", "lru"), device="gpu")
