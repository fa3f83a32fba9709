"""Routing traces that were never recorded: of a bigger model's shape, with the skew of a recorded
one; and predictions of a chosen accuracy.

A layer's experts are as unequal as the recorded layer's at the same depth: the curve of what share
of the work the hottest part of the experts does is kept. Tokens choose experts by popularity and by
a noise that follows its own past, from token to token and from layer to layer, as far as the
recorded tokens repeat their experts beyond chance. May import numpy and
pdscope.{errors,routing_trace}.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdscope.errors import InputError
from pdscope.routing_trace import RoutingTrace

Floats = NDArray[np.float64]
_NOISE = 1.0  # of log popularity
_FIT_ROWS = 1024
_FIT_ROUNDS = 12
_FIRST, _LAST = 0.05, 0.98  # of how noise follows itself


@dataclass(frozen=True)
class Skew:
    """curves [depths, points]: at each depth of the model, from its first MoE layer to its last,
    the share of all work that the hottest 0 ... 1 of the experts do, at as many even points;
    repeats: how much more often than by chance a token's experts are the token before's, 0 to 1."""

    curves: Sequence[Sequence[float]]
    repeats: float

    def popularity(self, depth: float, experts: int) -> Floats:
        """[experts], hottest first, sums to 1; depth from 0 to 1."""
        curves = np.array(self.curves)
        at = depth * (len(curves) - 1)
        low, part = int(at), at - int(at)
        curve = (1 - part) * curves[low] + part * curves[min(low + 1, len(curves) - 1)]
        points = np.linspace(0, 1, len(curve))
        shares = np.diff(np.interp(np.linspace(0, 1, experts + 1), points, curve))
        shares = np.sort(np.maximum(shares, 1e-6))[::-1]
        return np.asarray(shares / shares.sum())


#: Of small trained models by their architecture, on 8000 tokens of held-out chats
#: (docs/routing-traces.md says how).
MEASURED = {
    "MixtralForCausalLM": Skew(
        (
            (0, 0.1713, 0.3365, 0.4717, 0.5954, 0.7156, 0.8208, 0.912, 1),
            (0, 0.1921, 0.3354, 0.4728, 0.6058, 0.7346, 0.8496, 0.9366, 1),
            (0, 0.1713, 0.3426, 0.5031, 0.6594, 0.7931, 0.8736, 0.9522, 1),
            (0, 0.2086, 0.3995, 0.5547, 0.698, 0.7974, 0.885, 0.9571, 1),
        ),
        repeats=0.1087,
    ),
    "Qwen3MoeForCausalLM": Skew(
        (
            (0, 0.1668, 0.3246, 0.4692, 0.5955, 0.709, 0.815, 0.9123, 1),
            (0, 0.2363, 0.4074, 0.548, 0.679, 0.7858, 0.8727, 0.9477, 1),
            (0, 0.2268, 0.4093, 0.5606, 0.6888, 0.7948, 0.8909, 0.958, 1),
            (0, 0.2599, 0.4762, 0.641, 0.7522, 0.834, 0.9017, 0.9594, 1),
        ),
        repeats=0.126,
    ),
    "DeepseekV2ForCausalLM": Skew(
        (
            (0, 0.2536, 0.4169, 0.5518, 0.6605, 0.7605, 0.8532, 0.937, 1),
            (0, 0.254, 0.4406, 0.5854, 0.6981, 0.7985, 0.8882, 0.9547, 1),
            (0, 0.2488, 0.4421, 0.604, 0.7369, 0.8378, 0.9166, 0.9707, 1),
            (0, 0.2225, 0.4075, 0.573, 0.7019, 0.8045, 0.8917, 0.9581, 1),
        ),
        repeats=0.1451,
    ),
}
DEFAULT = MEASURED["Qwen3MoeForCausalLM"]


def measure(trace: RoutingTrace, depths: int = 4, points: int = 17) -> Skew:
    """The skew of a recorded trace."""
    curves = []
    for ids in trace.ids:
        counts = np.sort(np.bincount(ids.ravel(), minlength=trace.experts))[::-1]
        whole = np.concatenate([[0], np.cumsum(counts)]) / max(1, counts.sum())
        grid = np.linspace(0, 1, len(whole))
        curves.append(np.interp(np.linspace(0, 1, points), grid, whole))
    at = np.linspace(0, len(curves) - 1, min(depths, len(curves))).round().astype(int)
    chosen = tuple(tuple(float(round(x, 4)) for x in curves[i]) for i in at)
    return Skew(chosen, float(round(np.mean([_repeats(i, trace.experts) for i in trace.ids]), 4)))


def _repeats(ids: NDArray[np.int16], experts: int) -> float:
    """(observed - by chance) / (1 - by chance) of experts that are those of the row before."""
    if len(ids) < 2:
        return 0.0
    k = ids.shape[1]
    chosen = np.zeros((len(ids), experts), np.bool_)
    chosen[np.arange(len(ids))[:, None], ids] = True
    seen = (chosen[1:] & chosen[:-1]).sum() / ((len(ids) - 1) * k)
    share = chosen.mean(axis=0)
    chance = float((share**2).sum() / k)
    return float(np.clip((seen - chance) / max(1e-9, 1 - chance), 0, 1))


@dataclass(frozen=True)
class Shape:
    """Whose routing is made up. layers: model-layer numbers of the MoE layers."""

    layers: Sequence[int]
    experts: int
    top_k: int


def made(
    shape: Shape,
    prompts: Sequence[int],
    tokens: int,
    chunk: int,
    skew: Skew = DEFAULT,
    seed: int = 0,
) -> RoutingTrace:
    """A prompt of each length, prefilled `chunk` rows a step, and `tokens` decoded behind it.

    Raises InputError where there is no step.
    """
    rows: list[int] = []
    logits: list[int] = []
    position: list[NDArray[np.int32]] = []
    for length in prompts:
        for at in range(0, length, chunk):
            n = min(chunk, length - at)
            rows.append(n)
            logits.append(int(at + n == length))
            position.append(np.arange(at, at + n, dtype=np.int32))
        for at in range(length, length + tokens):
            rows.append(1)
            logits.append(1)
            position.append(np.array([at], np.int32))
    if not rows:
        raise InputError("routing: no prompt and no tokens: give lengths of at least 1")
    where = np.concatenate(position)
    ids, weights = _route(shape, len(where), skew, np.random.default_rng(seed))
    return RoutingTrace(
        experts=shape.experts,
        rows=np.array(rows, np.int32),
        logits=np.array(logits, np.int32),
        position=where,
        seq=np.zeros(len(where), np.int32),
        layers=np.array(shape.layers, np.int32),
        ids=ids,
        weights=weights,
        predicted=np.full_like(ids, -1),
        sure=np.zeros_like(weights),
    )


def _route(
    shape: Shape, rows: int, skew: Skew, rng: np.random.Generator
) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
    n_layers, e, k = len(shape.layers), shape.experts, shape.top_k
    # Which expert is hot at a layer is the model's, whatever the text (seed) is.
    order = np.random.default_rng(n_layers * 1000 + e)
    follow = _follow(skew, e, k)
    ids = np.empty((n_layers, rows, k), np.int16)
    weights = np.empty((n_layers, rows, k), np.float32)
    before: Floats | None = None
    for layer in range(n_layers):
        permutation = order.permutation(e)
        depth = layer / max(1, n_layers - 1)
        popularity = np.empty(e)
        popularity[permutation] = skew.popularity(depth, e)
        noise = _noise(rng, rows, e, follow)
        if before is not None:  # half of it comes from the layer before
            noise = np.sqrt(0.5) * (noise + before[:, order.permutation(e)])
        before = noise
        scores = _NOISE * noise + _logits(popularity, k)
        top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        value = np.take_along_axis(scores, top, 1)
        rank = np.argsort(-value, axis=1)
        top, value = np.take_along_axis(top, rank, 1), np.take_along_axis(value, rank, 1)
        share = np.exp(value - value[:, :1])
        ids[layer], weights[layer] = top, share / share.sum(axis=1, keepdims=True)
    return ids, weights


def _noise(rng: np.random.Generator, rows: int, experts: int, follow: float) -> Floats:
    """Each row's is partly the row before's."""
    fresh = rng.standard_normal((rows, experts))
    keep = np.sqrt(1 - follow * follow)
    for i in range(1, rows):
        fresh[i] = follow * fresh[i - 1] + keep * fresh[i]
    return fresh


def _logits(popularity: Floats, k: int) -> Floats:
    """So that tokens choose experts as often as is said: corrected by what they do."""
    e = len(popularity)
    wanted = np.minimum(popularity * k, 0.995)
    noise = np.random.default_rng(7).standard_normal((_FIT_ROWS, e)) * _NOISE
    logits = np.log(wanted)
    for _ in range(_FIT_ROUNDS):
        scores = noise + logits
        top = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        seen = np.bincount(top.ravel(), minlength=e) / _FIT_ROWS
        logits = logits + 0.7 * (np.log(wanted + 1e-3) - np.log(seen + 1e-3))
    return np.asarray(logits)


def _follow(skew: Skew, experts: int, k: int) -> float:
    """How much noise follows itself, for the skew's repeats: found on one layer."""
    logits = _logits(skew.popularity(0.5, experts), k)
    low, high = _FIRST, _LAST
    for _ in range(7):
        middle = (low + high) / 2
        noise = _noise(np.random.default_rng(3), 512, experts, middle)
        ids = np.argpartition(-(noise * _NOISE + logits), k - 1, axis=1)[:, :k].astype(np.int16)
        if _repeats(ids, experts) < skew.repeats:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def with_predictions(
    trace: RoutingTrace, accuracy: float, seed: int = 0, adversarial: bool = False
) -> RoutingTrace:
    """Every layer with experts right behind predicts the next one's: each of a row's experts with
    this chance, else another one of that layer. Of right ones the predictor is surer, though not
    always. `adversarial`: sure of experts that the row does not activate, all of them.

    Raises InputError for an accuracy outside 0 to 1.
    """
    if not 0 <= accuracy <= 1:
        raise InputError(f"accuracy is {accuracy}, expected 0 to 1")
    rng = np.random.default_rng(seed + 1)
    predicted = np.full_like(trace.ids, -1)
    sure = np.zeros_like(trace.weights)
    e, k = trace.experts, trace.top_k
    for i in range(len(trace.layers) - 1):
        if trace.layers[i + 1] != trace.layers[i] + 1:
            continue
        truth = trace.ids[i + 1]
        rows = len(truth)
        others = rng.random((rows, e))
        others[np.arange(rows)[:, None], truth] = 2  # never
        others = np.argsort(others, axis=1)[:, :k].astype(truth.dtype)
        right = rng.random((rows, k)) < (0 if adversarial else accuracy)
        if k > e - k:  # too few others: what is wrong may be right for another rank
            others = rng.integers(0, e, (rows, k)).astype(truth.dtype)
        predicted[i] = np.where(right, truth, others)
        doubt = rng.random((rows, k))
        sure[i] = np.where(right, 1 - 0.5 * doubt, 1.0 if adversarial else 0.9 - 0.6 * doubt)
        predicted[i] = _distinct(predicted[i], sure[i])
    return replace(trace, predicted=predicted, sure=sure)


def _distinct(ids: NDArray[np.int16], sure: NDArray[np.float32]) -> NDArray[np.int16]:
    """A row names an expert once: what repeats one of its own is -1, no prediction."""
    rank = np.argsort(-sure, axis=1, kind="stable")
    by_rank = np.take_along_axis(ids, rank, 1)
    again = np.zeros_like(by_rank, np.bool_)
    for j in range(1, ids.shape[1]):
        again[:, j] = (by_rank[:, :j] == by_rank[:, j : j + 1]).any(axis=1)
    out = by_rank.copy()
    out[again] = -1
    back = np.empty_like(out)
    np.put_along_axis(back, rank, out, 1)
    return back
