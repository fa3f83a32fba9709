"""The commands. Each console script is one of the functions here, so that Ctrl-C is quiet from the
first import on.

May import the standard library; the command's own module only when it is called.
"""

import importlib
import sys

from pdscope.cli._interrupt import INTERRUPTED, leave_at_interrupt


def compile_command() -> None:
    """pdscope-compile"""
    _run("compile")


def run_command() -> None:
    """pdscope-run"""
    _run("run")


def inspect_command() -> None:
    """pdscope-inspect"""
    _run("inspect")


def bench_command() -> None:
    """pdscope-bench"""
    _run("bench")


def simulate_command() -> None:
    """pdscope-simulate"""
    _run("simulate")


def _run(name: str) -> None:
    try:
        with leave_at_interrupt():
            main = importlib.import_module(f"pdscope.cli.{name}").main
        main()
    except KeyboardInterrupt:  # before main looks after it
        sys.exit(INTERRUPTED)
