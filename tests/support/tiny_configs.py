"""Random tiny MoE models of every supported family, for differential tests.

`random_tiny_config(family, seed)` draws a config.json dictionary; `save_random_model` writes a
checkpoint with the hub's tensor names. Consecutive seeds walk through the unusual values (expert
counts, top-k, odd hidden sizes, dense first layers), so that a handful of seeds covers each of
them. Needs torch and transformers.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Config = dict[str, Any]

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe")

# (experts, top_k): one expert, non-powers of two, and the largest published counts are all there.
EXPERTS = ((8, 2), (6, 1), (60, 4), (1, 1), (384, 8), (16, 3), (64, 6), (7, 7), (32, 5), (128, 8))
# (experts, groups, chosen groups, top_k): top_k never exceeds what the chosen groups hold.
GROUPED = (
    (8, 1, 1, 2),
    (16, 4, 2, 3),
    (60, 6, 3, 4),
    (2, 1, 1, 1),
    (384, 8, 4, 8),
    (12, 6, 2, 4),
    (64, 8, 3, 6),
    (24, 3, 1, 7),
    (6, 1, 1, 6),
    (32, 4, 4, 5),
)
HIDDEN = (64, 33, 96, 97, 128, 40)


def _pick(options: tuple[Any, ...], seed: int, shift: int) -> Any:
    return options[(seed + shift) % len(options)]


def _yarn(rng: random.Random, mla: bool) -> Config:
    scaling: Config = {
        "type": "yarn",
        "factor": rng.choice([2.0, 4.0, 40.0]),
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    }
    if mla:
        scaling |= {"mscale": rng.choice([0.707, 1.0]), "mscale_all_dim": rng.choice([0.707, 1.0])}
    return scaling


def _common(rng: random.Random, seed: int) -> Config:
    return {
        "vocab_size": rng.choice([97, 256, 500]),
        "num_hidden_layers": rng.randint(1, 3),
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "rope_theta": rng.choice([10000.0, 50000.0, 1000000.0]),
        "tie_word_embeddings": seed % 2 == 1,
        "bos_token_id": 1,
        "eos_token_id": _pick((2, [2, 4], [2, 5, 7]), seed, 0),
        "torch_dtype": "float32",
    }


def _mixtral(rng: random.Random, seed: int) -> Config:
    experts, top_k = _pick(EXPERTS, seed, 0)
    kv_heads = rng.choice([1, 2])
    return _common(rng, seed) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": _pick(HIDDEN, seed, 0),
        "intermediate_size": rng.choice([24, 33, 48]),
        "num_attention_heads": kv_heads * rng.choice([1, 2, 3]),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([8, 16, 18]),
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "sliding_window": _pick((None, 5, None, 16), seed, 0),
        "rope_scaling": _yarn(rng, mla=False) if seed % 3 == 2 else None,
    }


def _qwen3_moe(rng: random.Random, seed: int) -> Config:
    experts, top_k = _pick(EXPERTS, seed, 2)
    kv_heads = rng.choice([1, 2])
    layers = rng.randint(2, 4)
    window = _pick((None, None, 7), seed, 0)
    step = _pick((1, 1, 2), seed, 0)
    dense = _pick(([], [0], [], [0, 1]), seed, 0) if layers > 2 and step == 1 else []
    return _common(rng, seed) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": _pick(HIDDEN, seed, 1),
        "intermediate_size": rng.choice([40, 65]),
        "moe_intermediate_size": rng.choice([16, 33]),
        "num_attention_heads": kv_heads * rng.choice([2, 3]),
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([8, 16, 18]),
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": seed % 2 == 0,
        "attention_bias": seed % 3 == 1,
        "mlp_only_layers": dense,
        "decoder_sparse_step": step,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "rope_scaling": _yarn(rng, mla=False) if seed % 4 == 3 else None,
    }


def _deepseek(
    rng: random.Random, seed: int, shift: int
) -> tuple[Config, tuple[int, int, int, int]]:
    grouped = _pick(GROUPED, seed, shift)
    hidden = _pick(HIDDEN, seed, shift)
    heads = 3 if hidden % 3 == 0 else 2 if hidden % 2 == 0 else 1
    dense = _pick((1, 0, 3, 2), seed, shift)
    config = _common(rng, seed) | {
        "num_hidden_layers": dense + rng.randint(1, 2),
        "hidden_size": hidden,
        "intermediate_size": rng.choice([40, 65]),
        "moe_intermediate_size": rng.choice([16, 33]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "first_k_dense_replace": dense,
        "n_shared_experts": rng.choice([1, 2]),
        "n_routed_experts": grouped[0],
        "num_experts_per_tok": grouped[3],
        "routed_scaling_factor": rng.choice([1.0, 2.446, 16.0]),
        "q_lora_rank": _pick((None, 24, 33), seed, shift),
        "kv_lora_rank": rng.choice([16, 32, 40]),
        "qk_nope_head_dim": rng.choice([8, 16, 12]),
        "qk_rope_head_dim": rng.choice([4, 8, 16]),
        "v_head_dim": rng.choice([8, 16, 20]),
        "attention_bias": seed % 3 == 1,
        "rope_scaling": _yarn(rng, mla=True) if seed % 2 == 0 else None,
    }
    return config, grouped


def _deepseek_v2(rng: random.Random, seed: int) -> Config:
    config, (_, groups, top_groups, _) = _deepseek(rng, seed, 0)
    return config | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": top_groups,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }


def _deepseek_v3(rng: random.Random, seed: int) -> Config:
    config, (_, groups, top_groups, _) = _deepseek(rng, seed, 1)
    return config | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "n_group": groups,
        "topk_group": top_groups,
        "scoring_func": "sigmoid",
        "norm_topk_prob": seed % 3 != 2,
        "rope_interleave": seed % 4 != 3,
    }


def _olmoe(rng: random.Random, seed: int) -> Config:
    experts, top_k = _pick(EXPERTS, seed, 4)
    # q_norm spans hidden_size, so heads * head_dim must equal it, and rope needs an even head_dim.
    hidden, heads, kv_heads = _pick(((64, 4, 2), (66, 3, 3), (36, 6, 2), (128, 4, 4)), seed, 0)
    return _common(rng, seed) | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": hidden,
        "intermediate_size": rng.choice([24, 33]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": seed % 2 == 1,
        "attention_bias": seed % 3 == 2,
        "clip_qkv": _pick((None, 1.5), seed, 0),
        "rope_scaling": _yarn(rng, mla=False) if seed % 3 == 1 else None,
    }


_DRAW: dict[str, Callable[[random.Random, int], Config]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "olmoe": _olmoe,
}


def random_tiny_config(family: str, seed: int) -> Config:
    """A config.json dictionary of `family` (one of FAMILIES), the same for the same seed."""
    return _DRAW[family](random.Random(f"{family}:{seed}"), seed)


def build_random_model(config: Config, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of `config` with random weights, eager attention and experts.

    Matrices have unit gain, so activations keep their size over depth; gate logits have a spread of
    about 2, so that routing is diverse and near-ties are rare; correction biases are as large as
    differences of scores.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        k: v for k, v in config.items() if k not in ("architectures", "model_type", "auto_map")
    }
    hf_config = AutoConfig.for_model(config["model_type"], **values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        hf_config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    with torch.no_grad():
        for name, tensor in sorted(tensors.items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                value = 0.2 * noise
            elif name.endswith(".bias"):
                value = 0.1 * noise
            elif name.endswith("norm.weight"):
                value = 1.0 + 0.1 * noise
            elif name.endswith("embed_tokens.weight"):
                value = noise if not config.get("tie_word_embeddings") else 0.5 * noise
            elif name.endswith("gate.weight"):
                value = 2.0 * noise / tensor.shape[-1] ** 0.5
            else:
                value = noise / tensor.shape[-1] ** 0.5
            tensor.copy_(value)
    return model


def hub_tensors(model: Any, config: Config) -> dict[str, torch.Tensor]:
    """The weights under the names that published checkpoints of the family use, per expert."""
    mixtral = config["model_type"] == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        value = tensor.detach().contiguous()
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        prefix, found, last = name.rpartition(".mlp.experts.")
        if found:
            for e in range(value.shape[0]):
                base = f"{prefix}.{block}.experts.{e}"
                if last == "gate_up_proj":
                    first, second = value[e].chunk(2, dim=0)
                    out[f"{base}.{gate}.weight"] = first.clone()
                    out[f"{base}.{up}.weight"] = second.clone()
                else:
                    out[f"{base}.{down}.weight"] = value[e].clone()
        else:
            out[name.replace(".mlp.gate.", f".{block}.gate.")] = value.clone()
    return out


def save_checkpoint(
    tensors: dict[str, torch.Tensor], config: Config, directory: Path, shards: int = 1
) -> None:
    """Writes config.json and safetensors, with an index when there is more than one shard."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({n: tensors[n] for n in part}, directory / file, metadata={"format": "pt"})
        weight_map |= {n: file for n in part}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def save_random_model(
    config: Config,
    directory: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Any:
    """Builds a random model of `config`, saves it under hub names, and returns it (eager, eval)."""
    name = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[dtype]
    config = config | {"torch_dtype": name}
    model = build_random_model(config, seed, dtype)
    save_checkpoint(hub_tensors(model, config), config, directory, shards)
    return model
