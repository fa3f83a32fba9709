"""The first passes: trace the model into graph.txt, and check that its leaf modules compute what
the ops mean.

May import pdscope.ir and pdscope.compiler.{leaf_check,passmanager}; torch and transformers come
with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from pdscope.compiler.leaf_check import check_leaf_semantics
from pdscope.compiler.passmanager import Workspace
from pdscope.ir.graph_text import print_graph

if TYPE_CHECKING:
    from pdscope.compiler.source import Model


def _libraries() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers")}


@dataclass(frozen=True)
class TraceModel:
    source: "Model"
    config_sha256: str

    name = "trace"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        return {"config": self.config_sha256, **_libraries()}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        return {workspace.write("graph.txt", print_graph(self.source.traced.graph)): None}


@dataclass(frozen=True)
class CheckSemantics:
    """Runs a scaled-down random model of this configuration in transformers and as our graph; they
    must agree."""

    source: "Model"
    config_sha256: str

    name = "check-semantics"
    reads = ("graph.txt",)

    def inputs(self) -> Mapping[str, str]:
        return {"config": self.config_sha256, **_libraries()}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        check_leaf_semantics(self.source.traced.config)
        return {}
