"""Cost tables as the compiler makes them: whose they are, and curves fitted to measurements.

What a table is stands in pdscope/costs.py, as loaded plans read it too; the names are passed on
here. May import pdscope.costs and pdscope.compiler.lowered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pdscope.compiler.lowered import LoweredModel
from pdscope.costs import (
    FORMAT,
    JSON,
    KNOTS,
    MAX_NS,
    NONE,
    AttentionKey,
    Bar,
    Costs,
    CostTable,
    Curve,
    Device,
    Figure,
    Fitted,
    Link,
    Machine,
    ModelKey,
)
from pdscope.errors import ModelError

__all__ = [
    "FORMAT",
    "JSON",
    "KNOTS",
    "MAX_NS",
    "NONE",
    "AttentionKey",
    "Bar",
    "CostTable",
    "Costs",
    "Curve",
    "Device",
    "Figure",
    "Fitted",
    "Link",
    "Machine",
    "ModelKey",
    "bar_of",
    "choose_knots",
    "expert_bytes",
    "expert_flops",
    "fit",
    "isotonic",
    "model_key",
]


def model_key(model: LoweredModel) -> ModelKey:
    """Of the first layer with experts; a model's layers are alike but for their windows.

    Raises ModelError for a model without experts.
    """
    layer = next((layer for layer in model.layers if layer.experts), None)
    if layer is None or layer.experts is None or layer.gate is None:
        raise ModelError("costs: the model has no layer with experts: a dense one needs no costs")
    attention = layer.attn
    return ModelKey(
        hidden=model.hidden,
        inter=layer.experts.inter,
        shared_inter=layer.shared.inter if layer.shared else 0,
        experts=layer.gate.attrs.experts,
        top_k=layer.gate.attrs.top_k,
        dtype=model.dtype,
        group=layer.experts.down.form.group,
        attention=AttentionKey(
            kind=attention.kind,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            qk_dim=attention.qk_dim,
            v_dim=attention.v_dim,
            nope_dim=attention.nope_dim,
            q_lora=attention.q_lora,
            kv_lora=attention.kv_lora,
            window=attention.window,
        ),
    )


_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}


def expert_bytes(key: ModelKey) -> int:
    """Of one routed expert's weights and scales, without padding."""
    values = 3 * key.hidden * key.inter
    scales = 2 * values // key.group if key.group else 0
    return values * _BITS[key.dtype] // 8 + scales


def expert_flops(key: ModelKey) -> int:
    """Of one token in one routed expert."""
    return 6 * key.hidden * key.inter


# --- fitting ---


def bar_of(samples: Sequence[int]) -> Bar:
    """Of at least one; the median of an even number is the lower of the middle two."""
    ordered = sorted(samples)
    return Bar(ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1])


def isotonic(values: Sequence[int]) -> list[int]:
    """The ascending sequence nearest to `values` by squares, rounded down: pool adjacent
    violators."""

    @dataclass
    class Block:
        total: int
        count: int

    blocks: list[Block] = []
    for value in values:
        blocks.append(Block(value, 1))
        while len(blocks) > 1:
            a, b = blocks[-2:]
            if a.total * b.count <= b.total * a.count:
                break
            blocks[-2:] = [Block(a.total + b.total, a.count + b.count)]
    return [block.total // block.count for block in blocks for _ in range(block.count)]


def choose_knots(tokens: Sequence[int], ns: Sequence[int], most: int = KNOTS) -> list[int]:
    """Indices of at most `most` points, the first and the last among them, such that the curve
    through them is as near to the others as can be: the greatest relative error is least."""
    n = len(tokens)
    if n <= most:
        return list(range(n))

    def error(a: int, b: int) -> float:
        worst = 0.0
        for i in range(a + 1, b):
            at = ns[a] + (ns[b] - ns[a]) * (tokens[i] - tokens[a]) / (tokens[b] - tokens[a])
            worst = max(worst, abs(at - ns[i]) / max(1, ns[i]))
        return worst

    errors = {(a, b): error(a, b) for a in range(n) for b in range(a + 1, n)}
    best: list[list[tuple[float, int]]] = [[(0.0, -1)] + [(float("inf"), -1)] * (n - 1)]
    for _ in range(most - 1):  # one more segment, which ends at i
        row = [
            min(
                ((max(best[-1][a][0], errors[a, i]), a) for a in range(i)),
                default=(float("inf"), -1),
            )
            for i in range(n)
        ]
        best.append(row)
    chosen = [n - 1]
    for row in reversed(best[1:]):
        chosen.append(row[chosen[-1]][1])
    return chosen[::-1]


def fit(points: Sequence[tuple[int, Bar]]) -> Fitted:
    """A monotone curve of at most KNOTS knots through the medians of `points`, by ascending tokens.

    Nothing is measured as free: where the fit gives 0 ns, 1 stands.
    """
    tokens = [t for t, _ in points]
    ns = [min(max(1, value), MAX_NS - 1) for value in isotonic([bar.median for _, bar in points])]
    kept = choose_knots(tokens, ns)
    curve = Curve(tuple(tokens[i] for i in kept), tuple(ns[i] for i in kept))
    return Fitted(curve, tuple(points))
