"""One program through NVRTC's C interface. Imports the standard library alone: it also runs as a
process of its own, by its path.

As a process: standard input is JSON with `library`, `program`, `headers`, `arch` and `options`; the
image goes to standard output, NVRTC's log to standard error; status 3: the program has faults.
"""

import ctypes
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FAULTS = 3

# The same for all: NVRTC may write it into what it makes.
_NAME = b"pdscope_kernels.cu"


@dataclass(frozen=True)
class Compiled:
    """An image, and NVRTC's remarks."""

    image: bytes
    log: str


class CompileError(Exception):
    """The program has faults: NVRTC's log."""


def load(path: str) -> ctypes.CDLL:
    """NVRTC's library. Raises OSError."""
    # It opens its builtins by name alone, which the loader knows once they are loaded.
    for builtins in Path(path).parent.glob("libnvrtc-builtins.so*") if "/" in path else ():
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(path)


def compile_program(
    lib: ctypes.CDLL, program: str, headers: Mapping[str, str], arch: str, options: Sequence[str]
) -> Compiled:
    """What NVRTC makes of a program whose #includes are `headers`: a cubin for an `arch` sm_*, PTX
    for compute_*. Raises CompileError."""
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    handle = ctypes.c_void_p()
    made = lib.nvrtcCreateProgram(
        ctypes.byref(handle), program.encode(), _NAME, len(headers), texts, names
    )
    if made:
        raise CompileError(f"nvrtcCreateProgram: error {made}")
    try:
        target = "sm_90a" if arch == "sm_90" else arch  # with the instructions that only it has
        given = [f"--gpu-architecture={target}".encode(), *(s.encode() for s in options)]
        result = lib.nvrtcCompileProgram(handle, len(given), (ctypes.c_char_p * len(given))(*given))
        log = _result(lib, "ProgramLog", handle).rstrip(b"\0").decode(errors="replace").strip()
        if result:
            raise CompileError(log or f"nvrtcCompileProgram: error {result}")
        if arch.startswith("sm_"):
            return Compiled(_result(lib, "CUBIN", handle), log)
        return Compiled(_result(lib, "PTX", handle).rstrip(b"\0"), log)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(handle))


def _result(lib: ctypes.CDLL, what: str, handle: ctypes.c_void_p) -> bytes:
    """A result of a program: its bytes, those of texts with their 0."""
    size = ctypes.c_size_t()
    error = getattr(lib, f"nvrtcGet{what}Size")(handle, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    error = error or getattr(lib, f"nvrtcGet{what}")(handle, room)
    if error:
        raise CompileError(f"nvrtcGet{what}: error {error}")
    return room.raw


def main() -> int:
    given = json.load(sys.stdin)
    library = load(given.pop("library"))
    try:
        compiled = compile_program(library, **given)
    except CompileError as error:
        print(error, file=sys.stderr)
        return FAULTS
    sys.stdout.buffer.write(compiled.image)
    print(compiled.log, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
