"""pds_programs_verify: the programs against the plan's constants, and against what the runtime
can do."""

from dataclasses import replace
from functools import cache
from typing import Any

import cffi
import pytest
from support import cc
from support.c_headers import interface
from support.c_programs import OK, SOURCES, VERIFY
from support.programs import BY_NAME, EPILOGUE, PROLOGUE, cpu_plan, gpu_plan, one, renumber

from pdscope.ir.encode import encode
from pdscope.ir.isa import Queue
from pdscope.ir.program import Program
from pdscope.runtime_c import ROOT

_CDEF = """
typedef struct pds_programs {
  const void *programs, *instrs, *slots, *lists;
  uint32_t n_programs;
  uint32_t phase_first[3], phase_count[3];
} pds_programs;
int32_t pds_programs_open(const void *bytes, uint64_t n, pds_programs *out_programs);
int32_t pds_programs_verify(const pds_programs *programs, const pds_plan *plan);
const char *pds_last_error(void);
"""


@cache
def library() -> tuple[cffi.FFI, Any]:
    ffi = interface("src/plan_desc.h")
    ffi.cdef(_CDEF)
    return ffi, ffi.dlopen(str(cc.shared_object([(ROOT / "src" / s, ()) for s in SOURCES])))


def verify(programs: list[Program], moe: list[bool], max_rows: int, experts: int = 8) -> str:
    """The message of pds_programs_verify with a plan of these layers; "" if it accepts."""
    ffi, lib = library()
    layers = ffi.new("pds_layer[]", len(moe))
    for layer, is_moe in zip(layers, moe, strict=True):
        layer.moe = is_moe
        layer.gate.experts, layer.gate.top_k = (experts, 2) if is_moe else (0, 0)
        layer.shared.inter = 32 if is_moe else 0
    plan = ffi.new("pds_plan *", {"n_layers": len(moe), "layers": layers, "max_rows": max_rows})
    data = encode(programs)
    bytes_ = ffi.new("uint64_t[]", len(data) // 8)
    ffi.buffer(bytes_)[:] = data
    view = ffi.new("pds_programs *")
    assert lib.pds_programs_open(bytes_, len(data), view) == OK
    status = lib.pds_programs_verify(view, plan)
    assert status in (OK, VERIFY)
    return ffi.string(lib.pds_last_error()).decode() if status else ""


def test_programs_of_the_plan() -> None:
    """Issue: "executor of binary programs that first verifies them"; "a plan [...] edited"."""
    programs, moe = cpu_plan(), [False, True, True]
    assert verify(programs, moe, 40) == ""
    assert "run up to 40 rows, the plan has 41" in verify(programs, moe, 41)
    assert "differ from the plan's layer 1" in verify(programs, moe, 40, experts=9)
    assert "differ from the plan's layer 0" in verify(programs, [True, True, True], 40)
    assert "expected programs of 4 layers" in verify(programs, [*moe, True], 40)
    assert "l2.decode:1: V12: the plan has 2 layers" in verify(programs, moe[:2], 40)


def test_only_cpu_programs_run() -> None:
    """Issue: "no code that pretends": programs for a GPU are right, and refused by this runtime."""
    message = verify(gpu_plan(), [True] * 3, 1, experts=64)
    assert "differ from the plan's layer 0" in message  # top_k 6, the plan has 2
    layer = renumber(BY_NAME["shared"], 0)
    for text, part in (
        (layer.replace("q=cpu   wait(@hid)", "q=gpu0  wait(@hid)"), "queue gpu0 needs a GPU plan"),
        (layer.replace("gate    ", "gate tokens"), "gate with token ids"),
        (layer.replace("gate      ", "gate, predict"), "predict is not supported"),
    ):
        programs = [one(PROLOGUE), one(text), one(EPILOGUE)]
        assert part in verify(programs, [True], 1), part
    wide = [replace(p, streams=4) for p in (one(PROLOGUE), one(layer), one(EPILOGUE))]
    assert "4 streams are not supported" in verify(wide, [True], 1)
    assert verify([one(PROLOGUE), one(layer), one(EPILOGUE)], [True], 1) == ""


def test_prefetch_into_the_cache_is_refused_for_what_it_is() -> None:
    """It needs no GPU, but a prediction, and this runtime has no predictor."""
    text = renumber(BY_NAME["shared"], 0).replace("?c[2]", "?c[2] ?p[2]")
    text = text.replace("gate      ", "gate, predict")
    combine = next(line for line in text.splitlines() if "compute combine" in line)
    ahead = "  @8 = prefetch ?p[*] -> llc  q=aux  wait(@4)"
    text = text.replace(combine, f"{combine}\n{ahead}")
    last = renumber(BY_NAME["shared"], 1)
    message = verify([one(PROLOGUE), one(text), one(last), one(EPILOGUE)], [True, True], 1)
    assert "@3: predict is not supported" in message and "prefetches" in message
    assert "GPU" not in message


@pytest.mark.parametrize("queue", [Queue.GPU0, Queue.GPU3])
def test_the_queue_is_named(queue: Queue) -> None:
    p = one(PROLOGUE)
    p = replace(p, instrs=(replace(p.instrs[0], queue=queue),))
    message = verify([p, one(EPILOGUE)], [], 1)
    assert message.startswith(f"prologue.decode: @0: queue {queue.text} needs a GPU plan")
