"""Keys of config.json whose faults transformers reports in words about its own code, or not at all:
quantisation, dtype, sizes out of all proportion and rope. Checked before it reads them.

May import pdscope.errors and the shared parts of pdscope.models.
"""

from typing import Any

from pdscope.errors import ModelError
from pdscope.models.family import Config, is_number

DTYPES = ("bfloat16", "float16", "float32")
_POSITIVE = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_NUMBERS = (
    *("attention_factor", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim"),
)
# Far above every published model, and low enough that the rows of a matrix (heads times their
# dimensions, say) are a 32-bit integer in the runtime. Experts: models.family.require_routing.
_LIMITS = {
    "num_hidden_layers": 1024,
    "vocab_size": 1 << 24,
    "sliding_window": 2**31 - 1,
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 1 << 20),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4096),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 1 << 14),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 1 << 20),
    "n_shared_experts": 1024,
}
_MOST = 3e38  # rope is computed in float32
_REMEDY = "take config.json from the model's original repository"


def check_raw(config: Config) -> None:
    """ModelError naming the key, for what holds of every family."""
    if quantisation := config.get("quantization_config"):
        method = "unknown"
        if isinstance(quantisation, dict):
            method = str(quantisation.get("quant_method", method))
        elif isinstance(quantisation, str):
            method = quantisation
        raise ModelError(
            f"config.json: quantization_config ({method}): quantised checkpoints are not "
            "supported; use the bf16, fp16 or fp32 checkpoint of this model"
        )
    for key in ("dtype", "torch_dtype"):
        dtype = config.get(key)
        if dtype is not None and dtype not in DTYPES:
            raise ModelError(
                f"config.json: {key} is {dtype!r}, expected one of {', '.join(DTYPES)}: the dtype "
                "of the checkpoint's weights"
            )
    for key, most in _LIMITS.items():
        value = config.get(key)
        if is_number(value) and value > most:
            raise ModelError(
                f"config.json: {key} is {value}, expected at most {most}: PDScope compiles no "
                f"larger models; {_REMEDY}"
            )
    for key in ("rope_scaling", "rope_parameters"):
        _check_rope(key, config.get(key))


def _check_rope(key: str, rope: Any) -> None:
    if not rope:
        return
    if not isinstance(rope, dict):
        raise ModelError(
            f"config.json: {key} is {rope!r}, expected null, or an object with "
            f"rope_type and its numbers; {_REMEDY}"
        )
    if rope.get("factor") is not None and rope.get("rope_type", rope.get("type")) is None:
        raise ModelError(
            f"config.json: {key} has a factor but no rope_type, so the factor would have no "
            f"effect; expected rope_type linear, yarn or llama3; {_REMEDY}"
        )
    for name in (*_POSITIVE, *_NUMBERS):
        value = rope.get(name)
        if value is None:
            continue
        positive = name in _POSITIVE
        low = 0 if positive else -_MOST
        if not is_number(value) or not low < value < _MOST:
            raise ModelError(
                f"config.json: {key}.{name} is {value!r}, expected a "
                f"{'positive ' if positive else ''}number; {_REMEDY}"
            )
