"""pdscope-bench: how fast a plan prefills and decodes, measured as llama-bench does; how well it
predicts a text."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdscope.cli._common import POLICIES, command, machine_options, say_fallback
from pdscope.cli._interrupt import leave_at_interrupt
from pdscope.cli.paths import GivenPath
from pdscope.errors import BudgetError, TargetError

if TYPE_CHECKING:
    from pdscope.cli.bench_runs import Bench, Result, Test
    from pdscope.dummy_predictor import DummyPredictor
    from pdscope.dummy_routing import DummyRouting
    from pdscope.engine import Engine
    from pdscope.plan import Plan

REFERENCE = "adaptsched"  # what --policy all compares with
MOCK = "PDScope mock GPU"  # what the mock driver calls its GPU


def _counts(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, ...]:
    parts = value.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of counts such as 512,4096.")
    return tuple(int(part) for part in parts)


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
    "--load-format",
    type=click.Choice(("auto", "dummy")),
    default="auto",
    help="dummy: for a plan of dummy weights: make them up in memory, and read no weight file. "
    "Results are marked so.",
)
@click.option(
    "--dummy-routing",
    metavar="zipf:S|uniform|trace:FILE",
    help="Replace what gates choose by made-up routes: zipf:S: skewed by rank^-S, with topics that "
    "last from token to token; uniform; trace:FILE: those of a routing.npz. zipf:S,seed:N: another "
    "draw. Results are marked so.",
)
@click.option(
    "--save-routing",
    type=GivenPath(dir_okay=False),
    metavar="FILE",
    help="Run the tests once more, unmeasured, and write which experts the gates chose, and which "
    "were predicted, as a routing.npz for pdscope-simulate --trace.",
)
@partial(machine_options, policies=(*POLICIES, "all"))
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
    load_format: str,
    dummy_routing: str | None,
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

    --policy all runs every policy of a plan with a GPU in turn, on the same weights, tokens and
    routes, and prints how each compares with adaptsched. With dummy weights or routing the experts
    that a test activates are counted, as few of them make a model look fast.

    \b
    pdscope-bench plan/
    pdscope-bench plan/ -p 128,512 -n 64 -r 5
    pdscope-bench plan/ -p 0 -n 32 --json
    pdscope-bench gpu-plan/ --load-format dummy --dummy-routing zipf:0.8 --policy all
    pdscope-bench int4-plan/ --perplexity text.txt --against bf16-plan/
    """
    with leave_at_interrupt():
        from pdscope.cli.bench_runs import Bench
        from pdscope.engine import load
        from pdscope.plan import Plan

    if load_format == "dummy" and machine["weights"] not in (None, "dummy"):
        raise click.UsageError(f"--load-format dummy and --weights {machine['weights']}.")
    given = {
        "--dummy-predictor": dummy_predictor is not None,
        "--dummy-routing": dummy_routing is not None,
        "--load-format dummy": load_format == "dummy",
        "--policy all": machine["policy"] == "all",
    }
    if text is not None and (useless := [name for name, there in given.items() if there]):
        raise click.UsageError(f"{useless[0]} is of no use to --perplexity.")
    if load_format == "dummy":
        machine["weights"] = "dummy"
    if text is not None:
        _perplexity([p for p in (plan, against) if p], text, tokens, machine, as_json)
        return
    if against is not None or tokens:
        raise click.UsageError("--against and --tokens go with --perplexity FILE.")

    opened = Plan.open(plan)
    all_policies = machine["policy"] == "all"
    if all_policies:
        if opened.gpu is None or machine["device"] == "cpu":
            raise click.UsageError("--policy all compares what uses a GPU: give a plan with one.")
        machine["policy"] = None
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
    routing = _routing(dummy_routing)
    longest = max(n for _, n in tests)
    routes = None if routing is None else routing.routes(opened, longest)
    with load(
        opened,
        **machine,
    ) as engine:
        bench = Bench(engine, repetitions, not no_warmup, dummy, routing, routes)
        if all_policies:
            results = _all_policies(bench, tests)
        else:
            say_fallback(engine, machine["device"])
            results = list(bench.alone(tests))
        if save_routing is not None:
            bench.save_routing(tests, save_routing)
        if as_json:
            click.echo(json.dumps([_report(bench, r, results) for r in results], indent=2))
            return
        click.echo(_markdown(engine, results))
        for line in _marks(bench, results):
            click.echo(f"\n{line}")


def _routing(asked: str | None) -> "DummyRouting | None":
    from pdscope.dummy_routing import DummyRouting

    return None if asked is None else DummyRouting.parse(asked)


def _all_policies(bench: "Bench", tests: "list[Test]") -> "list[Result]":
    """Raises TargetError where no GPU can be used."""
    engine = bench.engine
    about = engine.gpu()
    if about["device"] != "gpu":
        raise TargetError(f"--policy all needs a GPU, or the mock driver: {about['why']}")
    results = list(bench.compared(tests, POLICIES))
    engine.set_policy(REFERENCE)  # for what follows
    return results


def _marks(bench: "Bench", results: "list[Result]") -> Iterator[str]:
    """Lines that say what of the results is made up."""
    from pdscope.cli.format import table

    model = bench.engine.plan.model
    if model["load_format"] == "dummy":
        yield "DUMMY WEIGHTS: random values, not a model's"
    if bench.engine.gpu().get("info", {}).get("name") == MOCK:
        yield "MOCK GPU: its kernels run on the CPU, its times are settings (docs/mock-driver.md)"
    if bench.routing is not None:
        yield f"DUMMY ROUTING: {bench.routing.describe()}"
    if bench.dummy is not None:
        yield f"DUMMY PREDICTOR: {bench.dummy.describe()}"
    counted = {r.test: r.distinct for r in results if r.distinct}
    if counted:
        rows = [("distinct experts a layer", "mean", "least", "most", "of")]
        for test, each in counted.items():
            numbers = (f"{sum(each) / len(each):.1f}", str(min(each)), str(max(each)))
            rows.append((test, *numbers, str(model["experts"])))
        yield table(rows)


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


def _ratio(result: "Result", results: "list[Result]") -> float | None:
    """Of its mean speed to adaptsched's in the same test; None: there is but one policy."""
    for other in results:
        if other.test == result.test and other.policy == REFERENCE:
            return result.spread()["mean"] / other.spread()["mean"]
    return None


def _report(bench: "Bench", result: "Result", results: "list[Result]") -> dict[str, Any]:
    engine, dummy, routing = bench.engine, bench.dummy, bench.routing
    model, predictor = engine.plan.model, engine.predictor()
    compared: dict[str, Any] = {}
    if result.policy is not None:
        compared = {
            "policy": result.policy,
            "ratio_to_adaptsched": _ratio(result, results),
            "ledger": result.ledger,
        }
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
        "dummy_weights": model["load_format"] == "dummy",
        "dummy_routing": None if routing is None else routing.as_dict(),
        "distinct_experts": result.distinct,
        **compared,
        "weight_bytes": engine.info.weight_bytes,
        "isa": engine.info.isa,
        "threads": engine.info.threads,
        "placement": engine.info.placement(),
        "cache_prefetch": engine.cache_prefetch(),
        "predictor": predictor,
        "gpu": result.gpu or engine.gpu(),
        "learner": engine.learner(),
        "plan_hash": engine.plan.plan_hash,
    }


def _markdown(engine: "Engine", results: "list[Result]") -> str:
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
        compares = any(result.policy for result in results)
        yield (
            *("model", "size", "params", "isa", "threads", "test"),
            *(("policy",) if compares else ()),
            *("t/s", "min", "median", "max"),
            *((f"to {REFERENCE}",) if compares else ()),
        )
        for result in results:
            s = result.spread()
            mean = f"{s['mean']:.2f} ± {s['stddev']:.2f}"
            rest = (f"{s[key]:.2f}" for key in ("min", "median", "max"))
            policy = (result.policy,) if result.policy else ()
            ratio = _ratio(result, results)
            compared = () if ratio is None else (f"{ratio:.2f}",)
            yield (*same, result.test, *policy, mean, *rest, *compared)

    return markdown(list(rows()))


def _count(parameters: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return str(parameters)


if __name__ == "__main__":
    main()
