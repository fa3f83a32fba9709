"""GPU plans on the mock driver give the CPU plan's bits, whatever is where.

Holds: "Every program the compiler emits for all test models, phases, budgets 0 to everything, and
policies passes the verifier, runs on the mock driver with tokens equal to the CPU plan's ...,
pairwise combinations in `make test` and the full product in `make verify`"; "schedules are
executed, not only simulated, in CI"; of predictors, "zero effect on outputs whatever the predictor
says (adversarial predictions, CPU plans and mock driver: bit-equal)".
"""

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu import (
    CONTEXT,
    DTYPES,
    MOCKS,
    POLICIES,
    RANDOM,
    SLOTS,
    TRAINED,
    Floats,
    Mock,
    engine_run,
    gpu_plan,
    loaded,
    memory_of,
    mock,
    model_of,
    on_cpu,
    pairwise,
    same,
    session_run,
    with_room,
)
from support.plans import PlanStore
from support.predictors import Tensors, with_predictors
from support.runs import random_ids

from pdscope.engine import Engine
from pdscope.errors import Cancelled
from pdscope.ir.isa import Opcode
from pdscope.observe import TapEvent

__all__ = ["mock"]

MODELS = (*TRAINED, *(name for name in RANDOM if name != "wide"))
# Slots for experts that stay, and for those that come and go; or all of them for the latter.
KINDS = ("adaptsched", "lru")
FACTORS = {"model": MODELS, "dtype": DTYPES, "slots": SLOTS, "kind": KINDS, "mock": tuple(MOCKS)}
PAIRS = pairwise(**FACTORS)
ALL = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]


def named(cases: list[dict[str, str]]) -> list[Any]:
    return [pytest.param(case, id="-".join(case.values())) for case in cases]


def check_policies(plans: PlanStore, driver: Mock, case: dict[str, str]) -> None:
    plan = gpu_plan(plans, case["model"], case["dtype"], case["slots"], case["kind"])
    expected = on_cpu(plans, gpu_plan(plans, case["model"], case["dtype"], "all"))
    table = memory_of(plan)
    driver.reset(f"memory={table['total_bytes']}; {MOCKS[case['mock']]}")
    with loaded(plan) as engine:
        for policy in POLICIES:
            engine.set_policy(policy)
            assert same(engine_run(engine), expected), policy
    assert driver.counter("device_peak") <= table["total_bytes"]


@pytest.mark.parametrize("case", named(PAIRS))
def test_pairs(plans: PlanStore, mock: Mock, case: dict[str, str]) -> None:
    """Each pair of model, dtype, budget, use of slots and timing; every policy in each."""
    check_policies(plans, mock, case)


@pytest.mark.verify
@pytest.mark.parametrize("case", named(ALL))
def test_all(plans: PlanStore, mock: Mock, case: dict[str, str]) -> None:
    check_policies(plans, mock, case)


@pytest.mark.parametrize("timing", ["end", "slow"])
def test_experts_of_several_chunks(plans: PlanStore, mock: Mock, timing: str) -> None:
    """Transfers can be cut short, taken up again, and overtaken between two chunks."""
    expected = on_cpu(plans, gpu_plan(plans, "wide", "bf16", "all"))
    mock.reset(MOCKS[timing])
    with loaded(gpu_plan(plans, "wide", "bf16", 4, "lru")) as engine:
        size = engine.gpu()["info"]["expert_bytes"]
        assert size > 8 << 20
        for policy in ("ondemand", "pdscope-paper", "adaptsched", "fate"):
            engine.set_policy(policy)
            assert same(engine_run(engine), expected), policy
        engine.set_policy("fate")
        session = engine.session(max_seqs=4)
        session.set_predictions(always(0)(512, 2, 2, 4))
        assert same(session_run(session), expected)
        assert engine.gpu()["link"]["wasted_bytes"] % size > 0  # some were cut short


def test_everything_moves(plans: PlanStore, mock: Mock) -> None:
    """The runs above are no runs of the CPU alone: experts are loaded, prefetched in vain and in
    time, and computed on either side."""
    mock.reset(MOCKS["end"])
    moved: dict[str, dict[str, int]] = {}
    with loaded(gpu_plan(plans, "tiny-mixtral", "bf16", "few", "lru")) as engine:
        for policy in POLICIES:
            engine.set_policy(policy)
            engine_run(engine)
            moved[policy] = engine.gpu()["link"]
    assert not any(moved["static"].values())
    assert {p for p in POLICIES if moved[p]["loads"]} >= {"adaptsched", "ondemand", "fate", "lru"}
    assert {p for p in POLICIES if moved[p]["prefetches"]} >= {
        "adaptsched",
        "pdscope-paper",
        "fate",
    }
    assert any(m["wasted_bytes"] for m in moved.values())
    assert any(m["late_bytes"] for m in moved.values())


@pytest.mark.parametrize("timing", MOCKS)
def test_weights_that_are_not_pinned(plans: PlanStore, mock: Mock, timing: str) -> None:
    """Copies from mapped files wait within the driver; the bits are the same."""
    plan = gpu_plan(plans, "shared", "bf16", "few", "lru")
    mock.reset(MOCKS[timing])
    with loaded(plan, weights="mmap") as engine:
        assert not engine.gpu()["info"]["pinned"]
        for policy in ("ondemand", "fate", "adaptsched"):
            engine.set_policy(policy)
            assert same(engine_run(engine), on_cpu(plans, plan)), policy


@pytest.mark.parametrize("policy", ["adaptsched", "fate", "lru"])
def test_wall_clock(plans: PlanStore, mock: Mock, policy: str) -> None:
    """The same with the driver's own threads, which come and go as they like."""
    plan = gpu_plan(plans, "shared", "bf16", "few", "lru")
    mock.reset("clock=wall; h2d=1GB/s; kernel.*.base=5us")
    with loaded(plan, policy=policy) as engine:
        for _ in range(3):
            assert same(engine_run(engine), on_cpu(plans, plan))


@pytest.mark.parametrize("clock", ["virtual", "wall"])
def test_sessions_of_several_threads(plans: PlanStore, mock: Mock, clock: str) -> None:
    """Sessions of one engine run side by side, each with what it would have alone."""
    plan = gpu_plan(plans, "qwen", "bf16", "few", "lru")
    expected = [on_cpu(plans, plan, seed) for seed in range(3)]
    mock.reset(f"clock={clock}; h2d=2GB/s; kernel.*.base=3us")
    failed: list[int] = []

    def work(engine: Engine, seed: int) -> None:
        if not same(engine_run(engine, seed), expected[seed]):
            failed.append(seed)

    with loaded(with_room(plan, 2), policy="fate") as engine:
        threads = [threading.Thread(target=work, args=(engine, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.gpu()["link"]["wasted_bytes"] > 0
    assert not failed


# --- predictions ---


def always(expert: int) -> Callable[[int, int, int, int], Any]:
    return lambda tokens, layers, k, experts: np.full((tokens, layers, k), expert % experts)


ADVERSARIES: dict[str, Callable[[int, int, int, int], Any]] = {
    "first": always(0),
    "last": always(-1),
    "random": lambda tokens, layers, k, experts: np.random.default_rng(0).integers(
        0, experts, (tokens, layers, k)
    ),
    "other-each-token": lambda tokens, layers, k, experts: (
        np.arange(tokens * layers * k).reshape(tokens, layers, k) % experts
    ),
}


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_adversarial_predictions(plans: PlanStore, mock: Mock, adversary: str) -> None:
    """Whatever a session is told to predict, the bits are the CPU plan's."""
    plan = gpu_plan(plans, "tiny-mixtral", "bf16", "few", "lru")
    mock.reset(MOCKS["start"])
    with loaded(plan) as engine:
        model = engine.plan.model
        told = ADVERSARIES[adversary](512, model["layers"], model["top_k"], model["experts"])
        session = engine.session(max_seqs=4)
        session.set_predictions(told)
        for policy in ("fate", "pdscope-paper", "adaptsched"):
            engine.set_policy(policy)
            assert same(session_run(session), on_cpu(plans, plan)), policy
            if policy == "fate":
                assert engine.gpu()["link"]["wasted_bytes"] > 0
            session.reset()


def huge(net: Tensors) -> None:
    for tensor in net.values():
        tensor.mul_(1e30)


def no_numbers(net: Tensors) -> None:
    for tensor in net.values():
        tensor.fill_(float("nan"))


@pytest.mark.parametrize(
    "damage", [lambda net: None, huge, no_numbers], ids=["random", "huge", "nan"]
)
def test_predictors(
    plans: PlanStore, mock: Mock, tmp_path: Path, damage: Callable[[Tensors], None]
) -> None:
    """Nets that say nothing, or no numbers at all, change no bit."""
    plan = gpu_plan(plans, "tiny-mixtral", "bf16", "few", "lru")
    edited = with_predictors(plan, tmp_path / "plan", damage=damage)
    mock.reset(MOCKS["end"])
    with loaded(edited, policy="fate") as engine:
        assert engine.predictor()["state"] == "on"
        assert same(engine_run(engine), on_cpu(plans, plan))
        assert engine.gpu()["link"]["prefetches"] > 0


# --- taps and cancelling ---


def watched(engine: Engine, ids: list[int]) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []

    def look(event: TapEvent) -> None:
        if event.opcode in (Opcode.NORM, Opcode.ATTENTION, Opcode.MLP, Opcode.COMBINE, Opcode.GATE):
            ids = None if event.ids is None else event.ids.copy()
            assert event.data is not None
            seen.append((event.layer, event.opcode, event.arg, ids, event.data.copy()))

    with engine.session() as session, session.tap(look):
        session.prefill(ids)
        session.decode(1)
    return seen


def test_taps(plans: PlanStore, mock: Mock) -> None:
    """What a tap sees of each instruction is what it sees on the CPU, bit by bit."""
    plan = gpu_plan(plans, "shared", "bf16", "few", "lru")
    mock.reset(MOCKS["slow"])
    ids = random_ids(90, 40)
    with loaded(plan, device="cpu") as engine:
        expected = watched(engine, ids)
    with loaded(plan, policy="fate") as engine:
        found = watched(engine, ids)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a[:3] == b[:3]
        assert np.array_equal(a[4], b[4]), a[:3]
        assert (a[3] is None and b[3] is None) or np.array_equal(a[3], b[3])


def test_taps_see_predictions_that_pause(plans: PlanStore, mock: Mock) -> None:
    """A routing trace has what every layer would predict, for policies that pause elsewhere."""
    mock.reset(MOCKS["end"])
    found: list[list[int]] = []  # step by step, layer by layer

    def look(event: TapEvent) -> None:
        if event.opcode == Opcode.PREDICT:
            assert event.ids is not None
            found.append(event.ids[0].tolist())

    with loaded(gpu_plan(plans, "tiny-mixtral", "bf16", "few", "lru"), policy="fate") as engine:
        model = engine.plan.model
        told = ADVERSARIES["random"](24, model["layers"], model["top_k"], model["experts"])
        session = engine.session()
        session.set_predictions(told)
        with session.tap(look):
            for _ in told:
                session.decode(1)
        ledger = engine.ledger()
    assert all(one["pauses"] for one in ledger[1:])
    assert found == told[:, :-1].reshape(-1, model["top_k"]).tolist()


def cancelled_at(engine: Engine, ids: list[int], at: int) -> tuple[bool, list[Floats]]:
    """A session whose prefill is cancelled behind its at-th instruction, and goes on."""
    session = engine.session()
    count = 0

    def stop(_: TapEvent) -> None:
        nonlocal count
        count += 1
        if count == at:
            session.cancel()

    was = False
    found = [np.array(session.prefill(ids[:5]))]
    with session.tap(stop):
        try:
            session.prefill(ids[5:40])
        except Cancelled:
            was = True
    if was:
        assert session.length() == 5
        found.append(np.array(session.prefill(ids[5:40])))
    found.append(np.array(session.decode(ids[40])))
    session.close()
    return was, found


@pytest.mark.parametrize("timing", ["end", "slow"])
def test_cancel_anywhere(plans: PlanStore, mock: Mock, timing: str) -> None:
    """A step that is cancelled behind any of its instructions leaves nothing behind, neither in the
    sequence nor in slots and on the link."""
    plan = gpu_plan(plans, "shared", "bf16", "few", "lru")
    mock.reset(MOCKS[timing])
    ids = random_ids(90, 64, seed=3)
    with loaded(plan, device="cpu") as engine:
        _, expected = cancelled_at(engine, ids, 1)
    with loaded(plan, policy="fate") as engine:
        live = mock.counter("device_live")
        at, was = 1, True
        while was:
            was, found = cancelled_at(engine, ids, at)
            assert same(found, expected if was else [expected[0], expected[2]]), at
            at += 1
        assert at > 20
        assert mock.counter("device_live") == live


def test_measured_and_calibrated(plans: PlanStore, mock: Mock, tmp_path: Path) -> None:
    """Costs measured here beside those of a described GPU, and predictors trained: a compile runs
    the plan before there are programs for a GPU."""
    text = tmp_path / "text.txt"
    text.write_text("What should I eat for breakfast? Bread with butter, and an apple.\n" * 8)
    plan = plans.compile(
        model_of(plans, "tiny-mixtral"),
        dtype="fp32",  # costs are kept by dtype: others measure those of bf16
        max_context=CONTEXT,
        max_rows=64,
        gpu_mem="40MiB",
        gpu_reserve=0,
        costs="auto,h200-emr16",
        calibration=str(text),
        trace_records=64,
    )
    with loaded(plan, policy="pdscope-paper") as engine:
        assert engine.predictor()["state"] == "on"
        assert same(engine_run(engine), on_cpu(plans, plan))
