"""--gpu-arch: which GPUs kernels are compiled for; and which images a load offers the driver.

Holds of the issue "The GPU runtime": "`--gpu-arch` cross-compiles with no GPU present (in CI)",
"PTX for forward compatibility and a cubin for the target", "a missing or too old driver is a clear
error". No GPU is needed: the mock driver shows one, and a stand-in for NVRTC compiles.
"""

import os
from pathlib import Path

import pytest
from support import fake_plan
from support.gpu import Mock, mock
from support.nvrtc import fake_nvrtc

import pdscope
from pdscope.compiler import gpu_arch, nvrtc
from pdscope.compiler.gpu_arch import GpuArch, Present, present, resolve
from pdscope.compiler.source import Options
from pdscope.errors import InputError, PdscopeError, TargetError
from pdscope.plan import Plan, kernel_arch, kernel_file

__all__ = ["mock"]

GPU = {"mem": 1 << 30, "reserve": 0, "policy": "adaptsched", "resident": 1, "ring": 2}


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVRTC of CUDA 13.0 that knows sm_80 and sm_90."""
    monkeypatch.setenv("PDSCOPE_NVRTC", str(fake_nvrtc("13.0.88", "9.0")))


def here(monkeypatch: pytest.MonkeyPatch, *architectures: str, cuda: tuple[int, int]) -> None:
    monkeypatch.setattr(gpu_arch, "present", lambda: Present(architectures, cuda))


# --- what is asked for ---


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("auto", GpuArch()),
        ("none", GpuArch(none=True)),
        ("sm_90", GpuArch(("sm_90",))),
        ("sm_100,sm_90,sm_80,sm_90", GpuArch(("sm_80", "sm_90", "sm_100"))),
    ],
)
def test_parse(text: str, asked: GpuArch) -> None:
    assert GpuArch.parse(text) == asked


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sm_70", "need sm_80 or newer"),
        ("sm_80,sm_75", "sm_75: GPU kernels need sm_80 or newer"),
        *((t, "expected auto, none, or") for t in ("", "90", "sm_", "sm_90a", "SM_90", "hopper")),
        *((t, "expected auto, none, or") for t in ("sm_80,", "sm_80 ,sm_90", "auto,sm_90", "sm_9")),
        *((t, "expected auto, none, or") for t in ("sm_09999", "sm_٩٠", "sm_90\n", "compute_80")),
    ],
)
def test_nonsense(text: str, why: str) -> None:
    with pytest.raises(InputError, match=f"^gpu_arch: .*{why}"):
        Options(gpu_mem="1GiB", costs="h200-emr16", gpu_arch=text)


@pytest.mark.parametrize("text", ["auto", "none", "sm_90"])
def test_only_with_a_gpu(text: str) -> None:
    with pytest.raises(InputError, match=f"gpu_arch: {text} is of a GPU: give --gpu-mem"):
        Options(gpu_arch=text)
    assert Options().kernels == GpuArch()


def test_of_another_type() -> None:
    with pytest.raises(InputError, match="gpu_arch is 90, expected"):
        Options(gpu_mem="1GiB", costs="h200-emr16", gpu_arch=90)  # type: ignore[arg-type]


# --- what is compiled ---


def test_named_ones_and_ptx(compiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GPU is here, or none."""
    for gpus in ((), ("sm_90",)):
        here(monkeypatch, *gpus, cuda=(13, 0))
        notes: list[str] = []
        found = resolve(GpuArch.parse("sm_90,sm_80"), notes)
        assert found and found.architectures == ("sm_80", "sm_90", "compute_80")
        assert notes == []


def test_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked for."""
    monkeypatch.setenv("PDSCOPE_NVRTC", "nowhere")
    notes: list[str] = []
    assert resolve(GpuArch(none=True), notes) is None and notes == []


def test_unknown_to_nvrtc(compiles: None) -> None:
    with pytest.raises(TargetError, match=r"--gpu-arch sm_86: NVRTC 13\.0\.88 knows sm_80, sm_90$"):
        resolve(GpuArch(("sm_80", "sm_86")), [])


@pytest.mark.parametrize(
    ("gpus", "cuda", "made", "note"),
    [
        ((), (0, 0), (), None),
        (("sm_90",), (13, 0), ("sm_90",), None),
        (("sm_80", "sm_90"), (13, 2), ("sm_80", "sm_90"), None),
        (("sm_70",), (12, 4), (), "a GPU here is sm_70: GPU kernels need sm_80 or newer"),
        (("sm_120",), (13, 0), (), "a GPU here is sm_120: NVRTC 13.0.88 does not know it"),
        (("sm_80",), (12, 4), ("sm_80",), "the driver here is of CUDA 12.4 and may refuse"),
    ],
)
def test_auto(
    compiles: None,
    monkeypatch: pytest.MonkeyPatch,
    gpus: tuple[str, ...],
    cuda: tuple[int, int],
    made: tuple[str, ...],
    note: str | None,
) -> None:
    here(monkeypatch, *gpus, cuda=cuda)
    notes: list[str] = []
    found = resolve(GpuArch(), notes)
    assert found and found.architectures == (*made, "compute_80")
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto says so in one line, with the remedy; an architecture by name is an error."""
    monkeypatch.delenv("PDSCOPE_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(()))
    notes: list[str] = []
    assert resolve(GpuArch(), notes) is None
    assert len(notes) == 1 and "\n" not in notes[0]
    assert notes[0].startswith("the plan has no kernels, so no GPU can run it: no NVRTC was found")
    assert "pip install 'pdscope[gpu]'" in notes[0]
    with pytest.raises(TargetError, match=r"^--gpu-arch sm_90: no NVRTC .*pip install"):
        resolve(GpuArch(("sm_90",)), [])


# --- what is here ---


def test_the_driver_says_which(mock: Mock) -> None:
    mock.reset("compute=86; driver=13000")
    assert present() == Present(("sm_86",), (13, 0), "PDScope mock GPU")
    mock.reset("compute=120; driver=12080")
    assert present() == Present(("sm_120",), (12, 8), "PDScope mock GPU")


def test_a_driver_without_a_gpu(mock: Mock) -> None:
    mock.reset("devices=0")
    assert present().architectures == ()


@pytest.mark.parametrize("path", ["/nowhere/libcuda.so.1", "libm.so.6", __file__])
def test_no_driver(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("PDSCOPE_CUDA_DRIVER", path)
    assert present() == Present()


# --- what a load offers ---


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """With a library that says which kernels it was given."""
    folder = tmp_path / "plan"
    fake_plan.make_fake_plan(folder)
    for arch in ("compute_80", "sm_80", "sm_100", "sm_90"):
        (folder / kernel_file(arch)).write_bytes(arch.encode())
    (folder / "lib" / "kernels.txt").write_text("something else")
    fake_plan.write_manifest(folder, gpu=GPU)
    return folder


def offered(plan: Path) -> list[str]:
    with pytest.raises(PdscopeError, match="^gpu kernels:") as raised:
        pdscope.load(plan, device="gpu")
    return [path for path in str(raised.value).removeprefix("gpu kernels:").split("|") if path]


def test_cubins_before_ptx(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest first, so that one for sm_90 is found before one for sm_80; absolute paths."""
    monkeypatch.chdir(plan.parent)
    names = Plan.open(plan).kernels
    assert [kernel_arch(n) for n in names] == ["sm_100", "sm_90", "sm_80", "compute_80"]
    assert offered(Path("plan")) == [str(plan.resolve() / name) for name in names]


def test_a_plan_without_kernels(plan: Path) -> None:
    for path in (plan / "lib").glob("kernels_*"):
        path.unlink()
    fake_plan.write_manifest(plan, gpu=GPU)
    assert Plan.open(plan).kernels == () and offered(plan) == []


def test_others_in_their_place(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PDSCOPE_GPU_KERNELS: a list like PATH."""
    paths = [tmp_path / "one.so", tmp_path / "two.ptx"]
    for path in paths:
        path.touch()
    monkeypatch.setenv("PDSCOPE_GPU_KERNELS", os.pathsep.join(map(str, paths)) + os.pathsep)
    assert offered(plan) == list(map(str, paths))
    monkeypatch.setenv("PDSCOPE_GPU_KERNELS", str(tmp_path))
    with pytest.raises(InputError, match=r"PDSCOPE_GPU_KERNELS: .*no such file; correct or unset"):
        pdscope.load(plan, device="gpu")


def test_a_line_break_in_a_path(plan: Path) -> None:
    moved = plan.rename(plan.with_name("two\nlines"))
    with pytest.raises(InputError, match="cannot have a line break"):
        pdscope.load(moved, device="gpu")
