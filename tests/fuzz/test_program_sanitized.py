"""The C reader and verifier of programs under ASan and UBSan, on many mutated files."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.c_programs import SOURCES
from support.programs import BY_NAME, cpu_plan, gpu_plan, one

from pdscope.ir.encode import encode
from pdscope.runtime_c import INCLUDE_DIRS, ROOT

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def build(folder: Path) -> Path:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    program = folder / "fuzz_programs"
    sources = [Path(__file__).with_name("fuzz_programs.c"), *(ROOT / "src" / s for s in SOURCES)]
    flags = ["-std=c11", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", *SANITIZE]
    includes = [f"-I{ROOT / d}" for d in INCLUDE_DIRS]
    command = [*compiler, *flags, *includes, *map(str, sources), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "sanitize" in done.stderr + done.stdout:
        pytest.skip(f"{compiler[0]} has no address sanitizer")
    assert done.returncode == 0, done.stderr
    return program


def fuzz(folder: Path, iterations: int) -> dict[str, int]:
    files = []
    plans = {"cpu": cpu_plan(), "gpu": gpu_plan()} | {n: [one(t)] for n, t in BY_NAME.items()}
    for name, programs in plans.items():
        files.append(folder / f"{name}.bin")
        files[-1].write_bytes(encode(programs))
    done = subprocess.run(
        [str(build(folder)), str(iterations), *map(str, files)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {k: int(v) for k, v in re.findall(r"(\w+) (\d+)", done.stdout)}


def test_sanitized(tmp_path: Path) -> None:
    """Bad input: a plan cut short, edited. No mutated program.bin makes the runtime read outside it
    or overflow; most are refused, as malformed or by a rule."""
    counts = fuzz(tmp_path, 1000)
    assert min(counts.values()) > 0.02 * sum(counts.values()), counts


@pytest.mark.verify
def test_sanitized_long(tmp_path: Path) -> None:
    """The same as test_sanitized, longer."""
    fuzz(tmp_path, 100_000)
