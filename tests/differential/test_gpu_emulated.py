"""GPU plans with the GPU's own kernels, which an emulator runs on the mock driver: launches, their
parameters and the kernels together give the CPU plan's logits within rounding.

Holds of the issue "The GPU runtime": "Tokens identical (fp32 compute path) or logits within the
compile-and-run issue's bf16 tolerance for tiny-mixtral, tiny-qwen3-moe, tiny-deepseek-v2 and random
tiny configs of all families", without a GPU and for short runs; tests/device does it on one.
"""

from pathlib import Path

import numpy as np
import pytest
from support.gpu import DTYPES, Floats, Mock, gpu_plan, loaded, mock, pairwise
from support.gpu_close import check_close
from support.plans import PlanStore
from support.runs import random_ids

from pdscope.compiler.build import simt_kernels
from pdscope.engine import Engine

__all__ = ["mock"]

MODELS = ("tiny-mixtral", "tiny-qwen3-moe", "tiny-deepseek-v2", "mixtral", "qwen", "shared")
GROUPED = ("groups", "all-of-7")
CASES = pairwise(
    model=(*MODELS, *GROUPED),
    dtype=DTYPES,
    slots=("none", "few", "all"),
    kind=("adaptsched", "lru"),
)


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


@pytest.mark.parametrize("case", [pytest.param(c, id="-".join(c.values())) for c in CASES])
def test_pairs(plans: PlanStore, emulated: Mock, case: dict[str, str]) -> None:
    """Each pair of model, dtype, budget and use of slots."""
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
