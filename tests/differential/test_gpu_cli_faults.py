"""Faults of GPU plans and of what they run on, on the command line: one line that names the cause
and the remedy, status 1, no traceback.

Holds: "ends in a clear error or a documented fallback"; "`--gpu-mem` ... A budget that cannot hold
the non-expert part is refused"; "`--policy adaptsched|static|...`"; and of all inputs, "Bad input,
each with a clear error and a test ... a plan cut short, edited".
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import Ran, run_here
from support.damage import cut, edit_json, edit_plan, flip
from support.gpu import Mock, gpu_plan, mock, model_of
from support.plans import PlanStore

__all__ = ["mock"]


@pytest.fixture
def plan(plans: PlanStore, tmp_path: Path) -> Path:
    """A sound GPU plan, to be damaged."""
    source = gpu_plan(plans, "tiny-mixtral", "bf16", "few", "lru")
    return Path(shutil.copytree(source, tmp_path / "plan"))


@pytest.fixture
def model(plans: PlanStore) -> Path:
    return model_of(plans, "shared")


def run(plan: Path, *options: Any) -> Ran:
    return run_here("pdscope-run", plan, "--prompt", "Hi", "-n", "2", "-t", "2", *options)


# --- the device ---


def test_runs_on_the_mock(plan: Path, mock: Mock) -> None:
    """The same words on either device; --json says which one and why."""
    told = [json.loads(run(plan, "--device", d, "--json").out) for d in ("gpu", "cpu", "auto")]
    assert told[0]["text"] == told[1]["text"] == told[2]["text"]
    assert [t["gpu"]["device"] for t in told] == ["gpu", "cpu", "gpu"]
    assert told[0]["gpu"]["info"]["name"] == "PDScope mock GPU"
    assert told[1]["gpu"]["why"] == "asked for"


def test_gpu_of_a_cpu_plan(plans: PlanStore, model: Path, mock: Mock) -> None:
    line = run(plans.compile(model_of(plans, "tiny-mixtral")), "--device", "gpu").fault()
    assert "was compiled for the CPU alone: compile it with --gpu-mem" in line


NONSENSE: dict[str, tuple[str, str]] = {
    "missing": ("/nowhere/libcuda.so.1", "the CUDA driver cannot be loaded"),
    "no library": (__file__, "the CUDA driver cannot be loaded"),
    "another library": ("libm.so.6", "it is no CUDA driver"),
    "a folder": ("/", "the CUDA driver cannot be loaded"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_no_driver(plan: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """--device gpu fails; auto runs on the CPU, and says why."""
    path, text = NONSENSE[name]
    monkeypatch.setenv("PDSCOPE_CUDA_DRIVER", path)
    line = run(plan, "--device", "gpu").fault()
    assert path in line and text in line and "NVIDIA's driver" in line
    ran = run(plan, "--device", "auto", "--json")
    assert "note: running on the CPU: no GPU can be used" in ran.err
    assert "note:" not in run(plan, "--device", "cpu").err
    told = json.loads(ran.out)["gpu"]
    assert told["device"] == "cpu"
    assert told["why"].startswith("no GPU can be used: ") and text in told["why"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("devices=0", "CUDA_ERROR_NO_DEVICE"),
        ("driver=11080", "the driver is for CUDA 11.8, expected 12.0 or newer"),
    ],
)
def test_driver_without_a_gpu(plan: Path, mock: Mock, settings: str, text: str) -> None:
    mock.reset(settings)
    assert text in run(plan, "--device", "gpu").fault()
    assert text in json.loads(run(plan, "--json").out)["gpu"]["why"]


def test_too_small_a_gpu(plan: Path, mock: Mock) -> None:
    """A GPU with less memory than the plan was compiled for is no reason to run on the CPU in
    silence."""
    mock.reset("memory=8MiB")
    for device in ("gpu", "auto"):
        line = run(plan, "--device", device).fault()
        assert "GPU memory" in line and "of the 8.0 MiB allowed" in line


def test_fault_while_it_runs(plan: Path, mock: Mock) -> None:
    mock.reset("fail_launch=20")
    line = run(plan).fault()
    assert "CUDA_ERROR_LAUNCH_FAILED" in line and "run it on the CPU" in line


# --- policies and options ---


def test_unknown_policy(plan: Path, mock: Mock) -> None:
    ran = run(plan, "--policy", "fastest")
    assert ran.status == 2 and "'adaptsched'" in ran.err


def test_policy_of_the_library(plan: Path, mock: Mock) -> None:
    import pdscope
    from pdscope.errors import InputError

    with pytest.raises(InputError, match="policy is 'fastest', expected one of adaptsched, "):
        pdscope.load(plan, device="gpu", policy="fastest")
    with pdscope.load(plan, device="gpu") as engine:
        with pytest.raises(InputError, match="policy is '', expected one of"):
            engine.set_policy("")
    with pdscope.load(plan, device="cpu") as engine:
        with pytest.raises(InputError, match="the engine has no GPU"):
            engine.ledger()
        with pytest.raises(InputError, match="no GPU"):
            engine.set_policy("lru")


OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "no costs": (("--gpu-mem", "1GiB"), "--costs"),
    "costs of a CPU": (("--gpu-mem", "1GiB", "--costs", "auto"), "--costs"),
    "no such costs": (("--gpu-mem", "1GiB", "--costs", "h300"), "h300"),
    "no size": (("--gpu-mem", "much", "--costs", "h200-emr16"), "gpu_mem is 'much'"),
    "negative": (("--gpu-mem=-1", "--costs", "h200-emr16"), "gpu_mem is '-1'"),
    "zero": (("--gpu-mem", "0", "--costs", "h200-emr16"), "--gpu-mem"),
    "no reserve": (
        ("--gpu-mem", "1GiB", "--gpu-reserve", "x", "--costs", "h200-emr16"),
        "gpu_reserve is 'x'",
    ),
    "less than the reserve": (("--gpu-mem", "1MiB", "--costs", "h200-emr16"), "raise it to"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_compile_options(model: Path, tmp_path: Path, name: str) -> None:
    options, text = OPTIONS[name]
    line = run_here("pdscope-compile", model, "-o", tmp_path / "plan", *options).fault()
    assert text in line
    assert not (tmp_path / "plan").exists()


# --- damaged plans ---


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: data.pop(key)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "program.gpu.bin cut": lambda p: cut(p / "program.gpu.bin", 64),
    "program.gpu.bin flipped": lambda p: flip(p / "program.gpu.bin"),
    "program.gpu.bin empty": lambda p: (p / "program.gpu.bin").write_bytes(b""),
    "program.gpu.bin missing": lambda p: (p / "program.gpu.bin").unlink(),
    "program.gpu.bin of the CPU": lambda p: shutil.copy(p / "program.bin", p / "program.gpu.bin"),
    "costs.json cut": lambda p: cut(p / "costs.json", 20),
    "costs.json missing": lambda p: (p / "costs.json").unlink(),
    "costs.json without gpu": lambda p: edit_json(p / "costs.json", without("gpu")),
    "costs.json no object": lambda p: (p / "costs.json").write_text("[]"),
    "hot_experts.json cut": lambda p: cut(p / "hot_experts.json", 20),
    "hot_experts.json missing": lambda p: (p / "hot_experts.json").unlink(),
    "hot_experts.json without layers": lambda p: edit_json(
        p / "hot_experts.json", without("layers")
    ),
    "hot_experts.json of words": lambda p: edit_json(
        p / "hot_experts.json", lambda data: data["layers"][0].update(popularity=["a"])
    ),
    "hot_experts.json of no shares": lambda p: edit_json(
        p / "hot_experts.json", lambda data: data["layers"][0].update(popularity=[1e30, -1.0])
    ),
    "hot_experts.json of other experts": lambda p: edit_json(
        p / "hot_experts.json", lambda data: data["layers"][0].update(first=[-1])
    ),
    "hot_experts.json of another layer": lambda p: edit_json(
        p / "hot_experts.json", lambda data: data["layers"][0].update(layer=99)
    ),
}


def as_listed(plan: Path, file: str) -> None:
    """plan.json says what the file has become, so that only its contents are at fault."""
    from hashlib import sha256

    raw = (plan / file).read_bytes()
    record = {"bytes": len(raw), "sha256": sha256(raw).hexdigest()}
    edit_plan(plan, lambda data: data["files"].update({file: record}))


@pytest.mark.parametrize("listed", [False, True], ids=["", "listed"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged(plan: Path, mock: Mock, name: str, listed: bool) -> None:
    """Each file that a GPU plan adds: cut, edited, missing; also where plan.json goes with it."""
    DAMAGE[name](plan)
    file = name.split()[0]
    if listed and (plan / file).exists():
        as_listed(plan, file)
    ran = run(plan, "--device", "gpu")
    if ran.status == 0:  # sizes alone are checked at load; whoever asks is told
        assert not listed
        line = run_here("pdscope-inspect", plan, "--verify").fault()
    else:
        line = ran.fault()
    assert file in line or "lib/libpdscope.so" in line, line


@pytest.mark.parametrize("mem", ["x", -5, None, 0])
def test_edited_plan_json(plan: Path, mock: Mock, mem: Any) -> None:
    edit_plan(plan, lambda data: data["gpu"].update(mem=mem))
    line = run(plan, "--device", "gpu").fault()
    assert "plan.json" in line or "GPU memory" in line
