"""NVRTC, NVIDIA's compiler as a library: finds one, and compiles the GPU's kernels to a cubin for
an architecture, or to PTX, which drivers compile for architectures that came later.

May import `pdscope.runtime_c` (the kernels), `pdscope.compiler.{build,nvrtc_program}`,
`pdscope.config` and `pdscope.errors`. No GPU and no driver is needed. Results are cached by
content: NVRTC's release, options, sources and headers.

A driver takes PTX of its own CUDA release or an older one. So what NVRTC writes must be of the
release of the oldest driver that plans are for, or older, and a newer NVRTC is not used. CUDA 13.0,
with driver 580, is the first release of its major version: a cubin made by its NVRTC runs with
every driver of CUDA 13, and with later ones.
"""

import ctypes
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from threading import Event

from pdscope import config, runtime_c
from pdscope.compiler import nvrtc_program
from pdscope.compiler.build import cached
from pdscope.errors import TargetError

Version = tuple[int, int]

#: The newest PTX that a driver takes, by its CUDA version: PTX ISA, release notes.
PTX_OF_CUDA: Mapping[Version, Version] = {
    (12, 0): (8, 0),
    (12, 1): (8, 1),
    (12, 2): (8, 2),
    (12, 3): (8, 3),
    (12, 4): (8, 4),
    (12, 5): (8, 5),
    (12, 6): (8, 5),
    (12, 7): (8, 6),
    (12, 8): (8, 7),
    (12, 9): (8, 8),
    (13, 0): (9, 0),
    (13, 1): (9, 1),
}
#: CUDA version of the oldest driver that plans are for, unless NVRTC itself is older: 580.
OLDEST_DRIVER: Version = (13, 0)
#: NVRTC from which on the kernels' language is understood: CUDA 12, as runtime_c/cuda/driver.h.
OLDEST_NVRTC: Version = (12, 0)
#: The architecture that PTX is for: what the kernels need at least.
PTX_ARCH = "compute_80"

INSTALL_HINT = "`pip install 'nvidia-cuda-nvrtc>=13.0,<13.1'`, or `pip install 'pdscope[gpu]'`"

_OPTIONS = ("--std=c++17",)
# In the head of PTX.
_RELEASE = re.compile(r"^// Cuda compilation tools, release \S+, V(\S+)$", re.MULTILINE)
_PTX_VERSION = re.compile(r"^\.version (\d+)\.(\d+)$", re.MULTILINE)
# libnvrtc.so.13, but not libnvrtc-builtins.so.13.0 nor libnvrtc.alt.so.13.
_LIBRARY = "libnvrtc.so*"


@dataclass(frozen=True)
class Nvrtc:
    """A usable NVRTC.

    `release`: e.g. 13.0.88; `ptx`: the version of what it writes; `architectures`: those it knows,
    sm_*; `identity`: all that it says of itself, part of cache keys.
    """

    path: str
    release: str
    ptx: Version
    architectures: tuple[str, ...]
    identity: str

    @property
    def cuda(self) -> Version:
        """Its CUDA version."""
        major, minor = self.release.split(".")[:2]
        return int(major), int(minor)


def find_nvrtc() -> Nvrtc:
    """That of PDSCOPE_NVRTC; else the first that can be used of the wheels' and the toolkits'.

    Raises TargetError, which says what was found and what to install.
    """
    if asked := config.nvrtc():
        try:
            return _open(asked)
        except (OSError, TargetError) as error:
            raise TargetError(
                f"PDSCOPE_NVRTC: {asked}: {error}; correct or unset the variable"
            ) from None
    refused: dict[str, str] = {}  # why, and the first path of those that are refused so
    for path in _candidates():
        try:
            return _open(path)
        except OSError as error:
            if "/" in path:  # else the system has none of that name
                refused.setdefault(str(error), path)
        except TargetError as error:
            refused.setdefault(str(error), path)
    why = "".join(f"; {path}: {error}" for error, path in refused.items())
    raise TargetError(f"no NVRTC was found that can compile GPU kernels{why}: {INSTALL_HINT}")


def compile_kernels(nvrtc: Nvrtc, arch: str, stop: Event | None = None) -> bytes:
    """The image of all kernels (runtime_c.gpu_kernel_files) for an architecture: a cubin for sm_*,
    PTX for compute_*. From the cache, if it has been made before. `stop` ends it early.

    Raises TargetError for faults in a source, with the first of NVRTC's errors, and for PTX that
    the oldest driver would refuse; DiskError for a full disk.
    """
    files = runtime_c.gpu_kernel_files()
    digest = hashlib.sha256(nvrtc.identity.encode())
    for text in (*_OPTIONS, arch, *(x for item in files.items() for x in item)):
        digest.update(f"\1{len(text)}\0{text}".encode())

    def make() -> bytes:
        image = _compile(nvrtc, files, arch, stop or Event())
        if arch.startswith("compute_"):
            check_ptx(image.decode(), nvrtc.release)
        return image

    kind = "cubin" if arch.startswith("sm_") else "ptx"
    return cached("gpu-kernels", f"{digest.hexdigest()}.{kind}", make)


def program_of(files: Mapping[str, str]) -> str:
    """One program of all sources."""
    return "".join(f'#include "{name}"\n' for name in files if name.endswith(".cu"))


def _compile(nvrtc: Nvrtc, files: Mapping[str, str], arch: str, stop: Event) -> bytes:
    """In a process of its own, which can be ended at any time: it takes as long as a minute."""
    asked = {
        "library": nvrtc.path,
        "program": program_of(files),
        "headers": dict(files),
        "arch": arch,
        "options": _OPTIONS,
    }
    command = [sys.executable, "-I", nvrtc_program.__file__]
    # Not a pipe: communicate() forgets what it has not written when its time is out.
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps(asked).encode())
        given.seek(0)
        with subprocess.Popen(command, stdin=given, stdout=PIPE, stderr=PIPE) as process:
            while True:
                try:
                    image, log = process.communicate(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    if stop.is_set():
                        process.kill()
                except BaseException:
                    process.kill()
                    raise
    if process.returncode == 0:
        return image
    lines = [s.strip() for s in log.decode(errors="replace").splitlines() if s.strip()]
    if process.returncode == nvrtc_program.FAULTS:
        lines = [s for s in lines if "error" in s] or lines
    else:
        lines = [f"it ended with status {process.returncode}", *lines[-1:]]
    raise TargetError(
        f"compiling the GPU kernels for {arch} with NVRTC {nvrtc.release} failed: "
        + " | ".join(lines[:3])
    )


def check_ptx(text: str, release: str) -> Version:
    """The version of PTX that an NVRTC of this release wrote. Raises TargetError if the oldest
    driver that plans are for refuses it."""
    found = _PTX_VERSION.search(text)
    if found is None:
        raise TargetError(f"NVRTC {release} writes PTX without a version")
    version, most = (int(found[1]), int(found[2])), PTX_OF_CUDA[OLDEST_DRIVER]
    if version > most:
        raise TargetError(
            f"NVRTC {release} writes PTX {_dotted(version)}, but drivers of CUDA "
            f"{_dotted(OLDEST_DRIVER)} take PTX up to {_dotted(most)}"
        )
    return version


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _candidates() -> Iterator[str]:
    """Paths of NVRTC's library, best first: the wheels of CUDA 13 and 12, CUDA toolkits, and where
    the system finds one."""
    spec = find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    for folder in ("cu13", "cuda_nvrtc"):
        for place in places or ():
            yield from _libraries(Path(place) / folder / "lib")
    for toolkit in config.cuda_toolkits():
        yield from _libraries(toolkit / "lib64")
    yield from ("libnvrtc.so.13", "libnvrtc.so.12")


def _libraries(folder: Path) -> Iterator[str]:
    """One of a folder: its names are links to one file."""
    yield from (str(path) for path in sorted(folder.glob(_LIBRARY))[:1])


@lru_cache(maxsize=8)
def _open(path: str) -> Nvrtc:
    """Loads a library and has it say what it is, by compiling nothing.

    Raises OSError if it cannot be loaded, TargetError if it cannot be used; neither says where it
    is and what to do.
    """
    library = nvrtc_program.load(path)
    try:
        library.nvrtcGetCUBIN  # noqa: B018
        library.nvrtcGetSupportedArchs  # noqa: B018
    except AttributeError:
        raise TargetError("is another library, or an NVRTC older than CUDA 12") from None
    count = ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(known)
    architectures = tuple(f"sm_{n}" for n in known)
    try:
        text = nvrtc_program.compile_program(library, "", {}, PTX_ARCH, ()).image.decode()
    except nvrtc_program.CompileError as error:
        raise TargetError(" ".join(str(error).split())) from None
    release = _RELEASE.search(text)
    if release is None:
        raise TargetError("does not say which release it is")
    found = Nvrtc(path, release[1], check_ptx(text, release[1]), architectures, text)
    if found.cuda < OLDEST_NVRTC:
        raise TargetError(f"is of CUDA {found.release}, expected {_dotted(OLDEST_NVRTC)} or newer")
    return found
