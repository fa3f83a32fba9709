"""What holds of any CUDA driver: each case is run on the mock with both clocks, and on a real GPU
where there is one. May import support.cuda.

A case is a function of an opened `Driver`; its docstring says what of CUDA's documentation it
holds.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from support.cuda import Driver, at, ffi

Case = Callable[[Driver], None]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def null() -> Any:
    return ffi().NULL


def mixed(value: int, *values: int) -> int:
    """What the kernels `mix` with these values make of a word."""
    for v in values:
        value = (value * 3 + v) % 2**32
    return value


@case
def a_stream_is_in_order(gpu: Driver) -> None:
    """Work submitted to one stream is done in the order of submission."""
    stream, to, host, back = gpu.stream(), gpu.alloc(64), gpu.pinned(64), gpu.pinned(64)
    host[:] = range(64)
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 256, stream)
    for value in (1, 2, 3):
        assert gpu.launch("mix", stream, to, value, 64) == "CUDA_SUCCESS"
    gpu.ok.cuMemcpyDtoHAsync(at(back), to, 256, stream)
    gpu.ok.cuStreamSynchronize(stream)
    assert list(back) == [mixed(i, 1, 2, 3) for i in range(64)]
    assert gpu.cuStreamQuery(stream) == "CUDA_SUCCESS"


@case
def a_wait_orders_two_streams(gpu: Driver) -> None:
    """A stream that waits for an event sees what came before its record, in a chain of ten."""
    streams, to = (gpu.stream(), gpu.stream()), gpu.alloc(64)
    host = gpu.pinned(64)
    host[:] = 7
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 256, streams[0])
    events = [gpu.event(2) for _ in range(10)]
    for i, event in enumerate(events):
        gpu.ok.cuEventRecord(event, streams[i % 2])
        gpu.ok.cuStreamWaitEvent(streams[1 - i % 2], event, 0)
        assert gpu.launch("mix", streams[1 - i % 2], to, i, 64) == "CUDA_SUCCESS"
    gpu.ok.cuStreamSynchronize(streams[0])
    gpu.ok.cuStreamSynchronize(streams[1])
    assert gpu.read(to, 64) == [mixed(7, *range(10))] * 64


@case
def an_event_never_recorded_is_complete(gpu: Driver) -> None:
    """Querying it, waiting for it and making a stream wait for it succeed at once."""
    stream, event = gpu.stream(), gpu.event()
    gpu.ok.cuEventQuery(event)
    gpu.ok.cuEventSynchronize(event)
    gpu.ok.cuStreamWaitEvent(stream, event, 0)
    gpu.ok.cuStreamSynchronize(stream)
    again = gpu.event()
    out = ffi().new("float *")
    assert gpu.cuEventElapsedTime(out, event, again) == "CUDA_ERROR_INVALID_HANDLE"


@case
def events_measure_time(gpu: Driver) -> None:
    """Between two records on one stream no time goes backwards; without timing there is none."""
    stream, first, last, untimed = gpu.stream(), gpu.event(), gpu.event(), gpu.event(2)
    host, to = gpu.pinned(1 << 20), gpu.alloc(1 << 20)
    gpu.ok.cuEventRecord(first, stream)
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 4 << 20, stream)
    gpu.ok.cuEventRecord(last, stream)
    gpu.ok.cuEventRecord(untimed, stream)
    gpu.ok.cuEventSynchronize(untimed)
    gpu.ok.cuEventQuery(last)
    assert 0.01 < gpu.ok.cuEventElapsedTime(first, last) < 60_000
    assert gpu.ok.cuEventElapsedTime(last, first) < -0.01
    out = ffi().new("float *")
    assert gpu.cuEventElapsedTime(out, first, untimed) == "CUDA_ERROR_INVALID_HANDLE"


@case
def the_null_stream_joins_blocking_streams(gpu: Driver) -> None:
    """Its work comes after what blocking streams were given before, and before what comes later."""
    streams = [gpu.stream(blocking=True), gpu.stream(blocking=True), null()]
    to, host = gpu.alloc(64), gpu.pinned(64)
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 256, streams[0])
    order = [2, 0, 2, 1, 2, 0, 2, 1, 2]
    for i in order:
        assert gpu.launch("append", streams[i], to, 10 + i) == "CUDA_SUCCESS"
    gpu.ok.cuStreamSynchronize(null())
    assert gpu.read(to, 10) == [9, *(10 + i for i in order)]


@case
def pageable_memory_may_change_after_the_call(gpu: Driver) -> None:
    """A copy from it has read it when the call returns; one to it is then complete."""
    stream, to = gpu.stream(), gpu.alloc(1000)
    source = np.arange(1000, dtype=np.uint32)
    gpu.ok.cuMemcpyHtoDAsync(to, at(source), 4000, stream)
    source[:] = 0
    back = np.zeros(1000, np.uint32)
    gpu.ok.cuMemcpyDtoHAsync(at(back), to, 4000, stream)
    assert list(back) == list(range(1000))


@case
def registered_memory_is_pinned(gpu: Driver) -> None:
    """Registering twice, or unregistering what is not registered, are errors of their own."""
    stream, to = gpu.stream(), gpu.alloc(4096)
    memory = np.zeros(3 * 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    page = memory[start : start + 4096].view(np.uint32)
    page[:] = range(1024)
    gpu.ok.cuMemHostRegister(at(page), 4096, 0)
    twice = gpu.cuMemHostRegister(at(page), 4096, 0)
    assert twice == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    gpu.ok.cuMemcpyHtoDAsync(to, at(page), 4096, stream)
    gpu.ok.cuStreamSynchronize(stream)
    assert gpu.read(to, 1024) == list(range(1024))
    gpu.ok.cuMemHostUnregister(at(page))
    gone = gpu.cuMemHostUnregister(at(page))
    assert gone == "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"


@case
def memory_is_set_and_copied_on_the_device(gpu: Driver) -> None:
    """To the byte, at any offset of an allocation."""
    stream, to, from_ = gpu.stream(), gpu.alloc(4), gpu.alloc(4)
    gpu.ok.cuMemsetD8Async(to, 0x11, 16, stream)
    gpu.ok.cuMemsetD8Async(from_, 0x22, 16, stream)
    gpu.ok.cuMemcpyDtoDAsync(to + 3, from_ + 1, 6, stream)
    gpu.ok.cuMemcpyDtoDAsync(to, from_, 0, stream)
    gpu.ok.cuStreamSynchronize(stream)
    assert gpu.read(to, 4) == [0x22111111, 0x22222222, 0x11111122, 0x11111111]


@case
def destroyed_streams_and_events_finish_their_work(gpu: Driver) -> None:
    """Destroying one that is in use returns at once, and what it was given is still done."""
    stream, other, event, to = gpu.stream(), gpu.stream(), gpu.event(), gpu.alloc(64)
    host = gpu.pinned(64)
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 256, stream)
    assert gpu.launch("mix", stream, to, 5, 64) == "CUDA_SUCCESS"
    gpu.ok.cuEventRecord(event, stream)
    gpu.ok.cuStreamWaitEvent(other, event, 0)
    gpu.ok.cuEventDestroy(event)
    gpu.ok.cuStreamDestroy(stream)
    assert gpu.launch("mix", other, to, 6, 64) == "CUDA_SUCCESS"
    gpu.ok.cuStreamSynchronize(other)
    assert gpu.read(to, 64) == [mixed(0, 5, 6)] * 64


@case
def freeing_waits_for_work(gpu: Driver) -> None:
    """Memory in use is freed once its work is done."""
    stream, a, b, host = gpu.stream(), gpu.alloc(1 << 20), gpu.alloc(1 << 20), gpu.pinned(1 << 20)
    host[:] = 3
    gpu.ok.cuMemcpyHtoDAsync(a, at(host), 4 << 20, stream)
    gpu.ok.cuMemcpyDtoDAsync(b, a, 4 << 20, stream)
    gpu.ok.cuMemFree(a)
    gpu.ok.cuMemFreeHost(at(host))
    gpu.ok.cuStreamSynchronize(stream)
    assert gpu.read(b + (4 << 20) - 8, 2) == [3, 3]


@case
def memory_is_counted(gpu: Driver) -> None:
    """What is allocated is missing from the free memory until it is freed; more than there is, is
    refused and changes nothing."""
    free, total = ffi().new("size_t *"), ffi().new("size_t *")

    def left() -> int:
        gpu.ok.cuMemGetInfo(free, total)
        return int(free[0])

    before = left()
    assert total[0] == gpu.ok.cuDeviceTotalMem(0)
    address = gpu.ok.cuMemAlloc(64 << 20)
    assert left() <= before - (64 << 20)
    out = ffi().new("CUdeviceptr *")
    assert gpu.cuMemAlloc(out, total[0] + 1) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert left() <= before - (64 << 20)
    gpu.ok.cuMemFree(address)
    assert left() == before


@case
def bad_arguments(gpu: Driver) -> None:
    """Each is refused with the result that CUDA documents for it, and the context goes on."""
    stream, to, event = gpu.stream(), gpu.alloc(8), gpu.event()
    out, handle = ffi().new("CUdeviceptr *"), ffi().new("void **")
    value = "CUDA_ERROR_INVALID_VALUE"
    assert gpu.cuMemAlloc(out, 0) == value
    assert gpu.cuMemFree(to + 4) == value
    assert gpu.cuMemHostAlloc(handle, 0, 64) == value
    assert gpu.cuMemFreeHost(ffi().cast("void *", 4096)) == value
    assert gpu.cuStreamCreateWithPriority(ffi().new("CUstream *"), 64, 0) == value
    assert gpu.cuEventCreate(ffi().new("CUevent *"), 128) == value
    assert gpu.cuStreamWaitEvent(stream, event, 64) == value
    assert gpu.cuEventRecord(null(), stream) == "CUDA_ERROR_INVALID_HANDLE"
    assert gpu.cuEventQuery(null()) == "CUDA_ERROR_INVALID_HANDLE"
    assert gpu.cuDeviceGet(ffi().new("int *"), 4096) == "CUDA_ERROR_INVALID_DEVICE"
    assert gpu.cuDeviceGetAttribute(ffi().new("int *"), -5, 0) == value
    missing = gpu.cuModuleGetFunction(ffi().new("CUfunction *"), gpu.module, b"no_such")
    assert missing == "CUDA_ERROR_NOT_FOUND"
    bad = gpu.cuModuleLoadData(ffi().new("CUmodule *"), ffi().from_buffer(b"no module" + bytes(64)))
    assert bad in ("CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_INVALID_PTX")
    function = gpu.ok.cuModuleGetFunction(gpu.module, b"mix")
    params = ffi().new("params *", (ffi().sizeof("params"), 0, null(), 0, to, 1, 8))
    pointers = ffi().new("void *[]", [params])
    for grid in (
        (0, 1, 1, 1, 1, 1),
        (1, 1, 1, 2048, 1, 1),
        (1, 70000, 1, 1, 1, 1),
        (1, 1, 1, 32, 64, 1),
    ):
        assert gpu.cuLaunchKernel(function, *grid, 0, stream, pointers, null()) == value
    gpu.ok.cuMemsetD8Async(to, 0, 32, stream)
    assert gpu.launch("mix", stream, to, 9, 8) == "CUDA_SUCCESS"
    gpu.ok.cuStreamSynchronize(stream)
    assert gpu.read(to, 8) == [9] * 8


@case
def a_thread_needs_a_context(gpu: Driver) -> None:
    """Calls in a thread without one are refused; contexts are pushed and popped by each thread."""
    seen: dict[str, Any] = {}

    def other() -> None:
        seen["before"] = gpu.cuMemAlloc(ffi().new("CUdeviceptr *"), 8)
        seen["empty"] = gpu.cuCtxPopCurrent(ffi().new("CUcontext *"))
        gpu.ok.cuCtxPushCurrent(gpu.context)
        seen["with"] = gpu.cuStreamSynchronize(null())
        seen["popped"] = gpu.ok.cuCtxPopCurrent()
        seen["after"] = gpu.cuStreamSynchronize(null())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    context = "CUDA_ERROR_INVALID_CONTEXT"
    assert (seen["before"], seen["empty"], seen["after"]) == (context, context, context)
    assert seen["with"] == "CUDA_SUCCESS"
    assert seen["popped"] == gpu.context
    assert gpu.ok.cuDevicePrimaryCtxRetain(0) == gpu.context  # counted: still there after a release
    gpu.ok.cuDevicePrimaryCtxRelease(0)
    gpu.ok.cuStreamSynchronize(null())


@case
def results_have_names(gpu: Driver) -> None:
    """Those of driver.h, with the driver's own words."""
    out = ffi().new("char **")
    from support.cuda import RESULTS

    for name, value in RESULTS.items():
        assert gpu.cuGetErrorName(value, ffi().cast("const char **", out)) == "CUDA_SUCCESS"
        assert ffi().string(out[0]).decode() == name
        assert gpu.cuGetErrorString(value, ffi().cast("const char **", out)) == "CUDA_SUCCESS"
        assert len(ffi().string(out[0])) > 5


@case
def many_threads_submit_at_once(gpu: Driver) -> None:
    """Each to a stream of its own, with its own events."""
    sums: list[int] = []

    def work(index: int) -> None:
        gpu.ok.cuCtxSetCurrent(gpu.context)
        stream, to, host, event = gpu.stream(), gpu.alloc(16), gpu.pinned(16), gpu.event(2)
        for i in range(30):
            gpu.ok.cuMemcpyHtoDAsync(to, at(host), 64, stream)
            assert gpu.launch("mix", stream, to, index + i, 16) == "CUDA_SUCCESS"
            gpu.ok.cuMemcpyDtoHAsync(at(host), to, 64, stream)
            gpu.ok.cuEventRecord(event, stream)
            gpu.ok.cuEventSynchronize(event)
        sums.append(int(host[15] == mixed(0, *range(index, index + 30))))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [1] * 4
