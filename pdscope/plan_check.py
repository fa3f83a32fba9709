"""The whole check of a plan: hashes, schema, programs. Behind `pdscope-inspect --verify`.

May import pdscope.{errors,ir,plan,schema}.
"""

import re
from collections.abc import Callable

from pdscope.errors import PlanError
from pdscope.ir.encode import decode, encode, program_order
from pdscope.ir.graph import GateAttrs
from pdscope.ir.graph_text import parse_graph
from pdscope.ir.isa import ISA_HASH, Phase
from pdscope.ir.program import Program
from pdscope.ir.text import parse_programs
from pdscope.ir.verify import verify, verify_sequence
from pdscope.plan import Plan
from pdscope.schema import check_full


def check_plan(plan: Plan, progress: Callable[[int], None] | None = None) -> list[str]:
    """Every problem of a plan, one line each; empty when it is sound. Reads every byte of it.

    `progress` is told bytes read.
    """
    problems = plan.hash_problems(progress)
    for check in (_check_schema, _check_programs, _check_fields):
        try:
            check(plan)
        except PlanError as error:
            problems.append(str(error))
    return problems


def _check_schema(plan: Plan) -> None:
    check_full(plan.data)


def _check_programs(plan: Plan) -> None:
    programs: list[Program] = []
    for name in plan.program_files():
        programs += parse_programs(plan.read_text(name), name)
    programs.sort(key=program_order)
    for program in programs:
        verify(program)
    for phase in Phase:
        if sequence := [p for p in programs if p.phase is phase]:
            verify_sequence(sequence)
    data = (plan.path / "program.bin").read_bytes()
    decoded = decode(data)
    for text, binary in zip(programs, decoded, strict=False):
        if text != binary:
            raise PlanError(
                f"program.bin: {binary.name} differs from programs/{text.file_stem}.plan: the plan "
                "was edited; recompile the model"
            )
    said = plan.data["programs"]
    found = {
        "count": len(decoded),
        "instructions": sum(len(p.instrs) for p in decoded),
        "isa_hash": f"{ISA_HASH:08x}",
    }
    if len(programs) != len(decoded) or encode(programs) != data:
        raise PlanError(
            f"program.bin: holds {len(decoded)} programs, programs/ {len(programs)}, and they "
            "are not "
            "the same: the plan was edited; recompile the model"
        )
    for key, value in found.items():
        if said[key] != value:
            raise PlanError(
                f"plan.json: programs: {key} is {said[key]}, found {value}: the plan was edited "
                "or is "
                "of another PDScope; recompile the model"
            )


def _check_fields(plan: Plan) -> None:
    """plan.json repeats what graph.txt, memory.json and plan.c say: they must agree."""
    graph = parse_graph(plan.read_text("graph.txt"))
    gates = [n.attrs for n in graph.nodes if isinstance(n.attrs, GateAttrs)]
    model, source = plan.model, plan.read_text("src/plan.c")
    pairs: list[tuple[str, object, object]] = [
        ("model: architecture", model["architecture"], graph.architecture),
        ("model: hidden", model["hidden"], graph.hidden),
        ("model: vocab", model["vocab"], graph.vocab),
        ("model: layers", model["layers"], graph.layers),
        ("model: experts", model["experts"], gates[0].experts if gates else 0),
        ("model: top_k", model["top_k"], gates[0].top_k if gates else 0),
    ]
    sizes = [entry["bytes"] for entry in plan.memory_table()["weights"]]
    pairs.append(("memory: weights", plan.data["memory"]["weights"], sum(sizes)))
    if found := re.search(r'\.required_features = "([^"]*)"', source):
        pairs.append(("target: features", plan.data["target"]["features"], found[1].split()))
    if found := re.search(r"\.act_dtype = (\w+)", source):
        pairs.append(("dtype", plan.data["dtype"] == "fp32", found[1] == "PDS_F32"))
    for name, said, other in pairs:
        if said != other:
            raise PlanError(
                f"plan.json: {name}: {said} is not {other}, as the rest of the plan says: the plan "
                "was edited; recompile the model"
            )
