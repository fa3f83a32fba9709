"""GPU plans on the mock CUDA driver: small plans by the number of their slots, the driver's
settings and counters, and a run through everything that a session does.

May import pdscope, numpy and support.{assets,cuda,plans,runs,tiny_configs}.
"""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.assets import BUNDLED, asset
from support.cuda import Driver
from support.plans import PlanStore
from support.runs import random_ids
from support.tiny_configs import random_tiny_config, save_random_model

import pdscope
from pdscope.compiler.build import mock_driver
from pdscope.engine import Engine
from pdscope.plan import Plan
from pdscope.session import Session

Floats = NDArray[np.float32]

DTYPES = ("bf16", "fp32", "int8", "int4")
SLOTS = ("none", "one", "few", "half", "all")
POLICIES = (
    *("adaptsched", "pdscope-paper", "static", "ondemand", "fate"),
    *("fiddler", "hybrimoe", "lru", "apex"),
)
# Random models, by family and seed: 3 layers of 64 experts, shared experts behind a dense layer, 60
# in groups behind three, top-7 of 7, and 384 experts in every layer.
RANDOM = {
    "mixtral": ("mixtral", 5, {}),
    "qwen": ("qwen3_moe", 4, {}),
    "shared": ("deepseek_v2", 0, {}),
    "groups": ("deepseek_v3", 1, {}),
    "all-of-7": ("olmoe", 3, {}),
    "many": ("olmoe", 0, {}),
    # Experts of more than one chunk of the link each.
    "wide": (
        *("mixtral", 0),
        {"hidden_size": 512, "intermediate_size": 3000, "num_hidden_layers": 2, "vocab_size": 64}
        | {"num_local_experts": 4, "sliding_window": None},
    ),
}
TRAINED = ("tiny-mixtral", "tiny-qwen3-moe", "tiny-deepseek-v2")
CONTEXT = 512

# Settings of the mock: what comes too early or too late must show. The link is about as fast as
# what it is to hide behind.
MOCKS = {
    "end": "h2d=8GB/s; kernel.*.base=3us; host.cpu.experts.curve=1:8000,2:9000; kernels=end",
    "start": "h2d=8GB/s; kernel.*.base=3us; host.cpu.experts.curve=1:8000,2:9000; kernels=start",
    "slow": "h2d=200MB/s; h2d_latency=20us; kernels=start; host.cpu.predict.base=2us",
    "late": "h2d=8GB/s; kernel.*.base=1us; late_events=50us; enqueue=300ns; kernels=end",
    "busy": "h2d=8GB/s; h2d_busy=1GB/s; kernel.*.base=40us; host.*.base=5us; kernels=start",
}


def hardware(plans: PlanStore) -> str:
    """A machine with so slow a CPU that experts of a few kilobytes are worth moving."""
    text = (resources.files("pdscope.hardware") / "h200-emr16.json").read_text(encoding="utf-8")
    slow = json.loads(text) | {"name": "a slow CPU"}
    slow["cpu"]["bytes_per_s"]["value"] = 2 * 10**9
    slow["cpu"]["start_ns"]["value"] = 500
    slow["cpu"]["flops"] = {k: v | {"value": 10**9} for k, v in slow["cpu"]["flops"].items()}
    slow["gpu"]["floor_ns"]["value"] = slow["gpu"]["launch_ns"]["value"] = 300
    slow["link"]["bytes_per_s"]["value"] = slow["link"]["alone_bytes_per_s"]["value"] = 8 * 10**9
    slow["link"]["alone_expert_ns"]["value"] = slow["link"]["start_ns"]["value"] = 300
    return str(plans.once("slow-cpu.json", lambda out: out.write_text(json.dumps(slow))))


def model_of(plans: PlanStore, name: str) -> Path:
    """A model of RANDOM or TRAINED; the calling test skips without the assets."""
    if name not in RANDOM:
        bundled = BUNDLED / name
        return bundled if bundled.is_dir() else asset(f"models/{name}")
    family, seed, changes = RANDOM[name]
    config = random_tiny_config(family, seed) | changes
    return plans.once(f"gpu-{name}.model", lambda out: save_random_model(config, out, seed))


def slots_of(slots: str, experts: int) -> int:
    return {"none": 0, "one": 1, "few": 6, "half": experts // 2, "all": experts}[slots]


def gpu_plan(
    plans: PlanStore, name: str, dtype: str, slots: str | int, policy: str = "adaptsched"
) -> Path:
    """The plan of a model for a GPU whose memory has room for so many experts."""
    options = {"dtype": dtype, "max_context": CONTEXT, "costs": hardware(plans)}
    model = model_of(plans, name)
    whole = plans.compile(model, **options, gpu_mem="1GiB", gpu_reserve=0)
    if slots == "all":
        return whole
    table = memory_of(whole)
    wanted = slots if isinstance(slots, int) else slots_of(slots, table["experts"])
    mem = table["weight_bytes"] + table["session"]["total_bytes"] + wanted * table["expert_bytes"]
    return plans.compile(model, **options, gpu_mem=mem, gpu_reserve=0, policy=policy)


def with_room(plan: Path, sessions: int) -> Plan:
    """The plan, with memory for further sessions; a compile gives all there is to experts."""
    opened = Plan.open(plan)
    assert opened.gpu is not None
    opened.gpu["mem"] += sessions * memory_of(plan)["session"]["total_bytes"]
    return opened


def memory_of(plan: Path) -> dict[str, Any]:
    """The `gpu` entry of memory.json."""
    table: dict[str, Any] = json.loads((plan / "memory.json").read_text(encoding="utf-8"))["gpu"]
    return table


class Mock(Driver):
    """The mock driver of this process, reset."""

    def __init__(self) -> None:
        self.path = mock_driver()
        super().__init__(self.path)
        self.reset()

    def reset(self, settings: str = "") -> None:
        self.configure(f"reset; {settings}")

    def state(self, *names: str) -> dict[str, int]:
        return {name: self.counter(name) for name in names}

    def nothing_left(self) -> None:
        """Fails if an engine that was closed has left something on the device."""
        gc.collect()  # an exception's frames hold what they worked with
        names = ("device_live", "device_allocations", "pinned_live", "streams", "events", "modules")
        left = {name: n for name, n in self.state(*names).items() if n}
        assert not left, left


@pytest.fixture
def mock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """The driver that engines of this test load; afterwards nothing may be left on it."""
    driver = Mock()
    monkeypatch.setenv("PDSCOPE_CUDA_DRIVER", str(driver.path))
    yield driver
    driver.nothing_left()
    driver.reset()


@contextmanager
def loaded(plan: Path | Plan, **options: Any) -> Iterator[Engine]:
    chosen: dict[str, Any] = {"device": "gpu", "threads": 2, "weights": "copy"} | options
    with pdscope.load(plan, **chosen) as engine:
        yield engine


# --- what a session does ---


def session_run(session: Session, seed: int = 0) -> list[Floats]:
    """Logits of prefills of 1, 2, 16, 17, 100 and 300 tokens, of decode, of batches, and behind
    fork, truncate, save and restore. Needs 4 sequences and 8 KV blocks."""
    ids = random_ids(session.engine.info.vocab, 512, seed)
    found: list[Floats] = []

    def keep(logits: Floats) -> None:
        found.append(np.array(logits))

    keep(session.prefill(ids[:300]))
    for token in ids[300:303]:
        keep(session.decode(token))
    session.truncate(0, 70)
    keep(session.decode(ids[303]))
    session.reset()
    for seq, n in enumerate((1, 2, 16, 17)):
        keep(session.prefill(ids[seq : seq + n], seq, all_logits=True))
    for token in ids[310:313]:
        keep(session.step([token, *ids[320:323]], seqs=[0, 1, 2, 3], want_logits=[1, 1, 1, 1]))
    session.fork(2, 0)
    keep(session.step(ids[330:332], seqs=[2, 0], want_logits=[1, 1]))
    saved = session.save(3)
    assert saved is not None
    keep(session.decode(ids[332], 3))
    session.restore(saved, 3)
    keep(session.decode(ids[332], 3))
    session.reset(1)
    keep(session.prefill(ids[200:300], 1))
    session.fork(1, 0)  # its first block is shared
    keep(session.step(ids[340:360], seqs=[0] * 12 + [1] * 8, want_logits=[1] * 20))
    keep(session.step(ids[360:362], seqs=[1, 0], want_logits=[1, 1]))
    return found


def engine_run(engine: Engine, seed: int = 0) -> list[Floats]:
    session = engine.session(max_seqs=4)
    try:
        return session_run(session, seed)
    finally:
        session.close()


def same(found: Sequence[Floats], expected: Sequence[Floats]) -> bool:
    return len(found) == len(expected) and all(
        np.array_equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def on_cpu(plans: PlanStore, plan: Path, seed: int = 0) -> list[Floats]:
    """What the CPU plan gives: the same directory's programs without a GPU."""

    def make(out: Path) -> None:
        with loaded(plan, device="cpu") as engine, out.open("wb") as file:
            np.savez(file, *engine_run(engine, seed))

    with np.load(plans.once(f"{plan.name}.{seed}.npz", make)) as stored:
        return [stored[name] for name in stored.files]


# --- combinations ---


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Combinations of which each pair of values of two factors has one; greedily few."""
    names = list(factors)
    every = [dict(zip(names, values, strict=True)) for values in product(*factors.values())]

    def pairs(case: dict[str, Any]) -> set[tuple[Any, ...]]:
        return {(a, case[a], b, case[b]) for a, b in combinations(names, 2)}

    left = set().union(*map(pairs, every))
    chosen = []
    while left:
        best = max(every, key=lambda case: len(pairs(case) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen
