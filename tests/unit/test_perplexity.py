"""pdscope-bench --perplexity on a stand-in library (issue: "perplexity printed against bf16")."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fake_plan
from support.plans import PlanStore

import pdscope
from pdscope.cli import bench
from pdscope.errors import InputError
from pdscope.perplexity import measure, read_windows


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> str:
    return str(plans.once("fake", fake_plan.make_fake_plan))


@pytest.fixture
def engine(plan: str) -> Iterator[Any]:
    with pdscope.load(plan) as engine:
        yield engine


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        bench.main.main(list(args))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_it_is_the_mean_loss_of_every_token_but_the_first(engine: Any) -> None:
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, engine.info.vocab, n, dtype=np.int32) for n in (2, 17, 96)]
    losses: list[float] = []
    for ids in windows:
        engine.reset()
        for token, following in zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True):
            logits = np.array(engine.decode(token), np.float64)
            losses.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max())
            losses[-1] -= logits[following]
    found = measure(engine, windows)
    assert (found.tokens, found.windows) == (112, 3)
    assert found.loss == pytest.approx(np.mean(losses), abs=1e-9)
    assert found.value == pytest.approx(np.exp(np.mean(losses)))


def test_windows_of_a_text(engine: Any, tmp_path: Path) -> None:
    """No longer than the context, 96 here; a rest of one token predicts nothing."""
    text = tmp_path / "a.txt"
    text.write_text("ab " * 300)
    ids = engine.tokenizer.encode(text.read_text())
    windows = read_windows(engine, text)
    assert {len(w) for w in windows[:-1]} <= {96}
    assert np.concatenate(windows).tolist() == ids[: len(np.concatenate(windows))].tolist()
    assert len(ids) - sum(map(len, windows)) < 2
    short = read_windows(engine, text, limit=100)
    assert [len(w) for w in short] == [96, 4]


def test_lines_are_texts_or_chats(engine: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    messages = [{"role": "user", "content": "ab ab"}, {"role": "assistant", "content": "ab"}]
    file.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"text": "ab ab"}))
    chat, plain = read_windows(engine, file)
    whole = engine.tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert chat.tolist() == whole.tolist()
    assert plain.tolist() == engine.tokenizer.encode("ab ab").tolist()
    file.write_text('{"text": "ab ab"}\n{"text": 3}')
    with pytest.raises(InputError, match=r"a\.jsonl:2: expected"):
        read_windows(engine, file)
    file.write_text("")
    with pytest.raises(InputError, match="less than two tokens"):
        read_windows(engine, file)


def test_table_and_json(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("ab " * 30)
    assert run(plan, "--perplexity", str(text), "--against", plan) == 0
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert [c.strip() for c in head.split("|")[1:-1]] == [
        *("plan", "dtype", "size", "isa", "tokens", "perplexity", "ratio"),
    ]
    assert first == second and first.split("|")[-2].strip() == "1.0000"
    assert run(plan, "--perplexity", str(text), "--tokens", "20", "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["tokens"] == 19 and report["ratio"] == 1
    assert report["perplexity"] == pytest.approx(np.exp(report["loss"]))


def test_wrong_usage(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan, "--against", plan) == 2
    assert run(plan, "--tokens", "5") == 2
    assert run(plan, "--perplexity", str(tmp_path / "none.txt")) == 1
    assert "none.txt" in capsys.readouterr().err


def test_faults_of_the_file(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Holds: one line that names the file once, and the line and field in it."""
    missing, foreign, chats = tmp_path / "none", tmp_path / "foreign", tmp_path / "chats.jsonl"
    foreign.write_bytes(b"ab\xff")
    chats.write_text('{"text": "ab"}\n{"messages": [{"role": "user", "content": 5}]}\n')
    for file, message in (
        (missing, f"{missing}: No such file or directory: expected a text file in UTF-8"),
        (foreign, f"{foreign}: is not valid UTF-8 (at byte 2): convert it first"),
        (chats, f"{chats}:2: message 0: content is 5, expected a text"),
    ):
        with pytest.raises(SystemExit) as caught:
            bench.main.main([plan, "--perplexity", str(file)])
        err = capsys.readouterr().err
        assert caught.value.code == 1 and err.startswith(f"error: {message}")
        assert err.count("\n") == 1 and "Errno" not in err and err.count(str(file)) == 1
