"""Attributes that several families read off their modules in the same way: GQA, MLA and SwiGLU.

May import pdscope.ir and pdscope.errors.
"""

import math
from typing import Any

from pdscope.errors import ModelError
from pdscope.ir.graph import GateAttrs, GqaAttrs, MlaAttrs, MlpAttrs, Rope
from pdscope.models.family import (
    Config,
    WeightNames,
    is_number,
    require_multiple,
    require_positive,
)

ACTIVATIONS = {"silu": "silu", "swish": "silu"}
# Their frequencies do not depend on the length of the sequence, so a plan can hold them as
# constants.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_shared(hf_config: Any, config: Config) -> None:
    """Checks that hold for every family: dimensions, activation, rope type."""
    require_positive(
        hf_config,
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "num_experts_per_tok",
    )
    require_multiple(hf_config, "num_attention_heads", "num_key_value_heads")
    if hf_config.hidden_act not in ACTIVATIONS:
        raise ModelError(
            f"config.json: hidden_act is {hf_config.hidden_act!r}; supported: "
            f"{', '.join(sorted(ACTIVATIONS))}"
        )
    if getattr(hf_config, "head_dim", None) is not None:
        require_positive(hf_config, "head_dim")
    eps = hf_config.rms_norm_eps
    if not is_number(eps) or not 0 <= eps < 1:
        raise ModelError(f"config.json: rms_norm_eps is {eps!r}, expected a small positive number")
    rope = hf_config.rope_parameters or {}
    rope_type, theta = rope.get("rope_type", "default"), rope.get("rope_theta")
    if not is_number(theta) or not 0 < theta < math.inf:
        raise ModelError(f"config.json: rope_theta is {theta!r}, expected a positive number")
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"config.json: rope type {rope_type!r} is not supported (its frequencies may depend on "
            f"the length of the sequence); supported: {', '.join(ROPE_TYPES)}"
        )


def check_window(hf_config: Any) -> None:
    window = hf_config.sliding_window
    if window is not None:
        require_positive(hf_config, "sliding_window")


def activation_of(module: Any, config_act: str) -> str:
    """The activation of an MLP or experts module, checked to be the one that the config names."""
    fn = type(module.act_fn).__name__
    if fn not in ("SiLUActivation", "SiLU"):
        raise ModelError(
            f"{type(module).__name__}.act_fn is {fn}, but config.json's hidden_act is "
            f"{config_act!r}: the installed transformers computes something that PDScope does not "
            "implement"
        )
    return "silu"


def rope_dim_check(module: Any, rope: Rope, dim: int) -> None:
    if rope.dim != dim:
        raise ModelError(
            f"{type(module).__name__}: rotary tables cover {rope.dim} dimensions of a head, "
            f"expected {dim}; partial rotary embeddings are not supported for this family"
        )


def gqa(
    module: Any, rope: Rope, window: int | None, qk_norm: str = "none", clip: float | None = None
) -> tuple[GqaAttrs, WeightNames]:
    """Grouped-query attention with q/k/v/o_proj, rotate-half rope, and optional q_norm and
    k_norm.
    """
    head_dim = int(module.head_dim)
    rope_dim_check(module, rope, head_dim)
    weights = {short: f"{short}_proj.weight" for short in ("q", "k", "v", "o")}
    weights |= {
        f"{short}_bias": f"{short}_proj.bias"
        for short in ("q", "k", "v", "o")
        if getattr(module, f"{short}_proj").bias is not None
    }
    eps = 0.0
    if qk_norm != "none":
        weights |= {"q_norm": "q_norm.weight", "k_norm": "k_norm.weight"}
        eps = float(module.q_norm.variance_epsilon)
        if float(module.k_norm.variance_epsilon) != eps:
            raise ModelError(f"{type(module).__name__}: q_norm and k_norm have different epsilons")
    attrs = GqaAttrs(
        heads=module.q_proj.out_features // head_dim,
        kv_heads=module.k_proj.out_features // head_dim,
        head_dim=head_dim,
        softmax_scale=float(module.scaling),
        rope=rope,
        qk_norm=qk_norm,
        qk_norm_eps=eps,
        window=window,
        clip=clip,
    )
    return attrs, weights


def softmax_gate(module: Any, normalise: bool) -> tuple[GateAttrs, WeightNames]:
    """Softmax over all experts, then the best top_k, with their weights renormalised or not."""
    attrs = GateAttrs.softmax(int(module.num_experts), int(module.top_k), normalise)
    return attrs, {"weight": "weight"}


def mla(
    module: Any, rope: Rope, window: int | None, interleaved: bool
) -> tuple[MlaAttrs, WeightNames]:
    """Multi-head latent attention of DeepSeek-V2 and V3; q directly or through a low-rank q_a,
    q_b.
    """
    if window is not None:
        raise ModelError(f"{type(module).__name__}: a sliding window with latent attention")
    rope_dim = int(module.qk_rope_head_dim)
    rope_dim_check(module, rope, rope_dim)
    weights = {
        "kv_a": "kv_a_proj_with_mqa.weight",
        "kv_a_norm": "kv_a_layernorm.weight",
        "kv_b": "kv_b_proj.weight",
        "o": "o_proj.weight",
    }
    eps = float(module.kv_a_layernorm.variance_epsilon)
    if module.q_lora_rank is None:
        weights |= {"q": "q_proj.weight"}
    else:
        weights |= {
            "q_a": "q_a_proj.weight",
            "q_a_norm": "q_a_layernorm.weight",
            "q_b": "q_b_proj.weight",
        }
        if module.q_a_proj.bias is not None:
            weights["q_a_bias"] = "q_a_proj.bias"
        if float(module.q_a_layernorm.variance_epsilon) != eps:
            raise ModelError(f"{type(module).__name__}: q_a and kv_a norms have different epsilons")
    if module.kv_a_proj_with_mqa.bias is not None:
        weights["kv_a_bias"] = "kv_a_proj_with_mqa.bias"
    if module.o_proj.bias is not None:
        weights["o_bias"] = "o_proj.bias"
    attrs = MlaAttrs(
        heads=int(module.num_heads),
        q_lora=None if module.q_lora_rank is None else int(module.q_lora_rank),
        kv_lora=int(module.kv_lora_rank),
        nope_dim=int(module.qk_nope_head_dim),
        rope_dim=rope_dim,
        v_dim=int(module.v_head_dim),
        softmax_scale=float(module.scaling),
        norm_eps=eps,
        rope=Rope(rope.inv_freq, rope.scale, interleaved),
    )
    return attrs, weights


def mlp(module: Any, config_act: str) -> tuple[MlpAttrs, WeightNames]:
    """SwiGLU with gate_proj, up_proj and down_proj."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        if getattr(module, name).bias is not None:
            raise ModelError(f"config.json: mlp_bias: {type(module).__name__}.{name} has a bias")
    attrs = MlpAttrs(module.gate_proj.out_features, activation_of(module, config_act))
    return attrs, {
        "gate": "gate_proj.weight",
        "up": "up_proj.weight",
        "down": "down_proj.weight",
    }


def shrink_gqa(hf_config: Any, config: Config) -> dict[str, Any]:
    """Two or four heads of 16, the same kind of sharing; a window that acts within a short text."""
    shared = hf_config.num_key_value_heads < hf_config.num_attention_heads
    small: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if shared else 4,
    }
    if config.get("head_dim") is not None:
        small["head_dim"] = (
            16
            if hf_config.head_dim * hf_config.num_attention_heads == (hf_config.hidden_size)
            else 24
        )
    if getattr(hf_config, "sliding_window", None) is not None:
        small["sliding_window"] = 5
    return small
