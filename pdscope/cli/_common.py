"""What every command shares: errors become one line and an exit status.

0 is success, 1 a fault of input or environment (cause and remedy on standard error), 2 wrong usage,
130 an interrupt. Anything else that escapes is a defect and shows its traceback. May import click,
pdscope.errors, pdscope.cli._interrupt and pdscope.compiler.decision, which needs nothing else.
"""

import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pdscope import __version__
from pdscope.cli._interrupt import INTERRUPTED
from pdscope.compiler.decision import Policy
from pdscope.errors import PdscopeError, disk_fault

if TYPE_CHECKING:
    from pdscope.engine import Engine

_EPILOG = (
    "Exit status: 0 success, 1 a fault of input or environment (one line says which, and what to "
    "do), 2 wrong usage, 130 interrupted by Ctrl-C."
)


_OUTPUT = "standard output"

_MACHINE = (
    *("device", "policy", "threads", "isa", "pin", "weights", "cache_prefetch", "predictor"),
    *("learner", "learner_threshold"),
)
POLICIES = tuple(policy.value for policy in Policy)


class _ShareOrAuto(click.ParamType[float | str]):
    name = "auto|share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | str:
        if value == "auto":
            return "auto"
        try:
            return click.FloatRange(0, 1).convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r}: expected auto or a number from 0 to 1.", param, ctx)


class Interrupted(click.Abort):
    """Ctrl-C, with a line for the user."""


class Command(click.Command):
    """A click command with our exit statuses."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        name = prog_name or self.name
        if not standalone_mode:
            return super().main(args, name, complete_var, standalone_mode=False, **extra)
        try:
            _reopen_closed()
            _name_output()
            result = super().main(args, name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except Interrupted as error:
            sys.stderr.write(f"\n{error}\n")
            sys.exit(INTERRUPTED)
        except click.Abort:  # click has ended the line that shows ^C
            sys.exit(INTERRUPTED)
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader of our output has gone; say nothing, also not at interpreter exit.
            _drop_output()
            sys.exit(1)
        except PdscopeError as error:
            fail(str(error))
        except OSError as error:
            fail(_of_system(error))
        except MemoryError:
            fail("out of memory: close other programs, or compile with a smaller --max-context")
        # click gives the status of --help and --version back as a number.
        sys.exit(result if isinstance(result, int) else 0)


def _of_system(error: OSError) -> str:
    """The line for an error of the operating system; a full disk's has a remedy."""
    what = error.filename
    reason = error.strerror or str(error)
    full = disk_fault(error, f"{reason}; free some space, or write to another file or disk")
    if what == _OUTPUT:
        _drop_output()
    if full:
        reason = f"cannot be written: {full}"
    elif what == _OUTPUT:
        reason = f"cannot be written: {reason}; send it to another file or disk"
    return reason if what is None else f"{what}: {reason}"


class _Output(io.FileIO):
    """Standard output, whose errors say so: those of other files that are written to name none."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = _OUTPUT
            raise


def _name_output() -> None:
    """Replaces sys.stdout, unless somebody else has, by one of the same settings over _Output."""
    out = sys.stdout
    if out is not sys.__stdout__ or not isinstance(out, io.TextIOWrapper):
        return
    raw = _Output(out.fileno(), "w", closefd=False)
    unbuffered = isinstance(out.buffer, io.RawIOBase)
    sys.stdout = io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=out.encoding,
        errors=out.errors,
        line_buffering=out.line_buffering,
        write_through=out.write_through,
    )


def _drop_output() -> None:
    """What standard output still has goes nowhere, so that it does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reopen_closed() -> None:
    """Python has None for a stream that the shell closed (>&-): what is written there is lost."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")


def command(name: str) -> Callable[[Callable[..., Any]], Command]:
    """Decorates a function as one of our commands, with --version and --help."""
    settings = {"help_option_names": ["-h", "--help"]}

    def decorate(function: Callable[..., Any]) -> Command:
        made = click.command(name, cls=Command, epilog=_EPILOG, context_settings=settings)(function)
        version = click.version_option(__version__, prog_name=name, message="%(prog)s %(version)s")
        return version(made)

    return decorate


def machine_options(
    function: Callable[..., Any], policies: Sequence[str] = POLICIES
) -> Callable[..., Any]:
    """The options that say what of the machine an engine uses, as one argument `machine`: what
    load() takes."""

    @functools.wraps(function)
    def gathered(**given: Any) -> Any:
        machine = {name: given.pop(name) for name in _MACHINE}
        return function(machine=machine, **given)

    decorated: Callable[..., Any] = gathered
    for option in reversed(
        (
            click.option(
                "--device",
                type=click.Choice(("auto", "gpu", "cpu")),
                default="auto",
                help="auto: the GPU that the plan was compiled for, if its driver is found, else "
                "the CPU. PDSCOPE_CUDA_DRIVER names another driver's library.",
            ),
            click.option(
                "--policy",
                type=click.Choice(policies),
                help="What places experts on a GPU. Default: what the plan was compiled with."
                + (" all: each in turn." if "all" in policies else ""),
            ),
            click.option(
                "-t",
                "--threads",
                type=click.IntRange(0, 1024),
                default=0,
                help="Worker threads. 0: PDSCOPE_THREADS, else one per usable physical core.",
            ),
            click.option(
                "--isa",
                help="Force a kernel path: scalar, avx2, ... Default: PDSCOPE_ISA, or the best.",
            ),
            click.option(
                "--pin",
                type=click.Choice(("auto", "on", "off")),
                help="Whether each worker stays on one core. Default: PDSCOPE_PIN, or auto: with "
                "all physical cores of a machine that has SMT siblings or NUMA nodes.",
            ),
            click.option(
                "--weights",
                type=click.Choice(("auto", "mmap", "copy", "dummy")),
                help="copy: read to huge pages at load. mmap: the page cache. dummy: made up, for "
                "plans of dummy weights. Default: PDSCOPE_WEIGHTS, or auto: copy if the memory is "
                "there with room to spare.",
            ),
            click.option(
                "--cache-prefetch",
                type=click.Choice(("auto", "on", "off")),
                help="Prefetch predicted experts into the CPU's cache. Default: "
                "PDSCOPE_CACHE_PREFETCH, or auto: if it gains.",
            ),
            click.option(
                "--predictor",
                type=click.Choice(("auto", "off")),
                default="auto",
                help="What predicts experts. auto: what the plan chose for each layer. off: the "
                "next layer's gate.",
            ),
            click.option(
                "--learner",
                type=click.Choice(("auto", "on", "off")),
                default="off",
                help="Fine-tune predictors to the text in a background thread. auto: where nets "
                "predict and a core is free.",
            ),
            click.option(
                "--learner-threshold",
                type=_ShareOrAuto(),
                default="auto",
                help="Fine-tune while more than this share of experts is not predicted. auto: 1.75 "
                "times that of the text that the plan's predictors were validated on, a quarter at "
                "most.",
            ),
        )
    ):
        decorated = option(decorated)
    return decorated


def say_fallback(engine: "Engine", device: str) -> None:
    """A plan for a GPU that runs on the CPU without having been asked to."""
    if engine.plan.gpu and device == "auto" and (gpu := engine.gpu())["device"] == "cpu":
        click.echo(f"note: running on the CPU: {gpu['why']}", err=True)


def fail(message: str) -> NoReturn:
    """One line on standard error, status 1."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(1)
