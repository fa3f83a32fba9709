"""Batches for training and evaluation from a trace store: dense inputs, targets, gate scores.

A pair is a MoE layer and the next one, by its index: pair i is (layers[i], layers[i + 1]). May
import numpy, torch, pdscope.compiler.quantise and pdscope.compiler.phaseper.{calibrate,losses,
metrics,nets,rivals,store}.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdscope.compiler.phaseper import rivals
from pdscope.compiler.phaseper.calibrate import probabilities
from pdscope.compiler.phaseper.losses import SLOPE
from pdscope.compiler.phaseper.metrics import Array, Ids, membership
from pdscope.compiler.phaseper.nets import BLOCKS, PREVIOUS, PREVIOUS_NEXT
from pdscope.compiler.phaseper.rivals import Gate, Tables
from pdscope.compiler.phaseper.store import Store
from pdscope.compiler.quantise import to_float32

CHUNK = 8192  # rows that are scored at a time


@dataclass(frozen=True)
class Batch:
    """For each net, in the same order: x [nets, rows, inputs] as `dtype`; truth [nets, rows,
    experts] in {0, 1}; soft [nets, rows, experts] in (0, 1), the next gate's choice with its
    doubts, see losses.distill."""

    x: Tensor
    truth: Tensor
    soft: Tensor


class PhaseRows:
    """The rows of one phase. On a GPU they are copied there; on a CPU they stay in the store's
    files."""

    def __init__(
        self,
        store: Store,
        phase: str,
        gates: Mapping[int, Gate],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """gates: of every MoE layer but the first, by model-layer number; evaluation can do without
        them. `dtype`: of matrix products in training."""
        self.phase, self.device, self.dtype = phase, device, dtype
        self.layers, self.experts, self.top_k = list(store.layers), store.experts, store.top_k
        self.hidden = store.hidden
        self.gates = gates
        self.blocks = BLOCKS[phase]
        self._traces = [store.layer(phase, layer) for layer in self.layers]
        split = store.split(phase)
        self.train = np.flatnonzero(~split)
        self.validation = np.flatnonzero(split)
        self.pairs = range(len(self.layers) - 1)
        self._a: list[Tensor] = []
        if device.type != "cpu":
            self._a = [_bf16(np.array(t.a)).to(device) for t in self._traces[:-1]]
        self._soft: dict[int, NDArray[np.float16]] = {}
        # Powers of two: they fold into bf16 weights without rounding.
        self.scale = torch.ones(len(self.pairs), self.hidden + len(self.blocks) * self.experts)
        for pair in self.pairs:
            mean = float(self._traces[pair].w[self.train[:CHUNK]].mean()) if len(self.train) else 1
            routed = 2.0 ** round(-math.log2(max(mean, 1e-6)))
            self.scale[pair, self.hidden : self.hidden + self.experts] = routed

    def chosen(self, pair: int, rows: NDArray[np.int64]) -> Ids:
        """Experts that the next layer's gate chose [rows, top_k]."""
        return self._traces[pair + 1].e[rows]

    def a(self, pair: int, rows: NDArray[np.int64]) -> Array:
        """The layer's gate input [rows, hidden]."""
        return to_float32(self._traces[pair].a[rows])

    def features(self, pair: int, rows: NDArray[np.int64]) -> Array:
        """Feature blocks [rows, blocks * experts] as the runtime sees them, without `scale`."""
        layer, following = self._traces[pair], self._traces[pair + 1]
        routed = np.zeros((len(rows), self.experts), np.float32)
        np.put_along_axis(routed, layer.e[rows].astype(np.int64), layer.w[rows], 1)
        made = [routed]
        if PREVIOUS in self.blocks:
            made.append(membership(layer.prev[rows], self.experts).astype(np.float32))
        if PREVIOUS_NEXT in self.blocks:
            made.append(membership(following.prev[rows], self.experts).astype(np.float32))
        return np.concatenate(made, 1)

    def inputs(self, pairs: Sequence[int], rows: NDArray[np.int64]) -> Tensor:
        """x of `batch` alone."""
        made = {pair: self._inputs(pair, rows) for pair in sorted(set(pairs))}
        return torch.stack([made[pair] for pair in pairs])

    def batch(self, pairs: Sequence[int], rows: NDArray[np.int64]) -> Batch:
        """`pairs[i]` is what net i predicts; a pair may occur more than once."""
        truth = {p: membership(self.chosen(p, rows), self.experts) for p in sorted(set(pairs))}
        y = torch.from_numpy(np.stack([truth[p] for p in pairs]))
        q = torch.from_numpy(np.stack([self._soft_choice(p)[rows] for p in pairs]))
        return Batch(self.inputs(pairs, rows), y.to(self.device).float(), q.to(self.device).float())

    def frequency(self, pair: int) -> Array:
        """Share of the training rows that chose each of the next layer's experts [experts]."""
        return rivals.frequency(self.chosen(pair, self.train), self.experts)

    def tables(self, pair: int) -> Tables:
        """Of the training rows."""
        source = self._traces[pair].e[self.train]
        chosen = self.chosen(pair, self.train)
        table = rivals.transition(source, chosen, self.experts)
        return Tables(self.frequency(pair), table)

    def rival_scores(self, pair: int, rows: NDArray[np.int64], tables: Tables) -> dict[str, Array]:
        """Scores [rows, experts] of every rival; without gates none of the cross-layer gate."""
        layer, following = self._traces[pair], self._traces[pair + 1]
        likely = tables.frequency
        found = {
            rivals.PREVIOUS: rivals.previous_scores(following.prev[rows], likely),
            rivals.FREQUENCY: np.broadcast_to(likely, (len(rows), self.experts)),
            rivals.TRANSITION: rivals.transition_scores(
                tables.transition, layer.e[rows], layer.w[rows]
            ),
        }
        if self.layers[pair + 1] in self.gates:
            cross = self._choice(pair, self.a(pair, rows))
            found = {rivals.CROSS_GATE: cross, **found}
        return found

    def _inputs(self, pair: int, rows: NDArray[np.int64]) -> Tensor:
        if self._a:
            a = self._a[pair][torch.from_numpy(rows).to(self.device)]
        else:
            a = _bf16(self._traces[pair].a[rows])
        features = torch.from_numpy(self.features(pair, rows)) * self.scale[pair, self.hidden :]
        return torch.cat([a.to(self.dtype), features.to(self.device, self.dtype)], 1)

    def _choice(self, pair: int, a: Array) -> Array:
        gate = self.gates[self.layers[pair + 1]]
        weight = torch.from_numpy(np.array(gate.weight, np.float32)).to(self.device)
        logits = torch.from_numpy(a).to(self.device) @ weight.T
        return rivals.choice_scores(gate.attrs, gate.bias, logits.cpu().numpy())

    def _soft_choice(self, pair: int) -> NDArray[np.float16]:
        """[rows, experts] of all rows; computed once."""
        if pair in self._soft:
            return self._soft[pair]
        a = self._traces[pair + 1].a
        out = np.empty((len(a), self.experts), np.float16)
        for at in range(0, len(a), CHUNK):
            choice = self._choice(pair, to_float32(a[at : at + CHUNK]))
            score = np.log(np.maximum(choice, 1e-9))
            out[at : at + CHUNK] = probabilities(score, self.top_k, 1 / SLOPE)
        self._soft[pair] = out
        return out


def _bf16(bits: NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
