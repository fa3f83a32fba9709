"""Compile the GPU's kernels into lib/: a cubin for each architecture, and PTX. May import
pdscope.compiler.{gpu_arch,nvrtc,passmanager,source} and pdscope.plan (names)."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from threading import Event
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
        compiled = self._compile()
        return {workspace.write(kernel_file(arch), compiled[arch]): None for arch in compiled}

    def _compile(self) -> dict[str, bytes]:
        """All images, each in a thread: they take seconds to a minute."""
        stop = Event()
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            jobs = {
                arch: pool.submit(compile_kernels, self.kernels.nvrtc, arch, stop)
                for arch in self.kernels.architectures
            }
            try:
                for job in as_completed(jobs.values()):
                    job.result()
                    self.progress.advance(1)
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return {arch: job.result() for arch, job in jobs.items()}
