"""Progress of a compile on a terminal, drawn by rich; silent when standard error is no terminal."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

if TYPE_CHECKING:
    from pdscope.compiler.passmanager import PassResult


class CompileProgress:
    """Implements compiler.source.Progress: a byte bar a stage, and a line a finished pass."""

    def __init__(self, quiet: bool) -> None:
        self._shown = sys.stderr.isatty() and not quiet
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
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

    def start(self, what: str, total: int) -> None:
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(what, total=total)

    def advance(self, amount: int) -> None:
        self._bars.advance(self._task, amount)

    def finished_pass(self, result: "PassResult") -> None:
        state = "cached" if result.cached else f"{result.seconds:.1f} s"
        if self._shown and (result.seconds > 0.2 or result.cached):
            self._bars.console.print(f"  {result.name}: {state}", highlight=False)
