"""From scores to probabilities, and to the experts that are confidently hot or cold.

May import numpy and pdscope.compiler.phaseper.metrics.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.phaseper.metrics import (
    Array,
    Ids,
    Reliability,
    membership,
    rank_accuracy,
    reliability,
)

HOT_PRECISION = 0.95  # share of the confidently hot experts that the gate has to choose
COLD_PRECISION = 0.99  # share of the confidently cold ones that it must not choose
MOST_LOSS = 28.0  # that one expert's cross-entropy counts: scores may be far off


@dataclass(frozen=True)
class Calibration:
    """`hot`: probability from which on an expert is confidently hot, above 1 if none is; `cold`:
    probability up to which one is confidently cold, below 0 if none is. The precisions are those
    reached on the calibration rows, the counts experts a token. `r_hit`: see `priority_hit`."""

    temperature: float
    hot: float
    hot_precision: float
    hot_count: float
    cold: float
    cold_precision: float
    cold_count: float
    r_hit: float
    reliability: Reliability


def probabilities(scores: Array, top_k: int, temperature: float) -> Array:
    """Chance of each expert to be among the gate's top_k [n, experts].

    sigmoid((score - m) / temperature), m halfway between a row's top_k-th and next best score.
    """
    if top_k >= scores.shape[1]:
        return np.ones_like(scores, np.float32)
    z = np.clip(_margins(scores, top_k) / np.float32(temperature), -60, 60)
    likely: Array = (1 / (1 + np.exp(-z))).astype(np.float32)
    return likely


def _margins(scores: Array, top_k: int) -> Array:
    """score - m of `probabilities`; top_k is less than the experts."""
    next_best = scores.shape[1] - top_k - 1
    part = np.partition(scores, (next_best, next_best + 1), axis=1)
    middle = (part[:, next_best] + part[:, next_best + 1]) / 2
    return np.asarray(scores - middle[:, None], np.float32)


def fit_temperature(scores: Array, truth: NDArray[np.bool_], top_k: int) -> float:
    """The temperature of least cross-entropy of `probabilities`, by golden section over its
    logarithm; 1 where all experts are always chosen."""
    if top_k >= scores.shape[1]:
        return 1.0
    spread = float(np.std(scores)) or 1.0
    margins = _margins(scores, top_k)
    signed = np.where(truth, margins, -margins).astype(np.float32)  # positive: on its side

    def loss(log: float) -> float:
        z = signed / np.float32(spread * np.exp(log))
        softplus = np.log1p(np.exp(-np.abs(z))) + np.maximum(-z, 0)
        return float(np.minimum(softplus, MOST_LOSS).mean(dtype=np.float64))

    low, high, part = -9.0, 5.0, (5**0.5 - 1) / 2
    lower, upper = high - part * (high - low), low + part * (high - low)
    at_lower, at_upper = loss(lower), loss(upper)
    while high - low > 0.01:
        if at_lower <= at_upper:
            high, upper, at_upper = upper, lower, at_lower
            lower = high - part * (high - low)
            at_lower = loss(lower)
        else:
            low, lower, at_lower = lower, upper, at_upper
            upper = low + part * (high - low)
            at_upper = loss(upper)
    return spread * float(np.exp((low + high) / 2))


def calibrate(scores: Array, chosen: Ids, phase: str, temperature: float) -> Calibration:
    """scores [n, experts] of a predictor on rows that it was not trained on, and what the gate
    chose there [n, top_k]; n of at least 1. temperature: what fit_temperature says of them."""
    top_k = chosen.shape[1]
    truth = membership(chosen, scores.shape[1])
    p = probabilities(scores, top_k, temperature)
    hot, hot_precision, hot_pairs = _threshold(-p, truth, HOT_PRECISION)
    cold, cold_precision, cold_pairs = _threshold(p, ~truth, COLD_PRECISION)
    return Calibration(
        temperature=temperature,
        hot=-hot if hot_pairs else 2.0,
        hot_precision=hot_precision,
        hot_count=hot_pairs / len(scores),
        cold=cold if cold_pairs else -1.0,
        cold_precision=cold_precision,
        cold_count=cold_pairs / len(scores),
        r_hit=priority_hit(scores, p, chosen, phase),
        reliability=reliability(p, truth),
    )


def priority_hit(scores: Array, probability: Array, chosen: Ids, phase: str) -> float:
    """AdaptSched's R_hit, the hit rate of the experts that a prefetch begins with.

    Decode: share of the better half of the predicted top_k that the gate chose. Prefill: rank
    accuracy of the hottest experts over windows, the predicted counts being sums of probabilities.
    """
    if phase == "prefill":
        return rank_accuracy(probability, chosen)
    half = (chosen.shape[1] + 1) // 2
    best = np.argpartition(scores, -half, axis=1)[:, -half:]
    truth = membership(chosen, scores.shape[1])
    return float(np.take_along_axis(truth, best, 1).mean())


def _threshold(key: Array, good: NDArray[np.bool_], precision: float) -> tuple[float, float, int]:
    """(t, share of good pairs among those of key <= t, their number) for the largest set that
    keeps the precision."""
    order = np.argsort(key, axis=None, kind="stable")
    sorted_key, sorted_good = key.ravel()[order], good.ravel()[order]
    share = np.cumsum(sorted_good) / np.arange(1, len(order) + 1)
    # a set ends between two keys, not within equal ones
    ends = np.append(sorted_key[1:] != sorted_key[:-1], True)
    fits = np.flatnonzero(ends & (share >= precision))
    if len(fits) == 0:
        return 0.0, 0.0, 0
    last = int(fits[-1])
    return float(sorted_key[last]), float(share[last]), last + 1
