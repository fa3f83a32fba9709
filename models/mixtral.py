"""Mixtral (MixtralForCausalLM): GQA with an optional sliding window; softmax gate, renormalised.

May import pdscope.ir, pdscope.errors and the shared parts of pdscope.models.
"""

from typing import Any

from pdscope.ir.graph import GateAttrs, GqaAttrs, Rope
from pdscope.models.common import check_shared, check_window, gqa, shrink_gqa, softmax_gate
from pdscope.models.family import (
    Config,
    Family,
    Role,
    WeightNames,
    require_positive,
    require_routing,
)


def _check(hf_config: Any, config: Config) -> None:
    check_shared(hf_config, config)
    check_window(hf_config)
    require_positive(hf_config, "intermediate_size", "num_local_experts")
    require_routing(hf_config, "num_local_experts")


def _attention(module: Any, rope: Rope, window: int | None) -> tuple[GqaAttrs, WeightNames]:
    return gqa(module, rope, window)


def _gate(module: Any) -> tuple[GateAttrs, WeightNames]:
    return softmax_gate(module, normalise=True)


def _shrink(hf_config: Any, config: Config) -> dict[str, Any]:
    experts = min(hf_config.num_local_experts, 8)
    return shrink_gqa(hf_config, config) | {
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "num_local_experts": experts,
        "num_experts_per_tok": min(hf_config.num_experts_per_tok, 3, experts),
    }


FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    roles={
        "MixtralRMSNorm": Role.NORM,
        "MixtralRotaryEmbedding": Role.ROTARY,
        "MixtralAttention": Role.ATTENTION,
        "MixtralTopKRouter": Role.GATE,
        "MixtralExperts": Role.EXPERTS,
    },
    required=(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_local_experts",
    ),
    attention=_attention,
    gate=_gate,
    check=_check,
    shrink=_shrink,
)
