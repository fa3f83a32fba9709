"""A small torch executor of ir.graph.Graph in fp32: the meaning of every operator, in plain code.

Tests compare it with transformers and with the C runtime; leaf_check.py uses it to prove that
PDScope and the installed transformers mean the same. One sequence at a time, no cache. May import
torch and pdscope.ir.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from pdscope.ir.graph import (
    EmbedAttrs,
    ExpertsAttrs,
    GateAttrs,
    GqaAttrs,
    Graph,
    LmHeadAttrs,
    MlaAttrs,
    MlpAttrs,
    Node,
    NormAttrs,
    Rope,
    ScaleAttrs,
)

# (node, ids [S, top_k], weights [S, top_k], scores that decided the choice [S, experts])
OnGate = Callable[[Node, Tensor, Tensor, Tensor], None]


def run_graph(
    graph: Graph,
    weights: Callable[[str], Tensor],
    input_ids: Tensor,
    on_gate: OnGate | None = None,
    on_node: Callable[[Node, Tensor], None] | None = None,
) -> Tensor:
    """Logits [S, vocab] fp32 of one sequence of token ids [S], at positions 0 .. S - 1.

    `weights` gives a parameter by transformers' name, in any float dtype. `on_gate` sees every
    routing decision, `on_node` every operator's output [S, dim] (routing weights for a gate).
    """
    run = _Run(weights, input_ids, on_gate)
    for node in graph.nodes:
        run.node(node)
        if on_node is not None:
            on_node(node, run.value[node.name])
    return run.value[graph.nodes[-1].name]


class _Run:
    def __init__(
        self, weights: Callable[[str], Tensor], input_ids: Tensor, on_gate: OnGate | None
    ) -> None:
        self.load = weights
        self.ids = input_ids
        self.on_gate = on_gate
        self.value: dict[str, Tensor] = {}
        self.routes: dict[str, Tensor] = {}

    def weight(self, node: Node, role: str) -> Tensor:
        return self.load(node.weights[role].name).float()

    def bias(self, node: Node, role: str) -> Tensor | None:
        return self.weight(node, role) if role in node.weights else None

    def linear(self, node: Node, x: Tensor, role: str) -> Tensor:
        return F.linear(x, self.weight(node, role), self.bias(node, f"{role}_bias"))

    def node(self, node: Node) -> None:
        xs = [self.value[name] for name in node.inputs]
        match node.attrs:
            case EmbedAttrs():
                out = self.weight(node, "weight")[self.ids]
            case NormAttrs(eps=eps):
                out = rms_norm(xs[0], self.weight(node, "weight"), eps)
            case GqaAttrs():
                out = self.gqa(node, node.attrs, xs[0])
            case MlaAttrs():
                out = self.mla(node, node.attrs, xs[0])
            case GateAttrs():
                out = self.gate(node, node.attrs, xs[0])
            case ExpertsAttrs():
                out = self.experts(node, node.inputs[1], xs[0])
            case MlpAttrs():
                up = self.linear(node, xs[0], "up")
                out = self.linear(node, F.silu(self.linear(node, xs[0], "gate")) * up, "down")
            case ScaleAttrs(factor=factor):
                out = xs[0] * factor
            case LmHeadAttrs():
                out = self.linear(node, xs[0], "weight")
            case _:
                out = xs[0] + xs[1]
        self.value[node.name] = out

    def gqa(self, node: Node, a: GqaAttrs, x: Tensor) -> Tensor:
        rows = x.shape[0]
        q, k, v = (self.linear(node, x, role) for role in ("q", "k", "v"))
        if a.qk_norm == "full":
            q = rms_norm(q, self.weight(node, "q_norm"), a.qk_norm_eps)
            k = rms_norm(k, self.weight(node, "k_norm"), a.qk_norm_eps)
        if a.clip is not None:
            q, k, v = (t.clamp(-a.clip, a.clip) for t in (q, k, v))
        q = q.view(rows, a.heads, a.head_dim)
        k, v = (t.view(rows, a.kv_heads, a.head_dim) for t in (k, v))
        if a.qk_norm == "head":
            q = rms_norm(q, self.weight(node, "q_norm"), a.qk_norm_eps)
            k = rms_norm(k, self.weight(node, "k_norm"), a.qk_norm_eps)
        q, k = rotate(q, a.rope), rotate(k, a.rope)
        k, v = (t.repeat_interleave(a.heads // a.kv_heads, dim=1) for t in (k, v))
        return self.linear(node, attend(q, k, v, a.softmax_scale, a.window), "o")

    def mla(self, node: Node, a: MlaAttrs, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if a.q_lora is None:
            q = self.linear(node, x, "q")
        else:
            latent = self.linear(node, x, "q_a")
            q = self.linear(
                node, rms_norm(latent, self.weight(node, "q_a_norm"), a.norm_eps), "q_b"
            )
        q = q.view(rows, a.heads, a.nope_dim + a.rope_dim)
        q = torch.cat([q[..., : a.nope_dim], rotate(q[..., a.nope_dim :], a.rope)], dim=-1)
        compressed = self.linear(node, x, "kv_a")
        latent = rms_norm(compressed[:, : a.kv_lora], self.weight(node, "kv_a_norm"), a.norm_eps)
        k_rope = rotate(compressed[:, None, a.kv_lora :], a.rope).expand(rows, a.heads, a.rope_dim)
        kv = self.linear(node, latent, "kv_b").view(rows, a.heads, a.nope_dim + a.v_dim)
        k = torch.cat([kv[..., : a.nope_dim], k_rope], dim=-1)
        return self.linear(node, attend(q, k, kv[..., a.nope_dim :], a.softmax_scale, None), "o")

    def gate(self, node: Node, a: GateAttrs, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight(node, "weight"))
        scores = logits.sigmoid() if a.score == "sigmoid" else logits.softmax(dim=-1)
        bias = self.bias(node, "bias")
        choice = scores if bias is None else scores + bias
        if a.group_score != "none":
            grouped = choice.view(x.shape[0], a.groups, -1)
            best = grouped.topk(2 if a.group_score == "top2" else 1, dim=-1).values.sum(dim=-1)
            kept = torch.zeros_like(best).scatter(1, best.topk(a.top_groups, dim=-1).indices, 1.0)
            mask = kept.repeat_interleave(grouped.shape[-1], dim=1).bool()
            choice = choice.masked_fill(~mask, a.masked_score)
        ids = choice.topk(a.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if a.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + a.norm_eps)
        weights = weights * a.scaling
        self.routes[node.name] = ids
        if self.on_gate is not None:
            self.on_gate(node, ids, weights, choice)
        return weights

    def experts(self, node: Node, gate: str, x: Tensor) -> Tensor:
        gate_up, down = self.weight(node, "gate_up"), self.weight(node, "down")
        ids, weights = self.routes[gate], self.value[gate]
        out = torch.zeros_like(x)
        for e in sorted(set(ids.flatten().tolist())):
            row, rank = torch.where(ids == e)
            g, u = F.linear(x[row], gate_up[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(g) * u, down[e]) * weights[row, rank, None]
            out.index_add_(0, row, y)
        return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of x [S, heads, dim] at positions 0 .. S - 1."""
    angle = torch.outer(torch.arange(x.shape[0], dtype=torch.float32), torch.tensor(rope.inv_freq))[
        :, None, :
    ]
    cos, sin = angle.cos() * rope.scale, angle.sin() * rope.scale
    if rope.interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of q, k [S, heads, d] and v [S, heads, dv]; gives [S, heads * dv]."""
    i = torch.arange(q.shape[0])
    distance = i[:, None] - i[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
