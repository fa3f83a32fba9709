"""What importing and asking for help costs.

Holds the issue's lines "Running a plan imports neither torch nor transformers (numpy, cffi,
tokenizers)" and "`--help` and `pdscope-inspect` answer in under 0.5 s". Needs no compiler.
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
    script = f"from pdscope.cli.{name} import main; main()"  # what the console script does
    assert seconds([sys.executable, "-c", script, "--help"]) < 0.5


def test_inspect_is_quick(paper_plan: Path) -> None:
    script = "from pdscope.cli.inspect import main; main()"
    assert seconds([sys.executable, "-c", script, str(paper_plan)]) < 0.5


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
