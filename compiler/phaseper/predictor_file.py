"""The predictors of a plan: phaseper/layerNNN.safetensors, one for each MoE layer that has a next
one, and phaseper.json.

A layer's file holds for each phase the tensors of compiler/phaseper/nets.py under `PHASE.`, where a
net was chosen, and the tables of the rivals, `PHASE.frequency` [experts] and `PHASE.transition`
[experts, experts]. May import numpy, torch, safetensors, pdscope.errors and
pdscope.compiler.phaseper.*.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from pdscope.compiler.phaseper.metrics import Array
from pdscope.compiler.phaseper.nets import NetShape
from pdscope.compiler.phaseper.rivals import Tables
from pdscope.compiler.phaseper.scores import net_scores
from pdscope.errors import PlanError

FORMAT = 1
JSON = "phaseper.json"
PHASEPER = "phaseper"  # the net's name among the predictors


def layer_file(layer: int) -> str:
    """Relative path of the predictor whose source is MoE layer `layer`."""
    return f"phaseper/layer{layer:03d}.safetensors"


def layer_bytes(phases: Mapping[str, tuple[dict[str, Tensor], Tables]]) -> bytes:
    """A layer's file: for each phase the net's tensors (none where no net was chosen) and the
    tables. Equal tensors give equal bytes."""
    tensors: dict[str, Tensor] = {}
    for phase, (net, tables) in sorted(phases.items()):
        tensors |= {f"{phase}.{name}": t for name, t in net.items()}
        for name, table in asdict(tables).items():
            tensors[f"{phase}.{name}"] = torch.from_numpy(np.ascontiguousarray(table))
    data: bytes = safetensors.torch.save(dict(sorted(tensors.items())), {"format": "phaseper 1"})
    return data


@dataclass(frozen=True)
class Net:
    """One phase's net of a layer, as its file holds it."""

    shape: NetShape
    tensors: dict[str, Tensor]

    def scores(self, a: Array, features: Array) -> Array:
        """Logits [rows, experts], in fp32; see scores.net_scores."""
        return net_scores({n: t.float().numpy() for n, t in self.tensors.items()}, a, features)


class PredictorFiles:
    """The predictors in a plan directory."""

    def __init__(self, folder: Path) -> None:
        """Raises PlanError for a phaseper.json that is missing or of another format."""
        self.folder = folder
        path = folder / JSON
        try:
            self.data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version = self.data["format_version"]
            self._entries = {(e["layer"], e["phase"]): e for e in self.data["layers"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"{path}: cannot be read as predictors ({error}): compile the plan again"
            ) from None
        if version != FORMAT:
            raise PlanError(
                f"{path}: format_version is {version!r}, expected {FORMAT}: compile the plan again"
            )

    def entry(self, layer: int, phase: str) -> dict[str, Any]:
        """What phaseper.json says of a source layer and phase."""
        entry: dict[str, Any] = self._entries[layer, phase]
        return entry

    def net(self, layer: int, phase: str) -> Net | None:
        """None: no net was chosen."""
        about = self.entry(layer, phase)["net"]
        if about is None or not about["stored"]:
            return None
        shape = NetShape(
            hidden=self.data["hidden"],
            experts=self.data["experts"],
            width=about["width"],
            deep=about["deep"],
            blocks=tuple(about["blocks"]),
        )
        return Net(shape, self._read(layer, phase, shape.tensors()))

    def tables(self, layer: int, phase: str) -> Tables:
        n = self.data["experts"]
        found = self._read(layer, phase, {"frequency": (n,), "transition": (n, n)})
        return Tables(**{name: tensor.numpy() for name, tensor in found.items()})

    def _read(
        self, layer: int, phase: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Tensor]:
        path = self.folder / layer_file(layer)
        try:
            with safetensors.safe_open(path, "pt") as file:
                found = {name: file.get_tensor(f"{phase}.{name}") for name in shapes}
        except (OSError, safetensors.SafetensorError) as error:
            raise PlanError(f"{path}: cannot be read ({error}): compile the plan again") from None
        for name, tensor in found.items():
            if tuple(tensor.shape) != shapes[name]:
                raise PlanError(
                    f"{path}: tensor {phase}.{name} has shape {tuple(tensor.shape)}, expected "
                    f"{shapes[name]}: compile the plan again"
                )
        return found
