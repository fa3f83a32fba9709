"""What benchmarks of single GPU kernels share: sources of runtime_c/cuda compiled, loaded into
torch's context and launched as the runtime would; times of CUDA graphs; the device's ceilings.

Needs a GPU, torch, a C compiler, and NVRTC (torch brings it) or nvcc. Imports nothing of pdscope.
"""

import ctypes
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent / "runtime_c"
KERNELS = ROOT / "cuda" / "kernels"
SHARED_OPT_IN, SHARED_SIZE = 97, 8  # of cuDeviceGetAttribute; of cuFuncSetAttribute


class Head(ctypes.Structure):
    _fields_ = [("bytes", c_uint32), ("n", c_uint32), ("tokens", c_void_p), ("extra", c_uint64)]


class Device(ctypes.Structure):
    _fields_ = [(n, c_uint32) for n in ("sms", "shared_most", "compute")]


class Launch(ctypes.Structure):
    _fields_ = [("kernel", c_int), ("grid", c_uint32 * 3)] + [
        (n, c_uint32) for n in ("threads", "shared_bytes")
    ]


def stop(message: str) -> None:
    sys.exit(f"{Path(sys.argv[0]).stem}: {message}")


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        stop(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def params(kind: type[ctypes.Structure], **fields: Any) -> Any:
    """A parameter struct; tensors are passed by address, and kept with it."""
    p: Any = kind()
    p.head.bytes = ctypes.sizeof(kind)
    p.kept = [v for v in fields.values() if hasattr(v, "data_ptr")]
    for name, value in fields.items():
        setattr(p, name, value.data_ptr() if hasattr(value, "data_ptr") else value)
    return p


def launcher(
    into: Path, sources: Sequence[str], structs: dict[str, type], defines: Sequence[str] = ()
) -> ctypes.CDLL:
    """cuda/<source> of runtime_c as a library, after a check that params.h's structs have the size
    of the Python ones."""
    compiler = next((c for c in map(shutil.which, ("cc", "gcc", "clang")) if c), None)
    if compiler is None:
        stop("no C compiler (cc, gcc or clang) in PATH: install one")
    sizes = "".join(
        f"unsigned size_of_{s}(void);\nunsigned size_of_{s}(void) {{ return sizeof({s}); }}\n"
        for s in structs
    )
    (into / "sizes.c").write_text(f'#include "cuda/launch.h"\n{sizes}')
    at = into / "launch.so"
    paths = [str(ROOT / "cuda" / s) for s in sources] + [str(into / "sizes.c")]
    flags = ["-std=c11", "-O2", "-fPIC", "-shared", f"-I{ROOT}", *(f"-D{d}" for d in defines)]
    run([str(compiler), *flags, *paths, "-o", str(at)])
    library = ctypes.CDLL(str(at))
    for name, kind in structs.items():
        if library[f"size_of_{name}"]() != ctypes.sizeof(kind):
            stop(f"params.h's {name} is no longer what this script says: update it")
    return library


def nvrtc() -> ctypes.CDLL | None:
    """NVRTC: of torch's wheels, or where the system finds it."""
    names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    for folder in sys.path:
        for at in sorted(Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.1?")):
            names.insert(0, str(at))
    for name in names:
        try:
            if "/" in name:
                for part in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(part))  # which NVRTC looks for by name only
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def cubin(source: str, arch: int, into: Path, defines: Sequence[str] = ()) -> bytes:
    """A file of cuda/kernels for sm_<arch>, with Hopper's own instructions."""
    target = "90a" if arch == 90 else str(arch)
    own = [f"-I{ROOT}", f"-I{KERNELS}", *(f"-D{d}" for d in defines)]
    library, path = nvrtc(), KERNELS / source
    if library is not None:
        program, size = c_void_p(), c_size_t()
        name = source.encode()
        library.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), name, 0, None, None)
        flags = [f"--gpu-architecture=sm_{target}", "--std=c++17", *own]
        options = (ctypes.c_char_p * len(flags))(*[f.encode() for f in flags])
        failed = library.nvrtcCompileProgram(program, len(flags), options)
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(max(size.value, 1))
        library.nvrtcGetProgramLog(program, log)
        if not failed:
            library.nvrtcGetCUBINSize(program, ctypes.byref(size))
            code = ctypes.create_string_buffer(size.value)
            library.nvrtcGetCUBIN(program, code)
            return code.raw
        print(f"NVRTC says\n{log.value.decode()}", file=sys.stderr)
    compiler = shutil.which("nvcc")
    if compiler is None:
        stop("neither NVRTC nor nvcc compiles the kernels: install nvidia-cuda-nvrtc")
    out = into / f"{source}.cubin"
    code = f"-gencode=arch=compute_{target},code=sm_{target}"
    flags = [code, "-std=c++17", "-cubin", *own]
    run([str(compiler), *flags, "-o", str(out), str(path)])
    return out.read_bytes()


def kernel_names() -> list[str]:
    """Of list.h, in the order of its enum."""
    text = (KERNELS / "list.h").read_text(encoding="utf-8")
    return re.findall(r"\bX\((\w+), \w+, \w+\)", text)


class Gpu:
    """Kernels of some .cu files, and their pds_cu_shape_* functions."""

    def __init__(self, torch: Any, files: Sequence[str], launchers: Sequence[str],
                 structs: dict[str, type], defines: Sequence[str] = ()) -> None:  # fmt: skip
        self.torch = torch
        torch.zeros(1, device="cuda")  # makes the context current
        properties = torch.cuda.get_device_properties(0)
        arch = properties.major * 10 + properties.minor
        self.cuda = ctypes.CDLL("libcuda.so.1")
        most = c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(most), SHARED_OPT_IN, 0)
        self.device = Device(properties.multi_processor_count, most.value, arch)
        self.names = kernel_names()
        self.functions: dict[int, c_void_p] = {}
        self.modules = []
        with tempfile.TemporaryDirectory() as folder:
            self.library = launcher(Path(folder), launchers, structs, defines)
            for file in files:
                module = c_void_p()
                code = cubin(file, arch, Path(folder), defines)
                self.call("cuModuleLoadData", ctypes.byref(module), code)
                self.modules.append(module)

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            stop(f"{name} returned {code}")

    def shape(self, function: str, *args: Any) -> Launch:
        """What a pds_cu_shape_* function says."""
        made = self.library[function]
        made.restype = Launch
        shape: Launch = made(*args)
        return shape

    def function(self, kernel: int) -> c_void_p:
        if kernel not in self.functions:
            name, found = f"pds_cu_{self.names[kernel]}".encode(), c_void_p()
            for module in self.modules:
                if self.cuda.cuModuleGetFunction(ctypes.byref(found), module, name) == 0:
                    break
            else:
                stop(f"no file has the kernel {name.decode()}")
            self.call("cuFuncSetAttribute", found, SHARED_SIZE, int(self.device.shared_most))
            self.functions[kernel] = found
        return self.functions[kernel]

    def launch(self, p: Any, shape: Launch) -> None:
        """On torch's current stream."""
        pointers = (c_void_p * 1)(ctypes.addressof(p))
        stream = c_void_p(self.torch.cuda.current_stream().cuda_stream)
        self.call(
            "cuLaunchKernel", self.function(shape.kernel), *shape.grid, shape.threads, 1, 1,
            shape.shared_bytes, stream, pointers, None,
        )  # fmt: skip


def seconds_of(torch: Any, launches: Sequence[Callable[[], Any]], repeats: int) -> float:
    """Median seconds of one launch: they are replayed as one CUDA graph."""
    for one in launches[:2]:
        one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in launches:
            one()
    times = []
    for i in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i > 1:
            times.append(start.elapsed_time(end) / 1e3 / len(launches))
    return statistics.median(times)


@dataclass
class Ceilings:
    gigabytes: float
    teraflops: float


def ceilings(torch: Any, repeats: int) -> Ceilings:
    """The greater of what copying and summing up device memory reach; torch's bf16 matmul."""
    source = torch.ones(1 << 29, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    nbytes = source.numel() * 4
    copied = seconds_of(torch, [lambda: target.copy_(source)], repeats)
    summed = seconds_of(torch, [lambda: source.sum()], repeats)
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    multiplied = seconds_of(torch, [lambda: torch.matmul(a, b, out=c)], repeats)
    best = max(2 * nbytes / copied, nbytes / summed) / 1e9
    teraflops = 2 * 8192**3 / multiplied / 1e12
    print(
        f"memory: copy {2 * nbytes / copied / 1e9:.0f} GB/s, sum {nbytes / summed / 1e9:.0f} GB/s; "
        f"torch bf16 matmul 8192^3: {teraflops:.0f} TFLOP/s"
    )
    return Ceilings(best, teraflops)
