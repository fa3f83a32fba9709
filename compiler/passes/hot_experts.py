"""Which experts stay on the GPU, and which are there first: those that save most time, by the
traces of a calibration; and the programs that follow. Writes hot_experts.json, programs/gpu/ and
program.gpu.bin.

May import numpy, pdscope.{costs,ir} and
pdscope.compiler.{lowered,passmanager,phaseper.traces,passes.gpu_programs,passes.plan_gpu}.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.lowered import LoweredModel
from pdscope.compiler.passes.gpu_programs import ExpertSlots, gpu_programs
from pdscope.compiler.passes.plan_gpu import GpuMemory
from pdscope.compiler.passmanager import Workspace
from pdscope.compiler.phaseper.traces import TraceStore
from pdscope.costs import Costs
from pdscope.ir.encode import encode
from pdscope.ir.text import print_program

JSON = "hot_experts.json"
PROGRAMS = "program.gpu.bin"
FOLDER = "programs/gpu"

DECODED = 64  # tokens generated for each prefill of a step's most rows (paper, section 6: 64 out)
SAMPLE = 1024  # decoded tokens that are looked at

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LayerRouting:
    """What is known of one MoE layer: `share` [experts], of prefill's tokens, those that activate
    each; `chosen` [tokens, experts], whether each of some decoded tokens activates it."""

    share: Floats
    chosen: NDArray[np.bool_]


@dataclass(frozen=True)
class Routing:
    """By model layer; None for a dense one."""

    source: str
    layers: tuple[LayerRouting | None, ...]


def uniform(model: LoweredModel) -> Routing:
    """Without traces: every expert alike."""
    layers: list[LayerRouting | None] = []
    for layer in model.layers:
        if layer.gate is None:
            layers.append(None)
            continue
        n, k = layer.gate.attrs.experts, layer.gate.attrs.top_k
        tokens = np.arange(n)[:, None]
        chosen = np.zeros((n, n), np.bool_)
        chosen[tokens, (tokens + np.arange(k)) % n] = True
        layers.append(LayerRouting(np.full(n, k / n), chosen))
    return Routing("uniform", tuple(layers))


def traced(model: LoweredModel, store: TraceStore) -> Routing:
    """As a calibration's text was routed."""
    layers: list[LayerRouting | None] = []
    for i, layer in enumerate(model.layers):
        if layer.gate is None:
            layers.append(None)
            continue
        n = layer.gate.attrs.experts
        filled = [p for p in store.phases if store.rows(p)]
        experts = {p: store.layer(p, i).e for p in filled}
        prefill = experts.get("prefill", experts[filled[0]])
        decode = experts.get("decode", prefill)
        step = max(1, len(decode) // SAMPLE)
        sample = decode[::step][:SAMPLE]
        chosen = np.zeros((len(sample), n), np.bool_)
        chosen[np.arange(len(sample))[:, None], sample] = True
        share = np.bincount(prefill.ravel(), minlength=n) / len(prefill)
        layers.append(LayerRouting(share, chosen))
    return Routing("traces", tuple(layers))


def choose(
    routing: Routing, costs: Costs, slots: tuple[int, int], rows: int, top_k: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The experts of each layer, ascending, that so many slots are best given to: those that stay,
    and of the others those that the ring begins with.

    Greedy: the next one is the expert that saves most, of a prefill of `rows` tokens and DECODED
    decoded ones. In prefill link and CPU share the experts that are not there, so that one less
    saves the product of their times over the sum. In decode a token saves what its layer takes with
    n experts that are not there over what it takes with n - 1. Ties: the layer that has fewest so
    far, then the lowest layer and expert.
    """
    decode = _decode_times(costs, top_k)
    found = {
        i: _Layer(layer, costs, rows, decode)
        for i, layer in enumerate(routing.layers)
        if layer is not None
    }
    have = [0] * len(routing.layers)
    order: list[tuple[int, int]] = []
    for _ in range(min(sum(slots), sum(len(layer.saves) for layer in found.values()))):
        best = max(found, key=lambda i: (found[i].best, -have[i], -i))
        have[best] += 1
        order.append((best, found[best].take()))
    stay, first = (
        tuple(tuple(sorted(e for at, e in part if at == i)) for i in range(len(have)))
        for part in (order[: slots[0]], order[slots[0] :])
    )
    return stay, first


def _decode_times(costs: Costs, top_k: int) -> Floats:
    """ns of a layer's experts, for one token, by how many of them are not on the GPU: the better of
    all ways to share them out between CPU and link."""
    times = [0]
    for n in range(1, top_k + 1):
        times.append(
            min(
                max(_cpu(costs, n - loads), _link(costs, loads))  # one token each
                for loads in range(n + 1)
            )
        )
    return np.array(times, np.float64)


def _cpu(costs: Costs, n: int) -> int:
    return costs.cpu_start + n * costs.cpu_expert.at(1) if n else 0


def _link(costs: Costs, n: int) -> int:
    if not n:
        return 0
    return costs.io_start + n * costs.io_expert + costs.gpu_start + costs.gpu_expert.at(1)


@dataclass
class _Layer:
    """What each expert that has no place yet would save."""

    routing: LayerRouting
    costs: Costs
    rows: int
    decode: Floats
    saves: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.routing.chosen.sum(axis=1)  # experts of each token that are not there
        self.free = np.ones(self.routing.chosen.shape[1], np.bool_)
        self.prefill = np.array([self._prefill(s) for s in self.routing.share])
        self._count()

    @property
    def best(self) -> float:
        return float(self.saves.max()) if self.free.any() else -1.0

    def take(self) -> int:
        expert = int(self.saves.argmax())
        self.free[expert] = False
        self.left = self.left - self.routing.chosen[:, expert]
        self._count()
        return expert

    def _count(self) -> None:
        chosen = self.routing.chosen
        gain = self.decode[self.left] - self.decode[np.maximum(self.left - 1, 0)]
        decode = gain @ chosen / max(1, len(chosen))
        self.saves = np.where(self.free, self.prefill + DECODED * decode, -1.0)

    def _prefill(self, share: float) -> float:
        tokens = share * self.rows
        if tokens <= 0:
            return 0.0
        cpu, link = self.costs.cpu_expert.at(max(1, round(tokens))), self.costs.io_expert
        return min(tokens, 1.0) * cpu * link / max(1, cpu + link)


@dataclass(frozen=True)
class PlaceExperts:
    """`routing` and `costs` are called if the pass runs; `key`: of the traces' content."""

    model: LoweredModel
    memory: GpuMemory
    max_rows: int
    routing: Callable[[], Routing]
    costs: Callable[[], Costs]
    key: str

    name = "place-experts"
    reads = ("graph.txt", "costs.json")

    def inputs(self) -> Mapping[str, str]:
        return {
            "gpu": json.dumps(self.memory.table()),
            "max_rows": str(self.max_rows),
            "routing": self.key,
        }

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        routing = self.routing()
        top_k = max((x.gate.attrs.top_k for x in self.model.layers if x.gate), default=0)
        room = self.memory.resident, self.memory.ring
        resident, first = choose(routing, self.costs(), room, self.max_rows, top_k)
        slots = ExpertSlots(resident, self.memory.ring)
        programs = gpu_programs(self.model, slots, self.max_rows)
        written = [
            workspace.write(f"{FOLDER}/{p.file_stem}.plan", print_program(p)) for p in programs
        ]
        written.append(workspace.write(PROGRAMS, encode(programs)))
        record = {
            "source": routing.source,
            "ring": self.memory.ring,
            "layers": [
                {
                    "layer": i,
                    "resident": list(resident[i]),
                    "first": list(first[i]),
                    "popularity": [round(float(s), 6) for s in layer.share],
                }
                for i, layer in enumerate(routing.layers)
                if layer is not None
            ],
        }
        written.append(workspace.write(JSON, json.dumps(record) + "\n"))
        return dict.fromkeys(written)
