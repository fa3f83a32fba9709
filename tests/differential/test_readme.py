"""What README.md shows is what happens.

Holds: "README: what it is, the two commands, a picture or listing of a plan, the Python example,
limits."
"""

import platform
import re
from pathlib import Path

import pytest
from support.assets import BUNDLED, ROOT
from support.commands import run_command, run_here
from support.plans import PlanStore

README = ROOT / "README.md"


@pytest.fixture(autouse=True)
def needs_readme() -> None:
    if not README.exists():
        pytest.skip("README.md is not beside the tests")


def test_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word, but for where the repository is; again, too, in the same folder."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    code = code.replace("examples/models", str(BUNDLED))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for _ in range(2):
        exec(compile(code, "README.md", "exec"), names)
        assert capsys.readouterr().out
        assert getattr(names["rows"], "shape", None) == (2, 8192)


def blocks() -> dict[str, list[str]]:
    """Command -> the lines that README.md shows below it."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"^```\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found[line[2:]] = []
            elif block.startswith("$ "):
                found[list(found)[-1]].append(line)
    return found


def test_listing_of_the_plan(plans: PlanStore) -> None:
    """Line by line, but for the path, the size of the library and, elsewhere, the processor."""
    shown = blocks()["pdscope-inspect plan-demo"]
    plan = plans.compile(BUNDLED / "tiny-mixtral", target="any")
    listed = run_here("pdscope-inspect", plan).out.splitlines()
    words = {"plan  ", "on disk"} | (set() if platform.machine() == "x86_64" else {"runs on"})

    def same_everywhere(lines: list[str]) -> list[str]:
        return [line for line in lines if not line.startswith(tuple(words))]

    assert same_everywhere(shown) == same_everywhere(listed)
    assert [line[:14] for line in shown] == [line[:14] for line in listed]


def test_answer_of_the_demo(plans: PlanStore) -> None:
    """The question is the Makefile's."""
    plan = plans.compile(BUNDLED / "tiny-mixtral")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (prompt,) = re.findall(r"^DEMO_PROMPT \?= (.*)$", makefile, re.M)
    shown = blocks()[f"pdscope-run plan-demo --chat --prompt '{prompt}'"]
    ran = run_command("pdscope-run", plan, "--chat", "--prompt", prompt)
    assert ran.out.strip().splitlines() == shown


def test_dry_run_of_a_published_model() -> None:
    (command,) = [c for c in blocks() if "--dry-run" in c]
    name, model, *options = command.split()
    ran = run_here(name, ROOT / model, *options)
    printed = (ran.out + ran.err).splitlines()
    assert set(blocks()[command]) <= {*printed, "..."}


def test_listed_program_is_the_demo_plans(plans: PlanStore) -> None:
    plan = plans.compile(BUNDLED / "tiny-mixtral")
    shown = run_command("pdscope-inspect", plan, "--layer", 2, "--phase", "decode")
    assert shown.out.strip() in README.read_text(encoding="utf-8")
    assert shown.out.strip() in (ROOT / "docs" / "plan-format.md").read_text(encoding="utf-8")


def test_commands_and_files_exist() -> None:
    """Every command, link and make target that it names."""
    text = README.read_text(encoding="utf-8")
    for name in set(re.findall(r"^(pdscope-\w+)", text, re.M)):
        assert run_command(name, "--help").status == 0
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake (\w+)", text)):
        assert re.search(rf"^{target}:", makefile, re.M), target
