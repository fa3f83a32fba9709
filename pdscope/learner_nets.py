"""A predictor's net in numpy: its logits, its gradient, and a few steps of Adam on a few rows.

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
STEPS = 16  # of one fine-tuning
RATE = 0.03  # of the first step, by the size of the tensor; falls to 0 in a line
LEAST_SIZE = 0.01
_BETA1, _BETA2, _EPSILON = 0.9, 0.99, 1e-8
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


def loss(logits: Floats, target: Ids) -> float:
    """Mean binary cross-entropy of the margins of the logits [n, experts].

    A net is trained for which side of its row's edge an expert is on (losses.distill): its logits
    have no zero of their own, so that their own cross-entropy would teach them one, and little
    else.
    """
    wanted = _one_hot(target, None, logits.shape[1])
    z = SLOPE * (logits - _edge(logits, target.shape[1])[0])
    return float(np.mean(np.logaddexp(0, z) - wanted * z))


def _edge(logits: Floats, k: int) -> tuple[Floats, Ids]:
    """Halfway between each row's k-th and next best logit [n, 1], and whose those are [n, 2]; 0
    where all experts are taken."""
    if k >= logits.shape[1]:
        return np.zeros((len(logits), 1), np.float32), np.empty((len(logits), 0), np.int32)
    two = np.argsort(-logits, axis=1, kind="stable")[:, k - 1 : k + 1].astype(np.int32)
    return np.take_along_axis(logits, two, 1).mean(1, keepdims=True), two


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

    def gradient(self, rows: Rows) -> dict[str, Floats]:
        """Of `loss` with respect to each of `t`."""
        sparse = self.sparse(rows)
        wanted = _one_hot(rows.target, None, self.net.experts)
        return self._gradient(rows.a, sparse, wanted, rows.target.shape[1])

    def _gradient(self, a: Floats, sparse: Floats, wanted: Floats, k: int) -> dict[str, Floats]:
        t, m = self.t, self._forward(a, sparse)
        edge, two = _edge(m["logits"], k)
        z = np.float32(SLOPE) * (m["logits"] - edge)
        d_logits = (_sigmoid(z) - wanted) * np.float32(SLOPE / wanted.size)
        # The edge moves with the two logits that make it.
        share = np.take_along_axis(d_logits, two, 1) - d_logits.sum(1, keepdims=True) / 2
        np.put_along_axis(d_logits, two, share, 1)
        made = {"out": _product(d_logits.T, m["h"])}
        d_h = _product(d_logits, t["out"])
        behind = [d_logits]
        if "block" in t:
            gate, v, sv = m["gate"], m["v"], m["sv"]
            d_v = d_h * gate * _silu_slope(v, sv)
            behind.append(d_h * v * sv * gate * (1 - gate))
            made["block"] = _product(d_v.T, m["h0"])
            made["block_bias"] = d_v.sum(axis=0)
            d_h = d_h + _product(d_v, t["block"])
        d_z = np.concatenate([d_h * _silu_slope(m["u"], m["s"]), *behind], axis=1)
        made["first"] = _product(d_z.T, a)
        made["bias"] = d_z.sum(axis=0)
        both = self.net.width + self.net.experts
        made["features"] = _product(sparse.T, d_z[:, :both])
        return made

    def fit(self, rows: Rows, stopped: Callable[[], bool] = lambda: False) -> None:
        """STEPS steps of Adam on all the rows at once; ends early once `stopped`."""
        sparse, wanted = self.sparse(rows), _one_hot(rows.target, None, self.net.experts)
        k = rows.target.shape[1]
        # Steps of the same effect whatever the scale of inputs and weights.
        sizes = {n: max(_size(t), LEAST_SIZE) for n, t in self.t.items()}
        first = {name: np.zeros_like(t) for name, t in self.t.items()}
        second = {name: np.zeros_like(t) for name, t in self.t.items()}
        for step in range(1, STEPS + 1):
            if stopped():
                return
            rate = RATE * (1 - (step - 1) / STEPS) * np.sqrt(1 - _BETA2**step) / (1 - _BETA1**step)
            for name, slope in self._gradient(rows.a, sparse, wanted, k).items():
                m, v = first[name], second[name]
                m += (1 - _BETA1) * (slope - m)
                v += (1 - _BETA2) * (np.square(slope) - v)
                self.t[name] -= (
                    np.float32(rate * sizes[name]) * m / (np.sqrt(v) + np.float32(_EPSILON))
                )


def _size(x: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


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


def _silu_slope(x: Floats, sigmoid: Floats) -> Floats:
    return sigmoid * (1 + x * (1 - sigmoid))


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
