"""How a loaded plan with a GPU places experts: the device it runs on, the policy, and what
decisions are made of: costs.json, hot_experts.json, phaseper.json.

May import numpy, pdscope.{config,costs,errors,native,plan}.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pdscope import config
from pdscope.costs import JSON as COSTS
from pdscope.costs import Costs, CostTable, Curve
from pdscope.errors import InputError, PlanError, TargetError
from pdscope.native import EngineHandle, GpuOptions, ffi, is_driver_error
from pdscope.plan import PHASES, Plan

DEVICES = ("auto", "cpu", "gpu")
HOT = "hot_experts.json"
PHASEPER = "phaseper.json"
Q16 = 1 << 16
T = TypeVar("T")


def open_engine(plan: Plan, device: str, open_: Callable[[GpuOptions | None], T]) -> tuple[T, str]:
    """What `open_` makes of the device that the plan is to run on, and why it is that one: a plan
    with a GPU runs on the CPU, and says so, where "auto" finds no driver."""
    gpu = gpu_options(plan, device)
    if gpu is None:
        return open_(None), "asked for" if device == "cpu" else "the plan is for the CPU alone"
    try:
        return open_(gpu), "the plan is for a GPU"
    except TargetError as error:
        if device != "auto" or not is_driver_error(error):
            raise
        return open_(None), f"no GPU can be used: {error}"


def gpu_options(plan: Plan, device: str) -> GpuOptions | None:
    """The GPU that a load is to open; None: the CPU alone. Raises InputError for one that the plan
    was not compiled for."""
    if device == "cpu" or (device == "auto" and plan.gpu is None):
        return None
    if plan.gpu is None:
        raise InputError(
            f"device is 'gpu', but {plan.path} was compiled for the CPU alone: compile it with "
            "--gpu-mem"
        )
    mem = plan.gpu["mem"] - plan.gpu["reserve"]
    return GpuOptions(
        0, mem, config.cuda_driver(), 1000 * config.gpu_patience(), kernel_images(plan)
    )


def kernel_images(plan: Plan) -> tuple[Path, ...]:
    """Absolute paths of the GPU kernels to load, those of PDSCOPE_GPU_KERNELS or the plan's, in the
    order in which the driver is offered them. Raises InputError for one that cannot be."""
    given = config.gpu_kernels()
    for path in given:
        if not path.is_file():
            raise InputError(f"PDSCOPE_GPU_KERNELS: {path}: no such file; correct or unset it")
    found = tuple(path.resolve() for path in given or (plan.path / p for p in plan.kernels))
    if any("\n" in str(path) for path in found):
        raise InputError(
            f"{str(found[0].parent)!r}: a path of GPU kernels cannot have a line break: move them"
        )
    return found


@dataclass(frozen=True)
class GpuInfo:
    """`pds_gpu_info` of pdscope.h."""

    name: str
    resident: int  # experts that stay on it
    ring: int  # slots for those that come and go
    pinned: bool  # the weights lie in pinned memory
    cap: int  # bytes of its memory that may be used, and
    used: int  # are
    weight_bytes: int
    slot_bytes: int
    expert_bytes: int
    # By phase, of recompiling a layer, and of that the part within the driver's calls: None, or n,
    # min, median (within 4 %), mean and max in microseconds
    recompile_us: dict[str, dict[str, float] | None]
    recompile_driver_us: dict[str, dict[str, float] | None]


def gpu_info(handle: EngineHandle) -> GpuInfo | None:
    """None: everything runs on the CPU."""
    info = ffi().new("pds_gpu_info *")
    handle.library.check(handle.library.lib.pds_engine_get_gpu(handle.pointer, info))
    if not info.present:
        return None
    numbers = ("resident", "ring", "cap", "used", "weight_bytes", "slot_bytes", "expert_bytes")
    return GpuInfo(
        name=handle.library.text(info.name),
        pinned=bool(info.pinned),
        recompile_us=dict(zip(PHASES, map(_spans, info.recompile), strict=True)),
        recompile_driver_us=dict(zip(PHASES, map(_spans, info.recompile_driver), strict=True)),
        **{name: int(getattr(info, name)) for name in numbers},
    )


def _spans(spans: Any) -> dict[str, float] | None:
    """pds_spans, in microseconds."""
    if not spans.n:
        return None
    ns = (spans.least_ns, spans.median_ns, spans.sum_ns / spans.n, spans.most_ns)
    names = ("min", "median", "mean", "max")
    return {"n": spans.n} | {k: round(v / 1e3, 2) for k, v in zip(names, ns, strict=True)}


def set_schedule(handle: EngineHandle, plan: Plan, policy: str | None) -> str:
    """Gives the engine what its decisions are made of; returns the policy's name.

    Raises PlanError for a plan whose costs say nothing of a GPU, InputError for an unknown policy.
    """
    assert plan.gpu is not None
    name = plan.gpu["policy"] if policy is None else policy
    c, lib = ffi(), handle.library
    known = lib.text(lib.lib.pds_policies()).split(",")
    if name not in known:
        raise InputError(f"policy is {name!r}, expected one of {', '.join(known)}")
    costs = c.new("pds_costs *")
    _fill(costs, decision_costs(plan))
    popularity, first = popularity_of(plan), _first_flags(plan)
    hits, sure = hit_rates(plan), draft_thresholds(plan)
    text = c.new("char[]", name.encode())
    schedule = c.new(
        "pds_schedule *",
        {
            "policy": text,
            "costs": costs,
            "popularity": c.cast("uint32_t *", popularity.ctypes.data),
            "hit_q16": c.cast("uint32_t *", hits.ctypes.data),
            "sure_q16": c.cast("uint32_t *", sure.ctypes.data),
            "first": c.cast("uint8_t *", first.ctypes.data),
        },
    )
    lib.check(lib.lib.pds_engine_set_schedule(handle.pointer, schedule))
    return name


def ledger(handle: EngineHandle, layers: int) -> list[dict[str, int]]:
    """What crossed the link for each layer since the schedule was set."""
    found = ffi().new("pds_ledger[]", layers)
    handle.library.check(handle.library.lib.pds_engine_get_ledger(handle.pointer, found))
    fields = [name for name, _ in ffi().typeof("pds_ledger").fields]
    return [{name: int(getattr(one, name)) for name in fields} for one in found]


def decision_costs(plan: Plan) -> Costs:
    """What its decisions are made of. Raises PlanError for a plan whose costs know no GPU."""
    if COSTS not in plan.files:
        raise PlanError(f"{plan.path}: no {COSTS}, which a plan with a GPU needs: recompile it")
    table = CostTable.parse(plan.read_text(COSTS), str(plan.path / COSTS))
    if table.gpu is None or table.link is None:
        raise PlanError(
            f"{plan.path / COSTS}: has no times of a GPU and its link: recompile with --costs "
            "NAME, or auto,NAME, of a hardware description"
        )
    return table.costs()


def _fill(out: Any, costs: Costs) -> None:
    for name, value in vars(costs).items():
        if not isinstance(value, Curve):
            setattr(out, name, value)
            continue
        curve = getattr(out, name)
        curve.n = len(value.tokens)
        for k, (tokens, ns) in enumerate(zip(value.tokens, value.ns, strict=True)):
            curve.tokens[k], curve.ns[k] = tokens, ns


def popularity_of(plan: Plan) -> Any:
    """uint32 [layers, experts]: share of tokens that activate each expert, in 1/65536."""
    out = _by_expert(plan, np.uint32)

    def fill(layer: Any) -> None:
        shares = np.asarray(layer["popularity"], np.float64)
        if not ((shares >= 0) & (shares <= 1)).all():
            raise ValueError(f"layer {layer['layer']}: popularity: expected shares of 0 to 1")
        out[layer["layer"], : len(shares)] = np.round(shares * Q16)

    _of_hot_experts(plan, fill)
    return out


def first_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """By layer, ascending: the experts that the ring begins with."""
    flags = _first_flags(plan)
    return tuple(tuple(np.flatnonzero(layer).tolist()) for layer in flags)


def _first_flags(plan: Plan) -> Any:
    """uint8 [layers, experts]"""
    out = _by_expert(plan, np.uint8)

    def fill(layer: Any) -> None:
        experts = [int(e) for e in layer["first"]]
        if experts and not 0 <= min(experts) <= max(experts) < out.shape[1]:
            raise ValueError(f"layer {layer['layer']}: first: expected experts of the layer")
        out[layer["layer"], experts] = 1

    _of_hot_experts(plan, fill)
    return out


def _by_expert(plan: Plan, dtype: Any) -> Any:
    return np.zeros((plan.model["layers"], max(1, plan.model["experts"])), dtype)


def _of_hot_experts(plan: Plan, fill: Callable[[Any], None]) -> None:
    """`fill` with each layer of hot_experts.json. Raises PlanError for what it does not expect."""
    try:
        for layer in json.loads(plan.read_text(HOT))["layers"]:
            fill(layer)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise PlanError(f"{plan.path / HOT}: {error!r}: recompile the model") from None


def hit_rates(plan: Plan) -> Any:
    """uint32 [layers, phases]: hit rate of predictions for the layer, in 1/65536; a half where
    phaseper.json says nothing."""
    return _of_predictors(plan, Q16 // 2, lambda entry: entry["hit"] * Q16)


def draft_thresholds(plan: Plan) -> Any:
    """uint32 [layers, phases]: how sure the predictor must be of an expert for a draft to name it,
    in 1/65536; 0 where no net predicts.

    A net's confidence at run time is the sigmoid of its logit; phaseper.json's threshold `hot` is
    of the calibrated one, the sigmoid of logit / temperature.
    """

    def threshold(entry: dict[str, Any]) -> float:
        if entry["chosen"] != "phaseper":
            return 0.0
        if entry["hot"] >= 1:
            return Q16 + 1.0  # it is never that sure
        logit: float = math.log(entry["hot"] / (1 - entry["hot"])) * entry["temperature"]
        return Q16 / (1 + math.exp(-logit))

    return _of_predictors(plan, 0, threshold)


def _of_predictors(plan: Plan, default: int, value: Callable[[dict[str, Any]], float]) -> Any:
    """uint32 [layers, phases]: a number of each entry of phaseper.json, at the layer that it
    predicts."""
    out = np.full((plan.model["layers"], len(PHASES)), default, np.uint32)
    if PHASEPER not in plan.files:
        return out
    try:
        for entry in json.loads(plan.read_text(PHASEPER))["layers"]:
            columns = [2] if entry["phase"] == "prefill" else [0, 1]
            out[entry["next"], columns] = round(value(entry))
    except (ValueError, KeyError, TypeError, IndexError, ArithmeticError) as error:
        raise PlanError(f"{plan.path / PHASEPER}: {error!r}: recompile the model") from None
    return out
