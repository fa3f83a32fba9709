"""Layer groups: where the gates' inputs of neighbouring layers begin and cease to look alike.

Section 3.1 and the appendix of the PDScope paper: the cosine similarity of neighbouring gate inputs
rises from the input group to the middle and falls from the middle to the output group; the
boundaries are the inflection points. May import numpy and
pdscope.compiler.{quantise,phaseper.store}.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.phaseper.store import Store
from pdscope.compiler.quantise import to_float32

INPUT, MIDDLE, OUTPUT = "input", "middle", "output"
SAMPLE = 4096  # rows a phase that the similarities are means over


@dataclass(frozen=True)
class LayerGroups:
    """`similarity[i]`: mean cosine of the gate inputs of layers[i] and layers[i + 1], in [-1, 1].
    `names[i]`: group of layers[i]."""

    layers: tuple[int, ...]
    similarity: tuple[float, ...]
    names: tuple[str, ...]

    def of(self, layer: int) -> str:
        return self.names[self.layers.index(layer)]


def find_groups(store: Store) -> LayerGroups:
    """Groups of a trace store's MoE layers; both phases' rows count alike."""
    means = np.mean([similarity(store, phase) for phase in store.phases], axis=0)
    cosines = [float(x) for x in np.atleast_1d(means)]
    return LayerGroups(tuple(store.layers), tuple(cosines), tuple(group_names(cosines)))


def similarity(store: Store, phase: str) -> NDArray[np.float64]:
    """Mean cosine of each pair of neighbouring layers [layers - 1], over rows spread evenly."""
    rows = np.unique(np.linspace(0, max(store.rows(phase) - 1, 0), SAMPLE).astype(np.int64))
    rows = rows[: store.rows(phase)]
    found, before = [], None
    for layer in store.layers:
        a = to_float32(store.layer(phase, layer).a[rows])
        a /= np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-20)
        if before is not None:
            found.append(float((a * before).sum(1).mean()) if len(rows) else 0.0)
        before = a
    return np.array(found)


def group_names(cosines: Sequence[float]) -> list[str]:
    """The group of each of len(cosines) + 1 layers.

    The similarity's inflection points are its steepest rise before the peak and its steepest fall
    behind it. Layers up to the rise are the input group, layers behind the fall the output group. A
    curve that does not rise (fall) has no input (output) group. cosines[i] belongs to layer i, so
    the last layer, which has no successor, is in the group of the one before.
    """
    s = np.asarray(cosines, np.float64)
    if len(s) == 0:
        return [MIDDLE]
    step, peak = np.diff(s), int(s.argmax())
    rise, fall = step[:peak], step[peak:]
    first = int(rise.argmax()) + 1 if len(rise) and rise.max() > 0 else 0
    last = peak + int(fall.argmin()) + 1 if len(fall) and fall.min() < 0 else len(s)
    names = [INPUT] * first + [MIDDLE] * (last - first) + [OUTPUT] * (len(s) - last)
    return [*names, names[-1]]
