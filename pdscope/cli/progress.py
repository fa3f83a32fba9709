"""Progress of a compile on a terminal, drawn by rich; silent when standard error is no terminal."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from pdscope.cli.format import human_bytes

if TYPE_CHECKING:
    from pdscope.compiler.passmanager import PassResult


class _Amount(ProgressColumn):
    """What is done, of how much, and how fast, in the stage's unit."""

    def render(self, task: Task) -> Text:
        unit = task.fields.get("unit")
        if not task.total or unit is None:
            return Text("")

        def shown(count: float) -> str:
            return human_bytes(count) if unit == "bytes" else f"{count:,.0f}"

        speed = task.finished_speed or task.speed
        rate = "" if speed is None else f", {shown(speed)} a second"
        of = "" if unit == "bytes" else f" {unit}"
        return Text(f"{shown(task.completed)} of {shown(task.total)}{of}{rate}")


class CompileProgress:
    """Implements compiler.source.Progress: a bar a stage, and a line a finished pass."""

    def __init__(self, quiet: bool) -> None:
        self._shown = sys.stderr.isatty() and not quiet
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _Amount(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not self._shown,
        )
        self._task = self._bars.add_task("trace", total=None)

    def __enter__(self) -> "CompileProgress":
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def start(self, what: str, total: int, unit: str = "bytes") -> None:
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(what, total=total or None, unit=unit)

    def advance(self, amount: int) -> None:
        self._bars.advance(self._task, amount)

    def finished_pass(self, result: "PassResult") -> None:
        state = "cached"
        if not result.cached:
            state = f"{result.seconds:.1f} s, {result.cpu_seconds:.1f} s of CPU"
        if self._shown and (result.seconds > 0.2 or result.cached):
            self._bars.console.print(f"  {result.name}: {state}", highlight=False)
