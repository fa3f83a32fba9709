"""Where a plan's costs come from: what --costs says.

May import pdscope.{costs,errors,hardware} and pdscope.compiler.{costs,hardware}.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pdscope import hardware
from pdscope.compiler.costs import CostTable, ModelKey
from pdscope.compiler.hardware import Hardware
from pdscope.errors import InputError

_EXPECTED = (
    "off, auto, a file (costs.json of a plan, or a hardware description), a shipped description's "
    "name, or auto,NAME"
)


@dataclass(frozen=True)
class CostSource:
    """measured: on this machine; given: a table or a description, of which a measured table takes
    GPU and link alone. Neither: the plan has no costs."""

    measured: bool = False
    given: Path | Hardware | None = None

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Reads descriptions, to tell their faults at once. Raises InputError."""
        if text is None or text == "off":
            return cls()
        first, comma, rest = text.partition(",")
        measured = first == "auto"
        if measured and not comma:
            return cls(measured=True)
        name = rest if measured else text
        if not name:
            raise InputError(f"costs: '{text}' names nothing; expected {_EXPECTED}")
        return cls(measured, _given(name))

    @property
    def wanted(self) -> bool:
        return self.measured or self.given is not None

    def table(self, model: ModelKey) -> CostTable | None:
        """What is given, for this model; None: nothing is.

        Raises PlanError for a table that is damaged or another model's, InputError for a
        description.
        """
        if isinstance(self.given, Hardware):
            return self.given.table(model)
        if self.given is None:
            return None
        table = CostTable.read(self.given)
        table.check_model(model, str(self.given))
        return table

    def complete(self, measured: CostTable, model: ModelKey) -> CostTable:
        """What was measured, with GPU and link of what is given, where they were not."""
        given = self.table(model)
        if given is None or (measured.gpu and measured.link):
            return measured
        names = replace(measured.machine, gpu=given.machine.gpu, link=given.machine.link)
        source = f"{measured.source}; GPU and link: {given.source}"
        return replace(measured, source=source, machine=names, gpu=given.gpu, link=given.link)


def _given(name: str) -> Path | Hardware:
    if name in hardware.names():
        return Hardware.shipped(name)
    path = Path(name)
    if not path.is_file():
        what = "is no file" if path.exists() else "there is no such file"
        raise InputError(
            f"costs: {name}: {what}, and no description of that name is shipped "
            f"({', '.join(hardware.names())}); expected {_EXPECTED}"
        )
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"costs: {path}: not valid JSON ({error}); expected {_EXPECTED}") from None
    if isinstance(data, dict) and data.get("kind") == "hardware":
        return Hardware.of(path.stem, data, str(path))
    if isinstance(data, dict) and data.get("kind") == "costs":
        return path
    raise InputError(
        f"costs: {path}: kind: expected 'costs' or 'hardware', in a JSON object; costs may be "
        f"{_EXPECTED}"
    )
