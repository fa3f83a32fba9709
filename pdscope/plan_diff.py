"""What differs between two plans: plan.json, programs, memory, files. Behind `pdscope-inspect
--diff`.

May import pdscope.{errors,plan}.
"""

import difflib
from dataclasses import asdict, dataclass
from typing import Any

from pdscope.plan import Plan


@dataclass(frozen=True)
class Change:
    """One value that differs; None where a side has none."""

    name: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Difference:
    fields: tuple[Change, ...]  # of plan.json, its files left out
    memory: tuple[Change, ...]  # of memory.json
    programs: dict[str, str]  # relative path -> unified diff
    files: tuple[Change, ...]  # relative path, bytes; same bytes but other content too

    @property
    def same(self) -> bool:
        return not (self.fields or self.memory or self.programs or self.files)

    def as_dict(self) -> dict[str, Any]:
        return {"same": self.same, **asdict(self)}


def diff_plans(old: Plan, new: Plan) -> Difference:
    """What changed from `old` to `new`."""
    memory = [plan.memory_table() if "memory.json" in plan.files else {} for plan in (old, new)]
    changed = [
        name
        for name in sorted(old.files.keys() | new.files.keys())
        if old.files.get(name) != new.files.get(name)
    ]
    programs = {name: _text_diff(old, new, name) for name in changed if name.endswith(".plan")}
    data = [{k: v for k, v in plan.data.items() if k != "files"} for plan in (old, new)]
    return Difference(
        fields=_changes(*data),
        memory=_changes(*memory),
        programs=programs,
        files=tuple(
            Change(name, old.files.get(name), new.files.get(name))
            for name in changed
            if name not in programs
        ),
    )


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested JSON as one level: {"a": {"b": 1}} -> {"a.b": 1}. Lists of objects go by their
    name.
    """
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        items = [_labelled(v, i) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _labelled(item: dict[str, Any], index: int) -> tuple[str, dict[str, Any]]:
    for key in ("name", "file"):
        if key in item:
            return str(item[key]), {k: v for k, v in item.items() if k != key}
    return str(index), item


def _changes(old: dict[str, Any], new: dict[str, Any]) -> tuple[Change, ...]:
    a, b = flatten(old), flatten(new)
    names = [*a, *(name for name in b if name not in a)]
    return tuple(Change(n, a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n))


def _text_diff(old: Plan, new: Plan, name: str) -> str:
    before, after = (
        plan.read_text(name).splitlines(keepends=True) if name in plan.files else []
        for plan in (old, new)
    )
    return "".join(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))
