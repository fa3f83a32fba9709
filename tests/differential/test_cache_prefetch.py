"""Cache prefetch: outputs that do not depend on it, predictions that are those of the next layer's
gate, counts that are right, and a measurement that decides.

Holds: "Cache prefetch: `prefetch eN -> llc` becomes real: the predicted experts' first blocks are
pulled into the last-level cache while attention runs; measured on and off; off by itself where it
loses."
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.assets import BUNDLED, TRAINED, model_path
from support.plans import PlanStore
from support.runs import random_ids
from support.tiny_configs import random_tiny_config, save_random_model

import pdscope
from pdscope.compiler.lowered import Gate, LoweredModel, Tensor
from pdscope.compiler.passes.lower import Lower
from pdscope.errors import InputError
from pdscope.ir.graph_text import parse_graph
from pdscope.ir.isa import NormSite, Opcode, Queue
from pdscope.observe import TapEvent
from pdscope.plan import Plan
from pdscope.session import Session, SessionStats

Floats = NDArray[np.float32]


def run(session: Session, vocab: int, steps: int) -> Floats:
    """Logits of decode steps behind a prompt, then of steps of 2 to 16 rows."""
    ids = random_ids(vocab, 30 + steps)
    session.prefill(ids[:30])
    rows = [session.decode(token).copy() for token in ids[30:]]
    for n in (2, 3, 16):
        session.reset()
        for k in range(4):
            tokens = random_ids(vocab, n, seed=k)
            step = session.step(tokens, seqs=list(range(n)), want_logits=[True] * n)
            rows.extend(step.copy())
    return np.stack(rows)


def logits(plan: Path, mode: str, threads: int = 2) -> tuple[Floats, SessionStats]:
    with (
        pdscope.load(plan, threads=threads, cache_prefetch=mode) as engine,
        engine.session(max_seqs=16, kv_tokens=1024) as session,
    ):
        return run(session, engine.info.vocab, 20), session.stats()


def same_on_and_off(plan: Path) -> None:
    off, without = logits(plan, "off")
    for threads in (2, 5):
        on, stats = logits(plan, "on", threads)
        assert np.array_equal(on, off)
        assert 0 < stats.experts_hit <= stats.experts_predicted
        assert stats.prefetch_useful_bytes <= stats.prefetch_bytes
    assert without.experts_predicted == without.prefetch_bytes == 0


@pytest.mark.parametrize("dtype", ["bf16", "int4"])
@pytest.mark.parametrize("name", TRAINED)
def test_trained_models(plans: PlanStore, name: str, dtype: str) -> None:
    """Bit for bit the same logits with and without, on any number of threads."""
    same_on_and_off(plans.compile(model_path(name), dtype=dtype, max_context=512))


# Gates of random weights, which say nothing of each other: predictions are mostly wrong.
RANDOM = {
    "dense-between": ("qwen3_moe", 0, {"num_hidden_layers": 4, "mlp_only_layers": [1]}),
    "dense-first": ("deepseek_v2", 2, {"num_hidden_layers": 4, "first_k_dense_replace": 1}),
    # sigmoid, bias and groups
    "groups": ("deepseek_v3", 4, {"num_hidden_layers": 3, "first_k_dense_replace": 0}),
}


def random_plan(plans: PlanStore, name: str) -> Path:
    family, seed, changes = RANDOM[name]
    config = random_tiny_config(family, seed) | {"decoder_sparse_step": 1} | changes
    model = plans.once(f"ahead-{name}.model", lambda out: save_random_model(config, out, seed))
    return plans.compile(model, dtype="fp32", max_context=256)


@pytest.mark.parametrize("name", RANDOM)
def test_random_models(plans: PlanStore, name: str) -> None:
    same_on_and_off(random_plan(plans, name))


# --- predictions and counts ---


def lowered(plan: Path) -> LoweredModel:
    data = Plan.open(plan).data
    graph = parse_graph((plan / "graph.txt").read_text(encoding="utf-8"))
    return Lower(data["dtype"], data["max_context"], data["predictor"]).run(graph)


def gate_weights(plan: Path, model: LoweredModel, gate: Gate) -> tuple[Floats, Floats]:
    """Weight [experts, hidden] and bias [experts] of a gate, out of the plan's packed files."""

    def read(t: Tensor) -> Floats:
        data = (plan / model.files[t.file].path).read_bytes()
        return np.frombuffer(data, np.float32, t.matrix_bytes // 4, t.offset)

    t = gate.weight
    panels = read(t).reshape(-1, t.k_pad, 16)
    weight = panels.transpose(0, 2, 1).reshape(-1, t.k_pad)[: t.n, : t.k]
    return weight, read(gate.bias) if gate.bias else np.zeros(t.n, np.float32)


def route(gate: Gate, logits: NDArray[Any], bias: Floats) -> tuple[list[int], list[float]]:
    """The gate's rule (GateAttrs) for one row: ids and weights, best first; in fp64."""
    a = gate.attrs
    if a.score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
    choice = scores + bias
    if a.group_score != "none":
        groups = np.sort(choice.reshape(a.groups, -1), axis=1)
        best = groups[:, -1] if a.group_score == "max" else groups[:, -2:].sum(axis=1)
        masked = np.ones(a.groups, bool)
        masked[np.argsort(-best, kind="stable")[: a.top_groups]] = False
        choice[np.repeat(masked, a.experts // a.groups)] = a.masked_score
        if a.masked_score == 0:
            scores[np.repeat(masked, a.experts // a.groups)] = 0
    ids = np.argsort(-choice, kind="stable")[: a.top_k]
    weights = scores[ids]
    if a.normalise:
        weights = weights / (weights.sum() + a.norm_eps)
    return ids.tolist(), (weights * a.scaling).tolist()


class Taps:
    """Gate inputs and chosen experts of each step, by layer."""

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden
        self.inputs: dict[int, list[Floats]] = {}
        self.chosen: dict[int, list[set[int]]] = {}

    def __call__(self, event: TapEvent) -> None:
        if event.opcode == Opcode.NORM and event.arg == NormSite.MLP:
            self.inputs.setdefault(event.layer, []).append(event.data[:, : self.hidden].copy())
        if event.opcode == Opcode.GATE:
            assert event.ids is not None
            chosen = set(event.ids.reshape(-1).tolist())
            self.chosen.setdefault(event.layer, []).append(chosen)


def counted(plan: Path, taps: Taps) -> tuple[int, int]:
    """Experts predicted and hit by what the taps saw, as the next layer's gate predicts."""
    model = lowered(plan)
    predicted = hit = 0
    for index, layer in enumerate(model.layers):
        if layer.predictor is None:
            continue
        target = layer.predictor.target
        gate = model.layers[target].gate
        assert gate is not None
        weight, bias = gate_weights(plan, model, gate)
        for rows, chosen in zip(taps.inputs[index], taps.chosen[target], strict=True):
            ids: set[int] = set()
            for x in rows:
                ids |= set(route(gate, weight.astype(np.float64) @ x, bias)[0])
            predicted += len(ids)
            hit += len(ids & chosen)
    return predicted, hit


def plans_to_count(plans: PlanStore) -> Iterator[Path]:
    yield plans.compile(BUNDLED / "tiny-mixtral", dtype="bf16")
    for name in RANDOM:
        yield random_plan(plans, name)


def test_hits_are_those_of_the_next_gate(plans: PlanStore) -> None:
    for plan in plans_to_count(plans):
        with (
            pdscope.load(plan, threads=2, cache_prefetch="on") as engine,
            engine.session(max_seqs=16, kv_tokens=1024) as session,
        ):
            session.prefill(random_ids(engine.info.vocab, 20))
            assert session.stats().experts_predicted == 0  # a prefill predicts nothing
            taps = Taps(engine.plan.model["hidden"])
            with session.tap(taps):
                for token in random_ids(engine.info.vocab, 20, seed=1):
                    session.decode(token)
                session.reset()
                for n in (2, 5):
                    tokens = random_ids(engine.info.vocab, n, seed=n)
                    session.step(tokens, seqs=list(range(n)))
            stats = session.stats()
        assert (stats.experts_predicted, stats.experts_hit) == counted(plan, taps), plan
        assert stats.experts_predicted > 0


# --- the engine's decision ---


def test_measures_and_decides(plans: PlanStore) -> None:
    """auto: off at first, then windows of steps on and off, then what they said; the same logits
    throughout."""
    plan = plans.compile(BUNDLED / "tiny-mixtral", dtype="bf16")
    ids = random_ids(4096, 320)

    def decode(mode: str) -> tuple[Floats, list[dict[str, Any]]]:
        rows, reports = [], []
        with pdscope.load(plan, threads=2, cache_prefetch=mode) as engine:
            for token in ids:
                rows.append(engine.decode(token).copy())
                reports.append(engine.cache_prefetch())
        return np.stack(rows), reports

    rows, reports = decode("auto")
    assert np.array_equal(rows, decode("off")[0])
    assert {r["decode"]["state"] for r in reports[:288]} <= {"measuring", "on", "off"}
    assert reports[31]["decode"]["state"] == "measuring"
    assert reports[31]["experts_predicted"] == 0
    middle, last = reports[200], reports[-1]
    assert middle["decode"]["state"] == "measuring" and middle["decode"]["gain_percent"] is None
    assert last["decode"]["state"] in ("on", "off") and last["decode"]["measurements"] == 1
    assert isinstance(last["decode"]["gain_percent"], float)
    assert last["batch"]["state"] == "measuring" and last["batch"]["measurements"] == 0
    assert last["experts_hit"] <= last["experts_predicted"]
    assert last["bytes"] == last["useful_bytes"] + last["wasted_bytes"]
    assert json.loads(json.dumps(last)) == last
    # Half of the trial's steps predicted, 5 layers of them 2 experts each.
    if last["decode"]["state"] == "off":
        assert last["experts_predicted"] == 128 * 5 * 2


def test_one_thread_has_no_idle_worker(plans: PlanStore) -> None:
    plan = plans.compile(BUNDLED / "tiny-mixtral", dtype="bf16")
    for mode in ("on", "auto"):
        with pdscope.load(plan, threads=1, cache_prefetch=mode) as engine:
            engine.decode(5)
            report = engine.cache_prefetch()
        assert report["why"] == "one thread: no worker is ever idle"
        assert report["decode"]["state"] == report["batch"]["state"] == "off"
        assert report["experts_predicted"] == 0


def test_wrong_values(plans: PlanStore, tmp_path: Path) -> None:
    model = BUNDLED / "tiny-mixtral"
    with pytest.raises(InputError, match="cache_prefetch is 'yes', expected auto, on, off"):
        pdscope.load(plans.compile(model, dtype="bf16"), cache_prefetch="yes")
    with pytest.raises(InputError, match="cache_prefetch: 'auto' is unknown; expected one of on"):
        pdscope.compile(model, tmp_path / "plan", cache_prefetch="auto")


def test_the_trace_shows_it(plans: PlanStore) -> None:
    """One instruction a layer but the last, on queue aux, with the experts that it prefetches."""
    plan = plans.compile(BUNDLED / "tiny-mixtral", dtype="bf16")
    for mode, experts in (("on", 2), ("off", 0)):
        with pdscope.load(plan, threads=2, cache_prefetch=mode) as engine:
            with engine.main.trace() as trace:
                engine.decode(5)
            ahead = trace.records[trace.records["opcode"] == Opcode.PREFETCH]
            assert ahead["layer"].tolist() == list(range(5))
            assert set(ahead["experts"].tolist()) == {experts}
            assert set(ahead["queue"].tolist()) == {Queue.AUX}


def test_compiled_without(plans: PlanStore) -> None:
    """--cache-prefetch off: no predictions in the programs, nor memory for them."""
    plan = plans.compile(BUNDLED / "tiny-mixtral", dtype="bf16", cache_prefetch="off")
    usual = plans.compile(BUNDLED / "tiny-mixtral", dtype="bf16")
    assert "predict" not in (plan / "programs/layer000.decode.plan").read_text(encoding="utf-8")
    said, said_usual = Plan.open(plan).data, Plan.open(usual).data
    assert (said["predictor"], said_usual["predictor"]) == ("none", "cross_gate")
    assert said["plan_hash"] != said_usual["plan_hash"]
    with pdscope.load(plan, threads=2, cache_prefetch="on") as engine:
        assert np.array_equal(engine.prefill([1, 2, 3]), first_logits(usual))
        assert engine.cache_prefetch()["why"] == "the plan's programs have no cache prefetch"


def first_logits(plan: Path) -> Floats:
    with pdscope.load(plan, threads=2) as engine:
        return engine.prefill([1, 2, 3]).copy()


@pytest.mark.parametrize("phase", ["decode", "batch"])
def test_all_but_the_last_layer_predict(plans: PlanStore, phase: str) -> None:
    plan = plans.compile(BUNDLED / "tiny-mixtral", dtype="bf16")
    for layer in range(6):
        text = (plan / f"programs/layer{layer:03d}.{phase}.plan").read_text(encoding="utf-8")
        assert ("prefetch ?p[*] -> llc" in text) is (layer < 5)
        assert ("gate, predict" in text) is (layer < 5)
        prefill = (plan / f"programs/layer{layer:03d}.prefill.plan").read_text(encoding="utf-8")
        assert "predict" not in prefill
