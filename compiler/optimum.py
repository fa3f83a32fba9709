"""How good a decision can be: two layers on CPU, GPU and link, their exact optimum, and a bound.

The model, from the moment at which layer l's gate output is known (time 0); all in ns:

- The CPU's job takes cpu_start + what each of its experts adds; no experts, no time.
- The link moves one expert after another, io_expert each: first what it owes (until `backlog`; the
  late residents come one by one, the last at its end), then the on-demand loads, then the
  prefetches. A transfer that finds the link idle waits io_start first.
- The GPU first does what lies before the experts (gpu_busy, next_gpu), then, in one submission
  of gpu_start + what each adds, the experts that are there when the layer's gate output is known.
  Each later one is a submission of its own, in order of arrival.
- The layer ends when CPU and GPU are done. After `attention` the next layer's gate output is
  known; the link goes on meanwhile. What was predicted for the next layer is now due, what was
  prefetched of it is there or on its way, and the rest runs on the CPU or is loaded on demand.
- Its end is what counts. There is no layer after it.
- Slots limit the on-demand loads and the prefetches as in Inputs.room_on and room_pre; in the
  next layer, all of `free_slots` but those of the prefetches are free again.

May import pdscope.compiler.decision and numpy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.decision import Decision, Due, Inputs, ascending

MOST_EXPERTS = 12  # of a layer, for the exact optimum
_NEVER = -1


@dataclass(frozen=True)
class Ends:
    """When the two layers end."""

    layer: int
    next: int


def job(given: Inputs, experts: Sequence[Due]) -> int:
    """Experts on the CPU."""
    return given.cpu_start + sum(map(given.cpu, experts)) if experts else 0


def gpu_end(
    given: Inputs, start: int, there: Sequence[Due], late: Iterable[tuple[int, Due]]
) -> int:
    """`start`: when the GPU is free for experts; `late`: (arrival, expert) in order of arrival."""
    end = start
    if there:
        end += given.gpu_start + sum(map(given.gpu, there))
    for arrival, due in late:
        end = max(end, arrival) + given.gpu_start + given.gpu(due)
    return end


def arrivals(given: Inputs, owed_until: int, now: int, n: int) -> list[int]:
    """Of n transfers asked for at `now`, on a link that is busy until `owed_until`."""
    start = owed_until if owed_until > now else now + given.io_start
    return [start + (k + 1) * given.io_expert for k in range(n)]


def late_residents(given: Inputs) -> list[tuple[int, Due]]:
    """(arrival, expert) of those that are on their way."""
    first = len(given.res) - given.late
    return [
        (max(0, given.backlog_ns - (given.late - 1 - k) * given.io_expert), due)
        for k, due in enumerate(given.res[first:])
    ]


def layer_end(given: Inputs, on: Sequence[Due]) -> tuple[int, int]:
    """(end of layer l, end of its on-demand transfers) when `on` is loaded, in that order."""
    chosen = {due.expert for due in on}
    cpu = job(given, [due for due in given.cur if due.expert not in chosen])
    times = arrivals(given, given.backlog_ns, 0, len(on))
    late = [*late_residents(given), *zip(times, on, strict=True)]
    gpu = gpu_end(given, given.gpu_busy_ns, given.res[: len(given.res) - given.late], late)
    return max(cpu, gpu), times[-1] if times else given.backlog_ns


def two_layers(
    given: Inputs,
    decide: Callable[[Inputs], Decision],
    truth: Sequence[Due] | None = None,
    parts: int = 1,
) -> Ends:
    """Layer l as `decide` has it, then layer l + 1 as it decides there.

    `truth`: the experts that the next layer then activates, and that are not there without a
    prefetch; None: those predicted. Prefetches of others are cancelled then: of the transfer that
    is under way, the part that is, of `parts` in each, still ends.
    """
    by_id = {due.expert: due for due in given.cur}
    made = decide(given)
    end, link = layer_end(given, [by_id[load.expert] for load in made.on])
    now = end + given.attention_ns
    due_next = {due.expert: due for due in (given.next if truth is None else truth)}
    there: list[Due] = []
    late: list[Due] = []
    clock = link if made.on or given.backlog_ns else given.io_start
    for load in made.pre:
        useful = due_next.get(load.expert)
        if useful is None and clock + given.io_expert > now:
            part = -(-given.io_expert // parts)
            clock += min(given.io_expert, -(-max(now - clock, 0) // part) * part)
            continue
        clock += given.io_expert
        if useful is not None:
            (there if clock <= now else late).append(useful)
    fetched = {due.expert for due in (*there, *late)}
    following = replace(
        given,
        cur=ascending([due for due in due_next.values() if due.expert not in fetched]),
        res=(*there, *late),
        next=(),
        late=len(late),
        attention=0,
        backlog=max(0, clock - now) if made.pre or link > now else 0,
        gpu_busy=given.next_gpu_ns,
        next_gpu=0,
        free_slots=max(0, given.free_slots - len(fetched)),
    )
    made = decide(following)
    by_id = {due.expert: due for due in following.cur}
    last, _ = layer_end(following, [by_id[load.expert] for load in made.on])
    return Ends(end, now + last)


# --- the optimum ---


def optimum(given: Inputs) -> Ends:
    """The least end of the next layer over every choice of loads, prefetches and orders, and the
    least end of layer l that goes with it. `next` comes true.

    Exhaustive over the sets and orders loaded in layer l and the sets loaded for the next one, at
    most 12 experts each. Not tried, because never better: in the next layer any order but hottest
    first (the transfers are equally long, so the longest GPU time goes first); a prefetch less than
    the slots hold when the expert is loaded anyway, but for a slot left to the next layer's stream;
    and, of as many loads in layer l, all ends between the arrivals of two prefetches but the first.
    A later end can be better once another prefetch is there: it needs no submission of its own.

    Raises ValueError for more experts.
    """
    if max(len(given.cur), len(given.next)) > MOST_EXPERTS:
        raise ValueError(f"{len(given.cur)} and {len(given.next)} experts, at most {MOST_EXPERTS}")
    following = _Following(given)
    best = Ends(_NEVER, _NEVER)
    for n, (ends, link) in enumerate(_layer_ends(given)):
        tried = _NEVER
        for end in sorted(ends):
            now = end + given.attention_ns
            if best.next != _NEVER and now + following.shortest > best.next:
                break
            there = following.there(now, link, n)
            if there == tried:
                continue
            tried = there
            last = following.least(now, link, n)
            if best.next == _NEVER or (last, end) < (best.next, best.layer):
                best = Ends(end, last)
    return best


def _layer_ends(given: Inputs) -> Iterator[tuple[set[int], int]]:
    """(ends of layer l, end of its on-demand transfers) over all sets and orders of 0, 1, 2 ...
    loads."""
    gpu = [given.gpu_start + given.gpu(due) for due in given.cur]
    there = given.res[: len(given.res) - given.late]
    # When the GPU is done, by the set loaded: bit i is cur[i].
    done = {0: {gpu_end(given, given.gpu_busy_ns, there, late_residents(given))}}
    times = arrivals(given, given.backlog_ns, 0, given.room_on())
    for n, link in enumerate([given.backlog_ns, *times]):
        if n:
            before, done = done, {}
            for loaded, ends in before.items():
                for i, ns in enumerate(gpu):
                    if not loaded >> i & 1:
                        after = done.setdefault(loaded | 1 << i, set())
                        after.update(max(end, link) + ns for end in ends)
        ends = set()
        for loaded, after in done.items():
            cpu = job(given, [due for i, due in enumerate(given.cur) if not loaded >> i & 1])
            ends.update(max(cpu, end) for end in after)
        yield ends, link


class _Following:
    """The next layer over all sets of loaded experts at once: row s is the set with bits s."""

    def __init__(self, given: Inputs) -> None:
        self.given = given
        hot_first = given.next[::-1]
        m = len(hot_first)
        sets = np.arange(1 << m)
        member = (sets[:, None] >> np.arange(m)) & 1 == 1
        cpu = np.array([given.cpu(due) for due in hot_first], dtype=np.int64)
        gpu = np.array([given.gpu(due) for due in hot_first], dtype=np.int64)
        self.size = member.sum(axis=1)
        left = (~member * cpu).sum(axis=1)
        self.cpu = np.where(self.size < m, left + given.cpu_start, 0)
        # Column k: the GPU time of the set's k-th transfer.
        order = np.argsort(~member, axis=1, kind="stable")
        self.gpu = np.where(np.arange(m) < self.size[:, None], gpu[order], 0)
        # With all that is loaded there from the start.
        on_gpu = given.next_gpu_ns + np.where(self.size, given.gpu_start, 0) + self.gpu.sum(axis=1)
        self.shortest = int(np.maximum(self.cpu, on_gpu).min())

    def there(self, now: int, link: int, n_on: int) -> int:
        """The most prefetches that have arrived by `now`."""
        moved = max(now - (link or self.given.io_start), 0) // self.given.io_expert
        return min(moved, self.given.room_pre(n_on))

    def least(self, now: int, link: int, n_on: int) -> int:
        """Of a layer whose gate output is known at `now`; the link owes until `link`. Prefetches
        that take every slot leave none to a stream of loads, so one less is tried as well."""
        room = self.given.room_pre(n_on)
        rooms = (room, room - 1) if room and self.given.stream else (room,)
        return min(self._least(now, link, room) for room in rooms)

    def _least(self, now: int, link: int, room: int) -> int:
        given, m = self.given, self.gpu.shape[1]
        start = link if link > 0 else given.io_start  # as two_layers: idle only from the beginning
        io = given.io_expert
        fetched = start + (np.arange(m) + 1) * io
        n_pre = np.minimum(self.size, room)
        busy = np.where(n_pre > 0, start + n_pre * io, link)
        first = np.where(busy > now, busy, now + given.io_start)
        ranks = np.arange(m)[None, :]
        behind = ranks - n_pre[:, None]
        arrival = np.where(behind < 0, fetched[None, :], first[:, None] + (behind + 1) * io)
        valid = ranks < self.size[:, None]
        early = valid & (behind < 0) & (arrival <= now)
        end: NDArray[np.int64] = np.full(self.size.shape, now + given.next_gpu_ns, dtype=np.int64)
        end += np.where(early.any(axis=1), given.gpu_start, 0)
        end += np.where(early, self.gpu, 0).sum(axis=1)
        for k in range(m):
            late = valid[:, k] & ~early[:, k]
            then = np.maximum(end, arrival[:, k]) + given.gpu_start + self.gpu[:, k]
            end = np.where(late, then, end)
        # Loads of the next layer pass through the slots that its prefetches leave.
        left = given.free_slots - n_pre
        loads = self.size - n_pre
        possible = (loads == 0) | ((left > 0) & (given.stream | (loads <= left)))
        ends = np.maximum(end, np.where(self.cpu > 0, now + self.cpu, now))
        return int(ends[possible].min())


# --- a bound for any size ---


def lower_bound(given: Inputs) -> int:
    """No schedule of the model ends the next layer earlier: the larger of what CPU and link can do
    together and what the path through the residents and the attention takes.

    CPU and link: the layers' experts are pooled. Whatever is loaded, the least that is left to the
    CPU is left by loading the dearest ones, and it cannot run during the attention; each load takes
    io_expert of the link, behind the backlog, and a submission after the last. O(n log n).
    """
    both = sorted((given.cpu(due), given.gpu(due)) for due in (*given.cur, *given.next))
    least_gpu = given.gpu_start + min((gpu for _, gpu in both), default=0)
    link = given.backlog_ns if given.backlog_ns else given.io_start
    cpu = sum(ns for ns, _ in both)
    best = cpu + given.attention_ns
    for loads, (ns, _) in enumerate(reversed(both), start=1):
        cpu -= ns
        end = link + loads * given.io_expert + least_gpu
        best = min(best, max(cpu + given.attention_ns, end))
    there = given.res[: len(given.res) - given.late]
    path = gpu_end(given, given.gpu_busy_ns, there, late_residents(given))
    return max(best, path + given.attention_ns + given.next_gpu_ns)
