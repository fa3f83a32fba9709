"""Finding a C compiler, and building a plan's library.

Holds: "with no C compiler, a clear error names the packages to install and the fallback
`pip install ziglang`, and that fallback works and is tested"; "deterministic: same inputs, same
bytes"; "disk full"; and that code beyond the architecture's baseline stays in the kernel files.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdscope import config, runtime_c
from pdscope.compiler import build
from pdscope.errors import BudgetError, TargetError

PLAN_C = """#include "plan_desc.h"
const pds_plan pds_the_plan = {.plan_hash = "test", .required_features = ""};
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PDSCOPE_CACHE", str(folder))
    return folder


def make(out: Path, paths: tuple[str, ...] | None = None, **options: object) -> build.BuildInfo:
    chosen = build.available_isa_paths(build.machine()) if paths is None else paths
    return build.build_library(PLAN_C, out, chosen, **options)  # type: ignore[arg-type]


def no_compilers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    empty = folder / "no-compilers"
    empty.mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("PDSCOPE_CC", raising=False)
    monkeypatch.delenv("CC", raising=False)


def test_library_loads_and_exports_the_header_alone(tmp_path: Path) -> None:
    out = tmp_path / "lib.so"
    info = make(out)
    assert info.library_bytes == out.stat().st_size
    library = ctypes.CDLL(str(out))
    library.pds_isa_built.restype = ctypes.c_char_p
    assert library.pds_isa_built().decode().split(",") == list(info.isa_paths)
    header = (runtime_c.ROOT / "include" / "pdscope.h").read_text()
    declared = set(re.findall(r"\b(pds_[a-z_]+)\(", header.split("pdscope-cdef-begin")[1]))
    for name in declared:
        assert hasattr(library, name), name
    if nm := shutil.which("nm"):
        lines = subprocess.run([nm, "-D", "--defined-only", out], capture_output=True, text=True)
        exported = {line.split()[-1] for line in lines.stdout.splitlines()}
        assert exported - {"_init", "_fini"} <= declared


def test_second_build_comes_from_the_cache(tmp_path: Path, cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    first = make(tmp_path / "a.so", ("scalar",), progress=lambda done, n: seen.append((done, n)))
    assert first.from_cache == 0
    assert seen == [(i + 1, first.objects) for i in range(first.objects)]
    second = make(tmp_path / "b.so", ("scalar",))
    assert second.from_cache == second.objects == first.objects
    assert second.sha256 == first.sha256
    assert not [p for p in (cache / "objects").iterdir() if p.suffix not in (".o", ".json")]


def test_damaged_cache_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are empty, have one byte changed, or lost their record: these, and no other."""
    linked: list[Path] = []
    link = build._link

    def seen(objects: Sequence[Path], *args: Any) -> bytes:
        linked.extend(objects)
        return link(objects, *args)

    monkeypatch.setattr(build, "_link", seen)
    first = make(tmp_path / "a.so", ("scalar",))
    store = tmp_path / "cache" / "objects"
    store.mkdir(parents=True)
    for path in linked:
        shutil.copy(path, store)
        shutil.copy(path.with_suffix(".json"), store)
    monkeypatch.setenv("PDSCOPE_CACHE", str(tmp_path / "cache"))
    objects = sorted(store.glob("*.o"), key=lambda path: path.stat().st_size)
    assert len(objects) == first.objects > 12
    for index, path in enumerate(objects[:6]):
        data = path.read_bytes()
        if index % 3 == 0:
            path.write_bytes(b"")
        elif index % 3 == 1:
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        else:
            path.with_suffix(".json").unlink()
    again = make(tmp_path / "b.so", ("scalar",))
    assert (again.from_cache, again.sha256) == (first.objects - 6, first.sha256)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TargetError, match="PDSCOPE_CACHE"):
        make(tmp_path / "lib.so", ("scalar",))


@pytest.mark.parametrize("command", ['"', " ", "true"])
def test_compiler_that_is_none(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("PDSCOPE_CC", command)
    with pytest.raises(TargetError, match=f"'{command}'.*PDSCOPE_CC"):
        make(tmp_path / "lib.so", ("scalar",))


def test_bytes_do_not_depend_on_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(tmp_path / "a.so", ("scalar",))
    copy = tmp_path / "a much longer directory name" / "runtime_c"
    shutil.copytree(runtime_c.ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(runtime_c, "ROOT", copy)
    monkeypatch.setenv("PDSCOPE_CACHE", str(tmp_path / "another-cache"))
    second = make(tmp_path / "b.so", ("scalar",))
    assert second.from_cache == 0
    assert (tmp_path / "a.so").read_bytes() == (tmp_path / "b.so").read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "b.so").read_bytes()
    # A changed header changes every key.
    header = copy / "src" / "status.h"
    header.write_text(header.read_text() + "\n")
    monkeypatch.setattr(build, "_run", no_compiler_is_run)
    assert make(tmp_path / "c.so", ("scalar",)).from_cache == 0
    assert first.sha256 == second.sha256


def no_compiler_is_run(command: Sequence[str], directory: Path, what: str) -> None:
    """Makes what a library must have, and nothing else."""
    (directory / command[command.index("-o") + 1]).write_bytes(b"\0pds_abi_version\0")


def test_zig_is_the_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang")
    no_compilers(monkeypatch, tmp_path)
    info = make(tmp_path / "lib.so", ("scalar",))
    assert build.find_compiler().zig
    library = ctypes.CDLL(str(tmp_path / "lib.so"))
    library.pds_isa_built.restype = ctypes.c_char_p
    assert library.pds_isa_built() == b"scalar"
    again = make(tmp_path / "again.so", ("scalar",))
    assert again.sha256 == info.sha256


@pytest.mark.verify
def test_zig_builds_every_path_alike_anywhere(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang")
    no_compilers(monkeypatch, tmp_path)
    first = make(tmp_path / "a.so")
    copy = tmp_path / "elsewhere" / "runtime_c"
    shutil.copytree(runtime_c.ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(runtime_c, "ROOT", copy)
    monkeypatch.setenv("PDSCOPE_CACHE", str(tmp_path / "another-cache"))
    assert make(tmp_path / "b.so").sha256 == first.sha256


@pytest.mark.verify
def test_zig_cross_compiles_to_aarch64(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("ziglang")
    if build.machine() == "aarch64":
        pytest.skip("this is an aarch64 machine")
    info = build.build_library(PLAN_C, tmp_path / "lib.so", ("scalar",), arch="aarch64")
    assert info.isa_paths == ("scalar",)
    header = (tmp_path / "lib.so").read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18] == 183  # EM_AARCH64


def test_no_compiler_names_packages_and_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compilers(monkeypatch, tmp_path)
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    with pytest.raises(TargetError) as raised:
        build.find_compiler()
    for hint in ("apt install gcc libc6-dev", "dnf install gcc", "pip install ziglang"):
        assert hint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_compiler_named_by_the_user_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSCOPE_CC", "no-such-compiler --flag")
    with pytest.raises(TargetError, match="no-such-compiler --flag.*PDSCOPE_CC"):
        build.find_compiler()


def test_compiler_named_by_the_user_is_split_like_a_shell_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = build.find_compiler()
    if found.zig:
        pytest.skip("no system compiler")
    monkeypatch.setenv("PDSCOPE_CC", f"{found.command[0]} -g0")
    asked = build.find_compiler()
    assert asked.command == (found.command[0], "-g0")
    assert asked.identity != found.identity  # its objects are others in the cache


def test_compiler_error_is_shown(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"compiling plan\.c.*error.*no_such_type"):
        build.build_library("no_such_type x;\n", tmp_path / "lib.so", ("scalar",))
    assert not (tmp_path / "lib.so").exists()


def test_unknown_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"avx1024 cannot be built.*scalar"):
        make(tmp_path / "lib.so", ("avx1024",))


def test_paths_of_other_architectures() -> None:
    assert build.available_isa_paths("x86_64")[-1] == "scalar"
    assert build.available_isa_paths("aarch64") == ("scalar",)
    assert build.available_isa_paths("riscv64") == ("scalar",)


DISK_FULL = """
import pathlib, resource, signal, sys
from pdscope import errors
from pdscope.compiler import build
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    build.build_library(sys.argv[1], pathlib.Path(sys.argv[2]), ("scalar",))
except errors.BudgetError as error:
    print("BudgetError:", error)
"""


def test_full_disk_is_a_budget_error(tmp_path: Path, cache: Path) -> None:
    """A limit on file size stands for a full disk, which root could not be kept from filling."""
    out = tmp_path / "lib.so"
    done = subprocess.run(
        [sys.executable, "-c", DISK_FULL, PLAN_C, out], capture_output=True, text=True
    )
    assert done.stdout.startswith("BudgetError:"), done.stdout + done.stderr
    assert done.stdout.count("\n") == 1
    assert not out.exists()
    assert not list(cache.rglob("*.o"))


def test_every_source_is_listed() -> None:
    """A file that is not listed would be missing from every plan; an included .c from the keys."""
    listed = {source for source, _ in runtime_c.sources(tuple(runtime_c.ISA_PATHS))}
    listed |= {*runtime_c.MOCK_SOURCES, *runtime_c.SIMT_SOURCES}
    there = {
        p.relative_to(runtime_c.ROOT).as_posix()
        for folder in ("src", "kernels", "cuda", "mock")
        for p in (runtime_c.ROOT / folder).rglob("*.c")
    }
    assert listed == there
    for name in (*listed, *runtime_c.headers()):
        assert not re.search(r'#include ".*\.c"', (runtime_c.ROOT / name).read_text()), name


def test_dispatch_and_build_agree_on_features() -> None:
    source = (runtime_c.ROOT / "src" / "dispatch.c").read_text()
    table = re.sub(r'"\n\s*"', "", source)  # C joins strings that follow each other
    for name, path in runtime_c.ISA_PATHS.items():
        assert re.search(rf'{{"{name}",\s*"{" ".join(path.features)}"', table), name


@pytest.mark.parametrize("kernel_path", ["scalar", "avx2", "avx512"])
def test_instructions_stay_in_their_files(kernel_path: str) -> None:
    """What leaks into another file is an illegal instruction on a CPU that lacks it. Looks at the
    objects in the cache, which are those of the plans."""
    objdump = shutil.which("objdump")
    if objdump is None or build.machine() != "x86_64":
        pytest.skip("objdump on x86_64")
    wide = {"scalar": r"%[yz]mm|\bv[a-z]+ss\b", "avx2": r"%zmm|%k[0-7]", "avx512": "vdpbf16ps"}
    kernels = set(runtime_c.ISA_PATHS[kernel_path].sources)
    core = set(runtime_c.CORE_SOURCES) if kernel_path == "scalar" else set()
    compiler, headers = build.find_compiler(), build._digest_headers()
    store = config.cache_dir() / "objects"
    store.mkdir(parents=True, exist_ok=True)
    for source, flags in runtime_c.sources(build.available_isa_paths("x86_64")):
        if source not in kernels | core:
            continue
        content = (runtime_c.ROOT / source).read_bytes()
        unit = build._Unit(runtime_c.ROOT, source, flags, content)
        made, _ = build._object(unit, compiler, headers, store)
        text = subprocess.run([objdump, "-d", made], capture_output=True, text=True, check=True)
        found = re.search(wide[kernel_path], text.stdout)
        assert "<pds_" in text.stdout and not found, f"{source}: {found and found[0]}"


def test_full_disk_message_names_the_remedy() -> None:
    with pytest.raises(BudgetError, match="TMPDIR"):
        build._run(
            [sys.executable, "-c", "import sys; sys.exit('ld: No space left on device')"],
            Path.cwd(),
            "linking",
        )
