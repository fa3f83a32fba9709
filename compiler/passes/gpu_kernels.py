"""Compile the GPU's kernels into lib/: a cubin for each architecture, and PTX. May import
pdscope.compiler.{gpu_arch,nvrtc,passmanager,source} and pdscope.plan (names)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdscope.compiler.gpu_arch import Kernels
from pdscope.compiler.nvrtc import compile_kernels
from pdscope.compiler.passmanager import Workspace
from pdscope.plan import kernel_file

if TYPE_CHECKING:
    from pdscope.compiler.source import Progress


@dataclass(frozen=True)
class GpuKernels:
    kernels: Kernels
    progress: "Progress" = field(repr=False, compare=False)

    name = "gpu-kernels"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        """The sources are part of the compiler."""
        return {
            "architectures": " ".join(self.kernels.architectures),
            "nvrtc": self.kernels.nvrtc.identity,
        }

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        """Raises TargetError for faults in a source."""
        self.progress.start("GPU kernels", len(self.kernels.architectures), "images")
        written: dict[str, str | None] = {}
        for arch in self.kernels.architectures:
            image = compile_kernels(self.kernels.nvrtc, arch)
            written[workspace.write(kernel_file(arch), image)] = None
            self.progress.advance(1)
        return written
