"""pdscope-compile: a model directory in, a plan directory out."""

import json
import logging
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdscope import config
from pdscope.cli._common import POLICIES, Interrupted, command
from pdscope.cli._interrupt import leave_at_interrupt
from pdscope.cli.paths import GivenPath

if TYPE_CHECKING:
    from pdscope.compiler.driver import CompileResult


@command("pdscope-compile")
@click.argument("model", type=GivenPath())
@click.option("-o", "--output", type=click.Path(), help="Plan directory to create.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "fp32", "bf16", "int8", "int4"]),
    default="auto",
    show_default=True,
    help="Packed weights, GEMM inputs and KV cache. auto keeps what the checkpoint holds. int8 and "
    "int4 quantise every matrix but the router in groups, and keep the KV cache bf16.",
)
@click.option(
    "--load-format",
    type=click.Choice(["auto", "dummy"]),
    default="auto",
    show_default=True,
    help="dummy: seeded random weights, for a config.json without weights.",
)
@click.option(
    "--no-weights",
    is_flag=True,
    help="With --load-format dummy: a plan without weight files, for models too large for the "
    "disk. pdscope-bench --load-format dummy makes weights up in memory; nothing else runs it.",
)
@click.option(
    "--max-context",
    type=click.IntRange(min=1),
    help="Tokens a sequence may hold; sizes the KV cache. Default: the model's, at most 32768.",
)
@click.option(
    "--max-rows",
    type=click.IntRange(1, 65536),
    default=512,
    show_default=True,
    help="Rows of the largest step: longer prompts are prefilled in chunks of this many tokens.",
)
@click.option(
    "--target",
    default="native",
    show_default=True,
    help="CPU to build for: native (this one), any (all kernel paths of this architecture, chosen "
    "at load), a name (x86_64_v3, zen4, sapphirerapids, ...) or features (avx2,fma,f16c).",
)
@click.option(
    "--cache-prefetch",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Programs that predict the next layer's experts and prefetch them into the CPU's cache. "
    "Whether a run does so is measured there.",
)
@click.option("--check-weights", is_flag=True, help="Refuse weights that hold NaN or infinity.")
@click.option(
    "--calibration",
    type=GivenPath(),
    metavar="FILE",
    help='Train predictors of the next layer\'s experts on this text: jsonl with {"text": ...} or '
    '{"messages": [...]} a line, or plain text. It runs through the compiled model itself.',
)
@click.option(
    "--trace-records",
    type=click.IntRange(1, 2**31 - 1),
    metavar="N",
    help="Rows of it to train on, a phase. While compiling, one takes 2 bytes x hidden size + 8 x "
    "top-k a MoE layer of disk: 10,000 of both phases take 3.7 GiB at 48 layers of 2048. Default: "
    "1048576, or what 16 GiB hold.",
)
@click.option(
    "--predictor",
    type=click.Choice(["auto", "off"]),
    help="auto without --calibration: trains on what the model answers to built-in prompts. "
    "Default: auto with --calibration, else off.",
)
@click.option(
    "--predictor-budget",
    metavar="BYTES",
    help="Most that a layer's predictors may take: bytes, or e.g. 4.2MB, the default. Wider ones "
    "predict better, and cost more to run.",
)
@click.option(
    "--predictor-device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where predictors are trained. auto: on a GPU, if PyTorch finds one.",
)
@click.option(
    "--dummy-predictor",
    metavar="accuracy:P",
    help="With --load-format dummy: measure (pdscope-bench) as if the next layer's experts were "
    "predicted, each with probability P; accuracy:P,seed:N: another draw. Marked so everywhere.",
)
@click.option(
    "--costs",
    metavar="auto|FILE|NAME",
    help="What the model's parts cost, for the plan's costs.json. auto: measured here, in about 10 "
    "seconds, and with --gpu-mem on the GPU as well; kept in PDSCOPE_CACHE for other plans of "
    "these dimensions. FILE: another plan's costs.json, or a hardware description. NAME: a shipped "
    "description: a100-6230r, h200-emr16, rtx3090-epyc7452, v100-6230r. auto,NAME: measured here, "
    "but GPU and link of NAME where no GPU was measured. Default: off, no costs.json.",
)
@click.option(
    "--gpu-mem",
    metavar="BYTES",
    help="Compile for a GPU, of whose memory the process may take so much, e.g. 24GiB, all "
    "included: the driver, weights that are no expert, the KV cache of --max-context, and slots "
    "for experts. Needs --costs of a GPU: auto with one here, or of a NAME. The plan runs on the "
    "CPU too. Default: the CPU alone.",
)
@click.option(
    "--gpu-reserve",
    metavar="BYTES",
    default="640MiB",
    show_default=True,
    help="Of --gpu-mem, what the driver takes for itself: its context and the kernels.",
)
@click.option(
    "--gpu-arch",
    metavar="auto|none|ARCHS",
    help="With --gpu-mem: GPUs to compile kernels for, e.g. sm_90 or sm_80,sm_90; no GPU need be "
    "here. auto: those of this machine. Newer ones than named run a form that their driver "
    "compiles at load. Needs NVRTC (pip install 'pdscope[gpu]'), without which auto makes a plan "
    "without kernels. Default: auto.",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default="adaptsched",
    show_default=True,
    help="What decides which experts move to the GPU (docs/policies.md); load and pdscope-run "
    "--policy may choose another one. static keeps fixed experts alone; fate, hybrimoe, lru and "
    "apex use all slots as a cache.",
)
@click.option(
    "--dry-run", is_flag=True, help="Trace, schedule and print the memory table; write nothing."
)
@click.option("--force", is_flag=True, help="Replace the plan that OUTPUT already holds.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of the summary."
)
def main(model: Path, output: str | None, as_json: bool, **options: Any) -> None:
    """Compile a Mixture-of-Experts model into a plan directory.

    MODEL is a Hugging Face model directory: config.json, *.safetensors and, for text,
    tokenizer.json. The plan holds the packed weights, the per-layer programs (as text and as
    the binary that runs) and a small C runtime built for this machine.

    \b
    pdscope-compile Qwen3-30B-A3B -o qwen3.plan
    pdscope-compile Mixtral-8x7B -o mixtral.plan --dtype bf16 --max-context 8192
    pdscope-compile config.json --load-format dummy --dry-run      # how much memory would it take?
    pdscope-compile config.json --load-format dummy --no-weights -o plan   # how fast would it be?

    Next: pdscope-inspect PLAN to read it, pdscope-run PLAN to run it.
    """
    if output is None and not options["dry_run"]:
        raise click.UsageError("Missing option '-o' / '--output' (or --dry-run).")
    if options["no_weights"] and options["load_format"] != "dummy":
        raise click.UsageError("--no-weights goes with --load-format dummy.")
    from pdscope.arguments import model_there
    from pdscope.compiler.passmanager import check_destination

    # Told before torch is loaded, which takes seconds.
    model_there(model)
    if output is not None and not options["dry_run"]:
        check_destination(Path(os.path.realpath(output)), options["force"])
    with leave_at_interrupt():
        from pdscope.cli.progress import CompileProgress
        from pdscope.compiler.driver import compile_model, resumable

    try:
        with _quiet_transformers(), CompileProgress(quiet=as_json) as progress:
            result = compile_model(
                model, output, progress=progress, after_pass=progress.finished_pass, **options
            )
    except KeyboardInterrupt:
        if output is None or options["dry_run"] or not resumable(output):
            raise
        raise Interrupted(
            "interrupted: finished passes are kept, the same command resumes"
        ) from None
    if as_json:
        click.echo(json.dumps(_report(result), indent=2))
    else:
        _print_summary(result)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its warnings are of training, or of what PDScope checks itself; PDSCOPE_DEBUG shows them."""
    logger = logging.getLogger("transformers")  # has its level since it was imported
    before = logger.level
    if config.debug_level() < 1:
        logger.setLevel(max(before, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(before)


def _report(result: "CompileResult") -> dict[str, Any]:
    from pdscope.compiler.driver import pass_summary

    return {
        "plan": None if result.plan is None else str(result.plan),
        "manifest": result.manifest,
        "memory": result.memory,
        "passes": pass_summary(result.passes),
        "notes": list(result.notes),
    }


def _count(parameters: int) -> str:
    if parameters < 1e9:
        return f"{parameters / 1e6:.1f} M"
    return f"{parameters / 1e9:.2f} B"


def _predictors(result: "CompileResult") -> str | None:
    """Groups, hit rates, what serves how many layers and phases, and how long it took to train."""
    from pdscope.dummy_predictor import DummyPredictor
    from pdscope.plan import Plan
    from pdscope.predictor_figures import JSON, Predictors, describe

    if result.plan is None or JSON not in result.manifest["files"]:
        return None
    plan = Plan(result.plan, result.manifest)
    if dummy := DummyPredictor.of(plan):
        return f"DUMMY: {dummy.describe()}"
    found = Predictors.open(plan)
    groups = ", ".join(f"{n} {name}" for name, n in Counter(found.groups).items())
    took = {p.name: p for p in result.passes}["train-phaseper"]
    seconds = "trained before"
    if not took.cached:
        seconds = f"trained in {took.seconds:.1f} s, {took.cpu_seconds:.1f} s of CPU"
    return f"{groups} layers; {describe(found.layers)}; {seconds}"


def _runs_where(manifest: dict[str, Any]) -> str:
    experts, gpu = manifest["placement"]["experts"], manifest.get("gpu")
    if gpu is None:
        return f"{experts['cpu']} experts, attention, gates and KV cache on the CPU; no GPU used"
    all_ = experts["cpu"] + experts["gpu"]
    return (
        f"attention, gates and KV cache on the GPU; of {all_} experts {gpu['resident']} stay "
        f"there, {gpu['ring']} slots for those that move ({gpu['policy']}), the others on the CPU"
    )


def _where(result: "CompileResult") -> str:
    if "absent_weights" in result.manifest:
        return "in no file (DUMMY WEIGHTS, made up when it is loaded)"
    return f"in {len(result.memory['weights'])} files"


def _print_summary(result: "CompileResult") -> None:
    from pdscope.cli.format import human_bytes, pairs

    m = result.manifest
    model, memory = m["model"], m["memory"]
    run = memory["weights"] + memory["engine_1_thread"] + memory["session"]
    moe = f"{model['moe_layers']} MoE layers, {model['experts']} experts, top-{model['top_k']}"
    rows = [
        (
            "model",
            f"{model['architecture']}, {_count(model['parameters'])} parameters, {m['dtype']}",
        ),
        ("layers", f"{model['layers']} ({moe})"),
        (
            "runs where",
            _runs_where(m),
        ),
        ("kernel paths", f"{', '.join(m['target']['isa'])} (target {m['target']['name']})"),
        ("programs", f"{m['programs']['count']} with {m['programs']['instructions']} instructions"),
        ("weights", f"{human_bytes(memory['weights'])} {_where(result)}"),
        (
            "memory",
            f"{human_bytes(memory['session'])} a session of {m['max_context']} tokens "
            f"({human_bytes(memory['kv_per_token'])} of KV a token), "
            f"{human_bytes(memory['engine_1_thread'])} an engine",
        ),
        ("to run", f"{human_bytes(run)}: weights, an engine of one thread, one session"),
    ]
    if "gpu" in m:
        from pdscope.plan import Plan, kernel_arch

        if kernels := Plan(result.plan or Path(), m).kernels:
            rows.append(("GPU kernels", ", ".join(map(kernel_arch, kernels))))
    if gpu := result.memory.get("gpu"):
        rows.append(
            (
                "GPU memory",
                f"{human_bytes(gpu['total_bytes'])} of {human_bytes(gpu['cap_bytes'])}: driver "
                f"{human_bytes(gpu['reserve_bytes'])}, weights {human_bytes(gpu['weight_bytes'])}, "
                f"session {human_bytes(gpu['session']['total_bytes'])}, experts "
                f"{human_bytes(gpu['slot_bytes'])}",
            )
        )
    if result.plan is None:
        rows.append(("dry run", "nothing was written; --json prints the whole memory table"))
    else:
        if predictors := _predictors(result):
            rows.append(("predictors", predictors))
        rows.append(("plan hash", m["plan_hash"][:16]))
        rows.append(("plan", str(result.plan)))
    click.echo(pairs(rows))
    for note in result.notes:
        click.echo(f"note: {note}")
    if result.plan is not None:
        plan = shlex.quote(str(result.plan))
        run_it = f"pdscope-run {plan} --prompt '...'"
        if "absent_weights" in m:
            run_it = f"pdscope-bench {plan} --load-format dummy"
        click.echo(f"\nread it: pdscope-inspect {plan}\nrun it:  {run_it}")
