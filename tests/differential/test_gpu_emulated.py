"""GPU plans with the GPU's own kernels, which an emulator runs on the mock driver: launches, their
parameters and the kernels together give the CPU plan's logits within rounding.

Holds of the issue "The GPU runtime": "Tokens identical (fp32 compute path) or logits within the
compile-and-run issue's bf16 tolerance for tiny-mixtral, tiny-qwen3-moe, tiny-deepseek-v2 and random
tiny configs of all families", without a GPU and for short runs; tests/device does it on one.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu import DTYPES, Floats, Mock, gpu_plan, loaded, mock, pairwise
from support.gpu_close import check_close
from support.plans import PlanStore
from support.runs import random_ids

from pdscope.compiler.build import simt_kernels
from pdscope.engine import Engine

__all__ = ["mock"]

SMALL = ("tiny-mixtral", "mixtral", "qwen", "shared", "groups", "all-of-7")
MODELS = (*SMALL, "tiny-qwen3-moe", "tiny-deepseek-v2")
SLOTS, KINDS = ("none", "few", "all"), ("adaptsched", "lru")
FACTORS = {"model": MODELS, "dtype": DTYPES, "slots": SLOTS, "kind": KINDS}
PAIRS = pairwise(**FACTORS)
# Each small model once, and every value of the others: the emulator is slow.
SOME = [
    {name: values[i % len(values)] for name, values in FACTORS.items()} for i in range(len(SMALL))
]


@pytest.fixture
def emulated(mock: Mock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mock:
    """Engines of this test load the GPU's kernels."""
    image = tmp_path / "kernels"
    image.write_text(f"PDSTWIN-LIBRARY {simt_kernels()}\n", encoding="utf-8")
    monkeypatch.setenv("PDSCOPE_GPU_KERNELS", str(image))
    return mock


def short_run(engine: Engine) -> list[Floats]:
    """A prefill across two KV blocks, decode, and a batch of two sequences."""
    session = engine.session(max_seqs=2)
    try:
        ids = random_ids(engine.info.vocab, 128, 0)
        found = [np.array(session.prefill(ids[:70]))]
        found.append(np.array(session.decode(ids[70])))
        found.append(np.array(session.prefill(ids[80:83], 1, all_logits=True)))
        both = session.step(ids[90:92], seqs=[0, 1], want_logits=[1, 1])
        return [*found, np.array(both)]
    finally:
        session.close()


def named(cases: list[dict[str, str]]) -> list[Any]:
    return [pytest.param(case, id="-".join(case.values())) for case in cases]


def check(plans: PlanStore, emulated: Mock, case: dict[str, str]) -> None:
    runs = []
    for dtype in (case["dtype"], "fp32"):
        whole = gpu_plan(plans, case["model"], dtype, "all")
        with loaded(whole, device="cpu") as engine:
            runs.append(short_run(engine))
    cpu, exact = runs
    with loaded(
        gpu_plan(plans, case["model"], case["dtype"], case["slots"], case["kind"])
    ) as engine:
        check_close(short_run(engine), cpu, exact, case["dtype"], case["model"])
    assert emulated.counter("launches") > 0


@pytest.mark.parametrize("case", named(SOME))
def test_some(plans: PlanStore, emulated: Mock, case: dict[str, str]) -> None:
    """Each small model, dtype, budget and use of slots."""
    check(plans, emulated, case)


@pytest.mark.verify
@pytest.mark.parametrize("case", named(PAIRS))
def test_pairs(plans: PlanStore, emulated: Mock, case: dict[str, str]) -> None:
    """Each pair of them."""
    check(plans, emulated, case)
