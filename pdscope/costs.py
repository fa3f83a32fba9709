"""What the parts of a model cost on a machine, in nanoseconds: costs.json of a plan, and the
numbers that schedules are decided by.

All times are integers: decisions made of them in Python and in C are the same. docs/costs-format.md
describes the file; compiler/passes/profile_costs.py measures one, compiler/hardware.py computes one
from a hardware description. May import pdscope.{errors,schema} and the standard library.
"""

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pdscope.errors import PlanError
from pdscope.schema import first_problem

if TYPE_CHECKING:
    from pdscope.plan import Plan

JSON = "costs.json"
FORMAT = 1
KNOTS = 16  # of a curve; PDS_COST_KNOTS of pdscope.h
MAX_NS = 1 << 40  # 18 minutes; sums and products of times stay inside 64 bits
MAX_TOKENS = 1 << 22

_REMEDY = "measure again with pdscope-compile --costs auto, or give another file"


@dataclass(frozen=True)
class Curve:
    """Nanoseconds by tokens (rows): linear between knots, the first knot's value below it, the last
    two knots' slope beyond. No knots: nothing of that kind is ever run.

    tokens: strictly ascending, at least 1; ns: ascending, equal ones allowed.
    Raises PlanError for anything else, and for more than KNOTS of them.
    """

    tokens: tuple[int, ...] = ()
    ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise PlanError(f"costs: {problem}: {_REMEDY}")

    def _problem(self) -> str | None:
        if len(self.tokens) != len(self.ns):
            return (
                f"ns: {len(self.ns)} numbers, expected {len(self.tokens)}, one for each of tokens"
            )
        if len(self.tokens) > KNOTS:
            return f"tokens: {len(self.tokens)} knots, expected at most {KNOTS}"
        for name, values, low, high in (
            ("tokens", self.tokens, 1, MAX_TOKENS),
            ("ns", self.ns, 0, MAX_NS),
        ):
            for value in values:
                if not low <= value < high:
                    return f"{name}: {value}, expected {low} to {high - 1}"
        for a, b in pairwise(self.tokens):
            if a >= b:
                return f"tokens: {b} behind {a}, expected a greater number"
        for (a, b), at in zip(pairwise(self.ns), self.tokens[1:], strict=True):
            if a > b:
                return f"ns: {b} at {at} tokens behind {a}, expected as much or more"
        return None

    def at(self, tokens: int) -> int:
        """Nanoseconds, rounded down: the arithmetic of pds_cost_at."""
        if not self.tokens:
            return 0
        if tokens <= self.tokens[0] or len(self.tokens) == 1:
            return self.ns[0]
        k = 1
        while k < len(self.tokens) - 1 and tokens > self.tokens[k]:
            k += 1
        x, y = self.tokens[k - 1], self.ns[k - 1]
        return y + (self.ns[k] - y) * (tokens - x) // (self.tokens[k] - x)


NONE = Curve()


@dataclass(frozen=True)
class Costs:
    """What a decision is made of (pds_costs of pdscope.h): all in ns."""

    io_start: int  # alpha: before the first byte of an idle link moves
    io_expert: int  # t_io: one expert over the link, while the CPU computes
    cpu_start: int  # c0: of one parallel job of experts on the CPU, whatever is in it
    gpu_start: int  # of one submission of experts on the GPU
    predict: int  # the predictor's forward
    context_row: int  # attention: for each (row, 1024 tokens of context)
    cpu_expert: Curve  # what one expert of so many tokens adds to the CPU's job
    gpu_expert: Curve  # and to a submission on the GPU
    attention: Curve  # norm, attention, norm, gate of a layer by rows of the step, at context 0
    shared: Curve  # shared expert, by rows; no knots: there is none
    context_row_prefill: int = 0  # context_row in prefill, whose rows read their context together

    def __post_init__(self) -> None:
        names = ("io_start", "io_expert", "cpu_start", "gpu_start", "predict", "context_row")
        for name in (*names, "context_row_prefill"):
            value = getattr(self, name)
            if not 0 <= value < MAX_NS:
                raise PlanError(f"costs: {name}: {value}, expected 0 to {MAX_NS - 1} ns: {_REMEDY}")


# --- costs.json ---


@dataclass(frozen=True)
class Bar:
    """Error bar: of the samples of one measurement, ns."""

    min: int
    median: int
    max: int


@dataclass(frozen=True)
class Figure:
    ns: int
    bar: Bar | None = None


@dataclass(frozen=True)
class Fitted:
    """`curve` was fitted to `points`: tokens, and what was measured there."""

    curve: Curve
    points: tuple[tuple[int, Bar], ...] = ()


@dataclass(frozen=True)
class Device:
    """The CPU or the GPU: the fields of Costs that it has."""

    start: Figure
    expert: Fitted
    attention: Fitted
    context_row: Figure  # of one row
    context_row_prefill: Figure  # of many rows of one sequence, which read its context together
    shared: Fitted | None = None
    predict: Figure | None = None
    predict_row: Figure | None = None  # what each further row adds that predicts; None: nothing
    expert_busy: Fitted | None = None  # of the CPU, while the link moves experts; None: the same


@dataclass(frozen=True)
class Link:
    start: Figure
    expert: Figure  # while the CPU computes
    expert_alone: Figure


@dataclass(frozen=True)
class Cache:
    """Prefetches to the CPU's last-level cache: at most `bytes` of a layer's experts."""

    bytes: int
    fill: Figure  # from memory to the cache
    saves: Figure  # what experts that read all of them there save


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    threads: int
    isa: str
    gpu: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class AttentionKey:
    kind: str
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    nope_dim: int
    q_lora: int
    kv_lora: int
    window: int


@dataclass(frozen=True)
class ModelKey:
    """What of a model decides its costs. Models of one key share a table."""

    hidden: int
    inter: int
    shared_inter: int  # 0: no shared expert
    experts: int
    top_k: int
    dtype: str
    group: int  # weights that share a scale; 0: none do
    attention: AttentionKey


@dataclass(frozen=True)
class CostTable:
    """costs.json. `source`: in words, where the numbers come from; gpu, link, cache: None:
    unknown."""

    source: str
    machine: Machine
    model: ModelKey
    cpu: Device
    gpu: Device | None = None
    link: Link | None = None
    cache: Cache | None = None

    def costs(self, device: str = "gpu") -> Costs:
        """`device`: "cpu" or "gpu": where attention, shared expert and predictor run; on "cpu",
        nothing runs on a GPU.

        Raises PlanError if the table does not know the GPU or the link.
        """
        side = self.cpu
        if device == "gpu":
            for name in ("gpu", "link"):
                if getattr(self, name) is None:
                    raise PlanError(
                        f"{JSON}: {name}: absent, expected its times, as the plan has experts on a "
                        f"GPU: give --costs auto,NAME with a hardware description's name"
                    )
            assert self.gpu is not None
            side = self.gpu
        link, gpu = (self.link, self.gpu) if device == "gpu" else (None, None)
        return Costs(
            io_start=link.start.ns if link else 0,
            io_expert=link.expert.ns if link else 0,
            cpu_start=self.cpu.start.ns,
            gpu_start=gpu.start.ns if gpu else 0,
            predict=side.predict.ns if side.predict else 0,
            context_row=side.context_row.ns,
            context_row_prefill=side.context_row_prefill.ns,
            cpu_expert=self.cpu.expert.curve,
            gpu_expert=gpu.expert.curve if gpu else NONE,
            attention=side.attention.curve,
            shared=side.shared.curve if side.shared else NONE,
        )

    def check_model(self, model: ModelKey, where: str) -> None:
        """PlanError, naming the first dimension that differs, unless it is a table of `model`."""
        mine, other = (_flat(asdict(key)) for key in (self.model, model))
        for name, value in other.items():
            if mine[name] != value:
                raise PlanError(
                    f"{where}: model: {name} is {mine[name]}, expected {value}: the costs are "
                    f"another model's: give --costs auto, or a table of this model"
                )

    def text(self) -> str:
        """costs.json; the same table gives the same text."""
        data: dict[str, Any] = {"kind": "costs", "format_version": FORMAT, "source": self.source}
        data["machine"] = _present(asdict(self.machine))
        data["model"] = asdict(self.model)
        data["cpu"] = _device_data(self.cpu)
        if self.gpu:
            data["gpu"] = _device_data(self.gpu)
        if self.link:
            data["link"] = {name: _figure_data(f) for name, f in vars(self.link).items()}
        if self.cache:
            fill, saves = _figure_data(self.cache.fill), _figure_data(self.cache.saves)
            data["cache"] = {"bytes": self.cache.bytes, "fill": fill, "saves": saves}
        return _json(data) + "\n"

    @classmethod
    def parse(cls, text: str, where: str) -> Self:
        """Raises PlanError naming the field, behind `where`, what was expected and the remedy."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{where}: not valid JSON ({error}): {_REMEDY}") from None
        version = data.get("format_version") if isinstance(data, dict) else None
        if isinstance(data, dict) and data.get("kind") != "costs":
            raise PlanError(
                f"{where}: kind: {data.get('kind')!r}, expected 'costs', a cost table: {_REMEDY}"
            )
        if version is not None and version != FORMAT:
            raise PlanError(
                f"{where}: format_version: {version!r}, expected {FORMAT}, which this PDScope "
                f"reads: {_REMEDY}"
            )
        if problem := first_problem(data, "costs_schema.json", where):
            raise PlanError(f"{problem}: {_REMEDY}")
        model = dict(data["model"])
        return cls(
            source=data["source"],
            machine=Machine(**data["machine"]),
            model=ModelKey(**model | {"attention": AttentionKey(**model["attention"])}),
            cpu=_device(data["cpu"], f"{where}: cpu"),
            gpu=_device(data["gpu"], f"{where}: gpu") if "gpu" in data else None,
            link=_link(data["link"], f"{where}: link") if "link" in data else None,
            cache=_cache(data["cache"], f"{where}: cache") if "cache" in data else None,
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """A costs.json. Raises PlanError naming file, field, what was expected and the remedy."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"{path}: cannot be read ({error.strerror}): {_REMEDY}") from None
        except UnicodeDecodeError as error:
            raise PlanError(f"{path}: not valid UTF-8 ({error}): {_REMEDY}") from None
        return cls.parse(text, str(path))

    @classmethod
    def of_plan(cls, plan: "Plan") -> Self | None:
        """A plan's costs.json; None: it was compiled without. Raises PlanError."""
        return cls.read(plan.path / JSON) if JSON in plan.files else None


def _json(value: Any, indent: int = 0) -> str:
    """Innermost objects and lists of numbers on one line each."""
    many = isinstance(value, dict | list | tuple)
    items = value.values() if isinstance(value, dict) else value if many else ()
    if not any(isinstance(item, dict | list | tuple) for item in items):
        return json.dumps(value, ensure_ascii=False)
    inner = [_json(item, indent + 1) for item in items]
    begin, end = "[]"
    if isinstance(value, dict):
        begin, end = "{}"
        names = (json.dumps(name) for name in value)
        inner = [f"{name}: {text}" for name, text in zip(names, inner, strict=True)]
    lines = ",\n".join(" " * (indent + 1) + text for text in inner)
    return f"{begin}\n{lines}\n{' ' * indent}{end}"


def _flat(data: dict[str, Any]) -> dict[str, Any]:
    """One level: attention.heads beside hidden."""
    inner = {f"attention.{name}": value for name, value in data["attention"].items()}
    return {name: value for name, value in data.items() if name != "attention"} | inner


def _present(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None}


def _figure_data(figure: Figure) -> dict[str, int]:
    return {"ns": figure.ns, **({} if figure.bar is None else vars(figure.bar))}


def _device_data(device: Device) -> dict[str, Any]:
    def data(part: Figure | Fitted) -> dict[str, Any]:
        if isinstance(part, Figure):
            return _figure_data(part)
        points = [{"tokens": tokens, **vars(bar)} for tokens, bar in part.points]
        return {"tokens": part.curve.tokens, "ns": part.curve.ns, "points": points}

    return {name: data(part) for name, part in _present(vars(device)).items()}


def _bar(data: dict[str, int], where: str) -> Bar | None:
    names = ("min", "median", "max")
    if not data.keys() & set(names):
        return None
    for name in names:
        if name not in data:
            raise PlanError(
                f"{where}: {name}: missing, expected all of {', '.join(names)}: {_REMEDY}"
            )
    bar = Bar(*(data[name] for name in names))
    if not bar.min <= bar.median <= bar.max < MAX_NS:
        raise PlanError(
            f"{where}: min, median, max: {bar.min}, {bar.median}, {bar.max}, expected ascending "
            f"numbers below {MAX_NS}: {_REMEDY}"
        )
    return bar


def _figure(data: dict[str, int], where: str) -> Figure:
    if data["ns"] >= MAX_NS:
        raise PlanError(f"{where}: ns: {data['ns']}, expected 0 to {MAX_NS - 1}: {_REMEDY}")
    return Figure(data["ns"], _bar(data, where))


def _fitted(data: dict[str, Any], where: str) -> Fitted:
    try:
        curve = Curve(tuple(data["tokens"]), tuple(data["ns"]))
    except PlanError as error:
        raise PlanError(f"{where}: {str(error).removeprefix('costs: ')}") from None
    points = []
    for index, point in enumerate(data["points"]):
        bar = _bar(point, f"{where}: points[{index}]")
        assert bar is not None  # the schema requires it
        points.append((int(point["tokens"]), bar))
    return Fitted(curve, tuple(points))


def _device(data: dict[str, Any], where: str) -> Device:
    def figure(name: str) -> Figure:
        return _figure(data[name], f"{where}: {name}")

    def fitted(name: str) -> Fitted:
        return _fitted(data[name], f"{where}: {name}")

    return Device(
        start=figure("start"),
        expert=fitted("expert"),
        attention=fitted("attention"),
        context_row=figure("context_row"),
        context_row_prefill=figure("context_row_prefill"),
        shared=fitted("shared") if "shared" in data else None,
        predict=figure("predict") if "predict" in data else None,
        predict_row=figure("predict_row") if "predict_row" in data else None,
        expert_busy=fitted("expert_busy") if "expert_busy" in data else None,
    )


def _cache(data: dict[str, Any], where: str) -> Cache:
    fill, saves = (_figure(data[name], f"{where}: {name}") for name in ("fill", "saves"))
    return Cache(data["bytes"], fill, saves)


def _link(data: dict[str, Any], where: str) -> Link:
    return Link(**{name: _figure(part, f"{where}: {name}") for name, part in data.items()})
