"""The benchmark that compares executed with simulated times of layers, on the virtual clock.

Holds of the issue "AdaptSched and its lowering": "simulated and executed times agree to the tick on
the virtual one ..., and within 15 % per layer on the wall clock of an idle machine": what measures
the latter (benchmarks/agreement.py) finds the former. Nothing here depends on the real clock.
"""

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.assets import ROOT, model_path
from support.gpu import Mock, mock
from support.plans import PlanStore
from support.simulated import mock_text, some_timing

import pdscope
from pdscope.compiler.hardware import Hardware
from pdscope.compiler.simulate.subject import Subject
from pdscope.costs import CostTable, Figure, Fitted
from pdscope.placement import decision_costs
from pdscope.plan import Plan

__all__ = ["mock"]


@pytest.fixture
def agreement(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("agreement")


def plan_of(plans: PlanStore) -> Plan:
    options: dict[str, Any] = {"max_context": 512, "max_rows": 256, "gpu_mem": 21_000_000}
    made = plans.compile(model_path("tiny-mixtral"), costs="h200-emr16", gpu_reserve=0, **options)
    return Plan.open(made)


@pytest.mark.parametrize("policy", ["adaptsched", "fate"])
def test_every_layer_of_every_phase_agrees(
    plans: PlanStore, mock: Mock, agreement: Any, policy: str
) -> None:
    """To the tick: ratios are 1; a machine that takes three times as long is seen."""
    plan, timing = plan_of(plans), some_timing(3)
    workload = agreement.Workload(prompt=40, tokens=4, batch=3, vocab=1000)
    with pdscope.load(plan, device="gpu", weights="copy", policy=policy, threads=1) as engine:
        session = engine.session(3, 512)
        trace, kinds = agreement.record(session, workload)
        session.close()
    mock.reset(mock_text(timing))
    with pdscope.load(plan, device="gpu", weights="copy", policy=policy, threads=1) as engine:
        session = engine.session(3, 512)
        executed = [
            agreement.execute(session, workload, lambda _: int(mock.library.pds_mock_now()))
            for _ in range(3)
        ]
        session.close()
    subject, costs = Subject.of_plan(plan), decision_costs(plan)
    simulated = agreement.simulate(subject, timing, costs, policy, trace, kinds, 3)
    rows = agreement.compare(executed, simulated, simulated)
    assert {row.phase for row in rows} == {"prefill", "decode", "batch"}
    layers = {row.layer for row in rows}
    assert layers == {"before", "all", *map(str, range(plan.model["layers"]))}
    for row in rows:
        assert row.ratio == {"min": 1, "median": 1, "max": 1} and row.least == 1, row
        assert row.simulated == row.executed["median"] > 0
        for ran, said in row.parts.values():
            assert ran == said
    slower = [
        [
            agreement.StepTimes(s.kind, s.rows, {n: 3 * t for n, t in s.layers.items()}, {})
            for s in r
        ]
        for r in executed
    ]
    for row in agreement.compare(slower, simulated, simulated):
        assert row.ratio["median"] == row.least == 3
    assert "| decode  | before |" in agreement.lines(rows, parts=True)


def test_quiet_costs_are_the_least(plans: PlanStore, agreement: Any) -> None:
    """Of a measured table; what has no error bar stays as it is."""
    plan = plan_of(plans)
    table = CostTable.of_plan(plan)
    assert table is not None
    assert agreement.quiet(table) == table
    data = json.loads(table.text())
    curve = table.cpu.expert.curve
    points = [
        {"tokens": t, "min": ns, "median": 2 * ns, "max": 3 * ns}
        for t, ns in zip(curve.tokens, curve.ns, strict=True)
    ]
    data["cpu"]["expert"] |= {"points": points, "ns": [2 * ns for ns in curve.ns]}
    data["cpu"]["expert_busy"] = data["cpu"]["expert"] | {"ns": [3 * ns for ns in curve.ns]}
    data["link"]["start"] = {"ns": 7, "min": 5, "median": 7, "max": 9}
    quiet = agreement.quiet(CostTable.parse(json.dumps(data), "test"))
    assert quiet.cpu.expert.curve == curve and quiet.link.start == Figure(5)
    assert quiet.cpu.expert_busy == Fitted(
        type(curve)(curve.tokens, tuple(ns * 3 // 2 for ns in curve.ns))
    )
    assert quiet.gpu == table.gpu


def test_the_mock_takes_the_descriptions_times(
    plans: PlanStore, mock: Mock, agreement: Any
) -> None:
    """The mock reads the settings, and its clock is then the real one."""
    subject = Subject.of_plan(plan_of(plans))
    table = Hardware.shipped("a100-6230r").table(subject.key)
    mock.configure(agreement.mock_settings(table, subject, 3 * 10**9))
    assert mock.counter("virtual") == 0
    mock.reset()
