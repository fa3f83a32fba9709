"""The GPU's kernels on the CPU: one launch at a time on numpy arrays (runtime_c/mock/simt.h).

May import pdscope.runtime_c, pdscope.compiler.build, support.cc and support.c_headers. Arrays are
device memory, passed by address. A norm of 3 rows of 64, say, launched as the launcher would:

    p = simt.params("pds_cu_norm", x=x, weight=weight, xn=xn, xact=xact, rows=3, n=64, stride=64,
                    eps=1e-6, act_dtype=2)
    simt.launch_as(simt.library().pds_cu_shape_norm(p), p)

or with a grid of one's own: simt.launch("pds_cu_norm", p, (3, 1, 1), 256, shared=1024). A kernel
that does what a GPU would not survive raises `Fault` with the emulator's text, which names a line.
A struct of a device is simt.device(sms=132).
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import cffi
import numpy as np
from support import cc
from support.c_headers import declarations

from pdscope.compiler.build import simt_kernels
from pdscope.runtime_c import ROOT

IMAGE = """
typedef struct { const char *name; void (*fn)(void *);
  int (*run)(const void *, const unsigned *, unsigned, unsigned);
  const char *(*error)(void); } entry;
struct image { char magic[8]; uint32_t n; entry entries[1]; };
extern struct image pds_simt_image;
"""

_alive: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


class Fault(RuntimeError):
    """What the emulator says of a kernel that failed."""


@cache
def kernels() -> tuple[str, ...]:
    """The names in list.h, in their order."""
    text = (ROOT / "cuda" / "kernels" / "list.h").read_text(encoding="utf-8")
    return tuple(re.findall(r"\bX\((\w+), \w+, \w+\)", text))


@cache
def ffi() -> Any:
    """Declares params.h, launch.h, and the kernels' image."""
    # What NVRTC alone sees: types that cffi knows.
    params = declarations("cuda/kernels/params.h")
    params = re.sub(r"^typedef (unsigned )?[a-z ]+ u?int\d+_t;\n", "", params, flags=re.M)
    names = ", ".join(f"PDS_CU_{name}" for name in (*kernels(), "COUNT"))
    listed = f"typedef enum pds_cu_kernel {{ {names} }} pds_cu_kernel;"
    probe = (
        "typedef struct { pds_cu_head head; const uint32_t *in; uint32_t *out; uint32_t n; } probe;"
    )
    interface = cffi.FFI()
    interface.cdef(params + listed + declarations("cuda/launch.h") + IMAGE + probe)
    return interface


class Library:
    """The kernels, which are the mock driver's (they take long to compile), and the functions of
    cuda/launch_*.c."""

    def __init__(self) -> None:
        sources = sorted((ROOT / "cuda").glob("launch_*.c"))
        self.functions = ffi().dlopen(str(cc.shared_object([(s, ()) for s in sources])))
        self.kernels = ffi().dlopen(str(simt_kernels()))
        self.pds_simt_image = self.kernels.pds_simt_image

    def __getattr__(self, name: str) -> Any:
        return getattr(self.functions, name)


@cache
def library() -> Library:
    return Library()


def pointer(array: np.ndarray) -> Any:
    assert array.flags.c_contiguous
    return ffi().cast("void *", array.ctypes.data)


def params(struct: str, **fields: Any) -> Any:
    """A new parameter struct, zero but for its size and `fields`; arrays are passed by address and
    kept as long as the struct."""
    p = ffi().new(f"{struct} *")
    p.head.bytes = ffi().sizeof(struct)
    _alive[p] = [v for v in fields.values() if isinstance(v, np.ndarray)]
    for name, value in fields.items():
        setattr(p, name, pointer(value) if isinstance(value, np.ndarray) else value)
    return p


def device(sms: int = 108, shared_most: int = 163 << 10, compute: int = 80) -> Any:
    """A pds_cu_device; what the mock driver says of its own by default."""
    return ffi().new("pds_cu_device *", (sms, shared_most, compute))


def launch(
    name: str, p: Any, grid: Sequence[int], threads: int, shared: int = 0, *, of: Any = None
) -> None:
    """Runs the kernel `name`, "pds_cu_..." as in list.h; Fault if it fails, KeyError if no .cu file
    has it. of: another library of kernels."""
    image = (of or library()).pds_simt_image
    entries = ffi().cast("entry *", image.entries)
    found = {ffi().string(entries[i].name).decode(): entries[i] for i in range(image.n)}
    entry = found[name]
    if entry.run(p, ffi().new("unsigned[3]", list(grid)), threads, shared) != 0:
        raise Fault(ffi().string(entry.error()).decode())


def launch_as(shape: Any, p: Any) -> None:
    """Runs what a pds_cu_shape_* function made of the parameter struct."""
    name = f"pds_cu_{kernels()[int(shape.kernel)]}"
    launch(name, p, list(shape.grid), shape.threads, shape.shared_bytes)


# --- the probes of simt_probes.c, for the emulator's own tests ---


@cache
def probes() -> Path:
    """The library of simt_probes.c."""
    sources = [ROOT / "mock" / "simt.c", Path(__file__).with_name("simt_probes.c")]
    return cc.shared_object([(s, ()) for s in sources])


def probe(
    name: str,
    given: np.ndarray,
    words: int,
    *,
    n: int = 0,
    grid: Sequence[int] = (1, 1, 1),
    threads: int = 32,
    shared: int = 1024,
) -> np.ndarray:
    """What the probe makes of an array: uint32 [words], zero at first, both 16-byte aligned."""
    data = np.ascontiguousarray(given).ravel().view(np.uint32)
    space = np.zeros(data.size + words + 16, np.uint32)
    first = -(space.ctypes.data // 4) % 4
    source = space[first : first + data.size]
    source[:] = data
    at = first + -(-data.size // 4) * 4
    out = space[at : at + words]
    p = params("probe", **{"in": source, "out": out, "n": n})
    launch(name, p, grid, threads, shared, of=ffi().dlopen(str(probes())))
    return out.copy()
