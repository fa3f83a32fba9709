"""A time that no schedule of a step can beat, with what is on the GPU when the step begins.

Of a layer, k of the experts that are not there cross the link. Its experts then end no sooner than
the CPU is done with as many of the smallest as are left, and the GPU with those that are there and
the k smallest, in one submission. Transfers are free but for the link's time: k of all layers take
it for k transfers in all, at its best rate. So with any numbers k_l

    step >= sum over layers of (attention + experts(k_l)),   step >= sum of k_l * transfer,

and the bound is the least maximum of the two, over the lower convex hulls of experts(k).
May import pdscope.ir.isa and pdscope.compiler.simulate.
"""

from collections.abc import Sequence

import numpy as np

from pdscope.compiler.simulate.placing import Placement
from pdscope.compiler.simulate.timing import SECOND, Timing
from pdscope.routing_trace import Step


def step_bound(placement: Placement, timing: Timing, step: Step) -> int:
    """ns; `placement`: as it is before the step."""
    subject, link = placement.subject, timing.link
    rows = step.rows
    fixed = 0
    gains: list[float] = []
    for layer, here in enumerate(subject.model.layers):
        fixed += _around(subject.hidden, subject.act_bytes, timing, step, here.is_moe)
        if not here.is_moe:
            fixed += timing.kernel("mlp", [rows], 0)
            continue
        counts = np.bincount(step.layers[layer].ids.ravel())
        experts = np.flatnonzero(counts).tolist()
        there: list[int] = []
        away: list[int] = []
        for e in experts:
            on_gpu = e in placement.hot[layer] or (layer, e) in placement.ring.slot_of
            (there if on_gpu else away).append(int(counts[e]))
        shared = timing.kernel("shared", [rows], 0) if subject.shared[layer] else 0
        ends = _ends(timing, there, sorted(away), shared, bool(subject.ring))
        first, slopes = _hull(ends)
        fixed += first
        gains += slopes
    transfer = _transfer(max(subject.expert_bytes), max(link.h2d, link.h2d_busy))
    if step.logits:
        fixed += timing.kernel("lm_head", [step.logits], 0)
    best = fixed
    total = float(fixed)
    for k, gain in enumerate(sorted(gains, reverse=True), start=1):
        total -= gain
        best = min(best, max(int(total), k * transfer))
        if k * transfer > total:
            break
    return best


def _transfer(size: int, rate: int) -> int:
    return size * SECOND // rate


def _around(hidden: int, act: int, timing: Timing, step: Step, moe: bool) -> int:
    """What comes before a layer's experts: kernels, and where there are routes, their copy."""
    rows, context = step.rows, int(step.position.sum()) // 1024
    ns = 2 * timing.kernel("norm", [rows], 0) + timing.kernel("attention", [rows], context)
    if moe:
        rate = max(timing.link.d2h, timing.link.d2h_busy)
        ns += timing.kernel("gate", [rows], 0) + timing.kernel("combine", [rows], 0)
        ns += _transfer(act * rows * hidden, rate)
    return ns


def _ends(
    timing: Timing, there: Sequence[int], away: Sequence[int], shared: int, may_load: bool
) -> list[int]:
    """Of a layer's experts with 0, 1, 2 ... loads; `away` ascends."""
    ends = []
    for k in range(len(away) + 1 if may_load else 1):
        left = list(away[: len(away) - k])
        cpu = timing.host("cpu.experts", left) if left else 0
        on_gpu = [*there, *away[:k]]
        gpu = timing.kernel("experts", on_gpu, 0) if on_gpu else 0
        ends.append(max(cpu, gpu + shared))
    return ends


def _hull(ends: Sequence[int]) -> tuple[int, list[float]]:
    """The first value, and by how much each further load lowers the lower convex hull."""
    hull = [0]
    for k in range(1, len(ends)):
        while len(hull) > 1 and _slope(ends, hull[-1], k) <= _slope(ends, hull[-2], hull[-1]):
            hull.pop()
        hull.append(k)
    slopes: list[float] = []
    for a, b in zip(hull, hull[1:], strict=False):
        slope = -_slope(ends, a, b)
        if slope <= 0:
            break
        slopes += [slope] * (b - a)
    return ends[0], slopes


def _slope(ends: Sequence[int], a: int, b: int) -> float:
    return (ends[b] - ends[a]) / (b - a)
