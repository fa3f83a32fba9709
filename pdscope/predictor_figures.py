"""How well a plan's predictors of the next layer's experts do: what phaseper.json says of them.

May import pdscope.{errors,plan} and the standard library, so that pdscope-inspect answers at once.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pdscope.errors import PlanError
from pdscope.plan import Plan

FORMAT = 1
JSON = "phaseper.json"
TRACES = "phaseper/traces.json"
PHASEPER = "phaseper"  # the learned net, among the predictors
RIVALS = ("cross_gate", "previous", "frequency", "transition")
PHASES = ("prefill", "decode")
GROUPS = ("input", "middle", "output")
_AGAIN = "compile the plan again"


@dataclass(frozen=True)
class Figures:
    """Shares in [0, 1]. hit: of the gate's experts, those among the predicted top_k; rank_hit: of
    the predicted hottest experts of a window of rows, those within 2 of their true rank."""

    hit: float
    rank_hit: float


@dataclass(frozen=True)
class Layer:
    """The predictors of one source layer and phase. `figures`: by predictor, PHASEPER and rivals;
    of a net that the plan does not hold there are none on another text."""

    layer: int
    next: int  # the layer whose experts are predicted
    phase: str
    group: str
    chosen: str  # key of figures
    figures: Mapping[str, Figures]
    temperatures: Mapping[str, float]
    reads: Mapping[str, int]  # bytes that one token's prediction reads, by predictor
    net: Mapping[str, Any]  # as phaseper.json has it: stored, width, deep, blocks, bytes, ...
    r_hit: float  # hit rate of the experts that a prefetch begins with
    reliability: Mapping[str, Sequence[float]]  # predicted, observed, pairs: [10] each

    def as_dict(self) -> dict[str, Any]:
        """For --json; hit and rank_hit are those of the chosen predictor."""
        chosen = self.figures[self.chosen]
        rivals = {n: vars(f) for n, f in self.figures.items() if n != PHASEPER}
        return {
            "layer": self.layer,
            "phase": self.phase,
            "group": self.group,
            "hit": chosen.hit,
            "rank_hit": chosen.rank_hit,
            "chosen": self.chosen,
            "rivals": rivals,
        }


@dataclass(frozen=True)
class Summary:
    """Means over the layers of a group and phase; `group` "all": over all layers of the phase."""

    phase: str
    group: str
    layers: int
    chosen: Mapping[str, int]  # layers that each predictor serves
    plan: Figures  # of what was chosen
    figures: Mapping[str, Figures]  # by predictor, over the layers that have figures of it


@dataclass(frozen=True)
class Predictors:
    """phaseper.json, checked. `similarity[i]`: mean cosine of the gate inputs of moe_layers[i] and
    of the next MoE layer; `groups[i]`: that of moe_layers[i]."""

    path: Path
    moe_layers: tuple[int, ...]
    groups: tuple[str, ...]
    similarity: tuple[float, ...]
    layers: tuple[Layer, ...]
    rows: Mapping[str, int]  # of traces, by phase
    validation: Mapping[str, int]  # of those, rows that no net was trained on
    traces: Mapping[str, Any]  # phaseper/traces.json

    @classmethod
    def open(cls, plan: Plan) -> Self:
        """Raises PlanError for a plan without predictors, or a phaseper.json that is damaged, of
        another format or of another model."""
        if JSON not in plan.files:
            raise PlanError(
                f"{plan.path}: the plan has no predictors: compile it with --calibration FILE, or "
                "with --predictor auto"
            )
        data, traces = _read(plan, JSON), _read(plan, TRACES)
        expected = {"format_version": FORMAT}
        expected |= {name: plan.model[name] for name in ("hidden", "experts", "top_k")}
        for name, value in expected.items():
            if data.get(name) != value:
                found = data.get(name)
                raise PlanError(
                    f"{plan.path / JSON}: {name} is {found!r}, expected {value}: {_AGAIN}"
                )
        return cls.of(plan.path / JSON, data, traces)

    @classmethod
    def of(cls, path: Path, data: Mapping[str, Any], traces: Mapping[str, Any]) -> Self:
        """From the values of the files; `path` is for messages."""
        at = "groups"
        try:
            groups = data["groups"]
            moe = tuple(int(n) for n in groups["layers"])
            names = tuple(_one_of(n, GROUPS) for n in groups["names"])
            similarity = tuple(float(x) for x in groups["similarity"])
            if not len(moe) == len(names) == len(similarity) + 1:
                raise ValueError("lists of other lengths")
            layers = []
            for number, entry in enumerate(data["layers"]):
                at = f"layers[{number}]"
                layers.append(_layer(entry, moe))
            if not layers:
                raise ValueError("no layers")
            at = "rows, validation"
            rows, validation = ({p: int(data[k][p]) for p in data["rows"]} for k in at.split(", "))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise PlanError(f"{path}: {at}: {what}: {_AGAIN}") from None
        return cls(path, moe, names, similarity, tuple(layers), rows, validation, traces)


def summaries(layers: Iterable[Layer]) -> list[Summary]:
    """By phase and group, in their order, and of each phase's layers all together."""
    listed = list(layers)
    found = []
    for phase in PHASES:
        of_phase = [x for x in listed if x.phase == phase]
        parts = [(g, [x for x in of_phase if x.group == g]) for g in GROUPS]
        for group, part in [*parts, ("all", of_phase)]:
            if part:
                found.append(_summary(phase, group, part))
    return found


def describe(layers: Iterable[Layer]) -> str:
    """What was chosen and how well it does, in a line."""
    listed = list(layers)
    whole = [s for s in summaries(listed) if s.group == "all"]
    hits = ", ".join(f"{100 * s.plan.hit:.1f} % {s.phase}" for s in whole)
    counts = Counter(x.chosen for x in listed)
    served = ", ".join(f"{name} {n}" for name, n in counts.most_common())
    return f"hit rate {hits}; serve layers and phases: {served}"


def _summary(phase: str, group: str, part: Sequence[Layer]) -> Summary:
    named = {
        name: [x.figures[name] for x in part if name in x.figures] for name in (PHASEPER, *RIVALS)
    }
    return Summary(
        phase,
        group,
        len(part),
        dict(Counter(x.chosen for x in part).most_common()),
        _mean([x.figures[x.chosen] for x in part]),
        {name: _mean(found) for name, found in named.items() if found},
    )


def _mean(found: Sequence[Figures]) -> Figures:
    n = len(found)
    return Figures(sum(f.hit for f in found) / n, sum(f.rank_hit for f in found) / n)


def _read(plan: Plan, name: str) -> dict[str, Any]:
    try:
        data = json.loads(plan.read_text(name))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{plan.path / name}: is no JSON ({error}): {_AGAIN}") from None
    if not isinstance(data, dict):
        raise PlanError(f"{plan.path / name}: is no JSON object: {_AGAIN}")
    return data


def _layer(entry: Mapping[str, Any], moe: Sequence[int]) -> Layer:
    """Raises KeyError, TypeError or ValueError for what is not there or not what it should be."""
    named = {PHASEPER: entry["net"], **entry["rivals"]}
    figures = {n: Figures(_share(f["hit"]), _share(f["rank_hit"])) for n, f in named.items()}
    diagram = {k: [float(x) for x in entry["reliability"][k]] for k in ("predicted", "observed")}
    diagram["pairs"] = [int(x) for x in entry["reliability"]["pairs"]]
    if len({len(x) for x in diagram.values()}) != 1:
        raise ValueError("reliability has lists of other lengths")
    place = moe.index(entry["layer"])
    if entry["next"] not in moe[place + 1 : place + 2]:
        raise ValueError(f"next is {entry['next']!r}, expected the next MoE layer")
    return Layer(
        layer=entry["layer"],
        next=entry["next"],
        phase=_one_of(entry["phase"], PHASES),
        group=_one_of(entry["group"], GROUPS),
        chosen=_one_of(entry["chosen"], figures),
        figures=figures,
        temperatures={n: float(entry["temperatures"][n]) for n in figures},
        reads={n: int(entry["reads"][n]) for n in figures},
        net={**entry["net"], "bytes": int(entry["net"]["bytes"])},
        r_hit=_share(entry["r_hit"]),
        reliability=diagram,
    )


def _one_of(value: str, known: Collection[str]) -> str:
    if value not in known:
        raise ValueError(f"{value!r} is none of {', '.join(known)}")
    return value


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{value!r} is no share from 0 to 1")
    return float(value)
