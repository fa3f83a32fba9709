"""One question to the simulator: a plan or a model, a machine, and what its gates choose.

May import pdscope.{errors,plan,routing_trace} and pdscope.compiler.{cost_source,simulate}.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pdscope.compiler.cost_source import CostSource
from pdscope.compiler.simulate import synthetic
from pdscope.compiler.simulate.executor import Executor, check_fits
from pdscope.compiler.simulate.report import Report, simulate
from pdscope.compiler.simulate.subject import Subject, routing_of
from pdscope.compiler.simulate.timing import Tabled
from pdscope.costs import CostTable
from pdscope.errors import InputError
from pdscope.plan import Plan
from pdscope.routing_trace import RoutingTrace

ACCURACY = 0.9  # of predictions that nobody recorded
_OTHER = 10_007  # seed of the text that experts are placed by, from that of the one that runs


@dataclass(frozen=True)
class Routing:
    """A recorded trace, or the shape of a made one: a prompt of `prompt` tokens and `tokens`
    decoded. accuracy: of predictions; None: as recorded, or ACCURACY."""

    file: Path | None = None
    prompt: int = 512
    tokens: int = 32
    accuracy: float | None = None
    seed: int = 0

    def describe(self) -> str:
        what = f"{self.prompt} + {self.tokens} tokens, made up" if self.file is None else ""
        what = what or str(self.file)
        if self.accuracy is not None:
            return f"{what}; predictions {self.accuracy:.0%} right"
        if self.file is not None:
            return f"{what}; predictions as recorded, else {ACCURACY:.0%} right"
        return f"{what}; predictions {ACCURACY:.0%} right"


@dataclass(frozen=True)
class Study:
    subject: Subject
    table: CostTable

    @classmethod
    def of_plan(cls, path: Path, machine: str | None) -> Self:
        """machine: a hardware description, or a costs.json; None: the plan's own. Raises PlanError
        or InputError."""
        plan = Plan.open(path)
        subject = Subject.of_plan(plan)
        table = CostTable.of_plan(plan) if machine is None else _table(machine, subject)
        if table is None:
            raise InputError(f"{path}: has no costs.json: give --hardware or --costs")
        table.costs()  # says so if it knows no GPU
        return cls(subject, table)

    @classmethod
    def of_model(cls, path: Path, machine: str, policy: str, **options: Any) -> Self:
        """A model's config.json, or its directory. Raises ModelError, BudgetError, InputError."""
        subject = Subject.of_model(path, policy, costs=machine, **options)
        table = _table(machine, subject)
        table.costs()
        return cls(subject, table)

    @property
    def machine(self) -> str:
        """In words."""
        m = self.table.machine
        return f"{m.gpu}, {m.link}, {m.cpu} ({self.table.source})"

    def trace(self, routing: Routing) -> tuple[RoutingTrace, float | None]:
        """What is replayed, and how often its predictions are right, if they were made up. Raises
        InputError for one of another model."""
        if routing.file is None:
            trace = self._made(routing, routing.seed)
        else:
            trace = RoutingTrace.load(routing.file)
            check_fits(self.subject, trace, str(routing.file))
        if routing.accuracy is not None or not trace.predicts:
            accuracy = ACCURACY if routing.accuracy is None else routing.accuracy
            return synthetic.with_predictions(trace, accuracy, routing.seed), accuracy
        return trace, None

    def run(
        self,
        policy: str,
        trace: RoutingTrace,
        routing: Routing,
        hits: float | None = None,
        keep: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> tuple[Report, Executor]:
        """The trace under a policy. hits: how often predictions hit, as phaseper.json would say;
        None: as the plan's says. Experts that stay are a plan's own, where the policy has as
        many, else those that another text, or the trace itself if it was recorded, activates."""
        costs = self.table.costs()
        subject = self.subject
        if not subject.programs or policy != subject.policy:
            known = (
                trace
                if routing.file
                else self._made(
                    replace(routing, prompt=max(512, routing.prompt)), routing.seed + _OTHER
                )
            )
            layers = len(subject.model.layers)
            subject = subject.with_policy(policy, routing_of(known, layers), costs)
        if hits is not None:
            subject = subject.with_hits(hits)
        return simulate(subject, self.timing(), costs, policy, trace, keep, progress)

    def timing(self) -> Tabled:
        model = self.subject.model
        dense = max((x.dense.inter for x in model.layers if x.dense), default=0)
        return Tabled(self.table, self.subject.key, dense, model.vocab)

    def shape(self) -> synthetic.Shape:
        gates = [(i, x.gate.attrs) for i, x in enumerate(self.subject.model.layers) if x.gate]
        kinds = {(g.experts, g.top_k) for _, g in gates}
        if len(kinds) != 1:
            raise InputError(
                "routing: layers with different numbers of experts cannot be made up: give --trace"
            )
        return synthetic.Shape([i for i, _ in gates], *kinds.pop())

    def _made(self, routing: Routing, seed: int) -> RoutingTrace:
        chunk = self.subject.memory.max_rows
        prompts = [routing.prompt]
        if not routing.prompt and routing.tokens:
            prompts = [0]
        skew = synthetic.MEASURED.get(self.subject.model.architecture, synthetic.DEFAULT)
        return synthetic.made(self.shape(), prompts, routing.tokens, chunk, skew, seed)


def _table(machine: str, subject: Subject) -> CostTable:
    source = CostSource.parse(machine)
    if source.measured or source.given is None:
        raise InputError(
            f"{machine}: expected a machine that can be simulated: a hardware description or a "
            "costs.json"
        )
    table = source.table(subject.key)
    assert table is not None
    return table
