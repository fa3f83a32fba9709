"""The C test program of the runtime, built and run in several ways.

Holds: "the C test program passes natively, under ASan+LSan+UBSan and TSan, and on emulated CPUs
(kernels only in `make test`)"; "thread pool that sleeps when idle"; "many sessions on one engine,
safe from several threads, cancel() from another thread, fork, truncate, save and restore";
"a clear error after os.fork"; "a plan cut short, edited, or for other CPU features".
"""

import dataclasses
import re
from pathlib import Path

import pytest
from support import runtime_c as test_program

from pdscope.compiler.build import find_compiler


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> test_program.TestProgram:
    return test_program.build(tmp_path_factory.mktemp("native") / "build", find_compiler())


def sanitized(
    tmp_path: Path, flags: tuple[str, ...], isa_paths: tuple[str, ...] | None = None
) -> test_program.TestProgram:
    compiler = test_program.gcc()
    if compiler is None:
        pytest.skip("neither gcc nor clang, so no sanitizers")
    return test_program.build(tmp_path / "build", compiler, flags, isa_paths=isa_paths)


def test_native(native: test_program.TestProgram) -> None:
    test_program.check(native.run())


def test_one_core(native: test_program.TestProgram) -> None:
    """More workers than cores make progress."""
    test_program.check(native.run("pool", "engine", wrapper=("taskset", "-c", "0")))


def test_missing_feature_is_named(tmp_path: Path) -> None:
    built = test_program.build(tmp_path / "build", find_compiler(), features="sse9")
    test_program.check(built.run("engine"))


def test_address_and_undefined_behaviour_sanitizers(tmp_path: Path) -> None:
    """Of the kernels' products each two sizes; below there are all."""
    test_program.check(sanitized(tmp_path, test_program.ASAN).run(env={"TEST_PAIRS": "1"}))


@pytest.mark.verify
def test_address_sanitizer_all_sizes(tmp_path: Path) -> None:
    test_program.check(sanitized(tmp_path, test_program.ASAN).run("kernels"))


def test_thread_sanitizer(tmp_path: Path) -> None:
    """The kernels know no threads: one path is enough here."""
    built = sanitized(tmp_path, test_program.TSAN, ("scalar",))
    test_program.check(
        built.run("base", "pool", "llc", "nets", "learn", "weights", "engine", "cuda", "gpu")
    )


@pytest.mark.verify
def test_thread_sanitizer_all_cases(tmp_path: Path) -> None:
    test_program.check(sanitized(tmp_path, test_program.TSAN).run())


@pytest.mark.verify
def test_built_by_zig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ziglang")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PDSCOPE_CC", raising=False)
    monkeypatch.delenv("CC", raising=False)
    compiler = find_compiler()
    assert compiler.zig
    test_program.check(test_program.build(tmp_path / "build", compiler).run())


# All but fork: qemu aborts when a program with threads forks.
ON_EMULATORS = ("base", "pool", "kv", "sample", "weights", "engine", "kernels")


def emulated(program: test_program.TestProgram, cpu: str, *cases: str, **env: str) -> None:
    qemu = test_program.emulator("x86_64")
    if qemu is None or not test_program.on_x86():
        pytest.skip("qemu-x86_64 is not installed")
    done = program.run(*cases, wrapper=(qemu, "-cpu", cpu), env=env)
    test_program.check(done)
    print(done.stdout)  # which kernel paths ran


@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell"])
def test_kernels_on_emulated_x86(native: test_program.TestProgram, cpu: str) -> None:
    """CPUs without AVX, and with AVX2 but no AVX-512: nothing beyond them may be executed. Each two
    sizes of a product; test_native has all, and below they are on these CPUs."""
    emulated(native, cpu, "base", "kernels", TEST_PAIRS="1")


@pytest.mark.verify
@pytest.mark.parametrize("cpu", ["Nehalem", "Haswell", "max"])
def test_all_cases_on_emulated_x86(native: test_program.TestProgram, cpu: str) -> None:
    emulated(native, cpu, *ON_EMULATORS)


@pytest.mark.verify
def test_all_cases_on_emulated_aarch64(tmp_path: Path) -> None:
    """Linked statically, with musl, since no aarch64 libraries need be installed."""
    qemu = test_program.emulator("aarch64")
    if qemu is None:
        pytest.skip("qemu-aarch64 is not installed")
    pytest.importorskip("ziglang")
    found = find_compiler("aarch64")
    if not found.zig:
        pytest.skip("PDSCOPE_CC or CC names another compiler than zig")
    command = [re.sub("-linux-.*", "-linux-musl", word) for word in found.command]
    compiler = dataclasses.replace(found, command=tuple(command))
    built = test_program.build(tmp_path / "build", compiler, arch="aarch64", static=True)
    test_program.check(built.run(*ON_EMULATORS, wrapper=(qemu,)))
