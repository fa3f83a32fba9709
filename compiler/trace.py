"""MODEL directory or config.json -> ir.graph.Graph, through a torch.fx trace on the meta device.

The trace is the source of structure: residual adds, scalings and the order of operators are what
transformers' code does, not what a table says it does. No weight is read and no remote code is run.
May import torch, transformers, pdscope.models, pdscope.ir and pdscope.errors.
"""

import inspect
import json
import math
import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import fx, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pdscope.compiler.fx_trace import MASK_MODULE, role_of, trace_model
from pdscope.compiler.input_file import check_file
from pdscope.errors import ModelError
from pdscope.ir.graph import (
    AddAttrs,
    Attrs,
    EmbedAttrs,
    ExpertsAttrs,
    Graph,
    LmHeadAttrs,
    Node,
    NormAttrs,
    Op,
    Rope,
    ScaleAttrs,
    Weight,
)
from pdscope.models.common import activation_of, mlp
from pdscope.models.family import Family, Role
from pdscope.models.raw_config import check_raw
from pdscope.models.registry import family_of

Config = dict[str, Any]


@dataclass(frozen=True)
class TracedModel:
    """A traced model: `config` is config.json, `meta_model` transformers' model on meta."""

    graph: Graph
    config: Config
    meta_model: Any
    family: Family


def read_config(path: Path | str) -> Config:
    """config.json of a model directory, or the file itself."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ModelError(
            f"{path}: no such file or directory; give a Hugging Face model directory (config.json, "
            "safetensors, tokenizer.json)"
        )
    check_file(file)
    if not file.exists():
        raise ModelError(f"{file}: missing; a model directory needs a config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file}: expected a JSON object; download it again")
    return config


def load_model(path: Path | str) -> TracedModel:
    """Traces the model of a directory or a config.json file.

    Raises ModelError, naming the file and the key, for a configuration that is incomplete,
    inconsistent or unsupported.
    """
    return trace_config(read_config(path))


def trace_config(config: Config) -> TracedModel:
    """`load_model` for a config.json dictionary."""
    family = family_of(config)
    hf_config = transformers_config(config, family)
    meta_model = build_model(family, hf_config, "meta")
    graph = lower(meta_model, family, hf_config)
    return TracedModel(graph, config, meta_model, family)


def transformers_config(config: Config, family: Family) -> Any:
    """transformers' own configuration, checked by the family. No remote code: no auto_map."""
    check_raw(config)
    values = {k: v for k, v in config.items() if k != "auto_map"}
    values.setdefault("model_type", family.model_type)
    try:
        hf_config = CONFIG_MAPPING[family.model_type].from_dict(json.loads(json.dumps(values)))
        hf_config._attn_implementation = "eager"
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"config.json: transformers refuses it: {reason[:300]}") from error
    family.check(hf_config, config)
    return hf_config


def build_model(family: Family, hf_config: Any, device: str) -> Any:
    """The transformers model on `device`, in the configuration's dtype, else float32."""
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                hf_config,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
            )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"config.json: transformers cannot build {family.architecture} from it: {reason[:300]}"
        ) from error
    return model.eval()


# What a traced value is, apart from rows of the hidden state (named by the node that gives them).
@dataclass(frozen=True)
class _Ids:
    pass


@dataclass(frozen=True)
class _Positions:
    pass


@dataclass(frozen=True)
class _Mask:
    window: int | None


@dataclass(frozen=True)
class _RopeTables:
    rope: Rope


@dataclass(frozen=True)
class _Rows:
    node: str


@dataclass(frozen=True)
class _AttentionOut:
    node: str


@dataclass(frozen=True)
class _GateOut:
    node: str
    item: int | None = None  # 0 logits, 1 weights, 2 ids


_Value = _Ids | _Positions | _Mask | _RopeTables | _Rows | _AttentionOut | _GateOut | None

# Arguments of attention that carry no data of their own in a trace without a cache.
_ATTENTION_ARGUMENTS = {"hidden_states", "position_embeddings", "attention_mask", "position_ids"}
_SHAPE_METHODS = {"view", "reshape", "contiguous", "unsqueeze", "squeeze", "flatten", "clone"}
_CAST_METHODS = {"to", "float", "type_as", "type"}


class _Lowering:
    """Walks the fx graph once and builds the operators."""

    def __init__(self, root: nn.Module, model: Any, family: Family, hf_config: Any) -> None:
        self.root = root
        self.model = model
        self.family = family
        self.hidden_act = str(hf_config.hidden_act)
        self.hidden = int(hf_config.hidden_size)
        self.tied = model.lm_head.weight is model.get_input_embeddings().weight
        self.values: dict[fx.Node, _Value] = {}
        self.nodes: list[Node] = []
        self.names: set[str] = set()

    def refuse(self, node: fx.Node, why: str) -> NoReturn:
        target = node.target if isinstance(node.target, str) else _function_name(node.target)
        where = _layer_of(node)
        place = "" if where is None else f" in layer {where}"
        raise ModelError(
            f"{self.family.architecture}: the trace of the installed transformers has "
            f"{node.op} {target}{place}, {why}; PDScope does not implement this model"
        )

    def run(self, graph: fx.Graph) -> str:
        """Lowers every node; returns the name of the operator that gives the logits."""
        for node in graph.nodes:
            match node.op:
                case "placeholder":
                    self.values[node] = _Ids() if node.target == "input_ids" else _Positions()
                case "call_module":
                    self.values[node] = self.module(node)
                case "call_function" | "call_method":
                    self.values[node] = self.function(node)
                case "output":
                    return self.rows(node, node.args[0])
                case _:
                    self.refuse(node, "a parameter read outside of a known module")
        raise ModelError(f"{self.family.architecture}: the trace has no output")

    def add(
        self,
        node: fx.Node,
        base: str,
        op: Op,
        inputs: tuple[str, ...],
        attrs: Attrs,
        weights: dict[str, Weight] | None = None,
    ) -> str:
        name, count = base, 1
        while name in self.names:
            name, count = f"{base}_{count}", count + 1
        self.names.add(name)
        self.nodes.append(Node(name, op, inputs, attrs, weights or {}, _layer_of(node)))
        return name

    def value(self, node: fx.Node, argument: Any) -> _Value:
        if not isinstance(argument, fx.Node):
            self.refuse(node, f"with the constant {argument!r} where a tensor is expected")
        return self.values[argument]

    def rows(self, node: fx.Node, argument: Any) -> str:
        value = self.value(node, argument)
        if not isinstance(value, _Rows):
            self.refuse(node, "whose input is not a hidden state")
        return value.node

    # --- functions and methods between modules ---

    def function(self, node: fx.Node) -> _Value:
        target = node.target
        name = target if isinstance(target, str) else _function_name(target)
        if getattr(target, "__module__", None) == MASK_MODULE:
            return self.mask(node, name)
        if target is operator.getitem:
            return self.item(node)
        if node.op == "call_method" and (name in _SHAPE_METHODS or name in _CAST_METHODS):
            return self.reshape(node)
        if name in ("add", "mul", "truediv", "div") and not node.kwargs and len(node.args) == 2:
            return self.arithmetic(node, name)
        self.refuse(node, "an operation that PDScope does not know here")

    def mask(self, node: fx.Node, name: str) -> _Mask:
        if name == "create_causal_mask":
            return _Mask(None)
        if name == "create_sliding_window_causal_mask":
            window = getattr(node.target, "window", None)
            if not isinstance(window, int) or window < 1:
                self.refuse(node, f"with a sliding window of {window!r}")
            return _Mask(window)
        self.refuse(node, "a mask of a kind that PDScope does not know")

    def item(self, node: fx.Node) -> _Value:
        source, index = node.args
        value = self.value(node, source)
        if isinstance(value, _AttentionOut) and index == 0:
            return _Rows(value.node)
        if isinstance(value, _AttentionOut) and index == 1:
            return None
        if isinstance(value, _GateOut) and value.item is None and index in (0, 1, 2):
            return _GateOut(value.node, int(index))  # type: ignore[arg-type]
        if isinstance(value, _Rows) and _same_shape(node, source):
            return value  # a slice that keeps every row: logits_to_keep=0
        self.refuse(node, "a part of a value that PDScope does not know")

    def reshape(self, node: fx.Node) -> _Value:
        """A view that only moves batch and length about, or a change of dtype: no operator."""
        source = node.args[0]
        value = self.value(node, source)
        before, after = _val(source), _val(node)
        if after.dtype not in (before.dtype, torch.float32, self.model.dtype):
            self.refuse(node, f"a cast to {after.dtype}")
        same_rows = before.numel() == after.numel() and before.shape[-1] == after.shape[-1]
        if not isinstance(value, _Rows) or not same_rows:
            self.refuse(node, f"which makes {list(after.shape)} of {list(before.shape)}")
        return value

    def arithmetic(self, node: fx.Node, name: str) -> _Rows:
        a, b = node.args
        layer = _layer_of(node)
        base = "" if layer is None else f"layers.{layer}."
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            if name != "add" or _val(a).shape != _val(b).shape:
                self.refuse(node, "an operation of two tensors other than a residual sum")
            inputs = (self.rows(node, a), self.rows(node, b))
            return _Rows(self.add(node, f"{base}add", Op.ADD, inputs, AddAttrs()))
        tensor, factor = (a, b) if isinstance(a, fx.Node) else (b, a)
        number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not number or name == "add" or (name != "mul" and tensor is not a):
            self.refuse(node, f"with the constant {factor!r}")
        scale = float(factor) if name == "mul" else 1.0 / float(factor)  # type: ignore[arg-type]
        rows = self.rows(node, tensor)
        return _Rows(self.add(node, f"{base}scale", Op.SCALE, (rows,), ScaleAttrs(scale)))

    # --- modules ---

    def module(self, node: fx.Node) -> _Value:
        path = str(node.target)
        module: Any = self.root.get_submodule(path)
        arguments = self.bind(node, module)
        role = role_of(module, path, self.family)
        base = _operator_name(path)
        match role:
            case Role.ROTARY:
                return _RopeTables(self.rope(node, module, arguments))
            case Role.EMBED:
                return self.embed(node, module, base, arguments)
            case Role.ATTENTION:
                return self.attention(node, module, base, arguments)
            case Role.GATE:
                (x,) = self.take(node, arguments, 1)
                attrs, names = self.family.gate(module)
                weights = self.weights(path, names)
                return _GateOut(
                    self.add(node, base, Op.GATE, (self.rows(node, x),), attrs, weights)
                )
            case Role.EXPERTS:
                return self.experts(node, module, base, arguments)
            case Role.NORM:
                (x,) = self.take(node, arguments, 1)
                norm = NormAttrs(module.weight.shape[0], float(module.variance_epsilon))
                return self.rows_op(node, base, Op.NORM, x, norm, {"weight": "weight"})
            case Role.MLP:
                (x,) = self.take(node, arguments, 1)
                attrs_, names = mlp(module, self.hidden_act)
                op = Op.SHARED_EXPERT if self.beside_experts(path) else Op.MLP
                return self.rows_op(node, base, op, x, attrs_, names)
            case Role.LM_HEAD:
                (x,) = self.take(node, arguments, 1)
                if module.bias is not None:
                    self.refuse(node, "which has a bias")
                head = LmHeadAttrs(module.out_features, self.tied)
                return self.rows_op(node, base, Op.LM_HEAD, x, head, {"weight": "weight"})
            case _:
                self.refuse(node, f"a {type(module).__name__} that PDScope does not know here")

    def rows_op(
        self, node: fx.Node, base: str, op: Op, x: Any, attrs: Attrs, names: dict[str, str]
    ) -> _Rows:
        weights = self.weights(str(node.target), names)
        return _Rows(self.add(node, base, op, (self.rows(node, x),), attrs, weights))

    def embed(self, node: fx.Node, module: Any, base: str, arguments: dict[str, Any]) -> _Rows:
        (ids,) = self.take(node, arguments, 1)
        if not isinstance(self.value(node, ids), _Ids):
            self.refuse(node, "whose input is not the token ids")
        if module.max_norm is not None or module.scale_grad_by_freq:
            self.refuse(node, "an embedding with max_norm or scale_grad_by_freq")
        attrs = EmbedAttrs(module.num_embeddings, module.embedding_dim)
        weights = self.weights(str(node.target), {"weight": "weight"})
        return _Rows(self.add(node, base, Op.EMBED, (), attrs, weights))

    def rope(self, node: fx.Node, module: Any, arguments: dict[str, Any]) -> Rope:
        """Frequencies as transformers makes them: from a real instance on the CPU."""
        if not isinstance(self.value(node, arguments.get("position_ids")), _Positions):
            self.refuse(node, "whose positions are not the tokens' own")
        with torch.device("cpu"):
            real = type(module)(config=module.config)
        freq = tuple(float(f) for f in real.inv_freq.float())
        if not all(map(math.isfinite, (*freq, float(real.attention_scaling)))):
            raise ModelError(
                "config.json: rope_theta and rope_scaling give rotary tables that are not finite; "
                "take both from the model's original repository"
            )
        return Rope(freq, float(real.attention_scaling), interleaved=False)

    def attention(
        self, node: fx.Node, module: Any, base: str, arguments: dict[str, Any]
    ) -> _AttentionOut:
        given = {k: v for k, v in arguments.items() if isinstance(v, fx.Node)}
        if extra := set(given) - _ATTENTION_ARGUMENTS:
            self.refuse(node, f"with the argument {', '.join(sorted(extra))}")
        rope = self.value(node, arguments.get("position_embeddings"))
        mask = self.value(node, arguments.get("attention_mask"))
        if not isinstance(rope, _RopeTables) or not isinstance(mask, _Mask):
            self.refuse(node, "without rotary tables or a causal mask")
        attrs, names = self.family.attention(module, rope.rope, mask.window)
        x = self.rows(node, arguments.get("hidden_states"))
        weights = self.weights(str(node.target), names)
        return _AttentionOut(self.add(node, base, Op.ATTENTION, (x,), attrs, weights))

    def experts(self, node: fx.Node, module: Any, base: str, arguments: dict[str, Any]) -> _Rows:
        x, ids, scores = self.take(node, arguments, 3)
        gate_ids, gate_scores = self.value(node, ids), self.value(node, scores)
        if not (
            isinstance(gate_ids, _GateOut)
            and isinstance(gate_scores, _GateOut)
            and gate_ids.node == gate_scores.node
            and (gate_ids.item, gate_scores.item) == (2, 1)
        ):
            self.refuse(node, "whose routing is not the ids and weights of one gate")
        attrs = ExpertsAttrs(
            module.down_proj.shape[0],
            module.down_proj.shape[2],
            activation_of(module, self.hidden_act),
        )
        names = {"gate_up": "gate_up_proj", "down": "down_proj"}
        inputs = (self.rows(node, x), gate_ids.node)
        weights = self.weights(str(node.target), names)
        return _Rows(self.add(node, base, Op.EXPERTS, inputs, attrs, weights))

    # --- helpers ---

    def bind(self, node: fx.Node, module: nn.Module) -> dict[str, Any]:
        """Arguments by parameter name; **kwargs are merged in."""
        try:
            bound = inspect.signature(module.forward).bind(*node.args, **node.kwargs)
        except TypeError as error:
            self.refuse(node, f"called with arguments that it does not take ({error})")
        out: dict[str, Any] = {}
        for key, value in bound.arguments.items():
            kind = bound.signature.parameters[key].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                out |= value
            else:
                out[key] = value
        return out

    def take(self, node: fx.Node, arguments: dict[str, Any], count: int) -> list[Any]:
        """Exactly `count` arguments, all of them tensors."""
        values = list(arguments.values())
        if len(values) != count or not all(isinstance(v, fx.Node) for v in values):
            self.refuse(node, f"with arguments ({', '.join(arguments)}), expected {count} tensors")
        return values

    def beside_experts(self, path: str) -> bool:
        """An MLP whose parent also holds routed experts is a shared expert."""
        parent_path = path.rpartition(".")[0]
        parent = self.root.get_submodule(parent_path)
        return any(
            role_of(child, f"{parent_path}.{name}", self.family) is Role.EXPERTS
            for name, child in parent.named_children()
        )

    def weights(self, path: str, names: dict[str, str]) -> dict[str, Weight]:
        """Weights by role, named as in state_dict; a tied head has the embedding's name."""
        out = {}
        for role, below in names.items():
            full = f"{path}.{below}"
            tensor = operator.attrgetter(full)(self.root)
            name = full.removeprefix("model.")
            if self.tied and name == "lm_head.weight":
                name = "model.embed_tokens.weight"
            dtype = str(tensor.dtype).removeprefix("torch.")
            out[role] = Weight(name, tuple(tensor.shape), dtype)
        return out


def lower(model: Any, family: Family, hf_config: Any) -> Graph:
    """The graph of a transformers model; ModelError for anything in it that we do not know."""
    root, fx_graph = trace_model(model, family)
    lowering = _Lowering(root, model, family, hf_config)
    logits = lowering.run(fx_graph)
    live = _live(lowering.nodes, logits)
    nodes = tuple(n for n in lowering.nodes if n.name in live)
    _check_all_read(model, family, nodes)
    if nodes[-1].name != logits or nodes[-1].op is not Op.LM_HEAD:
        raise ModelError(f"{family.architecture}: the trace does not end in lm_head")
    return Graph(
        architecture=family.architecture,
        hidden=int(hf_config.hidden_size),
        vocab=int(hf_config.vocab_size),
        layers=int(hf_config.num_hidden_layers),
        max_context=int(hf_config.max_position_embeddings),
        nodes=nodes,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _live(nodes: list[Node], last: str) -> set[str]:
    live = {last}
    for node in reversed(nodes):
        if node.name in live:
            live.update(node.inputs)
    return live


def _check_all_read(model: Any, family: Family, nodes: tuple[Node, ...]) -> None:
    """Every parameter and persistent buffer is read by an operator that the logits depend on."""
    read = {w.name for n in nodes for w in n.weights.values()}
    names = [n for n, _ in model.named_parameters()]
    persistent = set(model.state_dict())
    names += [n for n, _ in model.named_buffers() if n in persistent]
    lost = [n for n in names if n not in read]
    if lost:
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        raise ModelError(
            f"{family.architecture}: parameters that no traced operator reads: "
            f"{', '.join(lost[:4])}{more}; the installed transformers computes something else than "
            "PDScope knows for this family"
        )


def _val(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _same_shape(a: fx.Node, b: Any) -> bool:
    return _val(a).shape == _val(b).shape


def _function_name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _operator_name(path: str) -> str:
    """ "model.model.layers.3.mlp.gate" -> "layers.3.mlp.gate" """
    return re.sub(r"^(model\.)+", "", path)


def _layer_of(node: fx.Node) -> int | None:
    """fx records the stack of modules on every node, plain additions included."""
    stack = [
        str(node.target) if node.op == "call_module" else "",
        *node.meta.get("nn_module_stack", {}),
    ]
    found = re.findall(r"layers\.(\d+)", " ".join(stack))
    return int(found[-1]) if found else None
