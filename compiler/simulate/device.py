"""A GPU as the host sees it: two streams of work in order, events, one copy engine a direction, and
a clock that only moves where the host waits, works or submits.

At one instant work ends before other work begins, and copies begin last, so that all that are ready
then compete: a copy engine takes the copy that was ready first, of those the one submitted first.
May import pdscope.compiler.simulate.timing.
"""

from collections import deque
from dataclasses import dataclass

from pdscope.compiler.simulate.timing import SECOND, Link
from pdscope.errors import PdscopeError

H2D, D2H, KERNEL, WAIT, RECORD = range(5)
COMPUTE, COPIES = 0, 1  # streams
_NEVER = 1 << 62


class Op:
    """One piece of work in a stream. A copy has `left` bytes * 10^9 to move from `since` on."""

    __slots__ = (
        *("kind", "seq", "ready", "begin", "end", "started", "done"),
        *("duration", "size", "left", "since", "awaited", "name", "layer"),
    )

    def __init__(self, kind: int, name: str = "", layer: int = -1) -> None:
        self.kind = kind
        self.seq = self.ready = self.begin = self.end = 0
        self.started = self.done = False
        self.duration = self.size = self.left = self.since = 0
        self.awaited: Op | None = None
        self.name, self.layer = name, layer


@dataclass
class Span:
    """Something that took time: on `track` "compute", "h2d" or "d2h"."""

    track: str
    name: str
    layer: int
    begin: int
    end: int
    size: int  # bytes of a copy


class _Engine:
    def __init__(self) -> None:
        self.current: Op | None = None
        self.used = False
        self.free_at = 0
        self.busy = 0  # ns


class _Stream:
    def __init__(self) -> None:
        self.queue: deque[Op] = deque()
        self.reached = 0


class Gpu:
    """`spans`: what took time, if it is to be kept."""

    def __init__(self, link: Link, keep_spans: bool = False) -> None:
        self.now = 0
        self.busy_ns = [0, 0]  # of kernels, and of the host's work
        self.spans: list[Span] | None = [] if keep_spans else None
        self._enqueue = link.enqueue
        self._rates = (link.h2d, link.d2h), (link.h2d_busy or link.h2d, link.d2h_busy or link.d2h)
        self._starts = link.h2d_start, link.d2h_start
        self._latencies = link.h2d_latency, link.d2h_latency
        self._streams = _Stream(), _Stream()
        self.engines = _Engine(), _Engine()
        self._next_seq = 0
        self._host_busy = False
        # The host's work: what is left of it at a time, in units of which it does so many a ns
        # while the link to the GPU is idle, and while it moves bytes.
        self._host_left = self._host_since = self._host_began = self._busy_until = 0
        self._host_rates = 1, 1

    # --- submitting ---

    def copy(self, kind: int, stream: int, size: int, name: str = "", layer: int = -1) -> None:
        """Nothing is submitted for no bytes."""
        if size:
            op = Op(kind, name, layer)
            op.size = size
            self._submit(stream, op)

    def launch(self, duration: int, name: str, layer: int) -> None:
        op = Op(KERNEL, name, layer)
        op.duration = duration
        self._submit(COMPUTE, op)

    def record(self, stream: int) -> Op:
        op = Op(RECORD)
        self._submit(stream, op)
        return op

    def wait_event(self, stream: int, record: Op | None) -> None:
        """The stream's later work begins behind the record; nothing for one that is done."""
        if record is None or record.done:
            return
        op = Op(WAIT)
        op.awaited = record
        self._submit(stream, op)

    def _submit(self, stream: int, op: Op) -> None:
        op.seq = self._next_seq
        self._next_seq += 1
        op.ready = self.now
        self._streams[stream].queue.append(op)
        self.advance(self.now + self._enqueue)

    # --- time ---

    def advance(self, to: int) -> None:
        while self._host_busy and to >= self._busy_until:
            if self._step(self._busy_until):  # which may change when the host is done
                continue
            self.now = max(self.now, self._busy_until)
            self._end_host_work()
        self._run(to)

    def next_end(self) -> int | None:
        """When the first running work ends."""
        running = [s.queue[0].end for s in self._streams if s.queue and s.queue[0].started]
        return min(running, default=None)

    def pass_time(self, until: int | None = None) -> None:
        """Up to whatever ends next, `until` at the latest."""
        to = self.next_end()
        if to is None or (until is not None and to > until):
            to = until
        if to is None:
            raise PdscopeError("the simulator waits for work that nothing will finish: a defect")
        self.advance(to)

    def begin_host_work(self, duration: int, beside: int = 0) -> None:
        """Work of so many ns, or of `beside`, if that is more, where the link moves bytes to the
        GPU all the time. Pass time until `host_end` is None."""
        if duration <= 0:
            return
        beside = max(duration, beside)
        self._host_left, self._host_rates = duration * beside, (beside, duration)
        self._host_since = self._host_began = self.now
        self._set_busy(True)
        self._set_host_end()

    @property
    def host_end(self) -> int | None:
        """When the host's work will end, as things are; None: it has none."""
        return self._busy_until if self._host_busy else None

    def _set_host_end(self) -> None:
        rate = self._host_rates[self.engines[H2D].current is not None]
        self._busy_until = self._host_since + -(-self._host_left // rate)

    def _host_works(self) -> None:
        """Takes off what it has done by now."""
        rate = self._host_rates[self.engines[H2D].current is not None]
        self._host_left = max(0, self._host_left - (self.now - self._host_since) * rate)
        self._host_since = self.now

    def _end_host_work(self) -> None:
        self.busy_ns[1] += self.now - self._host_began
        self._set_busy(False)

    def drain(self) -> None:
        """Both streams, the one of copies first."""
        for stream in (COPIES, COMPUTE):
            queue = self._streams[stream].queue
            if queue:
                last = queue[-1]
                while not last.done:
                    if not self._step(_NEVER):
                        raise PdscopeError("the simulator cannot finish its work: a defect")
                self._run(self.now)

    def _set_busy(self, busy: bool) -> None:
        """The link moves at another rate from now on."""
        for kind, engine in enumerate(self.engines):
            op = engine.current
            if op is not None and op.since < self.now:
                op.left -= (self.now - op.since) * self._rates[self._host_busy][kind]
                op.left = max(op.left, 0)
                op.since = self.now
        self._host_busy = busy
        for engine in self.engines:
            if engine.current is not None:
                engine.current.end = self._arrival(engine.current)

    def _arrival(self, copy: Op) -> int:
        return copy.since + -(-copy.left // self._rates[self._host_busy][copy.kind])

    def _run(self, to: int) -> None:
        while self._step(to):
            pass
        if self.now < to:
            self.now = to

    def _step(self, limit: int) -> bool:
        """What happens next, unless it is later than `limit`."""
        ends: Op | None = None
        starts: Op | None = None
        ends_in = self._streams[0]
        start_at = 0
        for stream in self._streams:
            if not stream.queue:
                continue
            op = stream.queue[0]
            if op.started:
                if ends is None or (op.end, op.seq) < (ends.end, ends.seq):
                    ends, ends_in = op, stream
                continue
            at = self._can_start(op, stream)
            if at is None:
                continue
            if starts is None or (at, op.kind <= D2H, op.ready, op.seq) < (
                *(start_at, starts.kind <= D2H, starts.ready, starts.seq),
            ):
                starts, start_at = op, at
        if ends is not None and (starts is None or ends.end <= start_at):
            if ends.end > limit:
                return False
            if self.now < ends.end:
                self.now = ends.end
            self._finish(ends, ends_in)
            return True
        if starts is None or start_at > limit:
            return False
        if self.now < start_at:
            self.now = start_at
        self._begin(starts, start_at)
        return True

    def _can_start(self, op: Op, stream: _Stream) -> int | None:
        if op.ready < stream.reached:
            op.ready = stream.reached
        if op.kind == WAIT:
            assert op.awaited is not None
            if not op.awaited.done:
                return None
            if op.ready < op.awaited.end:
                op.ready = op.awaited.end
        if op.kind > D2H:
            return op.ready
        engine = self.engines[op.kind]
        if engine.current is not None:
            return None
        return max(op.ready, engine.free_at) if engine.used else op.ready

    def _begin(self, op: Op, at: int) -> None:
        op.started = True
        op.begin = at
        if op.kind > D2H:
            op.end = at + op.duration
            return
        engine = self.engines[op.kind]
        idle = not engine.used or op.ready > engine.free_at
        self._move(engine, op)
        engine.used = True
        op.left = op.size * SECOND
        op.since = at + self._latencies[op.kind] + (self._starts[op.kind] if idle else 0)
        op.end = self._arrival(op)

    def _move(self, engine: _Engine, op: Op | None) -> None:
        """What the engine moves from now on, beside the host's work."""
        if self._host_busy:
            self._host_works()
        engine.current = op
        if self._host_busy:
            self._set_host_end()

    def _finish(self, op: Op, stream: _Stream) -> None:
        op.done = True
        stream.reached = op.end
        stream.queue.popleft()
        if op.kind <= D2H:
            engine = self.engines[op.kind]
            self._move(engine, None)
            engine.free_at = op.end
            engine.busy += op.end - op.begin
        elif op.kind == KERNEL:
            self.busy_ns[0] += op.duration
        else:
            return
        if self.spans is not None and op.end > op.begin:
            track = ("h2d", "d2h", "compute")[op.kind]
            self.spans.append(Span(track, op.name, op.layer, op.begin, op.end, op.size))
