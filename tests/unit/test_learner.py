"""The online learner's training and decisions, on tokens of a planted rule, without a model.

Holds: "error over a sliding window of 16 input-group tokens, threshold 25 %, fine-tune on the last
128 prefill + 32 decode tokens in one low-priority background thread ..., never makes validation
error worse (it is rolled back if it does)"; "domain shift ... triggers the learner, and the error
falls below the threshold within 10 triggers" on planted domains.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.predictors import reference
from torch.nn import functional

from pdscope.compiler.phaseper import losses
from pdscope.compiler.phaseper.nets import BLOCKS, NetShape
from pdscope.errors import PdscopeError
from pdscope.learner import KEPT, Key, Learner
from pdscope.learner_nets import RIDGE_ROWS, SLOPE, Lessons, Rows, Trained, choice, error, loss
from pdscope.learner_thread import LearnerThread
from pdscope.predictors import PHASES, Net, bf16_bits

HIDDEN, EXPERTS, K = 64, 16, 2


def random_net(phase: str, deep: bool, rng: np.random.Generator, width: int = 24) -> Net:
    def matrix(outputs: int, inputs: int) -> np.ndarray:
        return bf16_bits(rng.normal(0, inputs**-0.5, (outputs, inputs)))

    both = width + EXPERTS
    first = both + (width if deep else 0)
    return Net(
        hidden=HIDDEN,
        experts=EXPERTS,
        width=width,
        blocks=BLOCKS[phase],
        first=matrix(first, HIDDEN),
        bias=np.float32(rng.normal(0, 0.1, first)),
        features=bf16_bits(rng.normal(0, 0.1, (len(BLOCKS[phase]) * EXPERTS, both))),
        block=matrix(width, width) if deep else None,
        block_bias=np.float32(rng.normal(0, 0.1, width)) if deep else None,
        out=matrix(EXPERTS, width),
    )


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.float32(1 / (1 + np.exp(-x)))


def choose(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, axis=1)[:, :K].astype(np.int32)


class Domain:
    """Text whose gate inputs lie in a few directions around a centre, both of its own; the next
    experts follow from them by one rule for all text, of which a net knows what it has seen."""

    MATRIX = np.float32(np.random.default_rng(99).normal(size=(HIDDEN, EXPERTS)))

    def __init__(self, seed: int, near: "Domain | None" = None) -> None:
        """near: text that this is mostly alike."""
        rng = np.random.default_rng(seed)
        self.directions = np.float32(rng.normal(size=(4, HIDDEN)))
        self.centre = np.float32(rng.normal(size=HIDDEN))
        if near is not None:
            self.directions = np.float32(0.4) * self.directions + near.directions
            self.centre = np.float32(0.4) * self.centre + near.centre

    def rows(self, n: int, rng: np.random.Generator) -> Rows:
        a = self.centre + np.float32(rng.normal(size=(n, len(self.directions)))) @ self.directions
        scores = sigmoid(a @ self.MATRIX / 16)
        target = choose(scores)
        e = choose(np.float32(rng.normal(size=(n, EXPERTS))))
        before = np.concatenate([np.full((1, K), -1, np.int32), target[:-1]])
        prev = np.concatenate([np.full((1, K), -1, np.int32), e[:-1]])
        w = np.full((n, K), 0.5, np.float32)
        return Rows(np.float32(a), w, e, prev, before, target, scores)


class Fed:
    """A source that a test feeds."""

    def __init__(self) -> None:
        self.kept: dict[Key, Rows] = {}
        self.totals: dict[Key, int] = {}
        self.swapped: list[Key] = []
        self.nets: dict[Key, Net] = {}

    def feed(self, layer: int, phase: str, rows: Rows) -> None:
        old = self.kept.get((layer, phase))
        rows = rows if old is None else old.join(rows)
        self.kept[layer, phase] = rows.take(slice(max(0, len(rows) - KEPT[phase]), None))
        self.totals[layer, phase] = self.totals.get((layer, phase), 0) + len(rows)

    def total(self, layer: int, phase: str) -> int:
        return self.totals.get((layer, phase), 0)

    def read(self, layer: int, phase: str) -> tuple[Rows, int] | None:
        if (layer, phase) not in self.kept:
            return None
        return self.kept[layer, phase], self.totals[layer, phase]

    def swap(self, layer: int, phase: str, net: Net) -> None:
        self.swapped.append((layer, phase))
        self.nets[layer, phase] = net


def fitted(phase: str, deep: bool, domain: Domain, rng: np.random.Generator) -> Net:
    """A net that knows a domain."""
    net = Trained(random_net(phase, deep, rng))
    shape = NetShape(HIDDEN, EXPERTS, net.net.width, deep, BLOCKS[phase])
    leaves, tensors = torch_tensors(net)
    adam = torch.optim.Adam(leaves.values(), lr=0.01)
    for step in range(600):
        adam.param_groups[0]["lr"] = 0.02 * (1 - step / 600)
        rows = domain.rows(128, rng)
        sparse = torch.from_numpy(net.sparse(rows))
        logits = reference(shape, tensors(), torch.from_numpy(rows.a), sparse)
        loss_ = losses.distill(logits, torch.from_numpy(choice(rows)), K).mean()
        adam.zero_grad()
        loss_.backward()
        adam.step()
    net.t = {name: leaf.detach().numpy() for name, leaf in leaves.items()}
    return net.rounded()


def torch_tensors(
    net: Trained,
) -> tuple[dict[str, torch.Tensor], Callable[[], dict[str, torch.Tensor]]]:
    """Copies of its tensors, and how `reference` takes them."""
    leaves = {name: torch.from_numpy(t.copy()).requires_grad_() for name, t in net.t.items()}
    both = net.net.width + EXPERTS

    def tensors() -> dict[str, torch.Tensor]:
        made = {
            "in.weight": leaves["first"][:both],
            "in.bias": leaves["bias"][:both],
            "features.weight": leaves["features"],
            "out.weight": leaves["out"],
        }
        if "block" in leaves:
            made |= {
                "gate.weight": leaves["first"][both:],
                "gate.bias": leaves["bias"][both:],
                "block.weight": leaves["block"],
                "block.bias": leaves["block_bias"],
            }
        return made

    return leaves, tensors


# --- training ---


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_logits_and_loss_are_those_of_torch(phase: str, deep: bool) -> None:
    rng = np.random.default_rng(0)
    net = Trained(random_net(phase, deep, rng))
    rows = Domain(0).rows(40, rng)
    shape = NetShape(HIDDEN, EXPERTS, net.net.width, deep, BLOCKS[phase])
    _, tensors = torch_tensors(net)
    with torch.no_grad():
        logits = reference(
            shape, tensors(), torch.from_numpy(rows.a), torch.from_numpy(net.sparse(rows))
        )
        assert np.allclose(net.logits(rows), logits.numpy(), atol=1e-5)
        score = torch.from_numpy(rows.scores).log()
        soft = torch.sigmoid(losses.SLOPE * (score - losses.edge(score, K)))
        assert np.allclose(choice(rows), soft.numpy(), atol=1e-5)
        least = functional.binary_cross_entropy(soft, soft)
        found = losses.distill(logits, soft, K).mean() - least
    assert loss(net.logits(rows), rows).mean() == pytest.approx(float(found), rel=1e-3)
    assert SLOPE == losses.SLOPE


def test_choice_where_a_group_lost() -> None:
    """An expert of a better score than a chosen one counts for nothing."""
    rows = replace(
        Domain(0).rows(1, np.random.default_rng(0)).take(slice(0, 1)),
        scores=np.float32([[0.9, 0.5, 0.4, 0.1]]),
        target=np.int32([[1, 2]]),
    )
    found = choice(rows)[0]
    assert found[0] == 0 and found[1] > found[2] > 0.5 > found[3] > 0


def test_lessons_are_a_ridge_regression_of_what_is_linear() -> None:
    """Of all rows so far, of hidden units, features, 1 and the gate's input."""
    rng = np.random.default_rng(0)
    net = Trained(random_net("decode", True, rng))
    rows = Domain(0).rows(600, rng)
    logits, sparse = net.logits(rows), net.sparse(rows)
    z = logits - np.sort(logits, 1)[:, -K - 1 : -K + 1].mean(1, keepdims=True)
    lack = 2 * (choice(rows) - sigmoid(2 * z))
    h = net._forward(rows.a, sparse)["h"]
    x = np.concatenate([h, sparse, np.ones((600, 1)), rows.a], 1).astype(np.float64)
    ridge = RIDGE_ROWS * np.mean(np.square(x)) * np.eye(x.shape[1])
    step = np.linalg.solve(x.T @ x + ridge, x.T @ lack)
    lessons = Lessons(net)
    lessons.add(rows.take(slice(0, 250)))
    lessons.add(rows.take(slice(250, None)))
    taught = lessons.moved(lessons.step())
    width, both = net.net.width, net.net.width + EXPERTS
    moved = {name: t - net.t[name] for name, t in taught.t.items()}
    parts = [
        moved["out"].T,
        moved["features"][:, width:],
        moved["bias"][None, width:both],
        moved["first"][width:both].T,
    ]
    ends = np.cumsum([width, sparse.shape[1], 1])
    for found, expected in zip(parts, np.split(step, ends), strict=True):
        assert np.allclose(found, expected, atol=1e-3 * np.abs(step).max())
        found[:] = 0
    assert not any(m.any() for m in moved.values())  # and nothing else
    assert loss(taught.logits(rows), rows).mean() < loss(logits, rows).mean()


def test_older_lessons_fade() -> None:
    """A rule that has changed is unlearned, however long the one before was taught."""
    rng = np.random.default_rng(0)
    net = Trained(random_net("decode", False, rng))
    lessons = Lessons(net)
    rows = Domain(0).rows(1000, rng)
    other = np.random.default_rng(1).permutation(EXPERTS)
    changed = replace(rows, scores=rows.scores[:, other], target=choose(rows.scores[:, other]))
    for _ in range(20):
        lessons.add(rows)
    before = loss(lessons.moved(lessons.step()).logits(changed), changed).mean()
    alone = Lessons(net)
    for _ in range(8):
        lessons.add(changed)
        alone.add(changed)
    after, least = (
        loss(x.moved(x.step()).logits(changed), changed).mean() for x in (lessons, alone)
    )
    assert least < before and after - least < (before - least) / 2


def test_error_is_the_share_of_the_experts_missed() -> None:
    logits = np.float32([[3, 2, 1, 0], [0, 1, 2, 3], [1, 1, 1, 1]])
    target = np.int32([[0, 1], [3, 0], [2, 3]])
    assert error(logits, target).tolist() == [0.0, 0.5, 1.0]  # of equals the lowest ids


def test_products_stay_in_this_thread() -> None:
    """BLAS would take all cores for matrices of this size."""
    rng = np.random.default_rng(0)
    net = Trained(replace(random_net("decode", True, rng)))
    wide = Rows(
        np.zeros((160, 2048), np.float32), *(getattr(Domain(0).rows(160, rng), n) for n in _REST)
    )
    net.t["first"] = np.float32(rng.normal(size=(len(net.t["first"]), 2048)))
    lessons = Lessons(net)
    lessons.add(wide)
    own, all_threads = time.thread_time(), time.process_time()
    for _ in range(20):
        lessons.add(wide)
        lessons.step()
    own, all_threads = time.thread_time() - own, time.process_time() - all_threads
    assert all_threads < 1.2 * own


_REST = ("w", "e", "prev", "prev_next", "target", "scores")


# --- decisions ---


@pytest.mark.parametrize("deep", [False, True])
def test_domain_shift_triggers_and_is_learned(deep: bool) -> None:
    """Quiet at home; behind the shift each phase falls below the threshold within 10 triggers, on
    tokens that nothing has learned from. A window of 16 tokens by itself is a noisy figure."""
    rng = np.random.default_rng(1)
    home = Domain(1)
    away = Domain(2, home)
    nets = {(0, phase): fitted(phase, deep, home, rng) for phase in PHASES}
    source = Fed()
    learner = Learner(nets, [0], source)

    def feed(domain: Domain, polls: int) -> None:
        for _ in range(polls):
            for phase, n in (("prefill", 64), ("decode", 8)):
                source.feed(0, phase, domain.rows(n, rng))
            learner.poll()

    feed(home, 8)
    report = learner.report()
    assert all(report[phase]["triggers"] == 0 for phase in PHASES), report
    assert all(report[phase]["window_error"] < 0.25 for phase in PHASES), report
    test = away.rows(2000, rng)

    def miss(net: Net) -> float:
        return float(error(Trained(net).logits(test), test.target).mean())

    assert all(miss(net) > 0.5 for net in nets.values())
    fallen: dict[str, int] = {}  # triggers when the true error fell below the threshold
    for _ in range(40):
        feed(away, 1)
        report = learner.report()
        for phase in PHASES:
            if phase not in fallen and miss(source.nets.get((0, phase), nets[0, phase])) < 0.25:
                fallen[phase] = report[phase]["triggers"]
    assert report["seconds"] > 0
    assert all(1 <= fallen[phase] <= 10 for phase in PHASES), (fallen, report)
    for phase in PHASES:
        assert report[phase]["swaps"] >= 1
        assert miss(source.nets[0, phase]) < 0.25, report


def noise(rng: np.random.Generator, n: int) -> Rows:
    rows = Domain(0).rows(n, rng)
    scores = sigmoid(rng.normal(size=(n, EXPERTS)))
    return replace(rows, target=choose(scores), scores=scores)


def test_what_would_predict_worse_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that spoils the net: it stays, and triggers become rarer."""

    def spoil(self: Lessons, step: object) -> Trained:
        net = Trained(self._net.net)
        for tensor in net.t.values():
            tensor *= -1
        return net

    monkeypatch.setattr(Lessons, "moved", spoil)
    rng = np.random.default_rng(3)
    home, away = Domain(1), Domain(2)
    # Knows the text well, but the threshold asks for more.
    net = fitted("decode", False, home, rng)
    source = Fed()
    learner = Learner({(0, "decode"): net}, [0], source, threshold=0.0)
    for _ in range(100):
        source.feed(0, "decode", home.rows(16, rng).join(away.rows(16, rng)))
        learner.poll()
    report = learner.report()["decode"]
    assert report["triggers"] == report["rollbacks"] and report["swaps"] == 0
    assert source.swapped == []
    assert 4 <= report["triggers"] <= 10  # of 100 polls that each show new tokens


@pytest.mark.parametrize("phase", PHASES)
def test_the_loaded_net_is_back_where_its_text_is(phase: str) -> None:
    """Without a trigger: what was learned misses more there, though less than the threshold; and
    with the next trigger at once what was learned before is there again."""
    rng = np.random.default_rng(10)
    home = Domain(1)
    away = Domain(2, home)
    net = fitted(phase, False, home, rng)
    source = Fed()
    learner = Learner({(0, phase): net}, [0], source)

    def feed(domain: Domain, polls: int) -> None:
        for _ in range(polls):
            source.feed(0, phase, domain.rows(KEPT[phase], rng))
            learner.poll()

    feed(away, 20)
    learned = source.nets[0, phase]
    assert learned is not net
    test, report = away.rows(2000, rng), learner.report()[phase]

    def miss(net: Net, rows: Rows) -> float:
        return float(error(Trained(net).logits(rows), rows.target).mean())

    at_home = home.rows(2000, rng)
    assert miss(net, at_home) < miss(learned, at_home)
    feed(home, 10)
    assert source.nets[0, phase] is net
    assert learner.report()[phase]["rollbacks"] > report["rollbacks"]
    triggers = learner.report()[phase]["triggers"]
    while learner.report()[phase]["triggers"] < triggers + 3:
        feed(away, 1)
    assert miss(source.nets[0, phase], test) < miss(net, test) / 2


def test_numbers_that_are_not_finite_are_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def burst(self: Lessons, step: object) -> Trained:
        net = Trained(self._net.net)
        net.t["bias"][:] = np.inf
        return net

    rng = np.random.default_rng(4)
    source = Fed()
    learner = Learner({(0, "decode"): random_net("decode", True, rng)}, [0], source)
    monkeypatch.setattr(Lessons, "moved", burst)
    source.feed(0, "decode", noise(rng, 32))
    learner.poll()
    assert learner.report()["decode"] | {"window_error": None, "layer_errors": None} == {
        "threshold": 0.25,
        "triggers": 1,
        "swaps": 0,
        "rollbacks": 1,
        "window_error": None,
        "layer_errors": None,
    }


def test_only_the_input_group_triggers_and_every_layer_learns() -> None:
    rng = np.random.default_rng(5)
    home, away = Domain(1), Domain(2)
    nets = {(layer, "decode"): fitted("decode", False, home, rng) for layer in (0, 1, 2)}
    source = Fed()
    learner = Learner(nets, [0], source)
    for _ in range(4):
        for layer, domain in ((0, home), (1, away), (2, away)):
            source.feed(layer, "decode", domain.rows(32, rng))
        learner.poll()
    assert learner.report()["decode"]["triggers"] == 0
    for layer in nets:
        source.feed(layer[0], "decode", away.rows(32, rng))
    learner.poll()
    assert set(source.swapped) == set(nets)


def test_a_ring_in_use_is_left_for_the_next_look() -> None:
    class Busy(Fed):
        def read(self, layer: int, phase: str) -> tuple[Rows, int] | None:
            return None

    rng = np.random.default_rng(6)
    source = Busy()
    learner = Learner({(0, "decode"): random_net("decode", False, rng)}, [0], source)
    source.feed(0, "decode", noise(rng, 32))
    learner.poll()
    assert learner.report()["decode"]["window_error"] is None


# --- its thread ---


def test_thread_runs_at_the_lowest_priority_and_ends_at_once() -> None:
    priorities: list[int] = []
    looked = threading.Event()

    class Looking(Fed):
        def total(self, layer: int, phase: str) -> int:
            if sys.platform == "linux":
                who = threading.get_native_id()
                priorities.append(os.getpriority(os.PRIO_PROCESS, who))
            looked.set()
            return 0

    rng = np.random.default_rng(7)
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    learner = Learner({(0, "decode"): random_net("decode", False, rng)}, [0], Looking())
    thread = LearnerThread(learner, interval=0.001)
    assert looked.wait(10)
    thread.stop()
    thread.stop()
    assert "pdscope-learner" not in {t.name for t in threading.enumerate()}
    assert set(priorities) <= {19}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


def test_stop_does_not_wait_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lessons, "step", endless)
    rng = np.random.default_rng(8)
    source = Fed()
    source.feed(0, "decode", noise(rng, 32))
    learner = Learner({(0, "decode"): random_net("decode", False, rng)}, [0], source)
    thread = LearnerThread(learner, interval=0.001)
    assert began.wait(120)
    thread.stop()
    assert source.swapped == []


began = threading.Event()


def endless(self: Lessons, stopped: Callable[[], bool]) -> np.ndarray:
    began.set()
    while not stopped():
        time.sleep(0.001)
    return self._xy


def test_a_fault_ends_it_and_is_kept() -> None:
    class Broken(Fed):
        def total(self, layer: int, phase: str) -> int:
            raise PdscopeError("no such engine")

    rng = np.random.default_rng(9)
    learner = Learner({(0, "decode"): random_net("decode", False, rng)}, [0], Broken())
    thread = LearnerThread(learner, interval=0.001)
    for _ in range(20_000):
        if thread.fault:
            break
        time.sleep(0.005)
    thread.stop()
    assert thread.fault == "no such engine"
