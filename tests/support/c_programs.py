"""The C side of programs, called below the public interface: pds_programs_open and the verifier."""

from functools import cache
from typing import Any

import cffi
from support import cc

from pdscope.runtime_c import ROOT

_CDEF = """
typedef struct pds_programs {
  const void *programs, *instrs, *slots, *lists;
  uint32_t n_programs;
  uint32_t phase_first[3], phase_count[3];
} pds_programs;
int32_t pds_programs_open(const void *bytes, uint64_t n, pds_programs *out_programs);
int32_t pds_program_verify_one(const pds_programs *programs, uint32_t index);
int32_t pds_programs_verify_sequence(const pds_programs *programs);
int32_t pds_programs_phase(const pds_programs *programs, uint32_t rows);
const char *pds_last_error(void);
"""
OK, PLAN_FORMAT, VERIFY = 0, 301, 302
SOURCES = ("program.c", "verify.c", "crc.c", "status.c", "trace.c")


@cache
def _library() -> tuple[cffi.FFI, Any]:
    ffi = cffi.FFI()
    ffi.cdef(_CDEF)
    path = cc.shared_object([(ROOT / "src" / s, ()) for s in SOURCES])
    return ffi, ffi.dlopen(str(path))


class CPrograms:
    """program.bin opened by the C runtime. `status` and `error` tell how that went."""

    def __init__(self, data: bytes) -> None:
        self.ffi, self.lib = _library()
        self.data = self.ffi.new("uint64_t[]", (len(data) + 7) // 8)  # aligned as a map is
        self.ffi.buffer(self.data)[: len(data)] = data
        self.programs = self.ffi.new("pds_programs *")
        self.status: int = self.lib.pds_programs_open(self.data, len(data), self.programs)
        self.error = self.message() if self.status else ""

    def message(self) -> str:
        text: bytes = self.ffi.string(self.lib.pds_last_error())
        return text.decode()

    def verify_one(self, index: int) -> str:
        """The verifier's message, or "" if it accepts."""
        status = self.lib.pds_program_verify_one(self.programs, index)
        assert status in (OK, VERIFY)
        return self.message() if status else ""

    def verify_all(self) -> str:
        for index in range(self.programs.n_programs):
            if message := self.verify_one(index):
                return message
        status = self.lib.pds_programs_verify_sequence(self.programs)
        assert status in (OK, VERIFY)
        return self.message() if status else ""

    def phase(self, rows: int) -> int:
        return int(self.lib.pds_programs_phase(self.programs, rows))


def verdict(message: str) -> str:
    """ "l7.decode:9: V3" of a message of either verifier; "" of none."""
    return ":".join(message.split(":")[:3])
