"""The predictors of a plan as a load reads them: phaseper.json says which one serves a layer and
phase, phaseper/layerNNN.safetensors has its numbers; here they become what pds_engine_set_net
takes.

compiler/phaseper/predictor_file.py writes the files. May import numpy and
pdscope.{errors,native,plan}.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pdscope.errors import PlanError
from pdscope.native import EngineHandle, ffi
from pdscope.plan import Plan

Array = NDArray[Any]

FORMAT = 1
JSON = "phaseper.json"
PHASES = ("prefill", "decode")  # PDS_NET_*
BLOCKS = ("routed", "previous", "previous_next")  # bits of pds_net_desc.blocks
CHOICES = ("phaseper", "cross_gate", "previous", "frequency", "transition")
_PANEL, _K_ALIGN = 16, 32
_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}
_REMEDY = "compile the plan again, or load it with predictor off"


@dataclass(frozen=True)
class Net:
    """A pds_net_desc in numpy: matrices of bf16 bits [outputs, inputs], not packed yet.

    first: [width + experts (+ width where deep), hidden], None: zeros; bias: fp32, of as many;
    features: [parts * experts, width + experts]; block [width, width] with block_bias where deep;
    out [experts, width] where there is a width.
    """

    hidden: int
    experts: int
    width: int
    blocks: tuple[str, ...]
    first: Array | None
    bias: Array
    features: Array
    block: Array | None = None
    block_bias: Array | None = None
    out: Array | None = None

    def set(self, handle: EngineHandle, layer: int, phase: str) -> None:
        """Hands it to the engine, which copies it. PlanError: it does not fit the plan."""
        c = ffi()
        keep: list[Array] = []

        def pointer(array: Array | None, dtype: Any) -> Any:
            if array is None or not array.size:
                return c.NULL
            keep.append(np.ascontiguousarray(array, dtype))
            return c.cast("void *", keep[-1].ctypes.data)

        def panels(matrix: Array | None) -> Any:
            return pointer(None if matrix is None else packed(matrix), np.uint32)

        desc = {
            "hidden": self.hidden,
            "experts": self.experts,
            "width": self.width,
            "deep": self.block is not None,
            "blocks": sum(1 << BLOCKS.index(name) for name in self.blocks),
            "in": panels(self.first),
            "bias": c.cast("float *", pointer(self.bias, np.float32)),
            "features": c.cast("uint16_t *", pointer(self.features, np.uint16)),
            "block": panels(self.block),
            "block_bias": c.cast("float *", pointer(self.block_bias, np.float32)),
            "out": panels(self.out),
        }
        given = c.new("pds_net_desc *", desc)
        lib = handle.library.lib
        status = lib.pds_engine_set_net(handle.pointer, layer, PHASES.index(phase), given)
        handle.library.check(status)


def packed(matrix: Array) -> Array:
    """bf16 bits [n, k] as panels of plan_desc.h: 32-bit words [panels, k / 2, 16]."""
    n, k = matrix.shape
    padded = np.zeros((-(-n // _PANEL) * _PANEL, -(-k // _K_ALIGN) * _K_ALIGN), np.uint16)
    padded[:n, :k] = matrix
    words = padded.view(np.uint32)
    return np.ascontiguousarray(words.reshape(-1, _PANEL, words.shape[1]).transpose(0, 2, 1))


def bf16_bits(values: Array) -> Array:
    """The nearest bf16 to finite fp32 values, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Chosen:
    """What serves a layer and phase. net: None: the next layer's gate, which the plan has."""

    layer: int
    phase: str
    name: str  # of CHOICES
    net: Net | None = field(repr=False)


def read_predictors(plan: Plan) -> list[Chosen] | None:
    """Every layer and phase of the plan's phaseper.json; None: it has none.

    Raises PlanError for a file that is missing, damaged, of another format or another model's.
    """
    if JSON not in plan.files and not (plan.path / JSON).exists():
        return None
    entries = [_Entry(plan, data) for data in _read_json(plan)["layers"]]
    seen: set[tuple[int, str]] = set()
    for entry in entries:
        if (key := (entry.layer, entry.phase)) in seen:
            raise PlanError(
                f"{plan.path / JSON}: layer {entry.layer} has two predictors for {entry.phase}, "
                f"expected one: {_REMEDY}"
            )
        seen.add(key)
    return [entry.chosen() for entry in entries]


def _read_json(plan: Plan) -> dict[str, Any]:
    path = plan.path / JSON
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: cannot be read ({error}): {_REMEDY}") from None
    if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
        raise PlanError(f"{path}: layers: missing, expected a list: {_REMEDY}")
    expected: dict[str, Any] = {"format_version": FORMAT}
    expected |= {name: plan.model[name] for name in ("hidden", "experts", "top_k")}
    for name, value in expected.items():
        if data.get(name) != value:
            raise PlanError(f"{path}: {name} is {data.get(name)!r}, expected {value}: {_REMEDY}")
    return data


class _Entry:
    """One layer and phase of phaseper.json, checked as it is read."""

    def __init__(self, plan: Plan, data: Any) -> None:
        self.path = plan.path / JSON
        self.hidden, self.experts = int(plan.model["hidden"]), int(plan.model["experts"])
        self.data: dict[str, Any] = data if isinstance(data, dict) else {}
        layer = self.data.get("layer")
        if type(layer) is not int or not 0 <= layer < plan.model["layers"]:
            self._fail("layer", layer, f"0 to {plan.model['layers'] - 1}")
        self.layer: int = layer
        self.phase = self._word(self.data, "phase", PHASES)
        self.name = self._word(self.data, "chosen", CHOICES)
        self.file = plan.path / f"phaseper/layer{self.layer:03d}.safetensors"

    def chosen(self) -> Chosen:
        makers = {
            "phaseper": self._net,
            "previous": self._previous,
            "frequency": self._frequency,
            "transition": self._transition,
        }
        net = makers[self.name]() if self.name in makers else None
        return Chosen(self.layer, self.phase, self.name, net)

    def _net(self) -> Net:
        about = self.data.get("net")
        if not isinstance(about, dict):
            self._fail("net", about, "what phaseper is")
        width, deep, names = (about.get(key) for key in ("width", "deep", "blocks"))
        if type(width) is not int or not 1 <= width <= 1024:
            self._fail("net.width", width, "1 to 1024")
        if not isinstance(deep, bool):
            self._fail("net.deep", deep, "true or false")
        if not isinstance(names, list) or names != [n for n in BLOCKS if n in names]:
            self._fail("net.blocks", names, f"of {', '.join(BLOCKS)}, in that order")
        first = width + self.experts
        shapes: dict[str, tuple[int, ...]] = {
            "in.weight": (first, self.hidden),
            "in.bias": (first,),
            "features.weight": (len(names) * self.experts, first),
            "out.weight": (self.experts, width),
        }
        if deep:
            shapes |= {
                "gate.weight": (width, self.hidden),
                "gate.bias": (width,),
                "block.weight": (width, width),
                "block.bias": (width,),
            }
        t = self._tensors(shapes)
        gate = ("gate.weight", "gate.bias") if deep else ()
        return Net(
            hidden=self.hidden,
            experts=self.experts,
            width=width,
            blocks=tuple(names),
            first=np.concatenate([t["in.weight"], *(t[n] for n in gate[:1])]),
            bias=np.concatenate([t["in.bias"], *(t[n] for n in gate[1:])]),
            features=t["features.weight"],
            block=t.get("block.weight"),
            block_bias=t.get("block.bias"),
            out=t["out.weight"],
        )

    # The rivals are nets without hidden units; what they rank by is left as it is.

    def _previous(self) -> Net:
        """The experts of the token before, by frequency; without one, frequency alone."""
        likely = self._tensors({"frequency": (self.experts,)})["frequency"]
        return self._linear(("previous_next",), bf16_bits(np.eye(self.experts)), likely)

    def _frequency(self) -> Net:
        likely = self._tensors({"frequency": (self.experts,)})["frequency"]
        return self._linear((), np.empty((0, self.experts)), likely)

    def _transition(self) -> Net:
        shape = self.experts, self.experts
        table = self._tensors({"transition": shape})["transition"]
        return self._linear(("routed",), bf16_bits(table), np.zeros(self.experts))

    def _linear(self, blocks: tuple[str, ...], features: Array, bias: Array) -> Net:
        return Net(self.hidden, self.experts, 0, blocks, None, bias, features)

    def _tensors(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
        """Of this phase: matrices of a net as bf16 bits, all else as float32."""
        tables = ("frequency", "transition")
        found = read_tensors(self.file, [f"{self.phase}.{name}" for name in shapes])
        for name, shape in shapes.items():
            array = found[f"{self.phase}.{name}"]
            kind = "f" if len(shape) == 1 or name in tables else "u"
            if array.shape != shape or array.dtype.kind != kind:
                what = {"f": "fp32", "u": "bf16"}
                raise PlanError(
                    f"{self.file}: tensor {self.phase}.{name} is {what[array.dtype.kind]} "
                    f"{array.shape}, expected {what[kind]} {shape}: {_REMEDY}"
                )
        return {name: found[f"{self.phase}.{name}"] for name in shapes}

    def _word(self, data: dict[str, Any], name: str, known: tuple[str, ...]) -> str:
        value = data.get(name)
        if value not in known:
            self._fail(name, value, ", ".join(known))
        return str(value)

    def _fail(self, name: str, value: object, expected: str) -> NoReturn:
        at = getattr(self, "layer", None)
        where = f"layer {at}: " if at is not None and name != "layer" else ""
        raise PlanError(
            f"{self.path}: layers: {where}{name} is {value!r}, expected {expected}: {_REMEDY}"
        )


def read_tensors(path: Path, names: list[str]) -> dict[str, Array]:
    """Tensors of a safetensors file, fp32 or bf16 as its bits."""
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        return {name: _tensor(header[name], memoryview(data)[8 + size :]) for name in names}
    except KeyError as error:
        raise PlanError(f"{path}: has no tensor {error.args[0]}: {_REMEDY}") from None
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(f"{path}: cannot be read ({error}): {_REMEDY}") from None


def _tensor(entry: dict[str, Any], payload: memoryview) -> Array:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"a tensor of {entry['dtype']}")
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not 0 <= begin <= end <= len(payload) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor's offsets lie outside the file, or do not fit its shape")
    flat: Array = np.frombuffer(payload[begin:end], dtype)
    return flat.reshape(shape)
