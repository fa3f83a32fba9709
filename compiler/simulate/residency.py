"""Which experts have a slot of the ring, and which slot is given up next.

May import numpy, pdscope.ir.isa and pdscope.compiler.{decision,policies}.
"""

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.decision import ONE_Q16, Cached, Policy
from pdscope.compiler.policies import SOON, TO_COME, WINDOW, half_life_of, victim
from pdscope.ir.isa import Phase

IN_USE, AHEAD = 1, 2  # kept
_FEW = 24  # slots: up to so many, the policies' own function is as fast


class Ring:
    """Columns by slot. What of them is kept may not be taken."""

    def __init__(self, policy: Policy, size: int, layers: int) -> None:
        self.policy, self.size, self.layers = policy, size, layers
        self.layer = np.full(size, -1, np.int64)
        self.expert, self.popularity, self.used, self.score, self.kept = (
            np.zeros(size, np.int64) for _ in range(5)
        )
        self.slot_of: dict[tuple[int, int], int] = {}

    def free(self) -> int:
        return int(np.count_nonzero(self.kept == 0))

    def drop(self, slot: int) -> None:
        """Empties it."""
        if self.layer[slot] < 0:
            return
        del self.slot_of[int(self.layer[slot]), int(self.expert[slot])]
        self.layer[slot] = -1
        for column in (self.expert, self.popularity, self.used, self.score, self.kept):
            column[slot] = 0

    def assign(self, slot: int, layer: int, expert: int, popularity: int, now: int) -> None:
        """Who had it is gone; it is in use."""
        self.drop(slot)
        self.layer[slot], self.expert[slot] = layer, expert
        self.popularity[slot], self.used[slot] = popularity, now
        self.kept[slot] = IN_USE
        self.slot_of[layer, expert] = slot

    def take(
        self, phase: Phase, layer: int, expert: int, popularity: int, kept: int, now: int
    ) -> int | None:
        """The slot that the policy takes first; None: all are kept."""
        slot = self._victim(phase, layer, now)
        if slot is None:
            return None
        self.assign(slot, layer, expert, popularity, now)
        self.kept[slot] = kept
        return slot

    def _victim(self, phase: Phase, layer: int, now: int) -> int | None:
        if self.size <= _FEW:
            return victim(self.policy, phase, self.cached(), layer, self.layers, now)
        empty = np.flatnonzero(self.layer < 0)
        if len(empty):
            return int(empty[0])
        free = np.flatnonzero(self.kept == 0)
        if not len(free):
            return None
        age = now - self.used[free]
        worth = self._worth(free, phase, layer, age)
        return int(free[np.lexsort((-age, worth))[0]])

    def _worth(
        self, free: NDArray[np.intp], phase: Phase, layer: int, age: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        n, often = self.layers, np.minimum(self.popularity[free], ONE_Q16)
        ahead = (self.layer[free] - layer) % n
        match self.policy:
            case Policy.ADAPTSCHED:
                worth = self._recent(free, age) + often + (n - ahead) * SOON // n
                if phase is Phase.PREFILL:
                    worth[self.layer[free] > layer] += TO_COME
                return np.asarray(worth)
            case Policy.HYBRIMOE:
                return self._recent(free, age)
            case Policy.FATE:
                return self.layers - self.layer[free]
            case Policy.APEX:
                recent = (WINDOW - np.minimum(age, WINDOW)) * (65536 // WINDOW)
                return np.asarray(recent + often + (n - ahead) * 65536 // n)
            case _:
                return np.zeros(len(free), np.int64)

    def _recent(self, free: NDArray[np.intp], age: NDArray[np.int64]) -> NDArray[np.int64]:
        """pdscope.compiler.policies.left_of."""
        half_life = half_life_of(self.policy)
        left = self.score[free] >> np.minimum(age // half_life, 32)
        return np.asarray(left - left * (age % half_life) // (2 * half_life))

    def cached(self) -> list[Cached]:
        """As policies see them."""
        columns = (self.layer, self.expert, self.popularity, self.used, self.score, self.kept > 0)
        return [Cached(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
