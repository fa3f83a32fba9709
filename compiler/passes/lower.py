"""Lower the model graph to plan constants: which tensors, in which packed form, in which file and
place.

The graph must have the shape that the programs execute; anything else is refused by the node that
does not fit, so a change in the traced model never goes unnoticed. May import pdscope.ir and
pdscope.compiler.lowered.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from pdscope.compiler.lowered import (
    EXPERT_ALIGN,
    MATRIX_FORM,
    PANEL,
    TENSOR_ALIGN,
    AbsorbKey,
    AbsorbValue,
    Attention,
    ExpertDown,
    ExpertGateUp,
    Form,
    Gate,
    GateUp,
    Layer,
    LoweredModel,
    Mlp,
    Predictor,
    Rows,
    Tensor,
    WeightFile,
    ceil_to,
)
from pdscope.errors import ModelError
from pdscope.ir.graph import (
    AddAttrs,
    EmbedAttrs,
    ExpertsAttrs,
    GateAttrs,
    GqaAttrs,
    Graph,
    LmHeadAttrs,
    MlaAttrs,
    MlpAttrs,
    Node,
    NormAttrs,
    Op,
)

A = TypeVar("A")


@dataclass(frozen=True)
class Lower:
    """Options of the pass: the plan's dtype, the longest context it serves, and what predicts
    experts of the next layer."""

    dtype: str  # "fp32" | "bf16" | "int8" | "int4"
    max_context: int
    predictor: str = "cross_gate"  # | "none"

    def run(self, graph: Graph) -> LoweredModel:
        """Raises ModelError where the graph is no decoder that the instruction set can express."""
        return _predict(_place(_Matcher(graph, self).model()), self.predictor)


class _Matcher:
    """Walks the graph along the residual stream and accounts for every node."""

    def __init__(self, graph: Graph, options: Lower) -> None:
        self.graph = graph
        self.options = options
        self.matrix = MATRIX_FORM[options.dtype]
        self.left = {n.name: n for n in graph.nodes}
        self.users: dict[str, list[Node]] = {n.name: [] for n in graph.nodes}
        for n in graph.nodes:
            for i in n.inputs:
                self.users[i].append(n)

    def model(self) -> LoweredModel:
        g = self.graph
        if g.streams != 1:
            raise ModelError(
                f"{g.architecture}: {g.streams} hyper-connection streams are not supported yet"
            )
        embed = self._only([n for n in g.nodes if n.op is Op.EMBED], "embed", None)
        ea = self._attrs(embed, EmbedAttrs)
        hid = embed
        layers = []
        for i in range(g.layers):
            hid, layer = self._layer(i, hid)
            layers.append(layer)
        norm = self._user(hid, Op.NORM, None)
        head = self._user(norm, Op.LM_HEAD, None)
        ha = self._attrs(head, LmHeadAttrs)
        if self.left:
            extra = next(iter(self.left.values()))
            raise ModelError(
                f"{g.architecture}: the trace has {_at(extra)}, which no instruction implements"
            )
        embed_t = self._packed("embed", ea.vocab, ea.hidden, Rows((embed.weights["weight"].name,)))
        head_t = (
            embed_t
            if ha.tied
            else self._packed("lm_head", ha.vocab, g.hidden, Rows((head.weights["weight"].name,)))
        )
        return LoweredModel(
            architecture=g.architecture,
            dtype=self.options.dtype,
            hidden=g.hidden,
            vocab=ha.vocab,
            max_context=self.options.max_context,
            embed=embed_t,
            final_norm=self._norm_weight("final_norm", norm),
            final_norm_eps=self._attrs(norm, NormAttrs).eps,
            lm_head=head_t,
            layers=tuple(layers),
        )

    # --- the pattern of one decoder layer ---

    def _layer(self, i: int, hid: Node) -> tuple[Node, Layer]:
        norm1 = self._user(hid, Op.NORM, i)
        attn = self._user(norm1, Op.ATTENTION, i)
        mid = self._residual(hid, attn, i)
        norm2 = self._user(mid, Op.NORM, i)
        name = f"layers.{i}"
        layer = Layer(
            attn_norm=self._norm_weight(f"{name}.attn_norm", norm1),
            attn_norm_eps=self._attrs(norm1, NormAttrs).eps,
            attn=self._attention(f"{name}.attn", attn),
            mlp_norm=self._norm_weight(f"{name}.mlp_norm", norm2),
            mlp_norm_eps=self._attrs(norm2, NormAttrs).eps,
        )
        dense = [u for u in self.users[norm2.name] if u.op is Op.MLP]
        if dense:
            mlp = self._user(norm2, Op.MLP, i)
            out = self._residual(mid, mlp, i)
            self._exactly(norm2, {mlp.name}, i)
            return out, replace(layer, dense=self._mlp(f"{name}.mlp", mlp))
        gate = self._user(norm2, Op.GATE, i)
        experts = self._user(gate, Op.EXPERTS, i)
        if experts.inputs != (norm2.name, gate.name):
            raise ModelError(f"layer {i}: {_at(experts)} must read ({norm2.name}, {gate.name})")
        readers = {gate.name, experts.name}
        ffn, shared = experts, None
        if any(u.op is Op.SHARED_EXPERT for u in self.users[norm2.name]):
            shared = self._user(norm2, Op.SHARED_EXPERT, i)
            readers.add(shared.name)
            ffn = self._sum(experts, shared, i)
        self._exactly(norm2, readers, i)
        self._exactly(gate, {experts.name}, i)
        out = self._residual(mid, ffn, i)
        xa = self._attrs(experts, ExpertsAttrs)
        ga = self._attrs(gate, GateAttrs)
        if xa.experts != ga.experts:
            raise ModelError(
                f"layer {i}: the gate scores {ga.experts} experts, but there are {xa.experts}"
            )
        _silu(experts, xa.activation)
        return out, replace(
            layer,
            gate=self._gate(f"{name}.gate", gate),
            experts=self._experts(f"{name}.experts", experts, xa),
            shared=None if shared is None else self._mlp(f"{name}.shared", shared),
        )

    def _residual(self, hid: Node, branch: Node, layer: int) -> Node:
        """hid + branch, and nothing else may read the branch."""
        out = self._sum(hid, branch, layer)
        self._exactly(branch, {out.name}, layer)
        return out

    def _sum(self, a: Node, b: Node, layer: int) -> Node:
        for u in self.users[b.name]:
            if u.op is Op.ADD and sorted(u.inputs) == sorted((a.name, b.name)):
                self._attrs(u, AddAttrs)
                return self._take(u)
        raise ModelError(
            f"layer {layer}: expected {_at(a)} + {_at(b)}; the trace feeds {_at(b)} to "
            + (", ".join(_at(u) for u in self.users[b.name]) or "nothing")
        )

    def _exactly(self, node: Node, readers: set[str], layer: int) -> None:
        extra = [u for u in self.users[node.name] if u.name not in readers]
        if extra:
            raise ModelError(
                f"layer {layer}: {_at(extra[0])} reads {_at(node)}, which no instruction implements"
            )

    # --- tensors ---

    def _packed(self, name: str, n: int, k: int, source: Any, count: int = 1) -> Tensor:
        return Tensor(name, self.matrix, n, k, source, count)

    def _absorbed(self, name: str, n: int, k: int, source: Any, count: int) -> Tensor:
        """MLA's per-head matrices stay bf16 in int8 and int4 plans: small, and the latent that
        passes through them is all that attention reads of the context."""
        form = Form.PACKED_BF16 if self.matrix.group else self.matrix
        return Tensor(name, form, n, k, source, count)

    def _vector(self, name: str, node: Node, *roles: str) -> Tensor | None:
        have = [r for r in roles if r in node.weights]
        if not have:
            return None
        if len(have) != len(roles):
            missing = next(r for r in roles if r not in node.weights)
            raise ModelError(f"{_at(node)} has {have} but no {missing}")
        n = sum(node.weights[r].shape[0] for r in roles)
        return Tensor(name, Form.VECTOR, n, 1, Rows(tuple(node.weights[r].name for r in roles)))

    def _norm_weight(self, name: str, node: Node) -> Tensor:
        vector = self._vector(name, node, "weight")
        if vector is None:
            raise ModelError(f"{_at(node)} has no weight")
        return vector

    def _attention(self, name: str, node: Node) -> Attention:
        if isinstance(node.attrs, GqaAttrs):
            return self._gqa(name, node, node.attrs)
        return self._mla(name, node, self._attrs(node, MlaAttrs))

    def _gqa(self, name: str, node: Node, a: GqaAttrs) -> Attention:
        w, hidden = node.weights, self.graph.hidden
        n_in = (a.heads + 2 * a.kv_heads) * a.head_dim
        qkv = Rows((w["q"].name, w["k"].name, w["v"].name))
        return Attention(
            kind="gqa",
            qk_norm=a.qk_norm,
            heads=a.heads,
            kv_heads=a.kv_heads,
            qk_dim=a.head_dim,
            v_dim=a.head_dim,
            nope_dim=0,
            q_lora=0,
            kv_lora=0,
            window=a.window or 0,
            scale=a.softmax_scale,
            norm_eps=a.qk_norm_eps,
            clip=a.clip or 0.0,
            rope=a.rope,
            in_proj=self._packed(f"{name}.in_proj", n_in, hidden, qkv),
            in_bias=self._vector(f"{name}.in_bias", node, "q_bias", "k_bias", "v_bias"),
            q_norm=self._vector(f"{name}.q_norm", node, "q_norm"),
            k_norm=self._vector(f"{name}.k_norm", node, "k_norm"),
            o_proj=self._packed(
                f"{name}.o_proj", hidden, a.heads * a.head_dim, Rows((w["o"].name,))
            ),
            o_bias=self._vector(f"{name}.o_bias", node, "o_bias"),
        )

    def _mla(self, name: str, node: Node, a: MlaAttrs) -> Attention:
        w, hidden = node.weights, self.graph.hidden
        qk = a.nope_dim + a.rope_dim
        first = "q_a" if a.q_lora else "q"
        n_in = (a.q_lora or a.heads * qk) + a.kv_lora + a.rope_dim
        kv_b = w["kv_b"].name
        q_b = None
        if a.q_lora:
            q_b = self._packed(f"{name}.q_b", a.heads * qk, a.q_lora, Rows((w["q_b"].name,)))
        in_bias = None
        if "kv_a_bias" in w:
            in_bias = self._mla_bias(name, node, n_in)
        return Attention(
            kind="mla",
            qk_norm="none",
            heads=a.heads,
            kv_heads=1,
            qk_dim=qk,
            v_dim=a.v_dim,
            nope_dim=a.nope_dim,
            q_lora=a.q_lora or 0,
            kv_lora=a.kv_lora,
            window=0,
            scale=a.softmax_scale,
            norm_eps=a.norm_eps,
            clip=0.0,
            rope=a.rope,
            in_proj=self._packed(
                f"{name}.in_proj", n_in, hidden, Rows((w[first].name, w["kv_a"].name))
            ),
            in_bias=in_bias,
            q_norm=self._vector(f"{name}.q_norm", node, "q_a_norm"),
            k_norm=self._vector(f"{name}.k_norm", node, "kv_a_norm"),
            q_b=q_b,
            uk=self._absorbed(
                f"{name}.uk",
                a.kv_lora,
                a.nope_dim,
                AbsorbKey(kv_b, a.heads, a.nope_dim, a.v_dim),
                a.heads,
            ),
            uv=self._absorbed(
                f"{name}.uv",
                a.v_dim,
                a.kv_lora,
                AbsorbValue(kv_b, a.heads, a.nope_dim, a.v_dim),
                a.heads,
            ),
            o_proj=self._packed(f"{name}.o_proj", hidden, a.heads * a.v_dim, Rows((w["o"].name,))),
            o_bias=self._vector(f"{name}.o_bias", node, "o_bias"),
        )

    def _mla_bias(self, name: str, node: Node, n_in: int) -> Tensor:
        """Bias over the fused rows; the direct q projection has none in any family, so its part is
        zero."""
        w = node.weights
        if "q_a_bias" in w:
            source = Rows((w["q_a_bias"].name, w["kv_a_bias"].name))
        else:
            source = Rows((w["kv_a_bias"].name,), n_in - w["kv_a_bias"].shape[0])
        return Tensor(f"{name}.in_bias", Form.VECTOR, n_in, 1, source)

    def _gate(self, name: str, node: Node) -> Gate:
        a = self._attrs(node, GateAttrs)
        source = Rows((node.weights["weight"].name,))
        weight = Tensor(f"{name}.weight", Form.PACKED_F32, a.experts, self.graph.hidden, source)
        return Gate(a, weight, self._vector(f"{name}.bias", node, "bias"))

    def _mlp(self, name: str, node: Node) -> Mlp:
        a, w, hidden = self._attrs(node, MlpAttrs), node.weights, self.graph.hidden
        _silu(node, a.activation)
        pair = GateUp(w["gate"].name, w["up"].name)
        n = 2 * ceil_to(a.inter, PANEL)
        return Mlp(
            a.inter,
            self._packed(f"{name}.gate_up", n, hidden, pair),
            self._packed(f"{name}.down", hidden, a.inter, Rows((w["down"].name,))),
        )

    def _experts(self, name: str, node: Node, a: ExpertsAttrs) -> Mlp:
        w, hidden = node.weights, self.graph.hidden
        n = 2 * ceil_to(a.inter, PANEL)
        up, down = ExpertGateUp(w["gate_up"].name), ExpertDown(w["down"].name)
        return Mlp(
            a.inter,
            self._packed(f"{name}.gate_up", n, hidden, up, a.experts),
            self._packed(f"{name}.down", hidden, a.inter, down, a.experts),
        )

    # --- bookkeeping ---

    def _user(self, node: Node, op: Op, layer: int | None) -> Node:
        return self._only([u for u in self.users[node.name] if u.op is op], op, layer, node)

    def _only(
        self, found: list[Node], op: str, layer: int | None, after: Node | None = None
    ) -> Node:
        if len(found) == 1 and found[0].layer == layer:
            return self._take(found[0])
        where = "" if layer is None else f"layer {layer}: "
        behind = "" if after is None else f" reading {_at(after)}"
        got = "none" if not found else ", ".join(_at(n) for n in found)
        raise ModelError(f"{where}expected one {op}{behind}, the trace has {got}")

    def _take(self, node: Node) -> Node:
        if self.left.pop(node.name, None) is None:
            raise ModelError(f"{_at(node)} is used in two places, which no instruction implements")
        return node

    def _attrs(self, node: Node, kind: type[A]) -> A:
        if not isinstance(node.attrs, kind):
            raise ModelError(
                f"{_at(node)} has {type(node.attrs).__name__}, expected {kind.__name__}"
            )
        return node.attrs


def _at(node: Node) -> str:
    return f"{node.op} '{node.name}'"


def _silu(node: Node, activation: str) -> None:
    if activation != "silu":
        raise ModelError(
            f"{_at(node)}: activation '{activation}' is not supported; expected 'silu'"
        )


# --- predictors ---


def _predict(model: LoweredModel, kind: str) -> LoweredModel:
    """Every layer with experts, but the last, predicts those of the next one."""
    if kind == "none":
        return model
    moe = [i for i, layer in enumerate(model.layers) if layer.is_moe]
    targets = dict(zip(moe, moe[1:], strict=False))
    layers = [
        replace(layer, predictor=Predictor(kind, targets[i])) if i in targets else layer
        for i, layer in enumerate(model.layers)
    ]
    return replace(model, layers=tuple(layers))


# --- places ---


def _place(model: LoweredModel) -> LoweredModel:
    """One file a layer, one for the embedding (and tied head), one for the final norm and head."""
    embed_file, placed = _file(0, "weights/embed.bin", [model.embed])
    embed = placed[model.embed.name]
    files, layers = [embed_file], []
    for i, layer in enumerate(model.layers):
        file, placed = _file(len(files), f"weights/layer{i:03d}.bin", _tensors(layer))
        files.append(file)
        layers.append(_substitute(layer, placed))
    tied = model.lm_head == model.embed
    last = [model.final_norm] if tied else [model.final_norm, model.lm_head]
    file, placed = _file(len(files), "weights/head.bin", last)
    files.append(file)
    return replace(
        model,
        embed=embed,
        final_norm=placed[model.final_norm.name],
        lm_head=embed if tied else placed[model.lm_head.name],
        layers=tuple(layers),
        files=tuple(files),
    )


def _file(index: int, path: str, tensors: list[Tensor]) -> tuple[WeightFile, dict[str, Tensor]]:
    """Tensors in order; experts as one blob each (gate_up, then down) with a common stride."""
    placed: dict[str, Tensor] = {}
    end = 0
    pair: list[Tensor] = []
    for t in tensors:
        if isinstance(t.source, ExpertGateUp | ExpertDown):
            pair.append(t)
            if len(pair) == 2:
                first, second = pair
                inner = ceil_to(first.matrix_bytes, TENSOR_ALIGN)
                stride = ceil_to(inner + second.matrix_bytes, EXPERT_ALIGN)
                start = ceil_to(end, EXPERT_ALIGN)
                placed[first.name] = first.at(index, start, stride)
                placed[second.name] = second.at(index, start + inner, stride)
                end = start + stride * first.count
                pair = []
            continue
        stride = ceil_to(t.matrix_bytes, TENSOR_ALIGN) if t.count > 1 else 0
        start = ceil_to(end, TENSOR_ALIGN)
        placed[t.name] = t.at(index, start, stride)
        end = start + (stride * t.count if t.count > 1 else t.matrix_bytes)
    size = ceil_to(end, EXPERT_ALIGN)
    return WeightFile(path, size, tuple(placed.values())), placed


def _tensors(value: object) -> list[Tensor]:
    """Every tensor of a (nested) dataclass in field order; routed experts last, so they are page-
    aligned without a gap before the small tensors."""
    found: list[Tensor] = []

    def visit(v: object) -> None:
        if isinstance(v, Tensor):
            found.append(v)
        elif is_dataclass(v):
            for f in fields(v):
                visit(getattr(v, f.name))

    visit(value)
    return sorted(found, key=lambda t: isinstance(t.source, ExpertGateUp | ExpertDown))


def _substitute(value: Any, placed: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return placed[value.name]
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _substitute(getattr(value, f.name), placed) for f in fields(value)}
        return replace(value, **changes)
    return value
