"""Routing traces with a planted rule, in memory: what tests train predictors on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.phaseper.rivals import Gate
from pdscope.compiler.quantise import to_bfloat16, to_float32
from pdscope.ir.graph import GateAttrs


def softmax_attrs(experts: int, top_k: int) -> GateAttrs:
    return GateAttrs(
        experts=experts,
        top_k=top_k,
        score="softmax",
        normalise=True,
        norm_eps=0.0,
        scaling=1.0,
        groups=1,
        top_groups=1,
        group_score="none",
        masked_score=0.0,
    )


@dataclass(frozen=True)
class PlantedTrace:
    a: NDArray[np.uint16]
    w: NDArray[np.float32]
    e: NDArray[np.int32]
    prev: NDArray[np.int32]


class PlantedStore:
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
        self.phases = ("prefill", "decode")
        self.layers = [2 * i + 1 for i in range(layers)]  # dense layers between them
        self.hidden, self.experts, self.top_k = hidden, experts, top_k
        rng = np.random.default_rng(0)
        attrs = softmax_attrs(experts, top_k)
        self.gates = {
            layer: Gate(attrs, rng.standard_normal((experts, hidden)).astype(np.float32), None)
            for layer in self.layers
        }
        self._rows, self._validation = rows, validation
        self._traces: dict[tuple[str, int], PlantedTrace] = {}
        for phase in self.phases:
            a = rng.standard_normal((rows, hidden)).astype(np.float32)
            for layer in self.layers:
                bits = to_bfloat16(a)
                logits = self.gates[layer].logits(to_float32(bits))
                e = np.argsort(-logits, axis=1, kind="stable")[:, :top_k].astype(np.int32)
                w = np.exp(np.take_along_axis(logits, e, 1))
                w = (w / w.sum(1, keepdims=True)).astype(np.float32)
                prev = np.concatenate([np.full((1, top_k), -1, np.int32), e[:-1]])
                self._traces[phase, layer] = PlantedTrace(bits, w, e, prev)
                a = np.roll(a, turn, axis=1)

    def rows(self, phase: str) -> int:
        return self._rows

    def layer(self, phase: str, layer: int) -> PlantedTrace:
        return self._traces[phase, layer]

    def split(self, phase: str) -> NDArray[np.bool_]:
        return np.arange(self._rows) >= self._rows * (1 - self._validation)
