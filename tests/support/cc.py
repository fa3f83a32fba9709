"""Compile C sources of the runtime into a shared object for tests, once per content.

May import pdscope.runtime_c. The kernel paths in such an object are those that the compiler knows
for this machine; which of them this CPU can run is `runnable()`.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from pdscope.runtime_c import INCLUDE_DIRS, ISA_PATHS, ROOT

FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread")


def shared_object(sources: Sequence[tuple[Path, Sequence[str]]], flags: Sequence[str] = ()) -> Path:
    """A library of (source, its extra flags) with the runtime's include directories.

    The compiler is $CC or cc. The library and its objects stay in the temporary directory, under
    names made of all that they depend on.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    includes = [f"-I{ROOT / d}" for d in INCLUDE_DIRS]
    ours = Path(__file__).parent.glob("*.h")
    headers = digest_of(*ROOT.rglob("*.h"), *ROOT.rglob("*.cu"), *ours)
    folder = Path(tempfile.gettempdir()) / f"pdscope-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)

    def one(source: Path, extra: Sequence[str]) -> Path:
        return object_file([*compiler, *FLAGS, *flags, *extra, *includes], source, headers, folder)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = [job.result() for job in [pool.submit(one, *source) for source in sources]]
    link = [*compiler, *flags, "-shared", "-pthread", *map(str, objects), "-lm", "-ldl"]
    key = hashlib.sha256(repr(link).encode()).hexdigest()
    return _once(folder / f"{key[:24]}.so", link)


def object_file(command: Sequence[str], source: Path, headers: bytes, folder: Path) -> Path:
    """What a compiler makes of a C source, in `folder`; once, whichever processes ask for it.

    `headers`: the digest of all that the source may include.
    """
    key = hashlib.sha256(repr((list(command), source.name)).encode() + headers)
    key.update(source.read_bytes())
    return _once(folder / f"{key.hexdigest()[:24]}.o", [*command, "-c", str(source)])


def digest_of(*files: Path) -> bytes:
    """Of the files' bytes, in the order of their paths."""
    return hashlib.sha256(b"".join(f.read_bytes() for f in sorted(files))).digest()


def _once(target: Path, command: Sequence[str]) -> Path:
    """Has a command make `target`, unless it is there; another process that wants it waits."""
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            made = target.with_suffix(".made")
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr[-4000:]}"
            made.rename(target)
    return target


def kernel_sources() -> list[tuple[Path, Sequence[str]]]:
    """The sources of every kernel path that this machine's compiler can build."""
    return [(ROOT / s, ISA_PATHS[name].flags) for name in built() for s in ISA_PATHS[name].sources]


def built() -> list[str]:
    """Kernel paths of this processor family, best first."""
    machine = platform.machine().lower().replace("amd64", "x86_64")
    return [name for name, path in ISA_PATHS.items() if path.arch in ("any", machine)]


def runnable(name: str) -> bool:
    """This CPU has every feature that the kernel path needs (Linux's names)."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    have = set(cpuinfo.split())
    if name not in built() or not all(f in have for f in ISA_PATHS[name].features):
        return False
    return "amx_tile" not in ISA_PATHS[name].features or tiles_permitted()


@cache
def tiles_permitted() -> bool:
    """Asks Linux for AMX's tile registers, as the runtime's cpu.c does: kernels alone do not."""
    arch_prctl, req_xcomp_perm, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, req_xcomp_perm, tile_data) == 0
