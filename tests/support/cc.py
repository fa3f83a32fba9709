"""Compile C sources of the runtime into a shared object for tests, once per content.

May import pdscope.runtime_c. The kernel paths in such an object are those that the compiler knows
for this machine; which of them this CPU can run is `runnable()`.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pdscope.runtime_c import INCLUDE_DIRS, ISA_PATHS, ROOT

FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread")


def shared_object(sources: Sequence[tuple[Path, Sequence[str]]], flags: Sequence[str] = ()) -> Path:
    """A library of (source, its extra flags) with the runtime's include directories.

    The compiler is $CC or cc. The library stays in the temporary directory, under a name made of
    all that it depends on.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    includes = [f"-I{ROOT / d}" for d in INCLUDE_DIRS]
    key = hashlib.sha256(repr((compiler, FLAGS, tuple(flags))).encode())
    for header in sorted((*ROOT.rglob("*.h"), *ROOT.rglob("*.cu"))):
        key.update(header.read_bytes())
    for source, extra in sources:
        key.update(repr((source.name, tuple(extra))).encode() + source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"pdscope-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    target = folder / f"{key.hexdigest()[:24]}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as work:
        objects = []
        for i, (source, extra) in enumerate(sources):
            objects.append(f"{work}/{i}.o")
            command = [*compiler, *FLAGS, *flags, *extra, *includes, "-c", str(source)]
            subprocess.run([*command, "-o", objects[-1]], check=True)
        link = [
            *compiler,
            *flags,
            "-shared",
            "-pthread",
            *objects,
            "-lm",
            "-ldl",
            "-o",
            f"{work}/out.so",
        ]
        subprocess.run(link, check=True)
        Path(work, "out.so").rename(target)
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
