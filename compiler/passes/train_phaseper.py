"""Train and choose the predictors of a plan: phaseper/layerNNN.safetensors and phaseper.json.

May import numpy, pdscope.compiler.{lowered,passmanager,quantise} and pdscope.compiler.phaseper;
torch comes with its modules, when the pass runs.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pdscope.compiler.lowered import Layer, Rows, Tensor
from pdscope.compiler.passes.pack_weights import WeightReader
from pdscope.compiler.passmanager import Workspace
from pdscope.compiler.phaseper.store import Gate
from pdscope.compiler.quantise import to_float32

if TYPE_CHECKING:
    from pdscope.compiler.phaseper.store import Store
    from pdscope.compiler.phaseper.train import TrainOptions


@dataclass(frozen=True)
class TrainPhasePer:
    """`traces`: opens the store; `key`: what the traces were made from; `gates`: gate of every MoE
    layer but the first, by model-layer number, read when the pass runs; `device`: "cpu", "cuda" or
    "auto"."""

    traces: Callable[[], "Store"] = field(repr=False)
    key: str
    gates: Callable[[], Mapping[int, Gate]] = field(repr=False)
    options: "TrainOptions"
    device: str = "auto"
    start: Callable[[int], None] = lambda _: None  # receives the rows to train on, an estimate
    advance: Callable[[int], None] = lambda _: None  # receives rows trained on since its last call

    name = "train-phaseper"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        options = json.dumps(asdict(self.options))
        return {"traces": self.key, "options": options, "device": self.device}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        """Raises BudgetError when no net fits the size budget."""
        from pdscope.compiler.phaseper.build import build_predictors

        store, gates = self.traces(), self.gates()
        about, files = build_predictors(
            store, gates, self.options, self.device, usable_cores(), self.start, self.advance
        )
        written = [workspace.write(path, data) for path, data in files.items()]
        data: dict[str, Any] = {"traces": self.key, **about}
        written.append(workspace.write("phaseper.json", json.dumps(data, indent=1) + "\n"))
        return dict.fromkeys(written)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def model_gates(layers: Sequence[Layer], weights: WeightReader) -> dict[int, Gate]:
    """The gate of every MoE layer that has one before it, by model-layer number."""

    def values(tensor: Tensor) -> Any:
        assert isinstance(tensor.source, Rows)
        (parameter,) = tensor.source.params
        return to_float32(weights.get(parameter))

    numbered = [(number, layer.gate) for number, layer in enumerate(layers)]
    gates = [(number, gate) for number, gate in numbered if gate is not None]
    return {
        number: Gate(
            gate.attrs, values(gate.weight), None if gate.bias is None else values(gate.bias)
        )
        for number, gate in gates[1:]
    }
