"""pds_programs_verify: the programs against the plan's constants, and against what the runtime
can do."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import cffi
import pytest
from support import cc
from support.c_headers import interface
from support.c_programs import OK, SOURCES, VERIFY
from support.programs import (
    AHEAD,
    BY_NAME,
    EPILOGUE,
    PROLOGUE,
    cpu_plan,
    gpu_plan,
    in_phase,
    one,
    renumber,
)

from pdscope.errors import PlanError
from pdscope.ir.encode import encode
from pdscope.ir.isa import Kind, Queue
from pdscope.ir.program import Program
from pdscope.ir.verify import verify_programs
from pdscope.runtime_c import ROOT

_CDEF = """
typedef struct pds_programs {
  const void *programs, *instrs, *slots, *lists;
  uint32_t n_programs;
  uint32_t phase_first[3], phase_count[3];
} pds_programs;
int32_t pds_programs_open(const void *bytes, uint64_t n, pds_programs *out_programs);
int32_t pds_programs_verify(const pds_programs *programs, const pds_plan *plan, bool with_gpu);
const char *pds_last_error(void);
"""


@cache
def library() -> tuple[cffi.FFI, Any]:
    ffi = interface("src/plan_desc.h")
    ffi.cdef(_CDEF)
    return ffi, ffi.dlopen(str(cc.shared_object([(ROOT / "src" / s, ()) for s in SOURCES])))


def verify(
    programs: list[Program],
    moe: list[bool],
    max_rows: int,
    experts: int = 8,
    predictors: Sequence[int] = (),
) -> str:
    """The message of pds_programs_verify with a plan of these layers; "" if it accepts.

    predictors: for each layer the one that it predicts, or 0 for none.
    """
    ffi, lib = library()
    layers = ffi.new("pds_layer[]", len(moe))
    for layer, is_moe in zip(layers, moe, strict=True):
        layer.moe = is_moe
        layer.gate.experts, layer.gate.top_k = (experts, 2) if is_moe else (0, 0)
        layer.shared.inter = 32 if is_moe else 0
    for layer, target in zip(layers, predictors, strict=False):
        layer.predictor.kind, layer.predictor.target = bool(target), target
    plan = ffi.new("pds_plan *", {"n_layers": len(moe), "layers": layers, "max_rows": max_rows})
    data = encode(programs)
    bytes_ = ffi.new("uint64_t[]", len(data) // 8)
    ffi.buffer(bytes_)[:] = data
    view = ffi.new("pds_programs *")
    assert lib.pds_programs_open(bytes_, len(data), view) == OK
    status = lib.pds_programs_verify(view, plan, False)
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
        (layer.replace("q=cpu   wait(@hid)", "q=gpu0  wait(@hid)"), "queue gpu0 needs a GPU"),
        (layer.replace("gate    ", "gate tokens"), "gate with token ids"),
        (layer.replace("gate      ", "gate, predict"), "no predictor for layer 0"),
    ):
        programs = [one(PROLOGUE), one(text), one(EPILOGUE)]
        assert part in verify(programs, [True], 1), part
    wide = [replace(p, streams=4) for p in (one(PROLOGUE), one(layer), one(EPILOGUE))]
    assert "4 streams are not supported" in verify(wide, [True], 1)
    assert verify([one(PROLOGUE), one(layer), one(EPILOGUE)], [True], 1) == ""


def ahead(*texts: str) -> list[Program]:
    """A phase with these layers."""
    layers = [renumber(text, k) for k, text in enumerate(texts)]
    return [one(PROLOGUE), *map(one, layers), one(EPILOGUE)]


def test_prefetch_into_the_cache() -> None:
    """Issue: "`prefetch eN -> llc` becomes real"; it needs a predictor in the plan's constants."""
    shared, dense = BY_NAME["shared"], BY_NAME["dense"]
    programs = ahead(AHEAD, shared)
    assert verify(programs, [True] * 2, 1, predictors=[1, 0]) == ""
    assert "@3: predict: the plan has no predictor for layer 0" in verify(programs, [True] * 2, 1)
    single = AHEAD.replace("?p[*]", "?p[0]").replace("?p[2]", "?p[1]")
    message = verify(ahead(single, shared), [True] * 2, 1, predictors=[1, 0])
    assert "@7: prefetch -> llc of one entry" in message
    # Alone, too, and across dense layers.
    alone = AHEAD.replace(", predict  ", "  ").replace("wait(@3)", "wait(@3, @9)")
    alone = "\n".join(_moved(line) for line in alone.splitlines()) + "\n"
    programs = ahead(alone, dense, shared)
    assert verify(programs, [True, False, True], 1, predictors=[2, 0, 0]) == ""


def _moved(line: str) -> str:
    """Instruction @9, `compute predict`, goes where it can be waited for: behind the gate."""
    number = re.match(r"  @(\d+)", line)
    line = re.sub(r"@(\d+)", lambda m: f"@{_place(int(m[1]))}", line)
    if number and number[1] == "3":
        line += "\n  @4 = compute predict  q=cpu  wait(@2)"
    return line


def _place(number: int) -> int:
    return 4 if number == 9 else number + (number > 3)


def test_nothing_to_prefetch_for() -> None:
    """?p needs a later layer with experts, as many as it may name; both verifiers say so."""
    shared, dense = BY_NAME["shared"], BY_NAME["dense"]
    for programs, part in (
        (ahead(AHEAD), "V12: binds ?p[2]"),
        (ahead(AHEAD, dense), "V12: binds ?p[2]"),
        (ahead(AHEAD.replace("?p[2]", "?p[9]"), dense, shared), "V12: binds ?p[9]"),
    ):
        moe = [p.kind is Kind.MOE for p in programs[1:-1]]
        assert part in verify(programs, moe, 1, predictors=[1] * len(moe))
        with pytest.raises(PlanError, match=re.escape(part)):
            verify_programs(programs)


def test_no_prediction_in_large_steps() -> None:
    rows = {"decode": "prefill", "rows = 1,": "rows = 1-17,", "?c[2]": "?c[8]"}
    texts = [PROLOGUE, renumber(AHEAD, 0), renumber(BY_NAME["shared"], 1), EPILOGUE]
    programs = []
    for text in texts:
        for old, new in rows.items():
            text = text.replace(old, new).replace("rows = 1}", "rows = 17}")
        programs.append(one(text.replace("rows = 1-17", "rows = 17")))
    small = [
        one(in_phase(text, phase, rows))
        for phase, rows in (("decode", "1"), ("batch", "2-16"))
        for text in [PROLOGUE, renumber(BY_NAME["shared"], 0), texts[2], EPILOGUE]
    ]
    message = verify([*small, *programs], [True] * 2, 17, predictors=[1, 0])
    assert "predict in steps of up to 17 rows is not supported" in message


@pytest.mark.parametrize("queue", [Queue.GPU0, Queue.GPU3])
def test_the_queue_is_named(queue: Queue) -> None:
    p = one(PROLOGUE)
    p = replace(p, instrs=(replace(p.instrs[0], queue=queue),))
    message = verify([p, one(EPILOGUE)], [], 1)
    assert message.startswith(f"prologue.decode: @0: queue {queue.text} needs a GPU")
