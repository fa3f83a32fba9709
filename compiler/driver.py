"""The compiler's pipeline: from a model directory to a plan directory, as one list of passes.

May import every room but pdscope.cli and pdscope.engine.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pdscope
from pdscope.compiler import target as targets
from pdscope.compiler.checkpoint import (
    Checkpoint,
    DummyWeights,
    Weights,
    check_link,
    map_parameters,
)
from pdscope.compiler.lowered import LoweredModel
from pdscope.compiler.passes.build_library import BuildLibrary
from pdscope.compiler.passes.check_weights import CheckWeights
from pdscope.compiler.passes.emit_source import EmitSource
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.passes.pack_weights import PackWeights, WeightReader
from pdscope.compiler.passes.plan_memory import MemoryPlan, PlanMemory, WriteMemory
from pdscope.compiler.passes.schedule import Schedule
from pdscope.compiler.passes.tokenizer_files import (
    TokenizerFiles,
    chat_template,
    generation_ids,
    read_json,
)
from pdscope.compiler.passes.trace_model import CheckSemantics, TraceModel
from pdscope.compiler.passmanager import (
    PassManager,
    PassResult,
    Workspace,
    check_replaceable,
    publish,
    recover,
    sha256_file,
    writing,
)
from pdscope.compiler.trace import TracedModel, load_model
from pdscope.errors import BudgetError, InputError, PdscopeError, PlanError
from pdscope.ir.graph import Graph
from pdscope.ir.graph_text import parse_graph
from pdscope.ir.isa import ISA_HASH
from pdscope.schema import FORMAT_VERSION, check_full

DEFAULT_CONTEXT = 32768  # upper end of the default; the model's own limit if that is less
MAX_CONTEXT = 2**31 - 1  # positions are 32-bit integers in the runtime
DTYPES = ("auto", "fp32", "bf16", "int8", "int4")
LOAD_FORMATS = ("auto", "dummy")


class Progress(Protocol):
    """What a caller sees of a long compile."""

    def start(self, what: str, total: int) -> None:
        """A stage of `total` bytes begins."""

    def advance(self, amount: int) -> None: ...


class Silent:
    def start(self, what: str, total: int) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass


@dataclass(frozen=True)
class Options:
    """How to compile; see `pdscope-compile --help` for each."""

    dtype: str = "auto"
    load_format: str = "auto"
    max_context: int | None = None
    max_rows: int = 512
    target: str = "native"
    check_weights: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("load_format", self.load_format, LOAD_FORMATS),
        ):
            if value not in known:
                raise InputError(
                    f"{name}: '{value}' is unknown; expected one of {', '.join(known)}"
                )
        if self.max_context is not None and self.max_context < 1:
            raise InputError(f"max_context: expected at least 1, got {self.max_context}")
        if not 1 <= self.max_rows <= 65536:
            raise InputError(f"max_rows: expected 1 to 65536, got {self.max_rows}")


@dataclass(frozen=True)
class CompileResult:
    """A finished compile: the manifest (plan.json) and what each pass did. `plan` is None for a dry
    run."""

    plan: Path | None
    manifest: dict[str, Any]
    memory: dict[str, Any]
    passes: tuple[PassResult, ...]
    notes: tuple[str, ...]


@dataclass
class Model:
    """The input: a directory with config.json and weights, or a config.json alone for dummy
    weights."""

    path: Path
    options: Options
    progress: Progress
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise InputError(f"{self.path}: no such file or directory; expected a model directory")
        self.directory = self.path if self.path.is_dir() else self.path.parent
        self.config_file = self.path / "config.json" if self.path.is_dir() else self.path
        check_link(self.config_file)
        if not self.config_file.is_file():
            raise InputError(
                f"{self.path}: has no config.json; expected a Hugging Face model directory"
            )
        self.dummy = self.options.load_format == "dummy"
        if self.path.is_file() and not self.dummy:
            raise InputError(
                f"{self.path}: is a file; expected a model directory (or --load-format dummy)"
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
            return hashlib.sha256(b"dummy weights 1").hexdigest()
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


def compile_model(
    model: str | Path,
    out: str | Path | None,
    *,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    after_pass: Callable[[PassResult], None] = lambda _: None,
    **options: Any,
) -> CompileResult:
    """Compile the model at `model` into the plan directory `out`.

    Options: dtype "auto" | "fp32" | "bf16" | "int8" | "int4"; load_format "auto" | "dummy";
    max_context (tokens a sequence may hold); max_rows (rows of one step); target "native" | "any" |
    a CPU name or feature list; check_weights. `force` replaces an existing plan. `dry_run` stops
    before weights and code: `out` may be None. A compile that is killed leaves no plan; the same
    call resumes behind the last finished pass.

    Raises ModelError, TargetError, BudgetError, PlanError or InputError.
    """
    try:
        chosen = Options(**options)
    except TypeError as e:
        raise InputError(f"compile: {str(e).replace('Options.__init__() ', '')}") from None
    source = Model(Path(model), chosen, progress or Silent())
    target = targets.resolve(chosen.target)
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="pdscope-") as scratch:
            pipeline = Pipeline(source, target, Workspace(Path(scratch)), after_pass)
            memory = pipeline.analyse()
            return CompileResult(
                None, pipeline.manifest(), memory.table(), pipeline.results(), tuple(source.notes)
            )
    if out is None:
        raise InputError("compile: an output directory is needed, except for a dry run")
    if not str(out):
        raise InputError("compile: the output directory has an empty name")
    destination = Path(os.path.realpath(out))  # what a link points to is what gets replaced
    _check_destination(destination, force)
    with _workspace(destination) as workspace:
        recover(destination)
        _check_destination(destination, force)
        pipeline = Pipeline(source, target, workspace, after_pass)
        memory = pipeline.analyse()
        _check_space(destination, pipeline.lowered, workspace)
        manifest = pipeline.finish()
        publish(workspace, destination, replace=force)
    return CompileResult(
        destination, manifest, memory.table(), pipeline.results(), tuple(source.notes)
    )


class Pipeline:
    """The passes of one compile, in order."""

    def __init__(
        self,
        source: Model,
        target: targets.Target,
        workspace: Workspace,
        after_pass: Callable[[PassResult], None],
    ) -> None:
        self.source = source
        self.target = target
        self.workspace = workspace
        self.manager = PassManager(workspace, compiler_sha256(), after_pass)
        self.config_sha256 = sha256_file(source.config_file)

    def analyse(self) -> MemoryPlan:
        """Everything that needs no weight: graph, lowering, programs, memory."""
        options = self.source.options
        self.manager.run(TraceModel(self.source, self.config_sha256))
        self.graph = parse_graph(self.workspace.read_text("graph.txt"))
        self.manager.run(CheckSemantics(self.source, self.config_sha256))
        context = self._context(self.graph.max_context)
        self.lowered = Lower(self.source.dtype(self.graph), context).run(self.graph)
        # Faults of small files come to light before the weights are read.
        directory, notes = self.source.directory, self.source.notes
        self.generation = generation_ids(directory, self.source.config, self.lowered.vocab)
        self.chat, problem = chat_template(directory)
        if problem is not None:
            notes.append(problem)
        self.memory = PlanMemory(options.max_rows).run(self.lowered)
        self.manager.run(Schedule(self.lowered, self.memory.max_rows))
        program_bytes = self.workspace.path("program.bin").stat().st_size
        self.memory = self.memory.with_programs(program_bytes)
        self.manager.run(WriteMemory(self.memory))
        session, total = self.memory.summary()["session"], _memory_total()
        if session > total:
            notes.append(
                f"a session takes {session / 2**30:.1f} GiB, this machine has "
                f"{total / 2**30:.1f} GiB of memory; a lower --max-context makes it smaller"
            )
        return self.memory

    def finish(self) -> dict[str, Any]:
        """Weights, code, tokenizer and manifest."""
        run, source, lowered = self.manager.run, self.source, self.lowered
        self.weights_sha256 = source.weights_sha256()
        run(TokenizerFiles(source.directory, lowered.vocab))
        reader = _Lazy(source.reader)
        if source.options.check_weights and source.checkpoint is not None:
            run(CheckWeights(source.checkpoint, self.weights_sha256))
        source.progress.start("pack weights", sum(f.bytes for f in lowered.files))
        for file in lowered.files:
            hashes = self.weights_sha256, self.config_sha256
            result = run(PackWeights(file, reader, *hashes, source.progress.advance))
            if result.cached:
                source.progress.advance(file.bytes)
        self.plan_hash = self._plan_hash()
        run(EmitSource(lowered, self.memory, self.plan_hash, self.target.features, FORMAT_VERSION))
        run(BuildLibrary(self.target.isa))
        manifest = self.manifest()
        check_full(manifest)
        # The manifest is the last file: a directory without it is no plan.
        with writing(self.workspace.path("plan.json")) as path:
            path.write_text(
                json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        return manifest

    def results(self) -> tuple[PassResult, ...]:
        return tuple(self.workspace.records.values())

    def manifest(self) -> dict[str, Any]:
        """plan.json; pdscope/plan_schema.json describes it. A dry run has no hashes of weights and
        code."""
        model, files = self.lowered, self.workspace.files()
        moe = [x for x in model.layers if x.gate is not None]
        gate = moe[0].gate.attrs if moe and moe[0].gate else None
        programs = Schedule(model, self.memory.max_rows).programs()
        return {
            "format_version": FORMAT_VERSION,
            "generator": f"pdscope {pdscope.__version__}",
            "plan_hash": getattr(self, "plan_hash", ""),
            "model": {
                "architecture": model.architecture,
                "source_name": self.source.directory.resolve().name,
                "config_sha256": self.config_sha256,
                "weights_sha256": getattr(self, "weights_sha256", ""),
                "layers": len(model.layers),
                "moe_layers": len(moe),
                "hidden": model.hidden,
                "vocab": model.vocab,
                "experts": gate.experts if gate else 0,
                "top_k": gate.top_k if gate else 0,
                "parameters": model.parameters,
                "load_format": "dummy" if self.source.dummy else "safetensors",
            },
            "dtype": model.dtype,
            "max_context": model.max_context,
            "max_rows": self.memory.max_rows,
            "max_logits": self.memory.max_logits,
            "kv_block": self.memory.kv_block,
            "target": {
                k: list(v) if isinstance(v, tuple) else v for k, v in vars(self.target).items()
            },
            "placement": {
                "device": "cpu",
                "experts": {"cpu": sum(x.gate.attrs.experts for x in moe if x.gate), "gpu": 0},
            },
            "programs": {
                "count": len(programs),
                "instructions": sum(len(p.instrs) for p in programs),
                "isa_hash": f"{ISA_HASH:08x}",
            },
            "memory": self.memory.summary(),
            "generation": self.generation,
            "tokenizer": {
                "file": "tokenizer.json" if "tokenizer.json" in files else None,
                "chat_template": self.chat,
            },
            "files": {p: asdict(f) for p, f in files.items()},
        }

    def _context(self, limit: int) -> int:
        wanted = self.source.options.max_context
        if wanted is None:
            if limit > DEFAULT_CONTEXT:
                self.source.notes.append(
                    f"context {DEFAULT_CONTEXT} of the model's {limit}; --max-context raises it"
                )
            return min(limit, DEFAULT_CONTEXT)
        if wanted > MAX_CONTEXT:
            raise BudgetError(f"--max-context {wanted}: a plan can hold at most {MAX_CONTEXT}")
        if wanted > limit:
            raise BudgetError(
                f"--max-context {wanted}: the model was made for at most {limit} tokens "
                "(max_position_embeddings in config.json)"
            )
        return wanted

    def _plan_hash(self) -> str:
        """Identity of what the plan computes: the same inputs give the same hash."""
        parts = [
            f"format {FORMAT_VERSION}",
            self.workspace.sha256("graph.txt"),
            self.workspace.sha256("program.bin"),
            self.workspace.sha256("memory.json"),
            self.weights_sha256,
            *(self.workspace.sha256(f.path) for f in self.lowered.files),
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@dataclass
class _Lazy:
    """A weight reader that is opened on first use: a resumed compile may need none."""

    open: Callable[[], WeightReader]
    reader: WeightReader | None = None

    def get(self, param: str, part: str = "whole", expert: int | None = None) -> Any:
        if self.reader is None:
            self.reader = self.open()
        return self.reader.get(param, part, expert)


def compiler_sha256() -> str:
    """Identity of the compiler: the text of its own sources. Cached passes of another version are
    not used."""
    digest = hashlib.sha256(pdscope.__version__.encode())
    root = Path(pdscope.__file__).parent
    for room in ("ir", "models", "compiler", "codegen_templates", "runtime_c"):
        for path in sorted((root / room).rglob("*")):
            if path.suffix in (".py", ".j2", ".c", ".h", ".inc"):
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _memory_total() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_destination(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise PlanError(f"{out}: is a file; expected a directory to create")
    if not any(out.iterdir()):
        return
    if not (out / "plan.json").is_file():
        raise PlanError(f"{out}: is not empty and holds no plan; choose another directory")
    if force:
        check_replaceable(out)
    else:
        raise PlanError(f"{out}: already holds a plan; --force replaces it")


def _check_space(out: Path, model: LoweredModel, workspace: Workspace) -> None:
    """Fail before hours of packing, not after."""
    need = sum(f.bytes for f in model.files if not workspace.path(f.path).exists())
    free = shutil.disk_usage(workspace.root).free
    if need > free:
        raise BudgetError(
            f"{out}: the plan needs {need / 2**30:.1f} GiB more, the disk has "
            f"{free / 2**30:.1f} GiB free"
        )


@contextlib.contextmanager
def _workspace(out: Path) -> Iterator[Workspace]:
    """The directory `.NAME.partial` beside the plan, locked; kept when a compile is interrupted."""
    root = out.parent / f".{out.name}.partial"
    new = [p for p in (out.parent, *out.parent.parents) if not p.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        _remove_empty(new)
        raise PlanError(f"{out}: cannot be created: {e.strerror}") from e
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PlanError(f"{out}: another compile is writing this plan; wait for it") from None
        try:
            yield Workspace(root)
        except PdscopeError as e:
            packed = (root / "plan" / "weights").exists()
            if not packed or not isinstance(e, BudgetError):  # no use to a second try
                shutil.rmtree(root, ignore_errors=True)
                _remove_empty(new)
            raise


def _remove_empty(directories: Sequence[Path]) -> None:
    """Innermost first, as far as they are empty."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def pass_summary(passes: Sequence[PassResult]) -> list[dict[str, Any]]:
    """For --json: what each pass did."""
    return [{"name": p.name, "cached": p.cached, "seconds": round(p.seconds, 3)} for p in passes]
