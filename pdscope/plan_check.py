"""The whole check of a plan, behind `pdscope-inspect --verify`: hashes, schema, programs, and
whether the files agree with each other.

graph.txt, the dtype and the limits decide everything else that a plan says, so it is computed again
and compared: src/plan.c, memory.json (where phaseper.json decides what predictors take) and
plan.json, field by field. Taken on trust are what nothing else in the directory repeats:
source_name, config_sha256, the target's name, token ids that generation_config.json leaves to
config.json, and the code of the library and of GPU kernels, which is only hashed.

May import pdscope.{errors,ir,plan,plan_diff,predictor_figures,runtime_c,schema} and those passes of
the compiler that read no weights.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

from pdscope.compiler.costs import JSON, CostTable, model_key
from pdscope.compiler.emit import plan_source
from pdscope.compiler.lowered import LoweredModel
from pdscope.compiler.manifest import derived_fields
from pdscope.compiler.passes.lower import Lower
from pdscope.compiler.passes.plan_gpu import PREDICT_ROWS, GpuMemory, PlanGpu, memory_table
from pdscope.compiler.passes.plan_memory import MemoryPlan, PlanMemory, predictor_table
from pdscope.compiler.passes.tokenizer_files import COPIED, chat_template, generation_ids
from pdscope.errors import PdscopeError, PlanError
from pdscope.ir.encode import decode, encode, program_order
from pdscope.ir.graph_text import parse_graph
from pdscope.ir.isa import Phase
from pdscope.ir.program import Program
from pdscope.ir.text import parse_programs
from pdscope.ir.verify import verify, verify_sequence
from pdscope.plan import Plan, kernel_arch
from pdscope.plan_diff import flatten
from pdscope.plan_hash import DUMMY_WEIGHTS
from pdscope.predictor_figures import JSON as PREDICTORS
from pdscope.runtime_c import ISA_PATHS
from pdscope.schema import FORMAT_VERSION, check_full

_EDITED = "the plan was edited, or made by another PDScope; recompile the model"
_MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of an ELF file
_HASH = r'\.plan_hash = "([^"]*)"'
_PREDICTORS = {"PDS_PREDICT_CROSS_GATE": "cross_gate"}
_PTX = re.compile(rb"\s*(?://[^\n]*\n\s*)*\.version \d+\.\d+\s+\.target sm_(\d+)\s")
_RECORDS = {"PDS_F32": "fp32", "PDS_BF16": "bf16", "PDS_I8": "int8", "PDS_I4": "int4"}


def check_plan(plan: Plan, progress: Callable[[int], None] | None = None) -> list[str]:
    """Every problem of a plan, one line each; empty when it is sound. Reads every byte of it.

    `progress` is told bytes read.
    """
    problems = plan.hash_problems(progress)
    for check in (_schema, _programs, _fields, _target, _kernels, _tokenizer):
        try:
            problems += check(plan)
        except PdscopeError as error:
            problems.append(str(error))
    if not problems:  # else the hash differs because of them
        problems += _hash(plan)
    return problems


def _hash(plan: Plan) -> Iterator[str]:
    said = re.search(_HASH, plan.read_text("src/plan.c"))
    yield from _compare(plan, "plan_hash", said[1] if said else None, "src/plan.c")


def _schema(plan: Plan) -> Iterator[str]:
    check_full(plan.data)
    yield from ()


def _programs(plan: Plan) -> Iterator[str]:
    """Texts keep the rules and are what the binaries hold; plan.json counts those of the CPU, which
    a plan for a GPU has too."""
    if plan.gpu is not None:
        _decoded(plan, "programs/gpu/", "program.gpu.bin")
    decoded = _decoded(plan, "programs/", "program.bin")
    instructions = sum(len(p.instrs) for p in decoded)
    yield from _compare(plan, "programs.count", len(decoded), "program.bin")
    yield from _compare(plan, "programs.instructions", instructions, "program.bin")


def _decoded(plan: Plan, folder: str, binary: str) -> list[Program]:
    """The programs of a binary. Raises PlanError if they are not those of the folder's texts."""
    programs: list[Program] = []
    for name in plan.files:
        if name.startswith(folder) and "/" not in name.removeprefix(folder):
            programs += parse_programs(plan.read_text(name), name)
    programs.sort(key=program_order)
    for program in programs:
        verify(program)
    for phase in Phase:
        if sequence := [p for p in programs if p.phase is phase]:
            verify_sequence(sequence)
    data = plan.read_bytes(binary)
    decoded = decode(data)
    for text, found in zip(programs, decoded, strict=False):
        if text != found:
            raise PlanError(
                f"{binary}: {found.name} differs from {folder}{text.file_stem}.plan: {_EDITED}"
            )
    if len(programs) != len(decoded) or encode(programs) != data:
        raise PlanError(
            f"{binary}: holds {len(decoded)} programs, {folder} {len(programs)}, and they are not "
            f"the same: {_EDITED}"
        )
    return decoded


def _fields(plan: Plan) -> Iterator[str]:
    problems = list(_source(plan))
    yield from problems
    if not problems:  # else what is derived from the wrong value would all differ
        yield from _derived(plan)


def _source(plan: Plan) -> Iterator[str]:
    """What plan.json and src/plan.c both say."""
    source = plan.read_text("src/plan.c")
    fields: list[tuple[str, str, Callable[[str], Any]]] = [
        ("generator", r"Generated by (pdscope \S+) from", str),
        ("dtype", r"\.embed = \{ (\w+),", lambda s: _RECORDS.get(s, s)),
        ("target.features", r'\.required_features = "([^"]*)"', str.split),
        *((f"model.{k}", rf"\.{k} = (\d+)", int) for k in ("hidden", "vocab")),
        ("model.layers", r"\.n_layers = (\d+)", int),
        *(
            (k, rf"\.{k} = (\d+)", int)
            for k in ("max_context", "max_rows", "max_logits", "kv_block")
        ),
    ]
    for name, pattern, value in fields:
        if not (found := re.search(pattern, source)):
            raise PlanError(f"src/plan.c: has no {name}: {_EDITED}")
        yield from _compare(plan, name, value(found[1]), "src/plan.c")
    predicts = re.search(r"\.predictor = \{ (\w+),", source)
    kind = _PREDICTORS.get(predicts[1], predicts[1]) if predicts else "none"
    yield from _compare(plan, "predictor", kind, "src/plan.c")


def _derived(plan: Plan) -> Iterator[str]:
    """Everything that follows from the graph, the dtype and the limits, computed again."""
    data = plan.data
    graph = parse_graph(plan.read_text("graph.txt"))
    model = Lower(data["dtype"], data["max_context"], data["predictor"]).run(graph)
    said = data.get("gpu")
    memory = PlanMemory(data["max_rows"], *((PREDICT_ROWS,) if said else ())).run(model)
    gpu = PlanGpu(said["mem"], said["reserve"], said["policy"]).run(model, memory) if said else None
    memory = memory.with_programs(len(plan.read_bytes("program.bin")))
    for name, value in _expected(plan, model, memory, gpu).items():
        yield from _compare(plan, name, value, "graph.txt")
    yield from _memory_table(plan, model, memory_table(memory, gpu))
    yield from _costs(plan, model)
    text = plan.read_text("src/plan.c")
    own_hash = re.search(_HASH, text)
    said = text.splitlines()
    source = plan_source(
        model,
        memory,
        memory.program_bytes,
        own_hash[1] if own_hash else "",
        data["target"]["features"],
        data["generator"],
        FORMAT_VERSION,
    ).splitlines()
    for number, (line, other) in enumerate(zip(said, source, strict=False), 1):
        if line != other:
            yield (
                f"src/plan.c:{number}: {_short(line)!r}, graph.txt and plan.json give "
                f"{_short(other)!r}: {_EDITED}"
            )
            return
    if len(said) != len(source):
        yield f"src/plan.c: {len(said)} lines, graph.txt gives {len(source)}: {_EDITED}"


def _expected(
    plan: Plan, model: LoweredModel, memory: MemoryPlan, gpu: GpuMemory | None
) -> dict[str, Any]:
    """Fields of plan.json by their dotted names."""
    dummy = plan.model["weights_sha256"] == DUMMY_WEIGHTS
    return {
        **flatten(derived_fields(model, memory, gpu)),
        "model.load_format": "dummy" if dummy else "safetensors",
        **{_size_field(plan, file.path): file.bytes for file in model.files},
    }


def _size_field(plan: Plan, path: str) -> str:
    """The field of plan.json with a weight file's size."""
    return f"absent_weights.{path}" if plan.absent_weights else f"files.{path}.bytes"


def _memory_table(plan: Plan, model: LoweredModel, table: dict[str, Any]) -> Iterator[str]:
    if "predictors" in plan.memory_table():
        try:
            table["predictors"] = predictor_table(model, json.loads(plan.read_text(PREDICTORS)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{PREDICTORS}: no predictors are there ({error}): {_EDITED}") from None
    said, found = flatten(plan.memory_table()), flatten(table)
    off = [n for n in sorted(said.keys() | found.keys()) if said.get(n) != found.get(n)]
    if off:
        more = f" (and {len(off) - 1} more)" if len(off) > 1 else ""
        yield (
            f"memory.json: {off[0]}: {said.get(off[0])} is not {found.get(off[0])}, as graph.txt "
            f"and plan.json give{more}: {_EDITED}"
        )


def _costs(plan: Plan, model: LoweredModel) -> Iterator[str]:
    """costs.json, where there is one, is a table of this model."""
    if (table := CostTable.of_plan(plan)) is not None:
        table.check_model(model_key(model), JSON)
    yield from ()


def _target(plan: Plan) -> Iterator[str]:
    """The library's architecture, and the kernel paths that the required features allow."""
    target = plan.data["target"]
    head = plan.read_bytes("lib/libpdscope.so")[:20]
    if head[:4] != b"\x7fELF" or len(head) < 20:
        raise PlanError(f"lib/libpdscope.so: is no ELF library: {_EDITED}")
    (machine,) = struct.unpack_from("<H", head, 18)
    found = _MACHINES.get(machine, f"ELF machine {machine}")
    yield from _compare(plan, "target.arch", found, "lib/libpdscope.so")
    paths = {n: p for n, p in ISA_PATHS.items() if p.arch in (target["arch"], "any")}
    features = set(target["features"])
    allowed = [n for n, p in paths.items() if set(p.features) <= features]
    # A plan for any CPU requires nothing, and has every path.
    if features or target["isa"] != list(paths):
        yield from _compare(plan, "target.isa", allowed, "the required features")


def _kernels(plan: Plan) -> Iterator[str]:
    """Images of GPU kernels are what their names say, and belong to a plan with a GPU."""
    for name in plan.kernels:
        if plan.gpu is None:
            raise PlanError(f"{name}: is of a GPU, but plan.json has none: {_EDITED}")
        found, arch = image_arch(plan.read_bytes(name)), kernel_arch(name)
        if found != arch:
            yield f"{name}: is {found or 'no image of GPU kernels'}, not {arch}: {_EDITED}"


def image_arch(data: bytes) -> str:
    """The architecture that an image of GPU kernels is for: sm_* (a cubin) or compute_* (PTX); ""
    of anything else."""
    if found := _PTX.match(data):
        return f"compute_{found[1].decode()}"
    # A cubin is an ELF file of machine 190. Its architecture is the second byte of e_flags, or the
    # first, before version 8 of the ABI.
    if len(data) < 64 or data[:4] != b"\x7fELF" or data[18:20] != b"\xbe\0":
        return ""
    return f"sm_{data[49] if data[8] >= 8 else data[48]}"


def _tokenizer(plan: Plan) -> Iterator[str]:
    """Token ids and tokenizer, as the copied files of the model say."""
    if added := [name for name in COPIED if name in plan.unlisted_files()]:
        raise PlanError(
            f"{added[0]}: is not listed in plan.json: remove it, or recompile the model"
        )
    said = plan.data["generation"]
    # What generation_config.json leaves open came from config.json, which a plan does not hold.
    rest = {f"{name}_token_id": value for name, value in said.items()}
    for name, value in generation_ids(plan.path, rest, plan.vocab).items():
        yield from _compare(plan, f"generation.{name}", value, "generation_config.json")
    file = "tokenizer.json" if "tokenizer.json" in plan.files else None
    yield from _compare(plan, "tokenizer.file", file, "files")
    usable, _ = chat_template(plan.path)
    yield from _compare(plan, "tokenizer.chat_template", usable, "the tokenizer's files")


def _compare(plan: Plan, name: str, found: object, where: str) -> Iterator[str]:
    """The problem, if the field `name` (dotted) of plan.json is not `found`."""
    said: Any = plan.data
    parts = name.split(".")
    if name.startswith("files."):
        parts = ["files", name[6:-6], "bytes"]
    elif name.startswith("absent_weights."):
        parts = name.split(".", 1)
    for part in parts:
        said = said.get(part) if isinstance(said, dict) else None
    if said != found:
        yield f"plan.json: {': '.join(parts)}: {said} is not {found}, as {where} gives: {_EDITED}"


def _short(line: str) -> str:
    return line.strip() if len(line.strip()) <= 60 else line.strip()[:57] + "..."
