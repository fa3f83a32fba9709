"""What pdscope-bench runs and times: tests, each on its own or policy against policy.

May import numpy, click and pdscope.{dummy_predictor,dummy_routing,routing_records,routing_trace};
pdscope.engine for its types alone.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdscope.dummy_predictor import DummyPredictor, record
from pdscope.dummy_routing import DummyRouting, distinct
from pdscope.routing_records import moe_layers
from pdscope.routing_trace import Recorder

if TYPE_CHECKING:
    from pdscope.engine import Engine

Test = tuple[str, int]  # "pp" or "tg", and tokens


@dataclass(frozen=True)
class Result:
    """One test: `seconds` of each repetition for `tokens` tokens."""

    test: str
    tokens: int
    seconds: tuple[float, ...]
    distinct: list[int] | None = None  # experts that each layer activated; None: not recorded
    policy: str | None = None  # of several; then also
    gpu: dict[str, Any] | None = None  # Engine.gpu() behind its last run, `link`: of measured runs
    ledger: list[dict[str, int]] | None = None  # of each layer in measured runs

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens a second."""
        return tuple(self.tokens / s for s in self.seconds)

    def spread(self) -> dict[str, float]:
        rates = self.rates
        return {
            "mean": statistics.fmean(rates),
            "stddev": statistics.stdev(rates) if len(rates) > 1 else 0.0,
            "min": min(rates),
            "median": statistics.median(rates),
            "max": max(rates),
        }


@dataclass(frozen=True)
class Bench:
    """How tests are run on an engine."""

    engine: "Engine"
    repetitions: int
    warmup: bool
    dummy: DummyPredictor | None = None
    routing: DummyRouting | None = None
    routes: NDArray[np.int32] | None = field(default=None, repr=False)  # what `routing` gives

    def alone(self, tests: Sequence[Test]) -> Iterator[Result]:
        """Each test, by the policy that the engine has."""
        for kind, n in tests:
            run, activated = self._prepared(kind, n)
            if self.warmup:
                self._timed(run)
            seconds = tuple(self._timed(run) for _ in range(self.repetitions))
            yield Result(f"{kind}{n}", n, seconds, activated)

    def compared(self, tests: Sequence[Test], policies: Sequence[str]) -> Iterator[Result]:
        """Each test by each policy, same tokens and routing. In each repetition all policies have
        their turn, in an order that begins with another one each time, so that whatever drifts
        meets all. A change of policy forgets what was learned, so that the warm-up run comes before
        each measured one."""
        engine = self.engine
        for kind, n in tests:
            run, activated = self._prepared(kind, n)
            seconds: dict[str, list[float]] = {policy: [] for policy in policies}
            moved: dict[str, list[dict[str, int]]] = {}
            gpu: dict[str, dict[str, Any]] = {}
            for turn in range(self.repetitions):
                first = turn % len(policies)
                for policy in (*policies[first:], *policies[:first]):
                    engine.set_policy(policy)
                    if self.warmup:
                        self._timed(run)
                    before = engine.ledger()
                    seconds[policy].append(self._timed(run))
                    took = _combined(engine.ledger(), before, -1)
                    moved[policy] = _combined(moved[policy], took) if policy in moved else took
                    gpu[policy] = engine.gpu()
            for policy in policies:
                layers = moved[policy]
                link = {name: sum(layer[name] for layer in layers) for name in layers[0]}
                about = gpu[policy] | {"link": link}
                times = tuple(seconds[policy])
                yield Result(f"{kind}{n}", n, times, activated, policy, about, layers)

    def save_routing(self, tests: Sequence[Test], file: Path) -> None:
        """Runs the tests once more and writes their routing. Raises OSError, InputError."""
        session = self.engine.main
        recorder = Recorder(self.engine.plan.model["experts"])
        with recorder.watch(session):
            for kind, n in tests:
                session.reset()
                self._runner(kind, n)()
        recorder.trace().save(file)

    def _prepared(self, kind: str, n: int) -> tuple[Callable[[], None], list[int] | None]:
        """The test, with routes and predictions set, and the experts that each layer activates in
        it, which are looked for where they may be few: with dummy weights or routing."""
        session, plan = self.engine.main, self.engine.plan
        run = self._runner(kind, n)
        activated = None
        if self.dummy is not None:
            session.set_predictions(None)
        if self.routes is not None:
            session.set_routes(self.routes)
            activated = distinct(self.routes[:n], moe_layers(plan))
        recorded = None
        wanted = activated is None and plan.model["load_format"] == "dummy"
        if self.dummy is not None or wanted:
            session.reset()
            recorded = record(session, run)
            if activated is None and len(recorded):
                activated = distinct(recorded, moe_layers(plan))
        if self.dummy is not None:
            assert recorded is not None
            session.set_predictions(self.dummy.predictions(recorded, plan.model["experts"]))
        return run, activated

    def _runner(self, kind: str, n: int) -> Callable[[], None]:
        """A test, from an empty context."""
        ids = np.random.default_rng(n).integers(0, self.engine.info.vocab, n, dtype=np.int32)
        tokens = ids.tolist()
        session = self.engine.main

        def prefill() -> None:
            session.prefill(ids)

        def decode() -> None:
            for token in tokens:
                session.decode(token)

        return prefill if kind == "pp" else decode

    def _timed(self, run: Callable[[], None]) -> float:
        self.engine.main.reset()
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin


def _combined(
    ledger: list[dict[str, int]], other: list[dict[str, int]], sign: int = 1
) -> list[dict[str, int]]:
    """Layer by layer, entry by entry: ledger + sign * other."""
    return [
        {name: value + sign * b[name] for name, value in a.items()}
        for a, b in zip(ledger, other, strict=True)
    ]
