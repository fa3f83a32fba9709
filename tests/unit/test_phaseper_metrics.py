"""Metrics, rivals, groups and calibration of predictors, on values worked out by hand.

Holds: "hit rate of the predicted top-k and Top-6 rank accuracy within +-2 (for models with fewer
experts, Top-min(6, E/2))", "Layer groups found by the inflection of the cosine similarity between
adjacent layers' gate inputs", "previous token's experts, activation frequency, first-order
transition table, and cross-layer gate", "calibrated probabilities", "confidently hot and cold
sets".
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.traces import PlantedStore

from pdscope.compiler.phaseper import calibrate, groups, metrics, rivals
from pdscope.compiler.phaseper.store import Gate
from pdscope.ir.graph import GateAttrs


def test_hits_by_hand() -> None:
    scores = np.array([[0.9, 0.1, 0.8, 0.2], [0.1, 0.2, 0.3, 0.4]], np.float32)
    chosen = np.array([[0, 1], [3, 2]])
    assert metrics.hits(scores, chosen).tolist() == [0.5, 1.0]
    assert metrics.hit_rate(scores, chosen) == 0.75


def test_membership_ignores_missing_tokens() -> None:
    found = metrics.membership(np.array([[2, 0], [-1, -1]]), 3)
    assert found.tolist() == [[True, False, True], [False, False, False]]


@pytest.mark.parametrize(("experts", "count"), [(2, 1), (8, 4), (11, 5), (12, 6), (128, 6)])
def test_ranked_experts(experts: int, count: int) -> None:
    assert metrics.ranked(experts) == count


def test_rank_hit_by_hand() -> None:
    """True ranks of experts 0..11 are 1..12; the predicted best six have true ranks 3, 2, 6, 1, 12,
    5, so places 1 (3), 2 (2), 6 (5) hold, 3 (6), 4 (1) and 5 (12) are three and more off."""
    counts = np.arange(12, 0, -1).astype(np.float64)
    expected = np.zeros(12)
    for place, expert in enumerate([2, 1, 5, 0, 11, 4]):
        expected[expert] = 100 - place
    assert metrics.rank_hit(counts, expected) == 3 / 6


def test_rank_hit_gives_ties_every_rank_they_take_up() -> None:
    counts = np.array([5.0, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 0])
    expected = np.arange(12, dtype=np.float64)
    # expert 11 is alone on rank 12 and predicted first; the rest share ranks 1 to 11
    assert metrics.rank_hit(counts, expected) == 5 / 6


def test_windows_drop_a_short_rest() -> None:
    assert metrics.window_bounds(1200, 512) == [(0, 512), (512, 1024)]
    assert metrics.window_bounds(1300, 512) == [(0, 512), (512, 1024), (1024, 1300)]
    assert metrics.window_bounds(100, 512) == [(0, 100)]


def test_reliability_by_hand() -> None:
    p = np.array([[0.05, 0.05, 0.95, 0.95]], np.float32)
    found = metrics.reliability(p, np.array([[False, True, True, True]]))
    assert found.pairs == (2, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    assert found.observed[0] == 0.5 and found.observed[9] == 1.0
    assert found.error == pytest.approx((0.45 * 2 + 0.05 * 2) / 4, abs=1e-6)


def test_groups_at_the_inflection_points() -> None:
    """Rises steepest between pairs 1 and 2, falls steepest between pairs 5 and 6."""
    curve = [0.5, 0.55, 0.85, 0.9, 0.91, 0.88, 0.6, 0.55]
    names = groups.group_names(curve)
    assert names == ["input"] * 2 + ["middle"] * 4 + ["output"] * 3


def test_flat_and_monotone_curves() -> None:
    assert groups.group_names([0.9, 0.9, 0.9]) == ["middle"] * 4
    assert groups.group_names([0.5, 0.9]) == ["input", "middle", "middle"]
    assert groups.group_names([0.9, 0.5]) == ["middle", "output", "output"]
    assert groups.group_names([]) == ["middle"]


def test_similarity_of_a_store() -> None:
    store = PlantedStore(rows=500, turn=0)
    found = groups.find_groups(store)
    assert found.layers == (1, 3, 5, 7)
    assert found.similarity == pytest.approx([1.0] * 3, abs=1e-5)


def test_frequency_and_transition_by_hand() -> None:
    source = np.array([[0], [0], [1]])
    chosen = np.array([[2], [1], [2]])
    mean = rivals.frequency(chosen, 3)
    assert mean == pytest.approx([0.5 / 4, 1.5 / 4, 2.5 / 4])
    table = rivals.transition(source, chosen, 3)
    assert table[0] == pytest.approx((np.array([0, 1, 1]) + mean) / 3)
    assert table[1] == pytest.approx((np.array([0, 0, 1]) + mean) / 2)
    assert table[2] == pytest.approx(mean)  # never seen: the mean
    weights = np.array([[0.25, 0.75]], np.float32)
    scores = rivals.transition_scores(table, np.array([[0, 1]]), weights)
    assert scores[0] == pytest.approx(0.25 * table[0] + 0.75 * table[1])


def test_previous_scores_fall_back_on_frequency() -> None:
    likely = np.array([0.1, 0.7, 0.3], np.float32)
    scores = rivals.previous_scores(np.array([[2], [-1]]), likely)
    assert metrics.top(scores, 1).tolist() == [[2], [1]]


def test_choice_of_every_family() -> None:
    """Softmax keeps the logits' order; a bias changes sigmoid's choice; groups are cut by their
    best expert, or by the sum of their best two."""
    logits = torch.tensor([[2.0, -1.0, 1.5, 1.4]])

    def choice(bias: list[float] | None = None, **changes: Any) -> Any:
        attrs = replace(GateAttrs.softmax(4, 2), **changes)
        weight = np.zeros((4, 1), np.float32)
        gate = Gate(attrs, weight, None if bias is None else np.array(bias, np.float32))
        return rivals.choice_scores(gate, logits).numpy()

    assert choice().argsort().tolist() == [[1, 3, 2, 0]]
    assert choice([0, 5, 0, 0], score="sigmoid").argmax() == 1
    grouped = choice(groups=2, top_groups=1, group_score="max")
    assert (grouped[0, 2:] == 0).all() and (grouped[0, :2] > 0).all()
    best_two = {"groups": 2, "top_groups": 1, "group_score": "top2", "masked_score": -np.inf}
    assert np.isneginf(choice(score="sigmoid", **best_two)[0, :2]).all()


def test_temperature_of_known_probabilities() -> None:
    """Choices drawn with sigmoid((score - m) / 0.5) are given that temperature back."""
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((20_000, 8)).astype(np.float32)
    truth = rng.random(scores.shape) < calibrate.probabilities(scores, 2, 0.5)
    assert calibrate.fit_temperature(scores, truth, 2) == pytest.approx(0.5, rel=0.05)


def test_hot_and_cold_keep_their_precision() -> None:
    rng = np.random.default_rng(2)
    scores = rng.standard_normal((4000, 16)).astype(np.float32)
    noisy = scores + 0.5 * rng.standard_normal(scores.shape)
    chosen = np.argsort(-noisy, axis=1)[:, :4]
    temperature = calibrate.fit_temperature(scores, metrics.membership(chosen, 16), 4)
    found = calibrate.calibrate(scores, chosen, "decode", temperature)
    p = calibrate.probabilities(scores, 4, found.temperature)
    truth = metrics.membership(chosen, 16)
    hot, cold = p >= np.float32(found.hot), p <= np.float32(found.cold)
    assert truth[hot].mean() == pytest.approx(found.hot_precision) and found.hot_precision >= 0.95
    assert (~truth[cold]).mean() == pytest.approx(found.cold_precision)
    assert found.cold_precision >= 0.99
    assert hot.sum() / 4000 == pytest.approx(found.hot_count) and found.hot_count > 0.5
    assert found.reliability.error < 0.03
    best = np.argsort(-scores, axis=1)[:, :2]
    assert found.r_hit == pytest.approx(np.take_along_axis(truth, best, 1).mean())


def test_nothing_is_hot_where_scores_say_nothing() -> None:
    scores = np.zeros((100, 8), np.float32)
    chosen = np.tile(np.arange(2), (100, 1))
    found = calibrate.calibrate(scores, chosen, "prefill", 1.0)
    assert found.hot > 1 and found.cold < 0
