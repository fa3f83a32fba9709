"""AdaptSched: which experts of a layer go to the GPU, decided from their pending tokens.

Algorithm 1 of the paper, to be read beside it, and the table of all policies. The C function of
runtime_c/src/decide.c is the same, number by number. Where the paper leaves an index or a tie open:

- The paper's slices include both ends. N experts are due in this layer (its n + 1), M in the next.
- Lists ascend by (tokens, popularity, expert); of equal ones, the next layer's are the colder.
- t_c(S) is cpu_start + what each expert adds; nothing for no experts. t_g is a submission of one.
- Without an i', nothing is loaded, T_G is 0 and T_C all of the layer on the CPU.
- f stays a real number, |f| is c = ceil(f), and xi > 0 just when R_hit > c - f.
- Prefetches are clamped to the next layer's experts and to the slots; beyond those, none is
  partly hidden, and neither xi nor Eq 6 is asked.
- Slots are given up when another expert wants them (pdscope.compiler.policies), so there is no
  list of unloads.

May import pdscope.ir and pdscope.compiler.{decision,policies}.
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

from pdscope.compiler import policies
from pdscope.compiler.decision import (
    ONE_Q16,
    Decision,
    Due,
    Eq6,
    Inputs,
    Mode,
    Policy,
    Why,
    clamp,
    hottest,
    t_c,
    t_g,
)
from pdscope.ir.isa import Phase


def balance_target(given: Inputs) -> int:
    """n_c = argmin max((k - n_c) t_g, n_c t_c), experts of one token; the smallest of several."""
    one = Due(0, 1)
    gpu, cpu, k = given.gpu(one), given.cpu(one), given.top_k
    return min(range(k + 1), key=lambda n: max((k - n) * gpu, n * cpu))


def decode_mode(given: Inputs, n_c: int) -> Mode:
    """The paper's mode table; batches are always in mode d."""
    if given.phase is Phase.BATCH:
        return Mode.CROSS
    if len(given.cur) > n_c:
        return Mode.CROSS if len(given.next) > n_c else Mode.LOAD
    return Mode.PREFETCH if len(given.next) > n_c else Mode.UNLOAD


def global_direction(given: Inputs, why: Why) -> int:
    """Step 1: where L_global begins in this layer's list; its length if nowhere."""
    merged = sorted(
        [(due.tokens, 0, i, due) for i, due in enumerate(given.next)]
        + [(due.tokens, 1, i, due) for i, due in enumerate(given.cur)]
    )
    sums = accumulate(given.cpu(due) for *_, due in merged)
    for i, ((*_, due), on_cpu) in enumerate(zip(merged, sums, strict=True)):
        loaded = len(merged) - i
        why.global_gpu = given.io_start + loaded * given.io_expert + t_g(given, due)  # Eq 3
        why.global_cpu = given.cpu_start + on_cpu + given.attention_ns
        if why.global_gpu < why.global_cpu:
            why.global_i = i
            return sum(is_cur for _, is_cur, *_ in merged[:i])
    return len(given.cur)


def local_boundary(given: Inputs, first: int, mode: Mode, why: Why) -> int:
    """Step 2: the smallest i' >= first that is better on the GPU; the list's length if none is."""
    sums = [0, *accumulate(map(given.cpu, given.cur))]
    n = len(given.cur)
    for i in range(first, n):
        on_cpu = i + 1 if mode is Mode.LOAD else i  # Eq 5, or Eq 4
        gpu = given.io_start + (n - i) * given.io_expert + t_g(given, given.cur[i])
        cpu = given.cpu_start + sums[on_cpu] if on_cpu else 0
        if gpu < cpu:
            why.local_i, why.local_gpu, why.local_cpu = i, gpu, cpu
            return i
    why.local_gpu, why.local_cpu = 0, t_c(given, given.cur)
    return n


def next_gains(given: Inputs, c: int, why: Why) -> bool:
    """Eq 6: with the partly hidden prefetch, the next layer's GPU is done before its CPU would be
    without it."""
    m = len(given.next)
    why.eq6_gpu = why.late + t_g(given, given.next[m - c])
    why.eq6_cpu = t_c(given, given.next[: m - c + 1])
    why.eq6 = Eq6.HOLDS if why.eq6_gpu < why.eq6_cpu else Eq6.FAILS
    return why.eq6 is Eq6.HOLDS


def hidden_prefetches(given: Inputs, on: int, constrained: bool, why: Why) -> int:
    """Step 3: how many prefetches hide behind the link's bubble and the attention."""
    io, most = given.io_expert, given.room_pre(on)
    why.hidden = why.local_cpu - why.local_gpu + given.attention_ns  # T_gap + t_attn = f t_io
    c = (why.hidden + io - 1) // io
    why.ceil_f = min(c, 2**32 - 1)
    why.late = c * io - why.hidden  # (ceil f - f) t_io
    why.xi = given.hit_q16 * io > why.late * ONE_Q16
    if c > most:
        return most
    if not c:
        return 0
    worth = why.xi and (not constrained or next_gains(given, c, why))
    return c if worth else c - 1


def paper(given: Inputs) -> Decision:
    """Algorithm 1."""
    why = Why(mode=Mode.PREFILL)
    constrained = given.phase is not Phase.PREFILL
    if constrained:
        why.n_c = balance_target(given)
        why.mode = decode_mode(given, why.n_c)
    n = len(given.cur)
    if why.mode is Mode.UNLOAD:
        return Decision(why=why)
    first = n if why.mode is Mode.PREFETCH else 0
    if why.mode in (Mode.CROSS, Mode.PREFILL):
        first = global_direction(given, why)
    on = n - local_boundary(given, max(first, n - given.room_on()), why.mode, why)
    pre = 0
    if why.mode is not Mode.LOAD:
        pre = hidden_prefetches(given, on, constrained, why)
    return Decision(hottest(given.cur, on), hottest(given.next, pre), why)


# --- the default ---


def adaptsched(given: Inputs) -> Decision:
    """For every number of on-demand loads, this layer's end and then the next one's, as good as it
    can become from there; the first of the least. Counts what Algorithm 1 leaves out: the link's
    backlog, what the residents take on the GPU, and that transfers go on in the next layer.
    """
    why = Why()
    ahead = _Ahead(given)
    least = None
    for on, (end, link) in enumerate(_layer_ends(given)):
        now = end + given.attention_ns
        for room, most in _next_rooms(given, on):
            next_end, wanted = ahead.least(now, link, room, most)
            if least is None or (next_end, end) < least[:2]:
                least = next_end, end, on, link, min(room, wanted)
    assert least is not None
    why.next_end, why.layer_end, on, link, wanted = least
    pre = _started(given, link, wanted, why)
    if given.phase is Phase.PREFILL:
        why.mode = Mode.PREFILL
    elif on:
        why.mode = Mode.CROSS if pre else Mode.LOAD
    else:
        why.mode = Mode.PREFETCH if pre else Mode.UNLOAD
    return Decision(hottest(given.cur, on), hottest(given.next, pre), why)


def _layer_ends(given: Inputs) -> Iterator[tuple[int, int]]:
    """(end of this layer, end of its on-demand transfers) for 0, 1, 2 ... of them."""
    there = given.res[: len(given.res) - given.late]
    gpu = given.gpu_busy_ns + (given.gpu_start + sum(map(given.gpu, there)) if there else 0)
    for k, due in enumerate(given.res[len(there) :], start=1):
        arrival = max(0, given.backlog_ns - (given.late - k) * given.io_expert)
        gpu = max(gpu, arrival) + t_g(given, due)
    sums = [0, *accumulate(map(given.cpu, given.cur))]
    link = given.backlog_ns
    n = len(given.cur)
    for on in range(given.room_on() + 1):
        if on:
            link = (link or given.io_start) + given.io_expert
            gpu = max(gpu, link) + t_g(given, given.cur[n - on])
        left = n - on
        yield max(gpu, given.cpu_start + sums[left] if left else 0), link


def _next_rooms(given: Inputs, on: int) -> Iterator[tuple[int, int]]:
    """(prefetches, loads of the next layer in all) that the slots allow. A stream of loads needs
    one slot: prefetches that take all of them leave none, or one of them stays away."""
    room, m = given.room_pre(on), len(given.next)
    if not given.stream:
        yield room, min(m, given.free_slots)
    elif room < given.free_slots:
        yield room, m
    else:
        yield room, room
        if room:
            yield room - 1, m


class _Ahead:
    """The next layer when `loads` of its experts, the hottest, are prefetched or loaded then."""

    def __init__(self, given: Inputs) -> None:
        self.given = given
        self.cpu = [0, *accumulate(map(given.cpu, given.next))]
        # Of the hottest k on the GPU.
        self.gpu = [0, *accumulate(map(given.gpu, reversed(given.next)))]

    def least(self, now: int, link: int, room: int, most: int) -> tuple[int, int]:
        """(its end, loads) for a layer whose gate output is known at `now`, and a link that is done
        with the layer before at `link`; the fewest loads of several. `room`, `most`: prefetches,
        and loads in all, that the slots allow.

        The more loads, the later the GPU and the earlier the CPU: the best is where they cross.
        """
        given = self.given
        io, hit = given.io_expert, given.hit_q16
        # What the link has moved by then of what will be needed: of prefetches, R_hit is.
        moved = min(clamp(now - (link or given.io_start)) * hit // ONE_Q16, room * io)
        low, high = 0, most
        while low < high:
            middle = (low + high) // 2
            if self._gpu(now, link, moved, middle) < self._cpu(now, middle):
                low = middle + 1
            else:
                high = middle
        ends = [
            (max(self._gpu(now, link, moved, k), self._cpu(now, k)), k)
            for k in range(max(low - 1, 0), low + 1)
        ]
        return min(ends)

    def _cpu(self, now: int, loads: int) -> int:
        left = len(self.given.next) - loads
        return now + (self.given.cpu_start + self.cpu[left] if left else 0)

    def _gpu(self, now: int, link: int, moved: int, loads: int) -> int:
        """The k-th of the late ones arrives when the link has moved k experts in all. GPU times
        descend, so the chain of late submissions is held up by its first one or by its last."""
        given, io = self.given, self.given.io_expert
        there = min(moved // io, loads)
        end = now + given.next_gpu_ns + (given.gpu_start + self.gpu[there] if there else 0)
        if loads == there:
            return end
        chain = (loads - there) * given.gpu_start + self.gpu[loads] - self.gpu[there]
        start = link if link > now else now if moved % io else now + given.io_start
        first = start + (there + 1) * io - moved
        last = start + loads * io - moved
        return max(end + chain, first + chain, last + t_g(given, given.next[-loads]))


def _started(given: Inputs, link: int, most: int, why: Why) -> int:
    """How many of the `most` experts' transfers start before the next layer's gate output is
    known; the last of them, partly hidden, only for a positive xi."""
    io = given.io_expert
    why.hidden = max(why.layer_end + given.attention_ns - (link or given.io_start), 0)
    c = (why.hidden + io - 1) // io
    why.ceil_f = min(c, 2**32 - 1)
    why.late = c * io - why.hidden
    why.xi = given.hit_q16 * io > why.late * ONE_Q16
    if not given.hit_q16:
        return 0
    if c > most:
        return most
    return c if why.xi or not c else c - 1


# --- the table ---

POLICIES: dict[Policy, Callable[[Inputs], Decision]] = {
    Policy.ADAPTSCHED: adaptsched,
    Policy.PAPER: paper,
    **policies.RIVALS,
}


def decide(given: Inputs) -> Decision:
    """The policy's decision: what the runtime does at this layer."""
    return POLICIES[given.policy](given)
