"""Heuristics that predict the next MoE layer's experts without training; PhasePer must beat them.

previous: the experts of layer l+1 at the token before; frequency: the most often chosen ones;
transition: a first-order table from layer l's experts to l+1's; cross_gate (Fate): the gate of
layer l+1 on layer l's gate input, with the family's own rule of choice. Each gives scores [n,
experts], higher is likelier. May import numpy and pdscope.compiler.phaseper.{metrics,store}; torch
where scores are taken of its tensors alone, since who inspects a plan needs none.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.phaseper.metrics import membership
from pdscope.compiler.phaseper.store import Gate

if TYPE_CHECKING:
    from torch import Tensor

Array = NDArray[np.float32]
Ids = NDArray[np.integer]

CROSS_GATE, PREVIOUS = "cross_gate", "previous"
FREQUENCY, TRANSITION = "frequency", "transition"
RIVALS = (CROSS_GATE, PREVIOUS, FREQUENCY, TRANSITION)


@dataclass(frozen=True)
class Tables:
    """What two rivals know: `frequency` [experts], `transition` [experts of l, experts of l+1]."""

    frequency: Array
    transition: Array


def choice_scores(gate: Gate, logits: "Tensor") -> "Tensor":
    """What the family's gate takes the best top_k of, [n, experts], given its logits."""
    import torch

    attrs = gate.attrs
    choice = logits.softmax(1) if attrs.score == "softmax" else logits.sigmoid()
    if gate.bias is not None:
        choice = choice + torch.from_numpy(np.array(gate.bias)).to(logits.device)
    if attrs.groups > 1:
        grouped = choice.reshape(len(choice), attrs.groups, -1)
        if attrs.group_score == "max":
            merit = grouped.amax(2)
        else:
            merit = grouped.topk(2, 2).values.sum(2)
        lost = merit.argsort(dim=1, descending=True, stable=True)[:, attrs.top_groups :]
        masked = torch.zeros_like(merit, dtype=torch.bool).scatter_(1, lost, True)
        choice = grouped.masked_fill(masked[:, :, None], attrs.masked_score).flatten(1)
    return choice


def frequency(chosen: Ids, experts: int) -> Array:
    """[experts]: share of the rows that chose each expert; half a row is added to all, so that
    none is 0."""
    counts = np.bincount(chosen.ravel(), minlength=experts).astype(np.float64)
    return ((counts + 0.5) / (len(chosen) + 1)).astype(np.float32)


def transition(source: Ids, chosen: Ids, experts: int) -> Array:
    """[experts of layer l, experts of l+1]: share of the rows with the one that chose the other.

    One row of the mean frequencies is added to each, so that unseen experts predict those.
    """
    before = membership(source, experts).astype(np.float32)
    after = membership(chosen, experts).astype(np.float32)
    mean = frequency(chosen, experts)
    table: Array = (before.T @ after + mean) / (before.sum(0)[:, None] + 1)
    return table


def transition_scores(table: Array, source: Ids, weights: Array) -> Array:
    """Mean of the table's rows of the source layer's experts [n, k], by routing weight [n, k]."""
    share = weights / np.maximum(weights.sum(1, keepdims=True), 1e-20)
    out = np.zeros((len(source), table.shape[1]), np.float32)
    for rank in range(source.shape[1]):
        out += share[:, rank, None] * table[source[:, rank]]
    return out


def previous_scores(previous: Ids, likely: Array) -> Array:
    """1 for the experts of the token before, and for all their frequency: it decides where there
    was no such token."""
    return (membership(previous, len(likely)) + likely).astype(np.float32)
