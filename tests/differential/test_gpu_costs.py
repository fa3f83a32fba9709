"""Costs of a GPU and of the link to it, measured on the mock driver: its settings come back.

Holds of the issue "AdaptSched and its lowering": "a pass that measures on the target: expert time
on CPU and on GPU by token count (1 to 4096, monotone piecewise fit with error bars), transfer time
per expert (alone, and while the CPU computes), I/O start-up, attention and gate per phase and
context length". The virtual clock says how long everything takes; tests/device has the real one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.gpu import Mock, loaded, mock, model_of
from support.plans import PlanStore

import pdscope
from pdscope.compiler import gpu_arch
from pdscope.compiler.build import simt_kernels
from pdscope.compiler.gpu_arch import Present
from pdscope.compiler.passes import profile_costs
from pdscope.compiler.passes.profile_gpu import GpuProfile
from pdscope.costs import CostTable, Curve
from pdscope.errors import TargetError
from pdscope.plan import Plan
from pdscope.plan_check import check_plan

__all__ = ["mock"]

EXPERTS = Curve((1, 64, 1024), (2_000, 20_000, 500_000))
SHARED = Curve((1, 512), (300, 40_000))
ATTEND = Curve((1, 512), (4_000, 300_000))
GATE, NORM, START, SHARED_START, EXTRA, IDLE = 600, 700, 9_000, 800, 5_000, 12_345
# h2d and d2h: a byte is a nanosecond.
SETTINGS = "; ".join(
    [
        f"kernel.experts.base={START}; kernel.experts.curve=1:2000,64:20000,1024:500000",
        f"kernel.shared.base={SHARED_START}; kernel.shared.curve=1:300,512:40000",
        f"kernel.attention.curve=1:4000,512:300000; kernel.attention.per_extra={EXTRA}",
        f"kernel.gate.base={GATE}; kernel.norm.base={NORM}; d2h=1GB/s; d2h_start=0; h2d=1GB/s",
        f"h2d_busy=500MB/s; h2d_start={IDLE}ns; host.cpu.experts.base=100ms",
    ]
)


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point, and as few samples as there may be; no table of another test."""
    monkeypatch.setattr(profile_costs, "SECONDS", 1e6)
    monkeypatch.setattr(profile_costs, "ROUNDS", profile_costs.LEAST)
    monkeypatch.setattr(profile_costs, "BUSY", 0)


def compiled(plans: PlanStore, name: str, out: Path, **options: Any) -> tuple[Plan, list[str]]:
    given = {"costs": "auto", "gpu_mem": "64MiB", "gpu_reserve": 0, "gpu_arch": "none"} | options
    result = pdscope.compile(model_of(plans, name), out, force=True, **given)
    return Plan.open(out, verify=True), list(result.notes)


def table_of(plan: Plan) -> CostTable:
    table = CostTable.of_plan(plan)
    assert table is not None
    return table


def context_row(rows: int, context: int) -> int:
    """Of the mock's attention: so much a 1024 tokens, rounded down, of all rows."""
    extra = sum(range(context, context + rows)) // 1024 - sum(range(rows)) // 1024
    return EXTRA * extra * 1024 // (rows * context)


@pytest.mark.parametrize(("name", "most"), [("tiny-mixtral", 1024), ("shared", 512)])
def test_settings_come_back(
    plans: PlanStore, mock: Mock, name: str, most: int, tmp_path: Path
) -> None:
    """To the tick, at token counts that were measured and at those between."""
    mock.reset(SETTINGS)
    plan, notes = compiled(plans, name, tmp_path / "p", dtype="bf16", max_context=most)
    table = table_of(plan)
    gpu, link = table.gpu, table.link
    assert gpu is not None and link is not None and table.source == "measured"
    assert table.machine.gpu and table.machine.link == "pinned memory to the GPU"
    assert gpu.start.ns == START and gpu.predict == table.cpu.predict
    for tokens in (1, 2, 3, 17, 64, 65, 500, 1000):
        assert abs(gpu.expert.curve.at(tokens) - EXPERTS.at(tokens)) <= 1, tokens
    for tokens, bar in gpu.expert.points:
        assert bar.min == bar.median == bar.max, tokens
    hidden, top_k = table.model.hidden, table.model.top_k
    copied = 2 * 4 * top_k + (2 + 4) * -(-hidden // 32) * 32  # routes; rows, and for the prediction
    for rows in (1, 2, 8, 77, 512):
        expected = 2 * NORM + GATE + ATTEND.at(rows) + rows * copied
        extra = EXTRA * (sum(range(rows)) // 1024)
        assert abs(gpu.attention.curve.at(rows) - expected - extra) <= max(2, EXTRA), rows
    context, _ = profile_costs.room(most, 512, plan.data["kv_block"])
    assert gpu.context_row.ns == context_row(1, context)
    assert gpu.context_row_prefill.ns == context_row(128, context)
    assert (gpu.shared is not None) == bool(table.model.shared_inter)
    for rows in (1, 3, 200, 512):
        if gpu.shared is not None:
            assert abs(gpu.shared.curve.at(rows) - SHARED_START - SHARED.at(rows)) <= 1
    expert = json.loads((plan.path / "memory.json").read_text())["gpu"]["expert_bytes"]
    assert (link.start.ns, link.expert_alone.ns, link.expert.ns) == (IDLE, expert, 2 * expert)
    # The mock's host takes as long beside its link.
    busy, expert_alone = table.cpu.expert_busy, table.cpu.expert.curve
    assert busy is not None and busy.curve == expert_alone
    assert check_plan(plan) == []
    assert not [note for note in notes if "no times of a GPU" in note or "not measured" in note]
    with loaded(plan) as engine:  # the costs that it was measured with place its experts
        engine.prefill([1, 2, 3])


def test_a_table_is_kept_by_gpu_driver_and_kernels(
    plans: PlanStore, mock: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another GPU, driver or set of kernels has another; the CPU's part serves all."""
    monkeypatch.setattr(profile_costs, "BUSY", 1e9)
    counts = {"cpu": 0, "gpu": 0}
    cpu, add = profile_costs.measure, GpuProfile.add

    def of_cpu(*arguments: Any) -> CostTable:
        counts["cpu"] += 1
        return cpu(*arguments)

    def of_gpu(self: GpuProfile, table: CostTable) -> CostTable:
        counts["gpu"] += 1
        return add(self, table)

    monkeypatch.setattr(profile_costs, "measure", of_cpu)
    monkeypatch.setattr(GpuProfile, "add", of_gpu)
    here = gpu_arch.present()
    assert here.name and here.architectures == ("sm_80",)
    monkeypatch.setenv("PDSCOPE_GPU_KERNELS", "")
    kept = profile_costs.ProfileCosts._cache
    own = tmp_path / "costs"
    monkeypatch.setattr(
        profile_costs.ProfileCosts, "_cache", lambda self, *key: own / kept(self, *key).name
    )
    options: dict[str, Any] = {"dtype": "int8", "max_context": 128, "max_rows": 16}

    def texts(found: Present) -> str:
        monkeypatch.setattr("pdscope.compiler.passes.profile_gpu.present", lambda: found)
        plan, _ = compiled(plans, "tiny-mixtral", tmp_path / "p", **options)
        return plan.read_text("costs.json")

    mock.reset(SETTINGS)
    first = texts(here)
    assert counts == {"cpu": 1, "gpu": 1}
    mock.reset(SETTINGS.replace(f"h2d_start={IDLE}", "h2d_start=1"))
    assert texts(here) == first and counts == {"cpu": 1, "gpu": 1}
    assert texts(Present(here.architectures, (13, 1), here.name)) != first
    assert texts(Present(here.architectures, here.cuda, "another")) != first
    assert counts == {"cpu": 1, "gpu": 3}


def test_no_gpu_is_the_error_that_it_was(
    plans: PlanStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` alone, of a plan for a GPU: the remedy names auto,NAME; with it the plan is made."""
    monkeypatch.setenv("PDSCOPE_CUDA_DRIVER", str(tmp_path / "none.so"))
    options: dict[str, Any] = {"max_context": 128, "max_rows": 16}
    with pytest.raises(TargetError, match="found no GPU to measure.*auto,NAME.*h200-emr16"):
        compiled(plans, "tiny-mixtral", tmp_path / "p", **options)
    plan, _ = compiled(plans, "tiny-mixtral", tmp_path / "p", costs="auto,h200-emr16", **options)
    assert table_of(plan).source == "measured; GPU and link: hardware description h200-emr16"


def test_what_is_measured_wins(plans: PlanStore, mock: Mock, tmp_path: Path) -> None:
    mock.reset(SETTINGS)
    options: dict[str, Any] = {"max_context": 128, "max_rows": 16, "costs": "auto,h200-emr16"}
    plan, _ = compiled(plans, "tiny-mixtral", tmp_path / "p", **options)
    table = table_of(plan)
    assert table.source == "measured" and table.gpu is not None and table.gpu.start.ns == START


def test_a_gpu_that_cannot_run_the_plan_is_told(
    plans: PlanStore, mock: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that no driver takes: a note, and the description's times."""
    image = tmp_path / "kernels.cubin"
    image.write_bytes(b"\0" * 64)
    monkeypatch.setenv("PDSCOPE_GPU_KERNELS", str(image))
    options: dict[str, Any] = {"max_context": 128, "max_rows": 16, "costs": "auto,h200-emr16"}
    plan, notes = compiled(plans, "tiny-mixtral", tmp_path / "p", **options)
    assert "hardware description h200-emr16" in table_of(plan).source
    (note,) = [note for note in notes if "the GPU was not measured" in note]
    assert "no kernels for compute capability" in note and "\n" not in note


def test_a_budget_without_slots_is_measured_all_the_same(
    plans: PlanStore, mock: Mock, tmp_path: Path
) -> None:
    """Two slots are taken for as long as it lasts; the plan has none."""
    mock.reset(SETTINGS)
    options: dict[str, Any] = {"max_context": 128, "max_rows": 16}
    plan, _ = compiled(plans, "tiny-mixtral", tmp_path / "p", **options)
    table = json.loads((plan.path / "memory.json").read_text())["gpu"]
    least = table["weight_bytes"] + table["session"]["total_bytes"]
    plan, _ = compiled(plans, "tiny-mixtral", tmp_path / "p", gpu_mem=least, **options)
    assert plan.gpu is not None and plan.gpu["resident"] == plan.gpu["ring"] == 0
    found = table_of(plan).gpu
    assert found is not None and found.start.ns == START
    assert abs(found.expert.curve.at(8) - EXPERTS.at(8)) <= 1


def test_through_the_gpus_own_kernels(
    plans: PlanStore, mock: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator runs them: two launches of experts, or of the shared one; and attention's."""
    image = tmp_path / "kernels"
    image.write_text(f"PDSTWIN-LIBRARY {simt_kernels()}\n", encoding="utf-8")
    monkeypatch.setenv("PDSCOPE_GPU_KERNELS", str(image))
    mock.reset("kernel.*.base=1us; h2d=1GB/s; d2h=1GB/s; d2h_start=0")
    options: dict[str, Any] = {"dtype": "fp32", "max_context": 64, "max_rows": 1}
    plan, notes = compiled(plans, "shared", tmp_path / "p", **options)
    table = table_of(plan)
    assert table.gpu is not None and not [note for note in notes if "not measured" in note]
    assert table.gpu.shared is not None and table.gpu.shared.curve.at(1) == 2_000
    assert 1_998 <= table.gpu.start.ns <= 2_000 and table.gpu.attention.curve.at(1) > 7_000
