"""Chosen numbers of rows for one expert, on every kernel path.

Holds: "Rows per expert exactly 0, 1, 2, 3, 7, 8, 9 (steered by a router bias) are right on every
ISA path". The model is a DeepSeek-V3 of one layer whose attention adds nothing, so that a row's
expert depends on its token alone and tokens can be picked to fill each expert exactly; the
correction bias starves the experts that must get nothing. Random models of every family, fed a text
of three words, starve experts by themselves, with no near-tie among the gates' scores.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.hf_reference import (
    Reference,
    assert_rows_agree,
    dequantised_reference,
    load_reference,
    run_reference,
)
from support.plans import PlanStore
from support.runs import prefill_all
from support.tiny_configs import (
    build_random_model,
    hub_tensors,
    random_tiny_config,
    save_checkpoint,
    save_random_model,
)

import pdscope

COUNTS = (0, 1, 2, 3, 7, 8, 9)
EXPERTS, VOCAB = 16, 500
STARVED = (0, 5, 15)
SEED = 3

# Family -> seed of a random config with more experts than a text of three words can reach.
SPARSE = {"mixtral": 0, "qwen3_moe": 3, "deepseek_v2": 1, "deepseek_v3": 0, "olmoe": 1}


def steered_model(out: Path) -> None:
    """Saves the model: top-1 of 16 experts, the starved ones with an overwhelming bias."""
    config = random_tiny_config("deepseek_v3", SEED) | {
        "vocab_size": VOCAB,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "n_routed_experts": EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
        "hidden_size": 96,
        "moe_intermediate_size": 80,
    }
    tensors = hub_tensors(build_random_model(config, SEED), config)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight"):
            tensor.zero_()
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()
            tensor[list(STARVED)] = -10.0
    save_checkpoint(tensors, config, out)


def experts_of_tokens(model: Any) -> torch.Tensor:
    """The expert that each token id is sent to."""
    chosen: list[torch.Tensor] = []
    gate = model.model.layers[0].mlp.gate
    hook = gate.register_forward_hook(lambda _m, _a, out: chosen.append(out[2]))
    with torch.no_grad():
        model(torch.arange(VOCAB)[:, None], use_cache=False)
    hook.remove()
    return chosen[0].reshape(-1)


def steered_ids(model: Any) -> list[int]:
    """Token ids that give some expert exactly each of COUNTS rows, shuffled."""
    experts = experts_of_tokens(model)
    pools = [torch.nonzero(experts == e).flatten().tolist() for e in range(EXPERTS)]
    ids: list[int] = []
    wanted = sorted(COUNTS, reverse=True)
    for pool in sorted(pools, key=len, reverse=True)[: len(wanted)]:
        ids += pool[: wanted.pop(0)]
    got = torch.bincount(experts[ids], minlength=EXPERTS).tolist()
    assert sorted(got, reverse=True)[:6] == [9, 8, 7, 3, 2, 1] and sum(got) == 30
    assert all(got[e] == 0 for e in STARVED)
    return [int(i) for i in np.random.default_rng(0).permutation(ids)]


@pytest.fixture(scope="module")
def steered(plans: PlanStore) -> tuple[Path, Any, list[int]]:
    folder = plans.once("steered.model", steered_model)
    model = load_reference(folder)
    return folder, model, steered_ids(model)


def test_fp32(plans: PlanStore, steered: tuple[Path, Any, list[int]], isa: str) -> None:
    """All counts in one step, and each count alone as a step of that many rows of one expert."""
    folder, model, ids = steered
    experts = experts_of_tokens(model)
    with pdscope.load(plans.compile(folder, dtype="fp32"), threads=2, isa=isa) as engine:
        assert_rows_agree(prefill_all(engine, ids), run_reference(model, ids), what=isa)
        crowded = torch.nonzero(experts == experts[ids].mode().values).flatten().tolist()
        for count in COUNTS[1:]:
            same = crowded[:count]
            reference = run_reference(model, same)
            assert_rows_agree(prefill_all(engine, same), reference, what=f"{isa}, {count} rows")


def test_bf16(plans: PlanStore, steered: tuple[Path, Any, list[int]], isa: str) -> None:
    """All counts in one step; the reference has bf16 weights and computes in fp32."""
    folder, _, ids = steered
    rounded = load_reference(folder, torch.bfloat16).float()
    reference = run_reference(rounded, ids)
    reference = Reference(reference.logits, reference.margin / 100)  # bf16 scores: wider ties
    with pdscope.load(plans.compile(folder, dtype="bf16"), threads=2, isa=isa) as engine:
        ours = prefill_all(engine, ids)
        assert_rows_agree(ours, reference, tolerance=2e-2, what=isa)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised(
    plans: PlanStore, steered: tuple[Path, Any, list[int]], dtype: str, isa: str
) -> None:
    """All counts in one step, and each count alone, against the weights that the plan holds.

    What differs is that inputs of GEMMs are rounded to 127ths of the largest of their group: an
    error of sqrt(1 / 12) / 127 of it, about 0.6 % of the vector (the largest of 64 normal values is
    some 2.5 times their r.m.s.). There are three such inputs in a row, of the expert's two matrices
    and the head's, so 1 % in r.m.s. and, with the residual and bf16, at most 3 % of the largest
    logit. A row sent elsewhere is off by 50 % and more.
    """
    folder, _, _ = steered
    model = dequantised(folder, dtype)
    ids = steered_ids(model)
    experts = experts_of_tokens(model)
    crowded = torch.nonzero(experts == experts[ids].mode().values).flatten().tolist()
    with pdscope.load(plans.compile(folder, dtype=dtype), threads=2, isa=isa) as engine:
        for part in (ids, *(crowded[:count] for count in COUNTS[1:])):
            reference = run_reference(model, part)
            what = f"{isa}, {len(part)} rows"
            assert_rows_agree(prefill_all(engine, part), reference, tolerance=0.03, what=what)


@cache
def dequantised(folder: Path, dtype: str) -> Any:
    return dequantised_reference(folder, dtype)


@cache
def sparse_text(folder: Path, family: str) -> tuple[list[int], Reference]:
    """100 rows of three words and their reference: in some layer some experts get no row, others
    many, and no choice is close."""
    model = load_reference(folder)
    rng = np.random.default_rng(SPARSE[family])
    ids = rng.choice(rng.integers(0, model.config.vocab_size, 3), 100).tolist()
    chosen: list[torch.Tensor] = []
    gates = [m for name, m in model.named_modules() if name.endswith((".mlp.gate", "_moe.gate"))]
    for gate in gates:
        gate.register_forward_hook(lambda _m, _a, out: chosen.append(out[2].reshape(-1)))
    reference = run_reference(model, ids)
    experts = getattr(model.config, "num_local_experts", None) or model.config.num_experts
    rows = [torch.bincount(c, minlength=experts) for c in chosen]
    assert any((r == 0).any() and (r > 30).any() for r in rows)
    assert not reference.near_tie.any()
    return ids, reference


@pytest.mark.parametrize("family", SPARSE)
def test_starved_experts(plans: PlanStore, family: str, isa: str) -> None:
    """Experts that get nothing in a whole prefill, without a bias and without a tie."""
    config = random_tiny_config(family, SPARSE[family])
    folder = plans.once(
        f"starved-{family}.model", lambda out: save_random_model(config, out, SPARSE[family])
    )
    ids, reference = sparse_text(folder, family)
    with pdscope.load(plans.compile(folder, dtype="fp32"), threads=2, isa=isa) as engine:
        assert assert_rows_agree(prefill_all(engine, ids), reference, what=isa) == 0
