"""Write src/plan.c, the constants of the plan as C. May import
pdscope.compiler.{emit,lowered,passmanager}."""

from collections.abc import Mapping
from dataclasses import dataclass

import pdscope
from pdscope.compiler.emit import plan_source
from pdscope.compiler.lowered import LoweredModel
from pdscope.compiler.passes.plan_memory import MemoryPlan
from pdscope.compiler.passmanager import Workspace


@dataclass(frozen=True)
class EmitSource:
    model: LoweredModel
    memory: MemoryPlan
    plan_hash: str
    features: tuple[str, ...]
    format_version: int

    name = "emit"
    reads = ("graph.txt", "program.bin", "memory.json")

    def inputs(self) -> Mapping[str, str]:
        return {"plan_hash": self.plan_hash, "features": " ".join(self.features)}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        text = plan_source(
            self.model,
            self.memory,
            self.memory.program_bytes,
            self.plan_hash,
            self.features,
            f"pdscope {pdscope.__version__}",
            self.format_version,
        )
        return {workspace.write("src/plan.c", text): None}
