"""What importing and asking for help costs.

Holds the issue's lines "Running a plan imports neither torch nor transformers (numpy, cffi,
tokenizers)" and "`--help` and `pdscope-inspect` answer in under 0.5 s"; the exit status after
Ctrl-C. Needs no compiler.
"""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support import fake_plan

import pdscope

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "safetensors", "archspec", "jsonschema", "rich", "jinja2"}
RUNTIME = {"numpy", "cffi", "tokenizers"}
COMMANDS = ("compile", "run", "inspect", "bench")


def modules_after(code: str) -> set[str]:
    """Top-level names in sys.modules after `code` in a fresh interpreter."""
    script = (
        f"{code}\nimport sys; print(*{{m.split('.')[0] for m in sys.modules}}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.fixture(scope="module")
def paper_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan directory without a library: enough to read."""
    folder = tmp_path_factory.mktemp("paper") / "plan"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "embed.bin").write_bytes(b"x" * 1000)
    (folder / "memory.json").write_text('{"session": {"total_bytes": 1}}')
    fake_plan.write_manifest(folder)
    return folder


def test_package_import_is_light() -> None:
    assert not modules_after("import pdscope") & (HEAVY | RUNTIME | {"click"})


def test_running_side_imports() -> None:
    loaded = modules_after("from pdscope import load, Engine, Session, Stream, Completion, Plan")
    assert not loaded & HEAVY
    assert RUNTIME <= loaded


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_light(name: str) -> None:
    loaded = modules_after(
        f"import pdscope.cli.{name} as c\ntry: c.main(['--help'])\nexcept SystemExit: pass"
    )
    assert not loaded & (HEAVY | RUNTIME)


def test_inspect_is_light(paper_plan: Path) -> None:
    loaded = modules_after(
        f"import pdscope.cli.inspect as c\ntry: c.main([{str(paper_plan)!r}])\nexcept "
        "SystemExit: pass"
    )
    assert not loaded & (HEAVY | RUNTIME)


def console_script(name: str) -> str:
    """What the script that pip makes does."""
    return f"from pdscope.cli import {name}_command as main; main()"


def seconds(command: list[str]) -> float:
    """Least processor time of five runs: the wall time of a machine with nothing else to do."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    return min(times)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_quick(name: str) -> None:
    for option in ("--help", "--version"):
        assert seconds([sys.executable, "-c", console_script(name), option]) < 0.5


def test_inspect_is_quick(paper_plan: Path) -> None:
    assert seconds([sys.executable, "-c", console_script("inspect"), str(paper_plan)]) < 0.5


@pytest.mark.parametrize("name", COMMANDS)
def test_version_and_exit_statuses_are_told(name: str) -> None:
    """Holds: "a `--help` that teaches", with every exit status."""

    def said(option: str) -> str:
        args = [sys.executable, "-c", console_script(name), option]
        return subprocess.run(args, capture_output=True, text=True, check=True).stdout

    assert said("--version") == f"pdscope-{name} {pdscope.__version__}\n"
    words = " ".join(said("--help").split())
    assert "Exit status: 0 success, 1 a fault" in words and "130 interrupted" in words


# Sends SIGINT to itself when MODULE is about to be imported; as Ctrl-C at that moment.
INTERRUPTER = """
import os, signal, sys
module, sys.argv = sys.argv[1], sys.argv[1:]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("name", "module", "more"),
    [
        ("compile", "click", [".", "-o", "out"]),
        ("compile", "rich.progress", [".", "-o", "out"]),
        ("compile", "torch", [".", "-o", "out"]),
        ("run", "click", ["PLAN", "-p", "Hello"]),
        ("run", "pdscope.engine", ["PLAN", "-p", "Hello"]),
        ("run", "tokenizers", ["PLAN", "-p", "Hello"]),
        ("inspect", "pdscope.cli.format", ["PLAN"]),
        ("inspect", "pdscope.plan", ["PLAN"]),
        ("bench", "numpy", ["PLAN"]),
    ],
)
def test_interrupted_import_is_quiet(name: str, module: str, more: list[str]) -> None:
    """Holds: no traceback; 130 is the status of an interrupted command."""
    script = INTERRUPTER + console_script(name)
    done = subprocess.run([sys.executable, "-c", script, module, *more], capture_output=True)
    assert done.returncode == 130
    assert done.stdout == b"" and done.stderr.strip() == b""


def test_ignored_interrupts_stay_ignored(paper_plan: Path) -> None:
    """As in a background job of a shell script."""
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + INTERRUPTER
    script += console_script("inspect")
    args = [sys.executable, "-c", script, "pdscope.cli.format", str(paper_plan)]
    done = subprocess.run(args, capture_output=True, text=True)
    assert done.returncode == 0 and "FakeForCausalLM" in done.stdout


def test_version_is_the_packages() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.*)"', text, re.MULTILINE)
    assert found and pdscope.__version__ == found[1]


def test_names_resolve_and_unknown_ones_do_not() -> None:
    for name in pdscope.__all__:
        if name != "compile":  # imports the compiler
            assert getattr(pdscope, name) is not None
    assert set(pdscope.__all__) <= set(dir(pdscope))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pdscope.nothing
