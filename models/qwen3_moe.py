"""Qwen3-MoE (Qwen3MoeForCausalLM): GQA with q/k norms per head; softmax gate; some layers may be
dense.

transformers applies the sliding window to every layer and ignores max_window_layers, and so do we.
May import pdscope.ir, pdscope.errors and the shared parts of pdscope.models.
"""

from typing import Any

from pdscope.errors import ModelError
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


def _dense_layers(hf_config: Any) -> list[int]:
    step = hf_config.decoder_sparse_step
    only = set(hf_config.mlp_only_layers)
    return [i for i in range(hf_config.num_hidden_layers) if i in only or (i + 1) % step]


def _check(hf_config: Any, config: Config) -> None:
    check_shared(hf_config, config)
    check_window(hf_config)
    require_positive(hf_config, "moe_intermediate_size", "num_experts", "decoder_sparse_step")
    require_routing(hf_config, "num_experts")
    dense = _dense_layers(hf_config)
    if dense:
        require_positive(hf_config, "intermediate_size")
    if len(dense) == hf_config.num_hidden_layers:
        raise ModelError(
            "config.json: mlp_only_layers and decoder_sparse_step leave no layer with experts; "
            "PDScope compiles mixture-of-experts models"
        )


def _attention(module: Any, rope: Rope, window: int | None) -> tuple[GqaAttrs, WeightNames]:
    return gqa(module, rope, window, qk_norm="head")


def _gate(module: Any) -> tuple[GateAttrs, WeightNames]:
    return softmax_gate(module, normalise=bool(module.norm_topk_prob))


def _shrink(hf_config: Any, config: Config) -> dict[str, Any]:
    experts = min(hf_config.num_experts, 8)
    return shrink_gqa(hf_config, config) | {
        "num_hidden_layers": 2,
        "mlp_only_layers": [0] if _dense_layers(hf_config) else [],
        "decoder_sparse_step": 1,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_experts": experts,
        "num_experts_per_tok": min(hf_config.num_experts_per_tok, 3, experts),
    }


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    roles={
        "Qwen3MoeRMSNorm": Role.NORM,
        "Qwen3MoeRotaryEmbedding": Role.ROTARY,
        "Qwen3MoeAttention": Role.ATTENTION,
        "Qwen3MoeTopKRouter": Role.GATE,
        "Qwen3MoeExperts": Role.EXPERTS,
        "Qwen3MoeMLP": Role.MLP,
    },
    required=(
        "vocab_size",
        "hidden_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_experts",
    ),
    attention=_attention,
    gate=_gate,
    check=_check,
    shrink=_shrink,
)
