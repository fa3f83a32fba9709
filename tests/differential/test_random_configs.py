"""Random tiny models of every family against transformers.

Holds: "Random tiny configs of all four families (6 each in `make test`, 24 in `make verify`: layer
kinds, 1 to 384 experts, top-1 to top-8, odd hidden sizes, 0 to 3 dense layers, groups, bias,
scaling factor, YaRN on and off, within what transformers accepts; OLMoE too) agree likewise."
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hf_reference import assert_rows_agree, run_reference
from support.tiny_configs import FAMILIES, random_tiny_config, save_random_model

import pdscope

SEEDS = [*range(6), *(pytest.param(s, marks=pytest.mark.verify) for s in range(6, 24))]
LENGTHS = (1, 9, 70, 131)  # one row, a batch, both sides of a KV block


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_config(tmp_path: Path, family: str, seed: int) -> None:
    config = random_tiny_config(family, seed)
    model: Any = save_random_model(config, tmp_path / "model", seed, shards=1 + seed % 3)
    pdscope.compile(tmp_path / "model", tmp_path / "plan", dtype="fp32", max_context=256)
    rng = np.random.default_rng(seed)
    rows = excepted = 0
    with pdscope.load(tmp_path / "plan", threads=2) as engine:
        for length in LENGTHS:
            ids = rng.integers(0, config["vocab_size"], length).tolist()
            reference = run_reference(model, ids)
            engine.reset()
            ours = engine.prefill(ids, all_logits=True)
            excepted += assert_rows_agree(ours, reference, what=f"{family} {seed}, {length} rows")
            rows += length
    assert excepted <= 0.02 * rows, f"{excepted} of {rows} rows differ, all near-ties"
