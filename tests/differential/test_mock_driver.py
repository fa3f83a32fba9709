"""The mock CUDA driver: CUDA's rules, its two clocks, its checks and its faults.

Holds of the issue "AdaptSched and its lowering": "everything above runs against the mock CUDA
driver (asynchronous copies with configurable bandwidth and latency, streams, events, kernels by
their CPU twins, fault injection)"; "the mock driver has a virtual clock (CI) and a wall clock
(benchmarks)"; "under injected faults (copy error, out of memory at the k-th allocation, slow link,
late events, lost context)". And of "The GPU runtime": "libcuda dlopen'd from one X-macro list",
"the mock driver's suite passes on the real one" (tests/device/test_driver.py).
"""

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cuda, driver_cases, simt
from support.cuda import Driver, at, ffi
from support.stream_model import Link, Model, Op

from pdscope.compiler.build import mock_driver, simt_kernels
from pdscope.runtime_c import ROOT

NULL = ffi().NULL
# 1 byte takes 1 ns, and nothing takes any time of its own.
PLAIN = "h2d=1GB/s; d2h=1GB/s; h2d_start=0; d2h_start=0; d2d=1GB/s"


@pytest.fixture(scope="module")
def library() -> Driver:
    return Driver(mock_driver())


@pytest.fixture
def gpu(library: Driver) -> Iterator[Driver]:
    """Opened, on a virtual clock at 0 where a byte takes a nanosecond."""
    library.configure(f"reset; {PLAIN}")
    library.open()
    yield library
    library.configure("reset")


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize("case", driver_cases.CASES, ids=lambda c: c.__name__)
def test_any_driver(library: Driver, case: driver_cases.Case, clock: str) -> None:
    library.configure(f"reset; clock={clock}")
    library.open()
    case(library)
    library.close()
    for name in ("device_live", "device_allocations", "pinned_live", "streams", "events"):
        assert library.counter(name) == 0, name
    library.configure("reset")


@pytest.mark.parametrize("case", driver_cases.CASES, ids=lambda c: c.__name__)
def test_any_driver_with_times(library: Driver, case: driver_cases.Case) -> None:
    """The same where all takes time, and where kernels run as they begin."""
    for kernels in ("end", "start"):
        library.configure(
            "reset; h2d=3GB/s; h2d_busy=2GB/s; d2h_latency=7us; pageable=100MB/s; "
            f"kernel.*.base=9us; enqueue=500; late_events=1us; kernels={kernels}"
        )
        library.open()
        case(library)
        library.close()
    library.configure("reset")


# --- the interface ---


def test_declarations_are_those_of_cuda(tmp_path: Path) -> None:
    """Constants have CUDA's values, and functions its parameters, where a toolkit is installed."""
    nvcc = shutil.which("nvcc")
    places = [Path("/usr/local/cuda/include"), *sorted(Path("/usr/local").glob("cuda-*/include"))]
    if "CUDA_HOME" in os.environ:
        places.insert(0, Path(os.environ["CUDA_HOME"]) / "include")
    if nvcc:
        places.append(Path(nvcc).resolve().parents[1] / "include")
    include = next((p for p in places if (p / "cuda.h").is_file()), None)
    if include is None or not shutil.which("cc"):
        pytest.skip("no CUDA toolkit with cuda.h, or no cc")
    header = (ROOT / "cuda" / "driver.h").read_text()
    constants = dict(re.findall(r"\b(CU_[A-Z_]+) = (\d+)", header))
    constants |= {name: str(value) for name, value in cuda.RESULTS.items()}
    assert len(constants) > 40
    lines = [f'_Static_assert({n} == {v}, "{n}");' for n, v in constants.items()]
    # Each declaration again, in our words, beside CUDA's: a difference is an error.
    for _, symbol, args in cuda.lists()["FUNCTIONS"]:
        lines.append(f"CUresult {symbol}({args});".replace("CUdevice_attribute attr", "int attr"))
    source = tmp_path / "check.c"
    text = "\n".join(lines).replace("int attribute", "CUdevice_attribute attribute")
    source.write_text(f"#include <cuda.h>\n{text}\n")
    command = ["cc", "-std=c11", "-Werror", "-fsyntax-only", f"-I{include}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_calls_before_their_time(library: Driver) -> None:
    """Before cuInit, without a context, after its release."""
    library.configure("reset")
    assert library.cuDeviceGetCount(ffi().new("int *")) == "CUDA_ERROR_NOT_INITIALIZED"
    assert library.cuInit(1) == "CUDA_ERROR_INVALID_VALUE"
    library.ok.cuInit(0)
    assert library.ok.cuDeviceGetCount() == 1
    out = ffi().new("CUdeviceptr *")
    assert library.cuMemAlloc(out, 8) == "CUDA_ERROR_INVALID_CONTEXT"
    assert "no context is current" in library.last()
    assert library.cuDevicePrimaryCtxRelease(0) == "CUDA_ERROR_INVALID_CONTEXT"
    library.open()
    library.alloc(8)
    library.ok.cuDevicePrimaryCtxRelease(0)
    assert library.cuMemAlloc(out, 8) == "CUDA_ERROR_INVALID_CONTEXT"
    assert library.counter("device_live") == 0


def test_a_module_for_another_driver(gpu: Driver) -> None:
    image = ffi().from_buffer(cuda.PTX)
    assert gpu.cuModuleLoadData(ffi().new("CUmodule *"), image) == "CUDA_ERROR_INVALID_IMAGE"
    assert "pds_twin_module" in gpu.last()
    before = gpu.counter("modules")
    gpu.configure("kernel.mix.base=100")
    assert gpu.launch("mix", gpu.stream(), gpu.alloc(1)) == "CUDA_SUCCESS"
    gpu.ok.cuModuleUnload(gpu.module)
    assert gpu.pds_mock_now() == 100  # its kernels are done
    assert gpu.counter("modules") == before - 1
    out = ffi().new("CUfunction *")
    assert gpu.cuModuleGetFunction(out, gpu.module, b"mix") == "CUDA_ERROR_INVALID_HANDLE"


# --- kernels that run thread by thread (simt_probes.c) ---


def grid_kernel(gpu: Driver, name: str) -> Any:
    text = f"PDSTWIN-LIBRARY {simt.probes()}\n".encode()
    module = gpu.ok.cuModuleLoadData(ffi().from_buffer(text))
    return gpu.ok.cuModuleGetFunction(module, name.encode())


def launch_probe(
    gpu: Driver,
    function: Any,
    to: int,
    stream: Any = NULL,
    *,
    n: int = 0,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    shared: int = 1024,
) -> str:
    """A probe that reads and writes at `to`."""
    words = simt.ffi().cast("uint32_t *", to)
    p = simt.params("probe", **{"in": words, "out": words, "n": n})
    pointers = ffi().new("void *[]", [ffi().cast("void *", int(simt.ffi().cast("uintptr_t", p)))])
    return str(gpu.cuLaunchKernel(function, *grid, *block, shared, stream, pointers, NULL))


@pytest.mark.parametrize("clock", ["clock=virtual", "kernels=start", "clock=wall"])
def test_a_kernel_has_its_grid(library: Driver, clock: str) -> None:
    """Every thread of every block, once the stream gets there; costs go by its name."""
    library.configure(f"reset; {clock}; kernel.places.base=5us")
    library.open()
    places, stream = grid_kernel(library, "places"), library.stream()
    to = library.alloc(24 * 96 * 4)
    done = library.event()
    assert (
        launch_probe(library, places, to, stream, grid=(4, 3, 2), block=(96, 1, 1))
        == "CUDA_SUCCESS"
    )
    library.ok.cuEventRecord(done, stream)
    library.ok.cuStreamSynchronize(stream)
    assert library.pds_mock_event_time(done) >= 5000
    out = np.array(library.read(to, 24 * 96 * 4)).reshape(24, 96, 4)
    assert (out[:, :, 0] == np.arange(24)[:, None]).all()
    assert (out[:, :, 1] == np.arange(96)).all()
    assert library.counter("launches.places") == 1
    library.close()
    library.configure("reset")


@pytest.mark.parametrize("clock", ["clock=virtual", "kernels=start", "clock=wall"])
def test_a_kernel_that_fails_loses_the_context(library: Driver, clock: str) -> None:
    """With the emulator's text, which names the kernel and a line; the next context is sound."""
    library.configure(f"reset; {clock}")
    library.open()
    stream, to = library.stream(), library.alloc(64)
    function = grid_kernel(library, "half_a_warp")
    assert launch_probe(library, function, to, stream) == "CUDA_SUCCESS"
    assert library.cuStreamSynchronize(stream) == "CUDA_ERROR_LAUNCH_FAILED"
    text = r"the context is lost: kernel half_a_warp: .*simt_probes\.c:\d+: pds_shfl: waits for"
    assert re.search(text, library.last())
    assert library.cuMemAlloc(ffi().new("CUdeviceptr *"), 4) == "CUDA_ERROR_LAUNCH_FAILED"
    library.close()
    library.open()
    to = library.alloc(24 * 96 * 4)
    assert launch_probe(library, grid_kernel(library, "places"), to) == "CUDA_SUCCESS"
    library.ok.cuStreamSynchronize(NULL)
    library.close()
    library.configure("reset")


def test_kernels_of_two_streams_run_at_once(library: Driver) -> None:
    """Wall clock: each in its stream's thread."""
    library.configure("reset; clock=wall")
    library.open()
    deep, streams = grid_kernel(library, "deep"), [library.stream() for _ in range(4)]
    places = [library.alloc(512) for _ in streams]
    for _ in range(3):
        for stream, to in zip(streams, places, strict=True):
            assert (
                launch_probe(library, deep, to, stream, grid=(4, 1, 1), block=(512, 1, 1))
                == "CUDA_SUCCESS"
            )
    for stream, to in zip(streams, places, strict=True):
        library.ok.cuStreamSynchronize(stream)
        assert library.read(to, 512) == [1023 * 512 + 1024 * i for i in range(512)]
    library.close()
    library.configure("reset")


def test_much_shared_memory_is_asked_for(gpu: Driver) -> None:
    """More than 48 KiB wants cuFuncSetAttribute, which gives up to the device's limit."""
    function, to, most = grid_kernel(gpu, "shuffles"), gpu.alloc(256), 163 << 10
    assert gpu.ok.cuDeviceGetAttribute(97, 0) == most
    assert launch_probe(gpu, function, to, shared=48 << 10) == "CUDA_SUCCESS"
    assert launch_probe(gpu, function, to, shared=(48 << 10) + 1) == "CUDA_ERROR_INVALID_VALUE"
    assert "49153 bytes of shared memory a block; shuffles has at most 49152" in gpu.last()
    for value in (-1, most + 1):
        assert gpu.cuFuncSetAttribute(function, 8, value) == "CUDA_ERROR_INVALID_VALUE"
        assert f"{value} bytes of shared memory a block, at most {most}" in gpu.last()
    assert gpu.cuFuncSetAttribute(function, 0, 1) == "CUDA_ERROR_INVALID_VALUE"
    assert gpu.cuFuncSetAttribute(NULL, 8, 1) == "CUDA_ERROR_INVALID_HANDLE"
    gpu.ok.cuFuncSetAttribute(function, 8, most)
    assert launch_probe(gpu, function, to, shared=most) == "CUDA_SUCCESS"
    gpu.ok.cuFuncSetAttribute(function, 8, 100)
    assert launch_probe(gpu, function, to, shared=101) == "CUDA_ERROR_INVALID_VALUE"
    gpu.ok.cuStreamSynchronize(NULL)


def test_blocks_have_one_dimension(gpu: Driver) -> None:
    function, to = grid_kernel(gpu, "shuffles"), gpu.alloc(256)
    assert launch_probe(gpu, function, to, block=(16, 2, 1)) == "CUDA_ERROR_INVALID_VALUE"
    assert "shuffles takes blocks of one dimension" in gpu.last()


def test_an_image_that_names_no_kernels(gpu: Driver, tmp_path: Path) -> None:
    """A library that is not there, is none, or has no kernels."""
    bad = tmp_path / "bad.so"
    bad.write_text("no library")
    for path, text in (
        (tmp_path / "none.so", "none.so"),
        (bad, "bad.so"),
        (mock_driver(), "it has no pds_simt_image"),
    ):
        image = ffi().from_buffer(f"PDSTWIN-LIBRARY {path}\n".encode())
        assert gpu.cuModuleLoadData(ffi().new("CUmodule *"), image) == "CUDA_ERROR_INVALID_IMAGE"
        assert "no library of kernels: " in gpu.last() and text in gpu.last()


def test_the_gpus_kernels_are_a_library(gpu: Driver) -> None:
    """Built once per content, with every kernel that a .cu file of the runtime has."""
    path = simt_kernels()
    assert path.name == "libpdscope-simt.so" and simt_kernels() == path
    module = gpu.ok.cuModuleLoadData(ffi().from_buffer(f"PDSTWIN-LIBRARY {path}\n".encode()))
    sources = [p.read_text(encoding="utf-8") for p in (ROOT / "cuda" / "kernels").glob("*.cu")]
    for name in re.findall(r"^PDS_KERNEL\((\w+),", "\n".join(sources), re.M):
        gpu.ok.cuModuleGetFunction(module, name.encode())
    gpu.ok.cuModuleUnload(module)


# --- the virtual clock ---


def copy(gpu: Driver, stream: Any, nbytes: int, to_device: bool = True) -> Any:
    """Submits a copy of pinned memory, then a record of a new event, which it returns."""
    host, device = gpu.pinned(max(nbytes // 4, 1) + 1), gpu.alloc(max(nbytes // 4, 1) + 1)
    if to_device:
        gpu.ok.cuMemcpyHtoDAsync(device, at(host), nbytes, stream)
    else:
        gpu.ok.cuMemcpyDtoHAsync(at(host), device, nbytes, stream)
    return mark(gpu, stream)


def mark(gpu: Driver, stream: Any) -> Any:
    event = gpu.event()
    gpu.ok.cuEventRecord(event, stream)
    return event


def when(gpu: Driver, event: Any) -> int:
    return int(gpu.pds_mock_event_time(event))


def host_work(gpu: Driver, name: bytes, n: int, tokens: Any) -> None:
    """The host is busy, and lets that time pass."""
    gpu.pds_mock_advance(gpu.pds_mock_host_begin(name, n, tokens))


def test_nothing_happens_until_time_passes(gpu: Driver) -> None:
    stream = gpu.stream()
    event = copy(gpu, stream, 1000)
    assert gpu.cuEventQuery(event) == "CUDA_ERROR_NOT_READY"
    assert gpu.cuStreamQuery(stream) == "CUDA_ERROR_NOT_READY"
    assert (gpu.pds_mock_now(), gpu.pds_mock_next(), when(gpu, event)) == (0, 1000, -1)
    gpu.pds_mock_advance(999)
    assert gpu.cuEventQuery(event) == "CUDA_ERROR_NOT_READY"
    gpu.pds_mock_advance(1000)
    gpu.ok.cuEventQuery(event)
    gpu.ok.cuStreamQuery(stream)
    assert (gpu.pds_mock_now(), gpu.pds_mock_next(), when(gpu, event)) == (1000, -1, 1000)
    gpu.pds_mock_advance(500)
    assert gpu.pds_mock_now() == 1000


def test_a_wait_jumps_to_the_end(gpu: Driver) -> None:
    """And not beyond what is waited for."""
    a, b = gpu.stream(), gpu.stream()
    first, second = copy(gpu, a, 1000), copy(gpu, b, 500, to_device=False)
    gpu.ok.cuEventSynchronize(second)
    assert gpu.pds_mock_now() == 500
    assert gpu.cuEventQuery(first) == "CUDA_ERROR_NOT_READY"
    gpu.ok.cuStreamSynchronize(a)
    assert gpu.pds_mock_now() == 1000
    assert gpu.ok.cuEventElapsedTime(second, first) == np.float32(0.0005)


def test_all_of_one_instant_has_happened(gpu: Driver) -> None:
    """Work that ends when the awaited does is complete too, and kernels that end at one instant
    have their effects in the order of submission."""
    gpu.configure("kernel.append.base=100")
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(4)
    gpu.ok.cuMemsetD8Async(to, 0, 16, a)
    gpu.ok.cuStreamSynchronize(a)
    for stream, value in ((a, 7), (b, 8)):
        assert gpu.launch("append", stream, to, value) == "CUDA_SUCCESS"
    second = mark(gpu, b)
    gpu.ok.cuStreamSynchronize(a)
    gpu.ok.cuEventQuery(second)
    gpu.ok.cuStreamQuery(b)
    assert gpu.read(to, 3) == [2, 7, 8]


def test_one_engine_a_direction(gpu: Driver) -> None:
    """Copies of a direction come after each other, those of the other run beside them."""
    streams = [gpu.stream() for _ in range(4)]
    up = [copy(gpu, streams[i], 100 + i) for i in range(3)]
    down = copy(gpu, streams[3], 70, to_device=False)
    gpu.pds_mock_advance(10_000)
    assert [when(gpu, e) for e in (*up, down)] == [100, 201, 303, 70]


def test_the_copy_that_was_ready_first_goes_first(gpu: Driver) -> None:
    """Not the one that was submitted first."""
    gpu.configure("kernel.mix.base=50")
    a, b, c = gpu.stream(), gpu.stream(), gpu.stream()
    to = gpu.alloc(1)
    running = copy(gpu, c, 100)
    assert gpu.launch("mix", a, to) == "CUDA_SUCCESS"
    late = copy(gpu, a, 10)
    gpu.pds_mock_advance(20)
    early = copy(gpu, b, 10)
    gpu.pds_mock_advance(1000)
    assert [when(gpu, e) for e in (running, early, late)] == [100, 110, 120]


def test_copies_that_are_ready_at_one_instant_go_in_order_of_submission(gpu: Driver) -> None:
    """Also where other work of that instant comes between."""
    gpu.configure("kernel.mix.base=50")
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(1)
    assert gpu.launch("mix", a, to) == "CUDA_SUCCESS"
    assert gpu.launch("mix", b, to) == "CUDA_SUCCESS"
    mark(gpu, b)
    first = copy(gpu, b, 10)
    second = copy(gpu, a, 10)
    gpu.pds_mock_advance(1000)
    assert (when(gpu, first), when(gpu, second)) == (60, 70)


def test_latency_and_start(gpu: Driver) -> None:
    """Every copy pays `latency`; `start` only the one that finds the engine idle."""
    gpu.configure("h2d_latency=7; h2d_start=100")
    a, b = gpu.stream(), gpu.stream()
    events = [copy(gpu, a, 10), copy(gpu, b, 10)]
    gpu.pds_mock_advance(134)  # both are done at this very instant, and another follows at once
    events.append(copy(gpu, a, 10))
    gpu.pds_mock_advance(152)
    events.append(copy(gpu, b, 10))
    gpu.pds_mock_advance(1000)
    assert [when(gpu, e) for e in events] == [117, 134, 151, 152 + 117]


def test_bytes_are_rounded_up_to_nanoseconds(gpu: Driver) -> None:
    gpu.configure("h2d=3GB/s; d2d=3GB/s; d2d_latency=5")
    stream, to = gpu.stream(), gpu.alloc(8)
    assert [when(gpu, e) for e in (copy(gpu, stream, 6),) if not gpu.pds_mock_advance(9)] == [2]
    event = copy(gpu, stream, 7)
    gpu.ok.cuMemsetD8Async(to, 0, 7, stream)
    last = mark(gpu, stream)
    gpu.ok.cuMemcpyDtoDAsync(to, to + 16, 7, stream)
    end = mark(gpu, stream)
    gpu.ok.cuStreamSynchronize(stream)
    assert [when(gpu, e) for e in (event, last, end)] == [12, 20, 28]


def test_the_link_is_slower_while_the_host_works(gpu: Driver) -> None:
    """To the nanosecond, for the part of a copy that falls into the work."""
    gpu.configure("h2d=4GB/s; h2d_busy=1GB/s; host.experts.base=10; host.experts.curve=1:5,3:15")
    stream = gpu.stream()
    event = copy(gpu, stream, 400)
    gpu.pds_mock_advance(20)  # 80 of 400 bytes
    tokens = ffi().new("uint32_t[]", [1, 2, 5])
    host_work(gpu, b"experts", 3, tokens)  # 10 + 5 + 10 + 25: as many bytes
    assert gpu.pds_mock_now() == 70
    assert gpu.pds_mock_next() == 70 + (400 - 80 - 50 + 3) // 4
    gpu.ok.cuStreamSynchronize(stream)
    assert when(gpu, event) == 138
    host_work(gpu, b"unknown", 0, NULL)
    assert gpu.pds_mock_now() == 138


def test_a_host_may_wait_while_it_counts_as_working(gpu: Driver) -> None:
    """The rate changes at the end of the work, however time gets there, and pds_mock_next knows."""
    gpu.configure("h2d=4GB/s; h2d_busy=1GB/s; host.experts.base=50")
    stream = gpu.stream()
    event = copy(gpu, stream, 90)
    assert gpu.pds_mock_host_begin(b"experts", 0, NULL) == 50
    assert (gpu.pds_mock_now(), gpu.pds_mock_next()) == (0, 50 + 10)
    gpu.ok.cuStreamSynchronize(stream)
    assert when(gpu, event) == gpu.pds_mock_now() == 60


def test_settings_count_from_the_moment_they_change(gpu: Driver) -> None:
    stream = gpu.stream()
    event = copy(gpu, stream, 100)
    gpu.pds_mock_advance(60)
    gpu.configure("h2d=4GB/s")
    gpu.pds_mock_advance(1000)
    assert when(gpu, event) == 70


def test_kernels_take_what_their_costs_say(gpu: Driver) -> None:
    """base + the sum of the curve at each count + extra; kernels of two streams run at once."""
    gpu.configure("kernel.mix.base=1us; kernel.mix.curve=2:100,4:120,8:121; kernel.*.base=3")
    gpu.configure("kernel.mix.per_extra=3/1024")
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(8)
    cases = [((), 0, 0), ((0,), 0, 0), ((1,), 0, 100), ((3,), 0, 110), ((5,), 0, 120)]
    cases += [((7, 12), 0, 120 + 122), ((2,), 1000, 102), ((), 2048, 6)]
    expected, events = 0, []
    for tokens, extra, ns in cases:
        assert gpu.launch("mix", a, to, tokens=tokens, extra=extra) == "CUDA_SUCCESS"
        expected += 1000 + ns
        events.append((mark(gpu, a), expected))
    assert gpu.launch("append", b, to) == "CUDA_SUCCESS"
    other = mark(gpu, b)
    gpu.ok.cuStreamSynchronize(a)
    assert [when(gpu, e) for e, _ in events] == [t for _, t in events]
    assert when(gpu, other) == 3


def test_the_parameter_struct_is_copied_with_its_tokens(gpu: Driver) -> None:
    """`launch` overwrites both after the call; the kernel runs later."""
    stream, to = gpu.stream(), gpu.alloc(8)
    gpu.configure("kernel.tokens.base=100")
    assert gpu.launch("tokens", stream, to, tokens=(5, 6, 7)) == "CUDA_SUCCESS"
    gpu.ok.cuStreamSynchronize(stream)
    assert gpu.read(to, 4) == [3, 5, 6, 7]


def test_a_wait_is_for_the_last_record_at_the_time_of_the_call(gpu: Driver) -> None:
    a, b, c = gpu.stream(), gpu.stream(), gpu.stream()
    event = copy(gpu, a, 100)
    gpu.ok.cuStreamWaitEvent(b, event, 0)
    copy(gpu, a, 1000)
    gpu.ok.cuEventRecord(event, a)  # later than the wait
    passed = mark(gpu, b)
    gpu.ok.cuStreamWaitEvent(c, event, 0)
    second = mark(gpu, c)
    gpu.pds_mock_advance(5000)
    assert (when(gpu, passed), when(gpu, second)) == (100, 1100)


def test_pageable_copies_keep_the_host(gpu: Driver) -> None:
    gpu.configure("pageable=500MB/s")
    stream, to = gpu.stream(), gpu.alloc(64)
    copy(gpu, stream, 30)
    memory = np.zeros(64, np.uint32)
    gpu.ok.cuMemcpyHtoDAsync(to, at(memory), 100, stream)
    assert gpu.pds_mock_now() == 30 + 200
    gpu.ok.cuMemcpyDtoHAsync(at(memory), to, 100, stream)
    assert gpu.pds_mock_now() == 430


def test_submitting_takes_the_hosts_time(gpu: Driver) -> None:
    gpu.configure("enqueue=3")
    stream = gpu.stream()
    event = copy(gpu, stream, 100)  # a copy and a record
    assert gpu.pds_mock_now() == 6
    gpu.ok.cuEventSynchronize(event)
    assert when(gpu, event) == 100


def test_results_are_seen_when_they_are_due(gpu: Driver) -> None:
    """A destination is poison from the beginning of a copy to its end, fresh memory until written;
    a kernel has its effect at its end, or at its beginning where tests want that."""
    stream, other, to, back = gpu.stream(), gpu.stream(), gpu.alloc(4), gpu.pinned(4)
    host = gpu.pinned(4)
    assert gpu.read(to, 4) == [2**32 - 1] * 4
    host[:] = 5
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 16, stream)
    gpu.ok.cuStreamSynchronize(stream)
    gpu.ok.cuMemcpyDtoHAsync(at(back), to, 16, stream)
    assert list(back) == [2**32 - 1] * 4
    gpu.ok.cuStreamSynchronize(stream)
    assert list(back) == [5] * 4
    for choice, seen in (("end", 5), ("start", 16)):
        gpu.configure(f"kernel.mix.base=1us; kernels={choice}")
        gpu.ok.cuMemsetD8Async(to, 0, 16, stream)
        gpu.ok.cuMemcpyHtoDAsync(to, at(host), 16, stream)
        gpu.ok.cuStreamSynchronize(stream)
        assert gpu.launch("mix", other, to, 1, 4) == "CUDA_SUCCESS"
        assert gpu.read(to, 4) == [seen] * 4  # 16 ns of the kernel's 1000
        gpu.ok.cuStreamSynchronize(other)
        assert gpu.read(to, 4) == [16] * 4


RATES = st.sampled_from([1, 2, 3, 7]).map(lambda x: x * 10**9)
STREAMS = st.integers(0, 3)
SMALL = st.integers(0, 300)
ACTIONS = st.one_of(
    st.tuples(st.just("h2d"), STREAMS, SMALL, st.booleans()),
    st.tuples(st.just("d2h"), STREAMS, SMALL, st.booleans()),
    st.tuples(st.just("kernel"), STREAMS, SMALL),
    st.tuples(st.just("record"), STREAMS, STREAMS),
    st.tuples(st.just("wait"), STREAMS, STREAMS),
    st.tuples(st.just("stream"), STREAMS),
    st.tuples(st.just("event"), STREAMS),
    st.tuples(st.just("work"), st.integers(1, 400)),
    st.tuples(st.just("begin"), st.integers(1, 400)),
    st.tuples(st.just("advance"), SMALL),
    st.tuples(st.just("query"), STREAMS),
)


@settings(max_examples=400, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=40),
    rates=st.tuples(RATES, RATES, st.just(0) | RATES, st.just(0) | RATES, st.just(0) | RATES),
    latency=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    start=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    enqueue=st.integers(0, 3),
    late=st.sampled_from([0, 0, 5]),
    slow=st.tuples(st.sampled_from([1, 1, 3]), st.integers(0, 500)),
)
def test_times_equal_those_of_a_model(
    library: Driver,
    actions: list[tuple[Any, ...]],
    rates: tuple[int, ...],
    latency: tuple[int, int],
    start: tuple[int, int],
    enqueue: int,
    late: int,
    slow: tuple[int, int],
) -> None:
    """To the nanosecond: every end of every piece of work, and the host's own time, over streams of
    which two synchronise with the NULL stream (stream 0)."""
    text = "; ".join(
        [f"h2d={rates[0]}; d2h={rates[1]}; h2d_busy={rates[2]}; d2h_busy={rates[3]}"]
        + [f"pageable={rates[4]}; h2d_latency={latency[0]}; d2h_latency={latency[1]}"]
        + [f"h2d_start={start[0]}; d2h_start={start[1]}; enqueue={enqueue}; late_events={late}"]
        + [f"slow_link={slow[0]}; slow_from={slow[1]}"]
        + ["kernel.mix.curve=1:1,2:2; host.work.curve=1:1,2:2"]  # a token, a nanosecond
    )
    gpu = library
    gpu.configure(f"reset; {text}")
    gpu.open()
    links = {
        kind: Link(rates[i], rates[2 + i], rates[4], latency[i], start[i])
        for i, kind in enumerate(("h2d", "d2h"))
    }
    model = Model(links, *slow)
    streams = [NULL, gpu.stream(blocking=True), gpu.stream(), gpu.stream()]
    events = [gpu.event() for _ in streams]
    records: list[Op | None] = [None] * len(events)
    probes: list[tuple[Any, Op]] = []
    device, pinned, pageable = gpu.alloc(128), gpu.pinned(128), np.zeros(128, np.uint32)
    now = 0

    def tail(stream: int) -> Op | None:
        model.solve()
        left = [op for op in model.ops if op.stream == stream and (op.end or 0) > now]
        return left[-1] if left else None

    def submit(op: Op) -> None:
        nonlocal now
        others = [1] if op.stream == 0 else [0] if op.stream == 1 else []
        for other in others:
            if before := tail(other):
                model.ops.append(Op("wait", op.stream, now, awaited=before))
        model.ops.append(op)
        now += enqueue

    def until(op: Op | None) -> None:
        nonlocal now
        if op is not None:
            model.solve()
            assert op.end is not None
            now = max(now, op.end)

    for name, *args in actions:
        if name in ("h2d", "d2h"):
            stream, words, is_pageable = args
            nbytes = 1 + words
            host = at(pageable if is_pageable else pinned)
            if name == "h2d":
                gpu.ok.cuMemcpyHtoDAsync(device, host, nbytes, streams[stream])
            else:
                gpu.ok.cuMemcpyDtoHAsync(host, device, nbytes, streams[stream])
            op = Op(name, stream, now, bytes=nbytes, pageable=is_pageable)
            submit(op)
            if is_pageable:
                until(op)
        elif name == "kernel":
            stream, ns = args
            tokens = (ns,) if ns else ()
            assert gpu.launch("mix", streams[stream], device, tokens=tokens) == "CUDA_SUCCESS"
            submit(Op("fixed", stream, now, ns=ns))
        elif name == "record":
            stream, index = args
            gpu.ok.cuEventRecord(events[index], streams[stream])
            op = Op("record", stream, now, ns=late)
            records[index] = op
            submit(op)
        elif name == "wait":
            stream, index = args
            gpu.ok.cuStreamWaitEvent(streams[stream], events[index], 0)
            model.solve()
            awaited = records[index]
            if awaited is not None and (awaited.end or 0) > now:
                submit(Op("wait", stream, now, awaited=awaited))
        elif name == "stream":
            gpu.ok.cuStreamSynchronize(streams[args[0]])
            until(tail(args[0]))
        elif name == "event":
            gpu.ok.cuEventSynchronize(events[args[0]])
            until(records[args[0]])
        elif name in ("work", "begin"):
            until_ns = gpu.pds_mock_host_begin(b"work", 1, ffi().new("uint32_t[]", [args[0]]))
            assert until_ns == now + args[0]
            model.host_busy.append((now, until_ns))
            if name == "work":
                gpu.pds_mock_advance(until_ns)
                now = until_ns
        elif name == "advance":
            gpu.pds_mock_advance(now + args[0])
            now += args[0]
        else:
            ready = tail(args[0]) is None
            result = gpu.cuStreamQuery(streams[args[0]])
            assert result == ("CUDA_SUCCESS" if ready else "CUDA_ERROR_NOT_READY")
        assert gpu.pds_mock_now() == now, (name, args)
        if name in ("h2d", "d2h", "kernel", "wait"):
            probe = mark(gpu, streams[args[0]])
            op = Op("record", args[0], now, ns=late)
            submit(op)
            probes.append((probe, op))
    model.solve()
    ends = [op.end for op in model.ops if op.end is not None and op.end > now]
    assert gpu.pds_mock_next() == (min(ends) if ends else -1)
    gpu.pds_mock_advance(10**6)
    assert [when(gpu, probe) for probe, _ in probes] == [op.end for _, op in probes]
    assert gpu.pds_mock_next() == -1


def test_two_runs_are_equal(gpu: Driver) -> None:
    """Every time and every result."""

    def run() -> list[int]:
        gpu.configure("reset; kernel.mix.curve=1:900,9:1000; h2d=11GB/s")
        gpu.open()
        rng = np.random.default_rng(5)
        streams, to = [gpu.stream() for _ in range(3)], gpu.alloc(64)
        events, host = [gpu.event() for _ in range(3)], gpu.pinned(64)
        seen = []
        for step in range(200):
            i, j = rng.integers(0, 3, 2)
            gpu.launch("mix", streams[i], to, step, 8, tokens=(int(rng.integers(1, 9)),))
            gpu.ok.cuMemcpyHtoDAsync(to + 32, at(host), 64, streams[j])
            gpu.ok.cuEventRecord(events[i], streams[i])
            gpu.ok.cuStreamWaitEvent(streams[j], events[i], 0)
            if step % 17 == 0:
                gpu.ok.cuEventSynchronize(events[j])
            seen.append(int(gpu.pds_mock_now()))
        return seen + gpu.read(to, 16)

    assert run() == run()


# --- memory, checks, counters ---


def test_memory_to_the_byte(gpu: Driver) -> None:
    free, total = ffi().new("size_t *"), ffi().new("size_t *")
    out = ffi().new("CUdeviceptr *")
    gpu.configure("memory=1000; context=100")
    a = gpu.ok.cuMemAlloc(500)
    gpu.ok.cuMemGetInfo(free, total)
    assert (free[0], total[0], gpu.ok.cuDeviceTotalMem(0)) == (400, 1000, 1000)
    assert gpu.cuMemAlloc(out, 401) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert "401 bytes wanted, 400 free" in gpu.last()
    gpu.ok.cuMemAlloc(400)
    assert (gpu.counter("device_live"), gpu.counter("device_allocations")) == (900, 2)
    gpu.ok.cuMemFree(a)
    assert (gpu.counter("device_live"), gpu.counter("device_peak")) == (400, 900)
    assert gpu.cuMemFree(a) == "CUDA_ERROR_INVALID_VALUE"
    assert "was freed" in gpu.last()
    assert gpu.pds_mock_configure(b"memory=499") == -1 and "allocated" in gpu.last()


def test_pinned_memory_has_a_limit(gpu: Driver) -> None:
    gpu.configure("pinned=8192")
    out = ffi().new("void **")
    gpu.pinned(1024)
    memory = np.zeros(2048, np.uint32)
    assert gpu.cuMemHostRegister(at(memory), 8192, 0) == "CUDA_ERROR_OUT_OF_MEMORY"
    gpu.ok.cuMemHostRegister(at(memory), 4096, 0)
    overlaps = gpu.cuMemHostRegister(at(memory, 1023), 8, 0)
    assert overlaps == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    assert gpu.cuMemHostAlloc(out, 1, 0) == "CUDA_ERROR_OUT_OF_MEMORY"
    assert "0 of 8192 may still be pinned" in gpu.last()
    gpu.ok.cuMemHostUnregister(at(memory))
    assert (gpu.counter("pinned_live"), gpu.counter("pinned_peak")) == (4096, 8192)


def test_large_memory_costs_nothing_until_it_is_used(gpu: Driver) -> None:
    gpu.configure("memory=1024GiB")
    address = gpu.ok.cuMemAlloc(1000 << 30)
    gpu.ok.cuMemsetD8Async(address + (999 << 30), 7, 4, NULL)
    assert gpu.read(address + (999 << 30), 1) == [0x07070707]


def test_freed_memory_in_use_is_waited_for(gpu: Driver) -> None:
    """As the driver does: and the counter tells that somebody was waiting without knowing."""
    stream, other = gpu.stream(), gpu.alloc(4)
    copy(gpu, stream, 1000)
    gpu.ok.cuMemFree(other)
    assert (gpu.pds_mock_now(), gpu.counter("implicit_waits")) == (1000, 1)
    gpu.ok.cuMemFree(gpu.alloc(4))
    assert gpu.counter("implicit_waits") == 1


def test_copies_outside_allocations(gpu: Driver) -> None:
    """Debug checks: a real GPU would write somewhere, or fail later."""
    stream, to, host = gpu.stream(), gpu.alloc(4), gpu.pinned(4)
    memory = np.zeros(4, np.uint32)
    address = int(ffi().cast("uintptr_t", at(memory)))
    cases = [
        (lambda: gpu.cuMemcpyHtoDAsync(to, at(host), 17, stream), "pinned memory of 16"),
        (lambda: gpu.cuMemcpyHtoDAsync(to + 8, at(host), 16, stream), "device allocation of 16"),
        (lambda: gpu.cuMemcpyHtoDAsync(to, at(host, 2), 16, stream), "pinned memory of 16"),
        (lambda: gpu.cuMemcpyHtoDAsync(address, at(host), 16, stream), "no device allocation"),
        (lambda: gpu.cuMemcpyHtoDAsync(to, ffi().cast("void *", to), 16, stream), "is device mem"),
        (lambda: gpu.cuMemcpyHtoDAsync(to, NULL, 16, stream), "source is NULL"),
        (lambda: gpu.cuMemcpyDtoHAsync(at(host), to + 16, 1, stream), "no device allocation"),
        (lambda: gpu.cuMemcpyDtoHAsync(at(host, 3), to, 8, stream), "destination: 8 bytes at"),
        (lambda: gpu.cuMemcpyDtoDAsync(to, to + 1, 16, stream), "source: 16 bytes at offset 1"),
        (lambda: gpu.cuMemsetD8Async(to, 0, 17, stream), "destination: 17 bytes"),
    ]
    for call, text in cases:
        assert call() == "CUDA_ERROR_INVALID_VALUE"
        assert text in gpu.last() and gpu.last().startswith("cuMem"), gpu.last()
    gpu.ok.cuMemFreeHost(at(host))
    assert gpu.cuMemcpyHtoDAsync(to, at(memory), 16, stream) == "CUDA_SUCCESS"
    assert gpu.last() == ""
    freed = ffi().cast("void *", host.ctypes.data)
    assert gpu.cuMemcpyHtoDAsync(to, freed, 16, stream) == "CUDA_ERROR_INVALID_VALUE"
    assert "pinned memory that was freed" in gpu.last()
    assert gpu.cuMemFreeHost(freed) == "CUDA_ERROR_INVALID_VALUE"
    assert gpu.counter("h2d_copies") == 1


def test_handles_that_are_gone(gpu: Driver) -> None:
    """Of streams and events; a real driver may crash."""
    stream, event = gpu.stream(), gpu.event()
    gpu.ok.cuEventDestroy(event)
    assert gpu.cuEventRecord(event, stream) == "CUDA_ERROR_INVALID_HANDLE"
    assert gpu.cuEventDestroy(event) == "CUDA_ERROR_INVALID_HANDLE"
    gpu.ok.cuStreamDestroy(stream)
    assert gpu.cuStreamSynchronize(stream) == "CUDA_ERROR_INVALID_HANDLE"
    assert gpu.cuStreamDestroy(stream) == "CUDA_ERROR_INVALID_HANDLE"
    assert gpu.cuStreamDestroy(NULL) == "CUDA_ERROR_INVALID_HANDLE"
    assert "no such stream" in (gpu.cuStreamQuery(stream), gpu.last())[1]


def test_parameter_structs_that_cannot_be(gpu: Driver) -> None:
    """Shorter than the header, or with counts that are nowhere."""
    stream, to = gpu.stream(), gpu.alloc(4)
    function = gpu.ok.cuModuleGetFunction(gpu.module, b"mix")

    def launch(nbytes: int, n: int = 0) -> str:
        params = ffi().new("params *", (nbytes, n, NULL, 0, to, 1, 4))
        pointers = ffi().new("void *[]", [params])
        one = (1,) * 6
        return str(gpu.cuLaunchKernel(function, *one, 0, stream, pointers, NULL))

    assert launch(ffi().sizeof("params")) == "CUDA_SUCCESS"
    assert launch(23) == "CUDA_ERROR_INVALID_VALUE" and "its header alone has 24" in gpu.last()
    assert launch(40, 2) == "CUDA_ERROR_INVALID_VALUE" and "without their tokens" in gpu.last()


def test_counters(gpu: Driver) -> None:
    stream, to, host = gpu.stream(), gpu.alloc(16), gpu.pinned(16)
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 64, stream)
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 8, stream)
    gpu.ok.cuMemcpyDtoHAsync(at(host), to, 4, stream)
    gpu.ok.cuMemcpyDtoDAsync(to, to + 32, 16, stream)
    gpu.launch("mix", stream, to)
    gpu.launch("mix", stream, to)
    gpu.launch("append", stream, to)
    names = "h2d_bytes h2d_copies d2h_bytes d2h_copies d2d_bytes d2d_copies launches launches.mix"
    counted = [gpu.counter(n) for n in (*names.split(), "launches.meet", "launches.none", "none")]
    assert counted == [72, 2, 4, 1, 16, 1, 3, 2, 0, -1, -1]
    assert gpu.counter("calls") > 8


# --- settings ---


@pytest.mark.parametrize(
    "text",
    ["h2d", "h2d=", "h2d=0", "h2d=-1", "h2d=1XB/s", "speed=1", "clock=sun", "kernel.mix=1"]
    + [
        "kernel.mix.curve=1:2,1:3",
        "kernel.mix.curve=1:2,",
        "kernel.mix.curve=1",
        "memory=99999999999GiB",
    ]
    + ["kernel.mix.per_extra=1/0", "kernels=now", "sms=0", "kernel.mix.speed=1", "h2d=1e9"],
)
def test_settings_that_are_wrong(gpu: Driver, text: str) -> None:
    """They name what is wrong, and change nothing."""
    gpu.configure("host.a.base=5")
    assert gpu.pds_mock_configure(f"host.a.base=7; {text}".encode()) == -1
    assert text.split("=")[0] in gpu.last()
    host_work(gpu, b"a", 0, NULL)
    assert gpu.pds_mock_now() == 5


def test_the_clock_stays_while_a_context_is_there(gpu: Driver) -> None:
    assert gpu.pds_mock_configure(b"clock=wall") == -1
    assert "while a context is there" in gpu.last()


def test_units_and_spaces(gpu: Driver) -> None:
    gpu.configure(" h2d = 2 GB/s ;\n h2d_latency=3us;; host.a.b.base = 1ms ;")
    host_work(gpu, b"a.b", 0, NULL)
    assert gpu.pds_mock_now() == 1_000_000
    event = copy(gpu, gpu.stream(), 1000)
    gpu.pds_mock_advance(2_000_000)
    assert when(gpu, event) == 1_003_500


def in_a_process(settings: str, code: str) -> str:
    program = (
        "from support.cuda import *\n"
        "from pdscope.compiler.build import mock_driver\n"
        f"gpu = Driver(mock_driver())\n{code}"
    )
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(root / "tests")])
    done = subprocess.run(
        [os.sys.executable, "-c", program],
        env=os.environ | {"PDS_MOCK_CUDA": settings, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_settings_of_the_environment() -> None:
    """PDS_MOCK_CUDA counts from the first call on; a mistake in it fails cuInit."""
    show = "print(gpu.cuInit(0), gpu.last(), gpu.ok.cuDriverGetVersion())"
    assert in_a_process("driver=12060", show).split() == ["CUDA_SUCCESS", "12060"]
    assert "NO_DEVICE cuInit: the mock is set to devices=0" in in_a_process("devices=0", show)
    wrong = in_a_process("h2d=fast", show)
    assert "CUDA_ERROR_INVALID_VALUE cuInit: setting 'h2d=fast'" in wrong


def test_device_attributes(gpu: Driver) -> None:
    gpu.configure("compute=90; sms=132")
    assert gpu.ok.cuDeviceGetAttribute(75, 0) == 9
    assert gpu.ok.cuDeviceGetAttribute(76, 0) == 0
    assert gpu.ok.cuDeviceGetAttribute(16, 0) == 132
    assert gpu.ok.cuDeviceGetAttribute(40, 0) == 2
    name = ffi().new("char[9]")
    gpu.ok.cuDeviceGetName(name, 9, 0)
    assert ffi().string(name) == b"PDScope "


# --- faults ---


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
def either(request: pytest.FixtureRequest, library: Driver) -> Iterator[Driver]:
    library.configure(f"reset; clock={request.param}")
    library.open()
    yield library
    library.configure("reset")


def test_fault_copy(either: Driver) -> None:
    """The k-th copy fails where the stream gets to it, and the context is lost; what came before is
    there, what comes after is not done."""
    gpu = either
    stream, to, host = gpu.stream(), gpu.alloc(4), gpu.pinned(16)
    gpu.configure("fail_copy=3; h2d_latency=100ms")
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


def test_fault_launch(either: Driver) -> None:
    """A kernel fails where the stream gets to it, and the context is lost."""
    gpu = either
    stream, to = gpu.stream(), gpu.alloc(4)
    gpu.configure("fail_launch=2; refuse_launch=3")
    assert gpu.launch("mix", stream, to) == "CUDA_SUCCESS"
    gpu.ok.cuStreamSynchronize(stream)
    gpu.configure("kernel.mix.base=200ms")
    assert gpu.launch("mix", stream, to) == "CUDA_SUCCESS"
    assert gpu.launch("mix", stream, to) == "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    event = gpu.event()
    gpu.ok.cuEventRecord(event, stream)
    assert gpu.cuEventSynchronize(event) == "CUDA_ERROR_LAUNCH_FAILED"
    lost(gpu, "CUDA_ERROR_LAUNCH_FAILED", "fault fail_launch")


def test_fault_lost_context(either: Driver) -> None:
    """At the k-th call; nothing that was under way ends."""
    gpu = either
    stream, to, host = gpu.stream(), gpu.alloc(4), gpu.pinned(4)
    gpu.configure("h2d_latency=300ms; lose_context=3")
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 16, stream)
    assert gpu.cuStreamQuery(stream) == "CUDA_ERROR_NOT_READY"
    assert gpu.cuStreamSynchronize(stream) == "CUDA_ERROR_UNKNOWN"
    lost(gpu, "CUDA_ERROR_UNKNOWN", "fault lose_context")


def test_fault_lost_context_while_a_thread_waits(library: Driver) -> None:
    """With the wall clock: the one that waits is told too."""
    gpu = library
    gpu.configure("reset; clock=wall; kernel.mix.base=60s")
    gpu.open()
    stream, to = gpu.stream(), gpu.alloc(4)
    assert gpu.launch("mix", stream, to) == "CUDA_SUCCESS"
    told: list[str] = []

    def wait() -> None:
        gpu.ok.cuCtxSetCurrent(gpu.context)
        told.append(gpu.cuStreamSynchronize(stream))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    gpu.configure("lose_context=1")
    assert gpu.cuStreamQuery(stream) == "CUDA_ERROR_UNKNOWN"
    thread.join(timeout=20)
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


# --- the wall clock ---


def timed_copies(gpu: Driver) -> tuple[float, float, float]:
    """Seconds that 20 copies of two streams should take, take, and keep the caller."""
    a, b = gpu.stream(), gpu.stream()
    host, to = gpu.pinned(1 << 18), gpu.alloc(1 << 18)
    gpu.configure("h2d=1GB/s; h2d_start=0; h2d_latency=1ms")
    wanted = 20 * (1 + (1 << 20) / 1e6) / 1000
    first = mark(gpu, a)
    gpu.ok.cuEventSynchronize(first)
    before = time.monotonic()
    for i in range(20):
        gpu.ok.cuMemcpyHtoDAsync(to, at(host), 1 << 20, (a, b)[i % 2])
    submitted = time.monotonic() - before
    last = mark(gpu, b)
    gpu.ok.cuStreamSynchronize(b)
    took = time.monotonic() - before
    assert gpu.ok.cuEventElapsedTime(first, last) >= wanted * 1000
    return wanted, took, submitted


def test_wall_copies_take_their_time(library: Driver) -> None:
    """Latency and bytes over bandwidth, one after the other; the calls return before."""
    library.configure("reset; clock=wall")
    library.open()
    wanted, took, submitted = timed_copies(library)
    assert submitted < took and wanted <= took
    library.configure("reset")


@pytest.mark.device
def test_wall_times_are_close(library: Driver) -> None:
    """What the settings say does not drift with the sleeps: within 2 % over 20 copies, and calls
    take no part of it."""
    library.configure("reset; clock=wall")
    library.open()
    wanted, took, submitted = timed_copies(library)
    print(f"wanted {wanted:.5f} s, took {took:.5f} s, submitted in {submitted:.5f} s")
    assert wanted <= took < 1.02 * wanted
    assert submitted < 0.1 * wanted
    library.configure("reset")


def test_wall_work_counts_from_what_it_waited_for(library: Driver) -> None:
    gpu = library
    gpu.configure("reset; clock=wall; kernel.mix.base=20ms")
    gpu.open()
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(1)
    assert gpu.launch("mix", a, to) == "CUDA_SUCCESS"
    first = mark(gpu, a)
    gpu.ok.cuStreamWaitEvent(b, first, 0)
    assert gpu.launch("mix", b, to) == "CUDA_SUCCESS"
    second = mark(gpu, b)
    gpu.ok.cuEventSynchronize(second)
    assert when(gpu, second) - when(gpu, first) >= 20_000_000
    gpu.configure("reset")


def test_wall_copies_are_served_in_order(library: Driver) -> None:
    """Of eight streams that wait for the link, the one that was ready first."""
    gpu = library
    gpu.configure("reset; clock=wall; h2d_start=0; h2d_latency=2ms")
    gpu.open()
    streams = [gpu.stream() for _ in range(8)]
    rng = np.random.default_rng(1)
    for _ in range(4):
        events = [copy(gpu, streams[i], 16) for i in rng.permutation(8)]
        for event in events:
            gpu.ok.cuEventSynchronize(event)
        times = [when(gpu, e) for e in events]
        assert times == sorted(times)
    gpu.configure("reset")


def test_wall_kernels_of_two_streams_run_at_once(library: Driver) -> None:
    """They meet; on one stream they would miss each other."""
    gpu = library
    gpu.configure("reset; clock=wall")
    gpu.open()
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(8)
    gpu.ok.cuMemsetD8Async(to, 0, 32, a)
    gpu.ok.cuStreamSynchronize(a)
    assert gpu.launch("meet", a, to, 4, 2) == "CUDA_SUCCESS"
    assert gpu.launch("meet", b, to, 5, 2) == "CUDA_SUCCESS"
    gpu.ok.cuStreamSynchronize(a)
    gpu.ok.cuStreamSynchronize(b)
    assert gpu.read(to, 6)[4:] == [1, 1]
    gpu.configure("reset")


def test_wall_kernels_take_their_costs_or_longer(library: Driver) -> None:
    gpu = library
    gpu.configure("reset; clock=wall; kernel.mix.base=3ms")
    gpu.open()
    stream, to = gpu.stream(), gpu.alloc(8)
    first = mark(gpu, stream)
    for _ in range(5):
        assert gpu.launch("mix", stream, to, 1, 8) == "CUDA_SUCCESS"
    last = mark(gpu, stream)
    gpu.ok.cuStreamSynchronize(stream)
    assert gpu.ok.cuEventElapsedTime(first, last) >= 15
    assert gpu.pds_mock_next() == -1
    gpu.configure("reset")


def test_the_builder_keeps_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By content, and again if it was damaged."""
    path = mock_driver()
    assert path.name == "libcuda-mock.so" and mock_driver() == path
    stamp = path.stat().st_mtime_ns
    mock_driver()
    assert path.stat().st_mtime_ns == stamp
    monkeypatch.setenv("PDSCOPE_CACHE", str(tmp_path))
    other = mock_driver()
    data = other.read_bytes()
    assert data == path.read_bytes() and tmp_path in other.parents
    other.write_bytes(data[:-1])
    assert mock_driver().read_bytes() == data


@pytest.mark.parametrize("clock", ["virtual", "wall"])
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
