"""Run calibration text through the plan's own runtime and keep what its gates were given and chose.

Two passes: `read-calibration` turns a file into token ids, before hours of packing, as its faults
should come to light first; `collect-traces` runs them once the plan is whole. What they make is for
the passes behind them, and no part of the plan, but a summary. May import numpy,
pdscope.{documents,engine,errors,plan,routing_records,tokens} and
pdscope.compiler.{passmanager,source,phaseper,passes.tokenizer_files}.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdscope.compiler.passes.tokenizer_files import COPIED
from pdscope.compiler.passmanager import Workspace, sha256_file
from pdscope.compiler.phaseper import calibration
from pdscope.compiler.phaseper.corpus import PHASES, Corpus, Sample, choose, token_arrays
from pdscope.compiler.phaseper.traces import LAYER_ARRAYS, TraceShape, TraceStore, TraceWriter
from pdscope.compiler.source import Model, Progress
from pdscope.documents import read_documents
from pdscope.engine import Engine
from pdscope.errors import DiskError, PlanError, TargetError
from pdscope.plan import Plan
from pdscope.routing_records import Records, RoutingReader, moe_layers
from pdscope.tokens import Tokenizer

CHUNK = 8192  # tokens read between two points that a killed process goes on from
# Rows a phase where the caller names no number. Of 690,000 rows predictors learn more than of the
# same rows again and again, and a model of many wide layers should not fill a disk.
ROWS, DISK = 1 << 20, 16 << 30

TRACES, SUMMARY = "traces", "phaseper/traces.json"


def default_rows(shape: TraceShape) -> int:
    """Rows a phase: ROWS, or what DISK bytes hold of both phases."""
    return max(1, min(ROWS, DISK // (len(PHASES) * shape.row_bytes())))


def collect(
    engine: Engine,
    corpus: Corpus,
    path: Path,
    key: str,
    *,
    rows: int | None = None,
    start: Callable[[int], None] = lambda _: None,
    advance: Callable[[int], None] = lambda _: None,
) -> TraceStore:
    """Fills a trace store at `path` from the text; goes on behind the chunks that are there.

    rows: at most so many a phase; None: default_rows. key: identity of all that decides the result;
    a store of the same key is gone on with, another's is deleted. start: is told how many tokens
    will be read, `advance` how many were. Raises DiskError when the store would not fit.
    """
    with contextlib.suppress(PlanError):
        if (store := TraceStore.open(path)).key == key:
            return store
    model, layers = engine.plan.model, tuple(moe_layers(engine.plan))
    sizes = {"hidden": model["hidden"], "experts": model["experts"], "top_k": model["top_k"]}
    some = dict.fromkeys(PHASES, 0)
    limit = rows or default_rows(TraceShape(layers=layers, rows=some, seen=some, **sizes))
    sample = choose(corpus, limit)
    kept = {phase: len(sample.positions[phase]) for phase in PHASES}
    shape = TraceShape(layers=layers, rows=kept, seen=dict(sample.seen), **sizes)
    tokens = {phase: token_arrays(corpus, sample.positions[phase]) for phase in PHASES}
    writer = TraceWriter(path, key, shape, tokens)
    _check_space(path, shape, writer)
    numbers = sample.taken.nonzero()[0].tolist()
    lengths = {n: int(corpus.ends[n]) - corpus.begin(n) for n in numbers}
    start(sum(lengths.values()))
    advance(sum(lengths[n] for n in numbers[: writer.done]))
    with RoutingReader(engine) as reader:
        while writer.done < len(numbers):
            chunk, size = [], 0
            for at in range(writer.done, len(numbers)):
                chunk.append(numbers[at])
                size += lengths[numbers[at]]
                if size >= CHUNK:
                    break
            for records in reader.read(map(corpus.document, chunk)):
                begins = np.array([corpus.begin(n) for n in chunk], np.int64)
                _keep(writer, sample, begins[records.document] + records.position, records)
                advance(len(records.token))
            writer.end_chunk(writer.done + len(chunk))
    return writer.finish()


def _keep(
    writer: TraceWriter, sample: Sample, positions: NDArray[np.int64], records: Records
) -> None:
    """Writes the rows of a step that belong to the sample; `positions` [n] in the corpus ascend."""
    for phase in PHASES:
        wanted = sample.positions[phase]
        first, last = np.searchsorted(wanted, (positions[0], positions[-1] + 1))
        at = np.searchsorted(positions, wanted[first:last])
        if len(at):
            layers = {
                number: {name: getattr(layer, name)[at] for name in LAYER_ARRAYS}
                for number, layer in records.layers.items()
            }
            writer.add(phase, layers)


def _check_space(path: Path, shape: TraceShape, writer: TraceWriter) -> None:
    need = sum(shape.rows.values()) * shape.row_bytes() - writer.written_bytes()
    free = shutil.disk_usage(path).free
    if need > free:
        raise DiskError(
            f"{path}: traces need {need / 2**30:.1f} GiB more, the disk has {free / 2**30:.1f} GiB "
            "free; free some space, or choose a lower --trace-records"
        )


@dataclass(frozen=True)
class ReadCalibration:
    """Token ids of the file, in the plan's tokenizer and chat template."""

    file: Path
    plan: Plan = field(repr=False)  # not whole yet: the tokenizer's files are there
    progress: Progress = field(repr=False)

    name = "read-calibration"
    text = "calibration"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        files = {
            name: self.plan.files[name]["sha256"] for name in COPIED if name in self.plan.files
        }
        return files | {"calibration": sha256_file(self.file)}

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        """Raises InputError naming file and line for what is no document."""
        self.progress.start("read calibration", 0)
        Corpus.write(workspace.scratch(self.text), read_documents(Tokenizer(self.plan), self.file))
        return {}


@dataclass(frozen=True)
class GenerateCalibration:
    """Stands in for a file: what the model answers to built-in prompts."""

    plan: Plan = field(repr=False)  # whole, but for plan.json
    progress: Progress = field(repr=False)

    name = "generate-calibration"
    text = "generated"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        return _identity(self.plan)

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        folder = workspace.scratch(self.text)
        chunks = folder.with_name("answers")
        with Engine(self.plan, weights="mmap", predictor="off", device="cpu") as engine:
            self.progress.start("generate calibration", calibration.most_tokens(), "tokens")
            key = json.dumps(self.inputs())
            documents = calibration.generated(engine, chunks, key, self.progress.advance)
            Corpus.write(folder, documents)
        shutil.rmtree(chunks)
        return {}


@dataclass(frozen=True)
class CollectTraces:
    """The trace store `TRACES` of the workspace, from the text that another pass has left there."""

    text: ReadCalibration | GenerateCalibration
    plan: Plan = field(repr=False)  # whole, but for plan.json
    rows: int | None
    progress: Progress = field(repr=False)

    name = "collect-traces"
    reads = ()

    def inputs(self) -> Mapping[str, str]:
        return {**_identity(self.plan), **self.text.inputs(), "rows": str(self.rows)}

    def key(self) -> str:
        """Of the trace store: identity of all that decides what it holds."""
        return hashlib.sha256(json.dumps(self.inputs()).encode()).hexdigest()

    def run(self, workspace: Workspace) -> Mapping[str, str | None]:
        corpus = Corpus(workspace.scratch(self.text.text))
        # The packed weights in the page cache are the one copy of the model.
        with Engine(self.plan, weights="mmap", predictor="off", device="cpu") as engine:
            store = collect(
                engine,
                corpus,
                workspace.scratch(TRACES),
                self.key(),
                rows=self.rows,
                start=lambda total: self.progress.start("collect traces", total, "tokens"),
                advance=self.progress.advance,
            )
        summary = {
            "calibration": getattr(getattr(self.text, "file", None), "name", None),
            "calibration_sha256": self.text.inputs().get("calibration"),
            "documents": len(corpus),
            "tokens": corpus.tokens,
            "read": dict(store.shape.seen),
            "rows": dict(store.shape.rows),
        }
        return {workspace.write(SUMMARY, json.dumps(summary, indent=1) + "\n"): None}


def no_traces(source: Model, plan: Plan, layers: int) -> str | None:
    """Why no predictor can be trained; None: it can. `plan` need have no weights or code yet."""
    if source.dummy:
        return (
            "no predictor: dummy weights choose experts at random, so there is nothing to learn; "
            "--dummy-predictor accuracy:P stands in for one"
        )
    if layers < 2:
        return f"no predictor: the model has {layers} MoE layers, and the first one needs none"
    if plan.data["tokenizer"]["file"] is None:
        return (
            "no predictor: the model has no tokenizer.json to read a calibration text with; add it "
            "to the model directory and compile again"
        )
    try:
        plan.check_machine()
    except TargetError as error:
        return f"no predictor: it needs a run of the plan, and {error}"
    return None


def _identity(plan: Plan) -> dict[str, str]:
    """What decides what the model computes here, to the bit."""
    return {"plan": plan.plan_hash, "target": json.dumps(plan.data["target"], sort_keys=True)}
