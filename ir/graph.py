"""Model graph: what a traced MoE model computes, as typed operators over named weights.

Structure comes from the trace (compiler/trace.py); models/ names the modules and checks the
configuration against it. May import nothing but the standard library and pdscope.errors.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Op(StrEnum):
    """Operator kinds. `add` and `scale` are the arithmetic that a trace shows between modules."""

    EMBED = "embed"
    NORM = "norm"
    ATTENTION = "attention"
    GATE = "gate"
    EXPERTS = "experts"
    SHARED_EXPERT = "shared_expert"
    MLP = "mlp"
    ADD = "add"
    SCALE = "scale"
    LM_HEAD = "lm_head"


@dataclass(frozen=True)
class Weight:
    """One parameter that an operator reads. `name` is transformers' parameter name (state_dict
    key).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", "float16" as the traced module declares it


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: angles are position * inv_freq[i]; cos and sin are times `scale` (YaRN)."""

    inv_freq: tuple[float, ...]  # [dim / 2], fp32 values
    scale: float
    interleaved: bool  # pairs (2i, 2i+1) instead of (i, i + dim/2)

    @property
    def dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class EmbedAttrs:
    vocab: int
    hidden: int


@dataclass(frozen=True)
class NormAttrs:
    dim: int
    eps: float


@dataclass(frozen=True)
class GqaAttrs:
    """Weights: q, k, v, o; optional q_norm, k_norm, q_bias, k_bias, v_bias, o_bias."""

    heads: int
    kv_heads: int
    head_dim: int
    softmax_scale: float
    rope: Rope
    qk_norm: str  # "none" | "head" (over head_dim) | "full" (over all heads at once, OLMoE)
    qk_norm_eps: float
    window: int | None  # sliding window: query i sees keys j with i - j < window
    clip: float | None  # clamp of v, and of q and k after their norms (OLMoE clip_qkv)


@dataclass(frozen=True)
class MlaAttrs:
    """Weights: q, or q_a, q_a_norm and q_b; kv_a, kv_a_norm, kv_b, o.

    Optional: q_a_bias, kv_a_bias, o_bias. Rows of kv_a: [latent kv_lora | k rope]; rows of kv_b,
    per head: [k nope | v]; rows of q or q_b, per head: [nope | rope].
    """

    heads: int
    q_lora: int | None
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float
    norm_eps: float
    rope: Rope


@dataclass(frozen=True)
class GateAttrs:
    """Weights: weight [experts, hidden]; optional bias [experts], added to scores for the choice
    only.
    """

    experts: int
    top_k: int
    score: str  # "softmax" | "sigmoid"
    normalise: bool
    norm_eps: float  # added to the sum when normalising
    scaling: float
    groups: int
    top_groups: int
    group_score: str  # "none" | "max" | "top2"
    masked_score: float  # score of experts in groups that were not chosen: 0.0 or -inf

    @classmethod
    def softmax(cls, experts: int, top_k: int, normalise: bool = True) -> Self:
        """Softmax over all experts, then the best top_k, with their weights renormalised or not."""
        return cls(
            experts=experts,
            top_k=top_k,
            score="softmax",
            normalise=normalise,
            norm_eps=0.0,
            scaling=1.0,
            groups=1,
            top_groups=1,
            group_score="none",
            masked_score=0.0,
        )


@dataclass(frozen=True)
class ExpertsAttrs:
    """Weights: gate_up [experts, 2 * inter, hidden] (gate rows first), down [experts, hidden,
    inter].
    """

    experts: int
    inter: int
    activation: str  # "silu"


@dataclass(frozen=True)
class MlpAttrs:
    """Dense MLP or shared expert. Weights: gate, up [inter, hidden], down [hidden, inter]."""

    inter: int
    activation: str


@dataclass(frozen=True)
class AddAttrs:
    pass


@dataclass(frozen=True)
class ScaleAttrs:
    factor: float


@dataclass(frozen=True)
class LmHeadAttrs:
    """Weight: weight [vocab, hidden]; the embedding's own when tied."""

    vocab: int
    tied: bool


Attrs = (
    EmbedAttrs
    | NormAttrs
    | GqaAttrs
    | MlaAttrs
    | GateAttrs
    | ExpertsAttrs
    | MlpAttrs
    | AddAttrs
    | ScaleAttrs
    | LmHeadAttrs
)


@dataclass(frozen=True)
class Node:
    """One operator. Inputs are names of earlier nodes; rows are tokens, so shapes carry no batch or
    length.

    `embed` takes none (the token ids are the program's own input); `experts` takes (normed rows,
    gate) and gives the routed sum [rows, hidden]; `add` takes two; every other operator takes one.
    The last node of a graph gives the logits.
    """

    name: str
    op: Op
    inputs: tuple[str, ...]
    attrs: Attrs
    weights: dict[str, Weight] = field(default_factory=dict)
    layer: int | None = None


@dataclass(frozen=True)
class Graph:
    architecture: str  # "MixtralForCausalLM"
    hidden: int
    vocab: int
    layers: int
    max_context: int  # max_position_embeddings
    nodes: tuple[Node, ...]
    streams: int = 1  # hyper-connection streams of the hidden state
    dtype: str = "bfloat16"  # the checkpoint's own dtype

    def node(self, name: str) -> Node:
        for n in self.nodes:
            if n.name == name:
                return n
        raise KeyError(name)

    def in_layer(self, layer: int | None) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.layer == layer)
