"""Quantised weights: error bounds, the search for int4 scales, values of any size (issue: "int8 and
int4 weights (group scales, symmetric)", "scales by error search")."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdscope.compiler.lowered import Form
from pdscope.compiler.quantise import quantise, to_float32

INT8, INT4 = Form.PACKED_INT8, Form.PACKED_INT4


def restored(m: np.ndarray, form: Form) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the values and scales stand for, [groups, group], and both."""
    q, scale = quantise(m, form)
    assert q.shape == m.shape and q.dtype == np.int8
    assert scale.shape == (m.shape[0], m.shape[1] // form.group)
    s = to_float32(scale).reshape(-1, 1)
    groups = q.reshape(-1, form.group)
    return groups * s.astype(np.float64), groups, s


def test_int8_is_within_half_a_step() -> None:
    m = np.random.default_rng(0).standard_normal((48, 256)).astype(np.float32)
    value, q, s = restored(m, INT8)
    assert q.min() >= -127 and q.max() <= 127
    error = np.abs(value - m.reshape(q.shape))
    assert (error <= 0.5 * s * 1.004 + 0.25 * s).all()  # the extreme: a scale rounded down
    assert np.sqrt((error**2).mean()) < 0.0065


def test_int4_beats_the_scale_of_the_largest_value() -> None:
    """Mean squared error against max |w| / 7, and against the signed extreme / -8."""
    m = np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)
    value, q, _ = restored(m, INT4)
    assert q.min() == -8 and q.max() == 7
    w = m.reshape(q.shape)

    def error(scale: np.ndarray) -> float:
        return float(((np.clip(np.rint(w / scale), -8, 7) * scale - w) ** 2).mean())

    rows = np.arange(len(w))
    peak = w[rows, np.abs(w).argmax(1)][:, None]
    searched = float(((value - w) ** 2).mean())
    assert searched < 0.75 * error(np.abs(peak) / 7)
    assert searched < 0.92 * error(peak / -8)


@pytest.mark.parametrize("form", [INT8, INT4])
def test_values_of_any_size(form: Form) -> None:
    """Zeros stay zero, the largest floats stay finite, denormals vanish, what is not finite gives
    its group alone a NaN scale."""
    m = np.zeros((8, 128), np.float32)
    m[1] = np.linspace(-3.4e38, 3.4e38, 128)
    m[2, 3] = -3.4e38
    m[3] = 1e-40
    m[4, 1] = np.nan
    m[5, 70] = np.inf
    m[6] = -5
    value, _, s = restored(m, form)
    groups = 128 // form.group
    s = s.reshape(8, groups)
    value = value.reshape(8, 128)
    assert not value[0].any() and not value[3].any() and not value[7].any()
    tolerance = 0.01 if form is INT8 else 0.15
    np.testing.assert_allclose(value[1], m[1], rtol=0, atol=tolerance * 3.4e38)
    np.testing.assert_allclose(value[2, 3], m[2, 3], rtol=0.01)
    np.testing.assert_allclose(value[6], m[6], rtol=0.005)
    assert np.isnan(s[4, 0]) and np.isfinite(s[4, 1:]).all()
    assert np.isnan(s[5, 70 // form.group]) and np.isnan(s[5]).sum() == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([INT8, INT4]), st.floats(-60, 60))
def test_scaling_the_weights_scales_what_comes_out(seed: int, form: Form, power: float) -> None:
    """By a power of two: the same values; error at most a step of the format anywhere."""
    factor = np.float32(2.0 ** round(power))
    m = np.random.default_rng(seed).standard_normal((3, 192)).astype(np.float32)
    value, q, s = restored(m, form)
    again, same, _ = restored(m * factor, form)
    assert (q == same).all() and (again == value * factor).all()
    most = np.abs(m.reshape(q.shape)).max(1, keepdims=True)
    assert (np.abs(value - m.reshape(q.shape)) <= most / (127 if form is INT8 else 5)).all()
    assert (np.abs(s) <= most / (126 if form is INT8 else 5)).all()


@pytest.mark.parametrize("form", [INT8, INT4])
def test_the_same_bits_on_any_number_of_cores(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    m = np.random.default_rng(2).standard_normal((200, 1024)).astype(np.float32)
    whole = quantise(m, form)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    alone = quantise(m, form)
    parts = [quantise(m[i : i + 7], form) for i in range(0, 200, 7)]
    for i in range(2):
        assert (whole[i] == alone[i]).all()
        assert (whole[i] == np.concatenate([p[i] for p in parts])).all()
