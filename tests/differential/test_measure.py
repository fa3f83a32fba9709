"""Measuring parts of a step through a compiled plan: Session.measure.

Holds of the issue: "a pass that measures on the target: expert time ..., attention and gate per
phase and context length, predictor time". Nothing is timed: a result only has to be a time.
"""

from typing import Any

import numpy as np
import pytest
from support.assets import BUNDLED
from support.plans import PlanStore
from support.runs import kind_plan, random_ids

import pdscope
from pdscope.compiler.costs import ModelKey, model_key
from pdscope.compiler.passes import profile_costs
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.source import Silent
from pdscope.engine import Engine
from pdscope.errors import BudgetError, InputError
from pdscope.ir.graph_text import parse_graph

MODEL = BUNDLED / "tiny-mixtral"


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_costs, "SECONDS", 1e6)
    monkeypatch.setattr(profile_costs, "ROUNDS", profile_costs.LEAST)


def key_of(engine: Engine) -> ModelKey:
    plan = engine.plan
    graph, data = parse_graph(plan.read_text("graph.txt")), plan.data
    return model_key(Lower(data["dtype"], data["max_context"], data["predictor"]).run(graph))


@pytest.mark.parametrize("dtype", ["bf16", "int4"])
@pytest.mark.parametrize("kind", ["gqa", "window", "mla", "mla-groups"])
def test_every_part_of_every_kind_is_measured(plans: PlanStore, kind: str, dtype: str) -> None:
    """And no step's result depends on it: same logits, same lengths."""
    with pdscope.load(kind_plan(plans, kind, dtype, 96), threads=2) as engine:
        ids = random_ids(engine.info.vocab, 20)
        before = np.array(engine.prefill(ids[:-1]))
        session, model = engine.main, engine.plan.model
        layer = profile_costs.moe_layers(engine.plan)[0]
        experts, top_k, rows = model["experts"], model["top_k"], engine.info.max_rows
        for given in (
            {0: 1},
            {e: 1 for e in range(min(experts, rows * top_k))},
            {experts - 1: rows * top_k},
            {e: 3 + e for e in range(min(experts, 7))},
        ):
            assert session.measure("experts", layer, experts=given) > 0
        for count in (1, 5, 64):
            assert session.measure("attention", layer, count) > 0
        table = profile_costs.measure(engine, key_of(engine), Silent())
        assert (table.cpu.shared is not None) == (kind in ("mla", "mla-groups"))
        assert session.length() == 19
        after = engine.decode(ids[-1])
        engine.reset()
        assert np.array_equal(before, engine.prefill(ids[:-1]))
        assert np.array_equal(after, engine.decode(ids[-1]))


def test_a_context_is_there_without_a_step(plans: PlanStore) -> None:
    plan = plans.compile(MODEL, dtype="fp32", max_context=128)
    with pdscope.load(plan, threads=1) as engine:
        session = engine.session(max_seqs=2)
        assert session.measure("context", 0, 70, seq=1) == 0
        assert (session.length(0), session.length(1)) == (0, 70)
        assert session.measure("attention", 0, 58, seq=1) > 0
        assert session.length(1) == 70
        with pytest.raises(BudgetError, match="context"):
            session.measure("attention", 0, 59, seq=1)
        assert session.length(1) == 70
        session.truncate(1, 0)
        ids = random_ids(engine.info.vocab, 30)
        logits = np.array(session.prefill(ids, seq=1))
        assert np.array_equal(logits, engine.prefill(ids))


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        ({"what": "speed", "layer": 0}, InputError, "expected one of experts, shared"),
        ({"what": "experts", "layer": 6}, InputError, "layer is 6, expected 0 to 5"),
        ({"what": "experts", "layer": 0}, InputError, "0 experts, expected 1 to 8"),
        ({"what": "experts", "layer": 0, "experts": {8: 1}}, InputError, "expert 8, expected 0 to"),
        ({"what": "experts", "layer": 0, "experts": {1: 0}}, BudgetError, "0 tokens for expert 1"),
        ({"what": "experts", "layer": 0, "experts": {1: 1025}}, BudgetError, "and 1024 in all"),
        ({"what": "attention", "layer": 0, "rows": 0}, BudgetError, "0 rows, expected 1 to 512"),
        ({"what": "attention", "layer": 0, "rows": 513}, BudgetError, "513 rows"),
        ({"what": "attention", "layer": 0, "rows": 1, "seq": 1}, InputError, "seq is 1"),
        ({"what": "predict", "layer": 0, "rows": 17}, BudgetError, "17 rows, expected 1 to 16"),
        ({"what": "predict", "layer": 5, "rows": 1}, InputError, "layer 5 has no predictor"),
        ({"what": "shared", "layer": 0, "rows": 1}, InputError, "layer 0 has no shared expert"),
    ],
)
def test_what_cannot_be_measured(
    plans: PlanStore, call: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pdscope.load(plans.compile(MODEL), threads=1) as engine:
        with pytest.raises(kind, match=said):
            engine.main.measure(**call)
        assert engine.main.measure("attention", 0, 1) > 0
