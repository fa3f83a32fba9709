"""Compile the runtime and the plan's constants into lib/libpdscope.so. May import
pdscope.compiler.build."""

from collections.abc import Mapping
from dataclasses import dataclass

from pdscope.compiler.build import build_library, find_compiler
from pdscope.compiler.passmanager import Workspace, writing

LIBRARY = "lib/libpdscope.so"


@dataclass(frozen=True)
class BuildLibrary:
    """`isa`: the kernel paths to build, best first."""

    isa: tuple[str, ...]

    name = "build"
    reads = ("src/plan.c",)

    def inputs(self) -> Mapping[str, str]:
        return {"isa": " ".join(self.isa), "compiler": find_compiler().identity}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        with writing(workspace.path(LIBRARY)) as path:
            build_library(workspace.read_text("src/plan.c"), path, self.isa)
        return {LIBRARY: None}
