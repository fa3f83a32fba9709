"""pdscope-bench: how fast a plan prefills and decodes, measured as llama-bench does; how well it
predicts a text."""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdscope.cli._common import command, machine_options, say_fallback
from pdscope.cli._interrupt import leave_at_interrupt
from pdscope.cli.paths import GivenPath
from pdscope.errors import BudgetError

if TYPE_CHECKING:
    from pdscope.dummy_predictor import DummyPredictor
    from pdscope.engine import Engine
    from pdscope.plan import Plan


def _counts(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    parts = value.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of counts such as 512,4096.")
    return tuple(int(part) for part in parts)


@dataclass(frozen=True)
class Result:
    """One test: `seconds` of each repetition for `tokens` tokens."""

    test: str
    tokens: int
    seconds: tuple[float, ...]

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


@command("pdscope-bench")
@click.argument("plan", type=GivenPath())
@click.option(
    "-p",
    "--n-prompt",
    metavar="N[,N...]",
    callback=_counts,
    default="512",
    show_default=True,
    help="Prefill tests: prompt lengths; 0 skips.",
)
@click.option(
    "-n",
    "--n-gen",
    metavar="N[,N...]",
    callback=_counts,
    default="128",
    show_default=True,
    help="Decode tests: tokens one after the other, from an empty context; 0 skips.",
)
@click.option(
    "-r",
    "--repetitions",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Measured runs of each test.",
)
@click.option("--no-warmup", is_flag=True, help="Leave out the unmeasured run before each test.")
@click.option(
    "--perplexity",
    "text",
    metavar="FILE",
    type=GivenPath(),
    help="Measure how well the plan predicts FILE, not its speed: a text, or *.jsonl of texts and "
    "chats.",
)
@click.option(
    "--against",
    type=GivenPath(),
    help="With --perplexity: another plan of the model, such as the bf16 one, to compare with.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=0),
    default=0,
    help="With --perplexity: use the first N tokens of FILE. 0: all.",
)
@click.option(
    "--dummy-predictor",
    metavar="accuracy:P",
    help="For a plan of dummy weights: predict each of the next layer's experts with probability P "
    "(accuracy:P,seed:N: another draw), as recorded in a run beforehand. Results are marked so. "
    "Default: what the plan was compiled with.",
)
@click.option(
    "--save-routing",
    type=GivenPath(dir_okay=False),
    metavar="FILE",
    help="Run the tests once more, unmeasured, and write which experts the gates chose, and which "
    "were predicted, as a routing.npz for pdscope-simulate --trace.",
)
@machine_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a Markdown table.")
def main(
    plan: Path,
    n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...],
    repetitions: int,
    no_warmup: bool,
    machine: dict[str, Any],
    text: Path | None,
    against: Path | None,
    tokens: int,
    dummy_predictor: str | None,
    save_routing: Path | None,
    as_json: bool,
) -> None:
    """Measure the speed of a plan in tokens a second, or its perplexity on a text.

    ppN is the prefill of a prompt of N tokens, tgN the decode of N tokens, both of random tokens
    and without sampling, as llama-bench measures them. Each test has a warm-up run and then -r
    measured ones, of which the table gives mean and standard deviation, and least, median and
    greatest.

    --perplexity predicts every token of a text from those before it, in windows of 512 tokens, and
    prints exp of the mean loss: with --against, what int8 or int4 weights cost.

    \b
    pdscope-bench plan/
    pdscope-bench plan/ -p 128,512 -n 64 -r 5
    pdscope-bench plan/ -p 0 -n 32 --json
    pdscope-bench int4-plan/ --perplexity text.txt --against bf16-plan/
    """
    with leave_at_interrupt():
        from pdscope.engine import load
        from pdscope.plan import Plan

    if text is not None and dummy_predictor is not None:
        raise click.UsageError("--dummy-predictor is of no use to --perplexity.")
    if text is not None:
        _perplexity([p for p in (plan, against) if p], text, tokens, machine, as_json)
        return
    if against is not None or tokens:
        raise click.UsageError("--against and --tokens go with --perplexity FILE.")

    opened = Plan.open(plan)
    dummy = _dummy(opened, dummy_predictor, machine["predictor"])
    tests = [("pp", n) for n in n_prompt if n] + [("tg", n) for n in n_gen if n]
    if not tests:
        raise click.UsageError("Nothing to measure: -p and -n are both 0.")
    for kind, n in tests:
        if n > opened.max_context:
            flag = "-p" if kind == "pp" else "-n"
            raise BudgetError(
                f"{flag} {n}: the plan's context is {opened.max_context} tokens: measure fewer, or "
                "recompile with a larger --max-context"
            )
    with load(
        opened,
        **machine,
    ) as engine:
        say_fallback(engine, machine["device"])
        results = [
            _measure(engine, kind, n, repetitions, not no_warmup, dummy) for kind, n in tests
        ]
        if save_routing is not None:
            _save_routing(engine, tests, save_routing)
        if as_json:
            click.echo(json.dumps([_report(engine, r, dummy) for r in results], indent=2))
            return
        click.echo(_markdown(engine, results))
        if dummy is not None:
            click.echo(f"\nDUMMY PREDICTOR: {dummy.describe()}")


def _dummy(plan: "Plan", asked: str | None, predictor: str) -> "DummyPredictor | None":
    """The dummy predictor that was asked for, here or when the plan was compiled."""
    from pdscope.dummy_predictor import DummyPredictor, check_plan

    if asked is None:
        return None if predictor == "off" else DummyPredictor.of(plan)
    if predictor == "off":
        raise click.UsageError("--dummy-predictor and --predictor off: leave one of them out.")
    chosen = DummyPredictor.parse(asked)
    check_plan(plan)
    return chosen


def _save_routing(engine: "Engine", tests: list[tuple[str, int]], file: Path) -> None:
    from pdscope.routing_trace import Recorder

    recorder = Recorder(engine.plan.model["experts"])
    with recorder.watch(engine.main):
        for kind, n in tests:
            engine.main.reset()
            _runner(engine, kind, n)()
    recorder.trace().save(file)


def _runner(engine: "Engine", kind: str, n: int) -> Callable[[], None]:
    """A test, from an empty context."""
    import numpy as np

    ids = np.random.default_rng(n).integers(0, engine.info.vocab, n, dtype=np.int32)
    tokens = ids.tolist()
    session = engine.main

    def prefill() -> None:
        session.prefill(ids)

    def decode() -> None:
        for token in tokens:
            session.decode(token)

    return prefill if kind == "pp" else decode


def _measure(
    engine: "Engine",
    kind: str,
    n: int,
    repetitions: int,
    warmup: bool,
    dummy: "DummyPredictor | None",
) -> Result:
    from pdscope.dummy_predictor import record

    session = engine.main
    run = _runner(engine, kind, n)
    if dummy is not None:
        session.set_predictions(None)
        session.reset()
        experts = engine.plan.model["experts"]
        session.set_predictions(dummy.predictions(record(session, run), experts))
    if warmup:
        _timed(session.reset, run)
    seconds = tuple(_timed(session.reset, run) for _ in range(repetitions))
    return Result(f"{kind}{n}", n, seconds)


def _timed(before: Callable[[], None], run: Callable[[], None]) -> float:
    before()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _perplexity(
    plans: list[Path], text: Path, limit: int, machine: dict[str, Any], as_json: bool
) -> None:
    """One line a plan; the last plan is what the others are compared with."""
    from pdscope.cli.format import human_bytes, markdown
    from pdscope.engine import load
    from pdscope.errors import InputError
    from pdscope.perplexity import measure, read_windows

    reports: list[dict[str, Any]] = []
    windows = None
    for path in plans:
        with load(path, **machine) as engine:
            own = read_windows(engine, text, limit)
            same = windows is None or [w.tolist() for w in windows] == [w.tolist() for w in own]
            if not same:
                raise InputError(
                    f"{path}: cuts {text} into other tokens than {plans[0]}: give plans of one "
                    "model, with one context length"
                )
            windows = own
            found = measure(engine, windows)
            reports.append(
                {
                    "plan": str(path),
                    "dtype": engine.plan.data["dtype"],
                    "weight_bytes": engine.info.weight_bytes,
                    "isa": engine.info.isa,
                    "tokens": found.tokens,
                    "loss": found.loss,
                    "perplexity": found.value,
                }
            )
    for report in reports:
        report["ratio"] = report["perplexity"] / reports[-1]["perplexity"]
    if as_json:
        click.echo(json.dumps(reports, indent=2))
        return
    rows = [("plan", "dtype", "size", "isa", "tokens", "perplexity", "ratio")]
    for r in reports:
        size, value = human_bytes(r["weight_bytes"]), f"{r['perplexity']:.4f}"
        ratio = f"{r['ratio']:.4f}"
        rows.append((r["plan"], r["dtype"], size, r["isa"], str(r["tokens"]), value, ratio))
    click.echo(markdown(rows))


def _report(engine: "Engine", result: Result, dummy: "DummyPredictor | None") -> dict[str, Any]:
    model, predictor = engine.plan.model, engine.predictor()
    if dummy is not None:
        about = {"state": "dummy", "why": dummy.describe(), "dummy": dummy.as_dict()}
        predictor |= about
    return {
        "test": result.test,
        "tokens": result.tokens,
        "repetitions": len(result.seconds),
        "tokens_per_second": result.spread(),
        "samples_seconds": list(result.seconds),
        "model": model["architecture"],
        "source": model["source_name"],
        "parameters": model["parameters"],
        "dtype": engine.plan.data["dtype"],
        "weight_bytes": engine.info.weight_bytes,
        "isa": engine.info.isa,
        "threads": engine.info.threads,
        "placement": engine.info.placement(),
        "cache_prefetch": engine.cache_prefetch(),
        "predictor": predictor,
        "gpu": engine.gpu(),
        "learner": engine.learner(),
        "plan_hash": engine.plan.plan_hash,
    }


def _markdown(engine: "Engine", results: list[Result]) -> str:
    from pdscope.cli.format import human_bytes, markdown

    model, info = engine.plan.model, engine.info
    same = (
        f"{model['source_name']} {engine.plan.data['dtype']}",
        human_bytes(info.weight_bytes),
        _count(model["parameters"]),
        info.isa,
        str(info.threads),
    )

    def rows() -> Iterator[tuple[str, ...]]:
        yield (
            *("model", "size", "params", "isa", "threads"),
            *("test", "t/s", "min", "median", "max"),
        )
        for result in results:
            s = result.spread()
            mean = f"{s['mean']:.2f} ± {s['stddev']:.2f}"
            rest = (f"{s[key]:.2f}" for key in ("min", "median", "max"))
            yield (*same, result.test, mean, *rest)

    return markdown(list(rows()))


def _count(parameters: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return str(parameters)


if __name__ == "__main__":
    main()
