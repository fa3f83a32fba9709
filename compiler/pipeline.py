"""The passes of one compile, in order, and the manifest of what they made.

May import every room but pdscope.cli.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pdscope
from pdscope import hardware
from pdscope.compiler import gpu_arch
from pdscope.compiler import target as targets
from pdscope.compiler.costs import JSON as COSTS
from pdscope.compiler.costs import CostTable, model_key
from pdscope.compiler.manifest import derived_fields
from pdscope.compiler.passes.build_library import BuildLibrary
from pdscope.compiler.passes.check_weights import CheckWeights
from pdscope.compiler.passes.collect_traces import (
    SUMMARY,
    TRACES,
    CollectTraces,
    GenerateCalibration,
    ReadCalibration,
    no_traces,
)
from pdscope.compiler.passes.emit_source import EmitSource
from pdscope.compiler.passes.gpu_kernels import GpuKernels
from pdscope.compiler.passes.hot_experts import PlaceExperts, Routing, traced, uniform
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.passes.pack_weights import PackWeights, WeightReader
from pdscope.compiler.passes.plan_gpu import PREDICT_ROWS, GpuMemory, PlanGpu, memory_table
from pdscope.compiler.passes.plan_memory import (
    CountPredictors,
    MemoryPlan,
    PlanMemory,
    WriteMemory,
)
from pdscope.compiler.passes.predictor_report import PredictorReport
from pdscope.compiler.passes.profile_costs import BUSY, ProfileCosts, busy
from pdscope.compiler.passes.profile_gpu import GpuProfile
from pdscope.compiler.passes.programs import Schedule
from pdscope.compiler.passes.tokenizer_files import (
    TokenizerFiles,
    chat_template,
    generation_ids,
)
from pdscope.compiler.passes.trace_model import CheckSemantics, TraceModel
from pdscope.compiler.passes.train_phaseper import (
    TrainPhasePer,
    WriteDummyPredictor,
    check_training,
    model_gates,
    train_options,
)
from pdscope.compiler.passmanager import (
    PassManager,
    PassResult,
    Workspace,
    sha256_file,
    writing,
)
from pdscope.compiler.phaseper.traces import TraceStore
from pdscope.compiler.source import Model
from pdscope.errors import BudgetError, TargetError
from pdscope.ir.graph_text import parse_graph
from pdscope.ir.isa import ISA_HASH
from pdscope.plan import Plan
from pdscope.plan_hash import plan_hash
from pdscope.schema import FORMAT_VERSION, check_full

DEFAULT_CONTEXT = 32768  # upper end of the default; the model's own limit if that is less
MAX_CONTEXT = 2**31 - 1  # positions are 32-bit integers in the runtime


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
        dtype = self.source.dtype(self.graph)
        self.lowered = Lower(dtype, context, options.cache_predictor).run(self.graph)
        # Faults of small files come to light before the weights are read.
        directory, notes = self.source.directory, self.source.notes
        self.generation = generation_ids(directory, self.source.config, self.lowered.vocab)
        self.chat, problem = chat_template(directory)
        if problem is not None:
            notes.append(problem)
        rows = PlanMemory(options.max_rows)
        if options.gpu_mem is not None:
            rows = PlanMemory(options.max_rows, PREDICT_ROWS)
        self.memory = rows.run(self.lowered)
        self.gpu: GpuMemory | None = None
        if options.gpu_mem is not None:
            budget = int(options.gpu_mem), int(options.gpu_reserve)
            self.gpu = PlanGpu(*budget, options.policy).run(self.lowered, self.memory)
        self._find_nvrtc()
        self.manager.run(Schedule(self.lowered, self.memory.max_rows))
        program_bytes = self.workspace.path("program.bin").stat().st_size
        self.memory = self.memory.with_programs(program_bytes)
        self.manager.run(WriteMemory(memory_table(self.memory, self.gpu)))
        self._check_costs()
        session, total = self.memory.summary()["session"], _memory_total()
        if session > total:
            notes.append(
                f"a session takes {session / 2**30:.1f} GiB, this machine has "
                f"{total / 2**30:.1f} GiB of memory; a lower --max-context makes it smaller"
            )
        return self.memory

    def check_model(self) -> None:
        """What `finish` would refuse of a model that has weights, from the headers alone: tensors
        that do not fit config.json, and a tokenizer with other ids. After `analyse`."""
        if self.source.checkpoint is not None:
            TokenizerFiles(self.source.directory, self.lowered.vocab).check()
            self.source.reader()

    def finish(self) -> dict[str, Any]:
        """Weights, code, tokenizer and manifest."""
        self._check_gpu()
        run, source, lowered = self.manager.run, self.source, self.lowered
        run(TokenizerFiles(source.directory, lowered.vocab))
        text = self._read_calibration()
        self.weights_sha256 = source.weights_sha256()
        reader = _Lazy(source.reader)
        if source.options.check_weights and source.checkpoint is not None:
            run(CheckWeights(source.checkpoint, self.weights_sha256))
        packed = () if source.options.no_weights else lowered.files
        source.progress.start("pack weights", sum(f.bytes for f in packed))
        for file in packed:
            hashes = self.weights_sha256, self.config_sha256
            result = run(PackWeights(file, reader, *hashes, source.progress.advance))
            if result.cached:
                source.progress.advance(file.bytes)
        manifest = self.manifest()
        identity = manifest["plan_hash"] = plan_hash(manifest)
        run(EmitSource(lowered, self.memory, identity, self.target.features, FORMAT_VERSION))
        run(BuildLibrary(self.target.isa))
        if self.kernels is not None:
            run(GpuKernels(self.kernels, source.progress))
        manifest["files"] = self._files()  # the source and the library too
        traces: CollectTraces | None = None
        if self.predicts:
            traces = self._collect_traces(self._runnable(manifest), text)
            self._train_predictors(traces, reader)
            manifest["files"] = self._files()
        elif source.options.dummy_predictor is not None:
            sizes = (manifest["model"][name] for name in ("hidden", "experts", "top_k"))
            run(WriteDummyPredictor(source.options.dummy_predictor, *sizes))
            manifest["files"] = self._files()
        if source.options.cost_source.wanted:
            self._profile_costs(self._runnable(manifest))
            manifest["files"] = self._files()
        if self.gpu is not None:
            self._place_experts(self.gpu, traces)
            manifest["files"] = self._files()
        check_full(manifest)
        # The manifest is the last file: a directory without it is no plan.
        with writing(self.workspace.path("plan.json")) as path:
            path.write_text(
                json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )
        return manifest

    def _runnable(self, manifest: Mapping[str, Any]) -> Plan:
        """The plan that passes run, whole but for plan.json: on the CPU, as what a GPU needs is
        written last."""
        return Plan(self.workspace.plan, {k: v for k, v in manifest.items() if k != "gpu"})

    def _find_nvrtc(self) -> None:
        """What GPU kernels are compiled with, and for; faults of --gpu-arch, before the weights are
        read."""
        self.kernels: gpu_arch.Kernels | None = None
        if self.gpu is not None:
            self.kernels = gpu_arch.resolve(self.source.options.kernels, self.source.notes)

    def _check_costs(self) -> None:
        """Faults of what --costs gives, before the weights are read."""
        source = self.source.options.cost_source
        if not source.wanted:
            return
        source.table(model_key(self.lowered))
        if source.measured:
            try:
                Plan(self.workspace.plan, self.manifest()).check_machine()
            except TargetError as error:
                raise TargetError(
                    f"costs: auto measures a run of the plan, but {error}; or give a hardware "
                    "description (see --help)"
                ) from None

    def _check_gpu(self) -> None:
        """That there is one, where it is to be measured."""
        source = self.source.options.cost_source
        alone = source.measured and source.given is None
        if alone and self.gpu and self.gpu.expert and not gpu_arch.present().name:
            raise TargetError(
                "costs: auto found no GPU to measure, and --gpu-mem asks for experts on one: "
                "compile where it is, or give --costs auto,NAME with one of "
                f"{', '.join(hardware.names())}"
            )

    def _profile_costs(self, plan: Plan) -> None:
        """`plan` is whole but for plan.json."""
        source, key = self.source.options.cost_source, model_key(self.lowered)
        gpu: GpuProfile | None = None
        if self.gpu is not None and self.gpu.expert:
            folder, notes = self.workspace.scratch("gpu-costs"), self.source.notes
            sizes = self.memory, self.gpu
            gpu = GpuProfile(plan, self.lowered, *sizes, key, folder, notes, self.source.progress)
        code, progress = self.manager.code, self.source.progress
        self.manager.run(ProfileCosts(plan, key, source, code, progress, gpu))
        table = CostTable.parse(self.workspace.read_text(COSTS), COSTS)
        if table.gpu is None or table.link is None:
            self.source.notes.append(
                f"{COSTS} has no times of a GPU and its link: none was measured; --costs auto,NAME "
                "takes them from a hardware description"
            )

        if source.measured and busy(table) > BUSY:
            self.source.notes.append(
                f"{COSTS}: experts mostly took {busy(table):.1f} times as long as at best: the "
                "machine was busy; compile again on an idle one"
            )

    def _place_experts(self, gpu: GpuMemory, traces: CollectTraces | None) -> None:
        """Who stays on the GPU, and the programs with it."""
        model = self.lowered

        def routing() -> Routing:
            if traces is None:
                return uniform(model)
            return traced(model, TraceStore.open(self.workspace.scratch(TRACES)))

        if traces is None and gpu.resident:
            self.source.notes.append(
                "no traces of routing: experts stay on the GPU as if all were activated alike; a "
                "--calibration says which are"
            )
        costs = CostTable.parse(self.workspace.read_text(COSTS), COSTS)
        key = "uniform" if traces is None else traces.key()
        self.manager.run(PlaceExperts(model, gpu, self.memory.max_rows, routing, costs.costs, key))

    def _read_calibration(self) -> ReadCalibration | None:
        """Reads the text, if one is given, before anything that takes long; `predicts` says whether
        there is to be a predictor."""
        source = self.source
        plan = Plan(self.workspace.plan, self.manifest())
        why = no_traces(source, plan, sum(layer.is_moe for layer in self.lowered.layers))
        self.predicts = source.options.predicts and why is None
        if source.options.predicts and why is not None:
            source.notes.append(why)
        if not self.predicts:
            return None
        check_training(plan.model["hidden"], plan.model["experts"], source.options)
        if source.options.calibration is None:
            return None
        text = ReadCalibration(Path(source.options.calibration), plan, source.progress)
        self.manager.run(text)
        return text

    def _collect_traces(self, plan: Plan, text: ReadCalibration | None) -> CollectTraces:
        """Of the text, or of what the model itself generates. `plan` is whole but for plan.json."""
        source = self.source
        given = text or GenerateCalibration(plan, source.progress)
        if isinstance(given, GenerateCalibration):
            source.notes.append(
                "no --calibration: predictors are trained on the model's own answers to a few "
                "built-in prompts, so they know less of your topics and languages, and little of "
                "long prompts; some hundred conversations of your use do better"
            )
            self.manager.run(given)
        traces = CollectTraces(given, plan, source.options.trace_records, source.progress)
        self.manager.run(traces)
        for phase, kept in json.loads(self.workspace.read_text(SUMMARY))["rows"].items():
            if not kept:
                what = "the assistant wrote" if phase == "decode" else "is of a prompt"
                source.notes.append(
                    f"{source.options.calibration}: holds nothing that {what}, so the {phase} "
                    "phase has no traces and no predictor; add whole conversations, or texts"
                )
        return traces

    def _train_predictors(self, traces: CollectTraces, reader: "_Lazy") -> None:
        source = self.source
        self.manager.run(
            TrainPhasePer(
                traces=lambda: TraceStore.open(self.workspace.scratch(TRACES)),
                key=traces.key(),
                gates=lambda: model_gates(self.lowered.layers, reader),
                options=train_options(source.options),
                code=self.manager.code,
                device=source.options.predictor_device,
                start=lambda total: source.progress.start("train predictors", total, "rows"),
                advance=source.progress.advance,
            )
        )
        self.manager.run(CountPredictors(self.lowered, memory_table(self.memory, self.gpu)))
        self.manager.run(PredictorReport())

    def memory_table(self) -> dict[str, Any]:
        """memory.json, once `analyse` is through."""
        table: dict[str, Any] = json.loads(self.workspace.read_text("memory.json"))
        return table

    def results(self) -> tuple[PassResult, ...]:
        return tuple(self.workspace.records.values())

    def manifest(self) -> dict[str, Any]:
        """plan.json, but the plan hash; pdscope/plan_schema.json describes it. A dry run has no
        hashes of weights and code."""
        fields, files = derived_fields(self.lowered, self.memory, self.gpu), self._files()
        programs = Schedule(self.lowered, self.memory.max_rows).programs()
        return {
            "format_version": FORMAT_VERSION,
            "generator": f"pdscope {pdscope.__version__}",
            "plan_hash": "",
            **fields,
            "model": {
                **fields["model"],
                "source_name": self.source.directory.resolve().name,
                "config_sha256": self.config_sha256,
                "weights_sha256": getattr(self, "weights_sha256", ""),
                "load_format": "dummy" if self.source.dummy else "safetensors",
            },
            "target": {
                k: list(v) if isinstance(v, tuple) else v for k, v in vars(self.target).items()
            },
            "programs": {
                "count": len(programs),
                "instructions": sum(len(p.instrs) for p in programs),
                "isa_hash": f"{ISA_HASH:08x}",
            },
            **self._gpu_fields(),
            **self._absent_weights(),
            "generation": self.generation,
            "tokenizer": {
                "file": "tokenizer.json" if "tokenizer.json" in files else None,
                "chat_template": self.chat,
            },
            "files": files,
        }

    def _gpu_fields(self) -> dict[str, Any]:
        """Of a GPU plan alone."""
        if self.gpu is None:
            return {}
        return {
            "gpu": {
                "mem": self.gpu.cap,
                "reserve": self.gpu.reserve,
                "policy": self.source.options.policy,
                "resident": self.gpu.resident,
                "ring": self.gpu.ring,
            }
        }

    def _absent_weights(self) -> dict[str, Any]:
        if not self.source.options.no_weights:
            return {}
        return {"absent_weights": {file.path: file.bytes for file in self.lowered.files}}

    def _files(self) -> dict[str, Any]:
        return {path: asdict(file) for path, file in self.workspace.files().items()}

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
    rooms = ("ir", "models", "compiler", "codegen_templates", "runtime_c")
    files = [p for room in rooms for p in sorted((root / room).rglob("*"))]
    for path in [*files, *sorted(root.glob("*.py"))]:  # passes run the plan: the engine's too
        if path.suffix in (".py", ".j2", ".c", ".h", ".cu", ".inc"):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _memory_total() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
