"""Batches for training and evaluation from a trace store: dense inputs, targets, gate scores.

A pair is a MoE layer and the next one, by its index: pair i is (layers[i], layers[i + 1]). May
import numpy, torch, pdscope.compiler.quantise and pdscope.compiler.phaseper.{losses,metrics,
nets,rivals,store}.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdscope.compiler.phaseper import rivals
from pdscope.compiler.phaseper.losses import SLOPE, edge
from pdscope.compiler.phaseper.metrics import Array, Ids, membership
from pdscope.compiler.phaseper.nets import BLOCKS, PREVIOUS, PREVIOUS_NEXT, ROUTED
from pdscope.compiler.phaseper.rivals import Tables
from pdscope.compiler.phaseper.store import Gate, Store
from pdscope.compiler.quantise import to_float32

CHUNK = 8192  # rows that are scored at a time


@dataclass(frozen=True)
class Batch:
    """For each net, in the same order: x [nets, rows, inputs] as `dtype`; truth [nets, rows,
    experts] in {0, 1}, if wanted; soft [nets, rows, experts] in (0, 1), the next gate's choice
    with its doubts, see losses.distill."""

    x: Tensor
    truth: Tensor | None
    soft: Tensor


class PhaseRows:
    """The rows of one phase. Training on a GPU takes what of them fits there, see `load`; on a CPU
    the gate's inputs stay in the store's files."""

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
        self.rows = store.rows(phase)
        split = store.split(phase)
        self.train = np.flatnonzero(~split)
        self.validation = np.flatnonzero(split)
        self.pairs = range(len(self.layers) - 1)
        self._e = [_to(t.e, device) for t in self._traces]
        self._w = [_to(t.w, device) for t in self._traces]
        self._prev = [_to(t.prev, device) for t in self._traces]
        self._a: dict[int, Tensor] = {}
        self._soft: dict[int, Tensor] = {}
        # Powers of two: they fold into bf16 weights without rounding.
        self.scale = torch.ones(len(self.pairs), self.hidden + len(self.blocks) * self.experts)
        for pair in self.pairs:
            mean = float(self._traces[pair].w[self.train[:CHUNK]].mean()) if len(self.train) else 1
            routed = 2.0 ** round(-math.log2(max(mean, 1e-6)))
            self.scale[pair, self.hidden : self.hidden + self.experts] = routed

    def load(self) -> None:
        """Before training: the gate's inputs to the GPU, while two thirds of its memory last."""
        if self.device.type != "cuda":
            return
        left = torch.cuda.mem_get_info(self.device)[0] * 2 // 3
        for pair in self.pairs:
            a = self._traces[pair].a
            left -= a.nbytes
            if left > 0:
                self._a[pair] = _bf16(np.array(a)).to(self.device)

    def release(self) -> None:
        """Gives back what training took."""
        self._a.clear()
        self._soft.clear()

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
        unique = sorted(set(pairs))
        width = self.hidden + len(self.blocks) * self.experts
        made = torch.zeros(len(unique), len(rows), width, dtype=self.dtype, device=self.device)
        where = torch.from_numpy(rows).to(self.device)
        for x, pair in zip(made, unique, strict=True):
            self._fill(x, pair, rows, where)
        return made if unique == list(pairs) else made[[unique.index(p) for p in pairs]]

    def batch(self, pairs: Sequence[int], rows: NDArray[np.int64], truth: bool = True) -> Batch:
        """`pairs[i]` is what net i predicts; a pair may occur more than once. truth: whether it is
        wanted."""
        where = torch.from_numpy(rows).to(self.device)

        def stack(of: Callable[[int], Tensor]) -> Tensor:
            made = {pair: of(pair) for pair in set(pairs)}
            return torch.stack([made[pair] for pair in pairs])

        return Batch(
            self.inputs(pairs, rows),
            stack(lambda pair: self._dense(self._e[pair + 1][where])) if truth else None,
            stack(lambda pair: self._soft_choice(pair)[where].float()),
        )

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
            cross = self._choice(pair, self._gate_inputs(pair, rows))
            found = {rivals.CROSS_GATE: cross.cpu().numpy(), **found}
        return found

    def _fill(self, x: Tensor, pair: int, rows: NDArray[np.int64], where: Tensor) -> None:
        """x [rows, inputs], zeros: the gate's inputs, and features at their experts' columns."""
        x[:, : self.hidden] = (
            self._a[pair][where] if pair in self._a else self._gate_inputs(pair, rows)
        )
        sources = {
            ROUTED: self._e[pair],
            PREVIOUS: self._prev[pair],
            PREVIOUS_NEXT: self._prev[pair + 1],
        }
        values, columns = [], []
        for at, block in enumerate(self.blocks):
            ids = sources[block][where]
            if block == ROUTED:
                value = self._w[pair][where] * float(self.scale[pair, self.hidden])
            else:
                value = ids >= 0
            values.append(value.to(self.dtype))
            columns.append(ids.clamp(min=0).long() + (self.hidden + at * self.experts))
        # added, not set: an expert that is not there adds nothing to the first
        x.scatter_add_(1, torch.cat(columns, 1), torch.cat(values, 1))

    def _gate_inputs(self, pair: int, rows: NDArray[np.int64]) -> Tensor:
        return _bf16(self._traces[pair].a[rows]).to(self.device)

    def _dense(self, ids: Tensor) -> Tensor:
        """fp32 [rows, experts], 1 at the ids [rows, k]."""
        out = torch.zeros(len(ids), self.experts, device=self.device)
        return out.scatter_(1, ids.long(), 1.0)

    def _choice(self, pair: int, a: Tensor) -> Tensor:
        gate = self.gates[self.layers[pair + 1]]
        weight = torch.from_numpy(np.array(gate.weight, np.float32)).to(self.device)
        return rivals.choice_scores(gate, a.float() @ weight.T)

    def _soft_choice(self, pair: int) -> Tensor:
        """fp16 [rows, experts] of all rows; computed once."""
        if pair not in self._soft:
            a, parts = self._traces[pair + 1].a, []
            for at in range(0, len(a), CHUNK):
                choice = self._choice(pair, _bf16(np.array(a[at : at + CHUNK])).to(self.device))
                score = choice.clamp(min=1e-9).log()
                soft = torch.sigmoid(SLOPE * (score - edge(score, self.top_k)))
                parts.append(soft.half())
            self._soft[pair] = torch.cat(parts)
        return self._soft[pair]


def _to(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(array)).to(device)


def _bf16(bits: NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
