"""Measuring through a compiled plan, and `pdscope-compile --costs`: what it writes, and its faults.

Holds of the issue: "stored in `costs.json` with the machine's description; re-usable for another
plan on the same machine; `--costs FILE` takes another machine's table or a hardware description".
Nothing is timed: a measurement's result only has to be a time.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.assets import BUNDLED
from support.commands import run_here
from support.damage import edit_plan
from support.plans import PlanStore

import pdscope
from pdscope import config, hardware
from pdscope.compiler.cost_source import CostSource
from pdscope.compiler.driver import compile_model
from pdscope.compiler.passes import profile_costs
from pdscope.compiler.passes.profile_costs import ProfileCosts
from pdscope.compiler.source import Silent
from pdscope.costs import CostTable
from pdscope.errors import PlanError, TargetError
from pdscope.plan import Plan
from pdscope.plan_check import check_plan

MODEL = BUNDLED / "tiny-mixtral"


@pytest.fixture(scope="module", autouse=True)
def briefly() -> Any:
    """Every point, however slow this machine is, and as few samples as there may be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_costs, "SECONDS", 1e6)
        patch.setattr(profile_costs, "ROUNDS", profile_costs.LEAST)
        patch.setattr(profile_costs, "BUSY", 1e9)
        yield


def compiled(out: Path, costs: str, **more: Any) -> tuple[Plan, list[str]]:
    result = pdscope_compile(out, costs=costs, **more)
    return Plan.open(out, verify=True), list(result.notes)


def pdscope_compile(out: Path, **options: Any) -> Any:
    return compile_model(MODEL, out, force=True, **options)


def table_of(plan: Plan) -> CostTable:
    table = CostTable.of_plan(plan)
    assert table is not None
    return table


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("costs")
    compiled(folder / "p", "auto")
    return folder / "p"


def test_auto_measures_this_machine(measured: Path, plans: PlanStore) -> None:
    plan = Plan.open(measured)
    table = table_of(plan)
    assert table.source == "measured" and table.gpu is None and table.link is None
    assert table.machine.cpu == profile_costs.cpu_name()
    assert table.model.hidden == 128 and table.model.experts == 8
    assert table.cpu.expert.curve.tokens[-1] == 1024  # 512 rows x top-2
    assert table.cpu.predict is not None and table.cpu.shared is None
    assert check_plan(plan) == []
    assert (
        f"costs         measured: {table.machine.cpu}, "
        in run_here("pdscope-inspect", measured).out
    )
    without = Plan.open(plans.compile(MODEL))
    assert "costs.json" not in without.files and CostTable.of_plan(without) is None
    assert plan.plan_hash == without.plan_hash


def test_another_plan_uses_the_same_measurements(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same dimensions, on the same machine; steps of fewer rows too; not of another dtype,
    nor when the file in the cache is damaged."""
    calls = 0
    measure = profile_costs.measure

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return measure(*arguments)

    monkeypatch.setattr(profile_costs, "measure", counted)
    plan, _ = compiled(tmp_path / "p", "auto", max_context=64)
    assert calls == 0
    assert plan.read_text("costs.json") == (measured / "costs.json").read_text()
    compiled(tmp_path / "p", "auto", dtype="int8")
    assert calls == 1
    kept = {file: file.read_text() for file in (config.cache_dir() / "costs").glob("*/*.json")}
    for file in kept:
        file.write_text("{")
    compiled(tmp_path / "p", "auto", max_context=64)
    assert calls == 2
    for file, text in kept.items():
        file.write_text(text)


def test_gpu_and_link_come_from_a_description(measured: Path, tmp_path: Path) -> None:
    plan, notes = compiled(tmp_path / "p", "auto,a100-6230r")
    table, mine = table_of(plan), table_of(Plan.open(measured))
    assert table.cpu == mine.cpu and table.machine.gpu == "NVIDIA A100 PCIe 40GB"
    assert table.source == "measured; GPU and link: hardware description a100-6230r"
    assert table.costs("gpu").io_expert > 0
    assert not [note for note in notes if "costs.json" in note]
    _, notes = compiled(tmp_path / "q", "auto")
    assert [note for note in notes if "no times of a GPU" in note and "auto,NAME" in note]


def test_names_and_files(measured: Path, tmp_path: Path) -> None:
    """A shipped name; a description of one's own; another plan's table, with its error bars."""
    plan, _ = compiled(tmp_path / "p", "rtx3090-epyc7452")
    assert table_of(plan).source == "hardware description rtx3090-epyc7452"
    shutil.copyfile(hardware.file("v100-6230r"), tmp_path / "mine.json")
    plan, _ = compiled(tmp_path / "p", str(tmp_path / "mine.json"))
    assert table_of(plan).source == "hardware description mine"
    plan, _ = compiled(tmp_path / "p", str(measured / "costs.json"))
    assert plan.read_text("costs.json") == (measured / "costs.json").read_text()


def test_verify_reads_a_plans_costs(measured: Path, tmp_path: Path) -> None:
    """Costs of another model, and ones that do not ascend, in a plan whose hashes are right."""
    plan = Path(shutil.copytree(measured, tmp_path / "p"))
    data = json.loads((plan / "costs.json").read_text())

    def put(change: Callable[[dict[str, Any]], object]) -> list[str]:
        changed = json.loads(json.dumps(data))
        change(changed)
        raw = json.dumps(changed).encode()
        (plan / "costs.json").write_bytes(raw)
        entry = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        edit_plan(plan, lambda manifest: manifest["files"].update({"costs.json": entry}))
        return check_plan(Plan.open(plan))

    assert put(lambda d: None) == []
    (line,) = put(lambda d: d["model"].update(experts=9))
    assert "costs.json: model: experts is 9, expected 8" in line
    (line,) = put(lambda d: d["cpu"]["expert"]["ns"].reverse())
    assert "costs.json: cpu: expert: ns:" in line and "expected as much or more" in line


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        ("a100", "there is no such file, and no description of that name is shipped (a100-6230r,"),
        ("auto,", "names nothing; expected off, auto, a file"),
        (".", "is no file, and no description"),
        ("no.json", "no.json: there is no such file"),
    ],
)
def test_faults_of_the_option(tmp_path: Path, costs: str, said: str) -> None:
    line = run_here("pdscope-compile", MODEL, "-o", tmp_path / "p", "--costs", costs).fault()
    assert said in line and "expected off, auto, a file" in line
    assert not (tmp_path / "p").exists()


def test_faults_of_files(measured: Path, tmp_path: Path) -> None:
    """Told before the weights are read; also by a dry run."""
    good = json.loads((measured / "costs.json").read_text())
    file = tmp_path / "c.json"
    for content, said in (
        ("{", "not valid JSON"),
        ("[]", "kind: expected 'costs' or 'hardware'"),
        (json.dumps(good | {"kind": "cost"}), "kind: expected 'costs' or 'hardware'"),
        (json.dumps(good | {"cpu": {}}), "cpu: key 'start' is missing"),
        (
            json.dumps(good | {"model": good["model"] | {"hidden": 64}}),
            "hidden is 64, expected 128",
        ),
        (json.dumps({"kind": "hardware"}), "key 'format_version' is missing"),
    ):
        file.write_text(content)
        for more in ([], ["--dry-run"]):
            ran = run_here("pdscope-compile", MODEL, "-o", tmp_path / "p", "--costs", file, *more)
            line = ran.fault()
            assert str(file) in line and said in line
        assert not (tmp_path / "p").exists()


def test_auto_needs_this_machine_to_run_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when it is compiled for a CPU with more features."""

    def refuse(plan: Plan) -> None:
        raise TargetError("compiled for CPUs with amx_tile, which this CPU lacks")

    monkeypatch.setattr(Plan, "check_machine", refuse)
    for dry_run in (True, False):
        with pytest.raises(TargetError, match="costs: auto measures a run .*amx_tile.*hardware d"):
            pdscope_compile(tmp_path / "p", costs="auto", dry_run=dry_run)
    pdscope_compile(tmp_path / "p", costs="a100-6230r")


def test_what_is_given_decides_the_pass(measured: Path) -> None:
    """The pass is not run again for the same text, wherever it comes from."""
    table = table_of(Plan.open(measured))

    def inputs(costs: str) -> Any:
        source = CostSource.parse(costs)
        return ProfileCosts(Plan.open(measured), table.model, source, "", Silent()).inputs()

    assert inputs("a100-6230r") != inputs("v100-6230r") != inputs("auto")
    path = str(hardware.file("a100-6230r"))
    assert inputs("a100-6230r") == inputs(path)


def test_damaged_costs_stop_no_load(measured: Path, tmp_path: Path) -> None:
    """Sizes are checked at load; what is inside is read by those who decide with it."""
    plan = Path(shutil.copytree(measured, tmp_path / "p"))
    size = (plan / "costs.json").stat().st_size
    (plan / "costs.json").write_bytes(b"x" * size)
    with pdscope.load(plan, threads=1) as engine:
        with pytest.raises(PlanError, match="costs.json: not valid JSON"):
            CostTable.of_plan(engine.plan)
