"""Every operator but attention against torch or transformers, for every path and dtype.

Holds of the issue: rows per expert exactly 0, 1, 2, 3, 7, 8, 9; 1 to 384 experts, top-1 to top-8;
group-limited routing with a correction bias and masked scores of 0 or -Inf; experts that get no
row; bit-identical over thread counts.
"""

from typing import Any

import numpy as np
import pytest
import torch
from support import cc
from support.operators import DTYPES, Model, Step, ceil, ffi, library, quant_bytes
from support.packing import bf16_bits, bf16_value, dequantised, quantised
from support.published_configs import cut_down
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from pdscope.compiler.lowered import Form, Tensor
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.passes.plan_memory import PlanMemory
from pdscope.compiler.trace import trace_config

PATHS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")
ACTS = ("f32", "bf16")
INTS = ("i8", "i4")  # weights; act is bf16
FORMS = {Form.PACKED_BF16: "bf16", Form.PACKED_INT8: "i8", Form.PACKED_INT4: "i4"}
SOFTMAX, SIGMOID = 0, 1
NONE, MAX, TOP2 = 0, 1, 2


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    if not cc.runnable(request.param):
        pytest.skip(f"kernel path {request.param} is not runnable on this CPU")
    return str(request.param)


def rounded(x: np.ndarray, act: str) -> np.ndarray:
    x = np.ascontiguousarray(x, np.float32)
    return x if act == "f32" else bf16_value(bf16_bits(x))


def stored(w: np.ndarray, weights: str) -> np.ndarray:
    """What a plan with these weights holds for W [..., n, k]."""
    if weights not in INTS:
        return rounded(w, weights)
    rows = w.reshape(-1, w.shape[-1])
    kept = dequantised(*quantised(rows, int(weights[1])))[:, : w.shape[-1]]
    return kept.reshape(w.shape)


def normal(seed: int, *shape: int, scale: float = 1.0, act: str = "f32") -> np.ndarray:
    return rounded(np.random.default_rng(seed).standard_normal(shape) * scale, act)


def close(
    got: np.ndarray, want: np.ndarray, act: str, f32: float = 1e-5, bf16: float = 1e-2
) -> None:
    """int8 and int4 weights are exact in `want`; their inputs are rounded to int8 in groups."""
    error = np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)
    assert error <= {"f32": f32, "bf16": bf16}.get(act, 2.5 * bf16), error


# --- gate -----------------------------------------------------------------------------------


def router(kind: str, experts: int, top_k: int, **more: Any) -> tuple[Any, dict[str, Any]]:
    """A transformers router and the pds_gate fields that should equal it."""
    hidden = 40
    if kind in ("mixtral", "qwen3", "qwen3_norm", "olmoe"):
        config_class, router_class, experts_key = {
            "mixtral": (MixtralConfig, MixtralTopKRouter, "num_local_experts"),
            "qwen3": (Qwen3MoeConfig, Qwen3MoeTopKRouter, "num_experts"),
            "qwen3_norm": (Qwen3MoeConfig, Qwen3MoeTopKRouter, "num_experts"),
            "olmoe": (OlmoeConfig, OlmoeTopKRouter, "num_experts"),
        }[kind]
        options: dict[str, Any] = {experts_key: experts, "num_experts_per_tok": top_k}
        normalise = kind in ("mixtral", "qwen3_norm")
        if kind != "mixtral":
            options["norm_topk_prob"] = normalise
        return router_class(config_class(hidden_size=hidden, **options)), {
            "score": SOFTMAX,
            "normalise": normalise,
        }
    options = {"hidden_size": hidden, "num_experts_per_tok": top_k, "routed_scaling_factor": 2.5}
    options |= {"num_attention_heads": 4, "n_group": 1, "topk_group": 1, **more}
    groups, chosen = more.get("n_group", 1), more.get("topk_group", 1)
    shared = {"groups": groups, "top_groups": chosen, "scaling": 2.5}
    if kind == "deepseek_v2":
        method = "group_limited_greedy" if groups > 1 else "greedy"
        module: Any = DeepseekV2TopkRouter(
            DeepseekV2Config(n_routed_experts=experts, topk_method=method, **options)
        )
        grouped = {"group_score": MAX, "mask_zero": 1} if groups > 1 else {}
        return module, {"score": SOFTMAX, **shared, **grouped}
    module = DeepseekV3TopkRouter(
        DeepseekV3Config(n_routed_experts=experts, norm_topk_prob=True, **options)
    )
    grouped = {"group_score": TOP2} if groups > 1 else {}
    return module, {"score": SIGMOID, "normalise": 1, "norm_eps": 1e-20, **shared, **grouped}


GATES = [
    ("mixtral", 8, 2, {}), ("mixtral", 6, 1, {}), ("mixtral", 1, 1, {}), ("qwen3", 128, 8, {}),
    ("qwen3_norm", 60, 4, {}), ("olmoe", 64, 8, {}), ("olmoe", 7, 7, {}),
    ("deepseek_v2", 64, 6, {}), ("deepseek_v2", 16, 6, {"n_group": 8, "topk_group": 3}),
    ("deepseek_v2", 12, 6, {"n_group": 4, "topk_group": 1}),
    ("deepseek_v3", 64, 6, {}), ("deepseek_v3", 384, 8, {}),
    ("deepseek_v3", 256, 8, {"n_group": 8, "topk_group": 4}),
    ("deepseek_v3", 24, 5, {"n_group": 6, "topk_group": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "experts", "top_k", "more"), GATES)
def test_gate_equals_transformers(
    kind: str, experts: int, top_k: int, more: dict[str, int], path: str
) -> None:
    """Ids and weights, each row in descending order of the score that chooses; rows around the
    parallel switch."""
    torch.manual_seed(experts)
    module, fields = router(kind, experts, top_k, **more)
    with torch.no_grad():
        module.weight.normal_(0, 0.3)
    bias = normal(1, experts, scale=0.5)
    model = Model("bf16", 40)
    layer = model.layers[0]
    layer.moe, gate = 1, layer.gate
    gate.experts, gate.top_k, gate.scaling = experts, top_k, 1.0
    for name, value in fields.items():
        setattr(gate, name, value)
    model.matrix(gate.weight, module.weight.detach().numpy(), "f32")
    if kind == "deepseek_v3":
        module.e_score_correction_bias.copy_(
            torch.from_numpy(bias)
        )  # negative scores must stay choosable
        model.vector(gate.bias, bias)
    x = normal(2, 90, 40)
    with torch.no_grad():
        _, weights, ids = module(torch.from_numpy(x))
    step = Step(model, path, threads=2)
    for n in (1, 4, 5, 90):
        step.batch(list(range(n)))
        step.set_inputs(x[:n])
        step.call("gate", 0)
        got_ids = step.rows("ROUTE_ID", top_k, np.int32)
        got = step.rows("ROUTE_W", top_k)
        want_ids, want = ids[:n].numpy(), weights[:n].numpy()
        order, want_order = np.argsort(got_ids, 1), np.argsort(want_ids, 1)
        same = (
            np.take_along_axis(got_ids, order, 1) == np.take_along_axis(want_ids, want_order, 1)
        ).all(1)
        if (
            kind == "deepseek_v2" and more.get("topk_group") == 1
        ):  # the rest are chosen among ties at zero
            same[:] = True
            chosen = np.sort(got, 1)
            np.testing.assert_allclose(chosen, np.sort(want, 1), rtol=1e-5, atol=1e-7)
        else:
            assert same.all()
            a, b = np.take_along_axis(got, order, 1), np.take_along_axis(want, want_order, 1)
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        assert all(len(set(r)) == top_k for r in got_ids.tolist())
        if kind != "deepseek_v3":
            assert (np.diff(got, axis=1) <= 0).all(), "descending"


def test_gate_breaks_ties_by_index_and_survives_nan(path: str) -> None:
    model = Model("f32", 32)
    layer = model.layers[0]
    layer.moe = 1
    layer.gate.experts, layer.gate.top_k, layer.gate.scaling = 20, 5, 1.0
    model.matrix(layer.gate.weight, np.zeros((20, 32), np.float32))
    step = Step(model, path)
    step.batch([0, 1])
    step.set_inputs(np.array([[1.0] * 32, [np.nan] * 32], np.float32))
    step.call("gate", 0)
    assert (step.rows("ROUTE_ID", 5, np.int32)[0] == [0, 1, 2, 3, 4]).all()
    assert len(set(step.rows("ROUTE_ID", 5, np.int32)[1].tolist())) == 5
    assert np.isnan(step.rows("ROUTE_W", 5)[1]).all()


# --- predictions ----------------------------------------------------------------------------


def gates(path: str, experts: tuple[int, int], top_k: tuple[int, int], target: np.ndarray) -> Step:
    """Two layers of gates, the first of which predicts the second, whose weight is `target`."""
    model = Model("bf16", 40, layers=2)
    for k, layer in enumerate((model.layers[0], model.layers[1])):
        layer.moe = 1
        layer.gate.experts, layer.gate.top_k, layer.gate.scaling = experts[k], top_k[k], 1.0
        own = normal(3, experts[0], 40, scale=0.3)
        model.matrix(layer.gate.weight, target if k else own, "f32")
    model.layers[0].predictor.kind, model.layers[0].predictor.target = 1, 1
    return Step(model, path, threads=2)


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize("kind", ["random", "nan", "huge"])
def test_predictions_change_no_routing(path: str, kind: str, rows: int) -> None:
    """Whatever the predictor says, however wrong: the layer's own routing is bit for bit that of a
    gate alone. Alone or fused, predict gives the same."""
    target = normal(4, 24, 40, scale=0.3)
    target = {"random": target, "nan": target * np.float32(np.nan), "huge": target * 1e30}[kind]
    x = normal(5, rows, 40)
    found = []
    for ops in (("gate",), ("gate_and_predict",), ("gate", "predict")):
        step = gates(path, (9, 24), (3, 5), target.astype(np.float32))
        step.batch(list(range(rows)))
        step.set_inputs(x)
        for op in ops:
            step.call(op, 0)
        names = (("ROUTE_ID", 3), ("ROUTE_W", 3), ("PREDICT_ID", 5), ("PREDICT_W", 5))
        found.append([step.rows(name, stride, np.int32).copy() for name, stride in names])
    for plain, both in zip(found[0][:2], found[1][:2], strict=True):
        assert np.array_equal(plain, both)
    for fused, alone in zip(found[1], found[2], strict=True):
        assert np.array_equal(fused, alone)
    assert ((found[1][2] >= 0) & (found[1][2] < 24)).all()


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_predicted_experts_are_ranked(path: str, rows: int) -> None:
    """By the sum of their weights over the rows, the lowest id first among equals; the first
    `capacity` of them."""
    step = gates(path, (9, 24), (3, 5), normal(6, 24, 40, scale=0.3))
    step.batch(list(range(rows)))
    x = normal(7, rows, 40)
    x[0] = 0  # all scores are equal
    step.set_inputs(x)
    step.call("gate_and_predict", 0)
    ids, weights = step.rows("PREDICT_ID", 5, np.int32), step.rows("PREDICT_W", 5)
    sums: dict[int, np.float32] = {}
    for e, w in zip(ids.reshape(-1).tolist(), weights.reshape(-1), strict=True):
        sums[e] = sums.get(e, np.float32(0)) + w
    want = sorted(sums, key=lambda e: (-sums[e], e))
    for capacity in (24, len(want), len(want) - 1, 3, 1):
        step.call("bind_llc", 0, capacity)
        n = step.ctx.n_llc_holes
        assert n == min(capacity, len(want))
        assert step.buffer("LLC_HOLES", np.int32)[:n].tolist() == want[:n]


# --- experts --------------------------------------------------------------------------------


def moe_model(
    act: str, experts: int, top_k: int, hidden: int, inter: int, shared: int = 0
) -> tuple[Model, Any]:
    model = Model(act, hidden)
    layer = model.layers[0]
    layer.moe = 1
    layer.gate.experts, layer.gate.top_k = experts, top_k
    w = [
        normal(11, experts, inter, hidden, scale=hidden**-0.5, act=act),
        normal(12, experts, inter, hidden, scale=hidden**-0.5, act=act),
        normal(13, experts, hidden, inter, scale=inter**-0.5, act=act),
    ]
    model.mlp(layer.experts, *w)
    s = []
    if shared:
        s = [
            normal(14, shared, hidden, scale=0.1, act=act),
            normal(15, shared, hidden, scale=0.1, act=act),
        ]
        s.append(normal(16, hidden, shared, scale=0.1, act=act))
        model.mlp(layer.shared, *s)
    return model, ([stored(m, act) for m in w], [stored(m, act) for m in s])


def mlp64(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    x, gate, up, down = (a.astype(np.float64) for a in (x, gate, up, down))
    g = x @ gate.T
    return np.asarray((g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T)


def run_moe(
    step: Step,
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    hidden: int,
    shared: bool,
    joint: bool = True,
) -> np.ndarray:
    """recompile, experts, shared expert, combine onto a residual of ones."""
    n, k = ids.shape
    step.batch(list(range(n)))
    step.set_inputs(x)
    step.rows("ROUTE_ID", k, np.int32)[...] = ids
    step.rows("ROUTE_W", k)[...] = weights
    hid = step.rows("HID", ceil(hidden, 32))
    hid[...] = 1
    step.call("recompile", 0)
    if shared:
        if joint:
            step.call("shared_and_expert", 0, step.ctx.cpu_holes, step.ctx.n_cpu_holes)
        else:
            step.call("shared_expert", 0)
    if not (shared and joint):
        step.call("expert", 0, step.ctx.cpu_holes, step.ctx.n_cpu_holes)
    step.call("combine", 0, int(shared))
    return hid[:, :hidden].copy()


def routes(
    rng: np.random.Generator, rows: int, experts: int, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int32)
    return ids, rng.random((rows, top_k)).astype(np.float32)


@pytest.mark.parametrize("act", (*ACTS, *INTS))
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inter", "shared"),
    [
        (8, 2, 64, 96, 0),
        (60, 4, 72, 40, 88),
        (384, 8, 32, 33, 0),
        (1, 1, 96, 17, 31),
        (7, 7, 33, 16, 0),
    ],
)
def test_experts_equal_numpy(
    experts: int, top_k: int, hidden: int, inter: int, shared: int, act: str, path: str
) -> None:
    model, (w, s) = moe_model(act, experts, top_k, hidden, inter, shared)
    step = Step(model, path, threads=3)
    rng = np.random.default_rng(experts)
    for rows in (1, 2, 16, 17, 100):
        x = normal(rows, rows, hidden, act=act)
        ids, weights = routes(rng, rows, experts, top_k)
        got = run_moe(step, x, ids, weights, hidden, bool(shared))
        want = np.ones((rows, hidden))
        for r in range(rows):
            for e, weight in zip(ids[r], weights[r], strict=True):
                want[r] += weight * mlp64(x[r], *(m[e] for m in w))
        if shared:
            want += mlp64(x, *s)
        close(got - 1, want - 1, act)


@pytest.mark.parametrize("act", (*ACTS, *INTS))
def test_rows_per_expert(act: str, path: str) -> None:
    """Expert e gets exactly counts[e] rows; each row's other choice goes to one more expert."""
    counts = [0, 1, 2, 3, 7, 8, 9, 0, 16, 17, 33]
    rows, hidden, inter = sum(counts), 64, 80
    model, (w, _) = moe_model(act, len(counts) + 1, 2, hidden, inter)
    rng = np.random.default_rng(9)
    first = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    ids = np.stack([first, np.full(rows, len(counts))], 1).astype(np.int32)
    flip = rng.random(rows) < 0.5
    ids[flip] = ids[flip][:, ::-1]
    weights = rng.random((rows, 2)).astype(np.float32)
    x = normal(3, rows, hidden, act=act)
    step = Step(model, path, threads=2)
    got = run_moe(step, x, ids, weights, hidden, False)
    holes = [(h.expert, h.first, h.rows) for h in step.ctx.cpu_holes[0 : step.ctx.n_cpu_holes]]
    assert [(e, n) for e, _, n in holes] == [(e, n) for e, n in enumerate([*counts, rows]) if n]
    want = np.ones((rows, hidden))
    for r in range(rows):
        for e, weight in zip(ids[r], weights[r], strict=True):
            want[r] += weight * mlp64(x[r], *(m[e] for m in w))
    close(got - 1, want - 1, act)


@pytest.mark.parametrize("backwards", (False, True))
@pytest.mark.parametrize("threads", (1, 3, 20))
@pytest.mark.parametrize("rows", (1, 64, 65, 1023, 1024, 1537, 9000))
def test_recompile_is_a_stable_sort(rows: int, threads: int, backwards: bool) -> None:
    """Of few routes, of many, and of so many that several workers share them."""
    model, _ = moe_model("f32", 60, 4, 32, 16)
    model.plan.max_rows = rows
    step = Step(model, "scalar", threads, backwards)
    ids, _ = routes(np.random.default_rng(4), rows, 60, 4)
    step.batch(list(range(rows)))
    step.rows("ROUTE_ID", 4, np.int32)[...] = ids
    step.call("recompile", 0)
    want = np.argsort(ids.reshape(-1), kind="stable")
    assert (step.buffer("EXPERT_ROWS", np.int32)[: 4 * rows] == want).all()
    end = 0
    for h in step.ctx.cpu_holes[0 : step.ctx.n_cpu_holes]:
        assert h.first == end and (ids.reshape(-1)[want[end : end + h.rows]] == h.expert).all()
        end += h.rows
    assert end == 4 * rows


@pytest.mark.parametrize("act", (*ACTS, *INTS))
def test_bits_do_not_depend_on_threads_order_or_company(act: str, path: str) -> None:
    """Expert outputs of a row are the same bits alone, in a batch, on any number of workers."""
    hidden = 72
    model, _ = moe_model(act, 16, 3, hidden, 56, 24)
    ids, weights = routes(np.random.default_rng(5), 90, 16, 3)
    x = normal(6, 90, hidden, act=act)
    outputs = [
        run_moe(Step(model, path, threads, backwards), x, ids, weights, hidden, True)
        for threads, backwards in [(1, False), (2, True), (7, False), (64, True)]
    ]
    assert all((o == outputs[0]).all() for o in outputs)
    apart = run_moe(Step(model, path, 3), x, ids, weights, hidden, True, joint=False)
    assert (apart == outputs[0]).all(), "shared and routed experts one after the other"
    step = Step(model, path)
    for r in (0, 41, 89):
        alone = run_moe(step, x[r : r + 1], ids[r : r + 1], weights[r : r + 1], hidden, True)
        assert (alone[0] == outputs[0][r]).all()


@pytest.mark.parametrize(
    ("of_shared", "of_experts"), [("i8", "bf16"), ("bf16", "i4"), ("i8", "i4"), ("i4", "i8")]
)
def test_shared_and_routed_experts_of_two_formats_are_one_job(
    of_shared: str, of_experts: str, path: str
) -> None:
    """Each reads rows that are quantised for its own weights: the bits of one after the other."""
    hidden, inter, shared = 72, 40, 88
    model = Model("bf16", hidden)
    layer = model.layers[0]
    layer.moe, layer.gate.experts, layer.gate.top_k = 1, 5, 3
    w = [normal(11, 5, *shape, scale=0.1) for shape in [(inter, hidden)] * 2 + [(hidden, inter)]]
    s = [normal(14, *shape, scale=0.1) for shape in [(shared, hidden)] * 2 + [(hidden, shared)]]
    model.mlp(layer.experts, *w, weights=of_experts)
    model.mlp(layer.shared, *s, weights=of_shared)
    rng = np.random.default_rng(5)
    for rows in (1, 17, 90):
        ids, weights = routes(rng, rows, 5, 3)
        x = normal(6, rows, hidden, act="bf16")
        step = Step(model, path, threads=3)
        together = run_moe(step, x, ids, weights, hidden, True)
        apart = run_moe(Step(model, path, 3), x, ids, weights, hidden, True, joint=False)
        assert (together == apart).all()


@pytest.mark.parametrize("weights", INTS)
@pytest.mark.parametrize("shared", [0, 300])
def test_too_little_room_for_quantised_rows_is_refused_at_load(weights: str, shared: int) -> None:
    model, _ = moe_model(weights, 4, 3, 64, 200, shared)
    step = Step(model, "scalar")
    plan, at, layer = model.plan, step.lib.PDS_BUF_XQ, model.layers[0]
    need = step.lib.pds_quant_need(plan)
    row = quant_bytes(layer.experts.gate_up) + 3 * quant_bytes(layer.experts.down)
    row += quant_bytes(layer.shared.down)
    assert need == plan.max_rows * row == plan.buffer_bytes[at]
    plan.buffer_bytes[at] = need - 1
    assert step.lib.pds_ops_check(plan) != 0


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen3-30b-a3b", "moonlight-16b-a3b"])
def test_the_compiler_plans_just_the_room_for_quantised_rows(name: str, dtype: str) -> None:
    """plan_memory.py and pds_quant_need have the same formula (issue: memory table, exact)."""
    graph = trace_config(cut_down(name, small=True)).graph
    lowered = Lower(dtype, 128).run(graph)
    planned = {b.name: b.bytes for b in PlanMemory(96).run(lowered).buffers}
    model = Model("bf16", lowered.hidden, layers=len(lowered.layers), max_rows=96)

    def put(field: Any, tensor: Tensor | None) -> None:
        if tensor:
            field.dtype, field.k = DTYPES[FORMS[tensor.form]], tensor.k

    put(model.plan.lm_head, lowered.lm_head)
    for to, layer in zip(model.layers, lowered.layers, strict=True):
        for part in ("in_proj", "q_b", "o_proj"):
            put(getattr(to.attn, part), getattr(layer.attn, part))
        for part in ("dense", "shared", "experts"):
            if mlp := getattr(layer, part):
                put(getattr(to, part).gate_up, mlp.gate_up)
                put(getattr(to, part).down, mlp.down)
        to.gate.top_k = layer.gate.attrs.top_k if layer.gate else 0
    assert library().pds_quant_need(model.plan) == planned["XQ"]


def test_a_row_with_nan_does_not_touch_other_rows(path: str) -> None:
    model, _ = moe_model("bf16", 4, 2, 40, 24)
    ids, weights = routes(np.random.default_rng(8), 20, 4, 2)
    x = normal(7, 20, 40, act="bf16")
    clean = run_moe(Step(model, path), x, ids, weights, 40, False)
    x[[3, 11], 5] = np.nan, np.inf
    got = run_moe(Step(model, path), x, ids, weights, 40, False)
    rest = [r for r in range(20) if r not in (3, 11)]
    assert (got[rest] == clean[rest]).all() and not np.isfinite(got[[3, 11]]).any()


# --- the dense operators --------------------------------------------------------------------


@pytest.mark.parametrize("act", (*ACTS, *INTS))
@pytest.mark.parametrize("hidden", [16, 33, 64, 100])
def test_embed_norm_mlp_and_lm_head(hidden: int, act: str, path: str) -> None:
    vocab, inter = 71, 50
    model = Model(act, hidden, vocab)
    p, layer = model.plan, model.layers[0]
    table = normal(1, vocab, hidden, act=act)
    model.matrix(p.embed, table)
    table = stored(table, act)
    p.lm_head = p.embed  # tied
    norms = [1 + normal(s, hidden, scale=0.2) for s in (2, 3, 4)]
    for field, w in zip((layer.attn_norm, layer.mlp_norm, p.final_norm), norms, strict=True):
        model.vector(field, w)
    layer.attn_norm_eps, layer.mlp_norm_eps, p.final_norm_eps = 1e-5, 1e-6, 1e-3
    weights = [normal(5, inter, hidden, act=act), normal(6, inter, hidden, act=act)]
    weights.append(normal(7, hidden, inter, scale=0.1, act=act))
    model.mlp(layer.dense, *weights)
    weights = [stored(w, act) for w in weights]
    step = Step(model, path, threads=2)
    stride = ceil(hidden, 32)
    for rows in (1, 2, 3, 40):
        tokens = (np.arange(rows) * 29 % vocab).tolist()
        wanted = [0, rows - 1] if rows > 1 else [0]
        step.batch(list(range(rows)), token=tokens, logit_row=wanted)
        step.call("embed")
        hid = step.rows("HID", stride)
        assert (hid[:, :hidden] == np.float32(table[tokens])).all() and (hid[:, hidden:] == 0).all()
        x = hid[:, :hidden].astype(np.float64)

        def normed(x: np.ndarray, site: int) -> np.ndarray:
            eps = (1e-5, 1e-6, 1e-3)[site]
            return np.asarray(x / np.sqrt((x**2).mean(1, keepdims=True) + eps) * norms[site])

        for site in (0, 1):
            step.call("norm", 0, site)
            got = step.rows("XN", stride)
            np.testing.assert_allclose(got[:, :hidden], normed(x, site), rtol=1e-5, atol=1e-6)
            assert (got[:, hidden:] == 0).all()
            assert (step.act_rows("XACT", stride) == rounded(got, act)).all()
        step.call("mlp", 0)
        want = x + mlp64(step.act_rows("XACT", stride)[:, :hidden], *weights)
        close(hid[:, :hidden], want, act)
        final = normed(hid[:, :hidden].astype(np.float64), 2)[wanted]
        step.call("norm", 0, 2)
        step.call("lm_head")
        logits = step.buffer("LOGITS")[: len(wanted) * vocab].reshape(-1, vocab)
        close(logits, final @ table.T.astype(np.float64), act)


def test_lm_head_without_wanted_rows_does_nothing() -> None:
    model = Model("f32", 32, 20)
    model.matrix(model.plan.lm_head, normal(1, 20, 32))
    model.vector(model.plan.final_norm, np.ones(32))
    step = Step(model, "scalar")
    step.batch([0, 1])
    before = step.scratch.copy()
    step.call("norm", 0, 2)
    step.call("lm_head")
    assert (step.scratch == before).all()
    assert ffi.sizeof("pds_hole") == 16
