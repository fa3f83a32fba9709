"""pdscope-inspect on real plans of the bundled model.

Holds the issue's point 2 (summary; --layer, --graph, --memory, --verify, --diff, --json).
"""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.assets import model_path
from support.damage import edit_plan
from support.plans import PlanStore

from pdscope.cli import inspect
from pdscope.ir.text import parse_programs, print_program
from pdscope.plan import Plan
from pdscope.schema import check_full

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Path:
    return plans.compile(model_path("tiny-mixtral"))


@pytest.fixture
def copied(plan: Path, tmp_path: Path) -> Path:
    target = tmp_path / "plan"
    shutil.copytree(plan, target)
    return target


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as caught:
            inspect.main.main(list(map(str, args)))
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return run


def refresh(plan: Path, name: str) -> None:
    """plan.json gets the size and hash of a changed file: an editor who covers the tracks."""
    import hashlib

    data = (plan / name).read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_plan(plan, lambda d: d["files"].update({name: entry}))


def test_compiled_plan_keeps_the_schema(plan: Path) -> None:
    check_full(json.loads((plan / "plan.json").read_text(encoding="utf-8")))


def test_summary(call: Call, plan: Path) -> None:
    status, out, _ = call(plan)
    assert status == 0
    for word in (
        "MixtralForCausalLM",
        "8 experts, top 2",
        "on the CPU",
        "plan hash",
        "context 1024",
    ):
        assert word in out
    status, out, _ = call(plan, "--json")
    report = json.loads(out)
    assert report["model"]["experts"] == 8 and report["total_bytes"] > 0


@pytest.mark.parametrize("phase", ["decode", "batch", "prefill"])
@pytest.mark.parametrize("layer", ["0", "5", "prologue", "epilogue"])
def test_layer_prints_its_program(call: Call, plan: Path, layer: str, phase: str) -> None:
    status, out, _ = call(plan, "--layer", layer, "--phase", phase)
    assert status == 0
    (program,) = parse_programs(out)
    assert print_program(program) == out
    assert program.phase.name.lower() == phase
    status, out, _ = call(plan, "--layer", layer, "--phase", phase, "--json")
    assert json.loads(out)["file"].endswith(f".{phase}.plan")


def test_layer_out_of_range(call: Call, plan: Path) -> None:
    status, _, err = call(plan, "--layer", "6")
    assert status == 1 and "layers are 0 to 5" in err
    status, _, err = call(plan, "--layer", "x")
    assert status == 2
    status, _, err = call(plan, "--layer", "1", "--graph")
    assert status == 2 and "Give one of" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--phase", "decode"), "--phase needs --layer"),
        (("--graph", "--phase", "prefill"), "--phase needs --layer"),
        (("--graph", "--memory"), "Give one of"),
        (("--memory", "--verify"), "Give one of"),
        (("--verify", "--graph"), "Give one of"),
        (("--verify", "--diff", "other"), "Give one of"),
    ],
)
def test_one_view_at_a_time(call: Call, plan: Path, options: tuple[str, ...], message: str) -> None:
    """Holds: exit status 2 for wrong usage."""
    status, out, err = call(plan, *options)
    assert status == 2 and message in err and not out


def test_empty_path(call: Call, plan: Path) -> None:
    """Not the current directory, which pathlib takes it for."""
    for options, name in ((("",), "PLAN"), ((plan, "--diff", ""), "--diff")):
        status, out, err = call(*options)
        assert (status, out) == (1, "")
        assert err == f"error: '{name}' has an empty name; expected a path\n"


def test_graph_and_memory(call: Call, plan: Path) -> None:
    status, out, _ = call(plan, "--graph")
    assert status == 0 and out == (plan / "graph.txt").read_text()
    status, out, _ = call(plan, "--memory")
    assert status == 0 and "session.total_bytes" in out and "MiB" in out
    status, out, _ = call(plan, "--memory", "--json")
    assert json.loads(out) == Plan.open(plan).memory_table()


def test_verify_accepts_a_sound_plan(call: Call, plan: Path) -> None:
    status, out, err = call(plan, "--verify")
    assert status == 0 and out.startswith("ok: ") and not err
    status, out, _ = call(plan, "--verify", "--json")
    assert json.loads(out)["ok"] is True


def test_verify_notes_foreign_files(call: Call, copied: Path) -> None:
    (copied / "notes.txt").write_text("mine")
    status, _, err = call(copied, "--verify")
    assert status == 0 and "notes.txt is not part of the plan" in err


def test_verify_names_every_damaged_file(call: Call, copied: Path) -> None:
    for name in ("weights/layer003.bin", "src/plan.c"):
        data = bytearray((copied / name).read_bytes())
        data[-1] ^= 1
        (copied / name).write_bytes(data)
    status, _, err = call(copied, "--verify")
    assert status == 1 and "layer003.bin: SHA-256" in err and "plan.c: SHA-256" in err
    status, out, _ = call(copied, "--verify", "--json")
    assert status == 1 and len(json.loads(out)["problems"]) == 2


def test_verify_runs_the_rules(call: Call, copied: Path) -> None:
    """A program edited against a rule, with the file's hash put right."""
    name = "programs/layer002.decode.plan"
    text = (copied / name).read_text()
    assert "wait(@5)" in text
    (copied / name).write_text(text.replace("wait(@5)", "wait(@4)"))
    refresh(copied, name)
    status, _, err = call(copied, "--verify")
    assert status == 1 and "V" in err and "l2.decode" in err


def test_verify_compares_text_and_binary(call: Call, copied: Path) -> None:
    name = "programs/layer002.decode.plan"
    text = (copied / name).read_text()
    (copied / name).write_text(text.replace("wait(@1)", "wait(@0, @1)"))
    refresh(copied, name)
    status, _, err = call(copied, "--verify")
    assert (
        status == 1 and "program.bin: l2.decode differs from programs/layer002.decode.plan" in err
    )


def test_verify_of_a_damaged_program_bin(call: Call, copied: Path) -> None:
    data = bytearray((copied / "program.bin").read_bytes())
    data[200] ^= 0xFF
    (copied / "program.bin").write_bytes(data)
    refresh(copied, "program.bin")
    status, _, err = call(copied, "--verify")
    assert status == 1 and err.startswith("error: ") and "Traceback" not in err


def test_verify_of_a_program_that_is_gone(call: Call, copied: Path) -> None:
    (copied / "programs" / "epilogue.batch.plan").unlink()
    edit_plan(copied, lambda d: d["files"].pop("programs/epilogue.batch.plan"))
    status, _, err = call(copied, "--verify")
    assert status == 1 and len(err.strip().splitlines()) == 1


def test_verify_of_edited_counts(call: Call, copied: Path) -> None:
    edit_plan(copied, lambda d: d["programs"].update(count=7))
    status, _, err = call(copied, "--verify")
    assert status == 1 and "programs: count: 7 is not 24" in err


def test_diff(call: Call, plan: Path, plans: PlanStore) -> None:
    status, out, _ = call(plan, "--diff", plan)
    assert status == 0 and out == "the plans are the same\n"
    other = plans.compile(model_path("tiny-mixtral"), max_context=128, dtype="fp32")
    status, out, _ = call(plan, "--diff", other)
    assert status == 0
    assert '  dtype: "bf16" -> "fp32"' in out and "  max_context: 1024 -> 128" in out
    assert "memory.json" in out and "weights/embed.bin: " in out
    assert "rows = 17-128" in out and "--- a/programs/layer000.prefill.plan" in out
    status, out, _ = call(plan, "--diff", other, "--json")
    report = json.loads(out)
    assert report["same"] is False
    assert {"name": "dtype", "old": "bf16", "new": "fp32"} in report["fields"]
    status, _, err = call(plan, "--diff", plan / "none")
    assert status == 1 and "no such directory" in err


def test_verify_compares_plan_json_with_the_rest(call: Call, copied: Path) -> None:
    edit_plan(copied, lambda d: d["model"].update(hidden=d["model"]["hidden"] + 1))
    status, _, err = call(copied, "--verify")
    assert status == 1 and "model: hidden" in err and "the plan was edited" in err
