"""The Python tests of the runtime, on a library built with the sanitizers.

Holds: "Python tests of the runtime pass with the sanitizer preloaded in `make verify`"; the same
of GPU plans on the mock driver.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.assets import ROOT

TESTS = (
    "tests/unit/test_engine_runtime.py",
    "tests/differential/test_consistency.py",
    "tests/differential/test_measure.py",
    "tests/differential/test_predictors.py",
    # Loads and prefetches, with both clocks; and what faults leave behind.
    "tests/differential/test_gpu_plans.py -k wall or several or pinned or cancel or moves",
    "tests/differential/test_gpu_faults.py -k not watchdog and not every",
)
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"


def run_with(flags: str, preloaded: tuple[str, ...], folder: Path, tests: str) -> None:
    """A second pytest, with the sanitizers preloaded, compiles its plans and the mock driver with
    them."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("needs gcc with its sanitizer libraries")
    libraries = []
    for name in preloaded:
        command = [gcc, f"-print-file-name={name}"]
        path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"gcc has no {name}")
        libraries.append(path)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {
        "PDSCOPE_CC": f"{gcc} {flags}",
        "LD_PRELOAD": " ".join(libraries),
        # The interpreter never frees all its memory; the C tests look for leaks.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0",
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += tests.split(" ", 2)
    command += ["--basetemp", str(folder / "run"), "-p", "no:xdist"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in done.stdout


@pytest.mark.verify
@pytest.mark.parametrize("tests", TESTS)
def test_under_address_and_undefined_sanitizer(tmp_path: Path, tests: str) -> None:
    run_with(FLAGS, ("libasan.so", "libubsan.so"), tmp_path, tests)


@pytest.mark.verify
def test_gpu_plans_under_thread_sanitizer(tmp_path: Path) -> None:
    """The thread of a step, the pool's, the driver's, and several sessions'."""
    tests = "tests/differential/test_gpu_plans.py -k wall or several_threads"
    run_with("-fsanitize=thread -g", ("libtsan.so",), tmp_path, tests)
