"""The mock CUDA driver's faults.

Holds of the issue "AdaptSched and its lowering": "fault injection"; "under injected faults (copy
error, out of memory at the k-th allocation, slow link, late events, lost context)".
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from support.cuda import Driver, at, ffi
from support.mock_driver import copy, gpu, library, mark, when

from pdscope.compiler.build import mock_driver

__all__ = ["gpu", "library"]

NULL = ffi().NULL


def lost(gpu: Driver, result: str, why: str) -> None:
    """Every call answers with `result`; a release and a new context help."""
    out = ffi().new("CUdeviceptr *")
    for call in (
        lambda: gpu.cuMemAlloc(out, 4),
        lambda: gpu.cuStreamSynchronize(NULL),
        lambda: gpu.cuEventCreate(ffi().new("CUevent *"), 0),
    ):
        assert call() == result
        assert why in gpu.last()
    assert gpu.ok.cuDeviceGetCount() == 1
    gpu.close()
    assert gpu.counter("device_live") == gpu.counter("streams") == 0
    gpu.open()
    stream, to = gpu.stream(), gpu.alloc(4)
    gpu.ok.cuMemsetD8Async(to, 0, 16, stream)
    gpu.ok.cuStreamSynchronize(stream)
    assert gpu.read(to, 1) == [0]


@pytest.fixture(params=["virtual", "wall"])
def clock(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def either(library: Driver, clock: str) -> Iterator[Driver]:
    library.configure(f"reset; clock={clock}")
    library.open()
    yield library
    library.configure("reset")


@contextmanager
def gate(gpu: Driver, clock: str) -> Iterator[Callable[[object], None]]:
    """Gives a function that holds a stream up: what it is given after that begins when the `with`
    ends, however long its calls take. On the virtual clock nothing begins by itself anyway."""
    if clock == "virtual":
        yield lambda stream: None
        return
    stream, arrived = gpu.stream(), gpu.alloc(2)
    gpu.ok.cuMemsetD8Async(arrived, 0, 8, stream)
    assert gpu.launch("meet", stream, arrived, 1, 2) == "CUDA_SUCCESS"
    opened = mark(gpu, stream)
    yield lambda held: gpu.ok.cuStreamWaitEvent(held, opened, 0)
    # Its memory is the host's: no call, since the context may be lost.
    ffi().cast("uint32_t *", arrived)[0] = 2


def test_fault_copy(either: Driver, clock: str) -> None:
    """The k-th copy fails where the stream gets to it, and the context is lost; what came before is
    there, what comes after is not done."""
    gpu = either
    stream, to, host = gpu.stream(), gpu.alloc(4), gpu.pinned(16)
    with gate(gpu, clock) as hold:
        hold(stream)
        gpu.configure("fail_copy=3; h2d_latency=1ms")
        host[:] = range(16)
        for i in range(4):
            gpu.ok.cuMemcpyHtoDAsync(to, at(host, 4 * i), 16, stream)  # all are accepted
    assert gpu.cuStreamSynchronize(stream) == "CUDA_ERROR_ECC_UNCORRECTABLE"
    lost(gpu, "CUDA_ERROR_ECC_UNCORRECTABLE", "fault fail_copy")


def test_fault_copy_refused(either: Driver) -> None:
    """The call itself fails, and the next one works."""
    gpu = either
    stream, to, host = gpu.stream(), gpu.alloc(4), gpu.pinned(4)
    gpu.configure("refuse_copy=2")
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 16, stream)
    refused = gpu.cuMemcpyHtoDAsync(to, at(host), 16, stream)
    assert refused == "CUDA_ERROR_OPERATING_SYSTEM" and "refuse_copy" in gpu.last()
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 16, stream)
    gpu.ok.cuStreamSynchronize(stream)


def test_fault_memory(either: Driver) -> None:
    """The k-th allocation of the device, or of pinned memory, finds none."""
    gpu = either
    gpu.configure("fail_alloc=2; fail_pin=3")
    gpu.alloc(4)
    assert gpu.cuMemAlloc(ffi().new("CUdeviceptr *"), 4) == "CUDA_ERROR_OUT_OF_MEMORY"
    gpu.alloc(4)
    gpu.pinned(4)
    memory = np.zeros(4, np.uint32)
    gpu.ok.cuMemHostRegister(at(memory), 16, 0)
    assert gpu.cuMemHostAlloc(ffi().new("void **"), 4, 0) == "CUDA_ERROR_OUT_OF_MEMORY"
    gpu.pinned(4)


def test_fault_launch(either: Driver, clock: str) -> None:
    """A kernel fails where the stream gets to it, and the context is lost."""
    gpu = either
    stream, to = gpu.stream(), gpu.alloc(4)
    with gate(gpu, clock) as hold:
        gpu.configure("fail_launch=2; refuse_launch=3")
        assert gpu.launch("mix", stream, to) == "CUDA_SUCCESS"
        gpu.ok.cuStreamSynchronize(stream)
        gpu.configure("kernel.mix.base=1ms")
        hold(stream)
        assert gpu.launch("mix", stream, to) == "CUDA_SUCCESS"
        assert gpu.launch("mix", stream, to) == "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
        event = mark(gpu, stream)
    assert gpu.cuEventSynchronize(event) == "CUDA_ERROR_LAUNCH_FAILED"
    lost(gpu, "CUDA_ERROR_LAUNCH_FAILED", "fault fail_launch")


def test_fault_lost_context(either: Driver) -> None:
    """At the k-th call; nothing that was under way ends."""
    gpu = either
    stream, to, host = gpu.stream(), gpu.alloc(4), gpu.pinned(4)
    gpu.configure("stop_record=1")
    gpu.ok.cuStreamWaitEvent(stream, mark(gpu, gpu.stream()), 0)
    gpu.configure("lose_context=3")
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 16, stream)
    assert gpu.cuStreamQuery(stream) == "CUDA_ERROR_NOT_READY"
    assert gpu.cuStreamSynchronize(stream) == "CUDA_ERROR_UNKNOWN"
    lost(gpu, "CUDA_ERROR_UNKNOWN", "fault lose_context")


def test_fault_lost_context_while_a_thread_waits(library: Driver) -> None:
    """With the wall clock: the one that waits is told too."""
    gpu = library
    gpu.configure("reset; clock=wall; kernel.mix.base=600s")
    gpu.open()
    stream, to = gpu.stream(), gpu.alloc(4)
    assert gpu.launch("mix", stream, to) == "CUDA_SUCCESS"
    told: list[str] = []
    calls = gpu.counter("calls")

    def wait() -> None:
        gpu.ok.cuCtxSetCurrent(gpu.context)
        told.append(gpu.cuStreamSynchronize(stream))

    thread = threading.Thread(target=wait)
    thread.start()
    while gpu.counter("calls") == calls and thread.is_alive():  # until it waits
        time.sleep(0.001)
    gpu.configure("lose_context=1")
    assert gpu.cuStreamQuery(stream) == "CUDA_ERROR_UNKNOWN"
    thread.join(timeout=50)
    assert not thread.is_alive() and told == ["CUDA_ERROR_UNKNOWN"]
    gpu.close()
    gpu.configure("reset")


def test_fault_slow_link(gpu: Driver) -> None:
    """From a time on, in the middle of a copy."""
    gpu.configure("slow_link=10; slow_from=40")
    stream = gpu.stream()
    events = [copy(gpu, stream, 100), copy(gpu, stream, 10)]
    gpu.pds_mock_advance(10_000)
    assert [when(gpu, e) for e in events] == [40 + 600, 740]


def test_fault_late_events(gpu: Driver) -> None:
    """A record takes so long, for those who wait and for its stream."""
    gpu.configure("late_events=500")
    a, b = gpu.stream(), gpu.stream()
    event = copy(gpu, a, 100)
    gpu.ok.cuStreamWaitEvent(b, event, 0)
    second = mark(gpu, b)
    gpu.pds_mock_advance(10_000)
    assert (when(gpu, event), when(gpu, second)) == (600, 1100)


def test_stopped_stream(clock: str) -> None:
    """Holds: "fault injection": nothing behind a record that never comes is done, other streams go
    on, and releasing the context waits for none of it."""
    driver = Driver(mock_driver())
    driver.configure(f"reset; clock={clock}; stop_record=2")
    driver.open()
    stopped, other = driver.stream(), driver.stream()
    first, never = driver.event(), driver.event()
    to = driver.alloc(4)
    host = driver.pinned(4)
    driver.ok.cuEventRecord(first, stopped)
    driver.ok.cuStreamSynchronize(stopped)
    driver.ok.cuEventRecord(never, stopped)
    driver.ok.cuMemcpyHtoDAsync(to, at(host), 16, stopped)
    driver.ok.cuMemcpyHtoDAsync(to, at(host), 16, other)
    driver.ok.cuStreamSynchronize(other)
    assert driver.cuEventQuery(first) == "CUDA_SUCCESS"
    assert driver.cuEventQuery(never) == "CUDA_ERROR_NOT_READY"
    assert driver.cuStreamQuery(stopped) == "CUDA_ERROR_NOT_READY"
    if clock == "virtual":  # which can tell
        assert driver.pds_mock_next() == -1
        assert driver.cuStreamSynchronize(stopped) == "CUDA_ERROR_UNKNOWN"
    driver.close()
    assert driver.counter("device_live") == 0
    driver.configure("reset")
