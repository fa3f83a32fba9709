"""The Python API on the real runtime and the bundled model.

Holds the issue's point 3 where the stand-in library of test_engine.py proves nothing: KV that is
forked, cut, saved and restored, cancellation within a step, os.fork with a worker pool, memory that
outlives close, the command's and Python's tokens.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.assets import model_path, recorded_texts
from support.plans import PlanStore

import pdscope
from pdscope.errors import BudgetError, Cancelled, InputError, PdscopeError, PlanError


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Path:
    return plans.compile(model_path("tiny-mixtral"))


@pytest.fixture(scope="module")
def engine(plan: Path) -> Iterator[pdscope.Engine]:
    with pdscope.load(plan, threads=2) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text() -> list[int]:
    return (recorded_texts("tiny-mixtral")[0] * 40)[:1024]


def test_fork_truncate_save_restore(engine: pdscope.Engine, text: list[int]) -> None:
    """Around the border of a KV block (64 tokens)."""
    with engine.session(max_seqs=3) as session:
        for n in (1, 63, 64, 65, 130):
            session.reset()
            session.prefill(text[:n])
            session.fork(0, 1)
            saved = session.save(0)
            expected = session.decode(9, seq=0).copy()
            assert np.array_equal(session.decode(9, seq=1), expected)
            session.decode(10, seq=1)
            session.decode(11, seq=0)
            session.truncate(0, n)
            assert np.array_equal(session.decode(9, seq=0), expected)
            assert saved is not None
            session.restore(saved, seq=2)
            assert session.length(2) == n
            assert np.array_equal(session.decode(9, seq=2), expected)


def test_saved_sequence_that_was_cut_or_is_foreign(
    engine: pdscope.Engine, text: list[int], plans: PlanStore
) -> None:
    engine.reset()
    engine.prefill(text[:70])
    saved = engine.save()
    assert saved is not None
    for bad in (b"", saved[:10], saved[:-1], saved + b"x", b"\0" * len(saved)):
        with pytest.raises(PlanError):
            engine.restore(bad)
    other = plans.compile(model_path("tiny-mixtral"), dtype="fp32")
    with pdscope.load(other) as foreign, pytest.raises(PlanError):
        foreign.restore(saved)
    engine.restore(saved)
    assert engine.main.length() == 70


def test_kv_runs_out_with_a_clear_error(engine: pdscope.Engine, text: list[int]) -> None:
    with engine.session(max_seqs=2, kv_tokens=128) as session:
        session.prefill(text[:100], seq=0)
        with pytest.raises(BudgetError):
            session.prefill(text[:100], seq=1)
        assert session.length(0) == 100 and session.length(1) == 0
        session.reset(0)
        session.prefill(text[:100], seq=1)


def test_full_context(engine: pdscope.Engine, text: list[int]) -> None:
    """Holds: full context +-1 stops cleanly."""
    limit = engine.info.max_context
    for room in (0, 1):
        done = engine.generate(text[: limit - room], max_new_tokens=9, ignore_eos=True)
        assert done.stop_reason == "context" and len(done.tokens) == room + 1
    with pytest.raises(BudgetError, match=f"context is {limit}"):
        engine.generate([*text, 1])
    assert engine.generate(text[:5], max_new_tokens=2).stop_reason == "length"


def test_prefill_errors_name_the_limit(engine: pdscope.Engine) -> None:
    engine.reset()
    with pytest.raises(InputError, match=f"vocabulary of {engine.info.vocab}"):
        engine.prefill([engine.info.vocab])
    with pytest.raises(BudgetError, match=f"{engine.info.max_rows} rows a step"):
        engine.main.step([1] * (engine.info.max_rows + 1))


def test_cancel_within_a_step(engine: pdscope.Engine, text: list[int]) -> None:
    engine.reset()
    engine.prefill(text[:3])
    stop = threading.Event()

    def cancel() -> None:
        while not stop.is_set():
            engine.cancel()
            time.sleep(0.0005)

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        with pytest.raises(Cancelled):
            for _ in range(1000):
                engine.prefill(text[3:])
                engine.truncate(3)
    finally:
        stop.set()
        thread.join()
    assert engine.main.length() == 3
    after = engine.decode(7).copy()
    engine.reset()
    engine.prefill(text[:3])
    assert np.array_equal(engine.decode(7), after)


def test_sessions_side_by_side(engine: pdscope.Engine, text: list[int]) -> None:
    prompts = [text[i : i + 20] for i in range(0, 80, 20)]
    alone = [engine.generate(p, max_new_tokens=12, ignore_eos=True).tokens for p in prompts]
    found: dict[int, tuple[int, ...]] = {}

    def work(index: int) -> None:
        with engine.session() as session:
            done = session.generate(prompts[index], max_new_tokens=12, ignore_eos=True)
            found[index] = done.tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [found[i] for i in range(len(prompts))] == alone


def test_child_of_fork(engine: pdscope.Engine, plan: Path) -> None:
    """The child's copy is refused; a fresh load in the child works."""
    code = (
        "import os, sys, pdscope\n"
        "engine = pdscope.load(sys.argv[1], threads=2)\n"
        "expected = engine.generate([1, 9, 9], max_new_tokens=5).tokens\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        engine.decode(1)\n"
        "    except pdscope.PdscopeError as error:\n"
        "        assert 'fork' in str(error)\n"
        "        engine.close()\n"
        "        with pdscope.load(sys.argv[1], threads=2) as own:\n"
        "            same = own.generate([1, 9, 9], max_new_tokens=5).tokens == expected\n"
        "        os._exit(0 if same else 1)\n"
        "    os._exit(2)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "engine.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(plan)], check=True, timeout=300)


def test_logits_outlive_the_engine(plan: Path) -> None:
    engine = pdscope.load(plan, threads=1)
    logits = engine.prefill([1, 2, 3])
    kept = logits.copy()
    engine.close()
    del engine
    gc.collect()
    assert np.array_equal(logits, kept)


def test_engines_come_and_go(plan: Path) -> None:
    """No thread, mapping or descriptor stays behind."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with pdscope.load(plan, threads=2) as engine:
        engine.prefill([1])
    files, threads = descriptors(), len(os.listdir("/proc/self/task"))
    for _ in range(5):
        engine = pdscope.load(plan, threads=2)
        engine.prefill([1])
        engine.close()
        del engine
    gc.collect()
    assert descriptors() == files
    assert len(os.listdir("/proc/self/task")) <= threads


def test_command_and_python_say_the_same(engine: pdscope.Engine, plan: Path) -> None:
    """Holds: command and Python on one prompt give the same tokens (a fault others had)."""
    for options, flags in (
        ({}, []),
        ({"chat": True}, ["--chat"]),
        ({"temperature": 0.8, "seed": 3}, ["--temperature", "0.8", "--seed", "3"]),
    ):
        done = engine.generate("What is music?", max_new_tokens=12, **options)
        args = [str(plan), "-p", "What is music?", "-n", "12", "--json", "-t", "1", *flags]
        out = subprocess.run(
            [sys.executable, "-m", "pdscope.cli.run", *args],
            capture_output=True,
            text=True,
            check=True,
        )
        report = json.loads(out.stdout)
        assert report["tokens"] == list(done.tokens) and report["text"] == done.text
        stream = engine.generate("What is music?", max_new_tokens=12, stream=True, **options)
        assert "".join(stream) == done.text


def test_busy_sessions_never_reach_the_runtime(engine: pdscope.Engine) -> None:
    """Threads on one session take turns; PDS_ERR_BUSY would be an error here."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                engine.generate([1, 5], max_new_tokens=3)
        except PdscopeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors
