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

from collections.abc import Callable
from itertools import accumulate

from pdscope.compiler.decision import (
    ONE_Q16,
    Decision,
    Due,
    Eq6,
    Inputs,
    Mode,
    Policy,
    Why,
    hottest,
)
from pdscope.ir.isa import Phase


def t_c(given: Inputs, experts: tuple[Due, ...]) -> int:
    """A set of experts on the CPU."""
    return given.cpu_start + sum(map(given.cpu, experts)) if experts else 0


def t_g(given: Inputs, expert: Due) -> int:
    """One expert on the GPU."""
    return given.gpu_start + given.gpu(expert)


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


def static(given: Inputs) -> Decision:
    return Decision()


def ondemand(given: Inputs) -> Decision:
    return Decision(hottest(given.cur, given.room_on()))


POLICIES: dict[Policy, Callable[[Inputs], Decision]] = {
    Policy.PAPER: paper,
    Policy.STATIC: static,
    Policy.ONDEMAND: ondemand,
}


def decide(given: Inputs) -> Decision:
    """The policy's decision: what the runtime does at this layer."""
    return POLICIES[given.policy](given)
