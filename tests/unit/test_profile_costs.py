"""The measuring pass with a clock of ours instead of a runtime: what it measures, in what time, and
what it makes of it.

Holds of the issue: "a pass that measures on the target: expert time ... by token count (1 to 4096,
monotone piecewise fit with error bars), ... attention and gate per phase and context length,
predictor time". Nothing here is timed.
"""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.model_keys import QWEN3

from pdscope.compiler.passes.profile_costs import (
    LEAST,
    ROUNDS,
    Limits,
    busy,
    cpu_name,
    device_of,
    points,
    sample,
)
from pdscope.compiler.passes.profile_gpu import busy_of, link_of
from pdscope.costs import KNOTS, Bar, CostTable, Curve, Fitted, Machine

LIMITS = Limits(experts=128, top_k=8, max_rows=512, context=2048, shared=True, predicts=True)
START, EXPERT, ROW, CONTEXT = 20_000, 100_000, 3_000, 500
IDLE, LOAD = 8_000, 200_000  # of the link: before the first byte, and an expert of 409,600 bytes


@dataclass
class Fake:
    """A machine whose every time is known; some of the measurements end `late` ns later."""

    late: int = 0
    share: float = 0.2
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    now: float = 0.0

    def _take(self, ns: int) -> int:
        ns += self.late if self.chance.random() < self.share else 0
        self.now += ns / 1e9
        return ns

    def experts(self, n: int, tokens: int) -> int:
        return self._take(START + n * (EXPERT + 1000 * (tokens - 1)))

    def shared(self, rows: int) -> int:
        return self._take(7_000 * rows)

    def attention(self, rows: int, context: bool) -> int:
        return self._take(10_000 + ROW * rows + (CONTEXT * rows * 2 if context else 0))

    def predict(self, rows: int) -> int:
        return self._take(42_000 + 900 * (rows - 1))

    def link(self, what: str, n: int) -> int:
        rate = {"link": LOAD, "link_busy": 2 * LOAD, "link_start": 0}[what]
        return self._take(IDLE + n * rate + (LOAD // 100 if what == "link_start" else 0))

    def beside(self, moving: bool, n: int, tokens: int) -> int:
        """Jobs of few tokens take half as long again while the link moves."""
        alone = START + n * (EXPERT + 1000 * (tokens - 1))
        return self._take(alone * 3 // 2 if moving and tokens < 64 else alone)


def run(
    fake: Fake, limits: Limits = LIMITS, seconds: float = 100.0
) -> dict[tuple[str, int, int], list[int]]:
    return sample(fake, limits, seconds=seconds, now=lambda: fake.now)


def test_known_times_come_back() -> None:
    device = device_of(run(Fake()), LIMITS)
    assert device.start.ns == START
    assert all(
        device.expert.curve.at(t) == EXPERT + 1000 * (t - 1)
        for t in (1, 2, 7, 64, 1000, 4096, 5000)
    )
    assert device.attention.curve.at(100) == 10_000 + ROW * 100
    assert device.context_row.ns == device.context_row_prefill.ns == CONTEXT
    assert device.shared is not None and device.shared.curve.at(3) == 21_000
    assert device.predict is not None and device.predict.ns == 42_000
    assert device.predict_row is not None and device.predict_row.ns == 900
    for fitted in (device.expert, device.attention, device.shared):
        assert len(fitted.curve.tokens) <= KNOTS


def test_a_link_of_known_times_comes_back() -> None:
    """Alone and beside the CPU; a small copy has the start, and its own bytes at the same rate."""
    limits = replace(LIMITS, predicts=False, loads=8)
    link = link_of(run(Fake(), limits), 8, 409_600)
    assert (link.start.ns, link.expert_alone.ns, link.expert.ns) == (IDLE, LOAD, 2 * LOAD)
    late = link_of(run(Fake(1_000_000), limits), 8, 409_600)
    assert (late.start.ns, late.expert_alone.ns, late.expert.ns) == (IDLE, LOAD, 2 * LOAD)
    assert late.expert.bar is not None and late.expert.bar.max > late.expert.bar.median
    tiny = {("link_start", 0, 1): [500], ("link", 1, 1): [400], ("link_busy", 1, 1): [900]}
    link = link_of(tiny, 1, 2048)  # noise: nothing is free, and nothing takes less than no time
    assert (link.start.ns, link.expert_alone.ns, link.expert.ns) == (500, 1, 400)


def test_experts_beside_a_busy_link_take_so_much_longer() -> None:
    """At the knots of the curve that was measured alone; no less than that."""
    limits = replace(LIMITS, predicts=False, loads=8, cpu_experts=128)
    alone = Curve((1, 8, 36, 64, 512), (100, 200, 300, 400, 1000))
    found = busy_of(run(Fake(), limits), alone)
    assert found.curve == Curve(alone.tokens, (150, 300, 375, 400, 1000))
    assert [tokens for tokens, _ in found.points] == [1, 8, 64, 512]
    few = replace(limits, max_rows=1)
    assert [tokens for tokens, _ in busy_of(run(Fake(), few), alone).points] == [1, 8]
    assert busy_of({}, alone).curve == alone
    faster = {("cpu_idle", 1, 1): [1000, 1000], ("cpu_busy", 1, 1): [900, 950]}
    assert busy_of(faster, alone).curve == alone
    assert {what for what, _, _ in points(replace(LIMITS, cpu_experts=9))} <= {
        *("experts", "attention", "shared", "predict")
    }


def test_the_grid_reaches_4096_tokens() -> None:
    """As far as a step's rows x top-k go; one job never has more."""
    asked = points(LIMITS)
    assert max(tokens for what, _, tokens in asked if what == "experts") == 4096
    for limits in (LIMITS, replace(LIMITS, max_rows=16), replace(LIMITS, max_rows=1, top_k=1)):
        for what, n, tokens in points(limits):
            assert n * tokens <= limits.expert_tokens or what != "experts"
            assert tokens <= limits.max_rows or what == "experts"
        assert len(set(points(limits))) == len(points(limits))
    kinds = {what for what, _, _ in points(replace(LIMITS, shared=False, predicts=False))}
    assert kinds == {"experts", "attention"}


def test_outliers_do_not_decide() -> None:
    """A sample of five is a millisecond late: medians are what they were, bars tell."""
    device = device_of(run(Fake(1_000_000)), LIMITS)
    assert device.expert.curve.at(64) == EXPERT + 63_000
    bars = [bar for _, bar in device.expert.points]
    assert any(bar.max > bar.median for bar in bars)
    assert all(bar.min <= bar.median <= bar.max for bar in bars)


def test_time_is_bounded() -> None:
    """At most ROUNDS samples, LEAST at least; a slow machine leaves out the greatest points."""
    assert {len(ns) for ns in run(Fake()).values()} == {ROUNDS}
    fake = Fake()
    taken = run(fake, seconds=0.2)
    assert LEAST == min(map(len, taken.values())) <= max(map(len, taken.values())) < ROUNDS
    assert fake.now < 0.2 + LEAST * 0.07
    slow = Fake(10**9, 1.0)  # a second more for each
    taken = run(slow, seconds=10.0)
    assert ("experts", 1, 4096) not in taken and ("experts", 8, 1) in taken
    assert slow.now < 120
    device = device_of(taken, LIMITS)
    assert device.expert.curve.at(4096) > 0 and device.attention.curve.at(1) > 0


def test_progress_adds_up() -> None:
    told: list[int] = []
    fake = Fake()
    sample(fake, LIMITS, seconds=0.2, now=lambda: fake.now, advance=told.append)
    assert 150 <= sum(told) <= 200 and min(told) >= 0


@pytest.mark.parametrize(
    "limits",
    [
        Limits(experts=1, top_k=1, max_rows=1, context=0, shared=False, predicts=False),
        Limits(experts=2, top_k=2, max_rows=1, context=64, shared=False, predicts=False),
        Limits(experts=8, top_k=2, max_rows=3, context=0, shared=True, predicts=True),
    ],
)
def test_small_models_have_tables(limits: Limits) -> None:
    """One expert: all of the job's time is its own. No room for a context: 0, not measured."""
    taken = run(Fake(), limits)
    device = device_of(taken, limits)
    if limits.experts == 1:
        assert device.start.ns == 0 and device.expert.curve.at(1) == START + EXPERT
    else:
        assert device.start.ns == START and device.expert.curve.at(1) == EXPERT
    assert device.context_row.ns == (CONTEXT * 2 * 1024 // 64 if limits.context else 0)


def test_a_table_is_the_same_text_for_the_same_measurements() -> None:
    def text() -> str:
        device = device_of(run(Fake(12_345)), LIMITS)
        return CostTable("measured", Machine("c", 2, 2, "avx2"), QWEN3, device).text()

    assert text() == text()
    assert CostTable.parse(text(), "x").text() == text()


def test_a_busy_machine_is_noticed() -> None:
    device = device_of(run(Fake()), LIMITS)
    idle = CostTable("measured", Machine("c", 2, 2, "avx2"), QWEN3, device)
    assert busy(idle) == 1.0
    bars = tuple((t, Bar(100, 250, 400)) for t in (1, 2, 3))
    disturbed = replace(device, expert=Fitted(Curve((1,), (250,)), bars))
    assert busy(replace(idle, cpu=disturbed)) == 2.5


def test_the_cpu_has_a_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: A  CPU (R)\nmodel name\t: B\n")
    assert cpu_name(info) == "A CPU (R)"
    info.write_text("processor\t: 0\n")
    assert cpu_name(info) and cpu_name(tmp_path / "none")
