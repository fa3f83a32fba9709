"""pdscope-inspect: what is in a plan, without running it."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdscope.cli._common import POLICIES, command
from pdscope.cli.format import human_bytes, pairs, table
from pdscope.cli.paths import GivenPath
from pdscope.errors import PlanError

if TYPE_CHECKING:
    from pdscope.plan import Plan
    from pdscope.plan_diff import Change, Difference


def _layer(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value in ("prologue", "epilogue"):
        return value
    if not value.isdigit():
        raise click.BadParameter(f"{value!r} is not a layer number, prologue or epilogue.")
    return int(value)


@command("pdscope-inspect")
@click.argument("plan", type=GivenPath())
@click.option(
    "--layer",
    metavar="N|prologue|epilogue",
    callback=_layer,
    help="Print the program of this layer.",
)
@click.option(
    "--phase",
    type=click.Choice(["decode", "batch", "prefill"]),
    help="With --layer: for 1 row (the default), for 2 to 16, or for more.",
)
@click.option("--graph", is_flag=True, help="Print the traced model graph.")
@click.option("--memory", is_flag=True, help="Print what every part takes, in bytes.")
@click.option(
    "--verify",
    is_flag=True,
    help="Re-check every file's SHA-256, the schema, the verifier's rules for all programs, and "
    "that plan.json, memory.json and plan.c say what the graph gives.",
)
@click.option(
    "--diff",
    "other",
    type=GivenPath(),
    help="Print what OTHER changes: plan.json, programs, memory, files.",
)
@click.option(
    "--predictor",
    is_flag=True,
    help="Print how well the next layer's experts are predicted, by layer group and phase.",
)
@click.option(
    "--on",
    type=GivenPath(),
    metavar="FILE",
    help="With --predictor: measure on this text, read through the plan: jsonl of texts and "
    "chats, or plain text. Default: figures of the compile.",
)
@click.option(
    "--html",
    type=GivenPath(),
    metavar="FILE",
    help="With --predictor: write the plots to this page.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="With --layer, of a plan with a GPU: print what its policy decides there, why, and what "
    "other decisions and policies would give.",
)
@click.option(
    "--counts",
    type=GivenPath(),
    metavar="FILE",
    help='With --explain: what the step activates, as JSON: {"experts": {"3": 1, ...}}, each with '
    "its tokens, and if wanted rows, context, next (as experts), on_gpu (ids) and free_slots. "
    "Default: as experts usually are, by hot_experts.json.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    help="With --explain: another policy than the plan's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    plan: Path,
    layer: int | str | None,
    phase: str | None,
    graph: bool,
    memory: bool,
    verify: bool,
    other: Path | None,
    predictor: bool,
    on: Path | None,
    html: Path | None,
    explain: bool,
    counts: Path | None,
    policy: str | None,
    as_json: bool,
) -> None:
    """Read a compiled plan: what it is, what runs where, each program, the memory.

    PLAN is the directory that pdscope-compile wrote. With no option: a summary.

    \b
    pdscope-inspect plan/
    pdscope-inspect plan/ --layer 7 --phase prefill
    pdscope-inspect plan/ --layer 7 --phase decode --explain
    pdscope-inspect plan/ --memory --json
    pdscope-inspect plan/ --verify
    pdscope-inspect plan/ --diff other-plan/
    pdscope-inspect plan/ --predictor --on chats.jsonl --html report.html
    """
    if sum((layer is not None, graph, memory, verify, other is not None, predictor)) > 1:
        raise click.UsageError(
            "Give one of --layer, --graph, --memory, --verify, --diff, --predictor."
        )
    for name, given in (("--on", on), ("--html", html)):
        if given is not None and not predictor:
            raise click.UsageError(f"{name} needs --predictor.")
    if phase is not None and layer is None:
        raise click.UsageError("--phase needs --layer.")
    for name, asked in (("--counts", counts is not None), ("--policy", policy is not None)):
        if asked and not explain:
            raise click.UsageError(f"{name} needs --explain.")
    if explain and not isinstance(layer, int):
        raise click.UsageError("--explain needs --layer N.")
    from pdscope.plan import Plan

    opened = Plan.open(plan)
    if explain and isinstance(layer, int):
        _explain(opened, layer, phase or "decode", counts, policy, as_json)
    elif layer is not None:
        _print_text(opened, opened.program_file(layer, phase or "decode"), as_json)
    elif graph:
        if "graph.txt" not in opened.files:
            raise PlanError(f"{plan}: the plan has no graph.txt: recompile the model")
        _print_text(opened, "graph.txt", as_json)
    elif memory:
        _print_memory(opened, as_json)
    elif verify:
        _verify(opened, as_json)
    elif predictor:
        from pdscope.cli.predictor_tables import print_predictors

        print_predictors(opened, on, html, as_json)
    elif other is not None:
        _diff(opened, Plan.open(other), as_json)
    else:
        _print_summary(opened, as_json)


def _explain(
    plan: "Plan", layer: int, phase: str, counts: Path | None, policy: str | None, as_json: bool
) -> None:
    from pdscope.compiler.explain import explain, text
    from pdscope.ir.isa import Phase

    found = explain(plan, layer, Phase[phase.upper()], counts, policy)
    if as_json:
        _print_json(found.as_dict())
    else:
        click.echo(text(found), nl=False)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _print_text(plan: "Plan", name: str, as_json: bool) -> None:
    text = plan.read_text(name)
    if as_json:
        _print_json({"file": name, "text": text})
    else:
        click.echo(text, nl=False)


def _print_summary(plan: "Plan", as_json: bool) -> None:
    if as_json:
        _print_json({**plan.data, "path": str(plan.path), "total_bytes": plan.total_bytes})
        return
    data, model = plan.data, plan.model
    target, experts, memory = data["target"], data["placement"]["experts"], data["memory"]
    moe = f", {model['moe_layers']} of them MoE: {model['experts']} experts, top {model['top_k']}"
    where = f"all {experts['cpu']} experts, attention and KV on the CPU"
    if plan.gpu and experts["gpu"]:
        resident, ring = plan.gpu["resident"], plan.gpu["ring"]
        where = (
            f"{resident} experts stay on the GPU, {ring} slots there for others; those on the CPU"
        )
    eos = ", ".join(map(str, plan.eos)) or "none"
    weights = f"{human_bytes(memory['weights'])} mapped"
    if plan.absent_weights:
        weights = f"{human_bytes(memory['weights'])} of dummy weights, which are in no file"
    dummy = " (random weights, --load-format dummy)" if model["load_format"] == "dummy" else ""
    rows = [
        ("plan", f"{plan.path} (format {data['format_version']}, {data['generator']})"),
        ("model", f"{model['architecture']}, {model['source_name']}{dummy}"),
        ("parameters", f"{model['parameters']:,} as {data['dtype']}"),
        ("layers", f"{model['layers']}{moe}"),
        ("limits", f"context {data['max_context']}, {data['max_rows']} rows a step"),
        ("runs on", f"{target['arch']}, target {target['name']}: {', '.join(target['isa'])}"),
        ("needs", " ".join(target["features"]) or "no CPU feature beyond the architecture"),
        ("placement", where),
        *_kernels(plan),
        (
            "programs",
            f"{data['programs']['count']}, {data['programs']['instructions']} instructions",
        ),
        (
            "memory",
            f"{weights}, {human_bytes(memory['session'])} a session, "
            f"{human_bytes(memory['kv_per_token'])} a token of KV",
        ),
        *_dummy_predictor(plan),
        ("on disk", f"{human_bytes(plan.total_bytes)} in {len(plan.files) + 1} files"),
        ("tokenizer", _tokenizer(data["tokenizer"]) + f", EOS {eos}"),
        *_costs(plan),
        ("plan hash", plan.plan_hash),
        ("weights hash", model["weights_sha256"]),
        ("config hash", model["config_sha256"]),
    ]
    click.echo(pairs(rows))


def _kernels(plan: "Plan") -> list[tuple[str, str]]:
    from pdscope.plan import kernel_arch

    if plan.gpu is None:
        return []
    found = ", ".join(map(kernel_arch, plan.kernels))
    return [("GPU kernels", found or "none: no GPU can run the plan")]


def _dummy_predictor(plan: "Plan") -> list[tuple[str, str]]:
    if "phaseper.json" not in plan.files or plan.model["load_format"] != "dummy":
        return []
    from pdscope.dummy_predictor import DummyPredictor

    dummy = DummyPredictor.of(plan)
    return [] if dummy is None else [("predictor", f"DUMMY: {dummy.describe()}")]


def _tokenizer(entry: dict[str, Any]) -> str:
    if entry["file"] is None:
        return "none: takes token ids alone"
    return f"{entry['file']}, {'with' if entry['chat_template'] else 'without'} a chat template"


def _costs(plan: "Plan") -> list[tuple[str, str]]:
    from pdscope.costs import CostTable

    table = CostTable.of_plan(plan)
    if table is None:
        return []
    machine = table.machine
    parts = [f"{machine.cpu}, {machine.threads} threads, {machine.isa}", machine.gpu, machine.link]
    return [("costs", f"{table.source}: {'; '.join(part for part in parts if part)}")]


def _print_memory(plan: "Plan", as_json: bool) -> None:
    from pdscope.plan_diff import flatten

    memory = plan.memory_table()
    if as_json:
        _print_json(memory)
        return
    rows = [("part", "value", "")]
    for name, value in flatten(memory).items():
        size = isinstance(value, int) and "bytes" in name.split(".", 1)[-1]
        rows.append((name, str(value), human_bytes(value) if size else ""))
    click.echo(table(rows))


def _verify(plan: "Plan", as_json: bool) -> None:
    from pdscope.plan_check import check_plan

    if sys.stderr.isatty() and not as_json:
        with click.progressbar(length=plan.total_bytes, label="hashing", file=sys.stderr) as bar:
            problems = check_plan(plan, bar.update)
    else:
        problems = check_plan(plan)
    extra = plan.unlisted_files()
    if as_json:
        report = {"ok": not problems, "problems": problems, "unlisted_files": extra}
        _print_json({**report, "files": len(plan.files), "bytes": plan.total_bytes})
        if problems:
            sys.exit(1)
        return
    for name in extra:
        click.echo(f"note: {name} is not part of the plan", err=True)
    for problem in problems[:-1]:
        click.echo(f"error: {problem}", err=True)
    if problems:
        raise PlanError(problems[-1])
    programs = plan.data["programs"]["count"]
    click.echo(
        f"ok: {len(plan.files)} files, {plan.total_bytes:,} bytes have their hashes; {programs} "
        "programs keep every rule and equal program.bin; memory and constants follow from the graph"
    )


def _diff(old: "Plan", new: "Plan", as_json: bool) -> None:
    from pdscope.plan_diff import diff_plans

    difference = diff_plans(old, new)
    if as_json:
        _print_json(difference.as_dict())
    else:
        click.echo(_diff_text(difference), nl=False)


def _diff_text(difference: "Difference") -> str:
    if difference.same:
        return "the plans are the same\n"
    parts = []
    for title, changes in (("plan.json", difference.fields), ("memory.json", difference.memory)):
        if changes:
            parts.append(f"{title}\n" + "".join(_change_line(c) for c in changes))
    if difference.files:
        lines = (f"  {c.name}: {_size(c.old)} -> {_size(c.new)}\n" for c in difference.files)
        parts.append("files\n" + "".join(lines))
    if difference.programs:
        parts.append("programs\n" + "".join(difference.programs.values()))
    return "\n".join(parts)


def _change_line(change: "Change") -> str:
    return f"  {change.name}: {json.dumps(change.old)} -> {json.dumps(change.new)}\n"


def _size(entry: dict[str, Any] | None) -> str:
    return "absent" if entry is None else f"{entry['bytes']} bytes ({entry['sha256'][:8]})"


if __name__ == "__main__":
    main()
