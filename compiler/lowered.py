"""The lowered model: the constants of one plan, tensor by tensor. Mirrors
runtime_c/src/plan_desc.h.

Made by passes/lower.py from the graph, given places by passes/place_tensors, printed as C by
emit.py. May import pdscope.ir and the standard library.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from pdscope.ir.graph import GateAttrs, Rope

PANEL = 16  # output columns of a packed panel
K_ALIGN = 32  # rows of a packed matrix are padded to this many inputs
EXPERT_ALIGN = 4096  # expert blobs start on a page
TENSOR_ALIGN = 64  # all other tensors start on a cache line
KV_BLOCK = 64  # tokens in one KV block


def ceil_to(value: int, unit: int) -> int:
    """Smallest multiple of `unit` that is >= value."""
    return -(-value // unit) * unit


class Form(StrEnum):
    """How a tensor lies in a weight file (enum pds_dtype of plan_desc.h)."""

    PACKED_F32 = "fp32"
    PACKED_BF16 = "bf16"
    VECTOR = "vector"

    @property
    def item_bytes(self) -> int:
        return 2 if self is Form.PACKED_BF16 else 4


# --- where a tensor's values come from (transformers' parameter names) ---


@dataclass(frozen=True)
class Rows:
    """The parameters' rows one below the other: matrices [n_i, k], or vectors after `leading_zeros`
    zeros."""

    params: tuple[str, ...]
    leading_zeros: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return self.params


@dataclass(frozen=True)
class AbsorbKey:
    """W_UK of MLA, transposed per head: kv_b [heads * (nope + v), kv_lora] -> heads x [kv_lora,
    nope]."""

    param: str
    heads: int
    nope_dim: int
    v_dim: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.param,)


@dataclass(frozen=True)
class AbsorbValue:
    """W_UV of MLA per head: kv_b [heads * (nope + v), kv_lora] -> heads x [v, kv_lora]."""

    param: str
    heads: int
    nope_dim: int
    v_dim: int

    @property
    def names(self) -> tuple[str, ...]:
        return (self.param,)


@dataclass(frozen=True)
class GateUp:
    """SwiGLU's first matrix: panels of gate and up [inter, k] alternate."""

    gate: str
    up: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.gate, self.up)


@dataclass(frozen=True)
class ExpertGateUp:
    """The same for `count` experts of one fused parameter [experts, 2 * inter, k]."""

    param: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.param,)


@dataclass(frozen=True)
class ExpertDown:
    """Fused parameter [experts, n, inter]."""

    param: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.param,)


Source = Rows | AbsorbKey | AbsorbValue | GateUp | ExpertGateUp | ExpertDown


@dataclass(frozen=True)
class Tensor:
    """`count` matrices [n, k] (or one vector [n], k = 1). file, offset and stride are set when
    placed."""

    name: str
    form: Form
    n: int
    k: int
    source: Source
    count: int = 1
    file: int = -1
    offset: int = 0
    stride: int = 0

    @property
    def k_pad(self) -> int:
        return ceil_to(self.k, K_ALIGN)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one of the `count` matrices, padding included."""
        if self.form is Form.VECTOR:
            return self.n * 4
        return ceil_to(self.n, PANEL) * self.k_pad * self.form.item_bytes

    def at(self, file: int, offset: int, stride: int) -> "Tensor":
        return replace(self, file=file, offset=offset, stride=stride)


@dataclass(frozen=True)
class Attention:
    kind: str  # "gqa" | "mla"
    qk_norm: str  # "none" | "head" | "full"
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    nope_dim: int
    q_lora: int
    kv_lora: int
    window: int
    scale: float
    norm_eps: float
    clip: float
    rope: Rope
    in_proj: Tensor
    o_proj: Tensor
    in_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    q_b: Tensor | None = None
    uk: Tensor | None = None
    uv: Tensor | None = None
    o_bias: Tensor | None = None


@dataclass(frozen=True)
class Gate:
    attrs: GateAttrs
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Mlp:
    inter: int
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Layer:
    """`dense` alone in a dense layer; else `gate`, `experts` and, where there is one, `shared`."""

    attn_norm: Tensor
    attn_norm_eps: float
    attn: Attention
    mlp_norm: Tensor
    mlp_norm_eps: float
    dense: Mlp | None = None
    gate: Gate | None = None
    experts: Mlp | None = None
    shared: Mlp | None = None

    @property
    def is_moe(self) -> bool:
        return self.gate is not None


@dataclass(frozen=True)
class WeightFile:
    """One file of weights/: `tensors` are in offset order."""

    path: str
    bytes: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class LoweredModel:
    architecture: str
    dtype: str  # "fp32" | "bf16": GEMM inputs, packed weights and KV
    hidden: int
    vocab: int
    max_context: int
    embed: Tensor
    final_norm: Tensor
    final_norm_eps: float
    lm_head: Tensor
    layers: tuple[Layer, ...]
    files: tuple[WeightFile, ...] = ()

    @property
    def act_bytes(self) -> int:
        return 2 if self.dtype == "bf16" else 4

    @property
    def parameters(self) -> int:
        """Logical parameters held in the weight files."""
        return sum(t.n * t.k * t.count for f in self.files for t in f.tensors)
