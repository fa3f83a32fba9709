"""Why a decision is what it is, in words and numbers: what pdscope-inspect --explain prints.

May import pdscope.{errors,placement,plan}, pdscope.ir.isa and
pdscope.compiler.{decision,decode_table,optimum,passes.schedule}.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pdscope.compiler.decision import (
    Decision,
    Due,
    Eq6,
    Inputs,
    Mode,
    Policy,
    ascending,
    hottest,
)
from pdscope.compiler.decode_table import MOST_TOP_K, DecodeTable
from pdscope.compiler.optimum import Ends, two_layers
from pdscope.compiler.passes.schedule import decide
from pdscope.errors import InputError
from pdscope.ir.isa import PHASE_ROWS, Phase
from pdscope.placement import decision_costs, hit_rates, popularity_of
from pdscope.plan import Plan

CONTEXT = 512  # tokens that the rows stand behind, unless said otherwise
ROWS = {Phase.DECODE: 1, Phase.BATCH: 8, Phase.PREFILL: 512}

_MODES = {
    Mode.NONE: "the policy has no modes",
    Mode.LOAD: "mode a, load: this layer has too many experts off the GPU, the next one has not",
    Mode.PREFETCH: "mode b, prefetch: the next layer has too many off the GPU, this one has not",
    Mode.UNLOAD: "mode c, unload: neither layer has too many experts off the GPU",
    Mode.CROSS: "mode d, cross-layer: both layers have too many experts off the GPU",
    Mode.PREFILL: "prefill",
}


@dataclass(frozen=True)
class Situation:
    """A layer when its gate's output is known. experts, predicted: {id: tokens}."""

    rows: int
    context: int
    experts: Mapping[int, int]
    predicted: Mapping[int, int]
    on_gpu: frozenset[int]  # of the layer, besides the resident ones
    free_slots: int
    assumed: bool  # nobody said: made from how often experts are activated


@dataclass(frozen=True)
class Placement:
    """What hot_experts.json says: residents, what the ring begins with, and shares of tokens, by
    layer with experts."""

    resident: Mapping[int, frozenset[int]]
    first: Mapping[int, frozenset[int]]
    shares: Mapping[int, Sequence[int]]  # in 1/65536

    @classmethod
    def of(cls, plan: Plan) -> "Placement":
        if plan.gpu is None:
            raise InputError(
                f"{plan.path}: compiled for the CPU alone, so no decision places experts: compile "
                "with --gpu-mem"
            )
        popularity = popularity_of(plan)
        record = json.loads(plan.read_text("hot_experts.json"))
        resident = {x["layer"]: frozenset(x["resident"]) for x in record["layers"]}
        first = {x["layer"]: frozenset(x["first"]) for x in record["layers"]}
        return cls(resident, first, {layer: popularity[layer].tolist() for layer in resident})

    def there(self, layer: int, begins: bool) -> frozenset[int]:
        """`begins`: with what the ring begins with."""
        nobody: frozenset[int] = frozenset()
        return self.resident.get(layer, nobody) | (
            self.first.get(layer, nobody) if begins else nobody
        )


def read_situation(file: Path, phase: Phase, experts: int) -> Situation:
    """A JSON object: {"experts": {"3": 1, ...}}, and if wanted rows, context, next (as experts),
    on_gpu (a list of ids) and free_slots. Raises InputError naming file, field and what was
    expected."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({error})") from None
    known = {"experts", "next", "rows", "context", "on_gpu", "free_slots"}
    if not isinstance(data, dict) or "experts" not in data or data.keys() - known:
        raise InputError(
            f"{file}: expected an object with experts and, if wanted, "
            f"{', '.join(sorted(known - {'experts'}))}"
        )
    low, high = PHASE_ROWS[phase]
    rows = _whole(file, "rows", data.get("rows", low), low, high)
    return Situation(
        rows=rows,
        context=_whole(file, "context", data.get("context", CONTEXT), 0, 1 << 30),
        experts=_counts(file, "experts", data["experts"], experts, rows),
        predicted=_counts(file, "next", data.get("next", {}), experts, rows),
        on_gpu=frozenset(
            _whole(file, "on_gpu", e, 0, experts - 1) for e in _list(file, data.get("on_gpu", []))
        ),
        free_slots=_whole(file, "free_slots", data.get("free_slots", 1 << 16), 0, 1 << 16),
        assumed=False,
    )


def _whole(file: Path, name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InputError(f"{file}: {name}: {value!r}, expected a whole number, {low} to {high}")
    return value


def _list(file: Path, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{file}: on_gpu: expected a list of expert ids")
    return value


def _counts(file: Path, name: str, value: object, experts: int, rows: int) -> dict[int, int]:
    if not isinstance(value, dict):
        raise InputError(f'{file}: {name}: expected {{"expert": tokens, ...}}')
    found = {}
    for expert, tokens in value.items():
        if not expert.isdigit() or int(expert) >= experts:
            raise InputError(f"{file}: {name}: {expert!r}, expected an expert, 0 to {experts - 1}")
        found[int(expert)] = _whole(file, f"{name}: {expert}", tokens, 1, rows)
    return found


def assume(
    placement: Placement, layer: int, phase: Phase, top_k: int, free_slots: int
) -> Situation:
    """What a step is like in the mean, with the ring as it begins: in decode the experts in the
    middle of each of top_k equal parts of all, by popularity; of more rows, each expert's share of
    them, rounded."""

    def of(layer: int) -> dict[int, int]:
        shares = placement.shares.get(layer, ())
        if phase is not Phase.DECODE:
            rows = ROWS[phase]
            return {e: n for e, s in enumerate(shares) if (n := (s * rows + 32768) >> 16)}
        ranked = sorted(range(len(shares)), key=lambda e: (-shares[e], e))
        parts = range(top_k) if ranked else ()
        return {ranked[(2 * i + 1) * len(ranked) // (2 * top_k)]: 1 for i in parts}

    return Situation(ROWS[phase], CONTEXT, of(layer), of(layer + 1), frozenset(), free_slots, True)


@dataclass(frozen=True)
class Explanation:
    layer: int
    phase: Phase
    situation: Situation
    given: Inputs
    made: Decision
    ends: Ends
    loads: tuple[Ends, ...]  # what 0, 1, 2 ... on-demand loads would give, with these prefetches
    policies: Mapping[str, tuple[Decision, Ends]]

    def as_dict(self) -> dict[str, Any]:
        made, given = self.made, self.given
        return {
            "layer": self.layer,
            "phase": self.phase.name.lower(),
            "policy": given.policy.value,
            "rows": self.situation.rows,
            "context": self.situation.context,
            "assumed": self.situation.assumed,
            "on_gpu": [due.expert for due in given.res],
            "host_only": [due.expert for due in given.cur],
            "predicted": [due.expert for due in given.next],
            "decision": _decided(given, made),
            "why": {k: _json(v) for k, v in asdict(made.why).items()},
            "ends_ns": asdict(self.ends),
            "by_loads_ns": [asdict(ends) for ends in self.loads],
            "policies": {
                name: {**_decided(given, decision), "ends_ns": asdict(ends)}
                for name, (decision, ends) in self.policies.items()
            },
        }


def _json(value: Any) -> Any:
    return value.name.lower() if isinstance(value, Mode | Eq6) else value


def _decided(given: Inputs, made: Decision) -> dict[str, list[int]]:
    loaded = [load.expert for load in made.on]
    return {
        "load": loaded,
        "prefetch": [load.expert for load in made.pre],
        "cpu": [due.expert for due in given.cur if due.expert not in loaded],
    }


def explain(
    plan: Plan, layer: int, phase: Phase, counts: Path | None, policy: str | None
) -> Explanation:
    """The decision of the plan's policy, or another one, for a layer.

    Raises InputError for a layer without experts and a plan without a GPU, PlanError for costs
    that know no GPU.
    """
    placement = Placement.of(plan)
    assert plan.gpu is not None
    if layer not in placement.resident:
        names = ", ".join(map(str, sorted(placement.resident)))
        raise InputError(f"{plan.path}: layer {layer} has no routed experts, expected {names}")
    top_k, ring = plan.model["top_k"], plan.gpu["ring"]
    if counts is None:
        situation = assume(placement, layer, phase, top_k, ring)
    else:
        situation = read_situation(counts, phase, len(placement.shares[layer]))
        situation = replace(situation, free_slots=min(situation.free_slots, ring))
    given = inputs(plan, placement, layer, phase, situation, Policy(policy or plan.gpu["policy"]))
    made = decide(given)
    loads = [_with_loads(given, n, made) for n in range(given.room_on() + 1)]
    policies = {}
    for other in Policy:
        as_other = replace(given, policy=other)
        policies[other.value] = (decide(as_other), two_layers(as_other, decide))
    ends = two_layers(given, decide)
    return Explanation(layer, phase, situation, given, made, ends, tuple(loads), policies)


def _with_loads(given: Inputs, n: int, made: Decision) -> Ends:
    """The ends if n were loaded; the next layer decides as always."""

    def decided(asked: Inputs) -> Decision:
        return Decision(hottest(given.cur, n), made.pre) if asked is given else decide(asked)

    return two_layers(given, decided)


def inputs(
    plan: Plan, placement: Placement, layer: int, phase: Phase, now: Situation, policy: Policy
) -> Inputs:
    """What the runtime would ask with (placement.c), on a link with nothing to do."""
    costs = decision_costs(plan)
    there = placement.there(layer, now.assumed) | now.on_gpu
    shares = placement.shares[layer]
    dues = [Due(e, n, shares[e]) for e, n in now.experts.items()]
    next_there = placement.there(layer + 1, now.assumed)
    predicted = [Due(e, n, 1 << 16) for e, n in now.predicted.items()]
    follows = layer + 1 in placement.resident
    hits = hit_rates(plan)
    shared = costs.shared.at(now.rows)
    next_gpu = sum(costs.gpu_expert.at(d.tokens) for d in predicted if d.expert in next_there)
    return Inputs(
        costs,
        ascending([d for d in dues if d.expert not in there]),
        tuple(d for d in dues if d.expert in there),
        ascending([d for d in predicted if d.expert not in next_there]) if follows else (),
        policy=policy,
        phase=phase,
        top_k=plan.model["top_k"],
        hit_q16=int(hits[layer + 1][phase]) if follows else 0,
        free_slots=now.free_slots,
        stream=True,
        attention=costs.attention.at(now.rows)
        + (costs.context_row_prefill if phase == Phase.PREFILL else costs.context_row)
        * (now.rows * now.context // 1024),
        gpu_busy=shared,
        next_gpu=next_gpu + (shared if follows else 0),
    )


# --- text ---


def text(e: Explanation) -> str:
    """One page."""
    given, made, now = e.given, e.made, e.situation
    lines = [
        f"layer {e.layer}, {e.phase.name.lower()}: {now.rows} rows behind {now.context} tokens, "
        f"policy {given.policy.value}"
        + (" (no --counts: routed as experts usually are)" if now.assumed else ""),
        "",
        f"activated on the GPU   {_experts(given.res)}",
        f"activated, host only   {_experts(given.cur)}",
        f"predicted next, absent {_experts(given.next)} (hit rate {given.hit_q16 / 655.36:.0f} %)",
        f"slots that may be used {given.free_slots}",
        "",
        f"load on demand         {_ids(load.expert for load in made.on)}",
        f"on the CPU             {_ids(_decided(given, made)['cpu'])}",
        f"prefetch               {_ids(load.expert for load in made.pre)}",
        "",
        *_reasons(e),
        "",
        "on-demand loads: what each number of them, the hottest first, would give",
        *_table(
            ["loads", "this layer ends", "the next one ends", ""],
            [
                [str(n), _ms(x.layer), _ms(x.next), "<- decided" if n == len(made.on) else ""]
                for n, x in enumerate(e.loads)
            ],
        ),
        "",
        "policies on the same experts and slots",
        *_table(
            ["policy", "loads", "prefetches", "CPU", "this layer ends", "the next one ends"],
            [
                [
                    name,
                    str(len(d.on)),
                    str(len(d.pre)),
                    str(len(given.cur) - len(d.on)),
                    _ms(x.layer),
                    _ms(x.next),
                ]
                for name, (d, x) in e.policies.items()
            ],
        ),
    ]
    if e.phase is Phase.DECODE and given.top_k <= MOST_TOP_K:
        table = DecodeTable(
            given.costs,
            given.top_k,
            given.policy,
            given.attention,
            given.gpu_busy,
            given.hit_q16,
        )
        lines += [
            "",
            "decode by counts: N experts of this layer and M of the next one that are not on the "
            "GPU: loads+prefetches",
            table.text(0, given.free_slots).rstrip("\n"),
        ]
    return "\n".join(lines) + "\n"


def _reasons(e: Explanation) -> list[str]:
    given, why = e.given, e.made.why
    one = given.cur[-1] if given.cur else Due(0, 1)
    lines = [
        f"an expert over the link {_ms(given.io_expert)} (+ {_ms(given.io_start)} to start it), "
        f"the hottest one on the CPU {_ms(given.cpu(one))}, on the GPU {_ms(given.gpu(one))}; the "
        f"next attention {_ms(given.attention_ns)}",
    ]
    if why.mode is not Mode.NONE:
        lines.append(_MODES[why.mode] + (f" (balance at {why.n_c})" if why.n_c else ""))
    if why.global_i >= 0:
        lines.append(
            f"Step 1: from expert {why.global_i} of both layers' "
            f"{len(given.cur) + len(given.next)} on, GPU {_ms(why.global_gpu)} < CPU "
            f"{_ms(why.global_cpu)}"
        )
    if why.local_i >= 0:
        lines.append(
            f"Step 2: from expert {why.local_i} of this layer's {len(given.cur)} on, GPU "
            f"{_ms(why.local_gpu)} < CPU {_ms(why.local_cpu)}"
        )
    if why.ceil_f:
        lines.append(
            f"Step 3: {_ms(why.hidden)} of the link hide {why.ceil_f} prefetches, the last one "
            f"{_ms(why.late)} too late: " + ("worth it" if why.xi else "not worth it")
        )
    if why.eq6 is not Eq6.NOT_ASKED:
        holds = why.eq6 is Eq6.HOLDS
        lines.append(
            f"Eq 6 {'holds' if holds else 'fails'}: GPU {_ms(why.eq6_gpu)}, CPU {_ms(why.eq6_cpu)}"
        )
    if why.layer_end or why.next_end:
        lines.append(
            f"expected: this layer ends after {_ms(why.layer_end)}, the next one after "
            f"{_ms(why.next_end)}"
        )
    return lines


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f} ms"


def _ids(experts: Any) -> str:
    return " ".join(f"e{x}" for x in experts) or "none"


def _experts(dues: Sequence[Due]) -> str:
    if all(due.tokens == 1 for due in dues):
        return _ids(due.expert for due in dues)
    return " ".join(f"e{due.expert}:{due.tokens}" for due in dues) or "none"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for first, *rest in [head, *rows]:
        cells = [cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True)]
        lines.append("  " + "  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines
