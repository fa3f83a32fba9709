"""How well scores name the experts that a gate chose: hit rate, rank accuracy, reliability.

Sections 5.5 of the PDScope paper. May import numpy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Ids = NDArray[np.integer]

WINDOW = 512  # tokens of one prefill window
SLACK = 2  # ranks that a prediction may be off
MOST_RANKED = 6


def top(scores: Array, k: int) -> NDArray[np.int64]:
    """Expert ids of the k best scores of each row [n, k], in no order."""
    if k >= scores.shape[1]:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.argpartition(scores, -k, axis=1)[:, -k:]


def membership(ids: Ids, experts: int) -> NDArray[np.bool_]:
    """[n, experts]: which experts are among a row's ids [n, k]; negative ids are nobody."""
    out = np.zeros((len(ids), experts + 1), np.bool_)
    np.put_along_axis(out, np.where(ids < 0, experts, ids).astype(np.int64), True, 1)
    return out[:, :experts]


def hits(scores: Array, chosen: Ids) -> NDArray[np.float64]:
    """[n]: share of a row's chosen experts [n, k] among its k best scores [n, experts]."""
    k = chosen.shape[1]
    truth = membership(chosen, scores.shape[1])
    found: NDArray[np.float64] = np.take_along_axis(truth, top(scores, k), 1).sum(1) / k
    return found


def hit_rate(scores: Array, chosen: Ids) -> float:
    """Mean of `hits`; 0 for no rows."""
    return float(hits(scores, chosen).mean()) if len(chosen) else 0.0


def ranked(experts: int) -> int:
    """How many experts rank accuracy looks at: 6, or half of them in a model of fewer than 12."""
    return max(1, min(MOST_RANKED, experts // 2))


def rank_hit(counts: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Share of the predicted best `ranked(E)` experts whose true rank by token count is within 2 of
    the predicted one.

    counts: tokens of each expert [E]; expected: predicted ones [E]. Experts of the same count share
    all the ranks that they take up: any order of them is the true one.
    """
    best = ranked(len(counts))
    order = np.argsort(-expected, kind="stable")[:best]
    place = np.arange(1, best + 1)
    first = 1 + (counts[None, :] > counts[order][:, None]).sum(1)
    last = (counts[None, :] >= counts[order][:, None]).sum(1)
    return float(((place >= first - SLACK) & (place <= last + SLACK)).mean())


def window_bounds(rows: int, window: int = WINDOW) -> list[tuple[int, int]]:
    """Consecutive windows of rows; a rest shorter than half a window joins none, unless it is
    all there is."""
    bounds = [(at, min(at + window, rows)) for at in range(0, rows, window)]
    whole = [b for b in bounds if b[1] - b[0] >= window // 2]
    return whole or bounds


def rank_accuracy(expected: Array, chosen: Ids, window: int = WINDOW) -> float:
    """Mean of `rank_hit` over windows of consecutive rows. `expected` [n, E]: what each row is
    expected to add to each expert's token count; `chosen` [n, k]: the truth."""
    truth = membership(chosen, expected.shape[1])
    found = [
        rank_hit(truth[a:b].sum(0).astype(np.float64), expected[a:b].sum(0, dtype=np.float64))
        for a, b in window_bounds(len(chosen), window)
    ]
    return float(np.mean(found)) if found else 0.0


@dataclass(frozen=True)
class Reliability:
    """Diagram: for each tenth of [0, 1] the pairs (row, expert) of that predicted probability."""

    predicted: tuple[float, ...]  # their mean probability; the middle of the tenth if none
    observed: tuple[float, ...]  # share of them that the gate chose
    pairs: tuple[int, ...]

    @property
    def error(self) -> float:
        """Expected calibration error: mean |predicted - observed|, by pairs."""
        gaps = np.abs(np.subtract(self.predicted, self.observed))
        return float((gaps * self.pairs).sum() / max(sum(self.pairs), 1))


def reliability(probability: Array, truth: NDArray[np.bool_], bins: int = 10) -> Reliability:
    """probability, truth: [n, experts]."""
    place = np.minimum((probability.ravel() * bins).astype(np.int64), bins - 1)
    pairs = np.bincount(place, minlength=bins)
    some = np.maximum(pairs, 1)
    sums = np.bincount(place, probability.ravel().astype(np.float64), bins)
    seen = np.bincount(place, truth.ravel().astype(np.float64), bins)
    middle = (np.arange(bins) + 0.5) / bins
    predicted = np.where(pairs > 0, sums / some, middle)
    observed = np.where(pairs > 0, seen / some, 0.0)
    return Reliability(
        tuple(predicted.tolist()), tuple(observed.tolist()), tuple(int(n) for n in pairs)
    )
