"""The mock CUDA driver's two clocks: when work ends, to the nanosecond on the virtual one.

Holds of the issue "AdaptSched and its lowering": "the mock driver has a virtual clock (CI) and a
wall clock (benchmarks)"; "asynchronous copies with configurable bandwidth and latency".
"""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda import Driver, at, ffi
from support.mock_driver import copy, gpu, host_work, library, mark, when
from support.stream_model import Link, Model, Op

__all__ = ["gpu", "library"]

NULL = ffi().NULL

# --- the virtual clock ---


def test_nothing_happens_until_time_passes(gpu: Driver) -> None:
    stream = gpu.stream()
    event = copy(gpu, stream, 1000)
    assert gpu.cuEventQuery(event) == "CUDA_ERROR_NOT_READY"
    assert gpu.cuStreamQuery(stream) == "CUDA_ERROR_NOT_READY"
    assert (gpu.pds_mock_now(), gpu.pds_mock_next(), when(gpu, event)) == (0, 1000, -1)
    gpu.pds_mock_advance(999)
    assert gpu.cuEventQuery(event) == "CUDA_ERROR_NOT_READY"
    gpu.pds_mock_advance(1000)
    gpu.ok.cuEventQuery(event)
    gpu.ok.cuStreamQuery(stream)
    assert (gpu.pds_mock_now(), gpu.pds_mock_next(), when(gpu, event)) == (1000, -1, 1000)
    gpu.pds_mock_advance(500)
    assert gpu.pds_mock_now() == 1000


def test_a_wait_jumps_to_the_end(gpu: Driver) -> None:
    """And not beyond what is waited for."""
    a, b = gpu.stream(), gpu.stream()
    first, second = copy(gpu, a, 1000), copy(gpu, b, 500, to_device=False)
    gpu.ok.cuEventSynchronize(second)
    assert gpu.pds_mock_now() == 500
    assert gpu.cuEventQuery(first) == "CUDA_ERROR_NOT_READY"
    gpu.ok.cuStreamSynchronize(a)
    assert gpu.pds_mock_now() == 1000
    assert gpu.ok.cuEventElapsedTime(second, first) == np.float32(0.0005)


def test_all_of_one_instant_has_happened(gpu: Driver) -> None:
    """Work that ends when the awaited does is complete too, and kernels that end at one instant
    have their effects in the order of submission."""
    gpu.configure("kernel.append.base=100")
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(4)
    gpu.ok.cuMemsetD8Async(to, 0, 16, a)
    gpu.ok.cuStreamSynchronize(a)
    for stream, value in ((a, 7), (b, 8)):
        assert gpu.launch("append", stream, to, value) == "CUDA_SUCCESS"
    second = mark(gpu, b)
    gpu.ok.cuStreamSynchronize(a)
    gpu.ok.cuEventQuery(second)
    gpu.ok.cuStreamQuery(b)
    assert gpu.read(to, 3) == [2, 7, 8]


def test_one_engine_a_direction(gpu: Driver) -> None:
    """Copies of a direction come after each other, those of the other run beside them."""
    streams = [gpu.stream() for _ in range(4)]
    up = [copy(gpu, streams[i], 100 + i) for i in range(3)]
    down = copy(gpu, streams[3], 70, to_device=False)
    gpu.pds_mock_advance(10_000)
    assert [when(gpu, e) for e in (*up, down)] == [100, 201, 303, 70]


def test_the_copy_that_was_ready_first_goes_first(gpu: Driver) -> None:
    """Not the one that was submitted first."""
    gpu.configure("kernel.mix.base=50")
    a, b, c = gpu.stream(), gpu.stream(), gpu.stream()
    to = gpu.alloc(1)
    running = copy(gpu, c, 100)
    assert gpu.launch("mix", a, to) == "CUDA_SUCCESS"
    late = copy(gpu, a, 10)
    gpu.pds_mock_advance(20)
    early = copy(gpu, b, 10)
    gpu.pds_mock_advance(1000)
    assert [when(gpu, e) for e in (running, early, late)] == [100, 110, 120]


def test_copies_that_are_ready_at_one_instant_go_in_order_of_submission(gpu: Driver) -> None:
    """Also where other work of that instant comes between."""
    gpu.configure("kernel.mix.base=50")
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(1)
    assert gpu.launch("mix", a, to) == "CUDA_SUCCESS"
    assert gpu.launch("mix", b, to) == "CUDA_SUCCESS"
    mark(gpu, b)
    first = copy(gpu, b, 10)
    second = copy(gpu, a, 10)
    gpu.pds_mock_advance(1000)
    assert (when(gpu, first), when(gpu, second)) == (60, 70)


def test_latency_and_start(gpu: Driver) -> None:
    """Every copy pays `latency`; `start` only the one that finds the engine idle."""
    gpu.configure("h2d_latency=7; h2d_start=100")
    a, b = gpu.stream(), gpu.stream()
    events = [copy(gpu, a, 10), copy(gpu, b, 10)]
    gpu.pds_mock_advance(134)  # both are done at this very instant, and another follows at once
    events.append(copy(gpu, a, 10))
    gpu.pds_mock_advance(152)
    events.append(copy(gpu, b, 10))
    gpu.pds_mock_advance(1000)
    assert [when(gpu, e) for e in events] == [117, 134, 151, 152 + 117]


def test_bytes_are_rounded_up_to_nanoseconds(gpu: Driver) -> None:
    gpu.configure("h2d=3GB/s; d2d=3GB/s; d2d_latency=5")
    stream, to = gpu.stream(), gpu.alloc(8)
    assert [when(gpu, e) for e in (copy(gpu, stream, 6),) if not gpu.pds_mock_advance(9)] == [2]
    event = copy(gpu, stream, 7)
    gpu.ok.cuMemsetD8Async(to, 0, 7, stream)
    last = mark(gpu, stream)
    gpu.ok.cuMemcpyDtoDAsync(to, to + 16, 7, stream)
    end = mark(gpu, stream)
    gpu.ok.cuStreamSynchronize(stream)
    assert [when(gpu, e) for e in (event, last, end)] == [12, 20, 28]


def test_the_link_is_slower_while_the_host_works(gpu: Driver) -> None:
    """To the nanosecond, for the part of a copy that falls into the work."""
    gpu.configure("h2d=4GB/s; h2d_busy=1GB/s; host.experts.base=10; host.experts.curve=1:5,3:15")
    stream = gpu.stream()
    event = copy(gpu, stream, 400)
    gpu.pds_mock_advance(20)  # 80 of 400 bytes
    tokens = ffi().new("uint32_t[]", [1, 2, 5])
    host_work(gpu, b"experts", 3, tokens)  # 10 + 5 + 10 + 25: as many bytes
    assert gpu.pds_mock_now() == 70
    assert gpu.pds_mock_next() == 70 + (400 - 80 - 50 + 3) // 4
    gpu.ok.cuStreamSynchronize(stream)
    assert when(gpu, event) == 138
    host_work(gpu, b"unknown", 0, NULL)
    assert gpu.pds_mock_now() == 138


def test_a_host_may_wait_while_it_counts_as_working(gpu: Driver) -> None:
    """The rate changes at the end of the work, however time gets there, and pds_mock_next knows."""
    gpu.configure("h2d=4GB/s; h2d_busy=1GB/s; host.experts.base=50")
    stream = gpu.stream()
    event = copy(gpu, stream, 90)
    assert gpu.pds_mock_host_begin(b"experts", 0, NULL) == 50
    assert (gpu.pds_mock_now(), gpu.pds_mock_next()) == (0, 50 + 10)
    gpu.ok.cuStreamSynchronize(stream)
    assert when(gpu, event) == gpu.pds_mock_now() == 60


def test_settings_count_from_the_moment_they_change(gpu: Driver) -> None:
    stream = gpu.stream()
    event = copy(gpu, stream, 100)
    gpu.pds_mock_advance(60)
    gpu.configure("h2d=4GB/s")
    gpu.pds_mock_advance(1000)
    assert when(gpu, event) == 70


def test_kernels_take_what_their_costs_say(gpu: Driver) -> None:
    """base + the sum of the curve at each count + extra; kernels of two streams run at once."""
    gpu.configure("kernel.mix.base=1us; kernel.mix.curve=2:100,4:120,8:121; kernel.*.base=3")
    gpu.configure("kernel.mix.per_extra=3/1024")
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(8)
    cases = [((), 0, 0), ((0,), 0, 0), ((1,), 0, 100), ((3,), 0, 110), ((5,), 0, 120)]
    cases += [((7, 12), 0, 120 + 122), ((2,), 1000, 102), ((), 2048, 6)]
    expected, events = 0, []
    for tokens, extra, ns in cases:
        assert gpu.launch("mix", a, to, tokens=tokens, extra=extra) == "CUDA_SUCCESS"
        expected += 1000 + ns
        events.append((mark(gpu, a), expected))
    assert gpu.launch("append", b, to) == "CUDA_SUCCESS"
    other = mark(gpu, b)
    gpu.ok.cuStreamSynchronize(a)
    assert [when(gpu, e) for e, _ in events] == [t for _, t in events]
    assert when(gpu, other) == 3


def test_the_parameter_struct_is_copied_with_its_tokens(gpu: Driver) -> None:
    """`launch` overwrites both after the call; the kernel runs later."""
    stream, to = gpu.stream(), gpu.alloc(8)
    gpu.configure("kernel.tokens.base=100")
    assert gpu.launch("tokens", stream, to, tokens=(5, 6, 7)) == "CUDA_SUCCESS"
    gpu.ok.cuStreamSynchronize(stream)
    assert gpu.read(to, 4) == [3, 5, 6, 7]


def test_a_wait_is_for_the_last_record_at_the_time_of_the_call(gpu: Driver) -> None:
    a, b, c = gpu.stream(), gpu.stream(), gpu.stream()
    event = copy(gpu, a, 100)
    gpu.ok.cuStreamWaitEvent(b, event, 0)
    copy(gpu, a, 1000)
    gpu.ok.cuEventRecord(event, a)  # later than the wait
    passed = mark(gpu, b)
    gpu.ok.cuStreamWaitEvent(c, event, 0)
    second = mark(gpu, c)
    gpu.pds_mock_advance(5000)
    assert (when(gpu, passed), when(gpu, second)) == (100, 1100)


def test_pageable_copies_keep_the_host(gpu: Driver) -> None:
    gpu.configure("pageable=500MB/s")
    stream, to = gpu.stream(), gpu.alloc(64)
    copy(gpu, stream, 30)
    memory = np.zeros(64, np.uint32)
    gpu.ok.cuMemcpyHtoDAsync(to, at(memory), 100, stream)
    assert gpu.pds_mock_now() == 30 + 200
    gpu.ok.cuMemcpyDtoHAsync(at(memory), to, 100, stream)
    assert gpu.pds_mock_now() == 430


def test_submitting_takes_the_hosts_time(gpu: Driver) -> None:
    gpu.configure("enqueue=3")
    stream = gpu.stream()
    event = copy(gpu, stream, 100)  # a copy and a record
    assert gpu.pds_mock_now() == 6
    gpu.ok.cuEventSynchronize(event)
    assert when(gpu, event) == 100


def test_results_are_seen_when_they_are_due(gpu: Driver) -> None:
    """A destination is poison from the beginning of a copy to its end, fresh memory until written;
    a kernel has its effect at its end, or at its beginning where tests want that."""
    stream, other, to, back = gpu.stream(), gpu.stream(), gpu.alloc(4), gpu.pinned(4)
    host = gpu.pinned(4)
    assert gpu.read(to, 4) == [2**32 - 1] * 4
    host[:] = 5
    gpu.ok.cuMemcpyHtoDAsync(to, at(host), 16, stream)
    gpu.ok.cuStreamSynchronize(stream)
    gpu.ok.cuMemcpyDtoHAsync(at(back), to, 16, stream)
    assert list(back) == [2**32 - 1] * 4
    gpu.ok.cuStreamSynchronize(stream)
    assert list(back) == [5] * 4
    for choice, seen in (("end", 5), ("start", 16)):
        gpu.configure(f"kernel.mix.base=1us; kernels={choice}")
        gpu.ok.cuMemsetD8Async(to, 0, 16, stream)
        gpu.ok.cuMemcpyHtoDAsync(to, at(host), 16, stream)
        gpu.ok.cuStreamSynchronize(stream)
        assert gpu.launch("mix", other, to, 1, 4) == "CUDA_SUCCESS"
        assert gpu.read(to, 4) == [seen] * 4  # 16 ns of the kernel's 1000
        gpu.ok.cuStreamSynchronize(other)
        assert gpu.read(to, 4) == [16] * 4


RATES = st.sampled_from([1, 2, 3, 7]).map(lambda x: x * 10**9)
STREAMS = st.integers(0, 3)
SMALL = st.integers(0, 300)
ACTIONS = st.one_of(
    st.tuples(st.just("h2d"), STREAMS, SMALL, st.booleans()),
    st.tuples(st.just("d2h"), STREAMS, SMALL, st.booleans()),
    st.tuples(st.just("kernel"), STREAMS, SMALL),
    st.tuples(st.just("record"), STREAMS, STREAMS),
    st.tuples(st.just("wait"), STREAMS, STREAMS),
    st.tuples(st.just("stream"), STREAMS),
    st.tuples(st.just("event"), STREAMS),
    st.tuples(st.just("work"), st.integers(1, 400)),
    st.tuples(st.just("begin"), st.integers(1, 400)),
    st.tuples(st.just("advance"), SMALL),
    st.tuples(st.just("query"), STREAMS),
)


@settings(max_examples=400, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=40),
    rates=st.tuples(RATES, RATES, st.just(0) | RATES, st.just(0) | RATES, st.just(0) | RATES),
    latency=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    start=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    enqueue=st.integers(0, 3),
    late=st.sampled_from([0, 0, 5]),
    slow=st.tuples(st.sampled_from([1, 1, 3]), st.integers(0, 500)),
)
def test_times_equal_those_of_a_model(
    library: Driver,
    actions: list[tuple[Any, ...]],
    rates: tuple[int, ...],
    latency: tuple[int, int],
    start: tuple[int, int],
    enqueue: int,
    late: int,
    slow: tuple[int, int],
) -> None:
    """To the nanosecond: every end of every piece of work, and the host's own time, over streams of
    which two synchronise with the NULL stream (stream 0)."""
    text = "; ".join(
        [f"h2d={rates[0]}; d2h={rates[1]}; h2d_busy={rates[2]}; d2h_busy={rates[3]}"]
        + [f"pageable={rates[4]}; h2d_latency={latency[0]}; d2h_latency={latency[1]}"]
        + [f"h2d_start={start[0]}; d2h_start={start[1]}; enqueue={enqueue}; late_events={late}"]
        + [f"slow_link={slow[0]}; slow_from={slow[1]}"]
        + ["kernel.mix.curve=1:1,2:2; host.work.curve=1:1,2:2"]  # a token, a nanosecond
    )
    gpu = library
    gpu.configure(f"reset; {text}")
    gpu.open()
    links = {
        kind: Link(rates[i], rates[2 + i], rates[4], latency[i], start[i])
        for i, kind in enumerate(("h2d", "d2h"))
    }
    model = Model(links, *slow)
    streams = [NULL, gpu.stream(blocking=True), gpu.stream(), gpu.stream()]
    events = [gpu.event() for _ in streams]
    records: list[Op | None] = [None] * len(events)
    probes: list[tuple[Any, Op]] = []
    device, pinned, pageable = gpu.alloc(128), gpu.pinned(128), np.zeros(128, np.uint32)
    now = 0

    def tail(stream: int) -> Op | None:
        model.solve()
        left = [op for op in model.ops if op.stream == stream and (op.end or 0) > now]
        return left[-1] if left else None

    def submit(op: Op) -> None:
        nonlocal now
        others = [1] if op.stream == 0 else [0] if op.stream == 1 else []
        for other in others:
            if before := tail(other):
                model.ops.append(Op("wait", op.stream, now, awaited=before))
        model.ops.append(op)
        now += enqueue

    def until(op: Op | None) -> None:
        nonlocal now
        if op is not None:
            model.solve()
            assert op.end is not None
            now = max(now, op.end)

    for name, *args in actions:
        if name in ("h2d", "d2h"):
            stream, words, is_pageable = args
            nbytes = 1 + words
            host = at(pageable if is_pageable else pinned)
            if name == "h2d":
                gpu.ok.cuMemcpyHtoDAsync(device, host, nbytes, streams[stream])
            else:
                gpu.ok.cuMemcpyDtoHAsync(host, device, nbytes, streams[stream])
            op = Op(name, stream, now, bytes=nbytes, pageable=is_pageable)
            submit(op)
            if is_pageable:
                until(op)
        elif name == "kernel":
            stream, ns = args
            tokens = (ns,) if ns else ()
            assert gpu.launch("mix", streams[stream], device, tokens=tokens) == "CUDA_SUCCESS"
            submit(Op("fixed", stream, now, ns=ns))
        elif name == "record":
            stream, index = args
            gpu.ok.cuEventRecord(events[index], streams[stream])
            op = Op("record", stream, now, ns=late)
            records[index] = op
            submit(op)
        elif name == "wait":
            stream, index = args
            gpu.ok.cuStreamWaitEvent(streams[stream], events[index], 0)
            model.solve()
            awaited = records[index]
            if awaited is not None and (awaited.end or 0) > now:
                submit(Op("wait", stream, now, awaited=awaited))
        elif name == "stream":
            gpu.ok.cuStreamSynchronize(streams[args[0]])
            until(tail(args[0]))
        elif name == "event":
            gpu.ok.cuEventSynchronize(events[args[0]])
            until(records[args[0]])
        elif name in ("work", "begin"):
            until_ns = gpu.pds_mock_host_begin(b"work", 1, ffi().new("uint32_t[]", [args[0]]))
            assert until_ns == now + args[0]
            model.host_busy.append((now, until_ns))
            if name == "work":
                gpu.pds_mock_advance(until_ns)
                now = until_ns
        elif name == "advance":
            gpu.pds_mock_advance(now + args[0])
            now += args[0]
        else:
            ready = tail(args[0]) is None
            result = gpu.cuStreamQuery(streams[args[0]])
            assert result == ("CUDA_SUCCESS" if ready else "CUDA_ERROR_NOT_READY")
        assert gpu.pds_mock_now() == now, (name, args)
        if name in ("h2d", "d2h", "kernel", "wait"):
            probe = mark(gpu, streams[args[0]])
            op = Op("record", args[0], now, ns=late)
            submit(op)
            probes.append((probe, op))
    model.solve()
    ends = [op.end for op in model.ops if op.end is not None and op.end > now]
    assert gpu.pds_mock_next() == (min(ends) if ends else -1)
    gpu.pds_mock_advance(10**6)
    assert [when(gpu, probe) for probe, _ in probes] == [op.end for _, op in probes]
    assert gpu.pds_mock_next() == -1


def test_two_runs_are_equal(gpu: Driver) -> None:
    """Every time and every result."""

    def run() -> list[int]:
        gpu.configure("reset; kernel.mix.curve=1:900,9:1000; h2d=11GB/s")
        gpu.open()
        rng = np.random.default_rng(5)
        streams, to = [gpu.stream() for _ in range(3)], gpu.alloc(64)
        events, host = [gpu.event() for _ in range(3)], gpu.pinned(64)
        seen = []
        for step in range(200):
            i, j = rng.integers(0, 3, 2)
            gpu.launch("mix", streams[i], to, step, 8, tokens=(int(rng.integers(1, 9)),))
            gpu.ok.cuMemcpyHtoDAsync(to + 32, at(host), 64, streams[j])
            gpu.ok.cuEventRecord(events[i], streams[i])
            gpu.ok.cuStreamWaitEvent(streams[j], events[i], 0)
            if step % 17 == 0:
                gpu.ok.cuEventSynchronize(events[j])
            seen.append(int(gpu.pds_mock_now()))
        return seen + gpu.read(to, 16)

    assert run() == run()


# --- the wall clock ---


def timed_copies(gpu: Driver) -> tuple[float, float, float]:
    """Seconds that 20 copies of two streams should take, take, and keep the caller."""
    a, b = gpu.stream(), gpu.stream()
    host, to = gpu.pinned(1 << 18), gpu.alloc(1 << 18)
    gpu.configure("h2d=1GB/s; h2d_start=0; h2d_latency=1ms")
    wanted = 20 * (1 + (1 << 20) / 1e6) / 1000
    first = mark(gpu, a)
    gpu.ok.cuEventSynchronize(first)
    before = time.monotonic()
    for i in range(20):
        gpu.ok.cuMemcpyHtoDAsync(to, at(host), 1 << 20, (a, b)[i % 2])
    submitted = time.monotonic() - before
    last = mark(gpu, b)
    gpu.ok.cuStreamSynchronize(b)
    took = time.monotonic() - before
    assert gpu.ok.cuEventElapsedTime(first, last) >= wanted * 1000
    return wanted, took, submitted


def test_wall_copies_take_their_time(library: Driver) -> None:
    """Latency and bytes over bandwidth, one after the other; the calls return before."""
    library.configure("reset; clock=wall")
    library.open()
    wanted, took, submitted = timed_copies(library)
    assert submitted < took and wanted <= took
    library.configure("reset")


@pytest.mark.device
def test_wall_times_are_close(library: Driver) -> None:
    """What the settings say does not drift with the sleeps: within 2 % over 20 copies, and calls
    take no part of it."""
    library.configure("reset; clock=wall")
    library.open()
    wanted, took, submitted = timed_copies(library)
    print(f"wanted {wanted:.5f} s, took {took:.5f} s, submitted in {submitted:.5f} s")
    assert wanted <= took < 1.02 * wanted
    assert submitted < 0.1 * wanted
    library.configure("reset")


def test_wall_work_counts_from_what_it_waited_for(library: Driver) -> None:
    gpu = library
    gpu.configure("reset; clock=wall; kernel.mix.base=20ms")
    gpu.open()
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(1)
    assert gpu.launch("mix", a, to) == "CUDA_SUCCESS"
    first = mark(gpu, a)
    gpu.ok.cuStreamWaitEvent(b, first, 0)
    assert gpu.launch("mix", b, to) == "CUDA_SUCCESS"
    second = mark(gpu, b)
    gpu.ok.cuEventSynchronize(second)
    assert when(gpu, second) - when(gpu, first) >= 20_000_000
    gpu.configure("reset")


def test_wall_copies_are_served_in_order(library: Driver) -> None:
    """Of eight streams that wait for the link, the one that was ready first."""
    gpu = library
    gpu.configure("reset; clock=wall; h2d_start=0; h2d_latency=2ms")
    gpu.open()
    streams = [gpu.stream() for _ in range(8)]
    rng = np.random.default_rng(1)
    for _ in range(4):
        events = [copy(gpu, streams[i], 16) for i in rng.permutation(8)]
        for event in events:
            gpu.ok.cuEventSynchronize(event)
        times = [when(gpu, e) for e in events]
        assert times == sorted(times)
    gpu.configure("reset")


def test_wall_kernels_of_two_streams_run_at_once(library: Driver) -> None:
    """They meet; on one stream they would miss each other."""
    gpu = library
    gpu.configure("reset; clock=wall")
    gpu.open()
    a, b, to = gpu.stream(), gpu.stream(), gpu.alloc(8)
    gpu.ok.cuMemsetD8Async(to, 0, 32, a)
    gpu.ok.cuStreamSynchronize(a)
    assert gpu.launch("meet", a, to, 4, 2) == "CUDA_SUCCESS"
    assert gpu.launch("meet", b, to, 5, 2) == "CUDA_SUCCESS"
    gpu.ok.cuStreamSynchronize(a)
    gpu.ok.cuStreamSynchronize(b)
    assert gpu.read(to, 6)[4:] == [1, 1]
    gpu.configure("reset")


def test_wall_kernels_take_their_costs_or_longer(library: Driver) -> None:
    gpu = library
    gpu.configure("reset; clock=wall; kernel.mix.base=3ms")
    gpu.open()
    stream, to = gpu.stream(), gpu.alloc(8)
    first = mark(gpu, stream)
    for _ in range(5):
        assert gpu.launch("mix", stream, to, 1, 8) == "CUDA_SUCCESS"
    last = mark(gpu, stream)
    gpu.ok.cuStreamSynchronize(stream)
    assert gpu.ok.cuEventElapsedTime(first, last) >= 15
    assert gpu.pds_mock_next() == -1
    gpu.configure("reset")
