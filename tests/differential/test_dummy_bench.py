"""Benchmarks of models that are not on disk: plans without weights, weights and routing made up,
policy against policy on the mock CUDA driver.

Holds the issue's lines: "`pdscope-bench` on a GPU plan: `--policy all` runs every policy in one
process on the same weights and routing; `--load-format dummy` fills pinned memory directly (no
disk), with `--dummy-routing zipf:s|uniform|trace:file` so that routing has realistic skew and
layer-to-layer structure" and "Every comparison prints the distinct experts a layer".
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.assets import BUNDLED
from support.commands import run_here
from support.gpu import CONTEXT, POLICIES, Mock, hardware, mock
from support.plans import PlanStore

import pdscope
from pdscope.compiler.driver import compile_model
from pdscope.dummy_predictor import record
from pdscope.dummy_routing import TOPICS, DummyRouting, distinct
from pdscope.errors import InputError, PlanError
from pdscope.plan import Plan
from pdscope.routing_trace import RoutingTrace

__all__ = ["mock"]

CONFIG = BUNDLED / "tiny-mixtral" / "config.json"
LAYERS, EXPERTS, TOP_K = 6, 8, 2
IDS = np.random.default_rng(0).integers(0, 500, 40).tolist()
NO_WEIGHTS = {"load_format": "dummy", "no_weights": True, "max_context": CONTEXT}


@pytest.fixture(scope="module")
def plan(plans: PlanStore) -> Path:
    """For the CPU alone, without weights."""
    return plans.compile(CONFIG, **NO_WEIGHTS)


@pytest.fixture(scope="module")
def gpu_plan(plans: PlanStore) -> Path:
    """For a GPU that has room for some of the experts, without weights."""
    options = {"gpu_mem": "29MB", "gpu_reserve": 0, "costs": hardware(plans), "dtype": "bf16"}
    return plans.compile(CONFIG, **NO_WEIGHTS, **options)


def bench(plan: Path, *options: object) -> Any:
    said = run_here("pdscope-bench", plan, "--load-format", "dummy", "-r", "1", *options)
    assert said.status == 0, said.err
    return json.loads(said.out) if "--json" in options else said.out


# --- plans without weights ---


def test_a_plan_without_weights(plan: Path, plans: PlanStore) -> None:
    """It has no weight file, says how large they would be, passes the full check, and nothing but
    dummy weights loads it."""
    whole = Plan.open(plans.compile(CONFIG, load_format="dummy", max_context=CONTEXT))
    opened = Plan.open(plan, verify=True)
    assert not (plan / "weights").exists()
    sizes = {n: e["bytes"] for n, e in whole.files.items() if n.startswith("weights/")}
    assert opened.absent_weights == sizes and not whole.absent_weights
    assert opened.memory_table() == whole.memory_table()
    said = run_here("pdscope-inspect", plan, "--verify")
    assert said.status == 0, said.err
    assert "dummy weights, which are in no file" in run_here("pdscope-inspect", plan).out
    for load in (lambda: pdscope.load(plan), lambda: pdscope.load(plan, weights="mmap")):
        with pytest.raises(PlanError, match="has no weights: pdscope-bench --load-format dummy$"):
            load()
    said = run_here("pdscope-run", plan, "--prompt", "x")
    assert said.status == 1 and said.err.count("\n") == 1 and "has no weights" in said.err


def test_sizes_that_were_edited(plan: Path, tmp_path: Path) -> None:
    from pdscope.plan_check import check_plan

    data = json.loads((plan / "plan.json").read_text())
    data["absent_weights"]["weights/head.bin"] += 1
    problems = check_plan(Plan(plan, data))
    assert any("absent_weights: weights/head.bin: " in line for line in problems), problems


def test_usage_of_no_weights(tmp_path: Path) -> None:
    said = run_here("pdscope-compile", CONFIG, "-o", tmp_path / "p", "--no-weights")
    assert said.status == 2 and "--no-weights goes with --load-format dummy" in said.err
    with pytest.raises(InputError, match="no_weights: a plan needs its weights"):
        compile_model(CONFIG.parent, tmp_path / "p", no_weights=True)
    with pytest.raises(InputError, match="no_weights: predictors are trained on a run"):
        compile_model(CONFIG, tmp_path / "p", predictor="auto", **NO_WEIGHTS)


# --- dummy weights ---


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
def test_dummy_weights(plans: PlanStore, dtype: str) -> None:
    """Finite, the same whatever the number of threads, and tokens choose different experts."""
    path = plans.compile(CONFIG, **NO_WEIGHTS, dtype=dtype)
    found: list[NDArray[np.float32]] = []
    for threads in (1, 2):
        with pdscope.load(path, weights="dummy", threads=threads) as engine:
            assert engine.info.weights == "dummy"
            assert engine.info.weights_copy_bytes >= engine.info.weight_bytes > 0
            session = engine.main
            chosen = record(session, lambda: session.prefill(IDS))  # noqa: B023
            assert min(distinct(chosen, range(LAYERS))) >= EXPERTS - 1
            found.append(session.decode(3).copy())
    assert np.isfinite(found[0]).all() and found[0].std() > 0
    assert np.array_equal(*found)


def test_dummy_weights_are_for_dummy_plans(plans: PlanStore) -> None:
    real = plans.compile(BUNDLED / "tiny-mixtral")
    with pytest.raises(InputError, match="compiled of a model with weights: leave it out"):
        pdscope.load(real, weights="dummy")
    said = run_here("pdscope-bench", real, "--load-format", "dummy", "-n", "4")
    assert said.status == 1 and "compiled of a model with weights" in said.err
    # Packed ones are not read.
    packed = plans.compile(CONFIG, load_format="dummy", max_context=CONTEXT)
    with pdscope.load(packed, weights="dummy") as engine:
        assert engine.info.weights == "dummy"


def test_costs_are_measured_without_weights(plans: PlanStore) -> None:
    path = plans.compile(CONFIG, **NO_WEIGHTS, costs="auto")
    assert "costs.json" in Plan.open(path).files


# --- routes ---


def test_routes_replace_what_gates_choose(plan: Path) -> None:
    """By position, modulo their number, with equal weights; the tap shows them."""
    routes = DummyRouting.parse("uniform,seed:4").routes(Plan.open(plan), 24)
    with pdscope.load(plan, weights="dummy", threads=2, cache_prefetch="on") as engine:
        session = engine.main
        own = session.prefill(IDS).copy()
        session.set_routes(routes)

        def both() -> None:
            session.reset()
            session.prefill(IDS[:30])
            for token in IDS[30:]:
                session.decode(token)

        chosen = record(session, both)
        assert np.array_equal(chosen, routes[np.arange(len(IDS)) % 24])
        session.reset()
        with session.tap(lambda e: weights.append(e.data.copy()) if e.ids is not None else None):
            weights: list[NDArray[np.float32]] = []
            session.prefill(IDS)
        assert all((w == np.float32(1 / TOP_K)).all() for w in weights if w.shape[1] == TOP_K)
        session.set_routes(None)
        session.reset()
        assert np.array_equal(session.prefill(IDS), own)
        twice = routes.copy()
        twice[3, 2] = 5
        with pytest.raises(InputError, match="routes: token 3, layer 2: expert 5 twice"):
            session.set_routes(twice)
        with pytest.raises(InputError, match="routes has shape"):
            session.set_routes(routes[:, 1:])


def test_routes_on_a_gpu(gpu_plan: Path, mock: Mock) -> None:
    """Combine there, the CPU's experts and the tap see the same, whatever the policy."""
    routes = DummyRouting.parse("zipf:1").routes(Plan.open(gpu_plan), 100)

    def run(device: str, policy: str | None = None) -> Any:
        options = {"weights": "dummy", "threads": 2, "device": device, "policy": policy}
        with pdscope.load(gpu_plan, **options) as engine:
            session = engine.main
            session.set_routes(routes)
            chosen = record(session, lambda: session.prefill(IDS))
            assert np.array_equal(chosen, routes[: len(IDS)])
            session.reset()
            return [session.prefill(IDS).copy(), *(session.decode(t).copy() for t in IDS[:5])]

    expected = run("cpu")
    for policy in ("adaptsched", "ondemand", "static"):
        for found, want in zip(run("gpu", policy), expected, strict=True):
            assert np.array_equal(found, want), policy


# --- made-up routing ---


def test_uniform(plan: Path) -> None:
    routes = DummyRouting.parse("uniform").routes(Plan.open(plan), 4000)
    assert routes.shape == (4000, LAYERS, TOP_K)
    assert (routes[..., 0] != routes[..., 1]).all()
    shares = np.stack([np.bincount(routes[:, n].ravel(), minlength=EXPERTS) for n in range(LAYERS)])
    assert abs(shares / 8000 - 1 / EXPERTS).max() < 0.02
    repeats = (routes[1:, :, :, None] == routes[:-1, :, None]).any(3).mean()
    assert repeats == pytest.approx(TOP_K / EXPERTS, abs=0.02)


def test_zipf(plan: Path) -> None:
    """Skewed, in another order in each layer, with structure from token to token and from layer
    to layer; fewer tokens are the beginning of more."""
    opened = Plan.open(plan)
    routes = DummyRouting.parse("zipf:1").routes(opened, 4000)
    assert (routes[..., 0] != routes[..., 1]).all()
    counts = np.stack([np.bincount(routes[:, n].ravel(), minlength=EXPERTS) for n in range(LAYERS)])
    assert (counts.max(1) > 2 * 8000 / EXPERTS * 0.8).all()
    assert len(set(counts.argmax(1).tolist())) > 1
    again = (routes[1:, :, :, None] == routes[:-1, :, None]).any(3).mean(axis=(0, 2))
    chance = (np.minimum(counts / 4000, 1) ** 2).sum(1) / TOP_K
    assert (again > chance + 0.02).all()
    # What layer 0 chose says more of layer 1 than layer 1's popularity does.
    first, second = (np.zeros((4000, EXPERTS)) for _ in range(2))
    for mask, layer in ((first, 0), (second, 1)):
        np.put_along_axis(mask, routes[:, layer], 1, 1)
    together = np.corrcoef(first.T, second.T)[:EXPERTS, EXPERTS:]
    assert abs(together).max() > 4 / 4000**0.5
    assert np.array_equal(DummyRouting.parse("zipf:1").routes(opened, 77), routes[:77])
    other = DummyRouting.parse("zipf:1,seed:1").routes(opened, 77)
    assert not np.array_equal(other, routes[:77])
    assert TOPICS > 1


def test_trace(plan: Path, tmp_path: Path) -> None:
    """The recorded routes, over and over; one of other dimensions is refused."""
    file = tmp_path / "routing.npz"
    bench(plan, "-p", "20", "-n", "5", "--dummy-routing", "zipf:1", "--save-routing", file)
    made = DummyRouting.parse("zipf:1").routes(Plan.open(plan), 20)
    trace = RoutingTrace.load(file)
    assert np.array_equal(trace.ids.transpose(1, 0, 2), np.concatenate([made, made[:5]]))
    routes = DummyRouting.parse(f"trace:{file}").routes(Plan.open(plan), 60)
    assert np.array_equal(routes[:25], np.concatenate([made, made[:5]]))
    assert np.array_equal(routes[25:50], routes[:25])
    (entry,) = bench(plan, "-p", "0", "-n", "8", "--dummy-routing", f"trace:{file}", "--json")
    assert entry["dummy_routing"]["kind"] == "trace"
    for name, value in (("experts", 9), ("top_k", 1)):
        data = json.loads((plan / "plan.json").read_text())
        data["model"][name] = value
        with pytest.raises(InputError, match=f"{name} is {EXPERTS if value == 9 else 2}, expected"):
            DummyRouting.parse(f"trace:{file}").routes(Plan(plan, data), 4)


def test_faults_of_dummy_routing(plan: Path) -> None:
    for text in ("zipf", "zipf:x", "zipf:-1", "zipf:1e9", "uniform:2", "trace:", "uniform,seed:x"):
        with pytest.raises(InputError, match="dummy_routing: .* is not zipf:S"):
            DummyRouting.parse(text)
    said = run_here("pdscope-bench", plan, "--load-format", "dummy", "--dummy-routing", "zipf:x")
    assert said.status == 1 and said.err.count("\n") == 1


# --- the benchmark ---


def test_what_is_made_up_is_marked(plan: Path) -> None:
    text = bench(plan, "-p", "16", "-n", "4", "--dummy-routing", "zipf:0.5")
    for mark in (
        "DUMMY WEIGHTS: ",
        "DUMMY ROUTING: experts drawn by rank^-0.5",
        "distinct experts",
    ):
        assert mark in text
    first, second = bench(plan, "-p", "16", "-n", "4", "--dummy-routing", "uniform", "--json")
    assert first["dummy_weights"] and first["placement"]["weights"] == "dummy"
    assert first["dummy_routing"] == {"kind": "uniform", "skew": None, "file": None, "seed": 0}
    routes = DummyRouting().routes(Plan.open(plan), 16)
    assert first["distinct_experts"] == distinct(routes, range(LAYERS))
    assert second["distinct_experts"] == distinct(routes[:4], range(LAYERS))
    # Without made-up routes they are recorded.
    (entry,) = bench(plan, "-p", "64", "-n", "0", "--json")
    assert entry["dummy_routing"] is None and len(entry["distinct_experts"]) == LAYERS
    said = bench(
        plan, "-p", "0", "-n", "8", "--dummy-routing", "zipf:1", "--dummy-predictor", "accuracy:1"
    )
    assert "DUMMY PREDICTOR" in said and "DUMMY ROUTING" in said


def test_all_policies(gpu_plan: Path, mock: Mock) -> None:
    """Each test by each policy, on one engine: a table with the ratio to adaptsched, and JSON with
    each one's ledger."""
    options = ("-p", "40", "-n", "6", "--policy", "all", "--dummy-routing", "zipf:0.5")
    both = ("--dummy-predictor", "accuracy:0.9")
    report = bench(gpu_plan, *options, *both, "-r", "2", "--json")
    assert [(r["test"], r["policy"]) for r in report] == [
        (test, policy) for test in ("pp40", "tg6") for policy in POLICIES
    ]
    by = {(r["test"], r["policy"]): r for r in report}
    for entry in report:
        assert len(entry["samples_seconds"]) == 2 and len(entry["ledger"]) == LAYERS
        base = by[entry["test"], "adaptsched"]["tokens_per_second"]["mean"]
        ratio = entry["tokens_per_second"]["mean"] / base
        assert entry["ratio_to_adaptsched"] == pytest.approx(ratio)
        assert entry["gpu"]["policy"] == entry["policy"] and entry["gpu"]["info"]["pinned"]
        times = entry["gpu"]["info"]
        for name in ("recompile_us", "recompile_driver_us"):
            of = times[name]["prefill" if entry["test"] == "pp40" else "decode"]
            assert of["n"] and of["min"] <= of["median"] <= of["max"] and of["mean"] <= of["max"]
        for name, total in entry["gpu"]["link"].items():
            assert total == sum(layer[name] for layer in entry["ledger"]) >= 0
        assert entry["distinct_experts"] == by[entry["test"], "static"]["distinct_experts"]
    assert by["tg6", "static"]["gpu"]["link"]["loads"] == 0
    assert by["tg6", "ondemand"]["gpu"]["link"]["loads"] > 0
    head, _, *rows = bench(gpu_plan, *options).split("\n\n")[0].splitlines()
    assert [x.strip() for x in head.split("|")][6:9] == ["test", "policy", "t/s"]
    assert "to adaptsched" in head and len(rows) == 2 * len(POLICIES)
    assert rows[0].rstrip(" |").endswith("1.00")


def test_the_order_of_policies_rotates(gpu_plan: Path, mock: Mock) -> None:
    from pdscope.cli.bench_runs import Bench

    with pdscope.load(gpu_plan, weights="dummy", threads=2, device="gpu") as engine:
        turns: list[str] = []
        choose = engine.set_policy

        def watched(policy: str) -> None:
            turns.append(policy)
            choose(policy)

        engine.set_policy = watched  # type: ignore[method-assign]
        list(Bench(engine, 3, False).compared([("tg", 1)], ("lru", "static")))
        assert turns == ["lru", "static", "static", "lru", "lru", "static"]


def test_usage_of_the_benchmark(
    plan: Path, gpu_plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dummy = ("--load-format", "dummy")
    for options in (
        (plan, *dummy, "--policy", "all"),
        (gpu_plan, *dummy, "--policy", "all", "--device", "cpu"),
        (plan, *dummy, "--weights", "copy"),
        (plan, *dummy, "--perplexity", CONFIG),
        (plan, "--dummy-routing", "uniform", "--perplexity", CONFIG),
    ):
        assert run_here("pdscope-bench", *options).status == 2, options
    monkeypatch.setenv("PDSCOPE_CUDA_DRIVER", "/no/such/driver.so")
    said = run_here("pdscope-bench", gpu_plan, *dummy, "--policy", "all")
    assert said.status == 1 and "--policy all needs a GPU" in said.err
