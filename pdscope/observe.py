"""What a session shows of its running: instruction traces and taps.

May import numpy and pdscope.{errors,native}. pdscope.perfetto writes traces to files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdscope.native import Library, ffi

# pds_trace_record of pdscope.h
RECORD = np.dtype(
    [
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("bytes", "<u8"),
        ("layer", "<i4"),
        ("instr", "<u2"),
        ("opcode", "u1"),
        ("queue", "u1"),
        ("rows", "<u4"),
        ("experts", "<u4"),
    ]
)


class Trace:
    """Instructions executed, oldest first, once the `with session.trace()` block has ended."""

    def __init__(self, library: Library, capacity: int) -> None:
        self._library = library
        # calloc'd pages: untouched ones take no memory
        self._records = np.zeros(capacity, RECORD)
        self.buffer: Any = ffi().from_buffer("pds_trace_record[]", self._records)
        self._count = 0
        self.dropped = 0  # instructions that the capacity did not hold

    def finish(self, records: int, dropped: int) -> None:
        self._count, self.dropped = records, dropped

    @property
    def records(self) -> NDArray[np.void]:
        """Structured array [n] of dtype RECORD; times in ns of CLOCK_MONOTONIC."""
        return self._records[: self._count]

    def opcode_names(self) -> dict[int, str]:
        return self._names("opcode", self._library.lib.pds_opcode_name)

    def queue_names(self) -> dict[int, str]:
        return self._names("queue", self._library.lib.pds_queue_name)

    def _names(self, field: str, function: Any) -> dict[int, str]:
        values = np.unique(self.records[field]).tolist()
        return {value: self._library.text(function(value)) for value in values}


@dataclass(frozen=True)
class TapEvent:
    """What one instruction left behind; `pds_tap_event` of pdscope.h."""

    layer: int  # -1: prologue or epilogue
    instr: int
    opcode: int
    arg: int
    data: NDArray[np.float32]  # [rows, cols], a view valid during the call
    # gate: expert ids [rows, top_k]; predict: of the next layer [rows that predict, top_k]
    ids: NDArray[np.int32] | None
    predicted: NDArray[np.int32] | None = None  # gate that predicts: of the next layer, likewise
    position: NDArray[np.int32] | None = None  # embed: [rows], of the step's rows
    seq: NDArray[np.int32] | None = None  # embed: [rows], their sequences
    logits: int = 0  # rows of the step that want logits


def tap_callback(function: Callable[[TapEvent], None], errors: list[BaseException]) -> Any:
    """A pds_tap_fn that calls `function`; what it raises goes to `errors`. Keep the result
    alive.
    """

    def call(_user: Any, event: Any) -> None:
        if errors:
            return
        try:
            function(_event(event))
        except BaseException as error:
            errors.append(error)

    return ffi().callback("pds_tap_fn", call)


def _event(event: Any) -> TapEvent:
    c = ffi()
    rows, predicted_cols = int(event.rows), int(event.predicted_cols)

    def view(
        pointer: Any, dtype: type[np.generic], cols: int = int(event.cols)
    ) -> NDArray[Any] | None:
        if pointer == c.NULL:
            return None
        return np.frombuffer(c.buffer(pointer, rows * cols * 4), dtype).reshape(rows, cols)

    def of_rows(pointer: Any) -> NDArray[np.int32] | None:
        array = view(pointer, np.int32, 1)
        return None if array is None else array[:, 0]

    data = view(event.data, np.float32)
    return TapEvent(
        layer=event.layer,
        instr=event.instr,
        opcode=event.opcode,
        arg=event.arg,
        data=np.empty((0, 0), np.float32) if data is None else data,
        ids=view(event.ids, np.int32),
        predicted=view(event.predicted, np.int32, predicted_cols),
        position=of_rows(event.position),
        seq=of_rows(event.seq),
        logits=int(event.n_logits),
    )
