"""Write report.html, the plots of a plan's predictors, into the plan.

May import pdscope.{predictor_figures,predictor_html} and pdscope.compiler.passmanager.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pdscope.compiler.passmanager import Workspace
from pdscope.predictor_figures import JSON, TRACES, Predictors
from pdscope.predictor_html import HTML, report


@dataclass(frozen=True)
class PredictorReport:
    name = "predictor-report"
    reads = (JSON, TRACES)

    def inputs(self) -> Mapping[str, str]:
        return {}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        data, traces = (json.loads(workspace.read_text(name)) for name in self.reads)
        found = Predictors.of(workspace.path(JSON), data, traces)
        return {workspace.write(HTML, report(found, found.layers, "")): None}
