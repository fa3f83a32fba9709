"""Recompile: what the gate chose, what is on the GPU or on its way, and what was predicted, become
a decision; the decision becomes holes, transfers and residency.

The rules are docs/gpu-plans.md's ("One layer"); decisions are pdscope.compiler.passes.schedule's.
May import numpy, pdscope.routing_trace, pdscope.ir.isa and pdscope.compiler.{decision,policies,
passes.schedule,simulate}.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pdscope.compiler.costs import Costs
from pdscope.compiler.decision import ONE_Q16, Decision, Due, Inputs, Policy, ascending
from pdscope.compiler.passes.schedule import decide
from pdscope.compiler.policies import score
from pdscope.compiler.simulate.residency import AHEAD, IN_USE, Ring
from pdscope.compiler.simulate.subject import Subject
from pdscope.ir.isa import Phase
from pdscope.routing_trace import LayerRoutes, Step

HIT_SHARE = 8  # a layer's hit rate follows what happens by so much a decision
HIT_LEAST = ONE_Q16 // 4  # below that, prefetching for the layer pauses
HIT_AGAIN = ONE_Q16 // 2  # and then tries again as if it hit so often
PAUSE = 64  # decisions
_U32 = (1 << 32) - 1


@dataclass
class Hole:
    """An expert that the GPU computes."""

    expert: int
    rows: int
    slot: int | None  # of the ring; None: it stays there


@dataclass
class Transfer:
    """One expert on its way to a slot of the ring. `again`: the slot is that of an expert before it
    in the queue; `hole`: computed once its copy is queued, None for a prefetch."""

    layer: int
    expert: int
    slot: int
    again: bool = False
    hole: Hole | None = None
    issued: int = 0  # bytes


class LinkQueues(Protocol):
    """What recompile needs of the link."""

    def recall(self) -> list[Transfer]:
        """Takes all prefetches out of their queue."""

    def arrived(self, slot: int) -> bool: ...
    def load(self, transfer: Transfer) -> None: ...
    def prefetch(self, transfer: Transfer) -> None: ...


@dataclass
class Ledger:
    """What crossed the link for a layer: pds_ledger of pdscope.h."""

    loads: int = 0
    load_bytes: int = 0
    drafted: int = 0
    drafted_right: int = 0
    prefetches: int = 0
    useful_bytes: int = 0
    late_bytes: int = 0
    wasted_bytes: int = 0
    pauses: int = 0


@dataclass
class Bound:
    """What recompile leaves behind: the GPU's holes, the first `ready` of which are there and the
    next `sent` of which have their copy queued; the CPU's (expert, rows), by expert."""

    decision: Decision
    given: Inputs
    gpu: list[Hole] = field(default_factory=list)
    ready: int = 0
    sent: int = 0
    cpu: list[tuple[int, int]] = field(default_factory=list)


class Placement:
    """Residency and what decisions are made of, over the steps of a run."""

    def __init__(self, subject: Subject, costs: Costs, policy: Policy) -> None:
        self.subject, self.costs, self.policy = subject, costs, policy
        self.layers = len(subject.model.layers)
        self.hot = [frozenset(r) for r in subject.resident]
        self.ring = Ring(policy, subject.ring, self.layers)
        self.hits = subject.hits.astype(np.int64)
        self.popularity = subject.popularity.astype(np.int64)
        self.score = self.popularity.copy()  # of every expert, when it was last activated,
        self.seen = np.zeros_like(self.score)  # and the step of that
        self.gain = np.full((self.layers, 3), 2 * costs.predict, np.int64)
        self.paused = np.zeros((self.layers, 3), np.int64)
        self.predicted = False  # the last layer predicted this one
        self.ledger = [Ledger() for _ in range(self.layers)]
        self.now = 0  # steps
        # The link as decisions see it: never asked of the device.
        self.free_at = self.elapsed = 0
        self.ahead: list[int] = []  # experts prefetched for the next layer, in order,
        self.left: list[int] = []  # and those that it is predicted to leave on the CPU
        self.draft: set[int] = set()  # experts that the next layer is expected to activate
        if policy.keeps:
            self._fill()

    def _fill(self) -> None:
        """The ring begins with the experts that are to be there first, as far as it has slots."""
        first = [(layer, e) for layer, some in enumerate(self.subject.first) for e in some]
        for slot, (layer, e) in enumerate(first[: self.ring.size]):
            self.ring.assign(slot, layer, e, self.popularity_of(layer, e), self.now)
            self.ring.kept[slot] = 0
            self.label(slot, layer, e)

    @property
    def predicts(self) -> bool:
        """Whether steps predict at all."""
        return self.policy.predictor is not None and self.ring.size > 0

    def activate(self, layer: int, expert: int, weight: int) -> int:
        """The score of an expert that was activated, in a slot or not."""
        old, age = int(self.score[layer, expert]), self.now - int(self.seen[layer, expert])
        self.score[layer, expert] = score(self.policy, old, weight, age)
        self.seen[layer, expert] = self.now
        return int(self.score[layer, expert])

    def label(self, slot: int, layer: int, expert: int) -> None:
        """A slot that an expert was just given."""
        self.ring.score[slot] = self.score[layer, expert]
        self.ring.used[slot] = self.seen[layer, expert]

    def prediction_pays(self, layer: int, phase: int) -> bool:
        """Whether the layer's prediction for the next one does: else `predict` retires at once."""
        return self.predicts and not self.paused[layer + 1, phase]

    def pause(self, layer: int, phase: int) -> None:
        """Predictions for this layer are not worth their time."""
        self.paused[layer, phase] = PAUSE
        self.ledger[layer].pauses += 1

    def begin_step(self) -> None:
        self.now += 1
        self.free_at = self.elapsed = 0
        self.ahead = []
        self.predicted = False
        self.draft = set()

    def end_step(self, unsent: Sequence[Transfer]) -> None:
        """`unsent`: prefetches that nobody asked for any more."""
        for transfer in unsent:
            self.ring.drop(transfer.slot)
        self.ring.kept[:] = 0

    def unload(self, layer: int) -> int:
        """Behind a layer; returns how many slots were given up."""
        mine = np.flatnonzero((self.ring.layer == layer) & (self.ring.kept == IN_USE))
        self.ring.kept[mine] = 0
        if self.policy.keeps:
            return 0
        for slot in mine.tolist():
            self.ring.drop(slot)
        return len(mine)

    def recompile(
        self, layer: int, phase: Phase, step: Step, room_ahead: int, link: LinkQueues
    ) -> Bound:
        """`room_ahead`: capacity of ?n."""
        return _Recompile(self, layer, phase, step, link).run(room_ahead)

    # --- helpers that both sides of a decision use ---

    def popularity_of(self, layer: int, expert: int) -> int:
        return int(self.popularity[layer, expert])

    def arrival(self, j: int) -> int:
        """ns until the link has moved prefetch j of the last decision, as costs say."""
        return self.free_at + (j + 1) * self.costs.io_expert - self.elapsed

    def attention(self, step: Step, phase: int) -> int:
        costs = self.costs
        each = costs.context_row_prefill if phase == Phase.PREFILL else costs.context_row
        return costs.attention.at(step.rows) + each * (int(step.position.sum()) // 1024)


class _Recompile:
    """One layer of one step."""

    def __init__(
        self, placement: Placement, layer: int, phase: Phase, step: Step, link: LinkQueues
    ) -> None:
        self.p, self.layer, self.phase, self.step, self.link = placement, layer, phase, step, link
        self.routes: LayerRoutes = step.layers[layer]
        ids = self.routes.ids.ravel()
        self.rows = np.bincount(ids).tolist()
        weights = np.bincount(ids, weights=self.routes.weights.ravel().astype(np.float64))
        self.weights = [min(max(int(w * ONE_Q16), 0), _U32) for w in weights.tolist()]
        self.activated = [e for e, n in enumerate(self.rows) if n]
        self.backlog = self.next_gpu = self.late = 0
        self.cur: tuple[Due, ...] = ()
        self.res: list[Due] = []
        self.next: tuple[Due, ...] = ()

    def run(self, room_ahead: int) -> Bound:
        p = self.p
        recalled = {t.expert: t for t in self.link.recall()}
        self._settle_prediction()
        self._settle(recalled)
        self._list_activated()
        if room_ahead and p.prediction_pays(self.layer, self.phase):
            p.predicted = True
            self._list_predicted()
        given = self._inputs()
        made = decide(given)
        if room_ahead and p.paused[self.layer + 1, self.phase]:
            p.paused[self.layer + 1, self.phase] -= 1
        bound = Bound(made, given)
        self._bind_residents(bound, recalled)
        loads = self._bind_loads(bound)
        self._expect(loads)
        p.ahead = []
        self._bind_prefetches(made, room_ahead)
        p.left = [due.expert for due in self.next if due.expert not in p.ahead]
        on_gpu = {hole.expert for hole in bound.gpu}
        bound.cpu = [(e, self.rows[e]) for e in self.activated if e not in on_gpu]
        return bound

    # --- lists ---

    def _settle(self, recalled: dict[int, Transfer]) -> None:
        """What was prefetched for this layer and is not activated is forgotten."""
        p, ring = self.p, self.p.ring
        ledger, size = p.ledger[self.layer], p.subject.expert_bytes[self.layer]
        hits = 0
        activated = set(self.activated)
        ledger.drafted += len(p.draft)
        ledger.drafted_right += len(p.draft & activated)
        p.draft = set()
        for j, e in enumerate(p.ahead):
            sent = recalled[e].issued if e in recalled else size
            ledger.prefetches += 1
            if e in activated:
                hits += 1
                ledger.useful_bytes += size
                if p.arrival(j) > 0:
                    ledger.late_bytes += size
                continue
            ledger.wasted_bytes += sent
            slot = ring.slot_of.get((self.layer, e))
            if slot is not None and sent < size:
                ring.drop(slot)
        for slot in np.flatnonzero(ring.layer == self.layer).tolist():
            if int(ring.expert[slot]) not in activated:
                ring.kept[slot] = 0
        if not p.ahead:
            return
        hit = int(p.hits[self.layer, self.phase])
        hit = hit - hit // HIT_SHARE + ONE_Q16 // HIT_SHARE * hits // len(p.ahead)
        if hit < HIT_LEAST:
            p.pause(self.layer, self.phase)
            hit = HIT_AGAIN
        p.hits[self.layer, self.phase] = hit

    def _settle_prediction(self) -> None:
        """What the last layer's prediction was for: a prefetch whose expert is activated saves
        time, and predicting takes some."""
        p, costs = self.p, self.p.costs
        if not p.predicted:
            return
        p.predicted = False
        gained = 0
        for e in p.ahead:
            if e < len(self.rows) and self.rows[e]:
                cpu, link = costs.cpu_expert.at(self.rows[e]), costs.io_expert
                gained += link * ((cpu << 10) // (cpu + link)) >> 10 if cpu + link else 0
        gain = int(p.gain[self.layer, self.phase])
        gain += gained // HIT_SHARE - gain // HIT_SHARE
        if gain < costs.predict:
            gain = 2 * costs.predict
            p.pause(self.layer, self.phase)
        p.gain[self.layer, self.phase] = gain

    def _due(self, expert: int) -> Due:
        popularity = self.p.popularity_of(self.layer, expert)
        return Due(expert, self.rows[expert], popularity, self.weights[expert])

    def _list_activated(self) -> None:
        p, ring = self.p, self.p.ring
        cur: list[Due] = []
        late: set[int] = set()
        order = {e: j for j, e in enumerate(p.ahead)}
        for e in self.activated:
            due = self._due(e)
            score_now = p.activate(self.layer, e, due.weight // self.step.rows)
            slot = ring.slot_of.get((self.layer, e))
            if slot is None and e not in p.hot[self.layer]:
                cur.append(due)
                continue
            if slot is not None:
                ring.kept[slot] = IN_USE
                ring.used[slot] = p.now
                ring.popularity[slot] = due.popularity
                ring.score[slot] = score_now
                if e in order and p.arrival(order[e]) > 0:
                    late.add(e)
                    continue
            self.res.append(due)
        for j, e in enumerate(p.ahead):
            if e in late:
                self.res.append(self._due(e))
                self.late += 1
                self.backlog = p.arrival(j)
        self.cur = ascending(cur)

    def _list_predicted(self) -> None:
        """The next layer's draft: the experts that the predictor is sure of. Those that are not
        there are listed; those that are stay."""
        p, ring, target = self.p, self.p.ring, self.layer + 1
        stride = -(-self.step.rows // p.subject.memory.predict_rows)
        ids = self.routes.predicted[::stride].ravel()
        sure = self.routes.sure[::stride].ravel()
        said = ids >= 0
        ids, sure = ids[said], sure[said]
        counts = np.bincount(ids).tolist() if len(ids) else []
        sums = np.bincount(ids, weights=sure.astype(np.float64)).tolist() if len(ids) else []
        dues = []
        least = float(p.subject.sure[target, self.phase])
        for e, count in enumerate(counts):
            if not count:
                continue
            mean = sums[e] / count * ONE_Q16
            if mean < least:
                continue
            p.draft.add(e)
            tokens = min(count * stride, self.step.rows)
            slot = ring.slot_of.get((target, e))
            if slot is not None or e in p.hot[target]:
                if slot is not None and not ring.kept[slot]:
                    ring.kept[slot] = AHEAD
                self.next_gpu += p.costs.gpu_expert.at(tokens)
                continue
            dues.append(Due(e, tokens, min(max(int(mean), 0), ONE_Q16)))
        self.next = ascending(dues)

    # --- the decision ---

    def _inputs(self) -> Inputs:
        p, rows = self.p, self.step.rows
        inside = self.layer + 1 < p.layers
        shared = p.costs.shared.at(rows)
        next_shared = inside and p.subject.shared[self.layer + 1]
        routes = self.routes
        return Inputs(
            costs=p.costs,
            cur=self.cur,
            res=tuple(self.res),
            next=self.next,
            late=self.late,
            policy=p.policy,
            phase=self.phase,
            top_k=routes.ids.shape[1],
            hit_q16=int(p.hits[self.layer + 1, self.phase]) if inside else 0,
            free_slots=p.ring.free(),
            stream=True,
            attention=p.attention(self.step, self.phase),
            backlog=self.backlog,
            gpu_busy=shared if p.subject.shared[self.layer] else 0,
            next_gpu=self.next_gpu + (shared if next_shared else 0),
        )

    def _expect(self, loads: Sequence[int]) -> None:
        """What decisions take the link to do until the next one."""
        p, costs = self.p, self.p.costs
        cpu = costs.cpu_start if len(self.cur) > len(loads) else 0
        cpu += sum(costs.cpu_expert.at(due.tokens) for due in self.cur)
        cpu -= sum(costs.cpu_expert.at(self.rows[e]) for e in loads)
        gpu = sum(costs.gpu_expert.at(due.tokens) for due in self.res)
        gpu += costs.gpu_start if self.res else 0
        link = self.backlog
        end = max(cpu, gpu)
        if loads:
            link += (0 if link else costs.io_start) + len(loads) * costs.io_expert
            last = costs.gpu_expert.at(self.rows[loads[-1]])
            end = max(end, link + costs.gpu_start + last)
        p.free_at = link if loads or self.backlog else costs.io_start
        p.elapsed = end + p.attention(self.step, self.phase)

    # --- binding ---

    def _bind_residents(self, bound: Bound, recalled: dict[int, Transfer]) -> None:
        """First those that are there; then those on their way, in order: sent ones, and those that
        the link takes up again before anything else."""
        ring = self.p.ring
        waiting: dict[int, int] = {}
        for due in self.res:
            e = due.expert
            slot = ring.slot_of.get((self.layer, e))
            if slot is not None and (e in recalled or not self.link.arrived(slot)):
                waiting[e] = slot
            else:
                bound.gpu.append(Hole(e, self.rows[e], slot))
        bound.ready = len(bound.gpu)
        for e in self.p.ahead:
            if e not in waiting:
                continue
            hole = Hole(e, self.rows[e], waiting[e])
            bound.gpu.append(hole)
            if e in recalled:
                recalled[e].hole = hole
                self.link.load(recalled[e])
            else:
                bound.sent += 1

    def _bind_loads(self, bound: Bound) -> list[int]:
        """Slots that may be taken, but those that prefetches are to have; behind them the slots of
        the first ones again. Returns who found a place: the others stay on the CPU."""
        p, ring = self.p, self.p.ring
        made = bound.decision
        free = ring.free()
        room = free - len(made.pre) if free > len(made.pre) else min(free, 1)
        taken: list[int] = []
        loads: list[int] = []
        for i, load in enumerate(made.on):
            e = load.expert
            popularity = p.popularity_of(self.layer, e)
            slot = None
            if len(taken) < room:
                slot = ring.take(self.phase, self.layer, e, popularity, IN_USE, p.now)
            if slot is not None:
                taken.append(slot)
            elif taken:
                slot = taken[i % len(taken)]
                ring.assign(slot, self.layer, e, popularity, p.now)
            else:
                break
            p.label(slot, self.layer, e)
            hole = Hole(e, self.rows[e], slot)
            bound.gpu.append(hole)
            self.link.load(Transfer(self.layer, e, slot, i >= len(taken), hole))
            p.ledger[self.layer].loads += 1
            p.ledger[self.layer].load_bytes += p.subject.expert_bytes[self.layer]
            loads.append(e)
        return loads

    def _bind_prefetches(self, made: Decision, room: int) -> None:
        p, target = self.p, self.layer + 1
        for load in made.pre[:room]:
            popularity = p.popularity_of(target, load.expert)
            slot = p.ring.take(self.phase, target, load.expert, popularity, AHEAD, p.now)
            if slot is None:
                return
            p.label(slot, target, load.expert)
            self.link.prefetch(Transfer(target, load.expert, slot))
            p.ahead.append(load.expert)
