"""Predictors in a running engine: what steps predict is what engine.predict and torch say of the
same inputs; results do not depend on it; files at fault are refused.

Holds: "Forward in C in the runtime, checked against torch to 1e-4"; "zero effect on outputs
whatever the predictor says (adversarial predictions, CPU plans ...: bit-equal)"; "The compiler
picks per layer and phase ... and the plan says which"; every error of input is one line.
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.assets import BUNDLED
from support.damage import edit_json
from support.plans import PlanStore
from support.predictors import moe_layers, with_predictors, write_predictors
from support.runs import random_ids
from support.tiny_configs import random_tiny_config, save_random_model

import pdscope
from pdscope.compiler.phaseper import rivals
from pdscope.compiler.phaseper.metrics import membership
from pdscope.compiler.phaseper.predictor_file import PredictorFiles
from pdscope.engine import Engine
from pdscope.errors import InputError, PlanError
from pdscope.ir.isa import NormSite, Opcode
from pdscope.observe import TapEvent
from pdscope.plan import Plan
from pdscope.plan_check import check_plan
from pdscope.plan_hash import plan_hash
from pdscope.predictors import CHOICES
from pdscope.session import Session

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]
MODEL = BUNDLED / "tiny-mixtral"


def mixed(index: int, phase: str) -> str:
    """Each of the choices somewhere; the previous token's experts serve decode alone."""
    name = CHOICES[index % len(CHOICES)]
    return "phaseper" if name == "previous" and phase == "prefill" else name


def base_plan(plans: PlanStore, dtype: str) -> Path:
    if dtype == "fp32":  # 6 layers; dense ones between
        config = random_tiny_config("qwen3_moe", 0) | {
            "decoder_sparse_step": 1,
            "num_hidden_layers": 6,
            "mlp_only_layers": [1, 4],
        }
        model = plans.once("between.model", lambda out: save_random_model(config, out, 0))
        return plans.compile(model, dtype=dtype, max_context=256)
    return plans.compile(MODEL, dtype=dtype, max_context=512)


def nets_everywhere(index: int, phase: str) -> str:
    return "phaseper"


# --- what steps predict ---


class Watcher:
    """Keeps what the session's next step shows, and of each sequence what its last token chose."""

    def __init__(self, engine: Engine, plan: Path) -> None:
        self.engine = engine
        self.files = PredictorFiles(plan)
        self.layers = moe_layers(plan)
        self.hidden, self.k = engine.plan.model["hidden"], engine.plan.model["top_k"]
        self.experts = engine.plan.model["experts"]
        self.last: dict[int, dict[int, Ids]] = {}  # by sequence, by layer
        self.seen: dict[int, tuple[Floats, Floats, Ids, Ids | None]] = {}
        self.checked = 0

    def __call__(self, event: TapEvent) -> None:
        if event.opcode == Opcode.NORM and event.arg == NormSite.MLP:
            self.a = event.data[:, : self.hidden].copy()
        if event.opcode == Opcode.GATE:
            assert event.ids is not None
            predicted = None if event.predicted is None else event.predicted.copy()
            self.seen[event.layer] = (self.a, event.data.copy(), event.ids.copy(), predicted)

    def step(self, session: Session, tokens: list[int], seqs: list[int]) -> None:
        """Runs a step and checks each of its predictions."""
        self.seen.clear()
        with session.tap(self):
            session.step(tokens, seqs=seqs)
        phase = "decode" if len(set(seqs)) == len(seqs) else "prefill"
        if len(tokens) <= 16:
            for layer, following in zip(self.layers, self.layers[1:], strict=False):
                self.check(layer, following, phase, seqs)
        for row, seq in enumerate(seqs):
            self.last[seq] = {layer: self.seen[layer][2][row] for layer in self.layers}

    def check(self, layer: int, following: int, phase: str, seqs: list[int]) -> None:
        a, w, e, predicted = self.seen[layer]
        assert predicted is not None
        prev = np.full((len(seqs), self.k), -1, np.int32)
        prev_next = prev.copy()
        for row, seq in enumerate(seqs):
            if seq in seqs[:row]:  # what the next layer does in this step is not known yet
                prev[row] = e[max(i for i in range(row) if seqs[i] == seq)]
            elif seq in self.last:
                prev[row], prev_next[row] = self.last[seq][layer], self.last[seq][following]
        found = self.engine.predict(layer, phase, a, w, e, prev, prev_next)
        name = self.files.entry(layer, phase)["chosen"]
        if name != rivals.CROSS_GATE:  # whose rule is softmax and more
            best = np.argsort(-found, axis=1, kind="stable")[:, : self.k]
            assert np.array_equal(predicted, best), (layer, phase, name)
            expected = self.expected(name, layer, phase, a, w, e, prev, prev_next)
            assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max() + 1e-6
        self.checked += 1

    def expected(
        self,
        name: str,
        layer: int,
        phase: str,
        a: Floats,
        w: Floats,
        e: Ids,
        prev: Ids,
        prev_next: Ids,
    ) -> Floats:
        """As the compiler computes it."""
        tables = self.files.tables(layer, phase)
        if name == rivals.FREQUENCY:
            return np.broadcast_to(tables.frequency, (len(a), self.experts))
        if name == rivals.PREVIOUS:
            return rivals.previous_scores(prev_next, tables.frequency)
        if name == rivals.TRANSITION:
            table = torch.from_numpy(tables.transition).bfloat16().float().numpy()
            scores = rivals.transition_scores(table, e, w)
            return (scores * w.sum(1, keepdims=True)).astype(np.float32)
        net = self.files.net(layer, phase)
        assert net is not None
        routed = np.zeros((len(a), self.experts), np.float32)
        np.put_along_axis(routed, e.astype(np.int64), w, 1)
        parts = {
            "routed": routed,
            "previous": membership(prev, self.experts),
            "previous_next": membership(prev_next, self.experts),
        }
        features = np.concatenate([parts[n] for n in net.shape.blocks], 1).astype(np.float32)
        return net.scores(torch.from_numpy(a).bfloat16().float().numpy(), features)


@pytest.mark.parametrize("chosen", [nets_everywhere, mixed])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int4"])
def test_steps_predict_what_torch_says(
    plans: PlanStore, tmp_path: Path, dtype: str, chosen: Callable[[int, str], str]
) -> None:
    """Decode, batches and short prefills; fork, truncate and restore keep the previous token's
    experts or make them unknown."""
    plan = with_predictors(base_plan(plans, dtype), tmp_path / "plan", chosen)
    with (
        pdscope.load(plan, threads=2, cache_prefetch="on") as engine,
        engine.session(max_seqs=16, kv_tokens=2048) as session,
    ):
        assert engine.predictor()["state"] == "on"
        watcher = Watcher(engine, plan)
        ids = list(random_ids(engine.info.vocab, 200))

        def step(n: int, seqs: list[int]) -> None:
            watcher.step(session, [ids.pop() for _ in range(n)], seqs)

        for _ in range(4):
            step(1, [0])
        step(20, [0] * 20)  # too long to predict, not to be remembered
        step(1, [0])
        step(5, [1, 1, 1, 2, 2])
        step(3, [0, 1, 2])
        step(4, [2, 0, 2, 3])
        step(1, [2])
        session.fork(2, 5)
        watcher.last[5] = watcher.last[2]
        step(2, [5, 2])
        session.truncate(0, 7)
        del watcher.last[0]
        step(1, [0])
        step(1, [0])
        saved = session.save(1)
        assert saved is not None
        session.restore(saved, 1)
        del watcher.last[1]
        step(2, [1, 0])
        step(2, [1, 0])
        with pytest.raises(InputError):
            session.step([-1], seqs=[0])
        step(1, [0])  # what failed before it began has changed nothing
        assert watcher.checked == 15 * (len(watcher.layers) - 1)


def test_a_cancelled_step_is_forgotten(plans: PlanStore, tmp_path: Path) -> None:
    """It has written over what some layers' last token chose."""
    plan = with_predictors(base_plan(plans, "bf16"), tmp_path / "plan")
    with (
        pdscope.load(plan, threads=2, cache_prefetch="on") as engine,
        engine.session() as session,
    ):
        watcher = Watcher(engine, plan)
        watcher.step(session, [5], [0])

        def cancel(event: TapEvent) -> None:
            if event.layer == 2:
                session.cancel()

        with session.tap(cancel), pytest.raises(pdscope.Cancelled):
            session.step([6])
        del watcher.last[0]
        watcher.step(session, [7], [0])
        watcher.step(session, [8], [0])


# --- no effect on results ---


def outputs(plan: Path, predictor: str, threads: int = 2) -> Floats:
    with (
        pdscope.load(plan, threads=threads, cache_prefetch="on", predictor=predictor) as engine,
        engine.session(max_seqs=16, kv_tokens=1024) as session,
    ):
        assert engine.predictor()["state"] == ("on" if predictor == "auto" else "off")
        ids = random_ids(engine.info.vocab, 60)
        rows = [session.prefill(ids[:30]).copy()]
        rows += [session.decode(token).copy() for token in ids[30:]]
        for n in (2, 5, 16):
            session.reset()
            for k in range(3):
                tokens = random_ids(engine.info.vocab, n, seed=k)
                logits = session.step(tokens, seqs=list(range(n)), want_logits=[True] * n)
                rows.extend(logits.copy())
        session.reset()
        rows.extend(session.prefill(ids[:9], all_logits=True).copy())
        stats = session.stats()
    assert 0 <= stats.experts_hit <= stats.experts_predicted > 0
    return np.stack(rows)


def spoil(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def damage(net: dict[str, torch.Tensor]) -> None:
        for tensor in net.values():
            tensor.view(-1)[::3] = value

    return damage


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int4"])
def test_outputs_do_not_depend_on_nets(plans: PlanStore, tmp_path: Path, dtype: str) -> None:
    """Random weights, and weights of NaN, Inf and near the largest number."""
    base = base_plan(plans, dtype)
    plan = with_predictors(base, tmp_path / "plan", mixed)
    expected = outputs(plan, "off")
    assert np.isfinite(expected).all()
    assert np.array_equal(outputs(plan, "auto"), expected)
    for number, value in enumerate((np.nan, np.inf, 3e38)):
        plan = with_predictors(base, tmp_path / f"{number}", damage=spoil(value))
        for threads in (2, 5):
            assert np.array_equal(outputs(plan, "auto", threads), expected), value


def test_nets_are_replaced_while_steps_run(plans: PlanStore, tmp_path: Path) -> None:
    """pds_engine_set_net from another thread: the same outputs, no more memory than two nets of
    each kind take."""
    from pdscope.predictors import read_predictors

    base = base_plan(plans, "bf16")
    both = [with_predictors(base, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    nets = [read_predictors(Plan.open(plan)) for plan in both]
    expected = outputs(both[0], "off")
    with (
        pdscope.load(both[0], threads=2, cache_prefetch="on") as engine,
        engine.session() as session,
    ):
        first = net_bytes(engine)
        ids = random_ids(engine.info.vocab, 60)
        stop, swaps = threading.Event(), 0

        def swap() -> None:
            nonlocal swaps
            while not stop.is_set():
                for each in nets[swaps % 2] or ():
                    assert each.net is not None
                    each.net.set(engine.handle, each.layer, each.phase)
                swaps += 1

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            for _ in range(5):
                session.reset()
                rows = [session.prefill(ids[:30]).copy()]
                rows += [session.decode(token).copy() for token in ids[30:]]
                assert np.array_equal(np.stack(rows), expected[:31])
        finally:
            stop.set()
            thread.join()
        assert swaps > 2
        assert net_bytes(engine) <= 2 * first


def net_bytes(engine: Engine) -> int:
    from pdscope.native import ffi

    info = ffi().new("pds_engine_info *")
    engine.handle.library.check(
        engine.handle.library.lib.pds_engine_get_info(engine.handle.pointer, info)
    )
    return int(info.net_bytes)


# --- files ---


@pytest.fixture(scope="module")
def plan(plans: PlanStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predictors")
    return with_predictors(base_plan(plans, "bf16"), folder / "plan")


def test_report(plans: PlanStore, tmp_path: Path, plan: Path) -> None:
    with pdscope.load(plan, threads=1) as engine:
        report = engine.predictor()
        assert report["asked"] == "auto" and report["state"] == "on"
        assert report["chosen"] == {p: {"phaseper": 5} for p in ("prefill", "decode")}
        assert report["bytes"] == net_bytes(engine) > 10 * 65536
        assert json.loads(json.dumps(report)) == report
    with pdscope.load(plan, threads=1, predictor="off") as engine:
        report = engine.predictor()
        assert (report["state"], report["why"], report["bytes"]) == ("off", "asked for", 0)
    with pdscope.load(base_plan(plans, "bf16"), threads=1) as engine:
        assert "no phaseper.json" in engine.predictor()["why"]
    without = plans.compile(MODEL, dtype="bf16", cache_prefetch="off")
    copied = with_predictors(without, tmp_path / "plan")
    with pdscope.load(copied, threads=1) as engine:
        assert "no cache prefetch" in engine.predictor()["why"]
        with pytest.raises(InputError, match="layer 0: the plan predicts nothing there"):
            engine.predict(0, "decode", *inputs(engine))
    with pytest.raises(InputError, match="predictor is 'on', expected auto, off"):
        pdscope.load(plan, predictor="on")


def inputs(engine: Engine, rows: int = 2) -> tuple[Floats, Floats, Ids]:
    model = engine.plan.model
    a = np.ones((rows, model["hidden"]), np.float32)
    w = np.ones((rows, model["top_k"]), np.float32)
    return a, w, np.tile(np.arange(model["top_k"], dtype=np.int32), (rows, 1))


def test_predict_refuses(plan: Path) -> None:
    with pdscope.load(plan, threads=1) as engine:
        a, w, e = inputs(engine)
        assert engine.predict(0, "decode", a, w, e).shape == (2, engine.plan.model["experts"])
        assert engine.predict(0, "prefill", a[:0], w[:0], e[:0]).shape[0] == 0
        wrong: list[tuple[tuple[Any, ...], str]] = [
            ((0, "both", a, w, e), "phase is 'both'"),
            ((99, "decode", a, w, e), "layer is 99"),
            ((5, "decode", a, w, e), "layer 5: the plan predicts nothing there"),
            ((0, "decode", a[:, :3], w, e), "a has shape"),
            ((0, "decode", a, w[:1], e), "w has shape"),
            ((0, "decode", a, w, e[:1]), "e has shape"),
            ((0, "decode", a, w, e - 1), "e: expert -1, expected 0 to"),
            ((0, "decode", a, w, e, e - 2), "prev: expert -2, expected -1 to"),
            ((0, "decode", a, w, e, e - 1, e + 99), "prev_next: expert 99"),
        ]
        for arguments, text in wrong:
            with pytest.raises(InputError, match=text):
                engine.predict(*arguments)


def faults() -> Iterator[tuple[str, Callable[[Path], object], str]]:
    def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
        return lambda plan: edit_json(plan / "phaseper.json", change)

    layer = "phaseper/layer000.safetensors"
    yield "json", lambda p: (p / "phaseper.json").write_text("{"), "phaseper.json: cannot be read"
    yield "list", lambda p: (p / "phaseper.json").write_text("[]"), "layers: missing"
    yield "version", edit(lambda d: d.update(format_version=9)), "format_version is 9, expected 1"
    yield "hidden", edit(lambda d: d.update(hidden=9)), "hidden is 9, expected"
    yield "layer", edit(lambda d: d["layers"][0].update(layer=-1)), "layer is -1, expected 0 to 5"
    yield "null", edit(lambda d: d["layers"].insert(0, None)), "layer is None"
    twice = "layer 0 has two predictors for prefill"
    yield "twice", edit(lambda d: d["layers"].append(d["layers"][0])), twice
    yield "phase", edit(lambda d: d["layers"][0].update(phase="x")), "phase is 'x'"
    yield "chosen", edit(lambda d: d["layers"][1].update(chosen="x")), "layer 0: chosen is 'x'"
    yield "net", edit(lambda d: d["layers"][0].update(net=None)), "net is None"
    yield "width", edit(lambda d: d["layers"][0]["net"].update(width=2000)), "net.width is 2000"
    yield "shape", edit(lambda d: d["layers"][0]["net"].update(width=41)), "expected bf16"
    yield "deep", edit(lambda d: d["layers"][0]["net"].update(deep=1)), "net.deep is 1"
    yield "blocks", edit(lambda d: d["layers"][0]["net"].update(blocks=["x"])), "net.blocks"
    yield "last", edit(lambda d: d["layers"][0].update(layer=5)), "layer005.safetensors"
    yield "gone", lambda p: (p / layer).unlink(), "layer000.safetensors: cannot be read"
    yield "empty", lambda p: (p / layer).write_bytes(b""), "layer000.safetensors: cannot be read"
    yield "cut", lambda p: cut(p / layer), "layer000.safetensors: cannot be read"
    yield "tensor", lambda p: rename(p / layer), "has no tensor prefill.in.weight"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def rename(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"prefill.in.weight", b"prefill.in.Weight"))


@pytest.mark.parametrize(("name", "change", "text"), list(faults()), ids=lambda v: str(v)[:8])
def test_faults_are_one_line(
    plan: Path, tmp_path: Path, name: str, change: Callable[[Path], object], text: str
) -> None:
    copied = tmp_path / "plan"
    shutil.copytree(plan, copied)
    change(copied)
    with pytest.raises(PlanError) as error:
        pdscope.load(copied, threads=1)
    line = str(error.value)
    assert text in line and "\n" not in line and "compile the plan again" in line, name
    with pdscope.load(copied, threads=1, predictor="off") as engine:
        engine.decode(3)


def listed(plan: Path) -> None:
    """plan.json names the predictors' files, as the compiler leaves it."""

    def change(data: dict[str, Any]) -> None:
        for name in [
            "phaseper.json",
            *(f"phaseper/{p.name}" for p in (plan / "phaseper").iterdir()),
        ]:
            content = (plan / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            data["files"][name] = {"bytes": len(content), "sha256": digest}

    edit_json(plan / "plan.json", change)


def test_files_are_verified_but_no_part_of_the_identity(plan: Path, tmp_path: Path) -> None:
    """Predictors change no output: plan_hash leaves them out, so that a plan may be given others.
    --verify checks their bytes like those of every file."""
    copied = tmp_path / "plan"
    shutil.copytree(plan, copied)
    listed(copied)
    opened = Plan.open(copied, verify=True)
    assert plan_hash(opened.data) == opened.plan_hash == Plan.open(plan).plan_hash
    assert check_plan(opened) == []
    write_predictors(copied, seed=7)
    listed(copied)
    assert check_plan(Plan.open(copied)) == []
    file = copied / "phaseper/layer001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (problem,) = check_plan(Plan.open(copied))
    assert "layer001.safetensors: SHA-256" in problem
    file.unlink()
    with pytest.raises(PlanError, match=r"layer001.safetensors: missing"):
        Plan.open(copied)
