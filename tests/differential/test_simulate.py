"""The simulator gives the times that real plans take on the mock driver's virtual clock.

Holds of the issue "AdaptSched and its lowering": "simulated and executed times agree to the tick on
the virtual one (mock and simulator share no timing code, and costs are fitted on other shapes than
those checked)", and "Simulator: executes the very programs (same binary encoding, same holes) over
a cost table by discrete events, queue by queue".
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.assets import model_path
from support.cuda import Driver
from support.plans import PlanStore
from support.published_configs import PUBLISHED
from support.simulated import mock_text, some_timing

import pdscope
from pdscope.compiler.build import mock_driver
from pdscope.compiler.decision import Policy
from pdscope.compiler.simulate.executor import Executor
from pdscope.compiler.simulate.subject import Subject
from pdscope.placement import decision_costs
from pdscope.plan import Plan
from pdscope.routing_trace import Recorder, RoutingTrace
from pdscope.session import Session

POLICIES = [p.value for p in Policy]
# Of what the compiler takes for a card: so that loads and prefetches are worth it for tiny experts.
CHEAP = {"link.expert": 0.05, "link.start": 0.05, "gpu.start": 0.1, "gpu.expert": 0.3}
# Bytes for what is no expert, and two thirds, or a tenth, of the experts.
BUDGETS = {
    "tiny-mixtral": (20_000_000, 22_500_000),
    "tiny-qwen3-moe": (33_000_000, 36_000_000),
    "tiny-deepseek-v2": (33_000_000, 35_000_000),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    path = mock_driver()
    monkeypatch.setenv("PDSCOPE_CUDA_DRIVER", str(path))
    driver = Driver(path)
    yield driver
    driver.configure("reset")


def compiled(
    plans: PlanStore, model: Path, budget: int, factors: dict[str, float], **more: Any
) -> Plan:
    """A GPU plan whose decisions are made of changed costs."""
    common = {"max_context": 1024, "max_rows": 256, "gpu_mem": budget, "gpu_reserve": 0, **more}
    if not factors:
        return Plan.open(plans.compile(model, costs="h200-emr16", **common))
    first = plans.compile(model, costs="h200-emr16", **common)

    def make(out: Path) -> None:
        table = json.loads((first / "costs.json").read_text())
        for name, factor in factors.items():
            side, part = name.split(".")
            cost = table[side][part]
            for key in ("ns", "median", "min", "max"):
                if isinstance(cost.get(key), int):
                    cost[key] = int(cost[key] * factor)
            if "tokens" in cost:
                cost["ns"] = [int(ns * factor) for ns in cost["ns"]]
                cost["points"] = []
        changed = out.with_suffix(".json")
        changed.write_text(json.dumps(table))
        pdscope.compile(model, out, costs=str(changed), **common)

    return Plan.open(plans.once(f"{first.name}-changed", make))


def prompts(session: Session) -> None:
    """Prefill of 1 to 300 tokens, in one step and in two, decode, and batches of sequences."""
    rng = np.random.default_rng(1)

    def ids(n: int) -> list[int]:
        return list(rng.integers(5, 1000, n).tolist())

    for n in (1, 40, 300):
        session.prefill(ids(n), seq=0)
    for _ in range(6):
        session.decode(ids(1)[0], seq=0)
    session.step(ids(35), seqs=[1] * 30 + [2] * 5)
    for _ in range(4):
        session.step(ids(3), seqs=[0, 1, 2], want_logits=[1, 1, 0])
    session.step(ids(4), seqs=[1] * 4, want_logits=[0] * 4)


@cache
def recorded(path: Path) -> RoutingTrace:
    """Routing, which is the same under all policies; these plans have no nets, so predictions are
    too."""
    plan = Plan.open(path)
    with pdscope.load(plan, device="gpu", weights="copy", policy="adaptsched", threads=1) as engine:
        recorder = Recorder(plan.model["experts"])
        session = engine.session(4, 640)
        with recorder.watch(session):
            prompts(session)
        session.close()
    return recorder.trace()


def agree(driver: Driver, plan: Plan, policy: str, seed: int, enqueue: int = 0) -> int:
    """Every instruction of every layer begins and ends as simulated, every ledger is the same, and
    so is the clock at the end. Returns the loads and prefetches."""
    timing = some_timing(seed, enqueue)
    driver.configure("reset")
    trace = recorded(plan.path)
    driver.configure(f"reset; {mock_text(timing)}")
    with pdscope.load(plan, device="gpu", weights="copy", policy=policy, threads=1) as engine:
        session = engine.session(4, 640)
        begin = int(driver.library.pds_mock_now())
        with session.trace() as instrs:
            prompts(session)
        end = int(driver.library.pds_mock_now()) - begin
        ledger = engine.ledger()
        session.close()
    executor = Executor(Subject.of_plan(plan), timing, decision_costs(plan), policy, keep=True)
    steps = list(executor.run(trace))
    r = instrs.records
    executed = np.stack(
        [r["begin_ns"] - begin, r["end_ns"] - begin, r["layer"], r["instr"], r["opcode"]], axis=1
    ).astype(np.int64)
    assert executor.instrs is not None
    simulated = np.array(
        [(i.begin, i.end, i.layer, i.index, int(i.opcode)) for i in executor.instrs], np.int64
    )
    assert executed.shape == simulated.shape
    differs = np.flatnonzero((executed != simulated).any(axis=1))
    assert not len(differs), (differs[0], executed[differs[0]], simulated[differs[0]])
    assert steps[-1].end == end > 0
    assert [vars(one) for one in executor.placement.ledger] == ledger
    return sum(one["loads"] + one["prefetches"] for one in ledger)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [0, 1])
def test_times_agree_to_the_tick(
    driver: Driver, plans: PlanStore, policy: str, budget: int
) -> None:
    model = "tiny-mixtral"
    plan = compiled(plans, model_path(model), BUDGETS[model][budget], CHEAP)
    moved = agree(driver, plan, policy, seed=POLICIES.index(policy))
    assert moved or policy == "static"


@pytest.mark.parametrize("policy", ["adaptsched", "pdscope-paper", "fate", "hybrimoe"])
@pytest.mark.parametrize("model", ["tiny-qwen3-moe", "tiny-deepseek-v2"])
def test_times_agree_on_shared_experts_dense_layers_and_many_experts(
    driver: Driver, plans: PlanStore, model: str, policy: str
) -> None:
    plan = compiled(plans, model_path(model), BUDGETS[model][0], CHEAP)
    for enqueue in (0, 500):
        assert agree(driver, plan, policy, seed=20 + len(policy), enqueue=enqueue)


@pytest.mark.verify
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", list(BUDGETS))
def test_times_agree_of_many_machines(
    driver: Driver, plans: PlanStore, model: str, policy: str
) -> None:
    for budget in BUDGETS[model]:
        for factors in (CHEAP, {}):
            plan = compiled(plans, model_path(model), budget, factors)
            for seed in range(100, 105):
                agree(driver, plan, policy, seed, enqueue=seed % 2 * 900)


def test_times_agree_on_copies_of_several_chunks(
    driver: Driver, plans: PlanStore, tmp_path: Path
) -> None:
    """Experts of 9 MiB: three chunks each, so that transfers are taken back half sent."""
    config = PUBLISHED["mixtral-8x7b"] | {
        **{"hidden_size": 1024, "intermediate_size": 1536, "num_hidden_layers": 3},
        **{"vocab_size": 1000, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"num_local_experts": 6, "max_position_embeddings": 2048},
    }
    file = plans.folder / "chunks" / "config.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(config))
    factors = {"link.expert": 0.3, "link.start": 0.3, "gpu.start": 0.1, "gpu.expert": 0.3}
    plan = compiled(plans, file, 120_000_000, factors, load_format="dummy")
    for seed, policy in enumerate(("adaptsched", "fate", "pdscope-paper")):
        assert agree(driver, plan, policy, seed)


def test_a_trace_of_another_model_is_refused(
    driver: Driver, plans: PlanStore, tmp_path: Path
) -> None:
    plan = compiled(plans, model_path("tiny-mixtral"), BUDGETS["tiny-mixtral"][0], CHEAP)
    driver.configure("reset")
    trace = recorded(plan.path)
    trace.save(tmp_path / "routing.npz")
    again = RoutingTrace.load(tmp_path / "routing.npz")
    for name, array in vars(trace).items():
        assert np.array_equal(array, getattr(again, name)), name
    subject = Subject.of_plan(plan)
    other = RoutingTrace(**{**vars(trace), "layers": trace.layers + 1})
    executor: Callable[[RoutingTrace], Any] = lambda t: list(  # noqa: E731
        Executor(subject, some_timing(0), decision_costs(plan), "static").run(t)
    )
    with pytest.raises(pdscope.errors.InputError, match="layers"):
        executor(other)
    with pytest.raises(pdscope.errors.InputError, match="9 experts"):
        executor(RoutingTrace(**{**vars(trace), "experts": 9}))
