"""Writes GGUF files of random bf16 weights, for llama.cpp beside a dummy plan. Needs only numpy.

The format is ggml's docs/gguf.md, version 3: a header, key-value pairs, a table of tensors with
their dimensions innermost first, then their bytes at multiples of 32.
"""

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ALIGNMENT = 32
F32, BF16 = 0, 30  # ggml's numbers of tensor types
UINT32, FLOAT32, STRING = 4, 6, 8  # GGUF's numbers of value types
STD = 0.02

#: (name, shape outermost first, kind): `matrix` is bf16, `residual` bf16 and scaled, `router` fp32,
#: `norm` fp32 ones.
Tensor = tuple[str, tuple[int, ...], str]


def write(
    path: Path, settings: dict[str, int | float | str], tensors: Sequence[Tensor], scale: float
) -> None:
    """Random normal weights of standard deviation 0.02, those of residual outputs times `scale`,
    to `path` by way of a name aside. One random block serves all tensors, each from another place
    in it."""
    aside = path.with_suffix(".part")
    rng = np.random.default_rng(1)
    block = rng.standard_normal(1 << 24, np.float32) * np.float32(STD)
    blocks = {"matrix": _bf16(block), "residual": _bf16(block * np.float32(scale))}
    with aside.open("wb") as file:
        file.write(_header(settings, tensors))
        for _, shape, kind in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            left = int(np.prod(shape))
            if kind == "norm":
                file.write(np.ones(left, np.float32).data)
                continue
            source = blocks.get(kind, block)
            while left:
                start = int(rng.integers(len(source) // 2))
                part = source[start : start + min(left, len(source) // 2)]
                file.write(part.data)
                left -= len(part)
    os.replace(aside, path)


def _bf16(x: np.ndarray) -> np.ndarray:
    return ((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


def _header(settings: dict[str, int | float | str], tensors: Sequence[Tensor]) -> bytes:
    out = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(settings))]
    for key, value in settings.items():
        if isinstance(value, str):
            typed = struct.pack("<I", STRING) + _text(value)
        elif isinstance(value, int):
            typed = struct.pack("<II", UINT32, value)
        else:
            typed = struct.pack("<If", FLOAT32, value)
        out.append(_text(key) + typed)
    offset = 0
    for name, shape, kind in tensors:
        plain = kind in ("norm", "router")
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        out.append(_text(name) + dims + struct.pack("<IQ", F32 if plain else BF16, offset))
        size = int(np.prod(shape)) * (4 if plain else 2)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return b"".join(out)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw
