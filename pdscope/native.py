"""The C interface of a plan's library, through cffi in ABI mode: loading, status codes, ownership.

May import cffi, numpy, pdscope.{errors,plan}. What cffi reads is the marked block of
runtime_c/include/pdscope.h. A handle frees its C object when the last reference to it goes, and
arrays that show C memory hold one: closing a session or an engine cannot pull memory from under a
logits array.
"""

import os
import re
import threading
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import cffi
import numpy as np
from numpy.typing import NDArray

from pdscope.errors import (
    BudgetError,
    Cancelled,
    InputError,
    PdscopeError,
    PlanError,
    TargetError,
)
from pdscope.plan import Plan

PDS_ERR_DRIVER = 305
PDS_ERR_CANCELLED = 400
PDS_ERR_BUSY = 402

# Names of PDS_PIN_*, PDS_WEIGHTS_* and PDS_CACHE_PREFETCH_* of pdscope.h, by value.
PIN = ("auto", "on", "off")
WEIGHTS = ("auto", "mmap", "copy", "dummy")
CACHE_PREFETCH = ("auto", "on", "off")
PREDICTOR = ("auto", "off")
LEARNER = ("auto", "on", "off")

# By cause; see the enum in pdscope.h. A code that is not here is a plain PdscopeError.
_ERRORS: dict[int, type[PdscopeError]] = {
    100: InputError,
    101: InputError,
    102: InputError,
    103: InputError,
    104: BudgetError,
    200: BudgetError,
    201: BudgetError,
    202: BudgetError,
    203: TargetError,
    300: PlanError,
    301: PlanError,
    302: PlanError,
    303: TargetError,
    304: TargetError,
    PDS_ERR_DRIVER: TargetError,
    PDS_ERR_CANCELLED: Cancelled,
    403: TargetError,
}


@cache
def _header() -> str:
    return (files("pdscope.runtime_c") / "include" / "pdscope.h").read_text(encoding="utf-8")


@cache
def abi_version() -> int:
    """PDS_ABI_VERSION of the header that this Python side was written for."""
    match = re.search(r"^#define PDS_ABI_VERSION (\d+)$", _header(), re.MULTILINE)
    assert match
    return int(match[1])


@cache
def ffi() -> Any:
    """The one FFI of the process, with every declaration of pdscope.h."""
    begin, end = "/* pdscope-cdef-begin */", "/* pdscope-cdef-end */"
    interface = cffi.FFI()
    interface.cdef(_header().split(begin, 1)[1].split(end, 1)[0])
    return interface


class Library:
    """The loaded lib/libpdscope.so of one plan."""

    def __init__(self, path: Path) -> None:
        name = _fresh_name(path)
        try:
            self.lib: Any = ffi().dlopen(name)
            version = int(self.lib.pds_abi_version())
        except (OSError, AttributeError) as error:
            raise PlanError(
                f"{path}: cannot be loaded ({error}): recompile the model here"
            ) from None
        if version != abi_version():
            raise PlanError(
                f"{path}: runtime interface version {version}, but this PDScope speaks "
                f"{abi_version()}: recompile the model with pdscope-compile"
            )

    def check(self, status: int) -> None:
        """Raises the error class of a failed call, with the library's own text."""
        if status:
            raise self.error(status)

    def error(self, status: int) -> PdscopeError:
        text = self.text(self.lib.pds_last_error()) or self.text(self.lib.pds_status_name(status))
        error = _ERRORS.get(status, PdscopeError)(text)
        error.status = status
        return error

    @staticmethod
    def text(pointer: Any) -> str:
        """A C string of the library, or "" for NULL."""
        return "" if pointer == ffi().NULL else ffi().string(pointer).decode("utf-8", "replace")


_loaded: dict[Path, list[tuple[int, int, int]]] = {}


def _fresh_name(path: Path) -> str:
    """A spelling of `path` that the dynamic loader has not seen with another file behind it.

    The loader compares path strings, so after a recompile to the same directory it would hand out
    the old library. Each "./" makes the string new.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}: recompile the model") from None
    resolved = path.resolve()
    seen = _loaded.setdefault(resolved, [])
    identity = (stat.st_dev, stat.st_ino, stat.st_mtime_ns)
    if identity not in seen:
        seen.append(identity)
    return str(resolved.parent) + "/" + "./" * seen.index(identity) + resolved.name


class _Shared:
    """A C engine and how many handles still need it.

    The garbage collector finalises a cycle in any order, so that an engine's handle may go before
    its sessions': whoever goes last destroys the engine.
    """

    def __init__(self, pointer: Any, destroy: Any) -> None:
        self.pointer = pointer
        self._destroy = destroy
        self._users = 0
        # Reentrant: a collection, and with it drop(), may begin while the lock is held.
        self._lock = threading.RLock()

    def take(self) -> None:
        with self._lock:
            self._users += 1

    def drop(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._destroy(self.pointer)


def is_driver_error(error: PdscopeError) -> bool:
    """Whether it says that no GPU can be used here."""
    return error.status == PDS_ERR_DRIVER


@dataclass(frozen=True)
class GpuOptions:
    """A GPU to run with: its number, bytes of its memory that may be used, the driver's library
    (None: the system's), ms that a step waits for it without progress (0: two minutes), and images
    of the kernels, of which the first that the driver takes is used."""

    number: int
    mem: int
    driver: str | None
    patience_ms: int
    kernels: tuple[Path, ...] = ()


class EngineHandle:
    """Owns a pds_engine."""

    def __init__(
        self,
        plan: Plan,
        threads: int,
        isa: str | None,
        pin: str,
        weights: str,
        cache_prefetch: str,
        gpu: "GpuOptions | None" = None,
    ) -> None:
        self.library = Library(plan.library)
        self.pid = os.getpid()
        c = ffi()
        directory = c.new("char[]", os.fsencode(plan.path.resolve()))
        name = c.new("char[]", isa.encode()) if isa else c.NULL
        options = c.new(
            "pds_engine_options *",
            {
                "plan_dir": directory,
                "isa": name,
                "threads": threads,
                "pin": PIN.index(pin),
                "weights": WEIGHTS.index(weights),
                "cache_prefetch": CACHE_PREFETCH.index(cache_prefetch),
            },
        )
        driver = kernels = c.NULL  # what options point to lives as long as these names
        if gpu is not None:
            driver = c.new("char[]", os.fsencode(gpu.driver)) if gpu.driver else c.NULL
            options.gpu, options.gpu_driver, options.gpu_mem = gpu.number + 1, driver, gpu.mem
            options.gpu_patience_ms = gpu.patience_ms
            if gpu.kernels:
                kernels = c.new("char[]", b"\n".join(os.fsencode(path) for path in gpu.kernels))
                options.gpu_kernels = kernels
        out = c.new("pds_engine **")
        self.library.check(self.library.lib.pds_engine_create(options, out))
        self.pointer = out[0]
        self.shared = _Shared(out[0], self.library.lib.pds_engine_destroy)
        self.shared.take()

    def close(self) -> None:
        """For a load that fails: whoever keeps the exception would keep the engine too."""
        self.shared.drop()
        del self.shared

    def __del__(self, getpid: Any = os.getpid) -> None:
        # A child of os.fork() has no workers to join: there the memory goes with the process.
        if hasattr(self, "shared") and getpid() == self.pid:
            self.shared.drop()


class SessionHandle:
    """Owns a pds_session; keeps its engine."""

    def __init__(self, engine: EngineHandle, max_seqs: int, kv_tokens: int) -> None:
        self._pid = engine.pid
        self._library = engine.library  # what the next is in
        c = ffi()
        options = c.new("pds_session_options *", {"max_seqs": max_seqs, "kv_tokens": kv_tokens})
        out = c.new("pds_session **")
        # Looked up now: a collection may begin inside cffi's own look-up, whose lock is held then.
        self._destroy = engine.library.lib.pds_session_destroy
        engine.library.check(engine.library.lib.pds_session_create(engine.pointer, options, out))
        self.pointer = out[0]
        self._shared = engine.shared
        self._shared.take()

    def __del__(self, getpid: Any = os.getpid) -> None:
        if hasattr(self, "_shared") and getpid() == self._pid:
            self._destroy(self.pointer)
            self._shared.drop()


class _Memory:
    """C memory as numpy's array interface; keeps what owns it."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: object, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "data": (address, True),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
        }


def float_view(owner: object, pointer: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """C floats as a read-only array, without a copy, that keeps `owner` alive."""
    if 0 in shape:
        return np.empty(shape, np.float32)
    return np.asarray(_Memory(owner, int(ffi().cast("uintptr_t", pointer)), shape, "<f4"))
