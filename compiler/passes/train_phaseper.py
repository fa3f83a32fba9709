"""Train and choose the predictors of a plan: phaseper/layerNNN.safetensors and phaseper.json.

May import numpy, pdscope.{dummy_predictor,predictor_figures,predictor_html},
pdscope.compiler.{lowered,passmanager,quantise,source} and pdscope.compiler.phaseper; torch comes
with its modules, when the pass runs.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pdscope.compiler.lowered import Layer, Rows, Tensor
from pdscope.compiler.passes.pack_weights import WeightReader
from pdscope.compiler.passmanager import Workspace
from pdscope.compiler.phaseper.store import Gate
from pdscope.compiler.quantise import to_float32
from pdscope.compiler.source import Options
from pdscope.dummy_predictor import DummyPredictor
from pdscope.predictor_figures import JSON
from pdscope.predictor_html import HTML, dummy_page

if TYPE_CHECKING:
    from pdscope.compiler.phaseper.store import Store
    from pdscope.compiler.phaseper.train import TrainOptions


STATES = "training"  # of a training that was cut short


@dataclass(frozen=True)
class TrainPhasePer:
    """`traces`: opens the store; `key`: what the traces were made from; `gates`: gate of every MoE
    layer but the first, by model-layer number, read when the pass runs; `code`: of the compiler;
    `device`: "cpu", "cuda" or "auto"."""

    traces: Callable[[], "Store"] = field(repr=False)
    key: str
    gates: Callable[[], Mapping[int, Gate]] = field(repr=False)
    options: "TrainOptions"
    code: str = field(repr=False)
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
        states = workspace.scratch(STATES), f"{self.key} {self.code}"
        about, files = build_predictors(
            store,
            gates,
            self.options,
            self.device,
            usable_cores(),
            self.start,
            self.advance,
            states,
        )
        written = [workspace.write(path, data) for path, data in files.items()]
        data: dict[str, Any] = {"traces": self.key, **about}
        written.append(workspace.write("phaseper.json", json.dumps(data, indent=1) + "\n"))
        shutil.rmtree(states[0])
        return dict.fromkeys(written)


@dataclass(frozen=True)
class WriteDummyPredictor:
    """phaseper.json of a plan of dummy weights: pdscope/dummy_predictor.py has what it says."""

    text: str
    hidden: int
    experts: int
    top_k: int

    name = "dummy-predictor"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        return {name: str(value) for name, value in vars(self).items()}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        dummy = DummyPredictor.parse(self.text)
        data = dummy.file(self.hidden, self.experts, self.top_k)
        written = [
            workspace.write(JSON, json.dumps(data, indent=1) + "\n"),
            workspace.write(HTML, dummy_page(dummy.describe())),
        ]
        return dict.fromkeys(written)


def train_options(options: Options) -> "TrainOptions":
    """What of the compile's options training depends on."""
    from pdscope.compiler.phaseper.train import TrainOptions

    budget = options.predictor_budget
    return TrainOptions() if budget is None else TrainOptions(size_budget=int(budget))


def check_training(hidden: int, experts: int, options: Options) -> None:
    """Before hours of packing: raises BudgetError where the predictors' budget is too small for a
    model of `experts` a layer, InputError for a device that is not there."""
    from pdscope.compiler.phaseper.build import pick_device
    from pdscope.compiler.phaseper.nets import BLOCKS
    from pdscope.compiler.phaseper.train import fitting_width

    chosen = train_options(options)
    pick_device(options.predictor_device)
    for blocks in BLOCKS.values():  # some layer is in the middle group, whose nets are deep
        fitting_width(hidden, experts, blocks, True, chosen.size_budget // 2, chosen.width)


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
