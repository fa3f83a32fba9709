"""What training needs of a trace store; compiler/phaseper/traces.py is one. May import numpy."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
