"""Kill a compile, run it again, move what it made: the plan is the same, byte for byte.

Holds: "deterministic: same inputs, same bytes; written aside and renamed; a killed compile leaves
no plan and resumes from cached passes; relocatable", "plan.json has a JSON schema in the repo and
is checked against it" and "Resume: killed at every pass boundary, the next run shows the earlier
passes as cache hits in `--json` and gives the same bytes".
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from support.assets import BUNDLED, ROOT
from support.commands import run_command, run_here
from support.damage import edit_json
from support.plans import PlanStore
from support.runs import prefill_all

import pdscope
from pdscope.compiler.passmanager import PassResult

MODEL = BUNDLED / "tiny-mixtral"

# Compiles MODEL to OUT in a child process for each NAME, and kills it right after that pass.
KILLER = r"""
import os, signal, sys
import pdscope.compiler.driver as driver
import torch, transformers
model, out, *names = sys.argv[1:]
for name in names:
    if os.fork() == 0:
        def after(result, name=name):
            if result.name == name:
                os.kill(os.getpid(), signal.SIGKILL)
        driver.compile_model(model, f"{out}/{name.replace('/', '_')}/plan", after_pass=after)
        os._exit(0)
    status = os.wait()[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (name, status)
"""


def contents(plan: Path) -> dict[str, str]:
    """Every file of a directory with the hash of its bytes, and its permissions."""
    return {
        str(f.relative_to(plan)): hashlib.sha256(f.read_bytes()).hexdigest() + oct(f.stat().st_mode)
        for f in sorted(plan.rglob("*"))
        if f.is_file()
    }


@pytest.fixture(scope="module")
def whole(plans: PlanStore) -> Path:
    """A plan that was compiled without interruption."""
    return plans.compile(MODEL)


def compiled(out: Path) -> dict[str, Any]:
    """Compiles through the command; the JSON it prints."""
    ran = run_command("pdscope-compile", MODEL, "-o", out, "--json")
    assert ran.status == 0, ran.err
    return dict(json.loads(ran.out))


def test_killed_at_every_pass_boundary(whole: Path, tmp_path: Path) -> None:
    names = [p.name for p in pdscope.compile(MODEL, tmp_path / "names" / "plan").passes]
    assert len(names) > 10
    subprocess.run([sys.executable, "-c", KILLER, MODEL, tmp_path, *names], check=True)
    expected = contents(whole)
    for index, name in enumerate(names):
        out = tmp_path / name.replace("/", "_") / "plan"
        assert not out.exists(), f"killed after {name}, and there is a plan"
        if index == len(names) // 2:
            cached = {p["name"]: p["cached"] for p in compiled(out)["passes"]}
        else:
            cached = {p.name: p.cached for p in pdscope.compile(MODEL, out).passes}
        assert list(cached) == names
        assert [n for n in names if cached[n]] == names[: index + 1], f"killed after {name}"
        assert contents(out) == expected, f"killed after {name}"
        assert sorted(p.name for p in out.parent.iterdir()) == ["plan"], "something was left behind"


# Compiles MODEL to OUT again and again in child processes, each killed after so many seconds; says
# after each how it ended. What is imported is there from the first moment on.
KILLER_AT = r"""
import os, shutil, signal, sys, time
import pdscope.compiler.driver as driver
import torch, transformers
model, out, *moments = sys.argv[1:]
for moment in moments:
    child = os.fork()
    if child == 0:
        driver.compile_model(model, out)
        os._exit(0)
    time.sleep(float(moment))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) or os.path.exists(out)
    print("plan" if os.path.exists(out) else "none", flush=True)
    assert sys.stdin.readline()
"""


def test_killed_at_random_moments(whole: Path, tmp_path: Path) -> None:
    """SIGKILL between, and within, passes; the run after that finishes with the same bytes."""
    out = tmp_path / "plan"
    begin = time.monotonic()
    pdscope.compile(MODEL, tmp_path / "timed")
    whole_time = time.monotonic() - begin
    moments = np.random.default_rng(int(time.time())).uniform(0, 1.2 * whole_time, 6)
    command = [sys.executable, "-c", KILLER_AT, str(MODEL), str(out), *map(str, moments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as killer:
        assert killer.stdin and killer.stdout
        for moment in moments:
            assert killer.stdout.readline() in ("plan\n", "none\n"), moment
            if out.exists():
                assert contents(out) == contents(whole)
                shutil.rmtree(out)
            killer.stdin.write("next\n")
    assert killer.returncode == 0
    pdscope.compile(MODEL, out)
    assert contents(out) == contents(whole)


def test_configuration_changed_between_kill_and_resume(tmp_path: Path) -> None:
    """Packed weights of another config.json are not taken over; dummy weights depend on its depth
    alone, so the files look the same.
    """

    def interrupt(result: PassResult) -> None:
        if result.name == "emit":  # all weights are packed
            raise KeyboardInterrupt

    model, out = Path(shutil.copytree(MODEL, tmp_path / "model")), tmp_path / "plan"
    with pytest.raises(KeyboardInterrupt):
        pdscope.compile(model, out, load_format="dummy", after_pass=interrupt)
    edit_json(model / "config.json", lambda config: config.update(num_hidden_layers=2))
    pdscope.compile(model, out, load_format="dummy")
    pdscope.compile(model, tmp_path / "fresh", load_format="dummy")
    assert contents(out) == contents(tmp_path / "fresh")


def test_same_inputs_same_bytes(whole: Path, tmp_path: Path) -> None:
    """Another output directory, copy of the model, cache, working directory and hash seed."""
    copy = tmp_path / "elsewhere" / MODEL.name
    shutil.copytree(MODEL, copy)
    env = os.environ | {"PDSCOPE_CACHE": str(tmp_path / "cache"), "PYTHONHASHSEED": "123"}
    out = tmp_path / "deep" / "er" / "out"
    ran = run_command("pdscope-compile", copy, "-o", out, env=env, cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert contents(out) == contents(whole)


def test_relocatable(whole: Path, tmp_path: Path) -> None:
    """A moved plan runs and gives the same bits; no file of it holds the path it was made at."""
    moved = tmp_path / "moved here"
    shutil.copytree(whole, moved)
    places = [str(p).encode() for p in (whole, MODEL, ROOT / "runtime_c", Path.home() / ".cache")]
    for file in moved.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            assert not [p for p in places if p in data], f"{file.name} holds an absolute path"
    with pdscope.load(whole, threads=1) as one, pdscope.load(moved, threads=1) as other:
        ids = list(range(40))
        assert prefill_all(one, ids).tobytes() == prefill_all(other, ids).tobytes()
    assert run_command("pdscope-inspect", moved, "--verify").status == 0


def test_manifest_follows_its_schema(whole: Path) -> None:
    schema = json.loads((Path(pdscope.__file__).parent / "plan_schema.json").read_text())
    manifest = json.loads((whole / "plan.json").read_text())
    jsonschema.validate(manifest, schema)
    listed = {name for name in contents(whole) if name != "plan.json"}
    assert set(manifest["files"]) == listed
    for name, entry in manifest["files"].items():
        assert entry["bytes"] == (whole / name).stat().st_size


def test_force_replaces_a_plan(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    pdscope.compile(MODEL, out, dtype="fp32", max_context=64)
    ran = run_command("pdscope-compile", MODEL, "-o", out, "--force")
    assert ran.status == 0, ran.err
    assert contents(out) == contents(whole)


def test_output_that_is_a_link(whole: Path, tmp_path: Path) -> None:
    """The plan goes where the link points, and the link stays; also when it replaces a plan."""
    (tmp_path / "disk").mkdir()
    link = tmp_path / "plan"
    link.symlink_to("disk/plan")
    for more in ((), ("--force",)):
        ran = run_here("pdscope-compile", MODEL, "-o", link, *more)
        assert ran.status == 0, ran.err
        assert link.is_symlink() and contents(tmp_path / "disk" / "plan") == contents(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "plan"]
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["plan"]


def test_summary_counts_in_words_that_fit() -> None:
    """Holds: "a summary at the end". Small models are counted in millions."""
    ran = run_here("pdscope-compile", MODEL, "--dry-run")
    assert ran.status == 0 and "MixtralForCausalLM, 3.7 M parameters, " in ran.out
