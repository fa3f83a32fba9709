"""`pdscope-inspect --predictor` on a phaseper.json made by hand.

Holds the issue's point 7: "per layer group and phase, hit rate of the predicted top-k and Top-6
rank accuracy ..., for PhasePer and each rival"; "`--json` gives a list of `{layer, phase, group,
hit, rank_hit, chosen, rivals: {name: {hit, rank_hit}}}`"; "plots in `report.html`"; and point 2's
"shown by `pdscope-inspect --predictor` with a plot".
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest
from support.commands import run_here
from support.predictor_figures import figures, write_plan

from pdscope.errors import PlanError
from pdscope.plan import Plan
from pdscope.predictor_figures import Predictors, describe, summaries
from pdscope.predictor_html import report


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path / "plan", figures())


def test_json_is_the_issue_s_list(plan: Path) -> None:
    listed = json.loads(run_here("pdscope-inspect", plan, "--predictor", "--json").out)
    assert [(x["layer"], x["phase"]) for x in listed] == [
        (0, "prefill"), (1, "prefill"), (0, "decode"), (1, "decode")
    ]  # fmt: skip
    for x in listed:
        assert list(x) == ["layer", "phase", "group", "hit", "rank_hit", "chosen", "rivals"]
        assert set(x["rivals"]) == {"cross_gate", "previous", "frequency", "transition"}
    assert listed[0]["hit"] == 0.8 and listed[0]["rank_hit"] == 0.75
    assert listed[0]["rivals"]["previous"] == {"hit": 0.5, "rank_hit": 0.75}
    last = listed[3]  # hit is that of what was chosen, not of the net
    assert (last["chosen"], last["hit"], last["rank_hit"]) == ("cross_gate", 0.6, 1)


def test_means_by_group_and_phase(plan: Path) -> None:
    found = {(s.phase, s.group): s for s in summaries(Predictors.open(Plan.open(plan)).layers)}
    assert list(found) == [
        (p, g) for p in ("prefill", "decode") for g in ("input", "middle", "all")
    ]
    whole = found["prefill", "all"]
    assert whole.layers == 2 and whole.plan.hit == pytest.approx(0.85)
    decode = found["decode", "all"]
    assert decode.plan.hit == pytest.approx((0.7 + 0.6) / 2)
    assert decode.figures["phaseper"].hit == pytest.approx((0.7 + 0.5) / 2)
    assert decode.chosen == {"phaseper": 1, "cross_gate": 1}
    line = describe(Predictors.open(Plan.open(plan)).layers)
    assert line == (
        "hit rate 85.0 % prefill, 65.0 % decode; serve layers and phases: phaseper 3, cross_gate 1"
    )


def test_the_tables(plan: Path) -> None:
    out = run_here("pdscope-inspect", plan, "--predictor").out
    lines = [line.split() for line in out.splitlines()]
    text = " ".join(out.split())
    assert "trained on chats.jsonl: 1,000 prefill, 400 decode rows" in text
    assert "validation rows: 100 prefill, 40 decode" in text
    assert "groups input 0, middle 1-2" in text and "similarity 0: 0.250, 1: 0.875" in text
    (row,) = [x for x in lines if x[:2] == ["decode", "middle"]]
    assert (
        row[2:]
        == ("1 60.0 / 100.0 50.0 / 75.0 60.0 / 100.0 50.0 / 75.0 40.0 / 50.0 30.0 / 25.0").split()
    )
    assert [
        "0",
        "1",
        "input",
        "prefill",
        "PhasePer",
        *"80.0 / 75.0 85.0 2.0 KiB 1.5 KiB".split(),
    ] in lines
    assert [
        "1",
        "2",
        "middle",
        "decode",
        "cross_gate",
        *"60.0 / 100.0 85.0 - 64 B".split(),
    ] in lines


def test_without_validation_rows_it_says_so(tmp_path: Path) -> None:
    data = figures()
    data["validation"]["decode"] = 0
    out = run_here("pdscope-inspect", write_plan(tmp_path / "p", data), "--predictor").out
    assert "100 prefill, 0 decode; without any, those that were trained on" in out


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def made(data: Any) -> None:
        *keys, last = [int(k) if k.isdigit() else k for k in path.split(".")]
        for key in keys:
            data = data[key]
        if value is None:
            del data[last]
        else:
            data[last] = value

    return made


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (change("format_version", 2), "phaseper.json: format_version is 2, expected 1"),
        (change("hidden", 16), "phaseper.json: hidden is 16, expected 8"),
        (change("layers.1.hit", None), None),  # repeated from elsewhere, not read
        (change("layers.1.net.hit", None), r"layers\[1\]: no 'hit'"),
        (change("layers.1.net.hit", 1.5), r"layers\[1\]: 1.5 is no share from 0 to 1"),
        (change("layers.1.chosen", "oracle"), r"layers\[1\]: 'oracle' is none of phaseper, "),
        (change("layers.1.next", 1), r"layers\[1\]: next is 1, expected the next MoE layer"),
        (change("layers.1.layer", 7), r"layers\[1\]: "),
        (change("layers.1.reliability.pairs", [1]), r"layers\[1\]: reliability has lists of other"),
        (change("layers", []), "no layers"),
        (change("groups.similarity", [0.5]), "groups: lists of other lengths"),
        (change("rows", None), "no 'rows'"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], says: str | None
) -> None:
    data = figures()
    data["layers"][1]["hit"] = 0.5
    damage(data)
    folder = write_plan(tmp_path / "p", data)
    if says is None:
        Predictors.open(Plan.open(folder))
        return
    with pytest.raises(PlanError, match=says) as caught:
        Predictors.open(Plan.open(folder))
    assert str(caught.value).endswith("compile the plan again")
    assert str(folder / "phaseper.json") in str(caught.value)
    run_here("pdscope-inspect", folder, "--predictor").fault()


def test_no_predictors_no_json(tmp_path: Path) -> None:
    said = run_here("pdscope-inspect", write_plan(tmp_path / "p", None), "--predictor").fault()
    assert "the plan has no predictors: compile it with --calibration FILE, or with" in said
    said = run_here("pdscope-inspect", write_plan(tmp_path / "q", "{"), "--predictor").fault()
    assert "phaseper.json: is no JSON" in said


def test_wrong_usage(plan: Path) -> None:
    for options in (["--on", "x"], ["--html", "x"]):
        ran = run_here("pdscope-inspect", plan, *options)
        assert ran.status == 2 and f"{options[0]} needs --predictor" in ran.err
    ran = run_here("pdscope-inspect", plan, "--predictor", "--graph")
    assert ran.status == 2 and "Give one of --layer" in ran.err
    assert (
        "has an empty name" in run_here("pdscope-inspect", plan, "--predictor", "--on", "").fault()
    )


def test_the_page_is_whole_and_small(plan: Path, tmp_path: Path) -> None:
    """No script, nothing from elsewhere; every plot parses, and holds what was measured."""
    page = tmp_path / "report.html"
    ran = run_here("pdscope-inspect", plan, "--predictor", "--html", page)
    assert ran.out.endswith(f"plots are in {page}\n")
    html = page.read_text()
    assert len(html) < 100_000 and "<script" not in html and "http" not in html
    plots = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(plots) == 5  # similarity; hit rate and reliability of both phases
    for plot in plots:
        minidom.parseString(plot)
    assert "<title>PhasePer 0: 0.800</title>" in plots[1]
    assert plots[1].count('r="6"') == 2 and plots[0].count("<rect") == 2
    assert not list(tmp_path.glob("*.part"))
    again = Predictors.open(Plan.open(plan))
    assert report(again, again.layers, "") == html
    assert "Figures are of &lt;b&gt;." in report(again, again.layers, "<b>")


def test_a_page_that_cannot_be_written(plan: Path, tmp_path: Path) -> None:
    said = run_here("pdscope-inspect", plan, "--predictor", "--html", tmp_path / "no/x").fault()
    assert "no/x: cannot be written: No such file or directory" in said


def test_one_phase_alone(tmp_path: Path) -> None:
    """A calibration of prompts only gives no predictors of decode."""
    data = figures()
    data["layers"] = [x for x in data["layers"] if x["phase"] == "prefill"]
    data["rows"].pop("decode"), data["validation"].pop("decode")
    ran = run_here(
        "pdscope-inspect", write_plan(tmp_path / "p", data), "--predictor", "--html", tmp_path / "x"
    )
    assert ran.status == 0 and "decode" not in ran.out


def test_figures_need_neither_numpy_nor_torch(plan: Path) -> None:
    """Holds: inspect answers at once."""
    code = (
        "import sys, pdscope.cli.inspect as c\n"
        f"try: c.main([{str(plan)!r}, '--predictor', '--html', {str(plan.parent / 'r.html')!r}])\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print(*{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.splitlines()[-1].split())
    assert not loaded & {"torch", "transformers", "numpy", "safetensors", "rich", "cffi"}
