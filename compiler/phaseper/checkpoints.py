"""Where a training that was killed goes on: the state of every stack of nets, saved now and then.

May import torch and pdscope.compiler.passmanager.
"""

import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from pdscope.compiler.passmanager import disk_errors, writing

INTERVAL = 10.0  # seconds of a stack's training that a kill may lose


class Checkpoints:
    """States by name in a directory. Names are used by one thread each."""

    def __init__(self, folder: Path | None, key: str = "", interval: float = INTERVAL) -> None:
        """folder: None: nothing is saved. key: identity of all that decides the result; states of
        another key are deleted."""
        self._folder, self._interval = folder, interval
        self._saved: dict[str, float] = {}
        if folder is None:
            return
        said = folder / "key"
        with disk_errors(folder):
            if not said.is_file() or said.read_text(encoding="utf-8") != key:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            with writing(said) as file:
                file.write_text(key, encoding="utf-8")

    def load(self, name: str, device: torch.device) -> dict[str, Any] | None:
        """The last state, its tensors on `device`; None: there is none, or it is damaged."""
        self._saved[name] = time.monotonic()
        if self._folder is None:
            return None
        try:
            state: dict[str, Any] = torch.load(
                self._folder / name, map_location=device, weights_only=True
            )
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
            return None
        return state

    def due(self, name: str) -> bool:
        """Whether it is time to save again."""
        late = time.monotonic() - self._saved[name] >= self._interval
        return late and self._folder is not None

    def save(self, name: str, state: dict[str, Any]) -> None:
        if self._folder is None:
            return
        with writing(self._folder / name) as file:
            torch.save(state, file)
        self._saved[name] = time.monotonic()
