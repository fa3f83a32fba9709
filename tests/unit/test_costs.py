"""Cost tables: the arithmetic of curves, the fit, and costs.json.

Holds of the issue: "expert time on CPU and on GPU by token count (1 to 4096, monotone piecewise fit
with error bars) ... stored in `costs.json` with the machine's description".
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_keys import DEEPSEEK, MIXTRAL, QWEN3

from pdscope.compiler import costs as compiler_costs
from pdscope.compiler.costs import bar_of, choose_knots, expert_bytes, expert_flops, fit, isotonic
from pdscope.costs import (
    KNOTS,
    MAX_NS,
    MAX_TOKENS,
    Bar,
    Cache,
    Costs,
    CostTable,
    Curve,
    Device,
    Figure,
    Fitted,
    Link,
    Machine,
)
from pdscope.errors import PlanError
from pdscope.schema import schema


def table() -> CostTable:
    """Every part is there."""
    bar = Bar(90, 100, 130)
    fitted = Fitted(Curve((1, 4), (100, 160)), ((1, bar), (4, Bar(150, 160, 170))))
    device = Device(
        start=Figure(7, bar),
        expert=fitted,
        attention=Fitted(Curve((1,), (50,))),
        context_row=Figure(3),
        context_row_prefill=Figure(2),
        shared=fitted,
        predict=Figure(11),
        predict_row=Figure(2, Bar(1, 2, 3)),
        expert_busy=fitted,
    )
    gpu = replace(
        device, start=Figure(17), shared=None, predict=None, predict_row=None, expert_busy=None
    )
    link = Link(Figure(5), Figure(1000, bar), Figure(900))
    return CostTable(
        *("measured", Machine("a CPU", 8, 8, "amx", "a GPU", "PCIe"), QWEN3, device, gpu, link),
        Cache(4096, Figure(40), Figure(20)),
    )


# --- curves ---


def test_a_curve_by_hand() -> None:
    """Below the first knot its value; between: floor; beyond: the last two knots' slope."""
    curve = Curve((2, 5, 9), (100, 131, 131))
    assert [curve.at(t) for t in (0, 1, 2, 3, 4, 5, 7, 9, 100)] == [
        100, 100, 100, 110, 120, 131, 131, 131, 131,
    ]  # fmt: skip
    # 31 x 1 / 3 = 10.3, 31 x 2 / 3 = 20.7
    assert Curve((2, 4), (10, 15)).at(7) == 10 + 5 * 5 // 2
    assert Curve((3,), (8,)).at(1000) == 8
    assert Curve().at(5) == 0


curves = st.lists(
    st.tuples(st.integers(1, 1 << 12), st.integers(0, MAX_NS - 1)), min_size=1, max_size=KNOTS
).map(
    lambda knots: Curve(
        tuple(sorted({t for t, _ in knots})),
        tuple(sorted(ns for _, ns in knots))[: len({t for t, _ in knots})],
    )
)


@given(curves, st.integers(0, 1 << 13))
def test_curves_ascend_and_meet_their_knots(curve: Curve, tokens: int) -> None:
    assert curve.at(tokens) <= curve.at(tokens + 1)
    assert all(curve.at(t) == ns for t, ns in zip(curve.tokens, curve.ns, strict=True))
    assert abs(curve.at(tokens)) < 1 << 63  # as C computes it
    if len(curve.tokens) > 1:
        rise = max(b - a for a, b in zip(curve.ns, curve.ns[1:], strict=False))
        assert rise * (1 << 22) < 1 << 63


@settings(deadline=None)
@given(curves, st.lists(st.integers(0, MAX_TOKENS - 1), min_size=1))
def test_c_computes_the_same(curve: Curve, asked: list[int]) -> None:
    """pds_cost_at, for any curve that can be made, at its knots and anywhere."""
    c = pytest.importorskip("support.decisions").in_c()
    given_c = c.ffi.new("pds_cost_curve *", {"n": len(curve.tokens)})
    given_c.tokens[0 : len(curve.tokens)] = curve.tokens
    given_c.ns[0 : len(curve.ns)] = curve.ns
    for tokens in (*asked, *curve.tokens, *(t + 1 for t in curve.tokens)):
        assert c.lib.pds_cost_at(given_c, tokens) == curve.at(tokens)


@pytest.mark.parametrize(
    ("tokens", "ns", "said"),
    [
        ((1, 2), (3,), "ns: 1 numbers, expected 2"),
        ((0, 2), (3, 4), "tokens: 0, expected 1 to"),
        ((2, 2), (3, 4), "tokens: 2 behind 2, expected a greater number"),
        ((1, 2), (4, 3), "ns: 3 at 2 tokens behind 4, expected as much or more"),
        ((1,), (-1,), "ns: -1, expected 0 to"),
        ((1,), (MAX_NS,), f"ns: {MAX_NS}, expected 0 to"),
        (tuple(range(1, 18)), (1,) * 17, "17 knots, expected at most 16"),
    ],
)
def test_curves_refuse(tokens: tuple[int, ...], ns: tuple[int, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Curve(tokens, ns)


def test_costs_refuse_what_is_no_time() -> None:
    with pytest.raises(PlanError, match="io_start: -1, expected 0 to"):
        Costs(-1, 0, 0, 0, 0, 0, Curve(), Curve(), Curve(), Curve())


# --- fitting ---


def test_isotonic_by_hand() -> None:
    """3, 1, 2: mean 2 of all three; 5, 4: mean 4.5, rounded down."""
    assert isotonic([3, 1, 2, 5, 4, 9]) == [2, 2, 2, 4, 4, 9]
    assert isotonic([]) == [] and isotonic([5]) == [5]


@given(st.lists(st.integers(0, MAX_NS), max_size=30))
def test_isotonic_ascends_and_keeps_what_does(values: list[int]) -> None:
    found = isotonic(values)
    assert found == sorted(found) and len(found) == len(values)
    assert isotonic(sorted(values)) == sorted(values)


def test_knots_are_where_the_curve_bends() -> None:
    tokens = list(range(1, 25))
    bent = [100 if t <= 10 else 100 + 50 * (t - 10) for t in tokens]
    assert [tokens[i] for i in choose_knots(tokens, bent, 3)] == [1, 10, 24]
    assert choose_knots([1, 2], [5, 6], 16) == [0, 1]


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=26))
def test_fit_is_monotone_and_small(medians: list[int]) -> None:
    """Of any measurements at all."""
    points = [(1 << i if i < 20 else (1 << 20) + i, Bar(m, m, m)) for i, m in enumerate(medians)]
    fitted = fit(points)
    assert len(fitted.curve.tokens) <= KNOTS and fitted.points == tuple(points)
    assert fitted.curve.tokens[0] == 1 and fitted.curve.tokens[-1] == points[-1][0]
    if medians == sorted(medians) and len(medians) <= KNOTS:
        assert fitted.curve.ns == tuple(medians)


def test_a_fit_is_never_free() -> None:
    assert fit([(1, Bar(0, 0, 0))]).curve.ns == (1,)


def test_error_bars() -> None:
    assert bar_of([5, 1, 9]) == Bar(1, 5, 9)
    assert bar_of([4, 1, 2, 3]) == Bar(1, 2, 4)


def test_sizes_are_the_papers() -> None:
    """9, 16.5 and 336 MB an expert (of 2^20 bytes)."""
    mib = [expert_bytes(key) / 2**20 for key in (QWEN3, DEEPSEEK, MIXTRAL)]
    assert mib == [9, 16.5, 336]
    assert expert_flops(QWEN3) == 6 * 2048 * 768
    int4 = replace(QWEN3, dtype="int4", group=32)
    assert expert_bytes(int4) == 3 * 2048 * 768 * (4 * 32 + 16) // 32 // 8


def test_the_compiler_passes_the_names_on() -> None:
    assert compiler_costs.Curve is Curve and compiler_costs.Costs is Costs


# --- costs.json ---


def test_what_is_written_is_read() -> None:
    full = table()
    assert CostTable.parse(full.text(), "x") == full
    bare = replace(full, gpu=None, link=None, machine=Machine("a CPU", 1, 1, "scalar"))
    assert CostTable.parse(bare.text(), "x") == bare
    assert "null" not in bare.text()
    assert full.text() == table().text()


def test_the_light_check_agrees_with_jsonschema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema("costs_schema.json"))
    jsonschema.validate(json.loads(table().text()), schema("costs_schema.json"))


def test_costs_of_a_table() -> None:
    """Attention, shared expert and predictor are the device's that runs them."""
    gpu = table().costs("gpu")
    assert (gpu.io_start, gpu.io_expert, gpu.cpu_start, gpu.gpu_start) == (5, 1000, 7, 17)
    assert gpu.shared == Curve() and gpu.predict == 0 and gpu.context_row == 3
    assert table().costs("gpu").context_row_prefill == 2
    cpu = table().costs("cpu")
    assert (cpu.io_start, cpu.io_expert, cpu.gpu_start, cpu.predict) == (0, 0, 0, 11)
    assert cpu.gpu_expert == Curve() and cpu.shared.at(4) == 160


@pytest.mark.parametrize("name", ["gpu", "link"])
def test_a_table_without_a_gpu_says_so(name: str) -> None:
    absent: Any = {name: None}
    with pytest.raises(PlanError, match=f"costs.json: {name}: absent, .*--costs auto,NAME"):
        replace(table(), **absent).costs("gpu")
    replace(table(), **absent).costs("cpu")


def test_another_models_table_is_refused() -> None:
    table().check_model(QWEN3, "here.json")
    for key, said in (
        (DEEPSEEK, "inter is 768, expected 1408"),
        (replace(QWEN3, dtype="int8"), "dtype is bf16, expected int8"),
        (
            replace(QWEN3, attention=replace(QWEN3.attention, heads=16)),
            "attention.heads is 32, expected 16",
        ),
    ):
        with pytest.raises(PlanError, match=f"here.json: model: {said}.*--costs auto"):
            table().check_model(key, "here.json")


def fault(change: Any) -> str:
    data = copy.deepcopy(json.loads(table().text()))
    changed = change(data)
    with pytest.raises(PlanError) as caught:
        CostTable.parse(json.dumps(data if changed is None else changed), "c.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_fault_names_file_field_and_remedy() -> None:
    def put(path: str, value: Any) -> Any:
        def change(data: dict[str, Any]) -> None:
            *parts, last = path.split(".")
            for part in parts:
                data = data[part]
            data[last] = value

        return change

    for change, said in (
        (lambda d: [], "c.json: expected object"),
        (put("kind", "hardware"), "c.json: kind: 'hardware', expected 'costs'"),
        (put("format_version", 2), "c.json: format_version: 2, expected 1"),
        (put("cpu.start", {}), "c.json: cpu: start: key 'ns' is missing"),
        (put("cpu.start.ns", 1.5), "c.json: cpu: start: ns: expected integer"),
        (put("cpu.start.ns", MAX_NS), "c.json: cpu: start: ns:"),
        (put("cpu.start.min", 1000), "c.json: cpu: start: min, median, max: 1000, 100, 130"),
        (lambda d: d["cpu"]["start"].pop("max") and None, "c.json: cpu: start: max: missing"),
        (put("cpu.expert.ns", [100, 90]), "c.json: cpu: expert: ns: 90 at 4 tokens behind 100"),
        (put("gpu.expert.tokens", [4, 4]), "c.json: gpu: expert: tokens: 4 behind 4"),
        (put("gpu.attention.ns", []), "c.json: gpu: attention: ns: must not be empty"),
        (put("link.expert.ns", -1), "c.json: link: expert: ns: expected at least 0"),
        (put("model.dtype", "fp8"), "c.json: model: dtype: expected one of"),
        (put("machine.speed", 1), "c.json: machine: unknown key 'speed'"),
        (lambda d: d.pop("cpu") and None, "c.json: key 'cpu' is missing"),
    ):
        line = fault(change)
        assert line.startswith(said), line
        assert line.endswith(
            "measure again with pdscope-compile --costs auto, or give another file"
        )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for content, said in (
        (b"{", "not valid JSON"),
        (b"\xff", "not valid UTF-8"),
        (b"[" * 100000, "not valid JSON"),
        (None, "cannot be read"),
    ):
        path = tmp_path / "costs.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(PlanError, match=f"costs.json: {said}.*--costs auto"):
            CostTable.read(path)
