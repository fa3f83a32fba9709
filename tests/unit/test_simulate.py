"""The simulator's parts: times, device, residency, bounds, made-up routing, files, the command.

Holds of the issue "AdaptSched and its lowering": "Simulator: ... predicted time per layer and
phase, utilisation of CPU, GPU and link, timeline in Perfetto JSON. `pdscope-simulate plan/
--hardware a100-6230r --trace routing.npz` answers 'what would I get on that card'; the same routing
trace replayed through every policy gives the seesaw table. Plus a lower bound". That times are
those of the mock driver: tests/differential/test_simulate.py.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.assets import ROOT

from pdscope.cli import simulate as command
from pdscope.compiler.decision import Policy
from pdscope.compiler.policies import victim
from pdscope.compiler.simulate import synthetic
from pdscope.compiler.simulate.cache import CachePrefetch
from pdscope.compiler.simulate.device import COMPUTE, COPIES, D2H, H2D, Gpu
from pdscope.compiler.simulate.executor import Executor
from pdscope.compiler.simulate.residency import Ring
from pdscope.compiler.simulate.study import Routing, Study
from pdscope.compiler.simulate.subject import routing_of
from pdscope.compiler.simulate.timing import Link, Work
from pdscope.costs import Cache, Curve, Figure
from pdscope.errors import InputError
from pdscope.ir.isa import Phase
from pdscope.routing_trace import RoutingTrace

GB = 10**9  # a byte takes a nanosecond
QWEN = ROOT / "examples" / "configs" / "qwen3-30b-a3b" / "config.json"
SHAPE = synthetic.Shape(range(4), 32, 4)


# --- times and the device ---


def test_work_is_a_curve_of_each_piece() -> None:
    work = Work(base=10, knots=((2, 100), (4, 200), (10, 260)), extra_num=3, extra_den=2)
    assert work.ns([], 0) == 10
    assert work.ns([1, 2, 3, 7, 16], 5) == 10 + 100 + 100 + 150 + 230 + 320 + 7


def test_copies_share_an_engine_and_start_anew_where_it_was_idle() -> None:
    gpu = Gpu(Link(GB, GB, h2d_start=50))
    gpu.copy(H2D, COPIES, 100)
    gpu.copy(H2D, COMPUTE, 30)
    done = gpu.record(COMPUTE)
    gpu.copy(D2H, COMPUTE, 20)
    while not done.done:
        gpu.pass_time()
    assert gpu.now == 50 + 100 + 30  # the second one found the engine busy
    gpu.drain()
    assert gpu.now == 200
    gpu.advance(300)
    gpu.copy(H2D, COPIES, 1)
    gpu.drain()
    assert gpu.now == 351


def test_a_busy_host_slows_the_copies_of_its_time() -> None:
    gpu = Gpu(Link(GB, GB, h2d_busy=GB // 2))
    gpu.copy(H2D, COPIES, 1000)
    gpu.advance(100)
    gpu.begin_host_work(200)
    while (end := gpu.host_end) is not None:
        gpu.pass_time(end)
    gpu.drain()
    assert gpu.now == 100 + 200 + (1000 - 100 - 100)


def test_copies_slow_the_host_while_they_move() -> None:
    """Work of 600 ns alone and of 900 beside the link, of which a copy takes 300 ns, then 90."""
    gpu = Gpu(Link(GB, GB))
    gpu.copy(H2D, COPIES, 300)
    gpu.begin_host_work(600, 900)
    assert gpu.host_end == 900  # as if it went on so
    while (end := gpu.host_end) is not None:
        gpu.pass_time(end)
        if gpu.now == 300:
            assert gpu.host_end == 300 + 600 - 200
            gpu.copy(H2D, COMPUTE, 90)
    assert gpu.now == 600 + 100 + 30 == gpu.busy_ns[1]
    gpu.copy(D2H, COMPUTE, 500)
    gpu.begin_host_work(600, 900)  # what comes back does not count
    assert gpu.host_end == gpu.now + 600


def test_a_cache_prefetch_by_hand() -> None:
    """1000 bytes in 100 ns, which save 50. Two predicted experts share what idle time allows; one
    is activated. Experts that compute for longer than they read save nothing."""
    cache = CachePrefetch(Cache(1000, Figure(100), Figure(50)), Curve((1, 4, 8), (70, 70, 90)))
    cache.decided([], 1)
    assert cache.save([(3, 1)], 900, 500, 0) == 0  # nothing was predicted for the first layer
    cache.worked(500, 0)
    cache.decided([3, 5], 1)
    assert cache.save([(3, 1)], 900, 900, 0) == 0  # they are the next one's
    cache.worked(1000, 30)
    cache.decided([4], 16)
    # 90 ns, 30 of which the host predicted: 600 bytes, 300 of each, 15 ns.
    assert cache.save([(3, 4), (6, 1)], 900, 1090, 60) == 15
    cache.worked(2000, 60)
    cache.decided([1, 2], 17)  # a prefill predicts for nobody
    # Much time, but two thirds of an expert at most: 600 bytes, 30 ns, of which 8 tokens leave 10.
    assert cache.save([(4, 8)], 900, 9000, 60) == 10
    cache.worked(9000, 60)
    cache.decided([], 1)
    assert cache.save([(1, 1), (2, 1)], 900, 9999, 60) == 0
    assert cache.saved == 25


def test_cache_prefetch_shortens_decode_alone() -> None:
    """Where predictions are free, a description with a cache decodes faster with prefetches, and
    prefills as fast."""
    study = Study.of_model(QWEN, "a100-6230r", "adaptsched", gpu_mem="24GiB", max_rows=64)
    table = replace(study.table, cpu=replace(study.table.cpu, predict=Figure(0)))
    assert table.gpu is not None and table.cache is not None
    assert table.cache.bytes == 37_486_592 // 4
    costs = replace(table.costs(), predict=0)
    trace, accuracy = study.trace(Routing(prompt=64, tokens=3))
    layers = len(study.subject.model.layers)
    subject = study.subject.placed("adaptsched", routing_of(trace, layers), costs)
    subject = subject.with_hits(accuracy or 0)
    timing = replace(study, table=table).timing()
    found = [
        list(Executor(subject, timing, costs, "adaptsched", cache=cache).run(trace))
        for cache in (None, table.cache)
    ]
    (without, *decode), (with_it, *faster) = found
    assert with_it.end - with_it.begin == without.end - without.begin
    for a, b in zip(decode, faster, strict=True):
        most = layers * table.cache.saves.ns
        assert 0 < (a.end - a.begin) - (b.end - b.begin) <= most


def test_a_stream_waits_for_an_event_of_the_other() -> None:
    gpu = Gpu(Link(GB, GB), keep_spans=True)
    gpu.copy(H2D, COPIES, 500, "load", 3)
    gpu.wait_event(COMPUTE, gpu.record(COPIES))
    gpu.launch(40, "experts", 3)
    gpu.drain()
    assert gpu.spans is not None
    assert [(s.track, s.begin, s.end) for s in gpu.spans] == [
        ("h2d", 0, 500),
        ("compute", 500, 540),
    ]


@pytest.mark.parametrize("policy", list(Policy))
def test_the_ring_takes_the_victims_of_the_policy(policy: Policy) -> None:
    """Its columns are a faster way to the answer of pdscope.compiler.policies.victim."""
    rng = np.random.default_rng(policy.number)
    ring = Ring(policy, 40, 6)
    for slot in range(40):
        ring.assign(slot, int(rng.integers(6)), 100 + slot, int(rng.integers(5)), 1)
    for step in range(60):
        ring.kept[:] = rng.random(40) < 0.3
        ring.used[:] = step - rng.integers(0, 70, 40)
        ring.score[:] = rng.integers(0, 9, 40) << rng.integers(0, 12, 40)
        phase = list(Phase)[step % 3]
        expected = victim(policy, phase, ring.cached(), step % 6, 6, step + 4)
        assert ring._victim(phase, step % 6, step + 4) == expected
    ring.kept[:] = 1
    assert ring.take(Phase.DECODE, 0, 1, 0, 1, 9) is None


# --- routing ---


def test_made_routing_is_as_unequal_as_it_was_measured() -> None:
    skew = synthetic.MEASURED["DeepseekV2ForCausalLM"]
    trace = synthetic.made(SHAPE, [3000], 0, 512, skew)
    assert trace.problem() is None
    assert trace.rows.tolist() == [512] * 5 + [440] and trace.logits.tolist() == [0] * 5 + [1]
    again = synthetic.measure(trace, depths=4, points=9)
    assert np.abs(np.array(again.curves) - np.array(skew.curves)).max() < 0.06
    assert abs(again.repeats - skew.repeats) < 0.1
    assert np.allclose(trace.weights.sum(axis=2), 1, atol=1e-5)
    for ids in trace.ids.reshape(-1, 4):
        assert len(set(ids.tolist())) == 4


@pytest.mark.parametrize("accuracy", [0.0, 0.45, 0.9, 1.0])
def test_predictions_hit_as_often_as_asked(accuracy: float) -> None:
    trace = synthetic.with_predictions(synthetic.made(SHAPE, [500], 20, 128), accuracy)
    assert (trace.predicted[-1] == -1).all()
    hits = [
        np.isin(p, truth).mean()
        for layer in range(3)
        for p, truth in zip(trace.predicted[layer], trace.ids[layer + 1], strict=True)
    ]
    assert abs(float(np.mean(hits)) - accuracy) < 0.03
    for row in trace.predicted[:-1].reshape(-1, 4):
        named = row[row >= 0].tolist()
        assert len(set(named)) == len(named)


def test_adversarial_predictions_are_sure_and_wrong() -> None:
    made = synthetic.made(SHAPE, [100], 0, 128)
    trace = synthetic.with_predictions(made, 1.0, adversarial=True)
    for layer in range(3):
        for p, truth in zip(trace.predicted[layer], trace.ids[layer + 1], strict=True):
            assert not set(p.tolist()) & set(truth.tolist())
    assert (trace.sure[:-1] == 1).all()


def saved(path: Path, **changed: Any) -> Path:
    trace = synthetic.made(SHAPE, [20], 4, 128)
    RoutingTrace(**{**vars(trace), **changed}).save(path)
    return path


def test_a_saved_trace_is_read_again(tmp_path: Path) -> None:
    file = saved(tmp_path / "r.npz")
    trace = RoutingTrace.load(file)
    assert [s.rows for s in trace.steps()] == [20, 1, 1, 1, 1]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rows": np.full(5, 3, np.int32)}, "rows: sum to 15, expected 24"),
        ({"experts": 9}, "ids: 0 to 31, expected 0 to 8"),
        ({"experts": 4096}, "4096 experts, expected 1 to 1024"),
        ({"seq": np.zeros(3, np.int32)}, r"seq: int32 of shape \(3,\), expected integers \(24,\)"),
        ({"sure": np.full((4, 24, 4), np.nan, np.float32)}, "sure: not all are finite"),
        ({"weights": np.zeros((4, 24, 3), np.float32)}, "weights"),
        ({"logits": np.zeros(5, np.float32)}, "logits: float32"),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    file = saved(tmp_path / "r.npz")
    trace = RoutingTrace.load(file)
    arrays = {k: v for k, v in vars(trace).items() if k != "experts"} | changed
    experts = arrays.pop("experts", 32)
    np.savez(file, pdscope_routing=np.array([1, experts]), **arrays)
    with pytest.raises(InputError, match=f"r.npz: .*{said}"):
        RoutingTrace.load(file)


@pytest.mark.parametrize("text", [b"", b"PK\x03\x04 and no more", b"{}"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "r.npz"
    file.write_bytes(text)
    with pytest.raises(InputError, match="not a routing trace"):
        RoutingTrace.load(file)
    with pytest.raises(InputError, match="cannot be read"):
        RoutingTrace.load(tmp_path / "other.npz")


# --- a model of the paper on a platform of the paper ---


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Qwen3-30B-A3B's dimensions, six layers of it, of which a fifth fit."""
    config = json.loads(QWEN.read_text()) | {"num_hidden_layers": 6}
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(config))
    return Study.of_model(file, "a100-6230r", "adaptsched", gpu_mem="4GiB", max_context=1024)


def test_policies_run_and_stay_above_the_bound(study: Study) -> None:
    routing = Routing(prompt=256, tokens=6)
    trace, hits = study.trace(routing)
    assert hits == 0.9
    rates = {}
    for policy in Policy:
        report, _ = study.run(policy.value, trace, routing, hits)
        for phase in report.phases.values():
            assert phase.ns >= phase.bound_ns > 0, policy
            assert 0 < phase.gpu <= 1 and 0 <= phase.cpu <= 1 and 0 <= phase.link <= 1
            assert len(phase.layers) == 6
            assert sum(layer.ns for layer in phase.layers) <= phase.ns // phase.steps
        assert report.ledger["prefetches"] == 0 or policy.predictor
        rates[policy] = {k: p.tokens_per_second for k, p in report.phases.items()}
    best = rates[Policy.ADAPTSCHED]
    # The seesaw: what is good at one phase is not at the other.
    assert best["decode"] > 1.5 * rates[Policy.ONDEMAND]["decode"]
    assert best["prefill"] > 1.2 * rates[Policy.STATIC]["prefill"]


def test_a_policy_has_its_own_slots_in_the_same_memory(study: Study) -> None:
    routing = Routing(prompt=20, tokens=1)
    trace, hits = study.trace(routing)
    shape = {p: study.run(p, trace, routing, hits)[0] for p in ("adaptsched", "static", "lru")}
    slots = {p: r.resident + r.ring for p, r in shape.items()}
    assert len(set(slots.values())) == 1 and slots["static"] > 100
    assert (shape["static"].ring, shape["lru"].resident) == (0, 0)
    assert shape["adaptsched"].resident == slots["adaptsched"] // 4


def run(*args: object) -> Result:
    return CliRunner().invoke(command.main, [str(a) for a in args])


def test_the_command_answers_for_a_config(tmp_path: Path) -> None:
    config = json.loads(QWEN.read_text()) | {"num_hidden_layers": 3}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    timeline = tmp_path / "timeline.json"
    common = (file, "--gpu-mem", "3GiB", "--prompt", 64, "--tokens", 3, "--max-context", 512)
    done = run(*common, "--hardware", "v100-6230r", "--perfetto", timeline)
    assert done.exit_code == 0, done.output
    for text in ("above bound", "prefill by layer", "decode by layer", "hardware description v100"):
        assert text in done.output
    events = json.loads(timeline.read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"driver", "cpu", "gpu0 compute", "link to the GPU", "link to the host"}
    kernels = [e for e in events if e["ph"] == "X" and e["tid"] == 3]
    assert all(
        a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in zip(kernels, kernels[1:], strict=False)
    )
    done = run(*common, "--hardware", "a100-6230r", "--policy", "all", "--json", "--accuracy", 0.5)
    data = json.loads(done.output)
    assert [p["policy"] for p in data["policies"]] == [p.value for p in Policy]
    assert data["policies"][0]["phases"]["decode"]["tokens_per_second"] > 0
    assert "predictions 50% right" in data["routing"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpu-mem", "3GiB"), "give --hardware or --costs"),
        (("--hardware", "a100-6230r"), "give --gpu-mem"),
        (("--hardware", "a100", "--gpu-mem", "3GiB"), "a100-6230r"),
        (("--hardware", "auto", "--gpu-mem", "3GiB"), "a machine that can be simulated"),
        (("--hardware", "a100-6230r", "--gpu-mem", "100MiB"), "--gpu-mem 100.0 MiB"),
    ],
)
def test_faults_are_one_line(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    config = json.loads(QWEN.read_text()) | {"num_hidden_layers": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    done = run(file, *options)
    assert done.exit_code == 1
    assert said in done.output and done.output.count("\n") == 1, done.output


def test_help_teaches() -> None:
    text = run("--help").output
    assert "What would I get on that card?" in text and "--policy all" in text
    assert run(QWEN, "--policy", "fastest").exit_code == 2
    assert run(QWEN, "--hardware", "a", "--costs", QWEN).exit_code == 2
