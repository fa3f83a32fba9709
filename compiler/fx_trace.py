"""torch.fx trace of a transformers causal LM at the level of modules, on the meta device.

The tracer's proxies carry the meta tensor of the value they stand for, so that shapes are concrete
and the Python of transformers just runs. Modules that have a role (attention, gate, ...) are leaves
with a fixed output structure; everything else is traced through. What is not understood is left in
the trace for the lowering to refuse. May import torch, transformers, pdscope.models and
pdscope.errors.
"""

import contextlib
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from transformers import masking_utils

from pdscope.errors import ModelError
from pdscope.models.family import Family, Role

# Module the names of our mask leaves live in; the lowering recognises them by it.
MASK_MODULE = "pdscope_mask"

# Batch and length of the traced input; the lowering drops every shape that carries them.
BATCH, LENGTH = 1, 8


def role_of(module: nn.Module, name: str, family: Family) -> Role | None:
    """The role of a module, or None for one that is traced through."""
    if isinstance(module, nn.Embedding):
        return Role.EMBED
    if isinstance(module, nn.Linear) and name.split(".")[-1] == "lm_head":
        return Role.LM_HEAD
    return family.roles.get(type(module).__name__)


def _meta(value: Any) -> Any:
    return value.node.meta.get("val") if isinstance(value, MetaProxy) else value


class MetaProxy(fx.Proxy):
    """A proxy that knows the meta tensor (or the tuple of them) that it stands for."""

    @property
    def val(self) -> Any:
        return self.node.meta.get("val")

    @property
    def shape(self) -> Any:
        return self.val.shape

    @property
    def dtype(self) -> Any:
        return self.val.dtype

    @property
    def device(self) -> Any:
        return self.val.device

    @property
    def ndim(self) -> int:
        return int(self.val.ndim)

    def size(self, dim: int | None = None) -> Any:
        return self.val.shape if dim is None else self.val.shape[dim]

    def dim(self) -> int:
        return int(self.val.ndim)

    def __len__(self) -> int:
        return len(self.val)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self.val))])  # type: ignore[index]

    def __bool__(self) -> bool:
        if isinstance(self.val, torch.Tensor):
            raise ModelError(
                f"the model's code branches on the value of {self.node.name}; it cannot be traced"
            )
        return bool(self.val)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ModelError(f"the model's code writes into {self.node.name}; it cannot be traced")


def _in_place(fn: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: MetaProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", fn, (self, other), {})

    return method


# `x += y` changes every alias of x. Plain fx would record a new value: record the truth.
for _name in ("iadd", "isub", "imul", "itruediv"):
    setattr(MetaProxy, f"__{_name}__", _in_place(getattr(operator, _name)))


class LeafTracer(fx.Tracer):
    """Traces down to the modules that have a role in `family`."""

    def __init__(self, family: Family, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.family = family
        self.inputs = inputs
        self.busy = False  # running a function on meta tensors: record nothing

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if role_of(m, module_qualified_name, self.family) is not None:
            return True
        return not any(True for _ in m.children()) and type(m).__module__.startswith("torch.nn")

    def proxy(self, node: fx.Node) -> MetaProxy:
        return MetaProxy(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.busy:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.busy:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any | None = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        assert isinstance(proxy, MetaProxy)
        value = self._evaluate(kind, target, args, kwargs)
        if kind in ("call_function", "call_method") and value is not None and not _tensors(value):
            self.graph.erase_node(proxy.node)  # a size or a dtype: a constant, not a node
            return value
        proxy.node.meta["val"] = value
        return proxy

    def _evaluate(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The meta tensors that a node gives."""
        a: Any = fx.node.map_aggregate(args, _meta)
        k: Any = fx.node.map_aggregate(kwargs, _meta)
        was, self.busy = self.busy, True
        try:
            match kind:
                case "placeholder":
                    return self.inputs[target]
                case "get_attr":
                    return operator.attrgetter(target)(self.root)
                case "call_function":
                    return target(*a, **k)
                case "call_method":
                    return getattr(a[0], target)(*a[1:], **k)
                case "call_module":
                    return self._leaf_value(self.root.get_submodule(target), target, a, k)
                case _:
                    return None
        finally:
            self.busy = was

    def _leaf_value(self, m: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Output structure of a leaf; compiler/leaf_check.py proves that the real module has it."""
        x = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        match role_of(m, name, self.family):
            case Role.EMBED:
                return x.new_empty((*x.shape, m.embedding_dim), dtype=m.weight.dtype)
            case Role.LM_HEAD:
                return x.new_empty((*x.shape[:-1], m.out_features))
            case Role.ATTENTION:
                return (torch.empty_like(x), None)
            case Role.GATE:
                rows, top_k = x.numel() // x.shape[-1], int(m.top_k)
                return (
                    x.new_empty((rows, int(m.num_experts))),
                    x.new_empty((rows, top_k)),
                    x.new_empty((rows, top_k), dtype=torch.long),
                )
            case None:
                return m(*args, **kwargs)
            case _:
                return torch.empty_like(x)


def _tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_tensors(v) for v in value)
    return isinstance(value, torch.Tensor)


@contextlib.contextmanager
def _opaque_masks(model: nn.Module, tracer: LeafTracer) -> Iterator[None]:
    """Makes each create_*mask function one node, wherever a modeling file has imported it."""
    saved: list[tuple[types.ModuleType, str, Any]] = []

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        def leaf(*args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("config", args[0] if args else None)
            window = getattr(config, "sliding_window", None)

            def mask(*unused: Any, **tensors: Any) -> torch.Tensor:
                return torch.empty((BATCH, 1, LENGTH, LENGTH), device="meta")

            mask.__name__ = mask.__qualname__ = fn.__name__
            mask.__module__ = MASK_MODULE
            mask.window = window  # type: ignore[attr-defined]
            dynamic = {k: v for k, v in kwargs.items() if isinstance(v, MetaProxy)}
            extra = tuple(v for v in args if isinstance(v, MetaProxy))
            return tracer.create_proxy("call_function", mask, extra, dynamic)

        return leaf

    for name in {type(m).__module__ for m in model.modules()}:
        module = sys.modules[name]
        for key, fn in list(vars(module).items()):
            known = hasattr(masking_utils, key) and isinstance(fn, types.FunctionType)
            if known and key.startswith("create_") and "mask" in key:
                saved.append((module, key, fn))
                setattr(module, key, wrap(fn))
    try:
        yield
    finally:
        for module, key, fn in saved:
            setattr(module, key, fn)


class _Root(nn.Module):
    """Fixes the arguments, so that transformers' decorated forward can be traced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
        out = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, return_dict=True
        )
        return out.logits


def trace_model(model: nn.Module, family: Family) -> tuple[nn.Module, fx.Graph]:
    """The root module and its fx graph; targets are paths below it: "model.<parameter path>"."""
    model.eval()
    inputs = {
        "input_ids": torch.empty((BATCH, LENGTH), dtype=torch.long, device="meta"),
        "position_ids": torch.empty((BATCH, LENGTH), dtype=torch.long, device="meta"),
    }
    root, tracer = _Root(model), LeafTracer(family, inputs)
    try:
        with torch.no_grad(), _opaque_masks(model, tracer):
            return root, tracer.trace(root)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{family.architecture}: the installed transformers cannot be traced: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
