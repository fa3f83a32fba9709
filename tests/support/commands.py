"""Run the commands as a user does, and look at what they print."""

import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    def fault(self) -> str:
        """The one line of a fault; fails if there is a traceback, another status or more lines."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert self.status == 1, f"status {self.status}: {self.out}{self.err}"
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == 1 and lines[-1] == errors[0], self.err
        return errors[0]


def run_command(name: str, *arguments: Any, stdin: bytes = b"", **options: Any) -> Ran:
    """A command in a process of its own."""
    command = [str(BIN / name), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, **options)
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_here(name: str, *arguments: Any) -> Ran:
    """The same in this process, which need not import torch again."""
    from click.testing import CliRunner

    main = importlib.import_module(f"pdscope.cli.{name.removeprefix('pdscope-')}").main
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)
