"""Why a decision is what it is: pdscope-inspect --explain.

Holds: "`pdscope-inspect plan/ --explain --layer N --phase P [--counts file]` prints the decision in
words and numbers: costs compared at each step, the mode, what was loaded, prefetched, unloaded,
left on the CPU, and what the alternatives would have cost".
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.assets import BUNDLED
from support.commands import run_here
from support.plans import PlanStore, small_gpu_plan

from pdscope.compiler.decision import Policy
from pdscope.compiler.explain import explain, text
from pdscope.compiler.passes.schedule import decide
from pdscope.ir.isa import Phase
from pdscope.placement import decision_costs
from pdscope.plan import Plan


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Plan:
    return Plan.open(small_gpu_plan(plans))


def counts(tmp_path: Path, **what: Any) -> Path:
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(what))
    return file


@pytest.mark.parametrize("phase", list(Phase))
def test_it_is_the_policys_decision(plan: Plan, phase: Phase) -> None:
    """For every policy; the chosen number of loads is a line of the alternatives."""
    for policy in Policy:
        found = explain(plan, 2, phase, None, policy.value)
        made = decide(found.given)
        assert (made.on, made.pre) == (found.made.on, found.made.pre)
        assert found.given.policy is policy
        assert found.policies[policy.value][0] == made
        assert len(found.loads) == found.given.room_on() + 1
        assert found.loads[len(made.on)].layer == found.ends.layer


def test_counts_are_taken_as_they_are(plan: Plan, tmp_path: Path) -> None:
    """Residents are on the GPU whatever the file says; the others are as listed."""
    hot = json.loads(plan.read_text("hot_experts.json"))["layers"][1]["resident"]
    free = [e for e in range(8) if e not in hot]
    file = counts(
        tmp_path,
        rows=3,
        context=100,
        experts={str(e): 1 + e % 3 for e in range(8)},
        next={"0": 2},
        on_gpu=[free[0]],
        free_slots=1,
    )
    found = explain(plan, 1, Phase.BATCH, file, None)
    assert [due.expert for due in found.given.res] == sorted([*hot, free[0]])
    assert {due.expert for due in found.given.cur} == set(free[1:])
    assert [due.rank for due in found.given.cur] == sorted(due.rank for due in found.given.cur)
    assert found.given.free_slots == 1
    costs = decision_costs(plan)
    assert found.given.attention == costs.attention.at(3) + costs.context_row * (300 // 1024)


def test_the_page(plan: Plan) -> None:
    """Every part that the issue names is a line of it."""
    page = text(explain(plan, 2, Phase.DECODE, None, "pdscope-paper"))
    for part in (
        *("layer 2, decode: 1 rows behind 512 tokens, policy pdscope-paper", "mode "),
        *("load on demand", "on the CPU", "prefetch", "an expert over the link"),
        *("on-demand loads: what each number", "<- decided", "fiddler", "N \\ M"),
    ):
        assert part in page, part


def test_the_command(plan: Plan) -> None:
    done = run_here("pdscope-inspect", plan.path, "--explain", "--layer", "1", "--json")
    data = json.loads(done.out)
    assert data["policy"] == "adaptsched" and data["assumed"]
    assert set(data["policies"]) == {p.value for p in Policy}
    activated = {*data["on_gpu"], *data["host_only"]}
    assert {*data["decision"]["load"], *data["decision"]["cpu"]} == set(data["host_only"])
    assert len(activated) == plan.model["top_k"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"experts": {"9": 1}}, "experts: '9', expected an expert, 0 to 7"),
        ({"experts": {"1": 0}}, "experts: 1: 0, expected a whole number, 1 to 1"),
        ({"experts": {"1": 1}, "rows": 2}, "rows: 2, expected a whole number, 1 to 1"),
        ({"experts": [1]}, 'experts: expected {"expert": tokens, ...}'),
        ({"next": {}}, "expected an object with experts"),
        ({"experts": {}, "on_gpu": 3}, "on_gpu: expected a list of expert ids"),
    ],
)
def test_counts_that_cannot_be(plan: Plan, tmp_path: Path, what: Any, message: str) -> None:
    file = counts(tmp_path, **what)
    done = run_here("pdscope-inspect", plan.path, "--explain", "--layer", 1, "--counts", file)
    assert message in done.fault() and "counts.json" in done.fault()


def test_what_has_nothing_to_explain(plan: Plan, plans: PlanStore) -> None:
    cpu = plans.compile(BUNDLED / "tiny-mixtral", dtype="bf16", max_context=512)
    for args, message in (
        ((cpu, "--explain", "--layer", "1"), "compiled for the CPU alone"),
        ((plan.path, "--explain", "--layer", "99"), "layer 99 has no routed experts"),
    ):
        assert message in run_here("pdscope-inspect", *args).fault()
