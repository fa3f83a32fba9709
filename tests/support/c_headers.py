"""Read the runtime's internal headers into cffi, for tests that call below the public interface."""

import re
from pathlib import Path

import cffi

from pdscope.runtime_c import ROOT


def declarations(*headers: str) -> str:
    """The declarations of headers (paths relative to runtime_c), without preprocessor lines and
    inline functions."""
    text = ""
    for header in headers:
        source = Path(ROOT, header).read_text()
        source = re.sub(r"/\*.*?\*/", "", source, flags=re.S)
        source = re.sub(r"^#.*(?:\\\n.*)*$", "", source, flags=re.M)
        source = re.sub(
            r"^static inline [^{]*\{(?:.*?\n\}|[^\n]*\})$", "", source, flags=re.S | re.M
        )
        text += source
    return text


def public(struct: str) -> str:
    """The definition of one struct of pdscope.h."""
    header = Path(ROOT, "include/pdscope.h").read_text()
    found = re.search(rf"typedef struct {struct} \{{.*?\}} {struct};\n", header, re.S)
    assert found
    return found[0]


def interface(*headers: str) -> cffi.FFI:
    ffi = cffi.FFI()
    ffi.cdef(declarations(*headers))
    return ffi
