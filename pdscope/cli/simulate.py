"""pdscope-simulate: what a plan, or a model, would do on a machine that is not here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdscope.cli._common import POLICIES, command
from pdscope.cli._interrupt import leave_at_interrupt
from pdscope.cli.paths import GivenPath
from pdscope.errors import InputError

if TYPE_CHECKING:
    from pdscope.compiler.simulate.report import PhaseReport, Report
    from pdscope.compiler.simulate.study import Study
    from pdscope.compiler.simulate.subject import Subject

_PHASES = ("prefill", "batch", "decode")


def _policies(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...]:
    if value is None:
        return ()
    names = POLICIES if value == "all" else tuple(value.split(","))
    for name in names:
        if name not in POLICIES:
            raise click.BadParameter(f"{name!r} is none of all, {', '.join(POLICIES)}.")
    return names


@command("pdscope-simulate")
@click.argument("plan", type=GivenPath())
@click.option(
    "--hardware",
    metavar="NAME|FILE",
    help="The machine: a shipped description (a100-6230r, h200-emr16, rtx3090-epyc7452, "
    "v100-6230r) or a file like those (docs/costs-format.md). Default: the plan's costs.json.",
)
@click.option(
    "--costs",
    type=GivenPath(dir_okay=False),
    metavar="FILE",
    help="The machine, measured: the costs.json of a plan of this model that was compiled there.",
)
@click.option(
    "--trace",
    "trace_file",
    type=GivenPath(dir_okay=False),
    metavar="FILE",
    help="What the gates choose: a routing.npz of pdscope-run --save-routing. Default: made up, as "
    "unequal as routing of small trained models, for --prompt and --tokens.",
)
@click.option(
    "--prompt",
    type=click.IntRange(min=0),
    default=512,
    show_default=True,
    help="Tokens of a made-up prompt; without --trace.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    help="Tokens decoded behind it; without --trace.",
)
@click.option(
    "--accuracy",
    type=click.FloatRange(0, 1),
    help="Predict the next layer's experts so well, instead of as recorded. Default: as recorded; "
    "where nothing was, 0.9.",
)
@click.option("--seed", type=int, default=0, help="Another draw of what is made up.")
@click.option(
    "--policy",
    "policies",
    metavar="all|NAME[,NAME...]",
    callback=_policies,
    help="What places experts: each on the same trace, with the slots that it would be compiled "
    "with. Default: the plan's.",
)
@click.option("--gpu-mem", help="Of a model's config.json: memory of the GPU, e.g. 24GiB.")
@click.option(
    "--gpu-reserve", default="640MiB", show_default=True, help="Likewise: the driver's own part."
)
@click.option("--dtype", default="auto", show_default=True, help="Likewise: its weights' format.")
@click.option("--max-context", type=click.IntRange(min=1), help="Likewise: tokens of a sequence.")
@click.option(
    "--max-rows",
    type=click.IntRange(1, 65536),
    default=512,
    show_default=True,
    help="Likewise: rows of the largest step.",
)
@click.option(
    "--perfetto",
    type=GivenPath(dir_okay=False),
    metavar="FILE",
    help="Write the timeline of the first policy as Chrome/Perfetto JSON (ui.perfetto.dev).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all layers of all policies.")
def main(
    plan: Path,
    hardware: str | None,
    costs: Path | None,
    trace_file: Path | None,
    prompt: int,
    tokens: int,
    accuracy: float | None,
    seed: int,
    policies: tuple[str, ...],
    perfetto: Path | None,
    as_json: bool,
    **model: Any,
) -> None:
    """What would I get on that card? Executes a plan's GPU programs in simulated time.

    PLAN is a plan directory compiled with --gpu-mem, or the config.json of a model with --gpu-mem
    here: no weights are needed. The programs run instruction by instruction, with their queues,
    copies and decisions, over a table of what their parts cost; nothing is computed.

    It prints tokens a second, how busy GPU, CPU and link are, and how far every phase is above a
    time that no schedule could beat; for one policy also its layers, for several a table of them.

    \b
    pdscope-simulate plan/ --hardware rtx3090-epyc7452
    pdscope-simulate plan/ --hardware a100-6230r --trace routing.npz --policy all
    pdscope-simulate qwen3/config.json --gpu-mem 24GiB --hardware a100-6230r --policy adaptsched
    pdscope-simulate plan/ --perfetto timeline.json
    """
    if hardware is not None and costs is not None:
        raise click.UsageError("--hardware and --costs both say what the machine is: give one.")
    with leave_at_interrupt():
        from pdscope.cli.progress import CompileProgress
        from pdscope.compiler.simulate.study import Routing, Study
        from pdscope.compiler.simulate.timeline import write_timeline

    machine = hardware if hardware is not None else None if costs is None else str(costs)
    if (plan / "plan.json").is_file() or not plan.exists():
        if model["gpu_mem"] is not None:
            raise click.UsageError("--gpu-mem is of a model's config.json; a plan has its own.")
        study = Study.of_plan(plan, machine)
    else:
        if machine is None:
            raise InputError(f"{plan}: is no plan: for a model give --hardware or --costs")
        first = policies[0] if policies else "adaptsched"
        study = Study.of_model(plan, machine, first, **model)
    routing = Routing(trace_file, prompt, tokens, accuracy, seed)
    names = policies or (study.subject.policy,)
    with CompileProgress(quiet=as_json) as progress:
        trace, hits = study.trace(routing)
        progress.start("simulate", len(names) * len(trace.position), "rows")
        runs = []
        for i, name in enumerate(names):
            keep = perfetto is not None and i == 0
            runs.append(study.run(name, trace, routing, hits, keep, progress.advance))
    if perfetto is not None:
        write_timeline(runs[0][1], perfetto, study.subject.name)
    reports = [report for report, _ in runs]
    if as_json:
        click.echo(json.dumps(_data(study, routing, reports), indent=2))
    else:
        _print(study, routing, reports)


def _data(study: "Study", routing: Any, reports: "Sequence[Report]") -> dict[str, Any]:
    return {
        "model": study.subject.name,
        "machine": study.machine,
        "gpu_bytes": study.subject.gpu.cap,
        "expert_bytes": study.subject.gpu.expert,
        "routing": routing.describe(),
        "policies": [report.data() for report in reports],
    }


def _print(study: "Study", routing: Any, reports: "Sequence[Report]") -> None:
    from pdscope.cli.format import human_bytes, pairs, table

    subject: Subject = study.subject
    click.echo(
        pairs(
            [
                ("model", f"{subject.name}, {subject.model.dtype}"),
                ("machine", study.machine),
                (
                    "GPU memory",
                    f"{human_bytes(subject.gpu.cap)}, experts of {human_bytes(subject.gpu.expert)}",
                ),
                ("routing", routing.describe()),
            ]
        )
    )
    for name in _PHASES:
        found = [(r, r.phases[name]) for r in reports if name in r.phases]
        if not found:
            continue
        best = max(p.tokens_per_second for _, p in found)
        rows: list[tuple[str, ...]] = [_HEAD]
        rows += [_row(r, p, best) for r, p in found]
        some = found[0][1]
        click.echo(f"\n{name}: {some.tokens} tokens in {some.steps} steps")
        click.echo(table(rows))
    if len(reports) == 1:
        _print_layers(reports[0])


_HEAD = ("policy", "fixed", "ring", "t/s", "of best", "GPU", "CPU", "link", "above bound")


def _row(report: "Report", phase: "PhaseReport", best: float) -> tuple[str, ...]:
    return (
        report.policy,
        str(report.resident),
        str(report.ring),
        f"{phase.tokens_per_second:.2f}",
        f"{phase.tokens_per_second / best:.0%}",
        *(f"{part:.0%}" for part in (phase.gpu, phase.cpu, phase.link)),
        f"{phase.above_bound:.0%}",
    )


def _print_layers(report: "Report") -> None:
    from pdscope.cli.format import table

    head = ("layer", "us", "on GPU", "arriving", "loaded", "on CPU", "prefetched")
    for name in _PHASES:
        if name not in report.phases:
            continue
        rows: list[tuple[str, ...]] = [head]
        for x in report.phases[name].layers:
            means = (x.ready, x.late, x.loads, x.cpu, x.prefetches)
            rows.append((str(x.layer), f"{x.ns / 1e3:.1f}", *(f"{m:.1f}" for m in means)))
        modes = ", ".join(f"{n} {mode}" for mode, n in report.phases[name].modes.items())
        click.echo(f"\n{name} by layer, means of a step's experts; decisions: {modes}")
        click.echo(table(rows))


if __name__ == "__main__":
    main()
