"""--check-weights: refuse a checkpoint that holds a NaN or an infinity.

May import pdscope.compiler.{checkpoint,passmanager}.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pdscope.compiler.checkpoint import Checkpoint, check_finite
from pdscope.compiler.passmanager import Workspace


@dataclass(frozen=True)
class CheckWeights:
    checkpoint: Checkpoint
    weights_sha256: str

    name = "check-weights"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        return {"weights": self.weights_sha256}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        """Raises ModelError naming the first tensor and index that is not finite."""
        for key in self.checkpoint.tensors:
            check_finite(key, self.checkpoint.read(key))
        return {}
