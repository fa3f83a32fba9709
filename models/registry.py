"""The families that PDScope compiles, by architectures[0] of config.json. May import pdscope.models
only.
"""

from typing import Any

from pdscope.errors import ModelError
from pdscope.models import deepseek_v2, deepseek_v3, mixtral, olmoe, qwen3_moe
from pdscope.models.family import Config, Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY
    for module in (mixtral, qwen3_moe, deepseek_v2, deepseek_v3, olmoe)
}


def family_of(config: Config) -> Family:
    """The family of a config.json, or a ModelError that names what was asked and what is
    supported.
    """
    supported = ", ".join(FAMILIES)
    names: Any = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(
            f"config.json: architectures is {names!r}, expected a list with one of: {supported}"
        )
    if names[0] not in FAMILIES:
        raise ModelError(
            f"config.json: architecture {names[0]} is not supported; supported: {supported}"
        )
    family = FAMILIES[names[0]]
    if config.get("model_type") not in (None, family.model_type):
        raise ModelError(
            f"config.json: model_type is {config.get('model_type')!r}, expected "
            f"{family.model_type!r} for {family.architecture}"
        )
    missing = [key for key in family.required if key not in config]
    if missing:
        raise ModelError(
            f"config.json: {', '.join(missing)} missing: {family.architecture} needs "
            f"{'it' if len(missing) == 1 else 'them'} and there is no safe default; take "
            "config.json from the model's original repository"
        )
    for key in family.required:
        value = config[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"config.json: {key} is {value!r}, expected a positive integer")
    return family
