"""Which experts stay on the GPU: hot_experts.json, and the programs that follow from it.

May import numpy, pdscope.compiler.{lowered,passmanager,passes.gpu_programs,passes.plan_gpu} and
pdscope.ir.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.lowered import LoweredModel
from pdscope.compiler.passes.gpu_programs import ExpertSlots, gpu_programs
from pdscope.compiler.passes.plan_gpu import GpuMemory
from pdscope.compiler.passmanager import Workspace
from pdscope.ir.encode import encode
from pdscope.ir.text import print_program

JSON = "hot_experts.json"
PROGRAMS = "program.gpu.bin"
FOLDER = "programs/gpu"

#: Share of tokens that activate each expert, [experts] by layer; None for a dense layer.
Popularity = Sequence[NDArray[np.float64] | None]


def uniform(model: LoweredModel) -> Popularity:
    """What is known of routing without traces."""
    return [
        np.full(x.gate.attrs.experts, x.gate.attrs.top_k / x.gate.attrs.experts) if x.gate else None
        for x in model.layers
    ]


def choose(popularity: Popularity, slots: int) -> tuple[tuple[int, ...], ...]:
    """The experts of each layer, ascending, that `slots` slots are best given to: the most often
    activated ones; of equally popular ones those of the layer that has fewest so far."""
    order = []
    for layer, shares in enumerate(popularity):
        if shares is None:
            continue
        ranked = np.argsort(-shares, kind="stable")
        order += [(-shares[e], rank, layer, int(e)) for rank, e in enumerate(ranked)]
    chosen: list[list[int]] = [[] for _ in popularity]
    for _, _, layer, expert in sorted(order)[:slots]:
        chosen[layer].append(expert)
    return tuple(tuple(sorted(c)) for c in chosen)


@dataclass(frozen=True)
class PlaceExperts:
    """`popularity`, called if the pass runs, and `source`, the name of where it comes from;
    `key`: of its content."""

    model: LoweredModel
    memory: GpuMemory
    max_rows: int
    popularity: Callable[[], Popularity]
    source: str
    key: str

    name = "place-experts"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        return {
            "gpu": json.dumps(self.memory.table()),
            "max_rows": str(self.max_rows),
            "popularity": f"{self.source} {self.key}",
            "model": f"{self.model.architecture} {len(self.model.layers)}",
        }

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        popularity = self.popularity()
        resident = choose(popularity, self.memory.resident)
        programs = gpu_programs(self.model, ExpertSlots(resident, self.memory.ring), self.max_rows)
        written = [
            workspace.write(f"{FOLDER}/{p.file_stem}.plan", print_program(p)) for p in programs
        ]
        written.append(workspace.write(PROGRAMS, encode(programs)))
        record = {
            "source": self.source,
            "ring": self.memory.ring,
            "layers": [
                {
                    "layer": i,
                    "resident": list(resident[i]),
                    "popularity": [round(float(s), 6) for s in shares],
                }
                for i, shares in enumerate(popularity)
                if shares is not None
            ],
        }
        written.append(workspace.write(JSON, json.dumps(record) + "\n"))
        return dict.fromkeys(written)
