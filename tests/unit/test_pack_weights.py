"""Packed weights: the layout of plan_desc.h, element by element.

Holds: "The packed weight layout of the design, to the byte."
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdscope.compiler.lowered import (
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
from pdscope.compiler.passes.pack_weights import to_bfloat16, to_float32, write_weight_file


class Params:
    """A weight reader over arrays; fused experts are [E, 2I, k] and [E, n, I]."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays

    def get(self, param: str, part: str = "whole", expert: int | None = None) -> Any:
        a = self.arrays[param]
        if expert is None:
            return a
        half = a.shape[1] // 2
        return {"gate": a[expert][:half], "up": a[expert][half:], "down": a[expert]}[part]


def unpack(data: bytes, t: Tensor, index: int = 0) -> Any:
    """The reference reading of the layout: one element at a time, straight from its description."""
    out = np.zeros((t.n, t.k), np.float32)
    base = t.offset + index * t.stride
    panel = t.k_pad * 16 * t.form.item_bytes
    for j in range(t.n):
        for k in range(t.k):
            if t.form is Form.PACKED_BF16:
                at = base + (j // 16) * panel + (k // 2) * 64 + (j % 16) * 4 + (k % 2) * 2
                bits = np.frombuffer(data, np.uint16, 1, at)
                out[j, k] = to_float32(bits)[0]
            else:
                at = base + (j // 16) * panel + k * 64 + (j % 16) * 4
                out[j, k] = np.frombuffer(data, np.float32, 1, at)[0]
    return out


def write(tmp_path: Path, tensors: list[Tensor], params: Params, size: int = 1 << 16) -> bytes:
    path = tmp_path / "weights.bin"
    write_weight_file(WeightFile("weights/x.bin", size, tuple(tensors)), params, path)
    data = path.read_bytes()
    assert len(data) == size
    return data


@pytest.mark.parametrize("form", [Form.PACKED_F32, Form.PACKED_BF16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 31), (16, 32), (17, 33), (40, 64)])
def test_rows_are_laid_out_in_panels_and_padded_with_zeros(
    tmp_path: Path, form: Form, n: int, k: int
) -> None:
    rng = np.random.default_rng(0)
    w = to_float32(to_bfloat16(rng.standard_normal((n, k), np.float32)))
    t = Tensor("w", form, n, k, Rows(("w",)), file=0, offset=64)
    data = write(tmp_path, [t], Params(w=w))
    assert np.array_equal(unpack(data, t), w)
    words = np.frombuffer(data, np.uint8)
    assert t.matrix_bytes == ceil_to(n, 16) * ceil_to(k, 32) * form.item_bytes
    kept = np.count_nonzero(w)
    item = np.uint16 if form is Form.PACKED_BF16 else np.float32
    assert np.count_nonzero(words.view(item)) == kept, "padding and gaps are zero"


def test_gate_and_up_panels_alternate(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    gate, up = (rng.standard_normal((20, 8), np.float32) for _ in range(2))
    t = Tensor("w", Form.PACKED_F32, 64, 8, GateUp("g", "u"), file=0)
    got = unpack(write(tmp_path, [t], Params(g=gate, u=up)), t)
    assert np.array_equal(got[0:16], gate[:16])
    assert np.array_equal(got[16:32], up[:16])
    assert np.array_equal(got[32:36], gate[16:])
    assert np.array_equal(got[48:52], up[16:])
    assert not got[36:48].any()
    assert not got[52:64].any()


def test_experts_are_one_blob_each(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    fused = rng.standard_normal((3, 2 * 16, 8), np.float32)
    down = rng.standard_normal((3, 8, 16), np.float32)
    first = Tensor("gu", Form.PACKED_F32, 32, 8, ExpertGateUp("f"), 3, 0, 4096, 8192)
    second = Tensor("d", Form.PACKED_F32, 8, 16, ExpertDown("d"), 3, 0, 8192, 8192)
    data = write(tmp_path, [first, second], Params(f=fused, d=down))
    for e in range(3):
        assert np.array_equal(unpack(data, first, e), fused[e])
        assert np.array_equal(unpack(data, second, e), down[e])


def test_absorbed_projections_are_slices_of_kv_b(tmp_path: Path) -> None:
    heads, nope, v, lora = 2, 4, 6, 8
    kv_b = np.random.default_rng(3).standard_normal((heads * (nope + v), lora), np.float32)
    key = AbsorbKey("b", heads, nope, v)
    uk = Tensor("uk", Form.PACKED_F32, lora, nope, key, heads, 0, 0, 4096)
    value = AbsorbValue("b", heads, nope, v)
    uv = Tensor("uv", Form.PACKED_F32, v, lora, value, heads, 0, 8192, 4096)
    data = write(tmp_path, [uk, uv], Params(b=kv_b))
    per_head = kv_b.reshape(heads, nope + v, lora)
    for h in range(heads):
        assert np.array_equal(unpack(data, uk, h), per_head[h, :nope].T)
        assert np.array_equal(unpack(data, uv, h), per_head[h, nope:])


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32))
def test_rounding_to_bf16_is_to_nearest_even(x: float) -> None:
    import torch

    a = np.array([x], np.float32)
    want = torch.tensor(a).to(torch.bfloat16).float().numpy()
    assert np.array_equal(to_float32(to_bfloat16(a)), want, equal_nan=True)
