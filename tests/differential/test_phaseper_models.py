"""Predictors of trained models, from a small sample of their own routing.

Holds in little: "at least 40 % of the best rival's misses removed in both phases, no layer more
than half a point below its best rival"; a sample this small, without the full training, removes a
smaller share.
"""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from support.assets import asset, model_path
from support.plans import PlanStore
from support.traces import read_routing

import pdscope
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.passes.train_phaseper import model_gates
from pdscope.compiler.phaseper.build import build_predictors
from pdscope.compiler.phaseper.train import TrainOptions
from pdscope.compiler.source import Model, Options, Silent
from pdscope.tokens import Tokenizer

TOKENS = 10_000
SMALL = TrainOptions(width=128, rows=100_000, search_rows=(5_000,))


def chats(tokenizer: Tokenizer) -> Iterator[NDArray[np.int32]]:
    left = TOKENS
    with asset("data/calibration_chat.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            messages = json.loads(line)["messages"]
            ids = tokenizer.encode_chat(messages, add_generation_prompt=False)[: min(512, left)]
            yield ids
            left -= len(ids)
            if left <= 0:
                return


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-deepseek-v2"])
def test_a_small_sample_beats_every_rival(plans: PlanStore, name: str) -> None:
    path = model_path(name)
    source = Model(path, Options(), Silent())
    lowered = Lower("bf16", 1024).run(source.traced.graph)
    gates = model_gates(lowered.layers, source.reader())
    with pdscope.load(plans.compile(path)) as engine:
        experts = next(iter(gates.values())).attrs.experts
        store = read_routing(engine, chats(engine.tokenizer), experts)
    about, files = build_predictors(store, gates, SMALL, "cpu", 2)
    assert set(gates) == set(store.layers[1:]) and len(files) == len(gates)
    for phase in store.phases:
        entries = [e for e in about["layers"] if e["phase"] == phase]
        best = [max(r["hit"] for r in e["rivals"].values()) for e in entries]
        hit = [e["hit"] for e in entries]
        removed = 1 - (1 - np.mean(hit)) / (1 - np.mean(best))
        print(f"{name} {phase}: hit {np.mean(hit):.3f}, best rivals {np.mean(best):.3f}")
        assert removed > 0.1
        assert all(h > b - 0.005 for h, b in zip(hit, best, strict=True))
        assert min(hit) > 0.8
