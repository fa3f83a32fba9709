"""OLMoE (OlmoeForCausalLM): GQA with q/k norms over all heads at once and clipping; softmax gate.

The worked example of docs/adding-a-family.md. May import pdscope.ir, pdscope.errors and the shared
parts of pdscope.models.
"""

from typing import Any

from pdscope.errors import ModelError
from pdscope.ir.graph import GateAttrs, GqaAttrs, Rope
from pdscope.models.common import check_shared, gqa, shrink_gqa, softmax_gate
from pdscope.models.family import (
    Config,
    Family,
    Role,
    WeightNames,
    require_multiple,
    require_positive,
    require_routing,
)


def _check(hf_config: Any, config: Config) -> None:
    check_shared(hf_config, config)
    require_positive(hf_config, "intermediate_size", "num_experts")
    require_multiple(hf_config, "hidden_size", "num_attention_heads")
    require_routing(hf_config, "num_experts")
    clip = hf_config.clip_qkv
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ModelError(f"config.json: clip_qkv is {clip!r}, expected a positive number or null")


def _attention(module: Any, rope: Rope, window: int | None) -> tuple[GqaAttrs, WeightNames]:
    clip = module.config.clip_qkv
    return gqa(module, rope, window, qk_norm="full", clip=None if clip is None else float(clip))


def _gate(module: Any) -> tuple[GateAttrs, WeightNames]:
    return softmax_gate(module, normalise=bool(module.norm_topk_prob))


def _shrink(hf_config: Any, config: Config) -> dict[str, Any]:
    experts = min(hf_config.num_experts, 8)
    return shrink_gqa(hf_config, config) | {
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "num_experts": experts,
        "num_experts_per_tok": min(hf_config.num_experts_per_tok, 3, experts),
        # Random activations are about 1: a clip of the published size (8) would never act.
        "clip_qkv": None if hf_config.clip_qkv is None else 0.75,
    }


FAMILY = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    roles={
        "OlmoeRMSNorm": Role.NORM,
        "OlmoeRotaryEmbedding": Role.ROTARY,
        "OlmoeAttention": Role.ATTENTION,
        "OlmoeTopKRouter": Role.GATE,
        "OlmoeExperts": Role.EXPERTS,
    },
    required=(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_experts",
    ),
    attention=_attention,
    gate=_gate,
    check=_check,
    shrink=_shrink,
)
