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


GROUP = {8: 64, 4: 32}  # k that share a scale, by the bits of a weight


def quantised(w: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """int8 values [n, ceil64(k)] and bf16 bits of scales [n, ceil64(k) / group] near W [n, k]."""
    n, k = w.shape
    padded = np.zeros((n, -(-k // 64) * 64), np.float32)
    padded[:, :k] = w
    groups = padded.reshape(n, -1, GROUP[bits])
    most = 2 ** (bits - 1) - 1
    scale = bf16_bits(np.abs(groups).max(-1) / most)
    inverse = 1 / np.maximum(bf16_value(scale), 1e-30)
    q = np.clip(np.rint(groups * inverse[..., None]), -most - 1, most)
    return q.astype(np.int8).reshape(n, -1), scale


def dequantised(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 [n, k]."""
    groups = q.reshape(*scale.shape, -1).astype(np.float64)
    return (groups * bf16_value(scale)[..., None]).reshape(q.shape)


def pack_int(q: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """Values and scales as panels of plan_desc.h, [panels, panel bytes]."""
    n, k = q.shape
    panels = -(-n // 16)
    full = np.zeros((panels * 16, k), np.int8)
    full[:n] = q
    scales = np.zeros((panels * 16, scale.shape[1]), np.uint16)
    scales[:n] = scale
    out = np.zeros((panels, k * 2 * bits + -(-scale.shape[1] * 32 // 64) * 64), np.uint8)
    for p in range(panels):
        for j in range(16):
            row = full[p * 16 + j].astype(np.int16)
            if bits == 8:
                columns = row.astype(np.int8).view(np.uint8).reshape(-1, 4)
            else:
                low, high = (row.reshape(-1, 2, 4) + 8).transpose(1, 0, 2)
                columns = (low + 16 * high).astype(np.uint8)
            words = out[p, : k * 2 * bits].reshape(-1, 16, 4)
            words[:, j] = columns
        tail = out[p, k * 2 * bits :][: scale.shape[1] * 32].view(np.uint16)
        tail.reshape(-1, 16)[...] = scales[p * 16 : p * 16 + 16].T
    return out


def pack_int_pair(halves: np.ndarray, bits: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """[2, n, k] as alternating panels of gate and up, flat, and both matrices as packed,
    float64."""
    parts = [quantised(h, bits) for h in halves]
    packed = np.stack([pack_int(q, s, bits) for q, s in parts], 1)
    return aligned(packed.reshape(-1)), [dequantised(q, s) for q, s in parts]


def quantised_rows(x: np.ndarray, bits: int) -> np.ndarray:
    """What a GEMM on integer weights reads of bf16 rows: multiples of max |x| / 127 of a group."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 64) * 64), np.float32)
    padded[:, :k] = x
    groups = padded.reshape(rows, -1, GROUP[bits])
    most = np.abs(groups).max(-1, keepdims=True)
    tiny = most < 1e-30
    factor = np.where(tiny, 0, np.float32(127) / np.where(tiny, 1, most)).astype(np.float32)
    scale = np.where(tiny, 0, most * np.float32(1 / 127)).astype(np.float64)
    return (np.rint(groups * factor) * scale).reshape(rows, -1)
