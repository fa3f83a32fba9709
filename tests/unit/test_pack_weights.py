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
from pdscope.compiler.passes import pack_weights
from pdscope.compiler.passes.pack_weights import write_weight_file
from pdscope.compiler.quantise import to_bfloat16, to_float32


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
    panel = t.k_pad * 16 * t.form.bits // 8
    if t.form.group:
        return unpack_int(data, t, base, panel)
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


def unpack_int(data: bytes, t: Tensor, base: int, values: int) -> Any:
    """The same of int8 (a word holds 4 k) and int4 (8 k: low nibbles, then high ones; value + 8)
    whose panels end in bf16 scales [k / group, 16], in whole cache lines."""
    out = np.zeros((t.n, t.k), np.float32)
    panel = values + -(-t.k_pad // t.form.group * 32 // 64) * 64
    assert t.form.panel_bytes(t.k) == panel
    for j in range(t.n):
        start = base + (j // 16) * panel
        for k in range(t.k):
            if t.form is Form.PACKED_INT8:
                at = start + (k // 4) * 64 + (j % 16) * 4 + k % 4
                q = int(np.frombuffer(data, np.int8, 1, at)[0])
            else:
                pair = data[start + (k // 8) * 64 + (j % 16) * 4 + k % 4]
                q = (pair & 15 if k % 8 < 4 else pair >> 4) - 8
            at = start + values + (k // t.form.group) * 32 + (j % 16) * 2
            out[j, k] = q * to_float32(np.frombuffer(data, np.uint16, 1, at))[0]
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
    assert t.matrix_bytes == ceil_to(n, 16) * ceil_to(k, 32) * form.bits // 8
    kept = np.count_nonzero(w)
    item = np.uint16 if form is Form.PACKED_BF16 else np.float32
    assert np.count_nonzero(words.view(item)) == kept, "padding and gaps are zero"


@pytest.mark.parametrize("form", [Form.PACKED_INT8, Form.PACKED_INT4])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 31), (16, 32), (17, 65), (40, 128), (3, 200)])
def test_integers_are_laid_out_in_panels_with_their_scales(
    tmp_path: Path, form: Form, n: int, k: int
) -> None:
    """Values that the format holds exactly come back exactly, in every place."""
    rng = np.random.default_rng(n)
    most = 127 if form is Form.PACKED_INT8 else 7
    q = rng.integers(-most, most + 1, (n, k)).astype(np.float32)
    q[:, :: form.group] = most if form is Form.PACKED_INT8 else -8  # the extreme of each group
    scale = 2.0 ** rng.integers(-9, 3, (n, -(-k // form.group))).astype(np.float32)
    w = q * np.repeat(scale, form.group, 1)[:, :k]
    t = Tensor("w", form, n, k, Rows(("w",)), file=0, offset=64)
    data = write(tmp_path, [t], Params(w=w))
    assert np.array_equal(unpack(data, t), w)
    k_pad = ceil_to(k, 64)
    scales = ceil_to(k_pad // form.group * 32, 64)
    assert t.matrix_bytes == ceil_to(n, 16) // 16 * (k_pad * 2 * form.bits + scales)
    assert not any(data[:64]) and not any(data[64 + t.matrix_bytes :])


def test_long_matrices_are_quantised_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a matrix give the bytes that the whole gives."""
    rng = np.random.default_rng(5)
    fused = rng.standard_normal((2, 2 * 40, 70), np.float32)
    down = rng.standard_normal((2, 70, 40), np.float32)
    first = Tensor("gu", Form.PACKED_INT4, 96, 70, ExpertGateUp("f"), 2, 0, 4096, 16384)
    second = Tensor("d", Form.PACKED_INT4, 70, 40, ExpertDown("d"), 2, 0, 4096 + 8192, 16384)
    params = Params(f=fused, d=down)
    whole = write(tmp_path, [first, second], params)
    monkeypatch.setattr(pack_weights, "QUANTISE_ITEMS", 1)
    assert write(tmp_path, [first, second], params) == whole
    gate = unpack(whole, first, 1)[:16]
    assert np.abs(gate - fused[1, :16]).max() < 0.35


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
