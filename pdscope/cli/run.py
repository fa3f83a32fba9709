"""pdscope-run: a prompt in, text out."""

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdscope import config
from pdscope.cli._common import command, machine_options, say_fallback
from pdscope.cli._interrupt import leave_at_interrupt
from pdscope.cli.paths import GivenPath
from pdscope.errors import InputError

if TYPE_CHECKING:
    from pdscope.engine import Engine
    from pdscope.generation import Completion
    from pdscope.observe import Trace
    from pdscope.routing_trace import Recorder

# 40 bytes a record; pages that stay unused take no memory.
_MOST_RECORDS = 1 << 24
# As pdscope.sampling has them: to import it takes time that --help has not.
_LEAST, _MOST = 1.2e-38, 3.4e38


def _temperature(_ctx: click.Context, _param: click.Parameter, value: float) -> float:
    if 0 < value < _LEAST:
        raise click.BadParameter(f"{value} is not 0 or in the range {_LEAST}<=x<={_MOST}.")
    return value


@command("pdscope-run")
@click.argument("plan", type=GivenPath())
@click.option("-p", "--prompt", help="Text to continue. Default: standard input.")
@click.option(
    "--chat",
    is_flag=True,
    help="Put the prompt into the model's chat template. Without a prompt, on a terminal: a "
    "conversation.",
)
@click.option("--system", help="System message before a --chat prompt.")
@click.option(
    "-n",
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Stop after this many tokens.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0, _MOST),
    callback=_temperature,
    default=0.0,
    show_default=True,
    help=f"0: greedy, always the likeliest token. Else at least {_LEAST}.",
)
@click.option(
    "--top-k",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    help="Only the K likeliest; 0: off.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(_LEAST, 1),
    default=1.0,
    help="Only the likeliest that together reach P; 1: off.",
)
@click.option(
    "--min-p",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Only those at least P times as likely as the likeliest; 0: off.",
)
@click.option(
    "--repetition-penalty",
    type=click.FloatRange(_LEAST, _MOST),
    default=1.0,
    help="Above 1 makes tokens that were there already less likely; 1: off.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**64 - 1),
    help="Of the sampling; the same seed gives the same text. Default: a fresh one.",
)
@click.option("--stop", multiple=True, help="Stop before this text. May be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-text tokens.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object at the end, no stream."
)
@machine_options
@click.option(
    "--trace",
    "trace_file",
    type=GivenPath(dir_okay=False),
    help="Write every instruction as Chrome/Perfetto JSON (open in ui.perfetto.dev).",
)
@click.option(
    "--save-routing",
    type=GivenPath(dir_okay=False),
    metavar="FILE",
    help="Write which experts the gates chose, and which were predicted, as a routing.npz for "
    "pdscope-simulate --trace. Predictions need a GPU plan. Slower.",
)
@click.option("--verify", is_flag=True, help="Check the SHA-256 of every file of the plan first.")
def main(
    plan: Path,
    prompt: str | None,
    chat: bool,
    system: str | None,
    as_json: bool,
    machine: dict[str, Any],
    trace_file: Path | None,
    save_routing: Path | None,
    verify: bool,
    **options: Any,
) -> None:
    """Run a compiled plan: continue a prompt, answer a question, or converse.

    PLAN is the directory that pdscope-compile wrote. The text goes to standard output as it comes,
    speed to standard error. The prompt is --prompt, or standard input without its last newline.

    \b
    pdscope-run plan/ --prompt 'Once upon a time' -n 64
    pdscope-run plan/ --chat --prompt 'What is a mixture of experts?' --temperature 0.7 --seed 1
    pdscope-run plan/ --chat                     # a conversation, on a terminal
    pdscope-run plan/ --json < prompt.txt
    pdscope-run plan/ --prompt Hi --trace out.json
    pdscope-run plan/ --prompt Hi --save-routing routing.npz

    PDSCOPE_DEBUG=1 says what was loaded, 2 adds timings, 6 sums up the instruction trace.
    """
    if trace_file is not None:
        _check_file("--trace", trace_file)
    if save_routing is not None:
        _check_file("--save-routing", save_routing)
    conversation = chat and prompt is None and not as_json and _terminal()
    if prompt is None and _terminal() and not conversation:
        raise click.UsageError("Give --prompt, --chat, or a prompt on standard input.")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat.")
    text = "" if conversation else _read_prompt(prompt)
    options["stop"] = list(options["stop"])

    with leave_at_interrupt():
        from pdscope.arguments import text as checked_text
        from pdscope.engine import load

    if system is not None:
        checked_text("--system", system)
    for stop in options["stop"]:
        checked_text("--stop", stop)
    begin = time.perf_counter()
    engine = load(
        plan,
        **machine,
        verify=verify,
    )
    load_seconds = time.perf_counter() - begin
    with engine:
        _say_loaded(engine, load_seconds)
        say_fallback(engine, machine["device"])
        if not engine.has_tokenizer:
            raise InputError(
                f"{plan}: this plan has no tokenizer and cannot take text: pass token ids with the "
                "Python API, pdscope.load(plan).generate(ids)"
            )
        with ExitStack() as stack:
            trace = _tracing(stack, engine, trace_file, options["max_new_tokens"], conversation)
            routing = _recording(stack, engine) if save_routing is not None else None
            if conversation:
                from pdscope.cli.conversation import converse

                converse(engine, system, options)
                completion = None
            else:
                start = [{"role": "system", "content": system}] if system else []
                messages = [*start, {"role": "user", "content": text}]
                completion = _complete(
                    engine, messages if chat and text else text, as_json, options
                )
        if trace is not None:
            _finish_trace(trace, trace_file, plan)
        if routing is not None and save_routing is not None:
            found = routing.trace()
            found.save(save_routing)
            click.echo(f"routing of {len(found.position)} rows written to {save_routing}", err=True)
        if completion is not None and as_json:
            _print_json(engine, completion, load_seconds)


def _terminal() -> bool:
    # Python has no sys.stdin when it was closed by the shell (<&-).
    return sys.stdin is not None and sys.stdin.isatty()


def _check_file(option: str, file: Path) -> None:
    """Before the model runs: whether what it gives can be written at its end."""
    target = Path(os.path.realpath(file))
    if not target.parent.is_dir():
        raise InputError(f"{option} {file}: there is no folder {target.parent}")
    special = target.exists() and not target.is_file()
    if not os.access(target if special else target.parent, os.W_OK):
        raise InputError(f"{option} {file}: cannot be written: choose a folder that you may write")


def _read_prompt(prompt: str | None) -> str:
    if prompt is None:
        if sys.stdin is None:
            raise InputError("standard input is closed: give --prompt")
        data = sys.stdin.buffer.read()
        try:
            prompt = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"standard input is not valid UTF-8 (byte 0x{data[error.start]:02x} at offset "
                f"{error.start}): convert it first, e.g. with iconv -t utf-8"
            ) from None
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise InputError("the prompt is empty: give text with --prompt or on standard input")
    return prompt


def _complete(engine: "Engine", prompt: Any, quiet: bool, options: dict[str, Any]) -> "Completion":
    stream = engine.generate(prompt, stream=True, **options)
    if not quiet and engine.has_tokenizer and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    times: list[float] = []
    last = time.perf_counter()
    for piece in stream:
        now = time.perf_counter()
        times.append((now - last) * 1e3)
        last = now
        if piece and not quiet:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if config.debug_level() >= 2:
        click.echo(_timings(times), err=True)
    completion = stream.completion
    assert completion is not None
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()
        click.echo(speeds(completion), err=True)
    return completion


def _timings(times: list[float]) -> str:
    """PDSCOPE_DEBUG=2; `times` are ms, of the prefill and then of each decode step."""
    line, steps = f"prefill {times[0]:.2f} ms", times[1:]
    if not steps:
        return line
    mean = sum(steps) / len(steps)
    return (
        f"{line}; {len(steps)} decode steps: mean {mean:.2f} ms, min {min(steps):.2f} ms, "
        f"max {max(steps):.2f} ms"
    )


def speeds(completion: "Completion") -> str:
    """One line: how long and how fast."""

    def part(what: str, tokens: int, seconds: float, rate: float | None) -> str:
        return f"{what} {tokens} tokens in {seconds:.2f} s" + (
            f" ({rate:.1f} tok/s)" if rate else ""
        )

    new = completion.prompt_tokens - completion.cached_tokens
    first = part("prefill", new, completion.prefill_seconds, completion.prefill_tokens_per_second)
    then = part(
        "decode",
        len(completion.tokens),
        completion.decode_seconds,
        completion.decode_tokens_per_second,
    )
    return f"[{first}; {then}; stopped by {completion.stop_reason}]"


def _print_json(engine: "Engine", completion: "Completion", load_seconds: float) -> None:
    data = completion.as_dict()
    timings = {k: v for k, v in data.items() if k.endswith("_seconds") or k.endswith("_per_second")}
    report = {
        **{k: v for k, v in data.items() if k not in timings},
        "timings": {"load_seconds": load_seconds, **timings},
        "plan_hash": engine.plan.plan_hash,
        "isa": engine.info.isa,
        "threads": engine.info.threads,
        "placement": engine.info.placement(),
        "cache_prefetch": engine.cache_prefetch(),
        "predictor": engine.predictor(),
        "gpu": engine.gpu(),
        "learner": engine.learner(),
    }
    click.echo(json.dumps(report, indent=2, ensure_ascii=False))


def _say_loaded(engine: "Engine", seconds: float) -> None:
    if config.debug_level() >= 1:
        model, info = engine.plan.model, engine.info
        click.echo(
            f"{model['architecture']} {engine.plan.data['dtype']}, {info.layers} layers, context "
            f"{info.max_context}; isa {info.isa}, {info.threads} threads, weights "
            f"{info.weights}; loaded in {seconds:.2f} s",
            err=True,
        )


def _tracing(
    stack: ExitStack, engine: "Engine", file: Path | None, tokens: int, conversation: bool
) -> "Trace | None":
    if file is None and config.debug_level() < 6:
        return None
    from pdscope.plan import PHASES

    # A step runs the programs of one phase; all phases have about as many instructions.
    phases = sum(1 for phase in PHASES if engine.plan.program_files(phase)) or 1
    per_step = engine.plan.data["programs"]["instructions"] // phases + 1
    per_step *= 2 if engine.plan.gpu else 1  # counted are the CPU's; a GPU's have at most so many
    steps = engine.info.max_context + 64 if conversation else tokens
    prefill = engine.info.max_context // engine.info.max_rows + 2
    capacity = min(per_step * (min(steps, engine.info.max_context) + prefill), _MOST_RECORDS)
    return stack.enter_context(engine.main.trace(capacity))


def _recording(stack: ExitStack, engine: "Engine") -> "Recorder":
    from pdscope.routing_trace import Recorder

    return stack.enter_context(Recorder(engine.plan.model["experts"]).watch(engine.main))


def _finish_trace(trace: "Trace", file: Path | None, plan: Path) -> None:
    from pdscope.perfetto import summary, write_trace

    if file is not None:
        write_trace(trace, file, plan.name)
    if trace.dropped:
        click.echo(f"note: {trace.dropped} instructions did not fit the trace", err=True)
    if config.debug_level() >= 6:
        from pdscope.cli.format import table

        click.echo(table(summary(trace)), err=True)
    if config.debug_level() >= 2 and file is not None:
        click.echo(f"{len(trace.records)} instructions written to {file}", err=True)


if __name__ == "__main__":
    main()
