"""What a model family tells the compiler: module classes -> operators, configuration checks, how to
shrink.

One file per family fills a `Family`; the trace supplies the structure. May import pdscope.ir and
pdscope.errors; modules of transformers are read by attribute only, so torch is not imported here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from pdscope.errors import ModelError
from pdscope.ir.graph import GateAttrs, GqaAttrs, MlaAttrs, Rope
from pdscope.ir.isa import MAX_EXPERTS, MAX_TOP_K

Config = Mapping[str, Any]


class Role(StrEnum):
    """What a module class is. Modules without a role are traced through."""

    EMBED = "embed"
    NORM = "norm"
    ROTARY = "rotary"
    ATTENTION = "attention"
    GATE = "gate"
    EXPERTS = "experts"
    MLP = "mlp"
    LM_HEAD = "lm_head"


# A weight's role in the operator -> the parameter's path below the module.
WeightNames = dict[str, str]


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    roles: class name -> role, for the family's own classes (torch's Embedding and Linear are
    known).
    required: keys that config.json must have, because they define shapes and transformers would
    otherwise
        fill in the numbers of some other model.
    attention: (module, rope tables, window) -> attributes and weights.
    gate: module -> attributes and weights.
    check: refuses configurations that transformers or PDScope would get wrong.
    shrink: keys to change to get a tiny model with the same semantics (see compiler/leaf_check.py).
    """

    architecture: str
    model_type: str
    roles: Mapping[str, Role]
    required: tuple[str, ...]
    attention: Callable[[Any, Rope, int | None], tuple[GqaAttrs | MlaAttrs, WeightNames]]
    gate: Callable[[Any], tuple[GateAttrs, WeightNames]]
    check: Callable[[Any, Config], None]
    shrink: Callable[[Any, Config], dict[str, Any]]


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_positive(hf_config: Any, *keys: str) -> None:
    """Every named key is a positive integer in the configuration that transformers made of
    config.json.
    """
    for key in keys:
        value = getattr(hf_config, key, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"config.json: {key} is {value!r}, expected a positive integer; "
                "take config.json from the model's original repository"
            )


def require_multiple(hf_config: Any, key: str, divisor: str) -> None:
    a, b = getattr(hf_config, key), getattr(hf_config, divisor)
    if a % b:
        raise ModelError(
            f"config.json: {key} ({a}) is not a multiple of {divisor} ({b}); "
            "take both keys from the model's original config.json"
        )


def require_routing(
    hf_config: Any, experts_key: str, groups: int = 1, top_groups: int = 1, per_group: int = 1
) -> None:
    """Bounds of a gate. `per_group`: experts of a group that its score needs."""
    experts, top_k = getattr(hf_config, experts_key), hf_config.num_experts_per_tok
    if top_k > MAX_TOP_K:
        raise ModelError(
            f"config.json: num_experts_per_tok is {top_k}, expected at most {MAX_TOP_K}: PDScope's "
            "programs route a token to no more experts"
        )
    if experts > MAX_EXPERTS:
        raise ModelError(
            f"config.json: {experts_key} is {experts}, expected at most {MAX_EXPERTS}: PDScope's "
            "programs hold no more experts a layer"
        )
    if top_k > experts:
        raise ModelError(
            f"config.json: num_experts_per_tok ({top_k}) is more than the number of experts "
            f"({experts}); lower it"
        )
    if groups < 1 or experts % groups:
        raise ModelError(
            f"config.json: n_group ({groups}) does not divide the number of experts ({experts})"
        )
    if not 1 <= top_groups <= groups:
        raise ModelError(
            f"config.json: topk_group ({top_groups}) is not between 1 and n_group ({groups})"
        )
    size = experts // groups
    if size < per_group:
        raise ModelError(
            f"config.json: n_group ({groups}) leaves {size} expert(s) a group, but a group's score "
            f"is the sum of its best {per_group}"
        )
    if top_k > top_groups * size:
        raise ModelError(
            f"config.json: num_experts_per_tok ({top_k}) is more than the {top_groups * size} "
            f"experts in topk_group ({top_groups}) groups"
        )


def require_value(config: Config, key: str, allowed: tuple[Any, ...], why: str) -> None:
    """A key that transformers ignores must not ask for anything else than what it does."""
    if key in config and config[key] not in allowed:
        raise ModelError(
            f"config.json: {key} is {config[key]!r}; transformers computes {allowed[-1]!r} for "
            f"this family whatever the key says ({why})"
        )


def shrink_groups(groups: int, top_groups: int) -> tuple[int, int]:
    """A few groups that still choose fewer than all, if the model does."""
    small = min(groups, 4)
    return small, min(top_groups, small if top_groups == groups else small - 1)
