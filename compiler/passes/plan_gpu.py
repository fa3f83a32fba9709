"""Plan a GPU's memory to the byte: what is no expert, one session, and slots for experts with the
rest.

The formulas mirror runtime_c/src/gpu.c (take_weights, open_arena). May import
pdscope.compiler.{decision,lowered,passes.plan_memory} and pdscope.errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdscope.compiler.decision import Policy
from pdscope.compiler.lowered import LoweredModel, ceil_to
from pdscope.compiler.passes.plan_memory import MemoryPlan
from pdscope.errors import BudgetError

ALIGN = 256  # PDS_DEVICE_ALIGN of gpu.h
PREDICT_ROWS = 256  # rows of a prefill step that predict (paper: a sample is enough)
RESERVE = 640 << 20  # of a CUDA context and its kernels, unless said otherwise

#: Policies that keep no fixed experts: all slots are a cache that follows the text.
CACHES = ("fate", "hybrimoe", "lru", "apex")
#: Policies that move nothing.
FIXED = ("static",)
POLICIES = tuple(policy.value for policy in Policy)


@dataclass(frozen=True)
class GpuMemory:
    """One GPU's memory, in bytes, and the slots that fit."""

    cap: int  # --gpu-mem
    reserve: int  # of the driver: context and kernels
    files: Mapping[str, int]  # what of each weight file lies there, but for experts
    scratch: int
    kv: int
    rows: int  # token, position, sequence and row with logits of a step
    tables: int  # KV block tables
    expert: int  # one slot
    resident: int  # slots of experts that stay
    ring: int  # slots of those that come and go
    experts: int  # of the model

    @property
    def weights(self) -> int:
        return sum(ceil_to(size, ALIGN) for size in self.files.values())

    @property
    def session(self) -> int:
        """One session with the plan's whole context."""
        parts = (self.scratch, self.kv, self.rows)
        return sum(ceil_to(p, ALIGN) for p in parts) + ceil_to(self.tables, ALIGN)

    @property
    def slots(self) -> int:
        return self.resident + self.ring

    @property
    def used(self) -> int:
        return self.reserve + self.weights + self.session + self.slots * self.expert

    def table(self) -> dict[str, Any]:
        """The `gpu` entry of memory.json."""
        return {
            "cap_bytes": self.cap,
            "reserve_bytes": self.reserve,
            "weights": [{"file": path, "bytes": size} for path, size in self.files.items() if size],
            "weight_bytes": self.weights,
            "session": {
                "scratch_bytes": self.scratch,
                "kv_bytes": self.kv,
                "rows_bytes": self.rows,
                "table_bytes": self.tables,
                "total_bytes": self.session,
            },
            "expert_bytes": self.expert,
            "resident_experts": self.resident,
            "ring_slots": self.ring,
            "slot_bytes": self.slots * self.expert,
            "experts": self.experts,
            "total_bytes": self.used,
            "left_bytes": self.cap - self.used,
        }


def memory_table(memory: MemoryPlan, gpu: GpuMemory | None) -> dict[str, Any]:
    """memory.json."""
    return {**memory.table(), **({} if gpu is None else {"gpu": gpu.table()})}


@dataclass(frozen=True)
class PlanGpu:
    """Options: bytes of GPU memory that the process may take, how many of them the driver itself
    takes, and the policy, which says how slots are used."""

    mem: int
    reserve: int
    policy: str

    def run(self, model: LoweredModel, memory: MemoryPlan) -> GpuMemory:
        """Raises BudgetError, naming the smallest that would do, if what is no expert does not
        fit."""
        files = {f.path: self._file_bytes(model, i) for i, f in enumerate(model.files)}
        blocks = ceil_to(memory.max_context, memory.kv_block) // memory.kv_block
        gates = [layer.gate.attrs for layer in model.layers if layer.gate]
        plan = GpuMemory(
            cap=self.mem,
            reserve=self.reserve,
            files=files,
            scratch=memory.scratch_bytes,
            kv=blocks * memory.kv_block_bytes,
            rows=16 * memory.max_rows,
            tables=4 * blocks,
            expert=max((x.experts.gate_up.stride for x in model.layers if x.experts), default=0),
            resident=0,
            ring=0,
            experts=sum(g.experts for g in gates),
        )
        if plan.used > self.mem:
            raise BudgetError(
                f"--gpu-mem {_size(self.mem)}: what is no expert takes {_size(plan.used)} "
                f"({_size(plan.reserve)} for the driver, {_size(plan.weights)} of weights, "
                f"{_size(plan.session)} for a session of {memory.max_context} tokens): raise it to "
                f"{plan.used} bytes at least, or lower --max-context or --max-rows"
            )
        if not gates or not plan.expert:
            return plan
        slots = min((self.mem - plan.used) // plan.expert, plan.experts)
        top_k = max(g.top_k for g in gates)
        ring = self._ring(slots, plan.experts, top_k)
        return GpuMemory(**{**vars(plan), "ring": ring, "resident": slots - ring})

    def _ring(self, slots: int, experts: int, top_k: int) -> int:
        """Slots that are not given to fixed experts. The default's are three quarters, a cache that
        follows the text. Others that come and go have two, to load into one while the other is
        read, and as many prefetches as a token has experts; but no more than half."""
        if slots < 2 or slots == experts or self.policy in FIXED:
            return 0
        if self.policy in CACHES:
            return slots
        if self.policy == Policy.ADAPTSCHED.value:
            return slots - slots // 4
        return max(2, min(2 + top_k, slots // 2))

    @staticmethod
    def _file_bytes(model: LoweredModel, index: int) -> int:
        """The beginning of a weight file, up to its experts; the CPU embeds (gpu.c)."""
        if index == model.embed.file and index != model.lm_head.file:
            return 0
        for layer in model.layers:
            if layer.experts and layer.experts.gate_up.file == index:
                return layer.experts.gate_up.offset
        return model.files[index].bytes


def _size(count: int) -> str:
    if count < 2**30:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**30:.2f} GiB"
