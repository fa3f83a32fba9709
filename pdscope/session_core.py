"""What a session's methods are built on: the C session and its batch, who may use which sequence,
cancellation.

May import numpy and pdscope.{arguments,errors,native}. Threads: `_operation` holds the session for
one call, `_streaming` for one token of a stream; what begins with `_` is called inside one of them.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdscope.arguments import check_range, index, integers
from pdscope.errors import BudgetError, Cancelled, InputError, PdscopeError
from pdscope.native import PDS_ERR_CANCELLED, SessionHandle, ffi, float_view

if TYPE_CHECKING:
    from pdscope.engine import Engine
    from pdscope.generation import Stream
    from pdscope.sampling import Sampler


class SessionCore:
    """State of a session, and the steps that pdscope.session and pdscope.generation build on."""

    def __init__(self, engine: "Engine", max_seqs: int = 1, kv_tokens: int = 0) -> None:
        check_range("max_seqs", max_seqs, 1, 2**16)
        check_range("kv_tokens", kv_tokens, 0, 2**31)
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
        self._predictions: NDArray[np.uint16] | None = None  # that the C session reads
        self._routes: NDArray[np.uint16] | None = None  # likewise
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

    def __reduce__(self) -> NoReturn:
        raise PdscopeError(
            "a session cannot be copied or pickled: make another with engine.session(), and move "
            "a sequence with save() and restore()"
        )

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
                "shorten the prompt, or recompile with a larger --max-context (max_context=)"
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

    def _sequence(self, name: str, seq: int) -> int:
        number = index(name, seq)
        if not 0 <= number < self.max_seqs:
            raise InputError(
                f"{name} is {number}: the session was made for {self.max_seqs} sequences, expected "
                f"0 to {self.max_seqs - 1}"
            )
        return number

    def _token_ids(self, ids: ArrayLike, what: str) -> NDArray[np.int32]:
        array = integers("tokens", ids)
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
