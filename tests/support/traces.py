"""Routing traces in memory, of a planted rule or of a plan: what tests train predictors on."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.phaseper.store import Gate
from pdscope.compiler.quantise import to_bfloat16, to_float32
from pdscope.ir.graph import GateAttrs
from pdscope.ir.isa import NormSite, Opcode

if TYPE_CHECKING:
    from pdscope.engine import Engine
    from pdscope.observe import TapEvent


@dataclass(frozen=True)
class MemoryTrace:
    a: NDArray[np.uint16]
    w: NDArray[np.float32]
    e: NDArray[np.int32]
    prev: NDArray[np.int32]


class MemoryStore:
    """A trace store of arrays; the last rows of each phase are for validation."""

    def __init__(
        self, traces: dict[tuple[str, int], MemoryTrace], experts: int, validation: float
    ) -> None:
        self.phases = tuple(dict.fromkeys(phase for phase, _ in traces))
        self.layers = sorted({layer for _, layer in traces})
        self.experts, self._traces, self._validation = experts, traces, validation
        first = next(iter(traces.values()))
        self.hidden, self.top_k = first.a.shape[1], first.e.shape[1]

    def rows(self, phase: str) -> int:
        return len(self.layer(phase, self.layers[0]).a)

    def layer(self, phase: str, layer: int) -> MemoryTrace:
        return self._traces[phase, layer]

    def split(self, phase: str) -> NDArray[np.bool_]:
        rows = self.rows(phase)
        return np.arange(rows) >= rows * (1 - self._validation)


class PlantedStore(MemoryStore):
    """Each layer's gate input is the one before with its channels turned by `turn` places, so that
    the next layer's gate, asked too early, is right only where `turn` is 0."""

    def __init__(
        self,
        rows: int = 3000,
        layers: int = 4,
        hidden: int = 32,
        experts: int = 8,
        top_k: int = 2,
        turn: int = 5,
        validation: float = 0.2,
    ) -> None:
        rng = np.random.default_rng(0)
        attrs = GateAttrs.softmax(experts, top_k)
        numbers = [2 * i + 1 for i in range(layers)]  # dense layers between them
        self.gates = {
            layer: Gate(attrs, rng.standard_normal((experts, hidden)).astype(np.float32), None)
            for layer in numbers
        }
        traces = {}
        for phase in ("prefill", "decode"):
            a = rng.standard_normal((rows, hidden)).astype(np.float32)
            for layer in numbers:
                bits = to_bfloat16(a)
                logits = self.gates[layer].logits(to_float32(bits))
                e = np.argsort(-logits, axis=1, kind="stable")[:, :top_k].astype(np.int32)
                w = np.exp(np.take_along_axis(logits, e, 1))
                w = (w / w.sum(1, keepdims=True)).astype(np.float32)
                traces[phase, layer] = MemoryTrace(bits, w, e, shifted(e))
                a = np.roll(a, turn, axis=1)
        super().__init__(traces, experts, validation)


def shifted(e: NDArray[np.int32]) -> NDArray[np.int32]:
    """Experts of the token before; -1 at the first."""
    return np.concatenate([np.full((1, e.shape[1]), -1, np.int32), e[:-1]])


def read_routing(
    engine: "Engine", texts: Iterable[NDArray[np.int32]], experts: int, validation: float = 0.2
) -> MemoryStore:
    """What the gates of a plan are given and choose over whole texts, as both phases' rows."""
    found: dict[int, list[MemoryTrace]] = {}
    inputs: dict[int, list[NDArray[np.uint16]]] = {}
    choice: dict[int, list[tuple[NDArray[np.float32], NDArray[np.int32]]]] = {}

    def tap(event: "TapEvent") -> None:
        if event.opcode == Opcode.NORM and event.arg == NormSite.MLP:
            inputs.setdefault(event.layer, []).append(to_bfloat16(event.data.copy()))
        if event.opcode == Opcode.GATE and event.ids is not None:
            choice.setdefault(event.layer, []).append((event.data.copy(), event.ids.copy()))

    for ids in texts:
        inputs.clear()
        choice.clear()
        engine.reset()
        with engine.main.tap(tap):
            engine.prefill(ids)
        for layer, parts in choice.items():
            e = np.concatenate([p[1] for p in parts])
            w = np.concatenate([p[0] for p in parts])
            one = MemoryTrace(np.concatenate(inputs[layer]), w, e, shifted(e))
            found.setdefault(layer, []).append(one)
    whole = {
        layer: MemoryTrace(
            *(np.concatenate([getattr(p, n) for p in parts]) for n in ("a", "w", "e", "prev"))
        )
        for layer, parts in found.items()
    }
    traces = {(phase, n): t for phase in ("prefill", "decode") for n, t in whole.items()}
    return MemoryStore(traces, experts, validation)
