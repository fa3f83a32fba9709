"""What is simulated: a model's programs for a GPU, and of the model what times depend on.

May import pdscope.{errors,placement,plan}, pdscope.ir, pdscope.compiler.{costs,lowered} and the
passes that read no weights.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler import target as targets
from pdscope.compiler.costs import ModelKey, model_key
from pdscope.compiler.lowered import LoweredModel, ceil_to
from pdscope.compiler.passes.gpu_programs import ExpertSlots, gpu_programs
from pdscope.compiler.passes.hot_experts import (
    PROGRAMS,
    SAMPLE,
    LayerRouting,
    Routing,
    choose,
)
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.passes.plan_gpu import PREDICT_ROWS, GpuMemory, PlanGpu
from pdscope.compiler.passes.plan_memory import MemoryPlan, PlanMemory
from pdscope.compiler.passmanager import Workspace
from pdscope.compiler.pipeline import Pipeline
from pdscope.compiler.source import Model, Options, Silent
from pdscope.costs import Costs
from pdscope.errors import InputError
from pdscope.ir.encode import decode
from pdscope.ir.graph_text import parse_graph
from pdscope.ir.isa import PHASE_ROWS, Kind, Phase, SlotKind
from pdscope.ir.program import Program
from pdscope.placement import Q16, draft_thresholds, first_of, hit_rates, popularity_of
from pdscope.plan import PHASES, Plan
from pdscope.routing_trace import RoutingTrace


@dataclass(frozen=True)
class Subject:
    """first: experts that the ring begins with, by layer; popularity [layers, experts], hits and
    sure [layers, phases]: as decisions read them (pds_schedule of pdscope.h)."""

    name: str
    model: LoweredModel
    memory: MemoryPlan
    gpu: GpuMemory
    policy: str
    programs: tuple[Program, ...]
    first: tuple[tuple[int, ...], ...]
    popularity: NDArray[np.uint32]
    hits: NDArray[np.uint32]
    sure: NDArray[np.uint32]

    @classmethod
    def of_plan(cls, plan: Plan) -> "Subject":
        """A plan directory, with the programs of its program.gpu.bin. Reads no weights.

        Raises InputError for a plan without a GPU, PlanError for one that is damaged.
        """
        data, said = plan.data, plan.gpu
        if said is None or PROGRAMS not in plan.files:
            raise InputError(
                f"{plan.path}: compiled for the CPU alone, and the simulator executes a GPU's "
                "programs: compile it with --gpu-mem and --costs"
            )
        graph = parse_graph(plan.read_text("graph.txt"))
        model = Lower(data["dtype"], data["max_context"], data["predictor"]).run(graph)
        memory = PlanMemory(data["max_rows"], PREDICT_ROWS).run(model)
        return cls(
            plan.path.name,
            model,
            memory,
            PlanGpu(said["mem"], said["reserve"], said["policy"]).run(model, memory),
            said["policy"],
            tuple(decode(plan.read_bytes(PROGRAMS))),
            first_of(plan),
            popularity_of(plan),
            hit_rates(plan),
            draft_thresholds(plan),
        )

    @classmethod
    def of_model(cls, path: Path, policy: str, **options: Any) -> "Subject":
        """As if the model of this config.json, or of the directory with it, were compiled with
        these options (gpu_mem and costs among them). Reads no weights. Its slots are nobody's yet:
        see `placed`.

        Raises InputError, ModelError or BudgetError.
        """
        source = Model(path, Options(load_format="dummy", policy=policy, **options), Silent())
        with tempfile.TemporaryDirectory(prefix="pdscope-") as scratch:
            pipeline = Pipeline(
                source, targets.resolve("any"), Workspace(Path(scratch)), lambda _: None
            )
            memory = pipeline.analyse()
        model, gpu = pipeline.lowered, pipeline.gpu
        if gpu is None:
            raise InputError(f"{path}: expected gpu_mem, the memory of the GPU: give --gpu-mem")
        experts = max((x.gate.attrs.experts for x in model.layers if x.gate), default=1)
        layers = len(model.layers)
        return cls(
            path.resolve().parent.name if path.is_file() else path.resolve().name,
            *(model, memory, gpu, policy, (), ((),) * layers),
            np.zeros((layers, experts), np.uint32),
            np.full((layers, len(PHASES)), Q16 // 2, np.uint32),
            np.zeros((layers, len(PHASES)), np.uint32),
        )

    @property
    def key(self) -> ModelKey:
        """Whose costs it needs."""
        return model_key(self.model)

    def with_policy(self, policy: str, routing: Routing, costs: Costs) -> "Subject":
        """As if the plan were compiled for another policy, within the same memory. Where that has
        as many slots for experts that stay, the same ones do."""
        gpu = PlanGpu(self.gpu.cap, self.gpu.reserve, policy).run(self.model, self.memory)
        if self.programs and gpu.resident == self.gpu.resident:
            return replace(self, policy=policy)
        placed = self.placed(policy, routing, costs)
        return replace(placed, popularity=self.popularity) if self.programs else placed

    def placed(self, policy: str, routing: Routing, costs: Costs) -> "Subject":
        """Compiled for `policy` and a text that is routed like `routing`."""
        gpu = PlanGpu(self.gpu.cap, self.gpu.reserve, policy).run(self.model, self.memory)
        top_k = max((x.gate.attrs.top_k for x in self.model.layers if x.gate), default=0)
        rows = self.memory.max_rows
        resident, first = choose(routing, costs, (gpu.resident, gpu.ring), rows, top_k)
        programs = gpu_programs(self.model, ExpertSlots(resident, gpu.ring), rows)
        popularity = np.zeros_like(self.popularity)
        for i, layer in enumerate(routing.layers):
            if layer is not None:
                popularity[i, : len(layer.share)] = np.round(layer.share * Q16)
        return replace(
            self,
            gpu=gpu,
            policy=policy,
            programs=tuple(programs),
            first=first,
            popularity=popularity,
        )

    def with_hits(self, accuracy: float) -> "Subject":
        """As if phaseper.json said that predictions hit so often, from 0 to 1."""
        return replace(self, hits=np.full_like(self.hits, round(accuracy * Q16)))

    # --- what the executor asks ---

    def phase_of(self, rows: int) -> Phase:
        """Raises InputError for a step that is too large."""
        for phase, programs in self.sequences.items():
            if programs[0].rows_min <= rows <= programs[0].rows_max:
                return phase
        raise InputError(
            f"{self.name}: a step of {rows} rows, but the plan takes at most "
            f"{self.memory.max_rows}: record it with this plan, or recompile with a larger "
            "--max-rows"
        )

    @cached_property
    def sequences(self) -> dict[Phase, tuple[Program, ...]]:
        """By phase: prologue, layers, epilogue."""
        found: dict[Phase, tuple[Program, ...]] = {}
        for phase in Phase:
            if programs := tuple(p for p in self.programs if p.phase is phase):
                found[phase] = programs
        return found

    @cached_property
    def resident(self) -> tuple[tuple[int, ...], ...]:
        """Experts that stay on the GPU, by layer."""
        return tuple(_slots(p, SlotKind.RESIDENT) for p in self._layers)

    @cached_property
    def ring(self) -> int:
        """Slots of experts that come and go."""
        sizes = [s.size for p in self._layers for s in p.slots if s.kind is SlotKind.CACHE]
        return sizes[0] if sizes else 0

    @property
    def _layers(self) -> Sequence[Program]:
        first = next(iter(self.sequences.values()))
        return [p for p in first if p.kind in (Kind.DENSE, Kind.MOE)]

    @cached_property
    def expert_bytes(self) -> tuple[int, ...]:
        """Of one expert of each layer; 0 for a dense one."""
        return tuple(x.experts.gate_up.stride if x.experts else 0 for x in self.model.layers)

    @cached_property
    def shared(self) -> tuple[bool, ...]:
        return tuple(x.shared is not None for x in self.model.layers)

    @property
    def hidden(self) -> int:
        """Elements of a row, padding included."""
        return ceil_to(self.model.hidden, 32)

    @property
    def act_bytes(self) -> int:
        return self.model.act_bytes

    @property
    def table_bytes(self) -> int:
        """Of one sequence's block table."""
        return 4 * (ceil_to(self.memory.max_context, self.memory.kv_block) // self.memory.kv_block)


def _slots(program: Program, kind: SlotKind) -> tuple[int, ...]:
    return next((s.experts for s in program.slots if s.kind is kind), ())


def routing_of(trace: RoutingTrace, layers: int) -> Routing:
    """What a trace, taken for a calibration's, says about who should stay on the GPU."""
    prefill = np.repeat(trace.rows > PHASE_ROWS[Phase.BATCH][1], trace.rows)
    found: list[LayerRouting | None] = [None] * layers
    for i, layer in enumerate(trace.layers.tolist()):
        ids = trace.ids[i]
        many, few = (ids[rows] if rows.any() else ids for rows in (prefill, ~prefill))
        few = few[:: max(1, len(few) // SAMPLE)][:SAMPLE]
        chosen = np.zeros((len(few), trace.experts), np.bool_)
        chosen[np.arange(len(few))[:, None], few] = True
        share = np.bincount(many.ravel(), minlength=trace.experts) / len(many)
        found[layer] = LayerRouting(share, chosen)
    return Routing("routing trace", tuple(found))
