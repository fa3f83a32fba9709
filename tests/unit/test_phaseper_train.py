"""Losses and nets by hand, and training on traces with a planted rule.

Holds: "inverse-frequency + focal loss (prefill, outer), focal (decode, outer), BCE (middle)";
"seeds fixed, same input gives the same bytes"; "the budget is a flag"; "A learned net that loses to
a free heuristic must not ship"; "All layers train in one batched job (they are independent)".
"""

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.traces import PlantedStore

from pdscope.compiler.passes.train_phaseper import TrainPhasePer
from pdscope.compiler.passmanager import PassManager, Workspace
from pdscope.compiler.phaseper import losses, nets, rivals, select, train
from pdscope.compiler.phaseper.build import build_predictors
from pdscope.compiler.phaseper.predictor_file import PredictorFiles
from pdscope.compiler.phaseper.rows import PhaseRows
from pdscope.errors import BudgetError, PlanError

CPU = torch.device("cpu")
QUICK = train.TrainOptions(
    width=32, batch=128, rows=20_000, search_rows=(2_000, 4_000), learning_rate=1e-2
)


def phase_rows(store: PlantedStore, phase: str = "decode") -> PhaseRows:
    return PhaseRows(store, phase, store.gates, CPU, torch.float32)


def log_loss(p: float, y: int) -> float:
    return -math.log(p if y else 1 - p)


def test_losses_by_hand() -> None:
    """One net, one row, two experts: p = 0.8 and 0.3, truth 1 and 0, frequencies 0.2 and 0.6."""
    p, y, f = [0.8, 0.3], [1, 0], [0.2, 0.6]
    logits = torch.tensor([[[math.log(v / (1 - v)) for v in p]]])
    truth, frequency = torch.tensor([[y]]).float(), torch.tensor([[f]])
    plain = [log_loss(a, b) for a, b in zip(p, y, strict=True)]
    focal = [0.2**2 * plain[0], 0.3**2 * plain[1]]
    weights = [5.0, 1 / 0.6]
    mean = sum(weights) / 2
    rare = [plain[0] * weights[0] / mean, plain[1] * weights[1] / mean]
    soft = torch.tensor([[[0.9, 0.2]]])
    half = (float(logits[0, 0, 0]) - float(logits[0, 0, 1])) / 2  # from either logit to the edge
    margin = 1 / (1 + math.exp(-2 * half))
    doubt = [0.9 * math.log(margin) + 0.1 * math.log(1 - margin)]
    doubt += [0.2 * math.log(1 - margin) + 0.8 * math.log(margin)]
    expected = {
        losses.LossSpec(losses.BCE): sum(plain) / 2,
        losses.LossSpec(losses.PAPER_OUTER_DECODE, 0, 2): sum(focal) / 2,
        losses.LossSpec(losses.PAPER_OUTER_PREFILL, 3, 2): sum(rare) / 2 + 3 * sum(focal) / 2,
        losses.LossSpec(losses.DISTILL): -sum(doubt) / 2,
    }
    for spec, value in expected.items():
        found = losses.stacked_loss([spec], logits, truth, soft, frequency, 1)
        assert float(found) == pytest.approx(value, rel=1e-5), spec
    specs = list(expected)
    many = [t.expand(len(specs), -1, -1) for t in (logits, truth, soft, frequency)]
    assert float(losses.stacked_loss(specs, *many, 1)) == pytest.approx(sum(expected.values()))


def test_the_paper_s_loss_of_each_group() -> None:
    kinds = {
        ("input", "prefill"): losses.PAPER_OUTER_PREFILL,
        ("output", "prefill"): losses.PAPER_OUTER_PREFILL,
        ("input", "decode"): losses.PAPER_OUTER_DECODE,
        ("middle", "prefill"): losses.BCE,
        ("middle", "decode"): losses.BCE,
    }
    for (group, phase), kind in kinds.items():
        assert losses.paper_loss(group, phase, 1.0, 2.0).kind == kind


@pytest.mark.parametrize("deep", [False, True])
def test_a_net_begins_as_the_cross_layer_gate(deep: bool) -> None:
    rows = phase_rows(PlantedStore(rows=200))
    shape = nets.NetShape(32, 8, 16, deep, rows.blocks)
    generator = torch.Generator().manual_seed(0)
    linear = train._cross_gates(rows, [0, 2])
    parameters = nets.initial(shape, linear, generator, CPU)
    ids = np.arange(20)
    found = train.logits(rows, shape, parameters, [0, 2], ids)
    for net, pair in enumerate([0, 2]):
        expected = rows.gates[rows.layers[pair + 1]].logits(rows.a(pair, ids))
        assert found[net] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("deep", [False, True])
def test_the_file_s_net_computes_what_was_trained(deep: bool) -> None:
    """Power-of-two input scales fold into bf16 weights without rounding."""
    rows = phase_rows(PlantedStore(rows=300))
    shape = nets.NetShape(32, 8, 16, deep, rows.blocks)
    generator = torch.Generator().manual_seed(0)
    parameters = nets.initial(shape, train._cross_gates(rows, [1]), generator, CPU)
    for name, tensor in parameters.items():
        noisy = tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        vector = tensor.shape[1] == 1
        parameters[name] = noisy if vector else noisy.bfloat16().float()
    ids = np.arange(50)
    expected = train.logits(rows, shape, parameters, [1], ids)[0]
    tensors = nets.file_tensors(shape, parameters, 0, rows.scale[1])
    assert {n: tuple(t.shape) for n, t in tensors.items()} == shape.tensors()
    assert sum(t.nbytes for t in tensors.values()) == shape.bytes()
    found = select.Net(shape, tensors).scores(rows.a(1, ids), rows.features(1, ids))
    assert found == pytest.approx(expected, abs=1e-4)


def test_features_by_hand() -> None:
    store = PlantedStore(rows=50)
    rows = phase_rows(store)
    layer, following = store.layer("decode", 3), store.layer("decode", 5)
    found = rows.features(1, np.array([0, 7]))
    assert found.shape == (2, 24)
    assert found[0, 8:].sum() == 0  # the first token has none before it
    routed = np.zeros(8, np.float32)
    routed[layer.e[7]] = layer.w[7]
    assert (found[1, :8] == routed).all()
    assert set(np.flatnonzero(found[1, 8:16])) == set(layer.e[6])
    assert set(np.flatnonzero(found[1, 16:])) == set(following.e[6])
    assert phase_rows(store, "prefill").features(1, np.array([7])).shape == (1, 16)


def test_a_planted_rule_is_learned() -> None:
    """The gate's input is turned between layers: the gate asked too early is near chance."""
    store = PlantedStore(layers=3)
    about, files = build_predictors(store, store.gates, QUICK, "cpu")
    assert len(about["layers"]) == 4 and len(files) == 2
    for entry in about["layers"]:
        assert entry["chosen"] == "phaseper"
        assert entry["hit"] > 0.85 and entry["rivals"]["cross_gate"]["hit"] < 0.5
        assert entry["rank_hit"] > 0.9
        assert entry["net"]["stored"] and entry["reliability"]["error"] < 0.05


def test_a_net_that_loses_is_not_chosen() -> None:
    """Where the gate's input does not change, the cross-layer gate is right; a learning rate far
    too high keeps the net from it."""
    store = PlantedStore(turn=0)
    wild = replace(QUICK, learning_rate=3.0, rows=3_000, checks=1)
    about, _ = build_predictors(store, store.gates, wild, "cpu")
    for entry in about["layers"]:
        assert entry["chosen"] == "cross_gate"
        assert entry["hit"] == 1.0 and not entry["net"]["stored"]


def test_choice_weighs_cost() -> None:
    hit = {"phaseper": 0.9, "cross_gate": 0.899, "frequency": 0.3}
    time = {"phaseper": 20.0, "cross_gate": 3.0, "frequency": 0.1}
    assert select.choose(hit, time) == "cross_gate"  # 0.1 points are not worth 17 us
    assert select.choose({**hit, "phaseper": 0.91}, time) == "phaseper"
    assert rivals.PREVIOUS not in select.eligible("prefill")


def test_same_seed_same_bytes() -> None:
    """However many threads; another seed gives other bytes."""
    store = PlantedStore(layers=3)
    short = replace(QUICK, rows=15_000, search_rows=(1_000,))
    first, again = (build_predictors(store, store.gates, short, "cpu", n) for n in (1, 2))
    assert first == again
    assert all(entry["net"]["stored"] for entry in first[0]["layers"])
    other = build_predictors(store, store.gates, replace(short, seed=1), "cpu")
    assert other[1] != first[1]


def test_nets_do_not_depend_on_their_neighbours() -> None:
    """A net trained alone is the net trained in a stack."""
    store = PlantedStore(rows=800)
    rows = phase_rows(store)
    shape = nets.NetShape(32, 8, 16, False, rows.blocks)
    specs = [losses.LossSpec(losses.BCE), losses.LossSpec(losses.DISTILL)]
    jobs = [train.Job(pair, train.Candidate(specs[pair % 2], shape)) for pair in range(3)]
    together = train.train_jobs(rows, jobs, 5_000, QUICK)
    for job, trained in zip(jobs, together, strict=True):
        alone = train.train_jobs(rows, [job], 5_000, QUICK)[0]
        for name, tensor in trained.parameters.items():
            torch.testing.assert_close(alone.parameters[name], tensor, rtol=0, atol=2e-5)


def test_training_stops_where_nothing_is_gained() -> None:
    store = PlantedStore(turn=0)
    rows = phase_rows(store)
    shape = nets.NetShape(32, 8, 16, False, rows.blocks)
    job = train.Job(0, train.Candidate(losses.LossSpec(losses.DISTILL), shape))
    seen: list[int] = []
    options = replace(QUICK, learning_rate=1e-6, checks=20, patience=3)
    train.train_jobs(rows, [job], 40_000, options, seen.append)
    assert sum(seen) < 20_000


def test_size_budget() -> None:
    """ "Size budget 4.2 MB a layer at the paper's dimensions, and the budget is a flag"."""
    blocks = nets.BLOCKS["decode"]
    for deep in (False, True):
        width = train.fitting_width(2048, 128, blocks, deep, 2_100_000, 1024)
        assert nets.NetShape(2048, 128, width, deep, blocks).bytes() <= 2_100_000
        assert nets.NetShape(2048, 128, width + 16, deep, blocks).bytes() > 2_100_000
        assert width >= 128
    with pytest.raises(BudgetError, match="raise --predictor-budget"):
        train.fitting_width(2048, 128, blocks, False, 10_000, 1024)


def run_pass(folder: Path, store: PlantedStore) -> Workspace:
    workspace = Workspace(folder)
    options = replace(QUICK, rows=20_000, search_rows=(2_000,))
    step = TrainPhasePer(lambda: store, "key", lambda: store.gates, options, "", "cpu")
    PassManager(workspace, "code").run(step)
    return workspace


def test_the_pass_writes_what_can_be_read_back(tmp_path: Path) -> None:
    """Measuring the files on the traces' own rows gives phaseper.json's figures."""
    store = PlantedStore(rows=1500)
    plan = run_pass(tmp_path, store).plan
    files = PredictorFiles(plan)
    assert json.loads((plan / "phaseper.json").read_text())["traces"] == "key"
    for phase in store.phases:
        rows = phase_rows(store, phase)
        for found in select.evaluate(rows, rows.validation, files):
            entry: dict[str, Any] = files.entry(found["layer"], phase)
            assert found["hit"] == pytest.approx(entry["hit"])
            assert found["rank_hit"] == pytest.approx(entry["rank_hit"])
            assert set(found["rivals"]) == set(rivals.RIVALS)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    plan = run_pass(tmp_path, PlantedStore(rows=400)).plan
    layer = plan / "phaseper" / "layer001.safetensors"
    layer.write_bytes(layer.read_bytes()[:100])
    with pytest.raises(PlanError, match="layer001.safetensors: cannot be read"):
        PredictorFiles(plan).tables(1, "decode")
    (plan / "phaseper.json").write_text('{"format_version": 99, "layers": []}')
    with pytest.raises(PlanError, match="expected 1: compile the plan again"):
        PredictorFiles(plan)
    (plan / "phaseper.json").unlink()
    with pytest.raises(PlanError, match="phaseper.json: cannot be read"):
        PredictorFiles(plan)


def test_distillation_does_not_learn_a_common_shift() -> None:
    """Margins do not change when all logits do, so the gradients of a row cancel."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5, 8, generator=generator, requires_grad=True)
    soft = torch.rand(1, 5, 8, generator=generator)
    torch.autograd.backward(losses.distill(logits, soft, 2).sum())
    assert logits.grad is not None and logits.grad.abs().max() > 0.1
    assert logits.grad.sum(-1) == pytest.approx(torch.zeros(1, 5), abs=1e-5)


KILLED = """
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
from support.traces import PlantedStore
from pdscope.compiler.phaseper import build, checkpoints, train

class Often(checkpoints.Checkpoints):
    def __init__(self, folder, key):
        super().__init__(folder, key, 0.0)

build.Checkpoints = Often
options = train.TrainOptions(
    width=32, batch=128, rows=20_000, search_rows=(2_000, 4_000), learning_rate=1e-2
)
seen, rows = 0, int(sys.argv[3])
def advance(count):
    global seen
    seen += count
    if seen >= rows:
        os.kill(os.getpid(), signal.SIGKILL)
store = PlantedStore()
where = pathlib.Path(sys.argv[2]), "key"
build.build_predictors(store, store.gates, options, "cpu", 1, advance=advance, saved=where)
"""


def test_a_killed_training_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    """Holds: "killing and restarting any pass loses at most one chunk": of training, the step that
    was not saved yet, here of 128 rows."""
    store = PlantedStore()
    fresh: list[int] = []
    whole = build_predictors(store, store.gates, QUICK, "cpu", 2, advance=fresh.append)
    states, support = tmp_path / "states", Path(__file__).resolve().parents[1]
    for killed_at in (3_000, 110_000):  # rows of all nets, those of earlier runs included
        command = [sys.executable, "-c", KILLED, str(support), str(states), str(killed_at)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
    calls: list[int] = []
    found = build_predictors(
        store, store.gates, QUICK, "cpu", 1, advance=calls.append, saved=(states, "key")
    )
    assert found == whole
    assert sum(calls) == sum(fresh)  # what was saved counts as done
    most = 128 * 4 * 3  # rows of one step of one stack
    trained = sum(n for n in calls if n <= most)
    assert trained <= sum(fresh) - 110_000 + most
    # Another key's states are not used.
    other: list[int] = []
    build_predictors(
        store, store.gates, QUICK, "cpu", 1, advance=other.append, saved=(states, "other")
    )
    assert sorted(other) == sorted(fresh)
