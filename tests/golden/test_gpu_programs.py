"""GPU programs of every model, phase, budget and use of slots: both verifiers accept them, they
survive printing and encoding, and one is a golden file.

Holds: "Every program the compiler emits for all test models, phases, budgets 0 to everything, and
policies passes the verifier".
"""

import random
from functools import cache
from pathlib import Path

import pytest
from support.assets import BUNDLED
from support.c_programs import CPrograms
from support.tiny_configs import FAMILIES, random_tiny_config

from pdscope.compiler.lowered import LoweredModel
from pdscope.compiler.passes.gpu_programs import ExpertSlots, gpu_programs
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.trace import load_model, trace_config
from pdscope.ir.encode import decode, encode
from pdscope.ir.text import parse_programs, print_programs

GOLDEN = Path(__file__).parent / "gpu_programs"
MODELS = ["tiny-mixtral", *(f"{family}-{seed}" for family in FAMILIES for seed in range(4))]


@cache
def lowered(name: str) -> LoweredModel:
    if name == "tiny-mixtral":
        return Lower("bf16", 512).run(load_model(BUNDLED / name).graph)
    family, seed = name.rsplit("-", 1)
    config = random_tiny_config(family, int(seed))
    return Lower("bf16", 256).run(trace_config(config).graph)


def experts_of(model: LoweredModel) -> list[tuple[int, int]]:
    return [
        (layer, e)
        for layer, one in enumerate(model.layers)
        if one.gate is not None
        for e in range(one.gate.attrs.experts)
    ]


def placed(model: LoweredModel, n: int, ring: int, seed: int = 0) -> ExpertSlots:
    """n experts of any layers stay; the ring has so many slots."""
    chosen = random.Random(seed).sample(experts_of(model), n)
    layers = range(len(model.layers))
    return ExpertSlots(tuple(tuple(sorted(e for x, e in chosen if x == i)) for i in layers), ring)


def check(model: LoweredModel, slots: ExpertSlots, max_rows: int) -> None:
    programs = gpu_programs(model, slots, max_rows)  # Python's verifier runs there
    raw = encode(programs)
    assert decode(raw) == programs
    assert parse_programs(print_programs(programs), source="printed") == programs
    c = CPrograms(raw)
    assert not c.error
    assert c.verify_all() == ""


@pytest.mark.parametrize("name", MODELS)
def test_every_budget(name: str) -> None:
    """No slot, one, a few, half and all; fixed, moving, and both."""
    model = lowered(name)
    n = len(experts_of(model))
    for resident in sorted({0, 1, n // 3, n // 2, n - 1, n}):
        for ring in sorted({0, 1, 2, 5, n - resident} & set(range(n - resident + 1))):
            check(model, placed(model, resident, ring, seed=ring), 512)


@pytest.mark.parametrize("max_rows", [1, 2, 16, 17, 64])
def test_every_number_of_rows(max_rows: int) -> None:
    model = lowered("deepseek_v2-1")
    check(model, placed(model, 5, 4), max_rows)


@pytest.mark.verify
@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_slots(name: str) -> None:
    model = lowered(name)
    n = len(experts_of(model))
    for resident in range(0, n + 1, max(1, n // 24)):
        for ring in {0, 1, 2, min(9, n - resident), n - resident}:
            if ring <= n - resident:
                check(model, placed(model, resident, ring, seed=resident), 512)


def test_golden(pytestconfig: pytest.Config) -> None:
    """Layers with shared experts: the first one predicts the second one's; some stay, four slots
    are for the others."""
    model = lowered("deepseek_v2-1")
    programs = gpu_programs(model, placed(model, 6, 4), 64)
    path, text = GOLDEN / "shared.plan", print_programs(programs)
    if pytestconfig.getoption("--update-golden"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path.name} is missing: run pytest with --update-golden"
    assert path.read_text(encoding="utf-8") == text
    assert parse_programs(text, source="golden") == programs
