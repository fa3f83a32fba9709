"""The fields of plan.json that follow from the lowered model and the memory plan: the compiler
writes them, pdscope-inspect --verify computes them again.

May import pdscope.compiler.lowered and pdscope.compiler.passes.plan_memory.
"""

from typing import Any

from pdscope.compiler.lowered import LoweredModel
from pdscope.compiler.passes.plan_gpu import GpuMemory
from pdscope.compiler.passes.plan_memory import MemoryPlan


def derived_fields(
    model: LoweredModel, memory: MemoryPlan, gpu: GpuMemory | None = None
) -> dict[str, Any]:
    """Nested as in plan.json."""
    slots = gpu.slots if gpu else 0
    gates = [layer.gate.attrs for layer in model.layers if layer.gate]
    return {
        "model": {
            "architecture": model.architecture,
            "layers": len(model.layers),
            "moe_layers": len(gates),
            "hidden": model.hidden,
            "vocab": model.vocab,
            "experts": gates[0].experts if gates else 0,
            "top_k": gates[0].top_k if gates else 0,
            "parameters": model.parameters,
        },
        "dtype": model.dtype,
        "max_context": model.max_context,
        "max_rows": memory.max_rows,
        "max_logits": memory.max_logits,
        "kv_block": memory.kv_block,
        "predictor": next((x.predictor.kind for x in model.layers if x.predictor), "none"),
        "placement": {
            "device": "gpu0" if gpu else "cpu",
            "experts": {"cpu": sum(g.experts for g in gates) - slots, "gpu": slots},
        },
        "memory": memory.summary(),
    }
