"""From a hardware description (hardware/*.json, or a file of the user's) to a model's cost table.

Rooflines: what a part costs is the longer of its bytes at the memory's rate and its arithmetic at
the processor's, and overheads. May import pdscope.{costs,errors,hardware,schema} and
pdscope.compiler.costs.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pdscope import hardware
from pdscope.compiler.costs import (
    MAX_NS,
    CostTable,
    Curve,
    Device,
    Figure,
    Fitted,
    Link,
    Machine,
    ModelKey,
    expert_bytes,
    expert_flops,
)
from pdscope.costs import MAX_TOKENS, Cache
from pdscope.errors import InputError
from pdscope.schema import first_problem

FORMAT = 1
LLC_SHARE, LLC_MOST = 4, 16 << 20  # PDS_LLC_SHARE, PDS_LLC_MOST of runtime_c/src/llc.h
_REMEDY = "correct the description (docs/costs-format.md)"
_GRID = tuple(1 << i for i in range(13))  # 1 to 4096
_S = 10**9  # nanoseconds in a second


@dataclass(frozen=True)
class Hardware:
    """A machine's description, checked. `name`: what it was asked for by."""

    name: str
    data: dict[str, Any]

    @classmethod
    def read(cls, name: str, path: Path) -> Self:
        """Raises InputError naming file, field and what was expected."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}): {_REMEDY}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not valid JSON ({error}): {_REMEDY}") from None
        return cls.of(name, data, str(path))

    @classmethod
    def of(cls, name: str, data: Any, where: str) -> Self:
        """The same of JSON that was read."""
        if problem := first_problem(data, "hardware_schema.json", where):
            raise InputError(f"{problem}: {_REMEDY}")
        return cls(name, data)

    @classmethod
    def shipped(cls, name: str) -> Self:
        """One of pdscope.hardware.names(); InputError for another name."""
        if name not in hardware.names():
            raise InputError(
                f"hardware: no description '{name}'; expected one of {', '.join(hardware.names())}"
            )
        return cls.read(name, hardware.file(name))

    @property
    def gpu_memory(self) -> int:
        """Bytes."""
        return _value(self.data["gpu"]["memory_bytes"])

    def table(self, model: ModelKey) -> CostTable:
        """The costs of a model of these dimensions; times are MAX_NS - 1 at most."""
        cpu, gpu, link = (self.data[name] for name in ("cpu", "gpu", "link"))
        return CostTable(
            source=f"hardware description {self.name}",
            machine=Machine(
                cpu["name"], cpu["cores"], cpu["cores"], cpu["isa"], gpu["name"], link["name"]
            ),
            model=model,
            cpu=self._cpu(model),
            gpu=self._gpu(model),
            link=self._link(model),
            cache=self._cache(),
        )

    def _cache(self) -> Cache | None:
        """The runtime's budget: a quarter of the last-level cache, 16 MiB at most."""
        cpu = self.data["cpu"]
        if "cache_bytes" not in cpu:
            return None
        size = min(_value(cpu["cache_bytes"]) // LLC_SHARE, LLC_MOST)
        fill = size * _S // _value(cpu["bytes_per_s"])
        reads = size * _S // _value(cpu["cache_bytes_per_s"])
        return Cache(size, _figure(fill), _figure(max(0, fill - reads)))

    def _cpu(self, model: ModelKey) -> Device:
        cpu = self.data["cpu"]
        line = _Roofline(_value(cpu["bytes_per_s"]), _rate(cpu["flops"], model))
        start, each = _value(cpu["start_ns"]), _value(cpu["expert_ns"])
        work = _Work(model)
        return Device(
            start=_figure(start),
            expert=line.curve(work.expert_bytes, work.expert_flops, each),
            attention=line.curve(work.attention_bytes, work.attention_flops, start + each),
            context_row=_figure(line.ns(work.context_bytes, work.context_flops)),
            context_row_prefill=_figure(line.ns(0, work.context_flops)),
            shared=line.curve(work.shared_bytes, work.shared_flops, each)
            if model.shared_inter
            else None,
            predict=_figure(start + line.ns(4 * model.hidden * model.experts, 0)),
        )

    def _gpu(self, model: ModelKey) -> Device:
        """A submission's kernels run while the next is being launched, so its start hides behind
        long ones: it is what one expert of one token takes beyond the roofline,
        max(floor, roofline) + launch - roofline."""
        gpu = self.data["gpu"]
        line = _Roofline(_value(gpu["bytes_per_s"]), _rate(gpu["flops"], model))
        floor, launch = _value(gpu["floor_ns"]), _value(gpu["launch_ns"])
        work = _Work(model)
        one = line.ns(work.expert_bytes, work.expert_flops)
        return Device(
            start=_figure(max(floor, one) + launch - one),
            expert=line.curve(work.expert_bytes, work.expert_flops, 0),
            attention=line.curve(
                work.attention_bytes,
                work.attention_flops,
                launch + _value(self.data["link"]["start_ns"]),
                floor,
                (work.routed_bytes, _value(self.data["link"]["bytes_per_s"])),
            ),
            context_row=_figure(line.ns(work.context_bytes, work.context_flops)),
            context_row_prefill=_figure(line.ns(0, work.context_flops)),
            shared=line.curve(work.shared_bytes, work.shared_flops, 0)
            if model.shared_inter
            else None,
            predict=_figure(_value(gpu["predict_ns"])),
        )

    def _link(self, model: ModelKey) -> Link:
        link, size = self.data["link"], expert_bytes(model)

        def expert(rate: str, each: str) -> Figure:
            return _figure(size * _S // _value(link[rate]) + _value(link[each]))

        alone = "alone_" if "alone_bytes_per_s" in link and "alone_expert_ns" in link else ""
        return Link(
            start=_figure(_value(link["start_ns"])),
            expert=expert("bytes_per_s", "expert_ns"),
            expert_alone=expert(f"{alone}bytes_per_s", f"{alone}expert_ns"),
        )


def _figure(ns: int) -> Figure:
    return Figure(min(ns, MAX_NS - 1))


def _value(figure: dict[str, Any]) -> int:
    return int(figure["value"])


def _rate(flops: dict[str, Any], model: ModelKey) -> int:
    """Of the arithmetic that a plan of this dtype uses: int4 is unpacked to int8."""
    return _value(flops[{"int4": "int8"}.get(model.dtype, model.dtype)])


@dataclass(frozen=True)
class _Roofline:
    bytes_per_s: int
    flops: int

    def ns(self, size: int, operations: int) -> int:
        return max(size * _S // self.bytes_per_s, operations * _S // self.flops)

    def curve(
        self,
        size: int,
        operations: int,
        more: int,
        floor: int = 0,
        copied: tuple[int, int] = (0, 1),
    ) -> Fitted:
        """By tokens, each of `operations`; max(floor, roofline) + more, and what a token copies:
        its bytes, at so many a second. The corner is a knot."""
        bytes_each, rate = copied
        corner = max(size * self.flops // self.bytes_per_s, floor * self.flops // _S)
        corner //= max(1, operations)
        grid = [*_GRID, *(t for t in (corner, corner + 1) if 1 <= t < MAX_TOKENS)]
        tokens = tuple(sorted(set(grid)))  # KNOTS at most
        ns = tuple(
            max(floor, self.ns(size, t * operations)) + more + t * bytes_each * _S // rate
            for t in tokens
        )
        return Fitted(Curve(tokens, tuple(min(value, MAX_NS - 1) for value in ns)))


class _Work:
    """Bytes of weights and operations a token of a layer's parts."""

    def __init__(self, model: ModelKey) -> None:
        element = {"fp32": 4, "bf16": 2}.get(model.dtype, 1)
        cached = 4 if model.dtype == "fp32" else 2
        a, hidden = model.attention, model.hidden
        self.expert_bytes, self.expert_flops = expert_bytes(model), expert_flops(model)
        self.shared_bytes = self.expert_bytes * model.shared_inter // model.inter
        self.shared_flops = self.expert_flops * model.shared_inter // model.inter
        if a.kind == "mla":
            rope = a.qk_dim - a.nope_dim
            query = a.q_lora * (hidden + a.heads * a.qk_dim) if a.q_lora else 0
            query = query or hidden * a.heads * a.qk_dim
            weights = query + hidden * (a.kv_lora + rope)
            weights += a.heads * a.kv_lora * (a.nope_dim + a.v_dim)
            per_token, per_pair = a.kv_lora + rope, 2 * a.heads * (2 * a.kv_lora + rope)
        else:
            weights = hidden * (a.heads * a.qk_dim + a.kv_heads * (a.qk_dim + a.v_dim))
            per_token = a.kv_heads * (a.qk_dim + a.v_dim)
            per_pair = 2 * a.heads * (a.qk_dim + a.v_dim)
        weights += hidden * a.heads * a.v_dim
        gate = hidden * model.experts
        self.attention_bytes = weights * element + 4 * gate
        self.attention_flops = 2 * (weights + gate)
        # Behind the gate, to the host: routes, rows of experts, and normed ones to predict from.
        self.routed_bytes = 8 * model.top_k + (cached + 4) * hidden
        self.context_bytes = 1024 * per_token * cached
        self.context_flops = 1024 * per_pair
