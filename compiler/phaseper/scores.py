"""Logits of a net from its file's tensors, for whoever measures it; phaseper/nets.py has the
formulas. In numpy alone: who inspects a plan needs no torch. May import numpy and
pdscope.compiler.{quantise,phaseper.metrics}.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.phaseper.metrics import Array
from pdscope.compiler.quantise import to_float32


def net_scores(tensors: Mapping[str, NDArray[Any]], a: Array, features: Array) -> Array:
    """In fp32 [rows, experts]. tensors: fp32, or bf16 as bits in uint16; a: [rows, hidden];
    features: [rows, blocks * experts], w_r or 1 where a row is set."""
    t = {name: _fp32(tensor) for name, tensor in tensors.items()}
    u = a @ t["in.weight"].T + t["in.bias"] + features @ t["features.weight"]
    width = t["out.weight"].shape[1]
    h = _silu(u[:, :width])
    if "gate.weight" in t:
        gate = sigmoid(a @ t["gate.weight"].T + t["gate.bias"])
        h = h + gate * _silu(h @ t["block.weight"].T + t["block.bias"])
    out: Array = u[:, width:] + h @ t["out.weight"].T
    return out


def sigmoid(x: Array) -> Array:
    out: Array = (1 / (1 + np.exp(-np.clip(x, -80, 80)))).astype(np.float32)
    return out


def _silu(x: Array) -> Array:
    return x * sigmoid(x)


def _fp32(tensor: NDArray[Any]) -> Array:
    return to_float32(tensor) if tensor.dtype == np.uint16 else tensor
