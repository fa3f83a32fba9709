"""Engine and Session on a stand-in library.

Holds the issue's point 3, Python API: prefill, decode, reset, stats, context manager, many
sessions, several threads, cancel from another thread, fork, truncate, save and restore, os.fork.
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import fake_plan
from support.fake_plan import MAX_CONTEXT, MAX_LOGITS, MAX_ROWS, VOCAB
from support.plans import PlanStore

import pdscope
from pdscope import native
from pdscope.errors import BudgetError, Cancelled, InputError, PdscopeError, PlanError, TargetError
from pdscope.observe import TapEvent


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Path:
    return plans.once("fake", fake_plan.make_fake_plan)


@pytest.fixture
def engine(plan: Path) -> Iterator[pdscope.Engine]:
    with pdscope.load(plan) as loaded:
        yield loaded


@pytest.fixture
def slow(plan: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pdscope.Engine]:
    """An engine whose steps take 300 ms."""
    monkeypatch.setenv("FAKE_STEP_MS", "300")
    with pdscope.load(plan) as loaded:
        yield loaded


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def test_info_names_the_limits(engine: pdscope.Engine) -> None:
    info = engine.info
    assert (info.vocab, info.max_context, info.max_rows) == (VOCAB, MAX_CONTEXT, MAX_ROWS)
    assert info.isa == "fake" and info.plan_hash == engine.plan.plan_hash


@pytest.mark.parametrize("n", [1, 2, MAX_LOGITS, MAX_LOGITS + 1, MAX_ROWS, MAX_ROWS + 1, 95, 96])
def test_prefill_splits_by_itself(engine: pdscope.Engine, n: int) -> None:
    tokens = ids(n)
    last = engine.prefill(tokens).copy()
    assert last.shape == (VOCAB,) and last.dtype == np.float32
    engine.reset()
    rows = engine.prefill(tokens, all_logits=True).copy()
    assert rows.shape == (n, VOCAB)
    assert np.array_equal(rows[-1], last)
    engine.reset()
    for i, token in enumerate(tokens):
        assert np.array_equal(engine.decode(token), rows[i]), i


def test_prefill_continues_the_sequence(engine: pdscope.Engine) -> None:
    whole = engine.prefill(ids(40)).copy()
    engine.reset()
    engine.prefill(ids(40)[:17])
    assert np.array_equal(engine.prefill(ids(40)[17:]), whole)


def test_numpy_and_torch_like_inputs(engine: pdscope.Engine) -> None:
    expected = engine.prefill([3, 4]).copy()
    for kind in (np.int32, np.int64, np.uint8):
        engine.reset()
        assert np.array_equal(engine.prefill(np.array([3, 4], kind)), expected)


def test_logits_are_a_view_valid_until_the_next_step(engine: pdscope.Engine) -> None:
    first = engine.prefill([5])
    assert not first.flags.owndata and not first.flags.writeable
    kept = first.copy()
    engine.decode(6)
    assert not np.array_equal(first, kept)


def test_logits_outlive_close(plan: Path) -> None:
    engine = pdscope.load(plan)
    session = engine.session()
    logits = session.prefill([1, 2, 3])
    kept = logits.copy()
    session.close()
    engine.close()
    del session, engine
    gc.collect()
    assert np.array_equal(logits, kept)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([], InputError, "empty"),
        (
            [1, VOCAB],
            InputError,
            f"token id {VOCAB} at index 1 is outside .* vocabulary of {VOCAB}",
        ),
        ([-1], InputError, "token id -1"),
        ([2**40], InputError, "32 bits"),
        ([1.5], InputError, "expected integers"),
        ([[1, 2]], InputError, "one dimension"),
        ([1] * (MAX_CONTEXT + 1), BudgetError, f"context of {MAX_CONTEXT} tokens.*--max-context"),
    ],
)
def test_bad_tokens(
    engine: pdscope.Engine, tokens: list[int], error: type[PdscopeError], message: str
) -> None:
    """Holds: prompt longer than the context, empty prompt, each with a clear error."""
    with pytest.raises(error, match=message):
        engine.prefill(tokens)
    assert engine.main.length() == 0
    assert engine.prefill([1]).shape == (VOCAB,)


def test_bad_decode(engine: pdscope.Engine) -> None:
    with pytest.raises(InputError, match="token id 64"):
        engine.decode(VOCAB)
    engine.prefill([1] * MAX_CONTEXT)
    with pytest.raises(BudgetError, match="context"):
        engine.decode(1)
    with pytest.raises(BudgetError, match="after the 96 already there"):
        engine.prefill([1])


def test_step_mixes_sequences(engine: pdscope.Engine) -> None:
    alone = []
    for tokens in ([1, 2, 3], [9, 8], [30]):
        engine.reset()
        alone.append(engine.prefill(tokens).copy())
    with engine.session(max_seqs=3) as session:
        seqs = [0, 1, 0, 2, 1, 0]
        tokens = [1, 9, 2, 30, 8, 3]
        want = [0, 0, 0, 1, 1, 1]
        logits = session.step(tokens, None, seqs, want)
        assert np.array_equal(logits, np.stack([alone[2], alone[1], alone[0]]))
        assert [session.length(s) for s in range(3)] == [3, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1] * (MAX_ROWS + 1),), BudgetError, "--max-rows"),
        (([1], [5]), InputError, "position"),
        (([1], None, 7), InputError, "sequence"),
        (([1, 2], [0, 1, 2]), InputError, "positions has shape"),
        (([1, 2], None, 0, [1]), InputError, "want_logits has shape"),
        (([1] * 16, None, 0, [1] * 16), BudgetError, "max_logits"),
        (([VOCAB],), InputError, "vocabulary"),
        (([],), InputError, "empty"),
    ],
)
def test_bad_steps(
    engine: pdscope.Engine, arguments: tuple[object, ...], error: type[PdscopeError], message: str
) -> None:
    with engine.session(max_seqs=2) as session, pytest.raises(error, match=message):
        session.step(*arguments)  # type: ignore[arg-type]


def test_fork_truncate_save_restore(engine: pdscope.Engine, tmp_path: Path) -> None:
    with engine.session(max_seqs=3) as session:
        session.prefill(ids(20))
        session.fork(0, 1)
        expected = session.decode(7, seq=0).copy()
        assert np.array_equal(session.decode(7, seq=1), expected)
        session.truncate(1, 20)
        assert session.length(1) == 20
        saved = session.save(1)
        assert isinstance(saved, bytes)
        assert session.save(1, tmp_path / "kv.bin") is None
        assert sorted(p.name for p in tmp_path.iterdir()) == ["kv.bin"]
        session.reset()
        assert [session.length(s) for s in range(3)] == [0, 0, 0]
        session.restore(saved, seq=2)
        assert np.array_equal(session.decode(7, seq=2), expected)
    with engine.session() as other:
        other.restore(tmp_path / "kv.bin")
        assert np.array_equal(other.decode(7), expected)
        with pytest.raises(PlanError, match="saved sequence"):
            other.restore(saved[:-1])
        with pytest.raises(InputError, match="cannot be read"):
            other.restore(tmp_path / "none.bin")
        with pytest.raises(InputError):
            other.fork(0, 1)
    engine.prefill(ids(20))
    kept = engine.save()
    assert kept is not None
    engine.truncate(3)
    engine.restore(kept)
    assert np.array_equal(engine.decode(7), expected)


def test_save_to_a_bad_path(engine: pdscope.Engine, tmp_path: Path) -> None:
    """Holds: what the caller passed is an InputError that names it; a full disk is a limit."""
    engine.prefill([1])
    for path in (tmp_path / "no" / "kv.bin", Path("/dev/null/kv.bin"), tmp_path):
        with pytest.raises(InputError, match=f"^{path}: cannot be written"):
            engine.save(path)
    with pytest.raises(BudgetError, match="/dev/full: cannot be written"):
        engine.save("/dev/full")


def test_sessions_are_apart(engine: pdscope.Engine) -> None:
    sessions = [engine.session() for _ in range(4)]
    expected = []
    for n, session in enumerate(sessions, 1):
        expected.append(session.prefill(ids(n)).copy())
    for n, session in enumerate(sessions, 1):
        session.reset()
        assert np.array_equal(session.prefill(ids(n)), expected[n - 1])


def test_stats_and_trace(engine: pdscope.Engine) -> None:
    before = engine.stats()
    with engine.main.trace(capacity=7) as trace:
        engine.prefill(ids(20))
    after = engine.stats()
    assert after.rows - before.rows == 20 and after.steps - before.steps == 2
    assert len(trace.records) == 7 and trace.dropped == 1
    assert trace.opcode_names() == {0: "embed", 1: "expert"}
    assert trace.queue_names() == {1: "cpu"}
    assert trace.records["rows"].tolist() == [16, 16, 16, 16, 4, 4, 4]


def test_tap_sees_events_and_passes_errors_on(engine: pdscope.Engine) -> None:
    seen: list[tuple[int, list[float], list[int] | None]] = []

    def tap(event: TapEvent) -> None:
        found = None if event.ids is None else event.ids.ravel().tolist()
        seen.append((event.layer, event.data.ravel().tolist(), found))

    with engine.main.tap(tap):
        engine.prefill([1])
    assert seen[0] == (-1, [0.25, 0.75], None)
    assert seen[1] == (0, [0.25, 0.75], [0, 1])
    seen.clear()
    engine.decode(1)
    assert not seen

    def broken(event: TapEvent) -> None:
        raise ValueError("from the tap")

    with engine.main.tap(broken), pytest.raises(ValueError, match="from the tap"):
        engine.decode(1)
    engine.decode(1)


def test_close_is_idempotent_and_final(plan: Path) -> None:
    engine = pdscope.load(plan)
    session = engine.session()
    engine.prefill([1])
    engine.close()
    engine.close()
    session.close()
    for call in (engine.stats, engine.reset, engine.cancel, lambda: engine.decode(1)):
        with pytest.raises(PdscopeError, match="closed"):
            call()
    with pytest.raises(PdscopeError, match="closed"):
        session.prefill([1])
    with pytest.raises(PdscopeError, match="closed"):
        engine.session()


def test_dropped_engines_free_themselves(plan: Path) -> None:
    """The stand-in aborts the process if an engine goes before its sessions."""
    for _ in range(3):
        engine = pdscope.load(plan)
        sessions = [engine.session() for _ in range(2)]
        stream = engine.generate("Hello", stream=True)
        next(stream)
        del engine
        sessions[0].prefill([1])
        del sessions, stream
        gc.collect()


def test_a_session_is_collected_inside_cffi(engine: pdscope.Engine) -> None:
    """A collection may begin while cffi looks up a function of another library: its lock, which is
    not reentrant, is held then."""
    kept = [engine.session()]

    def collect() -> None:
        with native.ffi()._lock:
            kept.clear()
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()


def test_threads_share_one_session(engine: pdscope.Engine) -> None:
    """Calls take turns, so every generation is what it would be alone."""
    expected = {p: engine.generate([p], max_new_tokens=20).tokens for p in range(5, 13)}
    found: dict[int, tuple[int, ...]] = {}

    def work(prompt: int) -> None:
        for _ in range(5):
            found[prompt] = engine.generate([prompt], max_new_tokens=20).tokens

    run_all([threading.Thread(target=work, args=(p,)) for p in expected])
    assert found == expected


def test_threads_with_a_session_each(engine: pdscope.Engine) -> None:
    expected = {p: engine.generate([p], max_new_tokens=20).tokens for p in range(5, 13)}
    found: dict[int, tuple[int, ...]] = {}

    def work(prompt: int) -> None:
        with engine.session() as session:
            stream = session.generate([prompt], max_new_tokens=20, stream=True)
            for _ in stream:
                pass
            found[prompt] = tuple(stream.tokens)

    run_all([threading.Thread(target=work, args=(p,)) for p in expected])
    assert found == expected


def test_streams_of_threads_take_turns(engine: pdscope.Engine) -> None:
    found: dict[int, tuple[int, ...]] = {}

    def work(prompt: int) -> None:
        stream = engine.generate([prompt], max_new_tokens=10, stream=True)
        for _ in stream:
            time.sleep(0.001)
        found[prompt] = tuple(stream.tokens)

    run_all([threading.Thread(target=work, args=(p,)) for p in (5, 6, 7)])
    assert found == {p: tuple(range(p + 1, p + 11)) for p in (5, 6, 7)}


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_same_thread_overtakes_its_stream(engine: pdscope.Engine) -> None:
    old = engine.generate("Hello", stream=True)
    next(old)
    assert engine.generate([5], max_new_tokens=3).tokens == (6, 7, 8)
    with pytest.raises(PdscopeError, match=r"overtaken.*engine\.session"):
        next(old)
    old = engine.generate("Hello", stream=True)
    next(old)
    engine.reset()
    with pytest.raises(PdscopeError, match="overtaken"):
        next(old)


def test_abandoned_stream_leaves_the_session_usable(engine: pdscope.Engine) -> None:
    stream = engine.generate("Hello", stream=True)
    next(stream)
    found: list[tuple[int, ...]] = []
    waiter = threading.Thread(
        target=lambda: found.append(engine.generate([5], max_new_tokens=3).tokens)
    )
    waiter.start()
    time.sleep(0.1)
    assert not found  # it waits for the stream
    del stream
    gc.collect()
    run = waiter
    run.join(120)
    assert found == [(6, 7, 8)]


def test_stream_of_a_dead_thread_holds_nobody_up(engine: pdscope.Engine) -> None:
    kept: list[pdscope.Stream] = []

    def begin() -> None:
        kept.append(engine.generate("Hello", stream=True))
        next(kept[0])

    run_all([threading.Thread(target=begin)])
    assert engine.generate([5], max_new_tokens=3).tokens == (6, 7, 8)


def cancel_soon(engine: pdscope.Engine) -> threading.Thread:
    def cancel() -> None:
        while not engine.cancel():  # nothing runs yet
            time.sleep(0.01)

    thread = threading.Thread(target=cancel)
    thread.start()
    return thread


def test_cancel_stops_a_generation(slow: pdscope.Engine) -> None:
    thread = cancel_soon(slow)
    begin = time.perf_counter()
    with pytest.raises(Cancelled):
        slow.generate([5], max_new_tokens=90, ignore_eos=True)
    assert time.perf_counter() - begin < 20  # of 27 seconds
    thread.join()
    assert slow.generate([5], max_new_tokens=2).tokens == (6, 7)


def test_cancel_stops_a_prefill_and_undoes_it(slow: pdscope.Engine) -> None:
    slow.prefill([1, 2])
    thread = cancel_soon(slow)
    with pytest.raises(Cancelled):
        slow.prefill([3] * 90)
    thread.join()
    assert slow.main.length() == 2


def test_cancel_of_a_waiting_stream(engine: pdscope.Engine) -> None:
    stream = engine.generate([5], stream=True)
    next(stream)
    assert engine.cancel()
    with pytest.raises(Cancelled):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_cancel_when_nothing_runs_does_nothing(engine: pdscope.Engine) -> None:
    assert engine.cancel() is False
    engine.prefill([1])
    assert engine.cancel() is False
    engine.decode(2)


def test_late_cancel_does_not_hit_the_next_call(engine: pdscope.Engine) -> None:
    """A cancel that arrives after the last step of a generation is not meant for the next one."""
    stream = engine.generate([5], max_new_tokens=1, stream=True)
    next(stream)
    stream2 = engine.generate([5], max_new_tokens=2, stream=True)
    next(stream2)
    assert engine.cancel()
    stream2.close()
    assert engine.generate([5], max_new_tokens=3).tokens == (6, 7, 8)


def test_close_ends_what_runs(slow: pdscope.Engine) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            slow.generate([5], max_new_tokens=90, ignore_eos=True)
        except PdscopeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    slow.close()
    thread.join(120)
    assert len(errors) == 1


def test_child_of_fork_gets_a_clear_error(engine: pdscope.Engine) -> None:
    engine.prefill([1])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        report = b""
        try:
            for call in (
                lambda: engine.decode(1),
                lambda: engine.session(),
                lambda: engine.generate("Hello"),
                engine.cancel,
            ):
                try:
                    call()
                except PdscopeError as error:
                    report += b"ok " if b"fork" in str(error).encode() else b"bad "
            engine.close()
            report += b"closed"
        finally:
            os.write(write, report)
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"ok ok ok ok closed"
    assert engine.decode(1).shape == (VOCAB,)


def test_bad_options(plan: Path, engine: pdscope.Engine) -> None:
    with pytest.raises(InputError, match="threads is -1"):
        pdscope.load(plan, threads=-1)
    with pytest.raises(TargetError, match="unknown kernel path"):
        pdscope.load(plan, isa="nonsense")
    with pytest.raises(InputError, match="max_seqs is 0"):
        engine.session(max_seqs=0)
    with pytest.raises(InputError, match="kv_tokens is -1"):
        engine.session(kv_tokens=-1)


def test_environment_chooses(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSCOPE_THREADS", "3")
    with pdscope.load(plan) as engine:
        assert engine.info.threads == 3
    with pdscope.load(plan, threads=2) as engine:
        assert engine.info.threads == 2
    monkeypatch.setenv("PDSCOPE_ISA", "bogus")
    with pytest.raises(TargetError):
        pdscope.load(plan)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.decode(3.7),
        lambda e: e.decode(True),
        lambda e: e.prefill([1, True]),
        lambda e: e.prefill([[1], [2, 3]]),
        lambda e: e.main.step([1, 2, 3], seqs=[0, 1]),
        lambda e: e.main.prefill([1], seq=2**40),
        lambda e: e.main.decode(1, seq=1.0),
        lambda e: e.main.length(None),
        lambda e: e.generate([1], seq=2**40),
        lambda e: e.generate({"role": "user"}),
        lambda e: e.generate([1], stop=None),
        lambda e: e.generate([1], stop=[5]),
        lambda e: e.generate([1], temperature="a"),
        lambda e: e.generate([1], temperature=1.0, seed=1.5),
        lambda e: e.generate([1], max_new_tokens=2.5),
        lambda e: e.generate("Hello", chat=True, chat_options={"messages": []}),
        lambda e: e.restore(memoryview(bytes(64))[::2]),
    ],
)
def test_arguments_of_wrong_kind(
    engine: pdscope.Engine, call: Callable[[pdscope.Engine], object]
) -> None:
    """Holds: every misuse is an InputError, never another exception."""
    with pytest.raises(InputError):
        call(engine)


def test_save_keeps_links_and_pipes(engine: pdscope.Engine, tmp_path: Path) -> None:
    engine.prefill([1, 2])
    (tmp_path / "link").symlink_to(tmp_path / "real")
    engine.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").stat().st_size > 0
    engine.save("/dev/null")
    assert not Path("/dev/null").is_file()
