"""The packed weight layout and bf16, written a second time in numpy, for tests."""

import numpy as np


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits, nearest even; NaN made quiet."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)
    return np.where(np.isnan(x), bits | 0x400000, rounded).__rshift__(16).astype(np.uint16)


def bf16_value(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def act_array(x: np.ndarray, act: str) -> np.ndarray:
    """As GEMM input: fp32, or bf16 bits. `act` is f32 or bf16."""
    x = np.ascontiguousarray(x, np.float32)
    return bf16_bits(x) if act == "bf16" else x


def from_act(x: np.ndarray, act: str) -> np.ndarray:
    return bf16_value(x) if act == "bf16" else x


def aligned(array: np.ndarray, to: int = 64) -> np.ndarray:
    """A copy whose first byte is at a multiple of `to`."""
    raw = np.zeros(array.nbytes + to, np.uint8)
    start = -raw.ctypes.data % to
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def pack(w: np.ndarray, act: str, k_align: int = 32, interleave: bool = False) -> np.ndarray:
    """W [n, k] as panels of 16 columns (plan_desc.h), flat. interleave: W is [2, n, k], gate and up
    panels alternating."""
    if interleave:
        halves = [pack(h, act, k_align) for h in w]
        panels = -(-w.shape[1] // 16)
        return aligned(np.stack([h.reshape(panels, -1) for h in halves], 1).reshape(-1))
    n, k = w.shape
    padded = np.zeros((-(-n // 16) * 16, -(-k // k_align) * k_align), np.float32)
    padded[:n, :k] = w
    per_word = 2 if act == "bf16" else 1
    words = act_array(padded, act).reshape(len(padded) // 16, 16, -1, per_word)
    return aligned(np.ascontiguousarray(words.transpose(0, 2, 1, 3)).reshape(-1))
