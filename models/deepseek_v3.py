"""DeepSeek-V3 and Moonlight (DeepseekV3ForCausalLM): latent attention, sigmoid gate with correction
bias.

A group's score is the sum of its best two biased scores; masked scores are -inf. May import
pdscope.ir, pdscope.errors and the shared parts of pdscope.models.
"""

from typing import Any

from pdscope.ir.graph import GateAttrs, MlaAttrs, Rope
from pdscope.models.common import check_shared, mla
from pdscope.models.deepseek_v2 import LATENT_KEYS, check_latent_attention, shrink_latent
from pdscope.models.family import (
    Config,
    Family,
    Role,
    WeightNames,
    require_positive,
    require_routing,
    require_value,
    shrink_groups,
)


def _check(hf_config: Any, config: Config) -> None:
    check_shared(hf_config, config)
    check_latent_attention(hf_config, config)
    require_positive(hf_config, "n_group", "topk_group")
    require_value(config, "scoring_func", (None, "sigmoid"), "the gate's scores")
    require_value(config, "topk_method", (None, "noaux_tc"), "the gate's choice")
    require_routing(
        hf_config,
        "n_routed_experts",
        hf_config.n_group,
        hf_config.topk_group,
        per_group=2,
    )


def _attention(module: Any, rope: Rope, window: int | None) -> tuple[MlaAttrs, WeightNames]:
    return mla(module, rope, window, interleaved=bool(module.config.rope_interleave))


def _gate(module: Any) -> tuple[GateAttrs, WeightNames]:
    groups = int(module.num_group)
    attrs = GateAttrs(
        experts=int(module.num_experts),
        top_k=int(module.top_k),
        score="sigmoid",
        normalise=bool(module.norm_topk_prob),
        norm_eps=1e-20,
        scaling=float(module.routed_scaling_factor),
        groups=groups,
        top_groups=int(module.topk_group),
        group_score="top2" if groups > 1 else "none",
        masked_score=float("-inf"),
    )
    return attrs, {"weight": "weight", "bias": "e_score_correction_bias"}


def _shrink(hf_config: Any, config: Config) -> dict[str, Any]:
    groups, top_groups = shrink_groups(hf_config.n_group, hf_config.topk_group)
    size = min(hf_config.n_routed_experts // hf_config.n_group, 8 if groups == 1 else 4)
    return shrink_latent(hf_config) | {
        "n_group": groups,
        "topk_group": top_groups,
        "n_routed_experts": groups * size,
        "num_experts_per_tok": min(hf_config.num_experts_per_tok, 3, top_groups * size),
    }


FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    roles={
        "DeepseekV3RMSNorm": Role.NORM,
        "DeepseekV3RotaryEmbedding": Role.ROTARY,
        "DeepseekV3Attention": Role.ATTENTION,
        "DeepseekV3TopkRouter": Role.GATE,
        "DeepseekV3Experts": Role.EXPERTS,
        "DeepseekV3MLP": Role.MLP,
    },
    required=LATENT_KEYS,
    attention=_attention,
    gate=_gate,
    check=_check,
    shrink=_shrink,
)
