"""What is simulated: a model's programs for a GPU, and of the model what times depend on.

May import pdscope.{errors,placement,plan}, pdscope.ir, pdscope.compiler.{costs,lowered} and the
passes that read no weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.lowered import LoweredModel, ceil_to
from pdscope.compiler.passes.gpu_programs import ExpertSlots, gpu_programs
from pdscope.compiler.passes.hot_experts import PROGRAMS, choose
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.passes.plan_gpu import PREDICT_ROWS, GpuMemory, PlanGpu
from pdscope.compiler.passes.plan_memory import MemoryPlan, PlanMemory
from pdscope.errors import InputError
from pdscope.ir.encode import decode
from pdscope.ir.graph_text import parse_graph
from pdscope.ir.isa import Kind, Phase, SlotKind
from pdscope.ir.program import Program
from pdscope.placement import hit_rates, popularity_of
from pdscope.plan import Plan


@dataclass(frozen=True)
class Subject:
    """popularity [layers, experts], hits [layers, phases]: as decisions read them."""

    name: str
    model: LoweredModel
    memory: MemoryPlan
    gpu: GpuMemory
    policy: str
    programs: tuple[Program, ...]
    popularity: NDArray[np.uint32]
    hits: NDArray[np.uint32]

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
            popularity_of(plan),
            hit_rates(plan),
        )

    def with_policy(self, policy: str) -> "Subject":
        """As if the model were compiled for another policy, within the same memory: how many slots
        hold fixed experts, and who is in them, is the policy's."""
        if policy == self.policy:
            return self
        gpu = PlanGpu(self.gpu.cap, self.gpu.reserve, policy).run(self.model, self.memory)
        return replace(
            self, gpu=gpu, policy=policy, programs=self._programs_of(gpu, self.popularity)
        )

    def _programs_of(self, gpu: GpuMemory, popularity: NDArray[np.uint32]) -> tuple[Program, ...]:
        shares = [
            popularity[i, : x.gate.attrs.experts].astype(np.float64) if x.gate else None
            for i, x in enumerate(self.model.layers)
        ]
        slots = ExpertSlots(choose(shares, gpu.resident), gpu.ring)
        return tuple(gpu_programs(self.model, slots, self.memory.max_rows))

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
