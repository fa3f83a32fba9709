"""The online learner on a trained plan that goes from chats to code.

Holds: "Domain shift from chat to code (generate it from the standard library's sources) triggers
the learner, and the error falls below the threshold within 10 triggers". Not timed: the learner
looks after each step, as benchmarks/predictor_shift.py has it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.assets import asset, model_path
from support.plans import PlanStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.verify
@pytest.mark.parametrize("modules", ["shift", "other"])
def test_code_behind_chats_is_learned(plans: PlanStore, modules: str) -> None:
    """And chats cost nothing: the error there stays what the plan's nets have, also behind code."""
    calibration = str(asset("data/calibration_chat.jsonl"))
    plan = plans.compile(model_path("tiny-qwen3-moe"), calibration=calibration)
    command = [sys.executable, str(ROOT / "benchmarks" / "predictor_shift.py"), str(plan), "--json"]
    command += ["--chats", str(asset("data/heldout_chat.jsonl")), "--modules", modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    end, parts = found["fallen"], found["parts"]
    assert 0 < end["threshold"] < 0.25
    assert end["triggers"] is not None and 1 <= end["triggers"] <= 10, end
    assert end["served"] < end["threshold"] < end["loaded"], end
    code = [p for p in parts if p["text"] == "code"]
    chats = [p for p in parts if p["text"] == "chats"]
    for of, least in ((code, 0.05), (chats, -0.02)):
        loaded = sum(p["input_loaded"] for p in of)
        served = sum(p["input_served"] for p in of)
        assert served < (1 - least) * loaded, (of[0]["text"], loaded, served)
