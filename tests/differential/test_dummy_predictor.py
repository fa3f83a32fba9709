"""--dummy-predictor: predictions of a chosen accuracy, for dummy weights.

Holds: "For dummy weights `--dummy-predictor accuracy:p` stands in, marked as such everywhere it
shows" and "zero effect on outputs whatever the predictor says".
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.assets import BUNDLED
from support.commands import run_here
from support.plans import PlanStore

import pdscope
from pdscope.compiler.driver import compile_model
from pdscope.dummy_predictor import DummyPredictor, record
from pdscope.errors import InputError, PlanError
from pdscope.ir.isa import Opcode
from pdscope.observe import TapEvent
from pdscope.plan import Plan
from pdscope.session import Session

MODEL = BUNDLED / "tiny-mixtral"
EXPERTS, TOP_K = 8, 2
IDS = np.random.default_rng(0).integers(0, 500, 200).tolist()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dummy") / "plan"
    said = run_here(
        "pdscope-compile", MODEL / "config.json", "-o", folder, "--load-format", "dummy",
        "--dummy-predictor", "accuracy:0.75,seed:3",
    )  # fmt: skip
    assert said.status == 0, said.err
    (line,) = [x for x in said.out.splitlines() if x.startswith("predictors ")]
    assert "DUMMY" in line and "0.75" in line
    return folder


def decode(session: Session) -> NDArray[np.float32]:
    session.reset()
    return np.stack([session.decode(token).copy() for token in IDS])


def predicted(session: Session) -> dict[int, NDArray[np.int32]]:
    """What each layer that predicts says, [tokens, top_k]."""
    found: dict[int, list[NDArray[np.int32]]] = {}

    def tap(event: TapEvent) -> None:
        if event.opcode == Opcode.GATE and event.predicted is not None:
            found.setdefault(event.layer, []).append(event.predicted.copy())

    with session.tap(tap):
        decode(session)
    return {layer: np.concatenate(parts) for layer, parts in found.items()}


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.75, 1.0])
def test_steps_predict_as_asked_and_compute_the_same(plan: Path, accuracy: float) -> None:
    dummy = DummyPredictor(accuracy, 7)
    with pdscope.load(plan, threads=2, cache_prefetch="on") as engine:
        session = engine.main
        plain = decode(session)
        truth = record(session, lambda: decode(session))
        assert truth.shape == (len(IDS), 6, TOP_K) and (truth >= 0).all()
        said = dummy.predictions(truth, EXPERTS)
        assert np.array_equal(said, dummy.predictions(truth, EXPERTS))
        assert not np.array_equal(
            said, DummyPredictor(accuracy, 8).predictions(truth, EXPERTS)
        ) or (accuracy == 1)
        session.set_predictions(said)
        assert np.array_equal(decode(session), plain)
        found = predicted(session)
        assert sorted(found) == [0, 1, 2, 3, 4]
        hits = []
        for layer, experts in found.items():
            assert np.array_equal(experts, said[:, layer])
            assert (experts[:, 0] != experts[:, 1]).all()
            right = experts[:, :, None] == truth[:, layer + 1, None, :]
            hits.append(right.any(2).mean())
        # 2000 draws: three standard deviations
        assert np.mean(hits) == pytest.approx(accuracy, abs=3 * (0.25 / 2000) ** 0.5)
        before = session.stats()
        decode(session)
        after = session.stats()
        named = after.experts_predicted - before.experts_predicted
        assert named and (after.experts_hit - before.experts_hit) / named == pytest.approx(
            accuracy, abs=0.05
        )
        session.set_predictions(None)
        own = predicted(session)
        assert any(not np.array_equal(own[n], found[n]) for n in own) or accuracy == 1


def test_adversarial_predictions_change_no_output(plans: PlanStore) -> None:
    """The same expert twice, the last one everywhere, and fewer tokens than are run: bit-equal, on
    real weights too, prompt and answer."""
    with pdscope.load(plans.compile(MODEL), threads=2, cache_prefetch="on") as engine:
        session = engine.main
        plain = decode(session), session.prefill(IDS[:9], all_logits=True).copy()
        for tokens, expert in ((len(IDS) + 20, 0), (50, EXPERTS - 1), (0, 0)):
            session.set_predictions(np.full((tokens, 6, TOP_K), expert))
            assert np.array_equal(decode(session), plain[0])
            assert np.array_equal(session.prefill(IDS[:9], all_logits=True), plain[1])
        for wrong in (np.full((4, 6, TOP_K), EXPERTS), np.full((4, 6, TOP_K), -1)):
            with pytest.raises(InputError, match="predictions: expected experts 0 to 7"):
                session.set_predictions(wrong)
        with pytest.raises(InputError, match="predictions has shape"):
            session.set_predictions(np.zeros((4, 5, TOP_K), int))


def test_few_strangers() -> None:
    """More experts are left out than there are others: the token's own fill up, none twice."""
    chosen = np.tile(np.arange(3, dtype=np.int32), (50, 2, 1))
    for accuracy in (0.0, 0.5):
        said = DummyPredictor(accuracy).predictions(chosen, 4)[:, 0]
        assert all(len(set(row)) == 3 for row in said.tolist())
        assert accuracy or (said == 3).any(1).all()


def bench(plan: Path, *options: object) -> Any:
    said = run_here("pdscope-bench", plan, "-p", "0", "-n", "8", "-r", "1", *options)
    assert said.status == 0, said.err
    return said.out


def test_it_is_marked_wherever_it_shows(plan: Path, plans: PlanStore) -> None:
    (entry,) = json.loads(bench(plan, "--json"))
    assert entry["predictor"]["state"] == "dummy"
    assert entry["predictor"]["dummy"] == {"accuracy": 0.75, "seed": 3}
    assert "DUMMY PREDICTOR: a dummy that names" in bench(plan)
    (entry,) = json.loads(bench(plan, "--json", "--dummy-predictor", "accuracy:0.5"))
    assert entry["predictor"]["dummy"] == {"accuracy": 0.5, "seed": 0}
    (entry,) = json.loads(bench(plan, "--json", "--predictor", "off"))
    assert entry["predictor"]["state"] == "off" and entry["predictor"]["dummy"] is None
    assert "DUMMY" in run_here("pdscope-inspect", plan).out
    assert "DUMMY: a dummy" in run_here("pdscope-inspect", plan, "--predictor").out
    found = json.loads(run_here("pdscope-inspect", plan, "--predictor", "--json").out)
    assert found == {"dummy": {"accuracy": 0.75, "seed": 3}}
    assert "DUMMY" in (plan / "report.html").read_text()
    assert run_here("pdscope-inspect", plan, "--verify").status == 0
    with pdscope.load(plan) as engine:
        assert engine.predictor()["state"] == "dummy" and "dummy" in engine.predictor()["why"]
    said = run_here("pdscope-inspect", plan, "--predictor", "--on", MODEL / "config.json")
    assert said.status == 1 and "its predictor is a dummy" in said.err
    # It changes nothing of what the plan computes.
    bare = plans.compile(MODEL / "config.json", load_format="dummy")
    assert Plan.open(plan).plan_hash == Plan.open(bare).plan_hash


def test_faults(plan: Path, plans: PlanStore, tmp_path: Path) -> None:
    for text in ("0.5", "accuracy:2", "accuracy:x", "accuracy:1e", "accuracy:0.5,seed:-1"):
        with pytest.raises(InputError, match="dummy_predictor: .* is not accuracy:P"):
            DummyPredictor.parse(text)
        said = run_here("pdscope-bench", plan, "-n", "8", "--dummy-predictor", text)
        assert said.status == 1 and said.err.count("\n") == 1
    given = {"dummy_predictor": "accuracy:1"}
    for options, message in (
        ({}, "the weights are real"),
        ({"load_format": "dummy", "cache_prefetch": "off"}, "cache_prefetch is off"),
        ({"load_format": "dummy", "predictor": "auto"}, "so are predictors to train"),
    ):
        with pytest.raises(InputError, match=message):
            compile_model(MODEL, tmp_path / "p", **given, **options)
    real = plans.compile(MODEL)
    said = run_here("pdscope-bench", real, "-n", "8", "--dummy-predictor", "accuracy:1")
    assert said.status == 1 and "has real weights: train predictors" in said.err
    said = run_here("pdscope-bench", plan, "--dummy-predictor", "accuracy:1", "--predictor", "off")
    assert said.status == 2
    data = json.loads((plan / "phaseper.json").read_text())
    for damage in ({"accuracy": 3}, {"seed": 1}, 7):
        (tmp_path / "phaseper.json").write_text(json.dumps({**data, "dummy": damage}))
        broken = Plan(tmp_path, Plan.open(plan).data)
        with pytest.raises(PlanError, match="phaseper.json: dummy: "):
            DummyPredictor.of(broken)
