"""The mock CUDA driver: CUDA's rules, its memory, checks, counters and settings.

Holds of the issue "AdaptSched and its lowering": "everything above runs against the mock CUDA
driver (asynchronous copies with configurable bandwidth and latency, streams, events, kernels by
their CPU twins, fault injection)". And of "The GPU runtime": "libcuda dlopen'd from one X-macro
list", "the mock driver's suite passes on the real one" (tests/device/test_driver.py). Its times are
in test_mock_times.py, its faults in test_mock_faults.py.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import cuda, driver_cases, simt
from support.cuda import Driver, at, ffi
from support.mock_driver import copy, gpu, host_work, library, when

from pdscope.compiler.build import mock_driver, simt_kernels
from pdscope.runtime_c import ROOT

__all__ = ["gpu", "library"]

NULL = ffi().NULL


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
