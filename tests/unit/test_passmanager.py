"""Passes are cached by content and survive a kill (issue: plan, "resumes from cached passes")."""

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdscope.compiler import passmanager
from pdscope.compiler.passmanager import (
    PassManager,
    Workspace,
    old_plan,
    publish,
    recover,
    writing,
)
from pdscope.errors import BudgetError, PlanError


@dataclass(frozen=True)
class Upper:
    """Writes its option in capitals, behind what it reads."""

    text: str
    source: str = ""

    name = "upper"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.source,) if self.source else ()

    def inputs(self) -> Mapping[str, str]:
        return {"text": self.text}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        before = workspace.read_text(self.source) if self.source else ""
        return {workspace.write("upper.txt", before + self.text.upper()): None}


def test_second_run_is_a_cache_hit(tmp_path: Path) -> None:
    first = PassManager(Workspace(tmp_path), "code").run(Upper("a"))
    second = PassManager(Workspace(tmp_path), "code").run(Upper("a"))
    assert (first.cached, second.cached) == (False, True)
    assert first.files == second.files


@pytest.mark.parametrize("change", ["option", "code", "file cut", "file gone", "record damaged"])
def test_any_change_runs_the_pass_again(tmp_path: Path, change: str) -> None:
    ws = Workspace(tmp_path)
    PassManager(ws, "code").run(Upper("abc"))
    text, code = "abc", "code"
    if change == "option":
        text = "abd"
    elif change == "code":
        code = "newer code"
    elif change == "file cut":
        ws.path("upper.txt").write_text("AB")
    elif change == "file gone":
        ws.path("upper.txt").unlink()
    else:
        ws.record_path("upper").write_text("{")
    result = PassManager(Workspace(tmp_path), code).run(Upper(text))
    assert not result.cached
    assert ws.read_text("upper.txt") == text.upper()


def test_a_changed_input_file_runs_the_pass_again(tmp_path: Path) -> None:
    ws = Workspace(tmp_path)
    ws.write("in.txt", "one ")
    PassManager(ws, "code").run(Upper("x", "in.txt"))
    ws.write("in.txt", "two ")
    result = PassManager(Workspace(tmp_path), "code").run(Upper("x", "in.txt"))
    assert not result.cached
    assert ws.read_text("upper.txt") == "two X"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.write_text("old")
    with pytest.raises(BudgetError, match="disk is full"), writing(target) as path:
        path.write_text("new")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert target.read_text() == "old"


def test_publish_never_replaces_what_is_no_plan(tmp_path: Path) -> None:
    ws = Workspace(tmp_path / "partial")
    ws.write("plan.json", "{}")
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    with pytest.raises(PlanError, match="not empty"):
        publish(ws, out, replace=True)
    assert (out / "thesis.txt").read_text() == "precious"


def publish_plan(root: Path, text: str) -> None:
    """A plan of one file, published as root/out."""
    ws = Workspace(root / "partial")
    PassManager(ws, "code").run(Upper(text))
    manifest = {"format_version": 1, "plan_hash": text, "files": {"upper.txt": {}}}
    ws.write("plan.json", json.dumps(manifest))
    publish(ws, root / "out", replace=True)


@pytest.mark.parametrize("exchange", [True, False])
def test_publish_swaps_an_old_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(passmanager, "_exchange", lambda a, b: False)
    for text in ("one", "two"):
        publish_plan(tmp_path, text)
        assert (tmp_path / "out" / "upper.txt").read_text() == text.upper()
        assert json.loads((tmp_path / "out" / "plan.json").read_text())["plan_hash"] == text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_publish_leaves_out_what_no_pass_wrote(tmp_path: Path) -> None:
    """Files of an interrupted compile of another model are in the same workspace."""
    ws = Workspace(tmp_path / "partial")
    for name in ("weights/layer099.bin", "upper.txt.part"):
        ws.write(name, "of another model")
    publish_plan(tmp_path, "a")
    names = sorted(p.name for p in (tmp_path / "out").rglob("*"))
    assert names == ["plan.json", "upper.txt"]


@pytest.mark.parametrize("name", ["thesis.txt", "plan.json"])
def test_force_keeps_what_is_not_the_plans(tmp_path: Path, name: str) -> None:
    publish_plan(tmp_path, "a")
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(PlanError, match="thesis.txt" if name == "thesis.txt" else "no plan"):
        publish_plan(tmp_path, "b")
    assert (tmp_path / "out" / name).read_text() == "{}"
    assert (tmp_path / "out" / "upper.txt").read_text() == "A"


@pytest.mark.parametrize("came", [True, False])
def test_kill_between_two_renames_loses_no_plan(tmp_path: Path, came: bool) -> None:
    out = tmp_path / "out"
    publish_plan(tmp_path, "a")
    out.rename(old_plan(out))
    if came:
        publish_plan(tmp_path, "b")
    recover(out)
    assert (out / "upper.txt").read_text() == ("B" if came else "A")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_dump_shows_what_each_pass_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue: PDSCOPE_DUMP, NNN_pass.plan after every pass; PDSCOPE_DEBUG=2, times."""
    monkeypatch.setenv("PDSCOPE_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("PDSCOPE_DEBUG", "2")
    PassManager(Workspace(tmp_path / "work"), "code").run(Upper("abc"))
    assert (tmp_path / "dump" / "001_upper.plan").read_text() == "// upper.txt\nABC\n"
    assert "upper: 0." in capsys.readouterr().err
