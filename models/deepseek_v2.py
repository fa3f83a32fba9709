"""DeepSeek-V2 and V2-Lite (DeepseekV2ForCausalLM): latent attention, softmax gate, shared experts.

transformers computes no renormalisation here whatever norm_topk_prob says; PDScope follows
transformers. May import pdscope.ir, pdscope.errors and the shared parts of pdscope.models.
"""

import math
from typing import Any

from pdscope.errors import ModelError
from pdscope.ir.graph import GateAttrs, MlaAttrs, Rope
from pdscope.models.common import check_shared, mla
from pdscope.models.family import (
    Config,
    Family,
    Role,
    WeightNames,
    is_number,
    require_positive,
    require_routing,
    require_value,
    shrink_groups,
)

GREEDY = "greedy"
GROUPED = "group_limited_greedy"


# Keys of config.json that both DeepSeek families must name.
LATENT_KEYS = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_routed_experts",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def check_latent_attention(hf_config: Any, config: Config) -> None:
    """Dimensions of latent attention, dense layers and shared experts; also DeepSeek-V3's."""
    require_positive(
        hf_config,
        "moe_intermediate_size",
        "n_routed_experts",
        "n_shared_experts",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
    if hf_config.q_lora_rank is not None:
        require_positive(hf_config, "q_lora_rank")
    if hf_config.qk_rope_head_dim % 2:
        raise ModelError(
            f"config.json: qk_rope_head_dim ({hf_config.qk_rope_head_dim}) is odd; rope turns pairs"
        )
    if hf_config.num_key_value_heads != hf_config.num_attention_heads:
        raise ModelError(
            f"config.json: num_key_value_heads ({hf_config.num_key_value_heads}) differs from "
            f"num_attention_heads ({hf_config.num_attention_heads}); latent attention has one key "
            "head a query head"
        )
    factor = hf_config.routed_scaling_factor
    if not is_number(factor) or not 0 < factor < math.inf:
        raise ModelError(
            f"config.json: routed_scaling_factor is {factor!r}, expected a positive number"
        )
    dense = hf_config.first_k_dense_replace
    if not isinstance(dense, int) or dense < 0 or dense >= hf_config.num_hidden_layers:
        raise ModelError(
            f"config.json: first_k_dense_replace is {dense!r}, expected 0 to num_hidden_layers - 1 "
            f"({hf_config.num_hidden_layers - 1}), so that some layer has experts"
        )
    if dense:
        require_positive(hf_config, "intermediate_size")
    require_value(
        config, "moe_layer_freq", (None, 1), "every layer after the dense ones has experts"
    )


def shrink_latent(hf_config: Any) -> dict[str, Any]:
    """The same kinds of layers and projections in two or three layers of width 64."""
    dense = min(hf_config.first_k_dense_replace, 1)
    return {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": dense + 1,
        "first_k_dense_replace": dense,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "n_shared_experts": min(hf_config.n_shared_experts, 2),
        "q_lora_rank": None if hf_config.q_lora_rank is None else 20,
        "kv_lora_rank": 28,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
    }


def _grouped(hf_config: Any) -> bool:
    return bool(hf_config.topk_method == GROUPED)


def _check(hf_config: Any, config: Config) -> None:
    if hf_config.num_experts_per_tok is None:
        raise ModelError(
            "config.json: num_experts_per_tok is missing and DeepSeek-V2 has no default; "
            "take config.json from the model's original repository"
        )
    check_shared(hf_config, config)
    check_latent_attention(hf_config, config)
    if hf_config.topk_method not in (GREEDY, GROUPED):
        raise ModelError(
            f"config.json: topk_method is {hf_config.topk_method!r}; supported for DeepSeek-V2: "
            f"{GREEDY}, {GROUPED}"
        )
    require_value(config, "scoring_func", (None, "softmax"), "the gate's scores")
    groups, top_groups = 1, 1
    if _grouped(hf_config):
        require_positive(hf_config, "n_group", "topk_group")
        groups, top_groups = hf_config.n_group, hf_config.topk_group
    require_routing(hf_config, "n_routed_experts", groups, top_groups)
    if hf_config.mlp_bias:
        raise ModelError("config.json: mlp_bias is true; biases in the MLP are not supported")


def _attention(module: Any, rope: Rope, window: int | None) -> tuple[MlaAttrs, WeightNames]:
    return mla(module, rope, window, interleaved=True)


def _gate(module: Any) -> tuple[GateAttrs, WeightNames]:
    grouped = module.topk_method == GROUPED
    attrs = GateAttrs(
        experts=int(module.num_experts),
        top_k=int(module.top_k),
        score="softmax",
        normalise=False,
        norm_eps=0.0,
        scaling=float(module.routed_scaling_factor),
        groups=int(module.num_group) if grouped else 1,
        top_groups=int(module.topk_group) if grouped else 1,
        group_score="max" if grouped else "none",
        masked_score=0.0,
    )
    return attrs, {"weight": "weight"}


def _shrink(hf_config: Any, config: Config) -> dict[str, Any]:
    small = shrink_latent(hf_config)
    groups, top_groups = 1, 1
    if _grouped(hf_config):
        groups, top_groups = shrink_groups(hf_config.n_group, hf_config.topk_group)
        small |= {"n_group": groups, "topk_group": top_groups}
    size = min(hf_config.n_routed_experts // groups, 8 if groups == 1 else 4)
    return small | {
        "n_routed_experts": groups * size,
        "num_experts_per_tok": min(hf_config.num_experts_per_tok, 3, top_groups * size),
    }


FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    roles={
        "DeepseekV2RMSNorm": Role.NORM,
        "DeepseekV2RotaryEmbedding": Role.ROTARY,
        "DeepseekV2Attention": Role.ATTENTION,
        "DeepseekV2TopkRouter": Role.GATE,
        "DeepseekV2Experts": Role.EXPERTS,
        "DeepseekV2MLP": Role.MLP,
    },
    required=LATENT_KEYS,
    attention=_attention,
    gate=_gate,
    check=_check,
    shrink=_shrink,
)
