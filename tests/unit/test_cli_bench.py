"""pdscope-bench on a stand-in library.

Holds the issue's lines on pdscope-bench: llama-bench's habits, Markdown and JSON, and "`-p` beyond
the context is an error naming the limit".
"""

import json
import statistics

import pytest
from support import fake_plan
from support.plans import PlanStore

from pdscope.cli import bench


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> str:
    return str(plans.once("fake", fake_plan.make_fake_plan))


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        bench.main.main(list(args))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_markdown(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, "-p", "8,96", "-n", "4", "-r", "3") == 0
    head, rule, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert head.split()[1:] == [
        *("model", "|", "size", "|", "params", "|", "isa", "|", "threads", "|", "test", "|"),
        *("t/s", "|", "min", "|", "median", "|", "max", "|"),
    ]
    assert set(rule) <= set("| -:")
    assert [row.split("|")[6].strip() for row in rows] == ["pp8", "pp96", "tg4"]
    assert all("\u00b1" in row for row in rows)
    assert len({len(line) for line in (head, rule, *rows)}) == 1


def test_dummy_weights_are_marked(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--load-format dummy`: the weights are made up at load, and results say so."""
    assert run(plan, "-p", "4", "-n", "0", "-r", "1", "--load-format", "dummy") == 0
    assert "\nDUMMY WEIGHTS: random values" in capsys.readouterr().out
    assert run(plan, "-p", "4", "-n", "0", "--load-format", "dummy", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["dummy_weights"] and entry["placement"]["weights"] == "dummy"
    assert entry["dummy_routing"] is None


def test_json(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, "-p", "16", "-n", "8", "-r", "5", "--json", "-t", "2") == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["test"] for r in report] == ["pp16", "tg8"]
    for entry in report:
        samples = [entry["tokens"] / s for s in entry["samples_seconds"]]
        assert len(samples) == 5
        speed = entry["tokens_per_second"]
        assert speed["mean"] == pytest.approx(statistics.fmean(samples))
        assert speed["stddev"] == pytest.approx(statistics.stdev(samples))
        assert speed["min"] <= speed["median"] <= speed["max"]
        assert entry["threads"] == 2 and entry["isa"] == "fake"
        assert entry["placement"]["threads"] == 2 and entry["placement"]["weights"] == "mmap"
        assert entry["cache_prefetch"]["asked"] == "auto"


@pytest.mark.parametrize(
    ("args", "tests"),
    [(("-p", "0", "-n", "2"), ["tg2"]), (("-p", "2", "-n", "0"), ["pp2"])],
)
def test_zero_skips(
    plan: str, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], tests: list[str]
) -> None:
    assert run(plan, *args, "-r", "1", "--json", "--no-warmup") == 0
    assert [r["test"] for r in json.loads(capsys.readouterr().out)] == tests


@pytest.mark.parametrize(("flag", "other"), [("-p", "-n"), ("-n", "-p")])
def test_beyond_the_context(
    plan: str, capsys: pytest.CaptureFixture[str], flag: str, other: str
) -> None:
    assert run(plan, flag, "16,97", other, "0") == 1
    err = capsys.readouterr().err
    assert f"error: {flag} 97: the plan's context is 96 tokens" in err


@pytest.mark.parametrize(
    "args",
    [
        *(("-p", "x"), ("-p", "-1"), ("-r", "0"), ("-p", "0", "-n", "0"), ("-p", "")),
        *(("--policy", "all"), ("--load-format", "dummy", "--weights", "mmap")),
    ],
)
def test_wrong_usage(plan: str, args: tuple[str, ...]) -> None:
    assert run(plan, *args) == 2


def test_missing_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("/no/such/plan") == 1
    assert "no such directory" in capsys.readouterr().err
