"""Losses of PhasePer, summed over nets that train side by side.

Section 4.2.3 of the PDScope paper, read as docs of this module's functions say; besides them
`distill`, which learns the next gate's own margins. All take stacked nets: logits [nets, rows,
experts]. May import torch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

PAPER_OUTER_PREFILL, PAPER_OUTER_DECODE = "inverse-frequency+focal", "focal"
BCE, DISTILL = "bce", "distill"
SLOPE = 2.0  # of distill; measured: better hit rates than 1, 4 and cross-entropy of the scores
LOSSES = (PAPER_OUTER_PREFILL, PAPER_OUTER_DECODE, BCE, DISTILL)


@dataclass(frozen=True)
class LossSpec:
    """`lam` and `gamma` are the paper's lambda and gamma; unused ones are 0."""

    kind: str
    lam: float = 0.0
    gamma: float = 0.0


def paper_loss(group: str, phase: str, lam: float, gamma: float) -> LossSpec:
    """The loss that the paper gives a layer group and phase."""
    if group == "middle":
        return LossSpec(BCE)
    if phase == "prefill":
        return LossSpec(PAPER_OUTER_PREFILL, lam, gamma)
    return LossSpec(PAPER_OUTER_DECODE, 0.0, gamma)


def bce(logits: Tensor, truth: Tensor) -> Tensor:
    """Binary cross-entropy of each expert; truth in {0, 1}."""
    return functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")


def focal(logits: Tensor, truth: Tensor, gamma: Tensor) -> Tensor:
    """(1 - p_t)^gamma BCE, p_t the probability given to what is true: easy pairs count little."""
    loss = bce(logits, truth)
    return torch.pow((1 - torch.exp(-loss)).clamp(min=1e-6), gamma) * loss


def inverse_frequency(logits: Tensor, truth: Tensor, frequency: Tensor) -> Tensor:
    """BCE / f_i, f_i the expert's share of the rows, scaled so that the mean weight is 1: rare
    experts count as much as common ones, and lambda means the same in every layer."""
    weight = 1 / frequency
    return bce(logits, truth) * (weight / weight.mean(-1, keepdim=True))


def distill(logits: Tensor, soft: Tensor, top_k: int) -> Tensor:
    """BCE of each expert against the next gate's soft choice.

    soft: sigmoid(SLOPE (log score - m)), m halfway between the top_k-th and the next best of the
    row; the net's own margins are taken likewise. What counts is which side of the gate's edge an
    expert is on, and how clearly. The gradient goes through the net's m, so that a shift of all
    logits, which changes no margin, is not learned: it would grow without bound.
    """
    return bce(SLOPE * (logits - edge(logits, top_k)), soft)


def edge(scores: Tensor, top_k: int) -> Tensor:
    """Halfway between each row's top_k-th and next best score, [..., 1]; 0 where all are taken."""
    if top_k >= scores.shape[-1]:
        return torch.zeros_like(scores[..., :1])
    return scores.topk(top_k + 1, -1).values[..., -2:].mean(-1, keepdim=True)


def stacked_loss(
    specs: list[LossSpec],
    logits: Tensor,
    truth: Tensor | None,
    soft: Tensor,
    frequency: Tensor,
    top_k: int,
) -> Tensor:
    """Sum over nets of each one's mean loss over rows (and experts); scalar.

    logits, truth, soft: [nets, rows, experts]; frequency [nets, 1, experts]. distill needs no
    truth. Every net's gradient is what it would be alone.
    """
    total = logits.new_zeros(())
    for kind in sorted({s.kind for s in specs}):
        at = [i for i, s in enumerate(specs) if s.kind == kind]

        def of(stacked: Tensor, at: list[int] = at) -> Tensor:
            return stacked if len(at) == len(specs) else stacked[at]

        z = of(logits)
        if kind == DISTILL:
            total = total + distill(z, of(soft), top_k).mean((1, 2)).sum()
            continue

        def per_net(name: str, at: list[int] = at, like: Tensor = z) -> Tensor:
            values = [float(getattr(specs[i], name)) for i in at]
            return like.new_tensor(values)[:, None, None]

        assert truth is not None
        y = of(truth)
        if kind == BCE:
            total = total + bce(z, y).mean((1, 2)).sum()
        elif kind == PAPER_OUTER_DECODE:
            total = total + focal(z, y, per_net("gamma")).mean((1, 2)).sum()
        else:
            rare = inverse_frequency(z, y, of(frequency))
            hybrid = rare + per_net("lam") * focal(z, y, per_net("gamma"))
            total = total + hybrid.mean((1, 2)).sum()
    return total
