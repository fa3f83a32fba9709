"""The GPU's attention kernels, on the emulator of its blocks, against the CPU's operators.

Holds of the issue: a GPU's operators compute what the CPU's compute, on the same buffers and the
same KV blocks: prefill in any chunks, decode with the context in one part or many, sliding windows,
sequences batched together, lengths around every block edge.
"""

from typing import Any

import numpy as np
import pytest
from support import simt
from support.gpu_attention import Twin, gqa, mla

SPLIT = {"kv_split": 64}

# A model, and the kernels for many and for few rows that serve it.
MODELS: dict[str, tuple[Any, str, str]] = {
    "group_of_8_head_norms": (
        lambda: gqa("bf16", 8, 1, 32, qk_norm=1, **SPLIT), "attend_many_64", "attend_few_64"),
    "group_of_3_window": (
        lambda: gqa("bf16", 6, 2, 24, window=50, **SPLIT), "attend_many_64", "attend_few_64"),
    "norm_over_all_heads_clip": (
        lambda: gqa("bf16", 4, 4, 18, qk_norm=2, clip=0.9, **SPLIT),
        "attend_many_64", "attend_few_64"),
    "odd_partly_rotated_interleaved": (
        lambda: gqa("bf16", 5, 1, 33, rope=16, interleaved=True, v_dim=31, **SPLIT),
        "attend_many_64", "attend_few_64"),
    "head_128": (lambda: gqa("bf16", 2, 1, 128, **SPLIT), "attend_many_128", "attend_few_128"),
    "head_80": (lambda: gqa("bf16", 2, 2, 80, **SPLIT), "attend_many_128", "attend_few_128"),
    "head_136": (lambda: gqa("bf16", 2, 1, 136, **SPLIT), "attend_many_256", "attend_few_256"),
    "head_264": (lambda: gqa("bf16", 2, 1, 264, **SPLIT), "attend_plain", "attend_plain"),
    "group_of_20": (lambda: gqa("bf16", 20, 1, 16, **SPLIT), "attend_many_64", "attend_few_64"),
    "fp32_window": (
        lambda: gqa("f32", 6, 2, 24, window=70, **SPLIT), "attend_plain", "attend_plain"),
    "mla": (lambda: mla("bf16", 6, 24, 8, 48, **SPLIT), "attend_mla_64", "attend_mla_16"),
    "mla_q_lora_odd": (
        lambda: mla("bf16", 3, 10, 6, 35, q_lora=True, **SPLIT), "attend_mla_64", "attend_mla_16"),
    "mla_18_heads": (lambda: mla("bf16", 18, 8, 4, 40, **SPLIT), "attend_mla_64", "attend_mla_16"),
    "mla_deepseek": (
        lambda: mla("bf16", 2, 128, 64, 512, **SPLIT), "attend_mla_64", "attend_mla_16"),
    "mla_fp32": (
        lambda: mla("f32", 3, 10, 6, 35, q_lora=True, **SPLIT), "attend_plain", "attend_plain"),
}  # fmt: skip


def rows(model: Any, n: int, seed: int = 0) -> np.ndarray:
    shape = (n, model.plan.hidden)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("case", MODELS)
def test_chunks_equal_the_cpu(case: str) -> None:
    """Prefill in chunks around the block edges and the 16-row switch, then decode with the context
    in parts."""
    make, many, few = MODELS[case]
    model = make()
    twin, at = Twin(model), 0
    for n, part in (
        (1, 0),
        (20, 0),
        (43, 0),
        (1, 0),
        (62, 0),
        (3, 64),
        (64, 0),
        (1, 128),
        (16, 64),
    ):
        twin.run(rows(model, n, at), range(at, at + n), part=part)
        at += n
    assert {many, "attention_rows", "attention_merge"} <= set(twin.kernels)
    # Enough processors for small tiles, and for a context in parts.
    twin, at = Twin(model, sms=132), 0
    for n in (1, 37, 5, 24, 64, 12, 1):
        twin.run(rows(model, n, at), range(at, at + n))
        at += n
    assert few in twin.kernels and (few == many or many not in twin.kernels)


@pytest.mark.parametrize("case", ["gqa", "gqa_window", "mla"])
def test_a_context_in_any_number_of_parts(case: str) -> None:
    """Each part's length is a multiple of a block; of a window, some parts see nothing."""
    model = (
        mla("bf16", 4, 8, 4, 32, **SPLIT)
        if case == "mla"
        else gqa("bf16", 4, 2, 32, window=150 if case == "gqa_window" else 0, **SPLIT)
    )
    twin = Twin(model)
    for at in (0, 128, 256):
        twin.run(rows(model, 128, at), range(at, at + 128))
    for part, n, at in ((64, 1, 384), (128, 3, 385), (384, 1, 447), (320, 5, 446), (448, 1, 449)):
        _, p = twin.run(rows(model, n, at), range(at, at + n), part=part)
        assert p.splits == (at + n - 1) // part + 1


def test_the_context_is_cut_by_what_the_device_has() -> None:
    """In one part where rows fill the device or the context is short, else in as many as there are
    processors, each of kv_split tokens at least."""
    parts = {}
    for sms, heads, far in ((4, 4, 4000), (132, 4, 4000), (132, 4, 200), (132, 132, 4000)):
        a = simt.params(
            "pds_cu_attention", rows=1, heads=heads, kv_heads=heads, act_dtype=2, key_dims=16,
            value_dims=16, q_stride=32, most_splits=8,
        )  # fmt: skip
        device = simt.device(sms=sms, shared_most=227 << 10)
        simt.library().pds_cu_cut_context(device, a, far, 512)
        assert a.splits == 1 or (a.split_tokens >= 512 and a.splits * a.split_tokens > far)
        parts[sms, heads, far] = a.splits
    assert list(parts.values()) == [1, 8, 1, 1]
    a.heads = a.kv_heads = 4
    for most, least in ((64, 512), (4, 512), (16, 256), (64, 64)):
        a.most_splits = most
        simt.library().pds_cu_cut_context(device, a, 4000, least)
        assert 1 < a.splits <= most and a.split_tokens >= least
    assert a.splits == 32


@pytest.mark.parametrize("window", [63, 64, 65])
@pytest.mark.parametrize("few", [False, True])
def test_sliding_window_edges(window: int, few: bool) -> None:
    model = gqa("bf16", 2, 1, 16, window=window, **SPLIT)
    twin = Twin(model)
    for at in range(0, 120, 60):
        twin.run(rows(model, 60, at), range(at, at + 60))
    for at in range(120, 150, 7 if few else 30):
        n = 7 if few else 30
        twin.run(rows(model, n, at), range(at, at + n))


def interleaved() -> list[tuple[list[int], list[int]]]:
    """Steps of three sequences: rows taken in turn, then one sequence after the other."""
    at, steps = [0, 0, 0], []
    for i, take in enumerate([(40, 1, 20), (1, 1, 1), (4, 0, 11), (25, 30, 3), (1, 2, 3)]):
        turns = [(s, at[s] + j) for j in range(max(take)) for s in range(3) if j < take[s]]
        if i > 2:
            turns.sort()
        steps.append(([p for _, p in turns], [s for s, _ in turns]))
        at = [a + t for a, t in zip(at, take, strict=True)]
    return steps


@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize("case", ["group_of_8", "group_of_1", "mla", "fp32"])
def test_sequences_in_one_step(case: str, sms: int) -> None:
    """The cache starts as garbage."""
    model = {
        "group_of_8": lambda: gqa("bf16", 8, 1, 16, **SPLIT),
        "group_of_1": lambda: gqa("bf16", 2, 2, 16, **SPLIT),
        "mla": lambda: mla("bf16", 6, 24, 8, 48, **SPLIT),
        "fp32": lambda: gqa("f32", 4, 2, 16, **SPLIT),
    }[case]()
    twin = Twin(model, seqs=3, sms=sms)
    for position, seq in interleaved():
        twin.run(rows(model, len(position)), position, seq)


@pytest.mark.parametrize("case", ["gqa", "mla"])
@pytest.mark.parametrize("n", [1, 20])
def test_what_is_not_finite_stays_in_its_sequence(case: str, n: int) -> None:
    """NaN rows make later rows of their sequence NaN, as on the CPU, and no others; garbage in the
    cache that no token has written is not seen."""
    model = gqa("bf16", 4, 2, 16, **SPLIT) if case == "gqa" else mla("bf16", 4, 8, 4, 32, **SPLIT)
    twin = Twin(model, seqs=2, sms=1 if n > 1 else 132)
    for kv in (twin.kv, twin.step.kv):
        kv[:-256].view(np.uint16)[...] = 0x7FC0
    x = rows(model, 2 * n)
    x[:n] = np.nan
    seq = [0] * n + [1] * n
    for at in (0, n):
        out, _ = twin.run(x, [*range(at, at + n)] * 2, seq)
        assert np.isnan(out[:n]).any(1).all() and np.isfinite(out[n:]).all()


@pytest.mark.parametrize("case", ["gqa", "mla"])
def test_infinite_scores(case: str) -> None:
    """-Inf weighs nothing, a row of it is NaN; +Inf is NaN: whatever the CPU makes of them."""
    model = gqa("bf16", 2, 1, 32, **SPLIT) if case == "gqa" else mla("bf16", 2, 8, 4, 32, **SPLIT)
    for few in (False, True):
        twin = Twin(model, sms=132 if few else 1)
        x = rows(model, 40)
        x[3] *= 1e20
        x[7] *= 1e30
        x[11] *= -1e30
        with np.errstate(all="ignore"):
            for at in range(0, 40, 8 if few else 20):
                n = 8 if few else 20
                twin.run(x[at : at + n], range(at, at + n))


def test_a_sequence_cut_back_leaves_no_trace() -> None:
    """Later tokens were NaN: a value word's other half is zero again."""
    model = gqa("bf16", 2, 1, 16, **SPLIT)
    twin = Twin(model)
    twin.run(rows(model, 5), range(5))
    twin.run(np.full((40, model.plan.hidden), np.nan, np.float32), range(5, 45))
    for at, n in ((5, 1), (6, 3), (9, 21), (30, 1)):
        out, _ = twin.run(rows(model, n), range(at, at + n))
        assert np.isfinite(out).all()


@pytest.mark.parametrize(("kib", "kernel"), [(163, "attend_mla_small"), (99, "attend_plain")])
def test_what_does_not_fit_into_shared_memory(kib: int, kernel: str) -> None:
    model = mla("bf16", 2, 128, 64, 512)
    twin = Twin(model, shared_most=kib << 10)
    twin.run(rows(model, 35), range(35))
    twin.run(rows(model, 3), range(35, 38))
    assert twin.kernels.count(kernel) == 2
