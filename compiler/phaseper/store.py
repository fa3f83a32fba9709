"""What training starts from: a trace store (compiler/phaseper/traces.py is one) and the model's
gates. May import numpy and pdscope.ir.graph.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdscope.ir.graph import GateAttrs


class Trace(Protocol):
    """Rows of one MoE layer and phase; row i is the same token in every layer."""

    @property
    def a(self) -> NDArray[np.uint16]:
        """The gate's input [n, hidden], bf16 bits."""

    @property
    def w(self) -> NDArray[np.float32]:
        """Routing weights [n, top_k], in rank order."""

    @property
    def e(self) -> NDArray[np.int32]:
        """Expert ids [n, top_k], in rank order."""

    @property
    def prev(self) -> NDArray[np.int32]:
        """Expert ids of the token before, same layer [n, top_k]; -1: there is none."""


class Store(Protocol):
    @property
    def phases(self) -> tuple[str, ...]: ...
    @property
    def layers(self) -> list[int]:
        """Model-layer numbers of the MoE layers, ascending."""

    @property
    def hidden(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    def rows(self, phase: str) -> int: ...
    def layer(self, phase: str, layer: int) -> Trace: ...
    def split(self, phase: str) -> NDArray[np.bool_]:
        """[n], True: validation."""


@dataclass(frozen=True)
class Gate:
    """The gate of one MoE layer: fp32 weight [experts, hidden], bias [experts] of the choice."""

    attrs: GateAttrs
    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None

    def logits(self, a: NDArray[np.float32]) -> NDArray[np.float32]:
        """[n, experts] from the gate's input [n, hidden]."""
        out: NDArray[np.float32] = a @ self.weight.T
        return out
