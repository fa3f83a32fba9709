"""Write one weight file of a plan: assemble each tensor, lay it out in panels, stream it to disk.

The packed layout is the one that runtime_c/src/plan_desc.h describes. Values are converted exactly
(bf16 -> fp32), rounded to nearest even (fp32, fp16 -> bf16) or quantised (compiler/quantise.py).
May import numpy and pdscope.compiler.{lowered,passmanager,quantise}.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.lowered import (
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
from pdscope.compiler.quantise import quantise, to_bfloat16, to_float32

Array = NDArray[Any]

QUANTISE_ITEMS = 1 << 24  # elements of a matrix that are quantised at a time


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
                yield from _packed(_matrix(t, weights, e), t, t.offset + e * t.stride)
                at = down.offset + e * down.stride
                yield from _packed(_matrix(down, weights, e), down, at)
        else:
            for i in range(t.count):
                yield from _packed(_matrix(t, weights, i), t, t.offset + i * t.stride)


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


def _packed(m: Array, t: Tensor, offset: int) -> Iterator[tuple[int, Array]]:
    """Lay [n, k] out in panels of 16 columns; a vector becomes fp32 as it is."""
    if t.form is Form.VECTOR:
        yield offset, to_float32(m).reshape(-1)
        return
    if m.shape != (t.n, t.k):
        raise AssertionError(f"{t.name}: assembled {m.shape}, planned {(t.n, t.k)}")
    if not t.form.group:
        m = to_bfloat16(m) if t.form is Form.PACKED_BF16 else to_float32(m)
        yield offset, _words(_padded(m, t))  # bf16: one word is the pair (k, k + 1)
        return
    step = max(PANEL, QUANTISE_ITEMS // t.k_pad // PANEL * PANEL)
    for first in range(0, t.n, step):
        block = _padded(to_float32(m[first : first + step]), t)
        yield offset + first // PANEL * t.form.panel_bytes(t.k), _quantised(block, t)


def _padded(m: Array, t: Tensor) -> Array:
    """Rows and columns of zeros up to whole panels and tiles."""
    shape = ceil_to(len(m), PANEL), t.k_pad
    if m.shape == shape:
        return m
    padded = np.zeros(shape, m.dtype)
    padded[: len(m), : t.k] = m
    return padded


def _words(m: Array) -> Array:
    """[n, k] -> [panels, 64-byte rows, 16 words of 32 bits]."""
    words = np.ascontiguousarray(m).view(np.uint32)
    return np.ascontiguousarray(words.reshape(-1, PANEL, words.shape[1]).transpose(0, 2, 1))


def _quantised(m: Array, t: Tensor) -> Array:
    """Panels of float32 [n, k] as int8 or int4, each with its scales behind it."""
    q, scale = quantise(m, t.form)
    if t.form is Form.PACKED_INT4:
        fours = (q + 8).view(np.uint32)  # of k..k+3 and of k+4..k+7 in turn; each byte below 16
        q = fours[:, 0::2] | fours[:, 1::2] << 4
    panels = len(m) // PANEL
    out = np.zeros((panels, t.form.panel_bytes(t.k)), np.uint8)
    words = _words(q).reshape(panels, -1).view(np.uint8)
    out[:, : words.shape[1]] = words
    scales = np.ascontiguousarray(scale.reshape(panels, PANEL, -1).transpose(0, 2, 1))
    scales = scales.reshape(panels, -1).view(np.uint8)
    out[:, words.shape[1] : words.shape[1] + scales.shape[1]] = scales
    return out


@dataclass(frozen=True)
class PackWeights:
    """One weight file, a pass of its own: a killed compile resumes behind the last whole file."""

    file: WeightFile
    weights: WeightReader
    weights_sha256: str
    config_sha256: str  # which tensor is which parameter depends on it
    progress: Callable[[int], None]

    reads = ()

    @property
    def name(self) -> str:
        return f"pack-{Path(self.file.path).stem}"

    def inputs(self) -> Mapping[str, str]:
        return {
            "config": self.config_sha256,
            "weights": self.weights_sha256,
            "file": repr(self.file),
        }

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        with writing(workspace.path(self.file.path)) as path:
            digest = write_weight_file(self.file, self.weights, path, self.progress)
        return {self.file.path: digest}
