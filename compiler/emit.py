"""Print a plan's constants as C (src/plan.c), through codegen_templates/plan.c.j2.

May import pdscope.compiler.lowered, the memory plan and pdscope.codegen_templates.
"""

import math
from collections.abc import Sequence

import numpy as np

from pdscope.codegen_templates import render
from pdscope.compiler.lowered import Form, LoweredModel
from pdscope.compiler.passes.plan_memory import MemoryPlan, rope_tables
from pdscope.ir.graph import Rope

# Enumerators of plan_desc.h by the words of the IR.
_DTYPE = {
    Form.PACKED_F32: "PDS_F32",
    Form.PACKED_BF16: "PDS_BF16",
    Form.PACKED_INT8: "PDS_I8",
    Form.PACKED_INT4: "PDS_I4",
    Form.VECTOR: "PDS_VEC_F32",
}
_ATTENTION = {"gqa": "PDS_GQA", "mla": "PDS_MLA"}
_QK_NORM = {"none": "PDS_QK_NONE", "head": "PDS_QK_HEAD", "full": "PDS_QK_FULL"}
_SCORE = {"softmax": "PDS_SOFTMAX", "sigmoid": "PDS_SIGMOID"}
_PREDICTOR = {"cross_gate": "PDS_PREDICT_CROSS_GATE"}
_GROUP = {"none": "PDS_GROUP_NONE", "max": "PDS_GROUP_MAX", "top2": "PDS_GROUP_TOP2"}


def plan_source(
    model: LoweredModel,
    memory: MemoryPlan,
    program_bytes: int,
    plan_hash: str,
    features: Sequence[str],
    generator: str,
    format_version: int,
) -> str:
    """C source that defines pds_the_plan. The same arguments give the same text."""
    tables: list[tuple[float, ...]] = []
    for layer in model.layers:
        if layer.attn.rope.inv_freq not in tables:
            tables.append(layer.attn.rope.inv_freq)

    rope_offsets, _ = rope_tables(model, memory.max_rows)

    def rope_of(rope: Rope) -> int:
        return tables.index(rope.inv_freq)

    return render(
        "plan.c.j2",
        model=model,
        memory=memory,
        program_bytes=program_bytes,
        plan_hash=plan_hash,
        features=list(features),
        generator=generator,
        format_version=format_version,
        ropes=tables,
        rope_of=rope_of,
        rope_offset=lambda rope: rope_offsets[rope.inv_freq, rope.scale],
        f32=c_float,
        dtype=_DTYPE,
        attn_kind=_ATTENTION,
        qk_norm=_QK_NORM,
        score=_SCORE,
        group_score=_GROUP,
        predictor=_PREDICTOR,
    )


def c_float(value: float) -> str:
    """An exact C literal of the fp32 value nearest to `value` (C11 hexadecimal constant)."""
    x = float(np.float32(value))
    if not math.isfinite(x):
        raise ValueError(f"{value} is no finite fp32 number")
    return f"{x.hex()}f"
