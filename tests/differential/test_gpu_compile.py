"""A compile for a GPU with all that it rests on: traces and costs are taken on the CPU, whatever
the machine has, before the GPU's programs exist.

Holds: "which experts are resident ..., by expected time saved"; "a pass that measures on the
target"; "drafts from PhasePer's confidently hot and cold experts".
"""

import json
from pathlib import Path

import numpy as np
import pytest
from support.assets import BUNDLED
from support.commands import run_here

from pdscope.compiler.phaseper import calibration
from pdscope.placement import draft_thresholds, hit_rates, popularity_of
from pdscope.plan import Plan

pytestmark = pytest.mark.verify  # a training; test_gpu_plans.py has a shorter one for every run


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("gpu")
    chats = folder / "chats.jsonl"
    with chats.open("w") as out:
        for number in range(12):
            messages = [
                {"role": "user", "content": calibration.PROMPTS[number]},
                {"role": "assistant", "content": " ".join(calibration.PROMPTS[number:][:8])},
            ]
            out.write(json.dumps({"messages": messages}) + "\n")
    said = run_here(
        *("pdscope-compile", BUNDLED / "tiny-mixtral", "-o", folder / "p"),
        *("--gpu-mem", "34MB", "--gpu-reserve", 0, "--costs", "auto,h200-emr16"),
        *("--dtype", "fp32"),  # costs are kept by dtype: others measure those of bf16
        *("--max-context", 512, "--calibration", chats, "--trace-records", 200),
        *("--predictor-device", "cpu"),
    )
    assert said.status == 0, said.err
    assert "stay there" in said.out and "GPU memory" in said.out
    return Plan.open(folder / "p", verify=True)


def test_hot_experts_follow_the_traces(plan: Plan) -> None:
    record = json.loads(plan.read_text("hot_experts.json"))
    assert record["source"] == "traces"
    shares = [np.array(layer["popularity"]) for layer in record["layers"]]
    assert all(abs(s.sum() - 2) < 1e-4 for s in shares)  # top-2
    assert plan.gpu is not None
    assert sum(len(layer["resident"]) for layer in record["layers"]) == plan.gpu["resident"] > 0
    assert sum(len(layer["first"]) for layer in record["layers"]) == plan.gpu["ring"] > 0
    assert not any({*layer["resident"]} & {*layer["first"]} for layer in record["layers"])
    # Uniform routing would spread them evenly. (What is best by which costs: test_hot_experts.py.)
    placed = [len(layer["resident"]) + len(layer["first"]) for layer in record["layers"]]
    assert max(placed) > min(placed) + 1


def test_decisions_know_predictors_and_costs(plan: Plan) -> None:
    """Hit rates of phaseper.json, thresholds of its nets, shares of 1/65536, costs measured here
    beside a described GPU's."""
    entries = json.loads(plan.read_text("phaseper.json"))["layers"]
    hits, sure = hit_rates(plan), draft_thresholds(plan)
    for entry in entries:
        column = 2 if entry["phase"] == "prefill" else 0
        assert hits[entry["next"], column] == round(entry["hit"] * 65536)
        assert (sure[entry["next"], column] > 0) == (entry["chosen"] == "phaseper")
    assert popularity_of(plan).sum(1).tolist() == pytest.approx([2 * 65536] * 6, rel=1e-3)
    costs = json.loads(plan.read_text("costs.json"))
    assert "gpu" in costs and "link" in costs and costs["cpu"]


def test_programs_of_both_kinds(plan: Plan) -> None:
    """The CPU's are there for a machine without a GPU."""
    for name in ("program.bin", "program.gpu.bin", "programs/layer002.decode.plan"):
        assert name in plan.files
    assert plan.program_file(2, "decode") == "programs/gpu/layer002.decode.plan"
    assert "q=gpu0" in plan.read_text(plan.program_file(2, "decode"))


def test_no_absolute_path(plan: Plan) -> None:
    for name in ("hot_experts.json", "costs.json"):
        assert str(Path.home()) not in plan.read_text(name)
