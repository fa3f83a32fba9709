"""Speed of one Qwen3 layer's experts against this machine's ceilings, measured by the benchmark.

Holds of the issue "CPU expert kernels": on the 16-core AMX machine "decode experts >= 90 % of the
read ceiling; prefill of 2048 tokens through one Qwen3 layer's experts takes at most 1/0.6 of
max(weight bytes / read ceiling, FLOP / AMX peak)". Medians over rounds of the ratio to the ceilings
measured around each: what the machine's other tenants take moves both. No timed test runs in
`make test`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from support import cc
from support.assets import ROOT

pytestmark = pytest.mark.device

DECODE, PREFILL = (1, 4, 16), 2048


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `cpu_experts.py --json` prints, with its table as "text". Its plan, of some GB, is not
    kept."""
    out: Path = tmp_path_factory.mktemp("report") / "experts.md"
    tokens = ",".join(map(str, (*DECODE, PREFILL)))
    command = [sys.executable, str(ROOT / "benchmarks" / "cpu_experts.py"), "--json"]
    command += ["--models", "qwen3", "--dtypes", "bf16", "--tokens", tokens]
    command += ["--rounds", "9", "--no-peers", "--out", str(out)]
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"PDSCOPE_CACHE": cache}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"text": out.read_text()}


def row(report: dict[str, Any], tokens: int) -> dict[str, Any]:
    (found,) = (r for r in report["rows"] if r["tokens"] == tokens)
    return dict(found)


@pytest.mark.parametrize("tokens", DECODE)
def test_decode_experts_read_at_the_ceiling(report: dict[str, Any], tokens: int) -> None:
    """1 to 16 rows: 90 % of the rate at which all cores read memory."""
    share = row(report, tokens)["read_rounds"]["median"]
    assert share >= 0.9, f"{share:.0%} of the read ceiling\n{report['text']}"


@pytest.mark.skipif(not cc.runnable("amx"), reason="needs a CPU with AMX")
def test_prefill_experts_near_the_limit(report: dict[str, Any]) -> None:
    """2048 rows through a layer: 60 % of what the slower of memory and AMX allows."""
    share = row(report, PREFILL)["limit_rounds"]["median"]
    assert share >= 0.6, f"{share:.0%} of the limit\n{report['text']}"
