"""The rivals' policies, and which cached expert each policy gives up: runtime_c/src/policy_*.c in
Python. docs/policies.md says where each comes from and what was not taken over.

Slots bound every policy alike; what a policy would load and cannot runs on the CPU.
May import pdscope.ir.isa and pdscope.compiler.decision.
"""

from collections.abc import Callable, Sequence

from pdscope.compiler.decision import (
    ONE_Q16,
    Cached,
    Decision,
    Due,
    Inputs,
    Load,
    Policy,
    hottest,
    t_c,
    t_g,
)
from pdscope.ir.isa import Phase

_U32 = 1 << 32
IMPORTANT = (6, 10)  # apex: the experts that hold the first 6/10 of the routing weight
WINDOW = 256  # apex: steps after which an expert counts as long unused
SOON = ONE_Q16 >> 3  # adaptsched: what the very next layer's experts are worth more than the last's
TO_COME = 1 << 32  # adaptsched in prefill: more than any worth


def static(given: Inputs) -> Decision:
    """Nothing moves: what is on the GPU stays, all else runs on the CPU."""
    return Decision()


def ondemand(given: Inputs) -> Decision:
    """Everything runs on the GPU; what is not there is loaded now."""
    return Decision(hottest(given.cur, given.room_on()))


def fate(given: Inputs) -> Decision:
    """As ondemand, and everything predicted for the next layer is prefetched."""
    on = given.room_on()
    return Decision(hottest(given.cur, on), hottest(given.next, given.room_pre(on)))


def fiddler(given: Inputs) -> Decision:
    """Each expert by itself: to the GPU if transfer and computing there take less than the CPU."""
    transfer = given.io_start + given.io_expert
    gains = [due for due in given.cur if transfer + t_g(given, due) < t_c(given, (due,))]
    return Decision(hottest(gains, min(len(gains), given.room_on())))


def balanced(
    given: Inputs, dues: Sequence[Due], gpu: int, link: int, most: int
) -> tuple[int, int, int]:
    """Greedy balance of an ascending list: (loads, end, when the link is done).

    The CPU takes the coldest expert that is left or the link the hottest, whichever is computed
    first; the CPU if both are. `gpu`, `link`: when they are free; `most`: loads at most.
    """
    low, high = 0, len(dues)
    cpu = given.cpu_start
    while low < high:
        by_cpu = cpu + given.cpu(dues[low])
        arrival = link + given.io_expert
        by_gpu = max(gpu, arrival) + t_g(given, dues[high - 1])
        if by_gpu < by_cpu and len(dues) - high < most:
            high -= 1
            gpu, link = by_gpu, arrival
        else:
            low += 1
            cpu = by_cpu
    return len(dues) - high, max(gpu, cpu if low else 0), link


def hybrimoe(given: Inputs) -> Decision:
    """Greedy balance of this layer's queues; while the link is idle before the next layer, it
    prefetches the hottest of the predicted as long as each shortens the next layer."""
    gpu = given.gpu_busy_ns
    if given.res:
        gpu += given.gpu_start + sum(map(given.gpu, given.res))
        if given.late:
            gpu = max(gpu, given.backlog_ns)
    idle_from = given.backlog_ns or given.io_start
    on, end, link = balanced(given, given.cur, gpu, idle_from, given.room_on())
    fit = max(end + given.attention_ns - link, 0) // given.io_expert
    fit = min(fit, given.room_pre(on))
    pre = 0
    before = _next_layer(given, pre)
    while pre < fit and (after := _next_layer(given, pre + 1)) < before:
        pre += 1
        before = after
    return Decision(hottest(given.cur, on), hottest(given.next, pre))


def _next_layer(given: Inputs, pre: int) -> int:
    """How long the balanced next layer takes when the hottest `pre` of it are there."""
    left = given.next[: len(given.next) - pre]
    gpu = given.next_gpu_ns
    if pre:
        gpu += given.gpu_start + sum(map(given.gpu, given.next[len(left) :]))
    return balanced(given, left, gpu, given.io_start, len(left))[1]


def apex(given: Inputs) -> Decision:
    """As hybrimoe; loads of experts that matter little may be of the smaller format."""
    made = hybrimoe(given)
    return Decision(
        _marked(made.on, (*given.cur, *given.res)), _marked(made.pre, given.next), made.why
    )


def _marked(loads: Sequence[Load], dues: Sequence[Due]) -> tuple[Load, ...]:
    """Low: those behind the ones that hold the first 6/10 of the dues' routing weight."""
    part, whole = IMPORTANT
    total = sum(due.weight for due in dues)
    by_id = {due.expert: due for due in dues}
    return tuple(
        Load(load.expert, _heavier(by_id[load.expert], dues) * whole > total * part)
        for load in loads
    )


def _heavier(due: Due, dues: Sequence[Due]) -> int:
    """The weight of those before it, the heaviest first, of equal ones the lowest id."""
    return sum(d.weight for d in dues if (-d.weight, d.expert) < (-due.weight, due.expert))


RIVALS: dict[Policy, Callable[[Inputs], Decision]] = {
    Policy.STATIC: static,
    Policy.ONDEMAND: ondemand,
    Policy.FATE: fate,
    Policy.FIDDLER: fiddler,
    Policy.HYBRIMOE: hybrimoe,
    Policy.LRU: ondemand,
    Policy.APEX: apex,
}


# --- which slot is given up ---


def half_life_of(policy: Policy) -> int:
    """In steps."""
    return 5 if policy is Policy.HYBRIMOE else 22  # of 1/8, of 1/32


def left_of(policy: Policy, score: int, age: int) -> int:
    """What is left of a score: half of it after each half-life, and a straight line between. For a
    part of 1/2^k added at each activation, that is ln 2 / -ln(1 - 1/2^k) steps."""
    half_life = half_life_of(policy)
    halved, rest = divmod(age, half_life)
    left = score >> min(halved, 32)
    return left - left * rest // (2 * half_life)


def score(policy: Policy, old: int, weight: int, age: int) -> int:
    """An expert's score when its layer activates it, with this routing weight, `age` steps after
    the last time: hybrimoe's is the mean of its weights over about 8 steps, the others' the part of
    about 32 steps that activated it. It is kept for every expert, and begins as its popularity."""
    part = weight >> 3 if policy is Policy.HYBRIMOE else ONE_Q16 >> 5
    return min(left_of(policy, old, age) + part, _U32 - 1)


def victim(
    policy: Policy, phase: Phase, slots: Sequence[Cached], layer: int, n_layers: int, now: int
) -> int | None:
    """The slot that the policy takes next; None if all are kept. `layer` asks, in step `now`, which
    is of this phase.

    Empty slots first, then those with the least to lose; of equal ones the lowest index.
    """
    best: tuple[int, int] | None = None
    chosen = None
    for i, slot in enumerate(slots):
        if slot.layer < 0:
            return i
        if slot.kept:
            continue
        age = (now - slot.used) % _U32
        worth = (_worth(policy, phase, slot, layer, n_layers, age), -age)
        if best is None or worth < best:
            best, chosen = worth, i
    return chosen


def _worth(policy: Policy, phase: Phase, slot: Cached, layer: int, n_layers: int, age: int) -> int:
    """What of it depends on the layer that asks is the same for all slots of a layer."""
    ahead = (slot.layer - layer) % n_layers
    often = min(slot.popularity, ONE_Q16)
    match policy:
        case Policy.ADAPTSCHED:  # of late and as a rule; in prefill nearly all of a layer is needed
            recent = left_of(policy, slot.score, age)
            soon = (n_layers - ahead) * SOON // n_layers
            to_come = TO_COME if phase is Phase.PREFILL and slot.layer > layer else 0
            return recent + often + soon + to_come
        case Policy.HYBRIMOE:
            return left_of(policy, slot.score, age)
        case Policy.FATE:  # shallow layers are predicted worst, and keep their experts longest
            return n_layers - slot.layer
        case Policy.APEX:  # recently used, often used, soon used: each in 1/65536
            recent = (WINDOW - min(age, WINDOW)) * (65536 // WINDOW)
            return recent + often + (n_layers - ahead) * 65536 // n_layers
        case _:  # least recently used
            return 0
