"""One session on a loaded plan: KV of its sequences, steps on batches, and what is built on steps.

May import numpy and pdscope.{errors,native,observe,generation}. Every public method takes the
session's lock, so threads that share a session take turns; for work at the same time give each
thread its own session.
"""

import errno
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdscope.errors import BudgetError, Cancelled, InputError, PdscopeError
from pdscope.native import PDS_ERR_CANCELLED, SessionHandle, ffi, float_view
from pdscope.observe import TapEvent, Trace, tap_callback

if TYPE_CHECKING:
    from pdscope.engine import Engine
    from pdscope.generation import Completion, Stream
    from pdscope.sampling import Sampler

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SessionStats:
    """Totals since the session began; `pds_session_stats` of pdscope.h."""

    steps: int
    rows: int
    step_ns: int
    expert_rows: int
    experts_activated: int
    weight_bytes: int
    kv_blocks: int
    kv_blocks_used: int
    session_bytes: int


class Session:
    """KV cache and scratch for up to `max_seqs` sequences; made by Engine.session().

    Logits are float32 arrays that show the runtime's own memory: valid until the session's next
    step (`.copy()` keeps them). They stay readable after close().
    """

    def __init__(self, engine: "Engine", max_seqs: int = 1, kv_tokens: int = 0) -> None:
        _check_range("max_seqs", max_seqs, 1, 2**16)
        _check_range("kv_tokens", kv_tokens, 0, 2**31)
        self.engine = engine
        self.max_seqs = max_seqs
        self._handle: SessionHandle | None = SessionHandle(engine.handle, max_seqs, kv_tokens)
        self._library = engine.handle.library
        self._lib = self._library.lib
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        self._streams: dict[int, tuple[weakref.ref[Stream], threading.Thread]] = {}
        self._cached: dict[int, NDArray[np.int32]] = {}  # ids in the KV, where generate() put them
        self._cancel_lock = threading.Lock()
        self._running = 0
        self._cancel_asked = False
        self._tap_error: list[BaseException] = []
        rows = engine.info.max_rows
        self._token = np.zeros(rows, np.int32)
        self._position = np.zeros(rows, np.int32)
        self._seq = np.zeros(rows, np.int32)
        self._want = np.zeros(rows, np.uint8)
        c = ffi()
        self._batch = c.new("pds_batch *")
        self._batch.token = c.from_buffer("int32_t[]", self._token)
        self._batch.position = c.from_buffer("int32_t[]", self._position)
        self._batch.seq = c.from_buffer("int32_t[]", self._seq)
        self._batch.want_logits = c.from_buffer("uint8_t[]", self._want)
        self._logits = c.new("pds_logits *")
        self._u32 = c.new("uint32_t *")

    # --- steps ---

    def step(
        self,
        tokens: ArrayLike,
        positions: ArrayLike | None = None,
        seqs: ArrayLike | int = 0,
        want_logits: ArrayLike | None = None,
    ) -> NDArray[np.float32]:
        """One step of the model on rows of any sequences. Gives logits [rows that wanted them,
        vocab].

        tokens, positions, seqs: integers [n], n <= max_rows; row i is tokens[i] at positions[i] of
        sequence seqs[i], and the rows of a sequence continue it without a gap, in order. positions
        None: worked out from the sequences' lengths. want_logits: booleans [n]; None: the last row
        alone.
        Raises InputError, BudgetError or Cancelled; then no sequence has changed.
        """
        ids = self._token_ids(tokens, "step")
        n = len(ids)
        seq = _integers("seqs", seqs)
        if seq.shape not in ((), (n,)):
            raise InputError(f"seqs has shape {seq.shape}, expected ({n},) as tokens")
        seq = np.broadcast_to(seq, (n,))
        with self._operation(*np.unique(seq).tolist()):
            if n > len(self._token):
                raise BudgetError(
                    f"a step of {n} rows: the plan was compiled for {len(self._token)} rows a "
                    "step; "
                    "split the batch, or recompile with a larger --max-rows"
                )
            where = self._positions(seq) if positions is None else _integers("positions", positions)
            want = np.zeros(n, np.uint8)
            want[-1] = 1
            if want_logits is not None:
                try:
                    want = np.asarray(want_logits).astype(bool).astype(np.uint8)
                except (TypeError, ValueError):
                    raise InputError("want_logits: expected one boolean a row") from None
            for name, array in (("positions", where), ("want_logits", want)):
                if array.shape != (n,):
                    raise InputError(f"{name} has shape {array.shape}, expected ({n},) as tokens")
            return self._step(ids, where, seq, want)

    def prefill(
        self, ids: ArrayLike, seq: int = 0, all_logits: bool = False
    ) -> NDArray[np.float32]:
        """Appends token ids to a sequence. Gives the last row's logits [vocab], or of all rows [n,
        vocab].

        Splits into steps of max_rows (with all_logits: of max_logits) rows by itself; logits of
        more than one step are copied. On an error the sequence is as before.
        """
        tokens = self._token_ids(ids, "prefill")
        seq = self._sequence("seq", seq)
        with self._operation(seq):
            return self._prefill(tokens, seq, all_logits)

    def decode(self, token: int, seq: int = 0) -> NDArray[np.float32]:
        """Appends one token to a sequence. Gives its logits [vocab]."""
        token = _index("token", token)
        if not 0 <= token < self.engine.info.vocab:
            raise self._token_error(token, None)
        seq = self._sequence("seq", seq)
        with self._operation(seq):
            return self._decode(token, self._length(seq), seq)

    # --- generation ---

    @overload
    def generate(
        self,
        prompt: Prompt | Messages | None = ...,
        *,
        stream: Literal[False] = ...,
        **options: Any,
    ) -> "Completion": ...
    @overload
    def generate(
        self, prompt: Prompt | Messages | None = ..., *, stream: Literal[True], **options: Any
    ) -> "Stream": ...
    @overload
    def generate(
        self, prompt: Prompt | Messages | None = ..., *, stream: bool, **options: Any
    ) -> "Completion | Stream": ...

    def generate(
        self,
        prompt: Prompt | Messages | None = None,
        *,
        stream: bool = False,
        **options: Any,
    ) -> "Completion | Stream":
        """Continues a prompt. See pdscope.generation.Request for every option.

        prompt: text, token ids, or chat messages ({"role", "content"} each); also `messages=...`.
        With stream=True the result is an iterator of text pieces, one a token, and holds the
        Completion at the end. The sequence is started anew. Threads take turns; a second stream
        that the same thread begins ends the first one's right to the sequence, and so does any
        other use of it.
        """
        from pdscope.generation import Request, Stream

        made = Stream(self, Request.of(self, prompt, **options))
        return made if stream else made.run()

    # --- sequences ---

    def length(self, seq: int = 0) -> int:
        """Tokens that a sequence holds."""
        seq = self._sequence("seq", seq)
        with self._operation():
            return self._length(seq)

    def truncate(self, seq: int, tokens: int) -> None:
        """Keeps the first `tokens` tokens of a sequence."""
        _check_range("tokens", tokens, 0, 2**31)
        seq = self._sequence("seq", seq)
        with self._operation(seq):
            self._truncate(seq, tokens)

    def fork(self, src: int, dst: int) -> None:
        """Makes sequence `dst` a copy of `src`; whole KV blocks are shared, not copied."""
        src, dst = self._sequence("src", src), self._sequence("dst", dst)
        with self._operation(dst):
            self._check(self._lib.pds_seq_fork(self._pointer(), src, dst))

    def save(self, seq: int = 0, path: str | Path | None = None) -> bytes | None:
        """The KV of a sequence: as bytes, or written to `path` (aside, then renamed).

        Only a session of the same plan can restore it. Raises InputError for a path that cannot be
        written, BudgetError for a full disk.
        """
        seq = self._sequence("seq", seq)
        with self._operation():
            size = ffi().new("uint64_t *")
            self._check(self._lib.pds_seq_save_size(self._pointer(), seq, size))
            data = bytearray(size[0])
            memory = ffi().from_buffer(data, require_writable=True)
            self._check(self._lib.pds_seq_save(self._pointer(), seq, memory, size[0]))
        if path is None:
            return bytes(data)
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():  # a device or a pipe: not to be replaced
            try:
                with target.open("wb") as file:
                    file.write(data)
            except OSError as error:
                raise _cannot_write(target, error) from None
            return None
        aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            aside.write_bytes(data)
            os.replace(aside, target)
        except OSError as error:
            with suppress(OSError):
                aside.unlink()
            raise _cannot_write(target, error) from None
        return None

    def restore(self, saved: bytes | bytearray | memoryview | str | Path, seq: int = 0) -> None:
        """Makes a sequence what was saved; `saved` is the bytes or the path that save() gave."""
        if isinstance(saved, str | Path):
            path = Path(saved)
            try:
                saved = path.read_bytes()
            except OSError as error:
                raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        seq = self._sequence("seq", seq)
        try:
            memory = ffi().from_buffer(saved)
        except (TypeError, ValueError, BufferError) as error:
            raise InputError(f"saved: expected contiguous bytes or a path: {error}") from None
        with self._operation(seq):
            self._check(self._lib.pds_seq_restore(self._pointer(), seq, memory, len(memory)))

    def reset(self, seq: int | None = None) -> None:
        """Empties one sequence, or all."""
        seqs = range(self.max_seqs) if seq is None else (self._sequence("seq", seq),)
        with self._operation(*seqs):
            for each in seqs:
                self._truncate(each, 0)

    # --- observation and control ---

    def cancel(self) -> bool:
        """From any thread: the running generation, prefill, decode or step raises Cancelled.

        Gives False, and does nothing, when none is running. The KV is left at the last whole step.
        """
        self._check_usable()
        with self._cancel_lock:
            if not (self._running or self._live()) or self._handle is None:
                return False
            self._cancel_asked = True
            self._lib.pds_cancel(self._handle.pointer)
            return True

    def stats(self) -> SessionStats:
        """Totals of this session."""
        with self._operation():
            out = ffi().new("pds_session_stats *")
            self._check(self._lib.pds_session_get_stats(self._pointer(), out))
            return SessionStats(**{f: getattr(out, f) for f in SessionStats.__dataclass_fields__})

    @contextmanager
    def trace(self, capacity: int = 1 << 20) -> Iterator[Trace]:
        """Records every instruction executed within the `with` block, up to `capacity`."""
        _check_range("capacity", capacity, 1, 2**32)
        trace = Trace(self._library, capacity)
        with self._operation():
            self._check(self._lib.pds_session_trace_start(self._pointer(), trace.buffer, capacity))
        try:
            yield trace
        finally:
            with self._lock:
                if self._handle is not None:
                    counts = ffi().new("uint64_t[2]")
                    self._check(
                        self._lib.pds_session_trace_stop(self._pointer(), counts, counts + 1)
                    )
                    trace.finish(counts[0], counts[1])

    @contextmanager
    def tap(self, function: Callable[[TapEvent], None]) -> Iterator[None]:
        """Calls `function` after every instruction within the `with` block; slow, for tests and
        traces.

        The event's arrays are valid during the call only. What the function raises comes out of the
        step.
        """
        callback = tap_callback(function, self._tap_error)
        with self._operation():
            self._check(self._lib.pds_session_set_tap(self._pointer(), callback, ffi().NULL))
        try:
            yield
        finally:
            with self._lock:
                if self._handle is not None:
                    null = ffi().NULL
                    self._check(self._lib.pds_session_set_tap(self._pointer(), null, null))

    def close(self) -> None:
        """Ends what runs and frees the session's memory; may be called again."""
        if os.getpid() != self._pid:
            return
        if self._handle is not None:
            self.cancel()
            with self._lock:
                self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what generation.py builds on; the caller is inside _operation ---

    def _prefill(
        self, tokens: NDArray[np.int32], seq: int, all_logits: bool = False
    ) -> NDArray[np.float32]:
        start = self._length(seq)
        info = self.engine.info
        if start + len(tokens) > info.max_context:
            had = f" after the {start} already there" if start else ""
            raise BudgetError(
                f"{len(tokens)} tokens{had} exceed the plan's context of {info.max_context} "
                "tokens: "
                "shorten the prompt, or recompile with a larger --max-context"
            )
        size = min(info.max_rows, info.max_logits) if all_logits else info.max_rows
        result = np.empty((0, info.vocab), np.float32)
        many = all_logits and len(tokens) > size
        if many:
            result = np.empty((len(tokens), info.vocab), np.float32)
        try:
            for at in range(0, len(tokens), size):
                chunk = tokens[at : at + size]
                n = len(chunk)
                where = np.arange(start + at, start + at + n, dtype=np.int32)
                want = np.full(n, all_logits, np.uint8)
                want[-1] |= at + n == len(tokens)
                logits = self._step(chunk, where, np.full(n, seq, np.int32), want)
                if many:
                    result[at : at + n] = logits
                else:
                    result = logits
        except BaseException:
            if self._handle is not None:
                self._lib.pds_seq_truncate(self._handle.pointer, seq, start)
            raise
        return result if all_logits else result[-1]

    def _decode(self, token: int, position: int, seq: int) -> NDArray[np.float32]:
        self._token[0] = token
        self._position[0] = position
        self._seq[0] = seq
        self._want[0] = 1
        logits: NDArray[np.float32] = self._run(1)[0]
        return logits

    def _generate(
        self, sampler: "Sampler", seq: int, limit: int, stop: NDArray[np.int32]
    ) -> list[int]:
        """Up to `limit` further tokens by the runtime alone; a stop id is the last one."""
        status, tokens = sampler.generate(self._pointer(), seq, limit, stop)
        while status == PDS_ERR_CANCELLED and not self._take_cancel():
            # A cancel() that came too late for what it was meant for: not ours.
            status, more = sampler.generate(self._pointer(), seq, limit - len(tokens), stop)
            tokens += more
        if status == PDS_ERR_CANCELLED:
            raise Cancelled("cancelled by cancel() from another thread")
        self._check(status)
        if self._tap_error:
            raise self._tap_error.pop()
        return tokens

    def _step(
        self,
        ids: NDArray[np.int32],
        where: NDArray[np.int32],
        seq: NDArray[np.int32],
        want: NDArray[np.uint8],
    ) -> NDArray[np.float32]:
        n = len(ids)
        self._token[:n] = ids
        self._position[:n] = where
        self._seq[:n] = seq
        self._want[:n] = want
        return self._run(n)

    def _run(self, n: int) -> NDArray[np.float32]:
        handle = self._handle
        if handle is None:
            raise PdscopeError("the session is closed: make a new one with engine.session()")
        self._batch.n = n
        status = self._lib.pds_step(handle.pointer, self._batch, self._logits)
        while status == PDS_ERR_CANCELLED and not self._take_cancel():
            # A cancel() that came too late for what it was meant for: not ours.
            status = self._lib.pds_step(handle.pointer, self._batch, self._logits)
        if status == PDS_ERR_CANCELLED:
            raise Cancelled("cancelled by cancel() from another thread")
        self._check(status)
        if self._tap_error:
            raise self._tap_error.pop()
        out = self._logits
        return float_view(handle, out.data, (out.rows, out.vocab))

    def _take_cancel(self) -> bool:
        with self._cancel_lock:
            asked, self._cancel_asked = self._cancel_asked, False
            return asked

    def _length(self, seq: int) -> int:
        self._check(self._lib.pds_seq_length(self._pointer(), seq, self._u32))
        return int(self._u32[0])

    def _truncate(self, seq: int, tokens: int) -> None:
        self._check(self._lib.pds_seq_truncate(self._pointer(), seq, tokens))

    # --- locks, ownership, checks ---

    @contextmanager
    def _operation(self, *changed: int) -> Iterator[None]:
        """Holds the session; sequences in `changed` are no longer any stream's."""
        self._check_usable()
        with self._lock:
            self._pointer()
            with self._cancel_lock:
                if not self._running and not self._live():
                    self._cancel_asked = False
                self._running += 1
            try:
                for seq in changed:
                    self._disown(seq)
                yield
            finally:
                with self._cancel_lock:
                    self._running -= 1

    def _live(self) -> bool:
        """Whether a stream is under way. A copy is walked: cancel() comes without the session's
        lock.
        """
        return any(ref() is not None for ref, _ in list(self._streams.values()))

    @contextmanager
    def _streaming(self, stream: "Stream", seq: int, first: bool) -> Iterator[None]:
        """Holds the session for one token of a stream; at the first, waits for the sequence's
        turn.
        """
        self._check_usable()
        with self._lock:
            if first:
                stream.cached = self._claim(stream, seq)
            self._pointer()
            holder = self._streams.get(seq)
            if holder is None or holder[0]() is not stream:
                raise PdscopeError(
                    "this stream was overtaken: its sequence has been used by another call "
                    "since; for "
                    "generations side by side give each its own engine.session()"
                )
            with self._cancel_lock:
                self._running += 1
            try:
                yield
            finally:
                with self._cancel_lock:
                    self._running -= 1

    def _claim(self, stream: "Stream", seq: int) -> NDArray[np.int32] | None:
        """Makes `stream` the one that may use the sequence; gives the ids that its KV holds, if
        known.
        """
        me = threading.current_thread()
        while True:
            ref, owner = self._streams.get(seq, (None, me))
            if ref is None or ref() is None or owner is me or not owner.is_alive():
                break
            # The other stream may be dropped without a word, so look again now and then.
            self._turn.wait(0.05)
            self._pointer()
        cached = self._cached.pop(seq, None)
        self._disown(seq)
        with self._cancel_lock:
            if not self._running and not self._live():
                self._cancel_asked = False
        self._streams[seq] = (weakref.ref(stream), me)
        return cached

    def _release(self, stream: "Stream", seq: int, history: NDArray[np.int32] | None) -> None:
        """A stream has ended: others may have its sequence. `history` begins with the ids in its
        KV.
        """
        with self._lock:
            holder = self._streams.get(seq)
            if holder is None or holder[0]() is not stream:
                return
            del self._streams[seq]
            self._turn.notify_all()
            if history is not None and self._handle is not None:
                self._cached[seq] = history[: self._length(seq)].copy()

    def _disown(self, seq: int) -> None:
        self._cached.pop(seq, None)
        if self._streams.pop(seq, None) is not None:
            self._turn.notify_all()

    def _pointer(self) -> Any:
        if self._handle is None:
            raise PdscopeError("the session is closed: make a new one with engine.session()")
        return self._handle.pointer

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise PdscopeError(
                "this engine was loaded before os.fork() and its threads do not exist in the "
                "child: "
                "call pdscope.load() in the child process"
            )

    def _check(self, status: int) -> None:
        if status:
            raise self._library.error(status)

    def _positions(self, seq: NDArray[np.int32]) -> NDArray[np.int32]:
        where = np.empty(len(seq), np.int32)
        for each in np.unique(seq).tolist():
            rows = np.flatnonzero(seq == each)
            where[rows] = self._length(each) + np.arange(len(rows))
        return where

    @staticmethod
    def _whole(name: str, value: object) -> int:
        return _index(name, value)

    def _sequence(self, name: str, seq: int) -> int:
        number = _index(name, seq)
        if not 0 <= number < self.max_seqs:
            raise InputError(
                f"{name} is {number}: the session was made for {self.max_seqs} sequences, expected "
                f"0 to {self.max_seqs - 1}"
            )
        return number

    def _token_ids(self, ids: ArrayLike, what: str) -> NDArray[np.int32]:
        array = _integers("tokens", ids)
        if array.ndim != 1:
            raise InputError(f"token ids have shape {array.shape}, expected one dimension")
        if not len(array):
            raise InputError(f"nothing to {what}: the list of token ids is empty")
        bad = np.flatnonzero((array < 0) | (array >= self.engine.info.vocab))
        if len(bad):
            raise self._token_error(int(array[bad[0]]), int(bad[0]))
        return array

    def _token_error(self, token: int, index: int | None) -> InputError:
        where = "" if index is None else f" at index {index}"
        return InputError(
            f"token id {token}{where} is outside the model's vocabulary of "
            f"{self.engine.info.vocab}: "
            "encode the text with this plan's tokenizer"
        )


def _integers(name: str, values: ArrayLike | Iterable[int]) -> NDArray[np.int32]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name}: expected integers in one dimension") from None
    if isinstance(values, list | tuple) and any(isinstance(v, bool | np.bool_) for v in values):
        raise InputError(f"{name}: expected integers, found a boolean")
    if array.size == 0:
        return np.empty(array.shape, np.int32)
    if array.dtype.kind not in "iu":
        raise InputError(f"{name}: expected integers, found {array.dtype}")
    if array.min() < -(2**31) or array.max() >= 2**31:
        raise InputError(f"{name}: a number does not fit 32 bits")
    return array.astype(np.int32, copy=False)


def _index(name: str, value: object) -> int:
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InputError(f"{name} is {value!r}, expected an integer")


def _cannot_write(path: Path, error: OSError) -> PdscopeError:
    if not path.parent.is_dir():
        return InputError(f"{path}: cannot be written: there is no folder {path.parent}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return BudgetError(f"{path}: cannot be written: {error.strerror}: free space for it")
    return InputError(
        f"{path}: cannot be written: {error.strerror}: choose a file that you may write"
    )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    value = _index(name, value)
    if not low <= value < high:
        raise InputError(f"{name} is {value}, expected {low} to {high - 1}")
