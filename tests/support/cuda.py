"""A CUDA driver in tests: the mock or a real one, called through cffi.

May import pdscope.runtime_c and support.cc. The declarations are those of runtime_c/cuda/driver.h,
read from its lists.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cffi
import numpy as np
from support import cc

from pdscope.runtime_c import ROOT

TYPES = """
typedef int CUresult; typedef int CUdevice; typedef int CUdevice_attribute;
typedef int CUfunction_attribute; typedef int CUstreamCaptureMode;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext; typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent; typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph; typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUDA_MEMCPY2D CUDA_MEMCPY2D;
typedef struct {
  uint32_t bytes, n; const uint32_t *tokens; uint64_t extra; /* pds_twin_work */
  CUdeviceptr to; uint32_t value, count;
} params;
const void *test_module(void);
"""

# The kernels of twin_kernels.c that a GPU can run, on one thread.
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry mix(.param .align 8 .b8 p[40]) {
  .reg .pred %p<2>; .reg .b32 %r<6>; .reg .b64 %d<3>;
  ld.param.u64 %d1, [p+24];
  cvta.to.global.u64 %d1, %d1;
  ld.param.u32 %r1, [p+32];
  ld.param.u32 %r2, [p+36];
loop:
  setp.eq.u32 %p1, %r2, 0;
  @%p1 bra done;
  ld.global.u32 %r3, [%d1];
  mad.lo.u32 %r3, %r3, 3, %r1;
  st.global.u32 [%d1], %r3;
  add.u64 %d1, %d1, 4;
  sub.u32 %r2, %r2, 1;
  bra loop;
done:
  ret;
}
.visible .entry append(.param .align 8 .b8 p[40]) {
  .reg .b32 %r<4>; .reg .b64 %d<4>;
  ld.param.u64 %d1, [p+24];
  cvta.to.global.u64 %d1, %d1;
  ld.param.u32 %r1, [p+32];
  ld.global.u32 %r2, [%d1];
  add.u32 %r2, %r2, 1;
  st.global.u32 [%d1], %r2;
  mul.wide.u32 %d2, %r2, 4;
  add.u64 %d3, %d1, %d2;
  st.global.u32 [%d3], %r1;
  ret;
}
\0"""


@cache
def lists() -> dict[str, list[tuple[str, ...]]]:
    """The X-macro lists of driver.h: RESULTS, FUNCTIONS and MOCK."""
    text = (ROOT / "cuda" / "driver.h").read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for name, pattern in (
        ("PDS_CUDA_RESULTS", r'X\((\d+), (\w+),\s*"'),
        ("PDS_CUDA_FUNCTIONS", r"X\((\w+), (\w+),\s*\((.*?)\)\)"),
        ("PDS_MOCK_FUNCTIONS", r"X\(([\w *]+), (\w+), \((.*?)\)\)"),
    ):
        line = re.search(rf"#define {name}\(X\)(.*)", text)
        assert line
        found[name.split("_")[1 if "MOCK" in name else 2]] = re.findall(pattern, line[1])
    return found


@cache
def ffi() -> Any:
    declared = [f"CUresult {symbol}({args});" for _, symbol, args in lists()["FUNCTIONS"]]
    declared += [f"{kind} {name}({args});" for kind, name, args in lists()["MOCK"]]
    interface = cffi.FFI()
    interface.cdef(TYPES + "\n".join(declared))
    return interface


#: Value of each named result.
RESULTS = {name: int(value) for value, name in lists()["RESULTS"]}
NAMES = {value: name for name, value in RESULTS.items()}


@cache
def twin_library() -> Any:
    source = Path(__file__).with_name("twin_kernels.c")
    return ffi().dlopen(str(cc.shared_object([(source, ())])))


class Driver:
    """A driver's functions: `driver.cuX(...)` returns the result's name; `driver.ok.cuX(...)`
    expects success and, where the first parameter is an output, returns that."""

    def __init__(self, path: str | Path) -> None:
        self.library = ffi().dlopen(str(path))
        self.symbols = {name: symbol for name, symbol, _ in lists()["FUNCTIONS"]}
        self.outputs = {
            name: args.split(",")[0].split("*")[0]
            for name, _, args in lists()["FUNCTIONS"]
            if re.match(r"[^,]*\*\s*out_", args)
            and args.count("out_") == 1
            and not args.startswith(("char", "const"))
        }
        self.ok = _Checked(self)
        self.is_mock = _has(self.library, "pds_mock_configure")

    def __getattr__(self, name: str) -> Any:
        if name not in self.symbols and not name.startswith("pds_mock"):
            raise AttributeError(name)
        if name.startswith("pds_mock"):
            return getattr(self.library, name)
        function = getattr(self.library, self.symbols[name])
        return lambda *args: NAMES[function(*args)]

    # --- what most tests need ---

    def open(self) -> None:
        """Initialises it, and makes the primary context of device 0 current."""
        self.ok.cuInit(0)
        self.context = self.ok.cuDevicePrimaryCtxRetain(0)
        self.ok.cuCtxSetCurrent(self.context)
        image = twin_library().test_module() if self.is_mock else ffi().from_buffer(PTX)
        self.module = self.ok.cuModuleLoadData(image)

    def close(self) -> None:
        self.ok.cuCtxSetCurrent(ffi().NULL)
        self.ok.cuDevicePrimaryCtxRelease(0)

    def stream(self, blocking: bool = False) -> Any:
        return self.ok.cuStreamCreateWithPriority(0 if blocking else 1, 0)

    def event(self, flags: int = 0) -> Any:
        return self.ok.cuEventCreate(flags)

    def alloc(self, words: int) -> int:
        """Device memory for that many uint32."""
        return int(self.ok.cuMemAlloc(4 * words))

    def pinned(self, words: int) -> np.ndarray:
        """Pinned host memory, zeroed; `address` of it is what is to be freed."""
        address = self.ok.cuMemHostAlloc(4 * words, 0)
        array = np.frombuffer(ffi().buffer(address, 4 * words), np.uint32)
        array[:] = 0
        return array

    def launch(
        self,
        kernel: str,
        stream: Any,
        to: int,
        value: int = 0,
        count: int = 0,
        tokens: Sequence[int] = (),
        extra: int = 0,
    ) -> str:
        """The name of the result."""
        function = self.ok.cuModuleGetFunction(self.module, kernel.encode())
        kept = ffi().new("uint32_t[]", list(tokens) or 1)
        fields = (ffi().sizeof("params"), len(tokens), kept, extra, to, value, count)
        params = ffi().new("params *", fields)
        pointers = ffi().new("void *[]", [params])
        result = self.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, pointers, ffi().NULL)
        # Neither need outlive the call.
        ffi().memmove(params, bytes(ffi().sizeof("params")), ffi().sizeof("params"))
        for i in range(len(kept)):
            kept[i] = 0
        return str(result)

    def read(self, address: int, words: int) -> list[int]:
        """Device memory as uint32, once all streams are done that were told so."""
        out = np.zeros(words, np.uint32)
        self.ok.cuMemcpyDtoHAsync(at(out), address, 4 * words, ffi().NULL)
        self.ok.cuStreamSynchronize(ffi().NULL)
        return [int(x) for x in out]

    def last(self) -> str:
        return str(ffi().string(self.library.pds_mock_last()).decode())

    def configure(self, text: str) -> None:
        assert self.library.pds_mock_configure(text.encode()) == 0, self.last()

    def counter(self, name: str) -> int:
        return int(self.library.pds_mock_counter(name.encode()))


class _Checked:
    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def __getattr__(self, name: str) -> Any:
        driver = self.driver

        def call(*args: Any) -> Any:
            if name not in driver.outputs:
                result = getattr(driver, name)(*args)
                value = None
            else:
                out = ffi().new(f"{driver.outputs[name].strip()} *".replace("void *", "void **"))
                result = getattr(driver, name)(out, *args)
                value = out[0]
            assert result == "CUDA_SUCCESS", f"{name}: {result}" + (
                f": {driver.last()}" if driver.is_mock else ""
            )
            return value

        return call


def _has(library: Any, name: str) -> bool:
    try:
        getattr(library, name)
    except AttributeError:
        return False
    return True


def at(array: np.ndarray, word: int = 0) -> Any:
    """The address of an array's element."""
    return ffi().cast("char *", array.ctypes.data) + array.itemsize * word
