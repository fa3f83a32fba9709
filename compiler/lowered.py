"""The lowered model: the constants of one plan, tensor by tensor. Mirrors
runtime_c/src/plan_desc.h.

Made by passes/lower.py from the graph, tensor places included, printed as C by emit.py.
May import pdscope.ir and the standard library.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from pdscope.ir.graph import GateAttrs, Rope

PANEL = 16  # output columns of a packed panel
K_ALIGN = 32  # rows of a packed matrix are padded to this many inputs
INT_K_ALIGN = 64  # of an int8 or int4 matrix
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
    PACKED_INT8 = "int8"
    PACKED_INT4 = "int4"
    VECTOR = "vector"

    @property
    def bits(self) -> int:
        """Of one element, without its share of a scale."""
        return {Form.PACKED_BF16: 16, Form.PACKED_INT8: 8, Form.PACKED_INT4: 4}.get(self, 32)

    @property
    def group(self) -> int:
        """Elements along k that share a bf16 scale; 0: the format has none."""
        return {Form.PACKED_INT8: 64, Form.PACKED_INT4: 32}.get(self, 0)

    def k_pad(self, k: int) -> int:
        """Inputs of a packed matrix, padding included."""
        return ceil_to(k, INT_K_ALIGN if self.group else K_ALIGN)

    def panel_bytes(self, k: int) -> int:
        """A panel of 16 output columns (runtime_c/src/panels.h): elements, then scales."""
        k = self.k_pad(k)
        scales = ceil_to(k // self.group * PANEL * 2, TENSOR_ALIGN) if self.group else 0
        return k * PANEL * self.bits // 8 + scales

    def quant_bytes(self, k: int) -> int:
        """A quantised row of GEMM input: int8, a scale and a sum a group; 0 without groups."""
        if not self.group:
            return 0
        k = self.k_pad(k)
        return ceil_to(k + 8 * (k // self.group), TENSOR_ALIGN)


#: The form of a plan's matrices, by its dtype; router and norms are fp32 in every plan.
MATRIX_FORM = {
    "fp32": Form.PACKED_F32,
    "bf16": Form.PACKED_BF16,
    "int8": Form.PACKED_INT8,
    "int4": Form.PACKED_INT4,
}


# --- where a tensor's values come from (transformers' parameter names) ---


@dataclass(frozen=True)
class Rows:
    """The parameters' rows one below the other: matrices [n_i, k], or vectors after `leading_zeros`
    zeros."""

    params: tuple[str, ...]
    leading_zeros: int = 0


@dataclass(frozen=True)
class AbsorbKey:
    """W_UK of MLA, transposed per head: kv_b [heads * (nope + v), kv_lora] -> heads x [kv_lora,
    nope]."""

    param: str
    heads: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True)
class AbsorbValue:
    """W_UV of MLA per head: kv_b [heads * (nope + v), kv_lora] -> heads x [v, kv_lora]."""

    param: str
    heads: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True)
class GateUp:
    """SwiGLU's first matrix: panels of gate and up [inter, k] alternate."""

    gate: str
    up: str


@dataclass(frozen=True)
class ExpertGateUp:
    """The same for `count` experts of one fused parameter [experts, 2 * inter, k]."""

    param: str


@dataclass(frozen=True)
class ExpertDown:
    """Fused parameter [experts, n, inter]."""

    param: str


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
        return self.form.k_pad(self.k)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one of the `count` matrices, padding included."""
        if self.form is Form.VECTOR:
            return self.n * 4
        return ceil_to(self.n, PANEL) // PANEL * self.form.panel_bytes(self.k)

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
class Predictor:
    """What `compute predict` does (pds_predictor of plan_desc.h)."""

    kind: str  # "cross_gate"
    target: int  # the layer whose experts it predicts: the next one with experts


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
    predictor: Predictor | None = None

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
    dtype: str  # of packed weights, "fp32" | "bf16" | "int8" | "int4"
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
        """Of GEMM inputs and of the KV cache: fp32 in fp32 plans, else bf16."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def parameters(self) -> int:
        """Logical parameters held in the weight files."""
        return sum(t.n * t.k * t.count for f in self.files for t in f.tensors)
