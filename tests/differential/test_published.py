"""The published configurations compile to programs without weights, fast.

Holds: "The published configurations of Mixtral-8x7B, Qwen3-30B-A3B, DeepSeek-V2-Lite and
Moonlight-16B-A3B trace to programs with `--load-format dummy --dry-run` in under 20 s each".
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.published_configs import PUBLISHED, published

# What the checkpoints hold, from the models' own weight counts.
PARAMETERS = {
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen3-30B-A3B": 30_532_122_624,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "Moonlight-16B-A3B": 15_960_110_208,
}
COMPILE = [sys.executable, "-m", "pdscope.cli.compile"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_dry_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published(name)))
    options = ["--load-format", "dummy", "--dry-run", "--json"]
    began = time.perf_counter()
    done = subprocess.run([*COMPILE, str(tmp_path), *options], capture_output=True, text=True)
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    print(f"{name}: {seconds:.1f} s")
    assert seconds < 20
    assert list(tmp_path.iterdir()) == [tmp_path / "config.json"]
    summary = json.loads(done.stdout)
    text = json.dumps(summary)
    assert str(PARAMETERS[name]) in text
    layers = PUBLISHED[name]["num_hidden_layers"]
    assert json.loads(text)["plan"]["programs"]["count"] == 3 * (layers + 2)
