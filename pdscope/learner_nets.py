"""A predictor's net in numpy: its logits, and what a few rows teach its last layer.

The formulas are those of compiler/phaseper/nets.py and runtime_c/include/pdscope.h. May import
numpy and pdscope.predictors.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from pdscope.predictors import Net, bf16_bits

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]

SLOPE = 2.0  # of the margins; losses.SLOPE of the training
# Of a fine-tuning. The ridge is worth so many rows of inputs of mean size: few rows say little of
# some hundred weights an output. Measured, as is that neither more steps, nor the exact logistic
# loss, nor Adam on all weights gained more from the same tokens.
RIDGE_ROWS = 500
SOLVER_STEPS = 16
MEMORY = 4096  # rows that count in full
UNITS = 1024  # inputs of a regression that may have the gate's among them
_DOWN, _DEEP, _ACROSS = 64, 64, 64  # of one block of _product


@dataclass(frozen=True)
class Rows:
    """Tokens as one layer saw them, oldest first. Ids: -1 where a token has none before it."""

    a: Floats  # [n, hidden] the gate's input
    w: Floats  # [n, top_k] routing weights
    e: Ids  # [n, top_k] experts
    prev: Ids  # [n, top_k] those of the token before
    prev_next: Ids  # [n, next top_k] those of the next MoE layer for the token before
    target: Ids  # [n, next top_k] those that the next MoE layer chose
    scores: Floats  # [n, experts] by which it chose, before groups are masked

    def __len__(self) -> int:
        return len(self.a)

    def take(self, where: slice | NDArray[np.bool_]) -> "Rows":
        return Rows(**{f.name: getattr(self, f.name)[where] for f in fields(self)})

    def join(self, other: "Rows") -> "Rows":
        names = [f.name for f in fields(self)]
        return Rows(**{n: np.concatenate([getattr(self, n), getattr(other, n)]) for n in names})


def error(logits: Floats, target: Ids) -> Floats:
    """For each row [n] the share of its target [n, k] that the k greatest logits miss."""
    k = target.shape[1]
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]  # as the engine breaks ties
    hits = (best[:, :, None] == target[:, None, :]).any(axis=2).sum(axis=1)
    return np.asarray(1 - hits / k, np.float32)


def loss(logits: Floats, rows: Rows) -> Floats:
    """How far the margins of each row's logits [n, experts] are from those of the next gate [n]:
    the cross-entropy (losses.distill), less that of the gate itself.

    Margins say which side of its row's edge an expert is on, and how clearly. Which experts were
    chosen says much less: a net that learns it from a few rows gets worse.
    """
    z = SLOPE * (logits - _edge(logits, rows.target.shape[1]))
    wanted = choice(rows)
    sure = np.clip(wanted, 1e-7, 1 - 1e-7)
    least = -(wanted * np.log(sure) + (1 - wanted) * np.log(1 - sure))
    return np.asarray(np.mean(np.logaddexp(0, z) - wanted * z - least, axis=1), np.float32)


def choice(rows: Rows) -> Floats:
    """The next gate's choice with its doubts, [n, experts] in [0, 1]; an expert that its scores
    alone would have chosen was in a group that lost."""
    score = np.log(np.maximum(rows.scores, 1e-9))
    chosen = _one_hot(rows.target, None, score.shape[1]) > 0
    low = np.where(chosen, score, np.inf).min(1, keepdims=True)
    open_ = ~chosen & (score <= low)
    high = np.where(open_, score, -np.inf).max(1, keepdims=True)
    edge = np.where(open_.any(1, keepdims=True), (low + high) / 2, low)
    soft = _sigmoid(np.float32(SLOPE) * (score - edge).astype(np.float32))
    return np.where(chosen | open_, soft, 0).astype(np.float32)


def _edge(logits: Floats, k: int) -> Floats:
    """Halfway between each row's k-th and next best logit [n, 1]; 0 where all are taken."""
    if k >= logits.shape[1]:
        return np.zeros((len(logits), 1), np.float32)
    part = -np.partition(-logits, (k - 1, k), axis=1)[:, k - 1 : k + 1]
    edge: Floats = part.mean(1, keepdims=True)
    return edge


class Trained:
    """A net's tensors in fp32, as `Net` has them, and what they give."""

    def __init__(self, net: Net) -> None:
        """net: one with hidden units."""
        assert net.first is not None and net.out is not None
        self.net = net
        self.t: dict[str, Floats] = {
            "first": _floats(net.first),
            "bias": net.bias.astype(np.float32),
            "features": _floats(net.features),
            "out": _floats(net.out),
        }
        if net.block is not None:
            assert net.block_bias is not None
            self.t["block"] = _floats(net.block)
            self.t["block_bias"] = net.block_bias.astype(np.float32)

    def rounded(self) -> Net:
        """As the engine takes it."""
        vectors = ("bias", "block_bias")
        made = {n: t.copy() if n in vectors else bf16_bits(t) for n, t in self.t.items()}
        return Net(self.net.hidden, self.net.experts, self.net.width, self.net.blocks, **made)

    def logits(self, rows: Rows) -> Floats:
        """[n, experts]"""
        return self._forward(rows.a, self.sparse(rows))["logits"]

    def sparse(self, rows: Rows) -> Floats:
        """Inputs of `features` [n, parts * experts]."""
        experts = self.net.experts
        parts = {
            "routed": (rows.e, rows.w),
            "previous": (rows.prev, None),
            "previous_next": (rows.prev_next, None),
        }
        made = [_one_hot(*parts[name], experts) for name in self.net.blocks]
        return np.concatenate([np.empty((len(rows), 0), np.float32), *made], axis=1)

    def _forward(self, a: Floats, sparse: Floats) -> dict[str, Floats]:
        t, width = self.t, self.net.width
        both = width + self.net.experts
        z = _product(a, t["first"].T) + t["bias"]
        z[:, :both] += _product(sparse, t["features"])
        made = {"u": z[:, :width], "s": _sigmoid(z[:, :width])}
        made["h0"] = h = made["u"] * made["s"]
        if "block" in t:
            made["gate"] = _sigmoid(z[:, both:])
            made["v"] = _product(h, t["block"].T) + t["block_bias"]
            made["sv"] = _sigmoid(made["v"])
            h = h + made["gate"] * made["v"] * made["sv"]
        made["h"] = h
        made["logits"] = z[:, width:both] + _product(h, t["out"].T)
        return made


class Lessons:
    """What rows teach a net: sums of a regression of what its choice lacks to the next gate's, on
    its hidden units, features, 1 and the gate's input. They take the same room however many rows
    there were, and what an earlier text taught is there when it comes back.

    The gate's input is one more part where the sums are small: the hidden units are made of it, and
    in a wide model it would be the greatest part of them.
    """

    def __init__(self, net: Trained) -> None:
        self._net = net
        units = net.net.width + len(net.t["features"]) + 1
        hidden = net.t["first"].shape[1]
        self._input = units + hidden <= UNITS
        units += hidden if self._input else 0
        self._xx = np.zeros((units, units), np.float32)
        self._xy = np.zeros((units, net.net.experts), np.float32)
        self._rows = 0.0

    def add(self, rows: Rows) -> None:
        """Rows beyond MEMORY make all before count for less."""
        sparse = self._net.sparse(rows)
        made = self._net._forward(rows.a, sparse)
        z = made["logits"] - _edge(made["logits"], rows.target.shape[1])
        lack = np.float32(SLOPE) * (choice(rows) - _sigmoid(np.float32(SLOPE) * z))
        a = [rows.a] if self._input else []
        x = np.concatenate([made["h"], sparse, np.ones((len(rows), 1), np.float32), *a], 1)
        self._xx += _product(x.T, x)
        self._xy += _product(x.T, lack)
        self._rows += len(rows)
        if self._rows > MEMORY:
            fade = np.float32(MEMORY / self._rows)
            self._xx *= fade
            self._xy *= fade
            self._rows = MEMORY

    def step(self, stopped: Callable[[], bool] = lambda: False) -> Floats:
        """How the rows would move all that is linear behind the hidden units [units, experts], by
        ridge regression; of no use once `stopped`."""
        ridge = RIDGE_ROWS * float(np.trace(self._xx)) / max(1.0, self._rows) / len(self._xx)
        return _ridge(self._xx, self._xy, ridge, stopped)

    def moved(self, step: Floats) -> Trained:
        """The net that the lessons are of, so far on."""
        net = Trained(self._net.net)
        width, both = net.net.width, net.net.width + net.net.experts
        ends = np.cumsum([width, len(net.t["features"]), 1])
        out, features, bias, a = np.split(step, ends)
        net.t["out"] += out.T
        net.t["features"][:, width:] += features
        net.t["bias"][width:both] += bias[0]
        if self._input:
            net.t["first"][width:both] += a.T
        return net


def _ridge(xx: Floats, xy: Floats, ridge: float, stopped: Callable[[], bool]) -> Floats:
    """W [units, outputs] of least |x W - y|^2 + ridge |W|^2, by conjugate gradients: products
    alone, which stay in this thread."""
    w = np.zeros_like(xy)
    rest = xy
    way, size = rest, np.square(rest).sum(0)
    for _ in range(SOLVER_STEPS):
        if stopped():
            break
        bent = _product(xx, way) + np.float32(ridge) * way
        length = size / np.maximum((way * bent).sum(0), 1e-30)
        w += length * way
        rest = rest - length * bent
        left = np.square(rest).sum(0)
        way = rest + left / np.maximum(size, 1e-30) * way
        size = left
    return w


def _floats(bits: NDArray[np.uint16]) -> Floats:
    """bf16 bits as fp32."""
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def _one_hot(ids: Ids, weight: Floats | None, experts: int) -> Floats:
    """[n, experts]: the weight, or 1, at each id that is there."""
    made = np.zeros((len(ids), experts), np.float32)
    row, rank = np.nonzero(ids >= 0)
    made[row, ids[row, rank]] = 1 if weight is None else weight[row, rank]
    return made


def _sigmoid(x: Floats) -> Floats:
    made: Floats = np.float32(0.5) * (np.tanh(np.float32(0.5) * x) + 1)
    return made


def _product(a: Floats, b: Floats) -> Floats:
    """a [m, k] times b [k, n], in blocks: BLAS would split a larger product over all cores, which
    belong to the running step."""
    (m, k), n = a.shape, b.shape[1]
    down, deep, across = (
        -(-size // block) for size, block in ((m, _DOWN), (k, _DEEP), (n, _ACROSS))
    )
    left = np.zeros((down * _DOWN, deep * _DEEP), np.float32)
    left[:m, :k] = a
    right = np.zeros((deep * _DEEP, across * _ACROSS), np.float32)
    right[:k, :n] = b
    lefts = left.reshape(down, 1, _DOWN, deep, _DEEP)
    rights = right.reshape(deep, _DEEP, across, _ACROSS).transpose(0, 2, 1, 3)
    out = np.zeros((down, across, _DOWN, _ACROSS), np.float32)
    for at in range(deep):
        part = np.ascontiguousarray(lefts[:, :, :, at])
        out += np.matmul(part, np.ascontiguousarray(rights[at]))
    return np.ascontiguousarray(out.transpose(0, 2, 1, 3).reshape(down * _DOWN, -1)[:m, :n])
