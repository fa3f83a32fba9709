"""Small models with every kind of layer, and ways to run token ids through an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.plans import PlanStore
from support.tiny_configs import random_tiny_config, save_random_model

# Attention kinds: grouped-query, the same with a sliding window, latent with and without q_lora.
KINDS = {
    "gqa": ("qwen3_moe", 0, {}),
    "window": ("mixtral", 1, {"sliding_window": 5, "num_hidden_layers": 2}),
    "mla": ("deepseek_v2", 2, {}),
    "mla-groups": ("deepseek_v3", 4, {}),
}


def kind_plan(plans: PlanStore, kind: str, dtype: str, max_context: int) -> Path:
    """The plan of one of KINDS; its model directory is beside it, named `<kind>.model`."""
    return plans.compile(kind_model(plans, kind), dtype=dtype, max_context=max_context)


def kind_model(plans: PlanStore, kind: str) -> Path:
    family, seed, changes = KINDS[kind]
    config = random_tiny_config(family, seed) | changes
    return plans.once(f"{kind}.model", lambda out: save_random_model(config, out, seed))


def random_ids(vocab: int, n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocab, n)]


def prefill_all(engine: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits of every row, in one fresh prefill."""
    engine.reset()
    return np.array(engine.prefill(ids, all_logits=True))


def close(a: NDArray[np.float32], b: NDArray[np.float32], dtype: str) -> bool:
    """Whether two computations of the same rows agree, relative to each row's largest logit.

    The order of sums differs between them. fp32 keeps 2e-4; a bf16 plan rounds what each sum gives,
    and a flipped rounding grows over the layers.
    """
    allowed = 2e-4 if dtype == "fp32" else 6e-2
    scale = np.abs(b).max(axis=-1)
    return bool((np.abs(a - b).max(axis=-1) <= allowed * scale).all())
