"""Checks plan.json against pdscope/plan_schema.json: lightly at every load, in full by --verify and
the compiler; and lightly other files against theirs.

May import pdscope.errors; jsonschema only inside `check_full`. The light check reads the same
schema, so there is one truth; it knows the keywords that the schema uses and refuses a schema that
uses others.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from pdscope.errors import PlanError

FORMAT_VERSION = 1

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
_KNOWN = {
    *("$schema", "$defs", "$ref", "title", "type", "const", "enum", "pattern"),
    *("minimum", "minLength", "minItems", "minProperties", "items"),
    *("properties", "required", "dependentRequired", "additionalProperties", "propertyNames"),
}


@cache
def schema(name: str = "plan_schema.json") -> dict[str, Any]:
    """The JSON schema of plan.json, or another one beside this file."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def first_problem(data: object, name: str, where: str) -> str | None:
    """The first field of `data` that the schema file `name` refuses, behind `where`, and what was
    expected; None: there is none."""
    return _problem(data, schema(name), where, schema(name))


def check_light(data: object) -> None:
    """Raises PlanError naming the first field of `data` that the schema refuses. Takes well under
    10 ms.
    """
    if problem := first_problem(data, "plan_schema.json", "plan.json"):
        raise PlanError(f"{problem}: the plan was cut short or edited; recompile the model")


def check_full(data: object) -> None:
    """The same through jsonschema."""
    import jsonschema  # type: ignore[import-untyped, unused-ignore]

    validator = jsonschema.Draft202012Validator(schema())
    errors = sorted(validator.iter_errors(data), key=lambda error: list(map(str, error.path)))
    if errors:
        where = "/".join(map(str, errors[0].path)) or "top level"
        raise PlanError(
            f"plan.json: {where}: {errors[0].message}: the plan was edited; recompile the model"
        )


def _is_type(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])


def _problem(value: object, rule: dict[str, Any], where: str, root: dict[str, Any]) -> str | None:
    if unknown := rule.keys() - _KNOWN:
        raise AssertionError(f"a schema uses {sorted(unknown)}, unknown to the light check")
    if "$ref" in rule:
        rule = root["$defs"][rule["$ref"].removeprefix("#/$defs/")]
    return _scalar_problem(value, rule, where) or _nested_problem(value, rule, where, root)


def _scalar_problem(value: object, rule: dict[str, Any], where: str) -> str | None:
    if "const" in rule and (value != rule["const"] or isinstance(value, bool)):
        return f"{where}: expected {rule['const']!r}, found {_short(value)}"
    if "enum" in rule and value not in rule["enum"]:
        return f"{where}: expected one of {rule['enum']}, found {_short(value)}"
    if "type" in rule:
        names = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        if not any(_is_type(value, name) for name in names):
            return f"{where}: expected {' or '.join(names)}, found {_short(value)}"
    if isinstance(value, int) and value < rule.get("minimum", value):
        return f"{where}: expected at least {rule['minimum']}, found {value}"
    if isinstance(value, str):
        if len(value) < rule.get("minLength", 0):
            return f"{where}: must not be empty"
        if "pattern" in rule and not re.search(rule["pattern"], value):
            return f"{where}: {_short(value)} does not match {rule['pattern']}"
    return None


def _nested_problem(
    value: object, rule: dict[str, Any], where: str, root: dict[str, Any]
) -> str | None:
    if isinstance(value, list):
        if len(value) < rule.get("minItems", 0):
            return f"{where}: must not be empty"
        for index, item in enumerate(value):
            if problem := _problem(item, rule.get("items", {}), f"{where}[{index}]", root):
                return problem
    if not isinstance(value, dict):
        return None
    if len(value) < rule.get("minProperties", 0):
        return f"{where}: must not be empty"
    required = [*rule.get("required", ())]
    for key, others in rule.get("dependentRequired", {}).items():
        required += others if key in value else []
    for key in required:
        if key not in value:
            return f"{where}: key {key!r} is missing"
    properties = rule.get("properties", {})
    others = rule.get("additionalProperties", {})
    for key, item in value.items():
        if problem := _problem(key, rule.get("propertyNames", {}), f"{where}: key", root):
            return problem
        if key not in properties and others is False:
            return f"{where}: unknown key {key!r}"
        if problem := _problem(item, properties.get(key, others), f"{where}: {key}", root):
            return problem
    return None


def _short(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
