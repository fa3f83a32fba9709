"""One session on a loaded plan: KV of its sequences, steps on batches, and what is built on steps.

May import numpy and pdscope.{arguments,errors,native,observe,session_core}; pdscope.generation only
to generate. Every public method takes the session's lock, so threads that share a session take
turns; for work at the same time give each thread its own session.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdscope.arguments import check_range, index, integers
from pdscope.errors import BudgetError, InputError, PdscopeError, disk_fault
from pdscope.native import ffi
from pdscope.observe import TapEvent, Trace, tap_callback
from pdscope.session_core import SessionCore

if TYPE_CHECKING:
    from pdscope.generation import Completion, Stream

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]
Messages = Sequence[Mapping[str, Any]]

# PDS_MEASURE_*
MEASURES = (
    *("experts", "shared", "attention", "predict", "context"),
    *("gpu_experts", "gpu_shared", "gpu_attention", "link", "link_busy", "link_start"),
    "experts_busy",
)


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
    experts_predicted: int  # by layers for the next one, while cache prefetch was on
    experts_hit: int  # of them, activated
    prefetch_bytes: int  # pulled into the last-level cache
    prefetch_useful_bytes: int  # of them, of activated experts


class Session(SessionCore):
    """KV cache and scratch for up to `max_seqs` sequences; made by Engine.session().

    Logits are float32 arrays that show the runtime's own memory: valid until the session's next
    step (`.copy()` keeps them). They stay readable after close().
    """

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
        seq = integers("seqs", seqs)
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
            where = self._positions(seq) if positions is None else integers("positions", positions)
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

    def predict(
        self,
        layer: int,
        phase: str,
        a: ArrayLike,
        w: ArrayLike,
        e: ArrayLike,
        prev: ArrayLike | None = None,
        prev_next: ArrayLike | None = None,
    ) -> NDArray[np.float32]:
        """Logits [n, experts] of the experts that the MoE layer after `layer` will choose, as a
        step predicts them: by the layer's net of `phase`, "prefill" or "decode", where one is
        loaded, else by the next layer's gate (on all but the choice: before softmax and bias).

        a: [n, hidden], input of the layer's gate, which nets read in bf16; w, e: [n, top_k], the
        routing weights and experts that it chose; prev, prev_next: [n, top_k], the experts that
        this layer and the next one chose for the token before, -1 where there is none (None:
        nowhere). Changes no sequence. Raises InputError.
        """
        hidden, k = self.engine.plan.model["hidden"], self.engine.plan.model["top_k"]
        x = _floats("a", a, (None, hidden))
        n = len(x)
        weights = _floats("w", w, (n, k))
        ids = [
            None if given is None else np.ascontiguousarray(integers(name, given))
            for name, given in (("e", e), ("prev", prev), ("prev_next", prev_next))
        ]
        for name, array in zip(("e", "prev", "prev_next"), ids, strict=True):
            if array is not None and array.shape != (n, k):
                raise InputError(f"{name} has shape {array.shape}, expected {(n, k)}")
        if phase not in ("prefill", "decode"):
            raise InputError(f"phase is {phase!r}, expected prefill or decode")
        check_range("layer", layer, 0, self.engine.info.layers)
        c = ffi()
        out = np.empty((n, self.engine.plan.model["experts"]), np.float32)

        def pointer(kind: str, array: NDArray[Any] | None) -> Any:
            return c.NULL if array is None else c.cast(kind, array.ctypes.data)

        asked = c.new(
            "pds_prediction *",
            {
                "layer": layer,
                "phase": ("prefill", "decode").index(phase),
                "n": n,
                "a": pointer("float *", x),
                "w": pointer("float *", weights),
                "e": pointer("int32_t *", ids[0]),
                "prev": pointer("int32_t *", ids[1]),
                "prev_next": pointer("int32_t *", ids[2]),
            },
        )
        with self._operation():
            where = c.cast("float *", out.ctypes.data)
            self._check(self._lib.pds_predict(self._pointer(), asked, where))
        return out

    def measure(
        self,
        what: str,
        layer: int,
        rows: int = 0,
        seq: int = 0,
        experts: Mapping[int, int] | None = None,
        loads: Sequence[int] = (),
    ) -> int:
        """Nanoseconds that a part of a step takes on made-up rows, for the compiler's cost table.

        what: one of MEASURES. "experts": one job of `experts`, each with its number of tokens;
        "shared", "predict": of `rows` rows; "attention": norm, attention, norm and gate of `rows`
        rows that would continue sequence `seq`, which stays as it is; "context": nothing (0), but
        `seq` gets `rows` made-up tokens.

        An engine with a GPU measures "context" and these alone, in nanoseconds of the driver's
        clock: "gpu_experts": one submission of `experts`, whose weights are those of slots,
        expert modulo all slots; "gpu_shared"; "gpu_attention", until the routes are on the host;
        "link": the experts `loads` to slots of the ring, each to expert modulo those; "link_busy":
        the same while the CPU computes `experts`; "link_start": the same of 4 KiB;
        "experts_busy": one job of `experts` on the CPU while `loads` cross the link again and
        again, or, without any, while it is idle.
        Raises InputError, BudgetError.
        """
        if what not in MEASURES:
            raise InputError(f"what is {what!r}, expected one of {', '.join(MEASURES)}")
        check_range("layer", layer, 0, self.engine.info.layers)
        seq = self._sequence("seq", seq)
        check_range("rows", rows, 0, 2**31)
        c, given = ffi(), experts or {}
        out = c.new("int64_t *")
        with self._operation(*([seq] if what == "context" else [])):
            first = self._length(seq)
            keep = [
                c.new("int32_t[]", list(range(first, first + rows))),
                c.new("int32_t[]", [seq] * rows),
                c.new("uint32_t[]", list(given)),
                c.new("uint32_t[]", list(given.values())),
                c.new("uint32_t[]", list(loads)),
            ]
            asked = c.new(
                "pds_measurement *", [MEASURES.index(what), layer, rows, *keep[:2], len(given)]
            )
            asked.expert, asked.tokens, asked.load = keep[2:]
            asked.n_loads = len(loads)
            self._check(self._lib.pds_measure(self._pointer(), asked, out))
        return int(out[0])

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
        token = index("token", token)
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
        from pdscope.generation import Request, Stream, check_names

        check_names(options)
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
        check_range("tokens", tokens, 0, 2**31)
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
        check_range("capacity", capacity, 1, 2**32)
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

    def set_predictions(self, experts: ArrayLike | None) -> None:
        """Steps predict these from now on, whatever the predictors say; results stay the same.

        experts: [tokens, layers, top_k] ids: what the MoE layer `layer` says at a position of any
        sequence that the next one will choose; of other layers nothing is read. Behind the last of
        the tokens predictors predict again; None: everywhere. Raises InputError.
        """
        held = self._expert_ids("predictions", experts)
        with self._operation():
            self._check(self._lib.pds_session_set_predictions(self._pointer(), *_pointed(held)))
            self._predictions = held

    def set_routes(self, experts: ArrayLike | None) -> None:
        """Gates choose these from now on, whatever their input is, all with the same weight 1 /
        top_k: for benchmarks of random weights, whose own routing is like no model's.

        experts: [tokens, layers, top_k] ids, none twice in a row: what the MoE layer `layer`
        chooses at position p of any sequence is [p modulo tokens, layer]; of other layers nothing
        is read. None: gates choose for themselves again. Raises InputError.
        """
        held = self._expert_ids("routes", experts)
        with self._operation():
            self._check(self._lib.pds_session_set_routes(self._pointer(), *_pointed(held)))
            self._routes = held

    def _expert_ids(self, name: str, experts: ArrayLike | None) -> NDArray[np.uint16] | None:
        """[tokens, layers, top_k], as the C session reads them."""
        if experts is None:
            return None
        given = integers(name, experts)
        model = self.engine.plan.model
        shape = (len(given) if given.ndim else 0, model["layers"], model["top_k"])
        if given.shape != shape:
            raise InputError(f"{name} has shape {given.shape}, expected {shape}")
        if given.size and not 0 <= given.min() <= given.max() < model["experts"]:
            raise InputError(f"{name}: expected experts 0 to {model['experts'] - 1}")
        return np.ascontiguousarray(given, np.uint16)

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


def _pointed(ids: NDArray[np.uint16] | None) -> tuple[Any, int]:
    """What C takes of it: where it lies, and its tokens."""
    c = ffi()
    return (c.NULL, 0) if ids is None else (c.cast("uint16_t *", ids.ctypes.data), len(ids))


def _cannot_write(path: Path, error: OSError) -> PdscopeError:
    if not path.parent.is_dir():
        return InputError(f"{path}: cannot be written: there is no folder {path.parent}")
    if remedy := disk_fault(error, "free space for it"):
        return BudgetError(f"{path}: cannot be written: {error.strerror}: {remedy}")
    return InputError(
        f"{path}: cannot be written: {error.strerror}: choose a file that you may write"
    )


def _floats(name: str, values: ArrayLike, shape: tuple[int | None, int]) -> NDArray[np.float32]:
    """C-contiguous float32 of that shape; None: any number of rows."""
    try:
        array = np.ascontiguousarray(values, np.float32)
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected numbers in two dimensions") from None
    if array.ndim != 2 or array.shape[1] != shape[1] or shape[0] not in (None, len(array)):
        rows = "n" if shape[0] is None else shape[0]
        raise InputError(f"{name} has shape {array.shape}, expected ({rows}, {shape[1]})")
    return array
