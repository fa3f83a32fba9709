"""The online learner in a running engine: what steps keep is what they saw, outputs do not depend
on it, its thread ends with the engine.

Holds: "Online learner as designed: ... fine-tune on the last 128 prefill + 32 decode tokens in one
low-priority background thread (off without a spare core), atomic swap, counters in `stats()`, off
switch; never on the critical path"; "zero effect on outputs whatever the predictor says".
"""

import gc
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.assets import BUNDLED
from support.plans import PlanStore
from support.predictors import moe_layers, with_predictors
from support.runs import random_ids
from support.tiny_configs import random_tiny_config, save_random_model

import pdscope
from pdscope.compiler.phaseper.evaluate import choice_scores, plan_gates
from pdscope.engine import Engine
from pdscope.errors import InputError, PdscopeError
from pdscope.ir.isa import NormSite, Opcode
from pdscope.learner import KEPT
from pdscope.learner_nets import Rows, Trained
from pdscope.learner_thread import EngineSource
from pdscope.observe import TapEvent
from pdscope.predictors import bf16_bits, read_predictors

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]
MODEL = BUNDLED / "tiny-mixtral"


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Path:
    """Nets everywhere, of random numbers: wrong often enough to trigger at once."""
    base = plans.compile(MODEL, dtype="bf16", max_context=512)
    return plans.once("learner-bf16", lambda out: with_predictors(base, out))


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def kept_plan(plans: PlanStore, request: pytest.FixtureRequest) -> Path:
    """fp32: 6 layers, dense ones between."""
    if request.param == "bf16":
        base = plans.compile(MODEL, dtype="bf16", max_context=512)
    else:
        config = random_tiny_config("qwen3_moe", 0) | {
            "decoder_sparse_step": 1,
            "num_hidden_layers": 6,
            "mlp_only_layers": [1, 4],
        }
        model = plans.once("learner.model", lambda out: save_random_model(config, out, 0))
        base = plans.compile(model, dtype="fp32", max_context=512)
    name = f"learner-kept-{request.param}"
    return plans.once(name, lambda out: with_predictors(base, out))


def threads_named() -> int:
    return sum(t.name == "pdscope-learner" for t in threading.enumerate())


def wait_until(done: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- what steps keep ---


class Seen:
    """Every token of every layer, as a tap sees it: [layer][phase] -> rows in order."""

    def __init__(self, engine: Engine) -> None:
        self.layers = moe_layers(engine.plan.path)
        self.hidden = engine.plan.model["hidden"]
        self.gates = plan_gates(engine.plan)
        self.last: dict[int, dict[int, Ids]] = {}
        self.rows: dict[tuple[int, str], list[tuple[Any, ...]]] = {}
        self.taken: dict[int, tuple[Floats, Floats, Ids]] = {}

    def __call__(self, event: TapEvent) -> None:
        if event.opcode == Opcode.NORM and event.arg == NormSite.MLP:
            self.a = event.data[:, : self.hidden].copy()
        if event.opcode == Opcode.GATE:
            assert event.ids is not None
            self.taken[event.layer] = (self.a, event.data.copy(), event.ids.copy())

    def step(self, seqs: list[int]) -> None:
        phase = "decode" if len(set(seqs)) == len(seqs) else "prefill"
        for layer, following in zip(self.layers, self.layers[1:], strict=False):
            a, w, e = self.taken[layer]
            x, _, target = self.taken[following]
            scores = choice_scores(self.gates[following], x @ self.gates[following].weight.T)
            for row, seq in enumerate(seqs):
                none = np.full(e.shape[1], -1, np.int32)
                prev, then = none, none
                if seq in seqs[:row]:
                    before = max(i for i in range(row) if seqs[i] == seq)
                    prev, then = e[before], target[before]
                elif seq in self.last:
                    prev, then = self.last[seq][layer], self.last[seq][following]
                one = (a[row], w[row], e[row], prev, then, target[row], scores[row])
                self.rows.setdefault((layer, phase), []).append(one)
        for row, seq in enumerate(seqs):
            self.last[seq] = {layer: self.taken[layer][2][row] for layer in self.layers}


def test_steps_keep_what_they_saw(kept_plan: Path) -> None:
    """Prefill of one and of several sequences, decode of one and of many, with and without
    prediction (steps of more than 16 rows)."""
    with pdscope.load(kept_plan, threads=2, cache_prefetch="on", learner="off") as engine:
        seen = Seen(engine)
        keys = [(layer, p) for layer in seen.layers[:-1] for p in KEPT]
        source = EngineSource(engine.handle, engine.plan, keys)
        assert source.bytes() > 0
        session = engine.session(max_seqs=20, kv_tokens=8192)
        vocab, rng = engine.info.vocab, np.random.default_rng(0)
        shapes = [[0] * 5, [0], [1, 1, 0, 1, 0], [0, 1], list(range(20)), [2] * 40, [0] * 7]
        shapes += [[3] * min(150, engine.info.max_rows), [0], [1], list(range(18))]
        for seqs in shapes:
            with session.tap(seen):
                session.step(rng.integers(0, vocab, len(seqs)), seqs=seqs)
            seen.step(seqs)
        for key in keys:
            expected, kept = seen.rows[key], KEPT[key[1]]
            # A step adds no more than its last rows.
            total = sum(
                min(len(s), kept)
                for s in shapes
                if key[1] == ("decode" if len(set(s)) == len(s) else "prefill")
            )
            found = source.read(*key)
            assert found is not None and found[1] == total == source.total(*key)
            check_rows(found[0], expected[-kept:])
        # A sequence that was cut back does not know its last token's experts.
        session.truncate(0, 3)
        session.step([5], seqs=[0])
        found = source.read(seen.layers[0], "decode")
        assert found is not None and (found[0].prev[-1] == -1).all()
        assert (found[0].prev_next[-1] == -1).all()


def check_rows(rows: Rows, expected: list[tuple[Any, ...]]) -> None:
    assert len(rows) == len(expected)
    columns = [np.stack(column) for column in zip(*expected, strict=True)]
    a = (bf16_bits(columns[0]).astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(rows.a, a)
    assert np.allclose(rows.scores, columns.pop(), rtol=1e-4, atol=1e-6)
    for name, column in zip(("w", "e", "prev", "prev_next", "target"), columns[1:], strict=True):
        assert np.array_equal(getattr(rows, name), column), name


def test_logits_in_numpy_are_those_of_the_engine(kept_plan: Path) -> None:
    with pdscope.load(kept_plan, threads=2, learner="off") as engine:
        chosen = read_predictors(engine.plan)
        assert chosen is not None
        source = EngineSource(engine.handle, engine.plan, [(c.layer, c.phase) for c in chosen])
        engine.prefill(random_ids(engine.info.vocab, 40))
        for each in chosen:
            found = source.read(each.layer, "prefill")
            assert found is not None and each.net is not None
            r = found[0]
            there = engine.predict(each.layer, each.phase, r.a, r.w, r.e, r.prev, r.prev_next)
            here = Trained(each.net).logits(r)
            assert np.abs(here - there).max() <= 1e-4 * np.abs(there).max()


def test_the_engine_refuses_what_keeps_nothing(plan: Path) -> None:
    with pdscope.load(plan, threads=1, learner="off") as engine:
        last = moe_layers(plan)[-1]
        with pytest.raises(InputError, match=f"layer {last}: the plan predicts nothing there"):
            EngineSource(engine.handle, engine.plan, [(last, "decode")])
        source = EngineSource(engine.handle, engine.plan, [(0, "decode")])
        with pytest.raises(InputError, match="layer 99, phase 1: nothing is kept there"):
            source.total(99, "decode")


# --- beside steps ---


def outputs(plan: Path, learner: str, steps: int = 300) -> tuple[Floats, dict[str, Any]]:
    with pdscope.load(plan, threads=2, cache_prefetch="on", learner=learner) as engine:
        ids = random_ids(engine.info.vocab, 400)
        rows = []
        for begin in range(0, steps, 100):
            engine.reset()
            rows.append(engine.prefill(ids[begin : begin + 100]).copy())
            rows.extend(engine.decode(token).copy() for token in ids[100:200])
        if learner == "on":  # however slow the machine: until it has learned something

            def learned() -> bool:
                engine.reset()
                for begin in (0, 200):
                    engine.prefill(ids[begin : begin + 100])
                    for token in ids[:20]:
                        engine.decode(token)
                report = engine.learner()
                return all(report[phase]["triggers"] > 1 for phase in KEPT)

            wait_until(learned, 60)
        return np.stack(rows), engine.stats().learner


def test_outputs_do_not_depend_on_it(plan: Path) -> None:
    """Some hundred steps on two workers, with nets swapped meanwhile: bit-equal."""
    off, about = outputs(plan, "off")
    assert about == {"asked": "off", "state": "off", "why": "asked for"}
    on, about = outputs(plan, "on")
    assert np.array_equal(on, off)
    assert about["state"] == "on" and about["seconds"] > 0 and about["bytes"] > 0
    for phase in KEPT:
        assert about[phase]["swaps"] > 0
        layers = len(moe_layers(plan)) - 1
        counted = about[phase]["swaps"] + about[phase]["rollbacks"]
        # of a trigger that is still under way, not all
        assert layers * (about[phase]["triggers"] - 1) <= counted
        assert counted <= layers * about[phase]["triggers"]
    assert threads_named() == 0


def test_on_where_a_core_is_free(plan: Path) -> None:
    """auto: off with a reason where every core has a worker, or nothing predicts."""
    with pdscope.load(plan, threads=1, learner="auto") as engine:
        cores = engine.info.cores
        assert engine.learner()["state"] == ("on" if cores > 1 else "off")
    with pdscope.load(plan, threads=cores, learner="auto") as engine:
        about = engine.learner()
        assert about["state"] == "off"
        assert about["why"] == f"no core is free: {cores} threads on {cores} cores"
    with pdscope.load(plan, threads=1, cache_prefetch="off", learner="auto") as engine:
        assert engine.learner()["why"] == "cache prefetch is off: no step predicts"
    with pdscope.load(plan, threads=1, predictor="off", learner="on") as engine:
        assert engine.learner()["why"] == "no layer is predicted by a trained net"
        assert engine.learner()["state"] == "off"
    with pytest.raises(InputError, match="learner is 'maybe', expected auto, on, off"):
        pdscope.load(plan, learner="maybe")
    with pytest.raises(InputError, match="learner_threshold is 25, expected auto or a number"):
        pdscope.load(plan, learner_threshold=25)
    assert threads_named() == 0


# --- its thread's life ---


def test_ends_with_the_engine(plan: Path) -> None:
    """close(), also twice and while another thread generates; or the engine is just dropped."""
    engine = pdscope.load(plan, threads=1, learner="on")
    assert threads_named() == 1
    worker = threading.Thread(target=endless, args=(engine,))
    worker.start()
    time.sleep(0.3)
    engine.close()
    engine.close()
    worker.join(120)
    assert not worker.is_alive() and threads_named() == 0
    with pytest.raises(PdscopeError, match="the engine is closed"):
        engine.learner()
    dropped = pdscope.load(plan, threads=1, learner="on")
    dropped.decode(1)
    with pytest.raises(PdscopeError, match="cannot be copied or pickled"):
        pickle.dumps(dropped)
    del dropped
    gc.collect()
    assert threads_named() == 0


def endless(engine: Engine) -> None:
    with pytest.raises(PdscopeError):
        while True:
            engine.reset()
            engine.prefill(list(range(20)))


def child(engine: Engine, out: Any) -> None:
    try:
        engine.learner()
    except PdscopeError as error:
        out.send(str(error))
    engine.close()
    out.close()


def test_a_forked_child_leaves_it_alone(plan: Path) -> None:
    with pdscope.load(plan, threads=1, learner="on") as engine:
        engine.decode(1)
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=child, args=(engine, there))
        process.start()
        assert here.poll(120) and "before os.fork()" in here.recv()
        process.join(120)
        assert process.exitcode == 0 and threads_named() == 1
    assert threads_named() == 0


def test_interpreter_ends_without_close(plan: Path) -> None:
    script = (
        "import sys, pdscope\n"
        "engine = pdscope.load(sys.argv[1], threads=1, learner='on')\n"
        "engine.prefill(list(range(50)))\n"
        "print(engine.learner()['state'], 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", script, str(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "on False\n", "")


def test_command_reports_it(plan: Path) -> None:
    command = [sys.executable, "-m", "pdscope.cli.run", str(plan), "--prompt", "hello", "--json"]
    command += ["--max-new-tokens", "4", "--threads", "1", "--learner", "on"]
    command += ["--learner-threshold", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)["learner"]
    assert about["asked"] == "on" and about["state"] == "on"
    assert about["decode"]["threshold"] == 0.5 and about["decode"]["triggers"] >= 0
