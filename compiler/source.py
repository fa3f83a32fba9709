"""What is compiled, and how: the model's files and the caller's options.

May import pdscope.{arguments,dummy_predictor,errors}, pdscope.ir and
pdscope.compiler.{checkpoint,cost_source,gpu_arch,input_file,trace,passes}.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pdscope.arguments import byte_count, flag, index, model_there, path, text
from pdscope.compiler.checkpoint import (
    Checkpoint,
    DummyWeights,
    Weights,
    map_parameters,
)
from pdscope.compiler.cost_source import CostSource
from pdscope.compiler.gpu_arch import GpuArch
from pdscope.compiler.input_file import check_file
from pdscope.compiler.passes.pack_weights import WeightReader
from pdscope.compiler.passes.plan_gpu import POLICIES, RESERVE
from pdscope.compiler.passes.tokenizer_files import COPIED, read_json
from pdscope.compiler.trace import TracedModel, load_model
from pdscope.dummy_predictor import DummyPredictor
from pdscope.errors import InputError
from pdscope.ir.graph import Graph
from pdscope.plan_hash import DUMMY_WEIGHTS

DTYPES = ("auto", "fp32", "bf16", "int8", "int4")
LOAD_FORMATS = ("auto", "dummy")
SWITCH = ("on", "off")
PREDICTORS = ("auto", "off")
DEVICES = ("auto", "cpu", "cuda")


class Progress(Protocol):
    """What a caller sees of a long compile."""

    def start(self, what: str, total: int, unit: str = "bytes") -> None:
        """A stage of `total` bytes, or "tokens", "rows", ..., begins; 0: nobody knows how many."""

    def advance(self, amount: int) -> None: ...


class Silent:
    def start(self, what: str, total: int, unit: str = "bytes") -> None:
        pass

    def advance(self, amount: int) -> None:
        pass


@dataclass(frozen=True)
class Options:
    """How to compile; see `pdscope-compile --help` for each."""

    dtype: str = "auto"
    load_format: str = "auto"
    no_weights: bool = False  # dummy ones are made up when the plan is loaded
    max_context: int | None = None
    max_rows: int = 512
    target: str = "native"
    check_weights: bool = False
    cache_prefetch: str = "on"
    calibration: str | Path | None = None
    trace_records: int | None = None
    predictor: str | None = None  # None: auto with a calibration, else off
    predictor_budget: int | str | None = None  # bytes a layer, or e.g. "4.2MB"
    predictor_device: str = "auto"
    dummy_predictor: str | None = None  # accuracy:P, for dummy weights
    costs: str | Path | None = None  # what CostSource.parse reads
    gpu_mem: int | str | None = None  # bytes, or e.g. "24GiB"; None: a plan for the CPU alone
    gpu_reserve: int | str = RESERVE  # of them, the driver's own
    policy: str = "adaptsched"
    gpu_arch: str | None = None  # what GpuArch.parse reads; None: auto with gpu_mem

    @property
    def cost_source(self) -> CostSource:
        """Where the plan's costs come from. Raises InputError."""
        return CostSource.parse(None if self.costs is None else str(path("costs", self.costs)))

    @property
    def kernels(self) -> GpuArch:
        """What GPU kernels are compiled for. Raises InputError."""
        return GpuArch.parse("auto" if self.gpu_arch is None else text("gpu_arch", self.gpu_arch))

    @property
    def cache_predictor(self) -> str:
        """What predicts experts of the next layer where no net does: for prefetches into the CPU's
        cache and to a GPU."""
        return "cross_gate" if self.cache_prefetch == "on" or self.gpu_mem else "none"

    @property
    def predicts(self) -> bool:
        """Whether a predictor is wanted."""
        return (self.predictor or ("off" if self.calibration is None else "auto")) == "auto"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("load_format", self.load_format, LOAD_FORMATS),
            ("cache_prefetch", self.cache_prefetch, SWITCH),
            ("predictor", "off" if self.predictor is None else self.predictor, PREDICTORS),
            ("predictor_device", self.predictor_device, DEVICES),
        ):
            if not isinstance(value, str) or value not in known:
                raise InputError(
                    f"{name}: '{value}' is unknown; expected one of {', '.join(known)}"
                )
        # Of numpy's integers and booleans JSON knows nothing.
        if self.max_context is not None:
            object.__setattr__(self, "max_context", index("max_context", self.max_context))
        object.__setattr__(self, "max_rows", index("max_rows", self.max_rows))
        object.__setattr__(self, "check_weights", flag("check_weights", self.check_weights))
        text("target", self.target)
        if self.max_context is not None and self.max_context < 1:
            raise InputError(f"max_context: expected at least 1, got {self.max_context}")
        if not 1 <= self.max_rows <= 65536:
            raise InputError(f"max_rows: expected 1 to 65536, got {self.max_rows}")
        _ = self.cost_source  # its faults come to light here
        self._check_prediction()
        self._check_dummy()
        self._check_no_weights()
        self._check_gpu()

    def _check_dummy(self) -> None:
        if self.dummy_predictor is None:
            return
        DummyPredictor.parse(text("dummy_predictor", self.dummy_predictor))
        given = f"dummy_predictor: {self.dummy_predictor} is given, but"
        if self.load_format != "dummy":
            raise InputError(
                f"{given} the weights are real: train predictors with --calibration FILE, or give "
                "--load-format dummy"
            )
        if self.cache_prefetch == "off":
            raise InputError(f"{given} cache_prefetch is off, so no program predicts")
        if self.predicts:
            raise InputError(f"{given} so are predictors to train: leave one of them out")

    def _check_no_weights(self) -> None:
        object.__setattr__(self, "no_weights", flag("no_weights", self.no_weights))
        if not self.no_weights:
            return
        if self.load_format != "dummy":
            raise InputError("no_weights: a plan needs its weights, unless load_format is dummy")
        if self.predicts:
            raise InputError(
                "no_weights: predictors are trained on a run of the weights: leave one of them out"
            )

    def _check_gpu(self) -> None:
        object.__setattr__(self, "gpu_reserve", byte_count("gpu_reserve", self.gpu_reserve))
        if self.policy not in POLICIES:
            raise InputError(f"policy: expected one of {', '.join(POLICIES)}, got '{self.policy}'")
        if self.gpu_mem is None:
            if self.policy != "adaptsched":
                raise InputError(f"policy: {self.policy} places experts on a GPU: give --gpu-mem")
            if self.gpu_arch is not None:
                raise InputError(f"gpu_arch: {self.gpu_arch} is of a GPU: give --gpu-mem")
            return
        _ = self.kernels  # its faults come to light here
        object.__setattr__(self, "gpu_mem", byte_count("gpu_mem", self.gpu_mem))
        if not self.cost_source.wanted:
            raise InputError(
                "gpu_mem: a GPU plan is decided by what the GPU and its link cost: give --costs, "
                "e.g. auto,NAME with the name of a shipped hardware description"
            )

    def _check_prediction(self) -> None:
        if self.trace_records is not None:
            object.__setattr__(self, "trace_records", index("trace_records", self.trace_records))
            if not 1 <= self.trace_records < 2**31:
                raise InputError(
                    f"trace_records: expected 1 to {2**31 - 1}, got {self.trace_records}"
                )
            self._check_predicts("trace_records", f"{self.trace_records} rows are")
        if self.predictor_budget is not None:
            budget = byte_count("predictor_budget", self.predictor_budget)
            object.__setattr__(self, "predictor_budget", budget)
            if budget < 1:
                raise InputError(f"predictor_budget: expected at least 1 byte, got {budget}")
            self._check_predicts("predictor_budget", f"{budget} bytes are")
        if self.predictor_device != "auto":
            self._check_predicts("predictor_device", f"{self.predictor_device} is")
        if self.calibration is None:
            return
        file = path("calibration", self.calibration)
        object.__setattr__(self, "calibration", file)
        if self.predictor == "off":
            raise InputError(
                f"calibration: {file} is given, but predictor is 'off', which uses none: leave one "
                "of them out"
            )
        if not file.is_file():
            what = "is no file" if file.exists() else "no such file"
            raise InputError(
                f"calibration: {file}: {what}; expected a text, or jsonl with text or messages"
            )

    def _check_predicts(self, name: str, what: str) -> None:
        if not self.predicts:
            raise InputError(
                f"{name}: {what} wanted, but no predictor: give a --calibration, or --predictor "
                "auto, or leave it out"
            )


@dataclass
class Model:
    """The input: a directory with config.json and weights, or a config.json alone for dummy
    weights."""

    path: Path
    options: Options
    progress: Progress
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        model_there(self.path)
        self.directory = self.path if self.path.is_dir() else self.path.parent
        self.config_file = self.path / "config.json" if self.path.is_dir() else self.path
        for file in (self.config_file, *(self.directory / name for name in COPIED)):
            check_file(file)
        if not self.config_file.is_file():
            raise InputError(
                f"{self.path}: has no config.json; expected a Hugging Face model directory"
            )
        self.dummy = self.options.load_format == "dummy"
        if self.path.is_file() and not self.dummy:
            raise InputError(
                f"{self.path}: is a file; expected a model directory (or, for its "
                'config.json alone, --load-format dummy: load_format="dummy")'
            )
        self.checkpoint = None if self.dummy else Checkpoint.open(self.directory)
        self._traced: TracedModel | None = None

    @property
    def config(self) -> dict[str, Any]:
        return read_json(self.config_file)

    @property
    def traced(self) -> TracedModel:
        """The meta model and its graph; loads transformers on first use."""
        if self._traced is None:
            self._traced = load_model(self.path)
        return self._traced

    def dtype(self, graph: Graph) -> str:
        """The plan's dtype; `auto` keeps what the checkpoint holds (fp16 becomes fp32: bf16 would
        round it)."""
        if self.options.dtype != "auto":
            return self.options.dtype
        held = graph.dtype if self.checkpoint is None else self.checkpoint.main_dtype
        if held == "bfloat16":
            return "bf16"
        if held != "float32":
            self.notes.append(f"{held} weights are kept exactly, as fp32; --dtype bf16 halves them")
        return "fp32"

    def weights_sha256(self) -> str:
        if self.checkpoint is None:
            return DUMMY_WEIGHTS
        self.progress.start("hash weights", self.checkpoint.total_bytes)
        seen = 0

        def report(done: int, _: int) -> None:
            nonlocal seen
            self.progress.advance(done - seen)
            seen = done

        return self.checkpoint.content_hash(report)

    def reader(self) -> WeightReader:
        meta = self.traced.meta_model
        if self.checkpoint is None:
            return DummyWeights(meta, "float32" if self.options.dtype == "fp32" else "bfloat16")
        return Weights(self.checkpoint, map_parameters(meta, self.checkpoint))
