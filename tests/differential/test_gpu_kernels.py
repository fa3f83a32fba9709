"""GPU kernels as part of a plan: compiled, listed, shown, checked, and no part of what a plan is.

Holds of the issue "The GPU runtime": "NVRTC at compile time ..., PTX for forward compatibility and
a cubin for the target", "`--gpu-arch` cross-compiles with no GPU present (in CI)". With a stand-in
for NVRTC where the compiler alone is meant, with the real one, if it is here, elsewhere.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.assets import BUNDLED
from support.commands import Ran, run_here
from support.damage import edit_plan
from support.gpu import Mock, mock
from support.nvrtc import fake_nvrtc, real_nvrtc
from support.plans import PlanStore

import pdscope
from pdscope import runtime_c
from pdscope.compiler import nvrtc
from pdscope.plan import Plan

__all__ = ["mock"]

MODEL = BUNDLED / "tiny-mixtral"
OPTIONS = {"dtype": "bf16", "max_context": 512, "gpu_reserve": 0, "costs": "h200-emr16"}
GPU = ("--gpu-mem", "29MB")


def compiled(out: Path, *options: Any) -> Ran:
    given = [x for name, value in OPTIONS.items() for x in (f"--{name.replace('_', '-')}", value)]
    return run_here("pdscope-compile", MODEL, "-o", out, *given, *options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSCOPE_NVRTC", str(fake_nvrtc("13.0.88", "9.0")))


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Path:
    """With a kernel for two architectures: all of them would take a minute."""
    real_nvrtc()
    files = runtime_c.gpu_kernel_files()
    small = {name: text for name, text in files.items() if not name.endswith(".cu")}
    small["one.cu"] = '#include "device.h"\nPDS_KERNEL(one, pds_cu_norm, 32) { *p->xn = p->eps; }\n'

    def make(out: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime_c, "gpu_kernel_files", lambda: small)
            pdscope.compile(MODEL, out, **OPTIONS, gpu_mem="29MB", gpu_arch="sm_80,sm_90")

    return plans.once("gpu-kernels", make)


def test_files_of_a_plan(plan: Path) -> None:
    """Listed with their hashes, sound, named by the summary."""
    opened = Plan.open(plan, verify=True)
    names = ["lib/kernels_sm_90.cubin", "lib/kernels_sm_80.cubin", "lib/kernels_compute_80.ptx"]
    assert list(opened.kernels) == names
    assert all(opened.files[name]["bytes"] for name in names)
    out = run_here("pdscope-inspect", plan).out
    assert re.search(r"^GPU kernels +sm_90, sm_80, compute_80$", out, re.MULTILINE)
    assert "ok: " in run_here("pdscope-inspect", plan, "--verify").out


def test_the_same_plan_without_them(plans: PlanStore, plan: Path) -> None:
    """Like the library, they are how a plan is built, not what it computes. A CPU's has none."""
    without = plans.compile(MODEL, **OPTIONS, gpu_mem="29MB", gpu_arch="none")
    one, other = Plan.open(plan), Plan.open(without)
    assert one.plan_hash == other.plan_hash
    assert {n: f for n, f in one.files.items() if n not in one.kernels} == other.files
    assert re.search(r"GPU kernels +none: ", run_here("pdscope-inspect", without).out)
    cpu = plans.compile(MODEL)
    assert not Plan.open(cpu).kernels and "GPU kernels" not in run_here("pdscope-inspect", cpu).out


def test_summary_and_passes(fake: None, tmp_path: Path) -> None:
    ran = compiled(tmp_path / "plan", *GPU, "--gpu-arch", "sm_90", "--json")
    assert ran.status == 0, ran.err
    report = json.loads(ran.out)
    assert "gpu-kernels" in [step["name"] for step in report["passes"]]
    assert {"lib/kernels_sm_90.cubin", "lib/kernels_compute_80.ptx"} < report["manifest"][
        "files"
    ].keys()
    out = compiled(tmp_path / "plan", *GPU, "--gpu-arch", "sm_90", "--force").out
    assert re.search(r"^GPU kernels +sm_90, compute_80$", out, re.MULTILINE)


def test_auto_is_for_the_gpu_here(fake: None, mock: Mock, tmp_path: Path) -> None:
    mock.reset("compute=90; driver=13000")
    ran = compiled(tmp_path / "plan", *GPU)
    assert ran.status == 0 and "driver here" not in ran.out
    assert len(Plan.open(tmp_path / "plan").kernels) == 2
    with pdscope.load(tmp_path / "plan", device="gpu") as engine:  # the mock's are its own
        assert engine.gpu()["device"] == "gpu"


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """auto: a plan without kernels, and one line that says so with the remedy; by name: an error.
    Before weights are read: a dry run says the same."""
    monkeypatch.delenv("PDSCOPE_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    for more in (("--dry-run",), ()):
        ran = compiled(tmp_path / "plan", *GPU, *more)
        assert ran.status == 0, ran.err
        (note,) = (line for line in ran.out.splitlines() if "NVRTC" in line)
        assert note.startswith("note: the plan has no kernels") and "pip install" in note
        line = compiled(tmp_path / "other", *GPU, "--gpu-arch", "sm_90", *more).fault()
        assert "--gpu-arch sm_90: no NVRTC was found" in line and "pip install" in line
        assert not (tmp_path / "other").exists()
    assert not Plan.open(tmp_path / "plan").kernels


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--gpu-arch", "sm_90"), "gpu_arch: sm_90 is of a GPU: give --gpu-mem"),
        ((*GPU, "--gpu-arch", "sm_75"), "gpu_arch: sm_75: GPU kernels need sm_80 or newer"),
        ((*GPU, "--gpu-arch", "hopper"), "expected auto, none, or architectures such as sm_90"),
        ((*GPU, "--gpu-arch", "sm_86"), "--gpu-arch sm_86: NVRTC 13.0.88 knows sm_80, sm_90"),
    ],
)
def test_options(fake: None, tmp_path: Path, options: tuple[str, ...], text: str) -> None:
    assert text in compiled(tmp_path / "plan", *options).fault()
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("lib/kernels_sm_80.cubin", b"nothing", "is no image of GPU kernels, not sm_80"),
        ("lib/kernels_sm_80.cubin", None, "is sm_90, not sm_80"),
        ("lib/kernels_compute_80.ptx", b"\x7fELF", "is no image of GPU kernels, not compute_80"),
        ("lib/kernels_compute_80.ptx", b".version 9.0\n.target sm_90\n", "is compute_90, not"),
        ("lib/kernels_compute_80.ptx", b"//" + b" \t" * 1000 + b"x", "is no image"),
    ],
)
def test_edited_images(
    plan: Path, tmp_path: Path, name: str, data: bytes | None, text: str
) -> None:
    """Where plan.json goes with it: --verify looks into the file."""
    from hashlib import sha256

    copy = Path(shutil.copytree(plan, tmp_path / "plan"))
    raw = data if data is not None else (copy / "lib" / "kernels_sm_90.cubin").read_bytes()
    (copy / name).write_bytes(raw)
    record = {"bytes": len(raw), "sha256": sha256(raw).hexdigest()}
    edit_plan(copy, lambda data: data["files"].update({name: record}))
    line = run_here("pdscope-inspect", copy, "--verify").fault()
    assert f"{name}: {text}" in line


def test_kernels_of_a_cpu_plan(plans: PlanStore, tmp_path: Path) -> None:
    from hashlib import sha256

    copy = Path(shutil.copytree(plans.compile(MODEL), tmp_path / "plan"))
    raw = b".version 9.0\n.target sm_80\n"
    (copy / "lib" / "kernels_compute_80.ptx").write_bytes(raw)
    record = {"bytes": len(raw), "sha256": sha256(raw).hexdigest()}
    edit_plan(copy, lambda d: d["files"].update({"lib/kernels_compute_80.ptx": record}))
    line = run_here("pdscope-inspect", copy, "--verify").fault()
    assert "lib/kernels_compute_80.ptx: is of a GPU, but plan.json has none" in line
