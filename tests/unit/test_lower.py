"""Lowering accounts for every node of the graph, and places tensors without overlap (issue: trace
is the truth; plan; memory table)."""

from dataclasses import replace

import pytest

from pdscope.compiler.lowered import Form, LoweredModel
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.passes.plan_memory import PlanMemory
from pdscope.compiler.passes.programs import Schedule
from pdscope.errors import ModelError
from pdscope.ir.graph import (
    AddAttrs,
    EmbedAttrs,
    ExpertsAttrs,
    GateAttrs,
    GqaAttrs,
    Graph,
    LmHeadAttrs,
    MlpAttrs,
    Node,
    NormAttrs,
    Op,
    Rope,
    ScaleAttrs,
    Weight,
)
from pdscope.ir.isa import Phase
from pdscope.ir.verify import verify

H, VOCAB, EXPERTS, INTER = 48, 100, 5, 24


def weight(name: str, *shape: int) -> Weight:
    return Weight(name, shape, "float32")


def norm(name: str, source: str, layer: int | None) -> Node:
    return Node(
        name, Op.NORM, (source,), NormAttrs(H, 1e-6), {"weight": weight(f"{name}.w", H)}, layer
    )


def layer_nodes(i: int, hid: str, dense: bool, shared: bool) -> list[Node]:
    p = f"l{i}"
    attrs = GqaAttrs(2, 1, 16, 0.25, Rope((1.0,) * 8, 1.0, False), "none", 0.0, None, None)
    shapes = {"q": (32, H), "k": (16, H), "v": (16, H), "o": (H, 32)}
    qkvo = {r: weight(f"{p}.{r}", *s) for r, s in shapes.items()}
    nodes = [
        norm(f"{p}.n1", hid, i),
        Node(f"{p}.attn", Op.ATTENTION, (f"{p}.n1",), attrs, qkvo, i),
        Node(f"{p}.a1", Op.ADD, (hid, f"{p}.attn"), AddAttrs(), {}, i),
        norm(f"{p}.n2", f"{p}.a1", i),
    ]
    shapes = {"gate": (INTER, H), "up": (INTER, H), "down": (H, INTER)}
    mlp = {r: weight(f"{p}.mlp.{r}", *s) for r, s in shapes.items()}
    out = f"{p}.ffn"
    if dense:
        nodes.append(Node(out, Op.MLP, (f"{p}.n2",), MlpAttrs(INTER, "silu"), mlp, i))
    else:
        gate = GateAttrs(EXPERTS, 2, "softmax", True, 0.0, 1.0, 1, 1, "none", 0.0)
        router = {"weight": weight(f"{p}.g", EXPERTS, H)}
        fused = {
            "gate_up": weight(f"{p}.e.gu", EXPERTS, 2 * INTER, H),
            "down": weight(f"{p}.e.d", EXPERTS, H, INTER),
        }
        experts = ExpertsAttrs(EXPERTS, INTER, "silu")
        nodes.append(Node(f"{p}.gate", Op.GATE, (f"{p}.n2",), gate, router, i))
        nodes.append(Node(out, Op.EXPERTS, (f"{p}.n2", f"{p}.gate"), experts, fused, i))
        if shared:
            attrs_s = MlpAttrs(INTER, "silu")
            nodes.append(Node(f"{p}.sh", Op.SHARED_EXPERT, (f"{p}.n2",), attrs_s, mlp, i))
            nodes.append(Node(f"{p}.sum", Op.ADD, (out, f"{p}.sh"), AddAttrs(), {}, i))
            out = f"{p}.sum"
    nodes.append(Node(f"{p}.a2", Op.ADD, (f"{p}.a1", out), AddAttrs(), {}, i))
    return nodes


def graph(tied: bool = False, shared: bool = True, kinds: str = "DM") -> Graph:
    """`kinds`: D for a dense layer, M for one with experts."""
    table = weight("embed", VOCAB, H)
    nodes = [Node("embed", Op.EMBED, (), EmbedAttrs(VOCAB, H), {"weight": table})]
    for i, kind in enumerate(kinds):
        before = f"l{i - 1}.a2" if i else "embed"
        nodes += layer_nodes(i, before, dense=kind == "D", shared=shared and kind == "M")
    nodes.append(norm("final", f"l{len(kinds) - 1}.a2", None))
    head = table if tied else weight("head", VOCAB, H)
    nodes.append(Node("head", Op.LM_HEAD, ("final",), LmHeadAttrs(VOCAB, tied), {"weight": head}))
    return Graph("TestForCausalLM", H, VOCAB, len(kinds), 256, tuple(nodes))


def change(g: Graph, name: str, node: Node) -> Graph:
    return replace(g, nodes=tuple(node if n.name == name else n for n in g.nodes))


def lower(g: Graph, dtype: str = "bf16") -> LoweredModel:
    return Lower(dtype, 128).run(g)


def test_layers_keep_their_kind() -> None:
    model = lower(graph())
    first, second = model.layers
    assert first.dense is not None and not first.is_moe
    assert second.is_moe and second.experts is not None and second.shared is not None
    assert lower(graph(shared=False)).layers[1].shared is None
    assert second.gate is not None and second.gate.weight.form is Form.PACKED_F32


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tensors_do_not_overlap(tied: bool, dtype: str) -> None:
    model = lower(graph(tied), dtype)
    assert (model.lm_head == model.embed) is tied
    for file in model.files:
        spans = []
        for t in file.tensors:
            assert t.offset % 64 == 0
            for i in range(t.count):
                start = t.offset + i * t.stride
                spans.append((start, start + t.matrix_bytes, t.name))
        spans.sort()
        for (_, end, a), (start, _, b) in zip(spans, spans[1:], strict=False):
            assert end <= start, f"{a} overlaps {b}"
        assert spans[-1][1] <= file.bytes
    experts = model.layers[1].experts
    assert experts is not None
    assert experts.gate_up.offset % 4096 == 0 and experts.gate_up.stride % 4096 == 0


def test_a_scale_on_the_residual_is_refused() -> None:
    g = graph()
    scaled = Node("l1.scale", Op.SCALE, ("l1.attn",), ScaleAttrs(0.5), {}, 1)
    nodes = []
    for n in g.nodes:
        if n.name == "l1.a1":
            nodes.append(scaled)
            n = replace(n, inputs=("l0.a2", "l1.scale"))
        nodes.append(n)
    with pytest.raises(ModelError, match=r"layer 1: .*scale 'l1\.scale'"):
        lower(replace(g, nodes=tuple(nodes)))


def test_a_node_that_nothing_lowers_is_refused() -> None:
    g = graph()
    extra = norm("l1.extra", "l1.n2", 1)
    with pytest.raises(ModelError, match=r"l1\.extra"):
        lower(replace(g, nodes=(*g.nodes, extra)))


def test_a_branch_that_skips_the_norm_is_refused() -> None:
    g = graph()
    attn = g.node("l1.attn")
    with pytest.raises(ModelError, match=r"layer 1: expected one attention"):
        lower(change(g, "l1.attn", replace(attn, inputs=("l0.a2",))))


def test_an_unknown_activation_is_refused() -> None:
    g = graph()
    experts = g.node("l1.ffn")
    changed = replace(experts, attrs=ExpertsAttrs(EXPERTS, INTER, "gelu"))
    with pytest.raises(ModelError, match=r"activation 'gelu'"):
        lower(change(g, "l1.ffn", changed))


def test_scratch_buffers_do_not_overlap_and_fit() -> None:
    memory = PlanMemory(64).run(lower(graph()))
    end = 0
    for b in memory.buffers:
        assert b.offset >= end and b.offset % 64 == 0
        end = b.offset + b.bytes
    assert end <= memory.scratch_bytes
    assert memory.session_bytes(1, 64) < memory.session_bytes(1, 4096)


def test_layers_predict_the_next_with_experts() -> None:
    """Programs and memory follow: decode and batch predict and prefetch, prefill does not."""
    model = lower(graph(kinds="DMDMM"))
    assert [x.predictor.target if x.predictor else None for x in model.layers] == [
        *(None, 3, None, 4, None)
    ]
    for p in Schedule(model, 64).programs():
        ahead = p.layer in (1, 3) and p.phase is not Phase.PREFILL
        assert any(i.predict for i in p.instrs) is ahead
        assert any(i.llc for i in p.instrs) is ahead
        verify(p)
    sizes = {b.name: b.bytes for b in PlanMemory(64).run(model).buffers}
    assert sizes["PREDICT"] == 4 * 16 * 16 and sizes["LLC_HOLES"] == 4 * EXPERTS
    without = Lower("bf16", 128, "none").run(graph(kinds="DMDMM"))
    assert not any(x.predictor for x in without.layers)
    assert not any(i.predict or i.llc for p in Schedule(without, 64).programs() for i in p.instrs)
    sizes = {b.name: b.bytes for b in PlanMemory(64).run(without).buffers}
    assert sizes["PREDICT"] == sizes["PREDICT_ID"] == sizes["LLC_HOLES"] == 0


@pytest.mark.parametrize("max_rows", [1, 2, 16, 17, 512])
def test_programs_cover_every_row_count(max_rows: int) -> None:
    model = lower(graph())
    programs = Schedule(model, max_rows).programs()
    for rows in range(1, max_rows + 1):
        fitting = [p for p in programs if p.rows_min <= rows <= p.rows_max]
        assert [p.layer for p in fitting] == [-1, 0, 1, -1]
