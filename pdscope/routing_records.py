"""What every MoE layer's gate is given and chooses while a plan reads documents.

Documents are read as the sequences of batched steps, token after token in their order, so that all
positions are had at the price of a prefill. Those that decoding would come to (Document.decode) are
teacher-forced: the same tokens at the same positions, computed with the rows of other positions.

May import numpy and pdscope.{documents,errors,observe,plan}, the names of pdscope.ir.isa;
pdscope.engine for its types alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from pdscope.documents import Document
from pdscope.ir.isa import NormSite, Opcode
from pdscope.observe import TapEvent
from pdscope.plan import Plan

if TYPE_CHECKING:
    from pdscope.engine import Engine

# Sequences that one step may hold; each takes whole blocks of KV.
SEQUENCES = 32


@dataclass(frozen=True)
class LayerRecords:
    """One MoE layer's part of a step of n rows. Arrays are valid until the next step."""

    a: NDArray[np.float32]  # [n, hidden] the gate's input
    w: NDArray[np.float32]  # [n, top_k] routing weights, in rank order
    e: NDArray[np.int32]  # [n, top_k] expert ids, in rank order
    prev: NDArray[np.int32]  # [n, top_k] those of the position before; -1: none before it


@dataclass(frozen=True)
class Records:
    """The rows of one step, which ascend by document and position."""

    token: NDArray[np.int32]  # [n]
    document: NDArray[np.int32]  # [n] number of the document, in the order given
    position: NDArray[np.int32]  # [n] in the document
    prefill: NDArray[np.bool_]  # [n] see Document
    decode: NDArray[np.bool_]  # [n]
    layers: dict[int, LayerRecords]  # by model-layer number, ascending


def moe_layers(plan: Plan) -> list[int]:
    """Model-layer numbers of the layers that have a gate, ascending."""
    gate = f"compute {Opcode.GATE.text}"
    texts = (plan.read_text(name) for name in plan.program_files("decode"))
    # The prologue comes first, the epilogue last.
    return [number - 1 for number, text in enumerate(texts) if gate in text]


class RoutingReader:
    """A session of its own that reads documents; to be closed, or used in a `with` block."""

    def __init__(self, engine: "Engine") -> None:
        """Raises BudgetError when the memory is not there: that of an ordinary session, and of
        max_rows rows [MoE layers, max_rows, hidden] in float32."""
        info = engine.info
        self._rows, self._context = info.max_rows, info.max_context
        kv_tokens = info.max_context + info.max_rows + SEQUENCES * info.kv_block
        self._session = engine.session(SEQUENCES, kv_tokens)
        self._taken = _Taken(engine)

    def read(self, documents: Iterable[Document]) -> Iterator[Records]:
        """Reads the documents, in order, and yields the records of each step.

        A document longer than the plan's context is read in windows, each from an empty context;
        what is before a window does not count as its previous position. Raises InputError for a
        token id that the model does not have.
        """
        session = self._session
        session.reset()
        with session.tap(self._taken.tap):
            for pieces in _steps(_windows(documents, self._context), self._rows):
                lengths = [len(p.ids) for p in pieces]
                session.step(
                    np.concatenate([p.ids for p in pieces]),
                    np.concatenate([p.at + np.arange(len(p.ids), dtype=np.int32) for p in pieces]),
                    np.repeat(np.array([p.sequence for p in pieces], np.int32), lengths),
                    np.zeros(sum(lengths), np.bool_),
                )
                yield self._taken.records(pieces)
                for piece in pieces:
                    if piece.last:
                        session.truncate(piece.sequence, 0)

    def close(self) -> None:
        """Frees the session; arrays of its records stay."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Piece:
    """Rows of one window, [at, at + n) of it."""

    document: Document
    number: int  # of the document
    window: int  # position in the document of the window's first token
    at: int
    ids: NDArray[np.int32]
    sequence: int
    last: bool  # of the window


def _windows(documents: Iterable[Document], size: int) -> Iterator[_Piece]:
    """Whole windows of at most `size` tokens; sequences in turn, as a step holds neighbours."""
    count = 0
    for number, document in enumerate(documents):
        for begin in range(0, len(document.ids), size):
            ids = document.ids[begin : begin + size]
            yield _Piece(document, number, begin, 0, ids, count % SEQUENCES, True)
            count += 1


def _steps(windows: Iterable[_Piece], rows: int) -> Iterator[list[_Piece]]:
    """Pieces in their order, in steps of at most `rows` rows and SEQUENCES windows."""
    step: list[_Piece] = []
    free = rows
    for w in windows:
        at = 0
        while at < len(w.ids):
            if not free or len(step) == SEQUENCES:
                yield step
                step, free = [], rows
            ids = w.ids[at : at + free]
            last = at + len(ids) == len(w.ids)
            step.append(_Piece(w.document, w.number, w.window, at, ids, w.sequence, last))
            at, free = at + len(ids), free - len(ids)
    if step:
        yield step


class _Taken:
    """What the gates have shown of a step."""

    def __init__(self, engine: "Engine") -> None:
        model, rows = engine.plan.model, engine.info.max_rows
        self._hidden: int = model["hidden"]
        self._a = {
            layer: np.empty((rows, self._hidden), np.float32) for layer in moe_layers(engine.plan)
        }
        self._w: dict[int, NDArray[np.float32]] = {}
        self._e: dict[int, NDArray[np.int32]] = {}
        self._before: dict[int, NDArray[np.int32]] = {}  # experts of the step's predecessor row

    def tap(self, event: TapEvent) -> None:
        if event.opcode == Opcode.NORM and event.arg == NormSite.MLP and event.layer in self._a:
            self._a[event.layer][: len(event.data)] = event.data[:, : self._hidden]
        elif event.opcode == Opcode.GATE:
            assert event.ids is not None
            self._w[event.layer], self._e[event.layer] = event.data.copy(), event.ids.copy()

    def records(self, pieces: list[_Piece]) -> Records:
        ranges = [(p, p.window + p.at, p.window + p.at + len(p.ids)) for p in pieces]
        at = np.concatenate([p.at + np.arange(len(p.ids)) for p in pieces])
        begins = at == 0
        n = len(at)
        layers = {}
        for layer, a in self._a.items():
            e = self._e[layer]
            prev = np.empty_like(e)
            prev[0] = self._before.get(layer, -1)
            prev[1:] = e[:-1]
            prev[begins] = -1
            self._before[layer] = e[-1]
            layers[layer] = LayerRecords(a[:n], self._w[layer], e, prev)
        return Records(
            np.concatenate([p.ids for p in pieces]),
            np.concatenate([np.full(len(p.ids), p.number, np.int32) for p in pieces]),
            np.concatenate([np.arange(b, e, dtype=np.int32) for _, b, e in ranges]),
            np.concatenate([p.document.prefill[b:e] for p, b, e in ranges]),
            np.concatenate([p.document.decode[b:e] for p, b, e in ranges]),
            layers,
        )
