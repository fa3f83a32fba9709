"""What README.md shows is what happens.

Holds: "README: what it is, the two commands, a picture or listing of a plan, the Python example,
limits."
"""

import re
from pathlib import Path

import pytest
from support.assets import BUNDLED, ROOT
from support.commands import run_command
from support.plans import PlanStore

README = ROOT / "README.md"


@pytest.fixture(autouse=True)
def needs_readme() -> None:
    if not README.exists():
        pytest.skip("README.md is not beside the tests")


def test_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word, but for the model's path and a context that the demo model can hold."""
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    code = code.replace("path/to/model", str(BUNDLED / "tiny-mixtral")).replace("8192", "1024")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code.replace("4096", "512"), "README.md", "exec"), names)
    assert capsys.readouterr().out
    assert getattr(names["rows"], "shape", None) == (2, 8192)


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
