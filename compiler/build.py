"""Finds a C compiler and builds a plan's library from the runtime's sources and plan.c.

May import `pdscope.runtime_c` (what to build), `pdscope.config` and `pdscope.errors`.

Objects are cached by content (compiler, flags, the source and every header), each with its hash.
The library's bytes depend on those alone, not on the directories involved. Code for more than the
architecture's baseline is confined to the kernel files, each with the flags of its own path; never
-march.
"""

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pdscope import config, runtime_c
from pdscope.errors import FILE_LIMIT, DiskError, TargetError, disk_fault

#: Called with (objects done, objects in all) as the build goes on.
Progress = Callable[[int, int], None]

# -O2 always: without it zig inserts traps for undefined behaviour. No contraction of a*b+c, so that
# scalar code gives the same bits under every compiler.
COMMON_FLAGS = (
    "-std=c11",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-DNDEBUG",
    "-Wall",
    "-Wextra",
    "-pthread",
)
# What zig links in of its own was compiled in the directory at hand, and its debug information says
# so: away with that.
ZIG_LINK_FLAGS = ("-Wl,--strip-debug",)
LINK_FLAGS = ("-shared", "-pthread", "-Wl,--build-id=none", "-Wl,-z,noexecstack")
# dlopen is in a library of its own before glibc 2.34.
LIBRARIES = ("-lm", "-ldl")

# Oldest glibc that a library built by zig runs with.
ZIG_GLIBC = "2.28"

# What compilers, assemblers and linkers say of a full disk, and of a limit on file size.
_DISK_FULL = "No space left|Disk quota exceeded|NoSpaceLeft"
_FILE_LIMIT = "File too large|File size limit"

INSTALL_HINT = (
    "install one (Debian, Ubuntu: `apt install gcc libc6-dev`; Fedora: `dnf install gcc`; "
    "macOS: `xcode-select --install`), or `pip install ziglang`, a C compiler in a wheel"
)


@dataclass(frozen=True)
class Compiler:
    """A C compiler command; `identity`: what it says of itself, and options; part of cache keys."""

    command: tuple[str, ...]
    identity: str
    zig: bool

    @property
    def name(self) -> str:
        """Short form for summaries: the first line of --version."""
        return self.identity.splitlines()[0] if self.identity else self.command[0]


@dataclass(frozen=True)
class BuildInfo:
    """What a build did: `library_bytes` and `sha256` are those of the finished library."""

    compiler: str
    isa_paths: tuple[str, ...]
    objects: int
    from_cache: int
    seconds: float
    library_bytes: int
    sha256: str


@dataclass(frozen=True)
class _Unit:
    """One file to compile: `directory` is where the compiler runs, `source` relative to it."""

    directory: Path
    source: str
    flags: tuple[str, ...]
    content: bytes


def machine() -> str:
    """This machine's architecture: x86_64, aarch64, or what the system calls it."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def available_isa_paths(arch: str) -> tuple[str, ...]:
    """Kernel paths that can be built for an architecture, best first; "scalar" is the last."""
    return tuple(n for n, path in runtime_c.ISA_PATHS.items() if path.arch in (arch, "any"))


def find_compiler(arch: str | None = None) -> Compiler:
    """The first of PDSCOPE_CC, CC, cc, gcc, clang and the ziglang wheel; TargetError if none works.

    For another architecture than this machine's only zig can be used, which cross-compiles.
    """
    arch = arch or machine()
    if asked := config.c_compiler():
        try:
            command = tuple(shlex.split(asked))
        except ValueError:  # a quote that does not end
            command = ()
        compiler = _identify(command, arch) if command else None
        if compiler is None:
            raise TargetError(
                f"C compiler '{asked}' (from PDSCOPE_CC or CC) cannot be run; "
                "correct the variable or unset it"
            )
        return compiler
    if arch == machine():
        for name in ("cc", "gcc", "clang"):
            if shutil.which(name) and (compiler := _identify((name,), arch)):
                return compiler
    if find_spec("ziglang") and (
        compiler := _identify((sys.executable, "-m", "ziglang", "cc"), arch)
    ):
        return compiler
    if arch != machine():
        raise TargetError(
            f"target {arch}: no cross compiler; `pip install ziglang`, or set PDSCOPE_CC to one"
        )
    raise TargetError(f"no C compiler found: {INSTALL_HINT}")


@lru_cache(maxsize=16)
def _identify(command: tuple[str, ...], arch: str) -> Compiler | None:
    """Asks the compiler who it is; None if it cannot be run."""
    zig = command[-1] == "cc" and len(command) > 1
    if zig:
        # Unless told otherwise zig targets the host's CPU, which would leak into portable code.
        system = f"linux-gnu.{ZIG_GLIBC}" if platform.libc_ver()[0] == "glibc" else "linux-musl"
        command = (*command, "-target", f"{arch}-{system}", "-mcpu=baseline")
    texts = []
    for option in ("--version",) if zig else ("--version", "-dumpmachine"):
        try:
            done = subprocess.run(
                [*command, option], capture_output=True, text=True, timeout=120, env=_environment()
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
        texts.append(done.stdout.strip())
    # Where the compiler is installed says nothing about what it makes; its options do.
    lines = [s for s in "\n".join(texts).splitlines() if not s.startswith("InstalledDir")]
    return Compiler(command, "\n".join([*lines, shlex.join(command[1:])]), zig)


def build_library(
    plan_c: str,
    out: Path,
    isa_paths: Sequence[str],
    progress: Progress | None = None,
    *,
    arch: str | None = None,
    compiler: Compiler | None = None,
) -> BuildInfo:
    """Compiles the runtime and the generated `plan_c`, and links them into the library `out`.

    Args:
        plan_c: text of the generated plan.c.
        out: library to write, atomically; its directory must exist.
        isa_paths: kernel paths to build in, from `available_isa_paths`; scalar is always there.
        progress: called as objects get done, from the calling thread.
        arch: architecture to build for; this machine's by default.
        compiler: overrides `find_compiler`.

    Raises:
        TargetError: no compiler, or it failed: its first error lines are in the message.
        DiskError: the disk is full, or a file-size limit is reached.
    """
    start = time.monotonic()
    arch = arch or machine()
    paths = tuple(p for p in available_isa_paths(arch) if p == "scalar" or p in isa_paths)
    if unknown := sorted(set(isa_paths) - set(paths)):
        raise TargetError(
            f"kernel path {unknown[0]} cannot be built for {arch}; "
            f"possible: {', '.join(available_isa_paths(arch))}"
        )
    compiler = compiler or find_compiler(arch)
    with _disk_faults(out), tempfile.TemporaryDirectory(prefix="pdscope-build-") as name:
        return _build(plan_c, out, paths, progress, compiler, Path(name), start)


def _build(
    plan_c: str,
    out: Path,
    paths: tuple[str, ...],
    progress: Progress | None,
    compiler: Compiler,
    work: Path,
    start: float,
) -> BuildInfo:
    (work / "plan.c").write_text(plan_c)
    units = [
        _Unit(runtime_c.ROOT, source, flags, (runtime_c.ROOT / source).read_bytes())
        for source, flags in runtime_c.sources(paths)
    ]
    units.append(_Unit(work, "plan.c", (), plan_c.encode()))
    objects, cached = _objects(units, compiler, progress)
    data = _link(objects, compiler, work, "libpdscope.so", "pds_abi_version")
    _write_aside(out, data)
    return BuildInfo(
        compiler=compiler.name,
        isa_paths=paths,
        objects=len(units),
        from_cache=cached,
        seconds=time.monotonic() - start,
        library_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def mock_driver() -> Path:
    """The mock CUDA driver, built into the cache if it is not there; for PDSCOPE_CUDA_DRIVER.

    Its name carries a hash of all that it depends on. See docs/mock-driver.md.

    Raises:
        TargetError: no compiler, or it failed: its first error lines are in the message.
        DiskError: the disk is full, or a file-size limit is reached.
    """
    root = runtime_c.ROOT
    units = [_Unit(root, s, (), (root / s).read_bytes()) for s in runtime_c.MOCK_SOURCES]
    return _mock_library("libcuda-mock.so", "pds_mock_configure", units)


def simt_kernels() -> Path:
    """The GPU's kernels for the mock driver, which runs them thread by thread on the CPU; built
    into the cache like it. `cuModuleLoadData` takes "PDSTWIN-LIBRARY " + path + newline.

    Raises: as `mock_driver`.
    """
    root = runtime_c.ROOT
    # What a source includes counts as part of it.
    included = "".join(runtime_c.gpu_kernel_files().values()).encode()
    units = [_Unit(root, s, (), (root / s).read_bytes() + included) for s in runtime_c.SIMT_SOURCES]
    return _mock_library("libpdscope-simt.so", "pds_simt_image", units)


def _mock_library(library: str, symbol: str, units: Sequence[_Unit]) -> Path:
    compiler = find_compiler()
    # Streams of the wall clock are threads, which have variables of their own: they may outlive
    # dlclose.
    flags = ("-Wl,-z,nodelete",)
    digest = hashlib.sha256(compiler.identity.encode() + b"\1" + _digest_headers())
    digest.update("\0".join((*COMMON_FLAGS, *LINK_FLAGS, *LIBRARIES, *flags)).encode())
    for unit in units:
        digest.update(f"\1{unit.source}\0{len(unit.content)}\0".encode() + unit.content)
    folder = config.cache_dir() / "mock-driver" / digest.hexdigest()[:16]
    path = folder / library

    def link() -> bytes:
        objects, _ = _objects(units, compiler, None)
        with tempfile.TemporaryDirectory(prefix="pdscope-build-") as name:
            return _link(objects, compiler, Path(name), library, symbol, flags)

    with _disk_faults(path):
        _cached(path, link)
    return path


def cached(kind: str, name: str, make: Callable[[], bytes]) -> bytes:
    """The file `name` among those of a kind in the cache; what `make` gives, if it is not there or
    damaged. For what depends on nothing but what the name is a hash of.

    Raises:
        TargetError: the cache cannot be written.
        DiskError: the disk is full, or a file-size limit is reached.
    """
    path = config.cache_dir() / kind / name
    with _disk_faults(path):
        path = _store(kind) / name
        _cached(path, make)
        return path.read_bytes()


def _cached(path: Path, make: Callable[[], bytes]) -> bool:
    """Has a file of the cache made, unless it is there; whether it was."""
    if _is_whole(path):
        return True
    data = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_aside(path, data)
    _write_aside(path.with_suffix(".json"), json.dumps(_seal(data)).encode())
    return False


@contextlib.contextmanager
def _disk_faults(out: Path) -> Iterator[None]:
    """DiskError, with the remedy, where the cache or `out` cannot grow."""
    try:
        yield
    except OSError as error:
        full = f"{error.strerror}; free some space, or set PDSCOPE_CACHE and TMPDIR to other disks"
        if reason := disk_fault(error, full):
            raise DiskError(f"{error.filename or out}: cannot be written: {reason}") from error
        raise


def _store(kind: str) -> Path:
    """The folder of the cache that holds files of a kind, which can be written."""
    store = config.cache_dir() / kind
    try:
        store.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=store).close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise TargetError(
            f"{store}: cannot be written ({error.strerror}); set PDSCOPE_CACHE to a directory that "
            "can"
        ) from error
    return store


def _objects(
    units: Sequence[_Unit], compiler: Compiler, progress: Progress | None
) -> tuple[list[Path], int]:
    """The units' object files, in their order, and how many of them were in the cache already."""
    headers = _digest_headers()
    store = _store("objects")
    objects: list[Path] = []
    cached = 0
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        jobs = [pool.submit(_object, unit, compiler, headers, store) for unit in units]
        try:
            for done, job in enumerate(jobs, 1):
                path, hit = job.result()
                objects.append(path)
                cached += hit
                if progress:
                    progress(done, len(units))
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
    return objects, cached


def _digest_headers() -> bytes:
    digest = hashlib.sha256()
    for name in runtime_c.headers():
        content = (runtime_c.ROOT / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.digest()


def _object(unit: _Unit, compiler: Compiler, headers: bytes, store: Path) -> tuple[Path, bool]:
    """The unit's object file in the cache, and whether it was there already."""
    flags = (*COMMON_FLAGS, *(("-fno-sanitize=all",) if compiler.zig else ()), *unit.flags)
    digest = hashlib.sha256(compiler.identity.encode() + b"\1")
    digest.update("\0".join((unit.source, *flags)).encode() + b"\1" + headers)
    digest.update(unit.content)
    path = store / f"{digest.hexdigest()}.o"
    root = runtime_c.ROOT
    includes = [f"-I{root / directory}" for directory in runtime_c.INCLUDE_DIRS]
    maps = [f"-ffile-prefix-map={root}=runtime_c", f"-ffile-prefix-map={unit.directory}=."]

    def compile_() -> bytes:
        with tempfile.TemporaryDirectory(prefix="pdscope-object-") as name:
            made = Path(name) / "out.o"
            options = [*compiler.command, *flags, *includes, *maps]
            command = [*options, "-c", unit.source, "-o", str(made)]
            _run(command, unit.directory, f"compiling {unit.source}")
            return _made(made, command, unit.source)

    return path, _cached(path, compile_)


def _seal(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _is_whole(path: Path) -> bool:
    """Whether a cached object is what was stored: a crash or a bad disk may have damaged it."""
    try:
        seal = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return bool(seal == _seal(path.read_bytes()))
    except (OSError, ValueError):
        return False


def _made(path: Path, command: Sequence[str], what: str) -> bytes:
    """What a compiler has made; one that reports success and makes nothing is no C compiler."""
    data = path.read_bytes() if path.is_file() else b""
    if not data:
        raise TargetError(
            f"'{shlex.join(command[:1])}' made nothing of {what}, so it is no C compiler; correct "
            "PDSCOPE_CC (or CC), or unset it"
        )
    return data


def _link(
    objects: Sequence[Path],
    compiler: Compiler,
    work: Path,
    library: str,
    symbol: str,
    extra: Sequence[str] = (),
) -> bytes:
    """The bytes of `library`, which must have `symbol`. Objects get plain names, since a linker may
    record what it was given."""
    names = []
    for index, source in enumerate(objects):
        names.append(f"{index:02d}.o")
        shutil.copyfile(source, work / names[-1])
    made = work / library
    flags = (*LINK_FLAGS, *extra, *(ZIG_LINK_FLAGS if compiler.zig else ()))
    command = [*compiler.command, *flags, *names, *LIBRARIES, "-o", made.name]
    what = "the plan library" if library == "libpdscope.so" else library
    _run(command, work, f"linking {what}")
    data = _made(made, command, what)
    if f"\0{symbol}\0".encode() not in data:  # its name in the dynamic string table
        raise TargetError(
            f"'{shlex.join(command[:1])}' linked a library without {symbol}; set PDSCOPE_CC to "
            "another C compiler"
        )
    return data


def _run(command: Sequence[str], directory: Path, what: str) -> None:
    done = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        errors="replace",
        env=_environment(),
    )
    if done.returncode == 0:
        return
    text = done.stderr.strip() or done.stdout.strip()
    if done.returncode == -signal.SIGXFSZ or re.search(_FILE_LIMIT, text):
        raise DiskError(f"{what}: {FILE_LIMIT}")
    if re.search(_DISK_FULL, text):
        raise DiskError(
            f"{what}: no space left on the disk; free some, or set TMPDIR to another disk"
        )
    lines = [s for s in text.splitlines() if "error" in s.lower()] or text.splitlines()
    shown = " | ".join(s.strip() for s in lines[:3]) or f"exit status {done.returncode}"
    if "No such file or directory" in shown and ".h" in shown:
        shown += f"; the C library's headers seem to be missing: {INSTALL_HINT}"
    raise TargetError(f"{what} with '{shlex.join(command[:1])}' failed: {shown}")


def _environment() -> dict[str, str]:
    """The caller's environment in C locale, zig's caches in ours, no include paths from outside."""
    cache = config.cache_dir() / "zig"
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "CCC_OVERRIDE_OPTIONS")
    }
    env.update(
        LC_ALL="C",
        SOURCE_DATE_EPOCH="0",
        ZIG_GLOBAL_CACHE_DIR=str(cache),
        ZIG_LOCAL_CACHE_DIR=str(cache),
    )
    return env


def _write_aside(path: Path, data: bytes) -> None:
    """Writes beside `path` and renames, so that a reader sees all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o755 if path.suffix == ".so" else 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
