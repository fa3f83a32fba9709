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

import numpy as np
import pytest
from support.assets import BUNDLED
from support.commands import run_here
from support.damage import edit_plan
from support.plans import PlanStore
from support.runs import kind_plan, random_ids

import pdscope
from pdscope import hardware
from pdscope.compiler.passes import profile_costs
from pdscope.costs import CostTable
from pdscope.engine import Engine
from pdscope.errors import BudgetError, InputError, PlanError, TargetError
from pdscope.plan import Plan
from pdscope.plan_check import check_plan

MODEL = BUNDLED / "tiny-mixtral"


@pytest.fixture(scope="module", autouse=True)
def briefly() -> Any:
    """A measurement of each point at least, and no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_costs, "SECONDS", 0.0)
        patch.setattr(profile_costs, "BUSY", 1e9)
        yield


# --- Session.measure ---


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
        table = profile_costs.measure(engine, profile_key(engine), _silent())
        assert (table.cpu.shared is not None) == (kind in ("mla", "mla-groups"))
        assert session.length() == 19
        after = engine.decode(ids[-1])
        engine.reset()
        assert np.array_equal(before, engine.prefill(ids[:-1]))
        assert np.array_equal(after, engine.decode(ids[-1]))


def profile_key(engine: Engine) -> Any:
    from pdscope.compiler.costs import model_key
    from pdscope.compiler.passes.lower import Lower
    from pdscope.ir.graph_text import parse_graph

    plan = engine.plan
    graph = parse_graph(plan.read_text("graph.txt"))
    data = plan.data
    return model_key(Lower(data["dtype"], data["max_context"], data["predictor"]).run(graph))


def _silent() -> Any:
    from pdscope.compiler.source import Silent

    return Silent()


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


# --- pdscope-compile --costs ---


def compiled(out: Path, costs: str, **more: Any) -> tuple[Plan, list[str]]:
    result = pdscope_compile(out, costs=costs, **more)
    return Plan.open(out, verify=True), list(result.notes)


def pdscope_compile(out: Path, **options: Any) -> Any:
    from pdscope.compiler.driver import compile_model

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
    from pdscope import config

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
    from pdscope.compiler.cost_source import CostSource
    from pdscope.compiler.passes.profile_costs import ProfileCosts

    table = table_of(Plan.open(measured))

    def inputs(costs: str) -> Any:
        source = CostSource.parse(costs)
        return ProfileCosts(Plan.open(measured), table.model, source, "", _silent()).inputs()

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
