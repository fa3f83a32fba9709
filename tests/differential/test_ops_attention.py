"""The attention operator against transformers' own modules, for every family, path and dtype.

Holds of the issue: cached decode agrees with one prefill; prefill split anywhere; lengths around
every block edge; sequences batched together agree with each alone; sliding window -1, 0, +1;
bit-identical over thread counts.
"""

from typing import Any

import numpy as np
import pytest
import torch
from support import cc
from support.operators import Model, Step, ceil
from support.packing import bf16_bits, bf16_value
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

PATHS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")
HIDDEN = 72
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 128,
    "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_attention_heads": 6,
}

CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, mixtral.MixtralAttention, mixtral.MixtralRotaryEmbedding,
                {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24}),
    "mixtral_window": (MixtralConfig, mixtral.MixtralAttention, mixtral.MixtralRotaryEmbedding,
                       {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 18,
                        "sliding_window": 50}),
    "qwen3": (Qwen3MoeConfig, qwen3.Qwen3MoeAttention, qwen3.Qwen3MoeRotaryEmbedding,
              {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32,
               "attention_bias": True}),
    "olmoe": (OlmoeConfig, olmoe.OlmoeAttention, olmoe.OlmoeRotaryEmbedding,
              {"num_attention_heads": 4, "num_key_value_heads": 4, "clip_qkv": 0.9}),
    "deepseek_v2": (DeepseekV2Config, v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding,
                    {**MLA, "q_lora_rank": None, "rope_parameters": YARN}),
    "deepseek_v2_q_lora": (DeepseekV2Config, v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding,
                           {**MLA, "q_lora_rank": 40}),
    "deepseek_v3": (DeepseekV3Config, v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding,
                    {**MLA, "q_lora_rank": 24, "num_key_value_heads": 6}),
    "many_heads": (DeepseekV3Config, v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding,
                   {**MLA, "q_lora_rank": None, "num_attention_heads": 70,
                    "num_key_value_heads": 70}),
}  # fmt: skip


class Reference:
    """A transformers attention module with random weights, rounded to bf16 if `act` says so, that
    computes in fp64."""

    def __init__(self, case: str, act: str, **more: Any) -> None:
        config_class, attention, rotary, options = CASES[case]
        self.config = config_class(
            hidden_size=HIDDEN, max_position_embeddings=4096, **{**options, **more}
        )
        self.config._attn_implementation = "eager"
        torch.manual_seed(5)
        self.rotary = rotary(self.config)
        self.module = attention(self.config, layer_idx=0).eval()
        self.window = getattr(self.config, "sliding_window", None) if "mixtral" in case else None
        with torch.no_grad():
            for name, w in self.module.named_parameters():
                w.copy_(
                    1 + 0.2 * torch.randn_like(w)
                    if "norm" in name
                    else torch.randn_like(w) / w.shape[-1] ** 0.5
                )
                if act == "bf16" and w.ndim == 2:
                    w.copy_(torch.from_numpy(bf16_value(bf16_bits(w.numpy()))))
        self.weights = {n: w.detach().numpy().copy() for n, w in self.module.named_parameters()}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        n = len(x)
        i = torch.arange(n)
        seen = (i[:, None] >= i[None]) & (
            (i[:, None] - i[None] < self.window) if self.window else True
        )
        mask = torch.where(seen, 0.0, -torch.inf)[None, None].double()
        rope = self.rotary(torch.zeros(1, n, HIDDEN), i[None])
        with torch.no_grad():
            hidden = torch.from_numpy(x)[None].double()
            out = self.module.double()(
                hidden_states=hidden, position_embeddings=rope, attention_mask=mask
            )[0]
        return out[0].float().numpy()

    def plan(self, act: str, **plan: int) -> Model:
        m, c, w = Model(act, HIDDEN, **plan), self.config, self.weights
        a = m.layers[0].attn
        a.heads, a.norm_eps, a.scale = c.num_attention_heads, 1e-6, self.module.scaling
        inv_freq = self.rotary.inv_freq.numpy()
        if "kv_b_proj.weight" in w:
            a.kind, a.kv_heads = 1, a.heads
            a.nope_dim, a.v_dim, a.kv_lora = c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
            a.q_lora, a.qk_dim = c.q_lora_rank or 0, c.qk_nope_head_dim + c.qk_rope_head_dim
            first = w["q_a_proj.weight" if a.q_lora else "q_proj.weight"]
            m.matrix(a.in_proj, np.concatenate([first, w["kv_a_proj_with_mqa.weight"]]))
            if a.q_lora:
                m.vector(a.q_norm, w["q_a_layernorm.weight"])
                m.matrix(a.q_b, w["q_b_proj.weight"])
            m.vector(a.k_norm, w["kv_a_layernorm.weight"])
            kv_b = w["kv_b_proj.weight"].reshape(a.heads, a.nope_dim + a.v_dim, a.kv_lora)
            m.matrix(a.uk, np.ascontiguousarray(kv_b[:, : a.nope_dim].transpose(0, 2, 1)))
            m.matrix(a.uv, kv_b[:, a.nope_dim :])
            m.rope(a.rope, inv_freq, self.rotary.attention_scaling, True)
        else:
            a.kv_heads = c.num_key_value_heads
            a.qk_dim = a.v_dim = self.module.head_dim
            a.norm_eps, a.window, a.clip = (
                c.rms_norm_eps,
                self.window or 0,
                getattr(c, "clip_qkv", None) or 0,
            )
            parts = [w[f"{x}_proj.weight"] for x in "qkv"]
            m.matrix(a.in_proj, np.concatenate(parts))
            if "q_norm.weight" in w:
                a.qk_norm = 1 if len(w["q_norm.weight"]) == a.qk_dim else 2
                m.vector(a.q_norm, w["q_norm.weight"])
                m.vector(a.k_norm, w["k_norm.weight"])
            if "q_proj.bias" in w:
                m.vector(a.in_bias, np.concatenate([w[f"{x}_proj.bias"] for x in "qkv"]))
                m.vector(a.o_bias, w["o_proj.bias"])
            m.rope(a.rope, inv_freq, self.rotary.attention_scaling, False)
        m.matrix(a.o_proj, w["o_proj.weight"])
        return m


def attend(
    step: Step, x: np.ndarray, position: list[int], seq: list[int] | None = None
) -> np.ndarray:
    """One step's output: the residual starts at zero."""
    step.batch(position, seq)
    step.set_inputs(x)
    hid = step.rows("HID", ceil(HIDDEN, 32))
    hid[...] = 0
    step.call("rope_table")
    step.call("attention", 0)
    return hid[:, :HIDDEN].copy()


def inputs(n: int, act: str, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((n, HIDDEN)).astype(np.float32)
    return bf16_value(bf16_bits(x)) if act == "bf16" else x


def check(got: np.ndarray, want: np.ndarray, act: str) -> None:
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < (1e-5 if act == "f32" else 2e-2), error


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    if not cc.runnable(request.param):
        pytest.skip(f"kernel path {request.param} is not runnable on this CPU")
    return str(request.param)


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_transformers(case: str, act: str, path: str) -> None:
    """One prefill in chunks around the block edges and the 16-row switch, then decode."""
    reference = Reference(case, act)
    chunks = [1, 2, 17, 43, 1, 1, 62, 64, 65, 16, 1, 1]
    x = inputs(sum(chunks), act)
    want = reference(x)
    step = Step(reference.plan(act), path, threads=2)
    at = 0
    for n in chunks:
        check(attend(step, x[at : at + n], list(range(at, at + n))), want[at : at + n], act)
        at += n


@pytest.mark.parametrize("window", [63, 64, 65])
@pytest.mark.parametrize("rows", [1, 20])
def test_sliding_window_edges(window: int, rows: int) -> None:
    reference = Reference("mixtral_window", "f32", sliding_window=window)
    x = inputs(140, "f32")
    want = reference(x)
    step = Step(reference.plan("f32"), "scalar")
    for at in range(0, 140, rows):
        got = attend(step, x[at : at + rows], list(range(at, at + rows)))
        check(got, want[at : at + rows], "f32")


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize("case", ["qwen3", "deepseek_v3"])
def test_sequences_in_one_step_equal_each_alone(case: str, act: str, path: str) -> None:
    """Rows of three sequences, interleaved, of different lengths; the cache starts as garbage."""
    reference = Reference(case, act)
    xs = [inputs(n, act, n) for n in (70, 3, 33)]
    wants = [reference(x) for x in xs]
    step = Step(reference.plan(act), path, threads=3, seqs=3)
    at = [0, 0, 0]
    for take in [(64, 1, 20), (1, 1, 1), (4, 0, 11), (1, 1, 1)]:
        rows = [(s, at[s] + i) for i in range(max(take)) for s in range(3) if i < take[s]]
        x = np.stack([xs[s][p] for s, p in rows])
        got = attend(step, x, [p for _, p in rows], [s for s, _ in rows])
        check(got, np.stack([wants[s][p] for s, p in rows]), act)
        at = [a + t for a, t in zip(at, take, strict=True)]


@pytest.mark.parametrize("act", ["f32", "bf16"])
@pytest.mark.parametrize("case", ["qwen3", "deepseek_v2_q_lora"])
def test_bits_do_not_depend_on_threads_or_order(case: str, act: str, path: str) -> None:
    reference = Reference(case, act)
    x = inputs(190, act)
    outputs = []
    for threads, backwards in [(1, False), (2, True), (5, False), (16, True)]:
        step = Step(reference.plan(act), path, threads=threads, backwards=backwards)
        got, at = [], 0
        for n in (100, 1, 16, 17, 1, 55):
            got.append(attend(step, x[at : at + n], list(range(at, at + n))))
            at += n
        outputs.append(np.concatenate(got))
    assert all((o == outputs[0]).all() for o in outputs)


@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3"])
def test_truncated_tokens_leave_no_trace(case: str) -> None:
    """A sequence cut back inside a block, whose later tokens were NaN, continues as if they had
    never been."""
    reference = Reference(case, "bf16")
    x = inputs(70, "bf16")
    clean, dirty = (Step(reference.plan("bf16"), "scalar") for _ in range(2))
    for step in (clean, dirty):
        attend(step, x[:5], list(range(5)))
    attend(dirty, np.full((40, HIDDEN), np.nan, np.float32), list(range(5, 45)))
    for at, n in [(5, 1), (6, 3), (9, 40), (49, 1)]:
        got = [attend(s, x[at : at + n], list(range(at, at + n))) for s in (clean, dirty)]
        assert np.isfinite(got[0]).all() and (got[0] == got[1]).all()


def test_rope_tables_of_different_layers() -> None:
    """Two ropes of one plan do not overwrite each other; angles are rounded to fp32 as
    transformers does."""
    m = Model("f32", HIDDEN, layers=3)
    freqs = [1e4 ** -(np.arange(4) / 4), 5e5 ** -(np.arange(8) / 8), 1e4 ** -(np.arange(4) / 4)]
    second = ceil(4 * m.plan.max_rows * 8, 64)
    for layer, (freq, scale, offset) in enumerate(
        zip(freqs, (1.0, 1.5, 1.0), (0, second, 0), strict=True)
    ):
        m.layers[layer].attn.heads = 1
        m.rope(m.layers[layer].attn.rope, freq, scale, False, offset)
    step = Step(m, "scalar")
    positions = [0, 1, 77, 1023, 100000]
    step.batch(positions)
    step.call("rope_table")
    for freq, scale, offset in zip(freqs[:2], (1.0, 1.5), (0, second), strict=True):
        angle = np.float32(positions)[:, None] * np.float32(freq)
        want = (
            np.stack([np.cos(angle.astype(np.float64)), np.sin(angle.astype(np.float64))], 1)
            * scale
        )
        n = len(freq)
        got = step.buffer("ROPE")[offset // 4 : offset // 4 + len(positions) * 2 * n].reshape(
            -1, 2, n
        )
        np.testing.assert_allclose(got, want, atol=2e-7)
