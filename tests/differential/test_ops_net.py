"""The forward of PhasePer's nets in the operators, against torch.

Holds: "Forward in C in the runtime, checked against torch to 1e-4", on every kernel path, for any
shape, whatever else is in the batch; "zero effect on outputs whatever the predictor says".
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cc
from support.operators import Model, Step, ffi
from support.packing import aligned, bf16_bits, bf16_value, pack
from support.predictors import reference

from pdscope.compiler.phaseper.nets import BLOCKS, NetShape

PATHS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")
BITS = {"routed": 1, "previous": 2, "previous_next": 4}
K, NEXT_K = 3, 2


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    if not cc.runnable(request.param):
        pytest.skip(f"kernel path {request.param} is not runnable on this CPU")
    return str(request.param)


def random_tensors(shape: NetShape, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """As a file holds them; matrices are rounded to bf16. Logits come out of size 1 to 10."""
    made = {}
    for name, size in shape.tensors().items():
        scale = 1.0 if name == "features.weight" or len(size) == 1 else 2 * size[-1] ** -0.5
        values = np.float32(rng.normal(0, scale, size))
        made[name] = values if len(size) == 1 else bf16_value(bf16_bits(values))
    return made


class NetStep(Step):
    """Two layers with experts, of which the first has a net for both phases."""

    def __init__(self, path: str, act: str, shape: NetShape, tensors: dict[str, Any]) -> None:
        model = Model(act, shape.hidden, layers=2)
        rng = np.random.default_rng(0)
        for i, layer in enumerate((model.layers[0], model.layers[1])):
            layer.moe = 1
            layer.gate.experts, layer.gate.scaling = shape.experts, 1.0
            layer.gate.top_k = min((K, NEXT_K)[i], shape.experts)
            weight = np.float32(rng.normal(size=(shape.experts, shape.hidden)))
            model.matrix(layer.gate.weight, weight, "f32")
        model.layers[0].predictor.kind, model.layers[0].predictor.target = 1, 1
        super().__init__(model, path, threads=2)
        self.shape = shape
        self.slots = ffi.new("pds_net_slot[]", 4)
        net = self.place(tensors)
        self.slots[0].active = self.slots[1].active = net
        self.ctx.nets = ffi.cast("struct pds_net_slot *", self.slots)

    def place(self, t: dict[str, Any]) -> Any:
        shape, deep = self.shape, self.shape.deep
        gate = (["gate.weight"], ["gate.bias"]) if deep else ([], [])
        arrays = {
            "in": pack(np.concatenate([t[n] for n in ["in.weight", *gate[0]]]), "bf16"),
            "bias": np.concatenate([t[n] for n in ["in.bias", *gate[1]]]),
            "features": bf16_bits(t["features.weight"]),
            "out": pack(t["out.weight"], "bf16"),
        }
        if deep:
            arrays |= {"block": pack(t["block.weight"], "bf16"), "block_bias": t["block.bias"]}
        desc = ffi.new("pds_net_desc *")
        desc.hidden, desc.experts, desc.width = shape.hidden, shape.experts, shape.width
        desc.deep, desc.blocks = deep, sum(BITS[name] for name in shape.blocks)
        for name, array in arrays.items():
            kind = ffi.typeof(getattr(desc, name))
            setattr(desc, name, ffi.cast(kind, array.ctypes.data))
        self.memory = aligned(np.zeros(self.lib.pds_net_bytes(desc), np.uint8))
        return self.lib.pds_net_place(ffi.cast("void *", self.memory.ctypes.data), desc)

    def logits(self) -> np.ndarray:
        stride = -(-self.shape.experts // 16) * 16
        return self.rows("PREDICT", stride)[:, : self.shape.experts].copy()


def choices(rng: np.random.Generator, rows: int, experts: int, k: int) -> np.ndarray:
    """Distinct experts of each row [rows, k]."""
    return np.argsort(rng.random((rows, experts)), axis=1)[:, :k].astype(np.int32)


def dense(ids: np.ndarray, weight: np.ndarray | None, experts: int) -> np.ndarray:
    out = np.zeros((len(ids), experts), np.float32)
    for row, chosen in enumerate(ids):
        for rank, expert in enumerate(chosen):
            if expert >= 0:
                out[row, expert] = 1 if weight is None else weight[row, rank]
    return out


def check(path: str, act: str, shape: NetShape, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = random_tensors(shape, rng)
    step = NetStep(path, act, shape, tensors)
    step.batch(list(range(rows)))
    a = bf16_value(bf16_bits(np.float32(rng.normal(size=(rows, shape.hidden)))))
    step.set_inputs(a)
    k, next_k = (int(step.model.layers[i].gate.top_k) for i in range(2))
    e, prev = (choices(rng, rows, shape.experts, k) for _ in range(2))
    following = choices(rng, rows, shape.experts, next_k)
    w = np.float32(rng.random((rows, k)))
    prev[::3], following[1::3] = -1, -1
    step.rows("ROUTE_ID", k, np.int32)[...] = e
    step.rows("ROUTE_W", k)[...] = w
    step.rows("NET_PREV", k, np.int32)[...] = prev
    step.rows("NET_NEXT", next_k, np.int32)[...] = following
    step.call("predict_logits", 0)
    parts = {
        "routed": dense(e, w, shape.experts),
        "previous": dense(prev, None, shape.experts),
        "previous_next": dense(following, None, shape.experts),
    }
    features = np.concatenate(
        [parts[n] for n in shape.blocks] or [np.zeros((rows, 0), np.float32)], 1
    )
    with torch.no_grad():
        expected = reference(
            shape,
            {name: torch.from_numpy(t) for name, t in tensors.items()},
            torch.from_numpy(a),
            torch.from_numpy(features),
        ).numpy()
    found = step.logits()
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    # A row alone gives the same bits.
    alone = rows - 1
    step.batch([0])
    step.set_inputs(a[alone:])
    for name, width, values in (
        ("ROUTE_ID", k, e),
        ("NET_PREV", k, prev),
        ("NET_NEXT", next_k, following),
    ):
        step.rows(name, width, np.int32)[...] = values[alone:]
    step.rows("ROUTE_W", k)[...] = w[alone:]
    step.call("predict_logits", 0)
    assert np.array_equal(step.logits()[0], found[alone])


@settings(max_examples=15, deadline=None)
@given(
    hidden=st.integers(1, 150),
    experts=st.integers(2, 70),
    width=st.integers(1, 90),
    deep=st.booleans(),
    blocks=st.sampled_from([(), ("routed",), ("previous_next",), *BLOCKS.values()]),
    rows=st.integers(1, 16),
    act=st.sampled_from(["f32", "bf16"]),
    seed=st.integers(0, 99),
)
def test_against_torch(
    path: str,
    hidden: int,
    experts: int,
    width: int,
    deep: bool,
    blocks: Sequence[str],
    rows: int,
    act: str,
    seed: int,
) -> None:
    check(path, act, NetShape(hidden, experts, width, deep, tuple(blocks)), rows, seed)


@pytest.mark.parametrize("deep", [False, True])
def test_the_widest(path: str, deep: bool) -> None:
    check(path, "bf16", NetShape(2048, 128, 1024, deep, BLOCKS["decode"]), 16, 1)


KINDS = ("random", "nan", "inf", "huge")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7])
def test_nets_change_no_routing(path: str, kind: str, rows: int) -> None:
    """A layer that routes and predicts by a net, however broken, routes bit for bit as a gate
    alone; what it predicts are experts of the next layer, each once."""
    shape = NetShape(70, 20, 33, True, BLOCKS["decode"])
    tensors = random_tensors(shape, np.random.default_rng(3))
    wrong = {"nan": np.nan, "inf": np.inf, "huge": 1e38, "random": None}[kind]
    if wrong is not None:
        for t in tensors.values():
            t.reshape(-1)[::3] = wrong
    x = np.float32(np.random.default_rng(4).normal(size=(rows, shape.hidden)))
    found = []
    for op in ("gate", "gate_and_predict"):
        step = NetStep(path, "bf16", shape, tensors)
        step.batch([0] * rows)
        step.set_inputs(x)
        step.buffer("NET_PREV", np.int32)[...] = step.buffer("NET_NEXT", np.int32)[...] = -1
        step.call(op, 0)
        found.append((step.rows("ROUTE_ID", K, np.int32).copy(), step.rows("ROUTE_W", K).copy()))
    for alone, fused in zip(*found, strict=True):
        assert alone.tobytes() == fused.tobytes()
    predicted = step.rows("PREDICT_ID", NEXT_K, np.int32)
    assert ((predicted >= 0) & (predicted < shape.experts)).all()
    assert all(len(set(row)) == NEXT_K for row in predicted.tolist())
    if kind == "random":
        best = np.argsort(-step.logits(), axis=1, kind="stable")[:, :NEXT_K]
        assert np.array_equal(predicted, best)
