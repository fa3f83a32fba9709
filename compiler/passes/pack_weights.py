"""Write one weight file of a plan: assemble each tensor, lay it out in panels, stream it to disk.

The packed layout is the one that runtime_c/src/plan_desc.h describes. Values are converted exactly
(bf16 -> fp32) or rounded to nearest even (fp32, fp16 -> bf16). May import numpy and
pdscope.compiler.{lowered,passmanager}.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.lowered import (
    K_ALIGN,
    PANEL,
    AbsorbKey,
    AbsorbValue,
    ExpertDown,
    ExpertGateUp,
    Form,
    GateUp,
    Rows,
    Tensor,
    WeightFile,
    ceil_to,
)
from pdscope.compiler.passmanager import Workspace, writing

Array = NDArray[Any]


class WeightReader(Protocol):
    """What packing needs of compiler.checkpoint: float32 arrays, or uint16 arrays that are bf16
    bits."""

    def get(self, param: str, part: str = "whole", expert: int | None = None) -> Array: ...


def write_weight_file(
    file: WeightFile,
    weights: WeightReader,
    path: Path,
    progress: Callable[[int], None] = lambda _: None,
) -> str:
    """Write `file` to `path` and return its SHA-256. `progress` receives bytes written since its
    last call."""
    digest = hashlib.sha256()
    with path.open("wb") as out:

        def put(data: Array | bytes) -> int:
            view = data if isinstance(data, bytes) else np.ascontiguousarray(data).data.cast("B")
            out.write(view)
            digest.update(view)
            progress(len(view))
            return len(view)

        at = 0
        for offset, data in _pieces(file, weights):
            at += put(bytes(offset - at))
            at += put(data)
        put(bytes(file.bytes - at))
    return digest.hexdigest()


def _pieces(file: WeightFile, weights: WeightReader) -> Iterator[tuple[int, Array]]:
    """(offset, data) of every matrix in ascending offset; one matrix is in memory at a time."""
    tensors = list(file.tensors)
    while tensors:
        t = tensors.pop(0)
        if isinstance(t.source, ExpertGateUp):
            down = tensors.pop(0)
            for e in range(t.count):
                yield t.offset + e * t.stride, _pack(_matrix(t, weights, e), t)
                yield down.offset + e * down.stride, _pack(_matrix(down, weights, e), down)
        else:
            for i in range(t.count):
                yield t.offset + i * t.stride, _pack(_matrix(t, weights, i), t)


def _matrix(t: Tensor, weights: WeightReader, index: int) -> Array:
    """Matrix `index` of a tensor, [n, k], or the vector [n]; float32 or bf16 bits."""
    s = t.source
    if isinstance(s, Rows):
        parts = [weights.get(p) for p in s.params]
        if s.leading_zeros:
            parts.insert(0, np.zeros(s.leading_zeros, np.float32))
        return parts[0] if len(parts) == 1 else _concat(parts)
    if isinstance(s, AbsorbKey | AbsorbValue):
        kv_b: Array = weights.get(s.param).reshape(s.heads, s.nope_dim + s.v_dim, -1)[index]
        return kv_b[: s.nope_dim].T if isinstance(s, AbsorbKey) else kv_b[s.nope_dim :]
    if isinstance(s, GateUp):
        return _alternate(weights.get(s.gate), weights.get(s.up))
    if isinstance(s, ExpertGateUp):
        gate = weights.get(s.param, "gate", index)
        return _alternate(gate, weights.get(s.param, "up", index))
    assert isinstance(s, ExpertDown)
    return weights.get(s.param, "down", index)


def _concat(parts: list[Array]) -> Array:
    if len({p.dtype for p in parts}) > 1:
        parts = [to_float32(p) for p in parts]
    return np.concatenate(parts)


def _alternate(gate: Array, up: Array) -> Array:
    """[inter, k] twice -> [2 * ceil16(inter), k]: 16 rows of gate, the same 16 of up, and so on."""
    if gate.dtype != up.dtype:
        gate, up = to_float32(gate), to_float32(up)
    inter, k = gate.shape
    out = np.zeros((ceil_to(inter, PANEL) // PANEL, 2, PANEL, k), gate.dtype)
    for side, m in enumerate((gate, up)):
        whole = inter // PANEL
        out[:whole, side] = m[: whole * PANEL].reshape(whole, PANEL, k)
        if inter % PANEL:
            out[whole, side, : inter % PANEL] = m[whole * PANEL :]
    return out.reshape(-1, k)


def _pack(m: Array, t: Tensor) -> Array:
    """Lay [n, k] out in panels of 16 columns; a vector becomes fp32 as it is."""
    if t.form is Form.VECTOR:
        return to_float32(m).reshape(-1)
    m = to_bfloat16(m) if t.form is Form.PACKED_BF16 else to_float32(m)
    if m.shape != (t.n, t.k):
        raise AssertionError(f"{t.name}: assembled {m.shape}, planned {(t.n, t.k)}")
    n_pad, k_pad = ceil_to(t.n, PANEL), ceil_to(t.k, K_ALIGN)
    if m.shape != (n_pad, k_pad):
        padded = np.zeros((n_pad, k_pad), m.dtype)
        padded[: t.n, : t.k] = m
        m = padded
    words = np.ascontiguousarray(m).view(np.uint32)  # bf16: one word is the pair (k, k + 1)
    return np.ascontiguousarray(words.reshape(n_pad // PANEL, PANEL, -1).transpose(0, 2, 1))


def to_float32(a: Array) -> Array:
    """bf16 bits (uint16) or float -> float32, exact."""
    if a.dtype == np.uint16:
        return (a.astype(np.uint32) << 16).view(np.float32)
    return a.astype(np.float32, copy=False)


def to_bfloat16(a: Array) -> Array:
    """float32 -> bf16 bits, to nearest even; NaN stays NaN. bf16 bits pass."""
    if a.dtype == np.uint16:
        return a
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(a), quiet, rounded).astype(np.uint16)


@dataclass(frozen=True)
class PackWeights:
    """One weight file, a pass of its own: a killed compile resumes behind the last whole file."""

    file: WeightFile
    weights: WeightReader
    weights_sha256: str
    progress: Callable[[int], None]

    reads = ()

    @property
    def name(self) -> str:
        return f"pack-{Path(self.file.path).stem}"

    def inputs(self) -> Mapping[str, str]:
        return {"weights": self.weights_sha256, "file": repr(self.file)}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        with writing(workspace.path(self.file.path)) as path:
            digest = write_weight_file(self.file, self.weights, path, self.progress)
        return {self.file.path: digest}
