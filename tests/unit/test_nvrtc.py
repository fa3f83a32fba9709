"""Finding NVRTC, and compiling the GPU's kernels.

Holds of the issue "The GPU runtime": "NVRTC at compile time (from the `nvidia-cuda-nvrtc` wheel or
the CUDA toolkit), PTX for forward compatibility and a cubin for the target (pin NVRTC to the oldest
driver stated, e.g. <= 13.0 for driver 580: a newer wheel's PTX is refused there; a test checks the
PTX version)". Tests that need a real NVRTC skip without one.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Event, Timer

import pytest
from packaging.requirements import Requirement
from support.nvrtc import fake_nvrtc, real_nvrtc

from pdscope import runtime_c
from pdscope.compiler import nvrtc, nvrtc_program
from pdscope.compiler.nvrtc import Nvrtc, compile_kernels, find_nvrtc
from pdscope.errors import TargetError
from pdscope.plan_check import image_arch

ROOT = Path(__file__).resolve().parents[2]
KERNEL = """
#include "device.h"
typedef struct { const float *x; float *y; uint32_t n; } scale_params;
PDS_KERNEL(scale, scale_params, 256) {
  const uint32_t i = PDS_BLOCK_X * PDS_THREADS + PDS_TID;
  if (i < p->n) p->y[i] = 2 * pds_exp(p->x[i]);
}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PDSCOPE_CACHE", str(folder))
    return folder / "gpu-kernels"


@pytest.fixture
def found() -> Nvrtc:
    return real_nvrtc()


Kernels = Callable[..., None]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Replaces the kernels by these sources; headers stay."""
    headers = {n: t for n, t in runtime_c.gpu_kernel_files().items() if n.endswith(".h")}

    def set_(**sources: str) -> None:
        files = headers | {f"{name}.cu": text for name, text in sources.items()}
        monkeypatch.setattr(runtime_c, "gpu_kernel_files", lambda: files)

    return set_


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NVRTC is to be found."""
    monkeypatch.delenv("PDSCOPE_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(("libnvrtc-none.so",)))


# --- the version of PTX ---


def test_ptx_is_what_the_oldest_driver_takes(found: Nvrtc) -> None:
    most = nvrtc.PTX_OF_CUDA[nvrtc.OLDEST_DRIVER]
    text = compile_kernels(found, nvrtc.PTX_ARCH).decode()
    version = re.search(r"^\.version (\d+)\.(\d+)$", text, re.MULTILINE)
    assert version and (int(version[1]), int(version[2])) == found.ptx <= most
    assert re.search(r"^\.target sm_80$", text, re.MULTILINE)
    assert text.endswith("\n")  # no 0 byte


@pytest.mark.parametrize(("ptx", "taken"), [((8, 4), True), ((9, 0), True), ((9, 1), False)])
def test_newer_ptx_is_refused(ptx: tuple[int, int], taken: bool) -> None:
    text = f"//\n.version {ptx[0]}.{ptx[1]}\n.target sm_80\n"
    if taken:
        assert nvrtc.check_ptx(text, "1.2.3") == ptx
        return
    with pytest.raises(TargetError, match=r"1\.2\.3 writes PTX 9\.1, but drivers of CUDA 13\.0"):
        nvrtc.check_ptx(text, "1.2.3")


def test_ptx_without_a_version() -> None:
    with pytest.raises(TargetError, match="without a version"):
        nvrtc.check_ptx("// nothing", "13.0.88")


def test_the_pin_is_of_the_oldest_driver() -> None:
    """pyproject.toml lets in no NVRTC whose PTX that driver refuses; the message says the same."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = config["project"]["optional-dependencies"]
    major, minor = nvrtc.OLDEST_DRIVER
    for extra in ("gpu", "dev"):
        (pin,) = (r for r in map(Requirement, extras[extra]) if r.name == "nvidia-cuda-nvrtc")
        assert f"{major}.{minor}.88" in pin.specifier
        assert f"{major}.{minor + 1}.0" not in pin.specifier
        assert f"'{pin.name}{','.join(sorted(map(str, pin.specifier), reverse=True))}'" in (
            nvrtc.INSTALL_HINT
        )


# --- finding it ---


def test_none_is_found(nothing: None) -> None:
    with pytest.raises(TargetError) as raised:
        find_nvrtc()
    text = str(raised.value)
    assert "pip install 'pdscope[gpu]'" in text and "nvidia-cuda-nvrtc>=13.0,<13.1" in text
    assert "\n" not in text and "libnvrtc-none" not in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("/nowhere/libnvrtc.so.13", "cannot open shared object file"),
        ("libm.so.6", "is another library"),
        (__file__, "invalid ELF header"),
        ("/", "PDSCOPE_NVRTC: /: "),
    ],
)
def test_named_by_the_user_it_must_work(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv("PDSCOPE_NVRTC", name)
    with pytest.raises(TargetError, match=r"^PDSCOPE_NVRTC: .*correct or unset") as raised:
        find_nvrtc()
    assert text in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("release", "ptx", "text"),
    [
        ("13.2.78", "9.2", "NVRTC 13.2.78 writes PTX 9.2, but drivers of CUDA 13.0"),
        ("11.8.89", "7.8", "is of CUDA 11.8.89, expected 12.0 or newer"),
    ],
)
def test_other_releases_are_not_used(
    monkeypatch: pytest.MonkeyPatch, release: str, ptx: str, text: str
) -> None:
    monkeypatch.setenv("PDSCOPE_NVRTC", str(fake_nvrtc(release, ptx)))
    with pytest.raises(TargetError, match=text):
        find_nvrtc()


@pytest.mark.parametrize("too_new", [0, 1, 2, 3])
def test_wheels_before_toolkits_and_none_too_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, too_new: int
) -> None:
    """The wheel of CUDA 13, then that of CUDA 12, then a toolkit: the first that can be used."""
    places = {
        "nvidia/cu13/lib/libnvrtc.so.13": ("13.0.88", "9.0"),
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12": ("12.9.86", "8.8"),
        "toolkit/lib64/libnvrtc.so": ("12.4.1", "8.4"),
    }
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(nvrtc, "find_spec", lambda name: spec)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("PDSCOPE_NVRTC", raising=False)
    for index, (name, release) in enumerate(places.items()):
        (tmp_path / name).parent.mkdir(parents=True)
        given = ("13.4.7", "9.4") if index < too_new else release
        shutil.copy(fake_nvrtc(*given), tmp_path / name)
    if too_new < 3:
        name, (release_name, _) = list(places.items())[too_new]
        used = find_nvrtc()
        assert (used.path, used.release) == (str(tmp_path / name), release_name)
        return
    try:
        assert not find_nvrtc().path.startswith(str(tmp_path))  # the system's own
    except TargetError as error:
        assert str(error).count("NVRTC 13.4.7 writes PTX 9.4") == 1


def test_no_library_that_is_not_asked_for(tmp_path: Path) -> None:
    """The builtins and the wheel's alternative library have similar names."""
    for name in ("libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13", "libnvrtc.so.13"):
        (tmp_path / name).touch()
    assert list(nvrtc._libraries(tmp_path)) == [str(tmp_path / "libnvrtc.so.13")]
    assert list(nvrtc._libraries(tmp_path / "none")) == []


# --- compiling ---


def test_a_cubin_needs_no_gpu(found: Nvrtc) -> None:
    """Holds: "`--gpu-arch` cross-compiles with no GPU present (in CI)"; of all kernels."""
    assert image_arch(compile_kernels(found, "sm_90")) == "sm_90"


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "compute_80"])
def test_one_kernel(found: Nvrtc, cache: Path, kernels: Kernels, arch: str) -> None:
    kernels(scale=KERNEL)
    image = compile_kernels(found, arch)
    assert image_arch(image) == arch and b"scale" in image
    if arch == "compute_80":
        assert b".entry scale(" in image and b".maxntid 256" in image


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernels_give_no_remarks(found: Nvrtc, arch: str) -> None:
    files = runtime_c.gpu_kernel_files()
    options = (*nvrtc._OPTIONS, "-fdevice-syntax-only")
    if found.cuda < (12, 8):
        pytest.skip("an NVRTC that cannot look at syntax alone")
    lib, ptx = nvrtc_program.load(found.path), arch.replace("sm", "compute")
    program = nvrtc.program_of(files)
    assert nvrtc_program.compile_program(lib, program, files, ptx, options).log == ""
    remarked = "__device__ void f() { int unused; }"
    assert "177-D" in nvrtc_program.compile_program(lib, remarked, {}, ptx, options).log


def test_every_listed_kernel_is_there(found: Nvrtc) -> None:
    """Those of list.h, where the file that it names is there."""
    text = compile_kernels(found, nvrtc.PTX_ARCH).decode()
    files = runtime_c.gpu_kernel_files()
    entries = set(re.findall(r"^\.visible \.entry (\w+)\(", text, re.MULTILINE))
    listed = set()
    for file, block in re.findall(
        r"/\* (\w+\.cu)\b[^*]*\*/\n#define \w+\(X\)((?:.*\\\n)*.*)", files["list.h"]
    ):
        if file in files:
            listed |= {f"pds_cu_{name}" for name in re.findall(r"X\((\w+),", block)}
    assert entries == listed


ELSEWHERE = """
import sys
from pdscope import runtime_c
from pdscope.compiler.nvrtc import compile_kernels, find_nvrtc
headers = {n: t for n, t in runtime_c.gpu_kernel_files().items() if n.endswith(".h")}
runtime_c.gpu_kernel_files = lambda: headers | {"scale.cu": sys.argv[1]}
sys.stdout.buffer.write(compile_kernels(find_nvrtc(), sys.argv[2]))
"""


@pytest.mark.parametrize("arch", ["sm_90", "compute_80"])
def test_bytes_do_not_depend_on_directories(
    found: Nvrtc, cache: Path, kernels: Kernels, tmp_path: Path, arch: str
) -> None:
    """Nor do files with the headers' names in the directory at hand matter."""
    kernels(scale=KERNEL)
    here = compile_kernels(found, arch)
    (tmp_path / "device.h").write_text("#error another header\n")
    env = os.environ | {"PDSCOPE_CACHE": str(tmp_path / "another"), "PDSCOPE_NVRTC": found.path}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    args = [sys.executable, "-c", ELSEWHERE, KERNEL, arch]
    there = subprocess.run(args, cwd=tmp_path, env=env, capture_output=True, check=True).stdout
    assert there == here
    assert str(tmp_path).encode() not in here


def test_cached_by_content(
    found: Nvrtc, cache: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    compile_ = nvrtc._compile

    def counted(used: Nvrtc, files: Mapping[str, str], arch: str, stop: Event) -> bytes:
        calls.append(arch)
        return compile_(used, files, arch, stop)

    monkeypatch.setattr(nvrtc, "_compile", counted)
    kernels(scale=KERNEL)
    first = compile_kernels(found, "sm_80")
    assert compile_kernels(found, "sm_80") == first and calls == ["sm_80"]
    (file,) = cache.glob("*.cubin")
    file.write_bytes(first[:-1])  # damaged
    assert compile_kernels(found, "sm_80") == first and calls == ["sm_80"] * 2
    assert compile_kernels(found, "sm_90") != first
    kernels(scale=KERNEL.replace("2 *", "3 *"))
    assert compile_kernels(found, "sm_80") != first
    assert calls == ["sm_80", "sm_80", "sm_90", "sm_80"]
    other = Nvrtc(**{**vars(found), "identity": "another release"})
    compile_kernels(other, "sm_80")
    assert len(calls) == 5 and len(list(cache.glob("*.cubin"))) == 4


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("no_such_type x;", r"broken\.cu\(1\): error.*no_such_type"),
        ('#include "nowhere.h"', r"broken\.cu\(1\): catastrophic error.*nowhere\.h"),
        ("#error one\n", "one"),
    ],
)
def test_faults_in_a_source(
    found: Nvrtc, cache: Path, kernels: Kernels, source: str, text: str
) -> None:
    kernels(broken=source)
    with pytest.raises(TargetError, match=rf"GPU kernels for sm_90 with NVRTC .*{text}") as raised:
        compile_kernels(found, "sm_90")
    assert "\n" not in str(raised.value)
    assert not list(cache.glob("*.cubin"))


def test_cache_that_cannot_be_written(
    found: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TargetError, match="PDSCOPE_CACHE"):
        compile_kernels(found, "sm_90")


@pytest.mark.parametrize(
    ("what", "text"),
    [("abort()", "it ended with status -6"), ("exit(9)", "it ended with status 9")],
)
def test_nvrtc_that_ends_itself(
    cache: Path, monkeypatch: pytest.MonkeyPatch, what: str, text: str
) -> None:
    """A fault of NVRTC's is no end of the compiler."""
    monkeypatch.setenv("PDSCOPE_NVRTC", str(fake_nvrtc("13.0.88", "9.0", what)))
    with pytest.raises(TargetError, match=f"for sm_90 with NVRTC 13.0.88 failed: {text}"):
        compile_kernels(find_nvrtc(), "sm_90")


def test_stopped_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C, in a kernel that takes long."""
    monkeypatch.setenv("PDSCOPE_NVRTC", str(fake_nvrtc("13.0.88", "9.0", "sleep(600)")))
    stop, began = Event(), time.monotonic()
    Timer(0.2, stop.set).start()
    with pytest.raises(TargetError, match="status -9"):
        compile_kernels(find_nvrtc(), "sm_90", stop)
    assert time.monotonic() - began < 300  # of 600 seconds


def test_a_process_that_starts_slowly(cache: Path, kernels: Kernels, found: Nvrtc) -> None:
    """More text than a pipe holds, read after the first look whether to stop: a machine under
    load."""
    kernels(scale=KERNEL + "// a long comment\n" * 100_000)
    with pytest.MonkeyPatch.context() as patch:
        late = "import runpy, time; time.sleep(1); runpy.run_path("
        late += f"{nvrtc_program.__file__!r}, run_name='__main__')"
        popen = subprocess.Popen
        patch.setattr(
            nvrtc.subprocess,
            "Popen",
            lambda command, **options: popen([sys.executable, "-I", "-c", late], **options),
        )
        assert image_arch(compile_kernels(found, "sm_90")) == "sm_90"
