"""Whole models that the benchmarks compile with dummy weights: a few layers of published ones.

Imported by the scripts next to it; may import pdscope.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import plan_folder

import pdscope

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {  # 4 of the 48 layers of Qwen3-30B-A3B: 6 GB
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "mixtral": {  # 2 of the 32 layers of Mixtral-8x7B: 6.3 GB
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    },
}


@dataclass(frozen=True)
class Model:
    """Dimensions of one of CONFIGS and what follows from them: bf16 weights, gates in fp32."""

    name: str
    layers: int
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inter: int  # of one expert

    @classmethod
    def of(cls, name: str) -> "Model":
        c = CONFIGS[name]
        return cls(
            name,
            c["num_hidden_layers"],
            c["vocab_size"],
            c["hidden_size"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
            c.get("num_experts") or c["num_local_experts"],
            c["num_experts_per_tok"],
            c.get("moe_intermediate_size") or c["intermediate_size"],
        )

    @property
    def expert_bytes(self) -> int:
        """Of all experts of all layers."""
        return 2 * self.layers * self.experts * 3 * self.hidden * self.inter

    @property
    def other_bytes(self) -> int:
        """What every token reads besides its experts."""
        attention = 2 * self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        gate = 4 * self.experts * self.hidden
        return self.layers * (attention + gate) + 2 * self.vocab * self.hidden

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that one decode step needs."""
        return self.other_bytes + self.expert_bytes * self.top_k // self.experts

    @property
    def flop_per_token(self) -> float:
        """Multiply-adds of one prompt token, times two; no attention scores, no lm_head."""
        projections = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        experts = 3 * self.hidden * self.inter * self.top_k
        return 2.0 * self.layers * (projections + experts + self.hidden * self.experts)

    def make_plan(self, context: int, rows: int) -> Path:
        """A bf16 plan in PDScope's cache for at least these sizes, compiled if it is not there."""
        context, rows = max(context, 1024), max(rows, 512)  # so that most runs share one
        plan = plan_folder(f"bench-{self.name}-{self.layers}-layers-{context}-{rows}")
        if (plan / "plan.json").exists():
            return plan
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / self.name
            model.mkdir()
            (model / "config.json").write_text(json.dumps(CONFIGS[self.name]))
            print(f"compiling a dummy model into {plan} (6 GB)", file=sys.stderr)
            pdscope.compile(
                model, plan, load_format="dummy", dtype="bf16", max_context=context, max_rows=rows
            )
        return plan
