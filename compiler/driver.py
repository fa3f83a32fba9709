"""From a model directory to a plan directory: the compile that callers see.

Everything is written aside, locked, and published at the end; a compile that was killed resumes.
May import every room but pdscope.cli.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdscope.arguments import flag, path
from pdscope.compiler import target as targets
from pdscope.compiler.lowered import LoweredModel
from pdscope.compiler.passmanager import (
    PassResult,
    Workspace,
    check_destination,
    disk_errors,
    publish,
    recover,
)
from pdscope.compiler.pipeline import Pipeline
from pdscope.compiler.source import Model, Options, Progress, Silent
from pdscope.errors import BudgetError, DiskError, InputError, PdscopeError, PlanError

__all__ = [
    "CompileResult",
    "Model",
    "Options",
    "Pipeline",
    "Progress",
    "compile_model",
    "pass_summary",
    "resumable",
]


@dataclass(frozen=True)
class CompileResult:
    """A finished compile: the manifest (plan.json) and what each pass did. `plan` is None for a dry
    run."""

    plan: Path | None
    manifest: dict[str, Any]
    memory: dict[str, Any]
    passes: tuple[PassResult, ...]
    notes: tuple[str, ...]


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
    no_weights (a plan without weight files, for benchmarks that make dummy ones up at load);
    max_context (tokens a sequence may hold); max_rows (rows of one step); target "native" | "any" |
    a CPU name or feature list; check_weights; cache_prefetch "on" | "off": whether programs predict
    the next layer's experts and prefetch them into the CPU's cache; calibration (a file of text or
    jsonl to train predictors on); trace_records (rows of it a phase); predictor "auto" | "off",
    which is the default without a calibration; predictor_budget (bytes a layer, or e.g. "4.2MB");
    predictor_device "auto" | "cpu" | "cuda", where they are trained; dummy_predictor "accuracy:P",
    which stands in for them with load_format dummy (pdscope/dummy_predictor.py); costs: "off", the
    default, "auto" (measured here, with gpu_mem the GPU too), a file (a plan's costs.json or a
    hardware description), a shipped description's name, or "auto,NAME": its GPU and link where they
    were not measured; gpu_mem (bytes that the process may take of a GPU's memory, or e.g. "24GiB";
    None: the CPU alone), gpu_reserve (of them, what the driver takes), gpu_arch ("auto", "none", or
    architectures to compile kernels for: "sm_80,sm_90") and policy (pdscope-compile --help).
    `force` replaces an existing plan. `dry_run` stops before weights and code, but checks that the
    checkpoint's tensors and tokenizer fit: `out` may be None. A compile that is killed leaves no
    plan; the same call resumes behind the last finished pass.

    Raises ModelError, TargetError, BudgetError, PlanError or InputError.
    """
    try:
        chosen = Options(**options)
    except TypeError as e:
        raise InputError(f"compile: {str(e).replace('Options.__init__() ', '')}") from None
    force, dry_run = flag("force", force), flag("dry_run", dry_run)
    source = Model(path("model", model), chosen, progress or Silent())
    target = targets.resolve(chosen.target)
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="pdscope-") as scratch:
            pipeline = Pipeline(source, target, Workspace(Path(scratch)), after_pass)
            pipeline.analyse()
            pipeline.check_model()
            table, notes = pipeline.memory_table(), tuple(source.notes)
            return CompileResult(None, pipeline.manifest(), table, pipeline.results(), notes)
    if out is None:
        raise InputError("compile: an output directory is needed, except for a dry run")
    if not str(out):
        raise InputError("compile: the output directory has an empty name")
    destination = Path(
        os.path.realpath(path("out", out))
    )  # what a link points to is what gets replaced
    check_destination(destination, force)
    with _workspace(destination) as workspace:
        recover(destination)
        check_destination(destination, force)
        pipeline = Pipeline(source, target, workspace, after_pass)
        pipeline.analyse()
        if not chosen.no_weights:
            _check_space(destination, pipeline.lowered, workspace)
        manifest = pipeline.finish()
        table = pipeline.memory_table()
        with disk_errors(destination):
            publish(workspace, destination, replace=force)
    return CompileResult(destination, manifest, table, pipeline.results(), tuple(source.notes))


def resumable(out: str | Path) -> bool:
    """Whether an interrupted compile into `out` has left finished passes."""
    return any((_root(Path(os.path.realpath(out))) / "passes").rglob("*.json"))


def _root(out: Path) -> Path:
    return out.parent / f".{out.name}.partial"


def _check_space(out: Path, model: LoweredModel, workspace: Workspace) -> None:
    """Fail before hours of packing, not after."""
    need = sum(f.bytes for f in model.files if not workspace.path(f.path).exists())
    free = shutil.disk_usage(workspace.root).free
    if need > free:
        raise DiskError(
            f"{out}: the plan needs {_size(need)} more, the disk has {_size(free)} free; free some "
            "space or choose another output"
        )


def _size(count: int) -> str:
    if count < 2**30:
        return f"{count / 2**20:.1f} MiB"
    return f"{count / 2**30:.1f} GiB"


@contextlib.contextmanager
def _workspace(out: Path) -> Iterator[Workspace]:
    """The directory `.NAME.partial` beside the plan, locked; kept when a compile is interrupted."""
    root = _root(out)
    new = [p for p in (out.parent, *out.parent.parents) if not p.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        _remove_empty(new)
        raise PlanError(f"{out}: cannot be created: {e.strerror}") from e
    with disk_errors(out):
        lock = (root / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PlanError(f"{out}: another compile is writing this plan; wait for it") from None
        try:
            yield Workspace(root)
        except PdscopeError as e:
            packed = (root / "plan" / "weights").exists()
            kept = packed and isinstance(e, BudgetError | InputError)  # of the calibration
            if not kept:  # no use to a second try
                shutil.rmtree(root, ignore_errors=True)
                _remove_empty(new)
            if isinstance(e, DiskError):
                why = ": finished passes are kept" if kept else ""
                raise DiskError(f"{e}; then run the same command again{why}") from e
            raise


def _remove_empty(directories: Sequence[Path]) -> None:
    """Innermost first, as far as they are empty."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def pass_summary(passes: Sequence[PassResult]) -> list[dict[str, Any]]:
    """For --json: what each pass did."""
    return [
        {
            "name": p.name,
            "cached": p.cached,
            "seconds": round(p.seconds, 3),
            "cpu_seconds": round(p.cpu_seconds, 3),
        }
        for p in passes
    ]
