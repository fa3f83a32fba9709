"""Text form of a model graph: print_graph and parse_graph, exact in both directions.

    graph MixtralForCausalLM {hidden = 128, vocab = 8192, layers = 6, max_context = 1024, ...}
      rope @0 {scale = 1.0, interleaved = false, inv_freq = [1.0, 0.4, ...]}
      %embed_tokens = embed() {vocab = 8192, hidden = 128}
        weight = model.embed_tokens.weight [8192, 128] bfloat16
      %layers.0.self_attn = attention.gqa(%layers.0.input_layernorm) layer 0 {heads = 4, ...}
        q = model.layers.0.self_attn.q_proj.weight [128, 128] bfloat16

Rotary tables are printed once and named. May import pdscope.ir.graph and pdscope.errors.
"""

import re
from dataclasses import fields
from typing import Any, NoReturn

from pdscope.errors import PlanError
from pdscope.ir.graph import (
    AddAttrs,
    Attrs,
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
    Rope,
    ScaleAttrs,
    Weight,
)

# The word that a node's line starts with -> operator and attributes.
_KINDS: dict[str, tuple[Op, type[Attrs]]] = {
    "embed": (Op.EMBED, EmbedAttrs),
    "norm": (Op.NORM, NormAttrs),
    "attention.gqa": (Op.ATTENTION, GqaAttrs),
    "attention.mla": (Op.ATTENTION, MlaAttrs),
    "gate": (Op.GATE, GateAttrs),
    "experts": (Op.EXPERTS, ExpertsAttrs),
    "shared_expert": (Op.SHARED_EXPERT, MlpAttrs),
    "mlp": (Op.MLP, MlpAttrs),
    "add": (Op.ADD, AddAttrs),
    "scale": (Op.SCALE, ScaleAttrs),
    "lm_head": (Op.LM_HEAD, LmHeadAttrs),
}
_HEADER_FIELDS = ("hidden", "vocab", "layers", "max_context", "streams", "dtype")

_HEADER = re.compile(r"graph (\w+) \{(.*)\}")
_ROPE = re.compile(r"  rope (@\d+) \{(.*)\}")
_NODE = re.compile(r"  %([\w.]+) = ([\w.]+)\(([^)]*)\)(?: layer (\d+))? \{(.*)\}")
_WEIGHT = re.compile(r"    (\w+) = ([\w.]+) \[([\d, ]*)\] (\w+)")
_PAIR = re.compile(r"(\w+) = (\[[^\]]*\]|[^,\[\]]+)(?:, |$)")


def print_graph(graph: Graph) -> str:
    """The text of a graph, one operator or weight a line, ending in a newline."""
    ropes: dict[Rope, str] = {}
    for node in graph.nodes:
        rope = getattr(node.attrs, "rope", None)
        if rope is not None:
            ropes.setdefault(rope, f"@{len(ropes)}")
    header = _pairs({name: getattr(graph, name) for name in _HEADER_FIELDS}, ropes)
    lines = [f"graph {graph.architecture} {{{header}}}"]
    for rope, name in ropes.items():
        values = {"scale": rope.scale, "interleaved": rope.interleaved, "inv_freq": rope.inv_freq}
        lines.append(f"  rope {name} {{{_pairs(values, ropes)}}}")
    for node in graph.nodes:
        inputs = ", ".join(f"%{name}" for name in node.inputs)
        layer = "" if node.layer is None else f" layer {node.layer}"
        attrs = {f.name: getattr(node.attrs, f.name) for f in fields(node.attrs)}
        kind = next(k for k, v in _KINDS.items() if v == (node.op, type(node.attrs)))
        lines.append(f"  %{node.name} = {kind}({inputs}){layer} {{{_pairs(attrs, ropes)}}}")
        for role, w in node.weights.items():
            shape = ", ".join(map(str, w.shape))
            lines.append(f"    {role} = {w.name} [{shape}] {w.dtype}")
    return "\n".join(lines) + "\n"


def _pairs(values: dict[str, Any], ropes: dict[Rope, str]) -> str:
    return ", ".join(f"{key} = {_show(value, ropes)}" for key, value in values.items())


def _show(value: Any, ropes: dict[Rope, str]) -> str:
    if isinstance(value, Rope):
        return ropes[value]
    if isinstance(value, tuple):
        return "[" + ", ".join(_show(v, ropes) for v in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, str) else repr(value)


def parse_graph(text: str) -> Graph:
    """The graph of a text that print_graph could have written; else PlanError with the line."""
    return _Parser(text).run()


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.number = 0
        self.ropes: dict[str, Rope] = {}

    def fail(self, why: str) -> NoReturn:
        raise PlanError(f"graph text, line {self.number}: {why}")

    def run(self) -> Graph:
        self.number = 1
        header = _HEADER.fullmatch(self.lines[0]) if self.lines else None
        if header is None:
            self.fail("expected: graph <architecture> {...}")
        values = self.pairs(header.group(2))
        nodes: list[Node] = []
        names: set[str] = set()
        for line in self.lines[1:]:
            self.number += 1
            if match := _ROPE.fullmatch(line):
                self.ropes[match.group(1)] = self.make(Rope, self.pairs(match.group(2)))
            elif match := _NODE.fullmatch(line):
                nodes.append(self.node(match, names))
                names.add(nodes[-1].name)
            elif match := _WEIGHT.fullmatch(line):
                if not nodes:
                    self.fail("a weight before the first operator")
                role, name, shape, dtype = match.groups()
                if role in nodes[-1].weights:
                    self.fail(f"the weight {role} occurs twice")
                dims = tuple(int(n) for n in shape.split(",") if n.strip())
                nodes[-1].weights[role] = Weight(name, dims, dtype)
            else:
                self.fail("expected a rope, an operator or a weight")
        if set(values) != set(_HEADER_FIELDS):
            self.number = 1
            self.fail(f"expected the fields {', '.join(_HEADER_FIELDS)}")
        return Graph(architecture=header.group(1), nodes=tuple(nodes), **values)

    def node(self, match: re.Match[str], names: set[str]) -> Node:
        name, kind, inputs, layer, attrs = match.groups()
        if kind not in _KINDS:
            self.fail(f"unknown operator {kind}; known: {', '.join(_KINDS)}")
        if name in names:
            self.fail(f"%{name} is defined twice")
        op, cls = _KINDS[kind]
        wires = [w.removeprefix("%") for w in inputs.split(", ")] if inputs else []
        for wire in wires:
            if wire not in names:
                self.fail(f"%{wire} is not defined above")
        made = self.make(cls, self.pairs(attrs))
        return Node(name, op, tuple(wires), made, {}, None if layer is None else int(layer))

    def pairs(self, text: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        position = 0
        while position < len(text):
            match = _PAIR.match(text, position)
            if match is None:
                self.fail(f"expected name = value at {text[position : position + 20]!r}")
            if match.group(1) in out:
                self.fail(f"{match.group(1)} occurs twice")
            out[match.group(1)] = self.parse(match.group(2))
            position = match.end()
        return out

    def parse(self, word: str) -> Any:
        if word.startswith("["):
            return tuple(self.parse(w) for w in word[1:-1].split(", ") if w)
        if word in ("null", "true", "false"):
            return {"null": None, "true": True, "false": False}[word]
        if word.startswith("@"):
            if word not in self.ropes:
                self.fail(f"rope {word} is not defined above")
            return self.ropes[word]
        if re.fullmatch(r"-?\d+", word):
            return int(word)
        if re.fullmatch(r"-?(\d[\d.]*(e[+-]?\d+)?|inf)", word):
            return float(word)
        if re.fullmatch(r"[A-Za-z_]\w*", word):
            return word
        self.fail(f"{word!r} is not a value")

    def make(self, cls: type[Any], values: dict[str, Any]) -> Any:
        try:
            return cls(**values)
        except TypeError as error:
            self.fail(f"{cls.__name__}: {error}")
